# SPDX-License-Identifier: Apache-2.0
"""Block-diffusion paged attention.

Symbols: T packed rows, R requests, Hq and Hkv heads, D head dim. Request r has `context_lens[r]`
cached tokens and the in-flight rows `cu_seqlens_q[r] .. cu_seqlens_q[r + 1]`, of which those below
`valid_slices[r]` are real.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from diffulex.ops.workspace import attention_workspace_bytes, empty_workspace

if TYPE_CHECKING:
    from torch import Tensor


class MaskKind(IntEnum):
    """Which keys a row sees; low byte of `mask_kinds[r]`."""

    CAUSAL = 0
    BLOCK_CAUSAL = 1
    FULL = 2
    PREFIX_FULL = 3
    CACHE_ONLY = 4


MASK_HOLE_BIT = 0x100
"""Bit of `mask_kinds[r]`: cached keys in [prefix_len, padded_prefix_len) are invisible."""

MASK_ANCHOR_BIT = 0x200
"""Bit of `mask_kinds[r]`: every row of the request has the sliding window of its first row."""


class KvLayout(IntEnum):
    """How K and V lie in the cache.

    UNIFIED: both [num_pages, page_size, Hkv, D].
    DISTINCT: K [num_pages, Hkv, D / x, page_size, x], V [num_pages, Hkv, D, page_size].
    """

    UNIFIED = 0
    DISTINCT = 1


def page_size_of(k_cache: Tensor, kv_layout: int) -> int:
    """Tokens per page of a cache in the given layout."""
    return k_cache.shape[1] if kv_layout == KvLayout.UNIFIED else k_cache.shape[3]


@torch.no_grad()
def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    valid_slices: Tensor,
    mask_kinds: Tensor,
    *,
    block_size: int,
    max_seqlen_q: int,
    max_context_len: int,
    scale: float | None = None,
    softcap: float = 0.0,
    sliding_window: int = 0,
    prefix_lens: Tensor | None = None,
    padded_prefix_lens: Tensor | None = None,
    q_starts: Tensor | None = None,
    num_splits: int = 0,
    kv_layout: int = KvLayout.UNIFIED,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Softmax attention of packed rows over cached and in-flight keys.

    Args:
        scale: factor of the scores; None = 1 / sqrt(D).
        padded_prefix_lens: [R] int32; blocks of the mask start at multiples of `block_size` counted
            from here. None = 0.
        out: [T, Hq, D] to fill; None allocates it.
        lse: [T, Hq] float32 to fill with the natural log-sum-exp of the scores; None skips it.
        workspace: scratch of `attention_workspace_bytes`; None allocates it.

    Returns:
        `out`. Rows that see no key and rows past the last request are 0 (lse -inf).
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if workspace is None:
        needed = attention_workspace_bytes(
            page_table.shape[0],
            q.shape[1],
            k.shape[1],
            q.shape[2],
            max_seqlen_q,
            max_context_len,
            num_splits,
            q.device.type,
        )
        workspace = empty_workspace(needed, q.device)
    torch.ops.diffulex.block_attention(
        q,
        k,
        v,
        k_cache,
        v_cache,
        page_table,
        cu_seqlens_q,
        context_lens,
        valid_slices,
        mask_kinds,
        prefix_lens,
        padded_prefix_lens,
        q_starts,
        None,
        None,
        out,
        lse,
        workspace,
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        softcap=softcap,
        block_size=block_size,
        sliding_window=sliding_window,
        max_seqlen_q=max_seqlen_q,
        max_context_len=max_context_len,
        num_splits=num_splits,
        kv_layout=int(kv_layout),
    )
    return out


def visible_keys(
    kind: int,
    positions: Tensor,
    *,
    context_len: int,
    num_valid: int,
    block_size: int,
    sliding_window: int = 0,
    prefix_len: int = 0,
    padded_prefix_len: int = 0,
) -> Tensor:
    """Mask of one request, [rows, context_len + num_valid] bool, for rows at `positions`."""
    end = context_len + num_valid
    origin = max(padded_prefix_len, 0) % block_size
    block_end = ((positions - origin) // block_size + 1) * block_size + origin
    base = kind & 0xFF
    if base == MaskKind.CAUSAL:
        high = positions + 1
    elif base == MaskKind.BLOCK_CAUSAL:
        high = block_end
    elif base == MaskKind.FULL:
        high = torch.full_like(positions, end)
    elif base == MaskKind.PREFIX_FULL:
        high = torch.where(
            positions < prefix_len,
            prefix_len,
            torch.where(positions < padded_prefix_len, padded_prefix_len, block_end),
        )
    elif base == MaskKind.CACHE_ONLY:
        high = torch.full_like(positions, context_len)
    else:
        raise ValueError(f"visible_keys: kind: expected a MaskKind, got {base}")
    keys = torch.arange(end, device=positions.device)
    visible = keys[None, :] < high[:, None].clamp(max=end)
    if sliding_window > 0:
        window_end = positions[:1].expand_as(positions) if kind & MASK_ANCHOR_BIT else positions
        visible &= keys[None, :] > window_end[:, None] - sliding_window
    if kind & MASK_HOLE_BIT:
        in_hole = (keys >= prefix_len) & (keys < min(padded_prefix_len, context_len))
        visible &= ~in_hole[None, :]
    return visible


@torch.no_grad()
def block_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    valid_slices: Tensor,
    mask_kinds: Tensor,
    *,
    block_size: int,
    scale: float | None = None,
    softcap: float = 0.0,
    sliding_window: int = 0,
    prefix_lens: Tensor | None = None,
    padded_prefix_lens: Tensor | None = None,
    q_starts: Tensor | None = None,
    kv_layout: int = KvLayout.UNIFIED,
) -> tuple[Tensor, Tensor]:
    """Pure torch twin of `block_attention` in fp32, with a materialised mask; synchronises.

    Returns:
        (out, lse).
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros_like(q)
    lse = q.new_full((num_tokens, num_q_heads), -torch.inf, dtype=torch.float32)
    starts = cu_seqlens_q.tolist()
    for request, context_len in enumerate(context_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        num_valid = min(max(int(valid_slices[request]) - first, 0), last - first)
        if num_valid == 0:
            continue
        rows = slice(first, first + num_valid)
        cached_k, cached_v, mapped = gather_cached(
            k_cache, v_cache, page_table[request], context_len, num_kv_heads, head_dim, kv_layout
        )
        keys = torch.cat([cached_k.float(), k[rows].float()])
        values = torch.cat([cached_v.float(), v[rows].float()])
        start = context_len if q_starts is None else int(q_starts[request])
        visible = visible_keys(
            int(mask_kinds[request]),
            torch.arange(start, start + num_valid, device=q.device),
            context_len=context_len,
            num_valid=num_valid,
            block_size=block_size,
            sliding_window=sliding_window,
            prefix_len=0 if prefix_lens is None else int(prefix_lens[request]),
            padded_prefix_len=0 if padded_prefix_lens is None else int(padded_prefix_lens[request]),
        )
        visible &= torch.cat([mapped, mapped.new_ones(num_valid)])[None, :]
        # A key no row sees may hold NaN, and 0 * NaN is NaN.
        unseen = ~visible.any(0)
        keys[unseen] = 0
        values[unseen] = 0
        heads = torch.arange(num_q_heads, device=q.device) // (num_q_heads // num_kv_heads)
        scores = torch.einsum("ihd,jhd->hij", q[rows].float(), keys[:, heads]) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = torch.softmax(scores, -1).nan_to_num(0)
        out[rows] = torch.einsum("hij,jhd->ihd", weights, values[:, heads]).to(out.dtype)
        lse[rows] = torch.logsumexp(scores, -1).T
    return out, lse


def gather_cached(
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    context_len: int,
    num_kv_heads: int,
    head_dim: int,
    kv_layout: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cached K and V of one request, [context_len, Hkv, D], and which of them are mapped."""
    page_size = page_size_of(k_cache, kv_layout)
    tokens = torch.arange(context_len, device=k_cache.device)
    page_ids = pages[tokens // page_size].long()
    offsets = tokens % page_size
    mapped = (page_ids >= 0) & (page_ids < k_cache.shape[0])
    shape = (context_len, num_kv_heads, head_dim)
    keys, values = k_cache.new_zeros(shape), v_cache.new_zeros(shape)
    page_ids, offsets = page_ids[mapped], offsets[mapped]
    if kv_layout == KvLayout.UNIFIED:
        keys[mapped] = k_cache[page_ids, offsets, :num_kv_heads, :head_dim]
        values[mapped] = v_cache[page_ids, offsets, :num_kv_heads, :head_dim]
    else:
        keys[mapped] = k_cache[page_ids, :, :, offsets].reshape(-1, num_kv_heads, head_dim)
        values[mapped] = v_cache[page_ids, :, :, offsets]
    return keys, values, mapped
