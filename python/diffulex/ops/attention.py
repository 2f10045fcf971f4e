# SPDX-License-Identifier: Apache-2.0
"""Block-diffusion paged attention.

Symbols: T packed rows, R requests, Hq and Hkv heads, D head dim. Request r has `context_lens[r]`
cached tokens and the in-flight rows `cu_seqlens_q[r] .. cu_seqlens_q[r + 1]`, of which those below
`valid_slices[r]` are real.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from diffulex.ops.fakes import FLOAT32, FLOATS, INT32, FakeArguments, check_caches, fake
from diffulex.ops.quantize import QUANT_GROUP, check_code_rows
from diffulex.ops.workspace import attention_workspace_bytes, empty_workspace

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.ops.quantize import QuantizedRows


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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int = 0,
    kv_layout: int = KvLayout.UNIFIED,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    rows: QuantizedRows | None = None,
) -> Tensor:
    """Softmax attention of packed rows over cached and in-flight keys.

    Args:
        scale: factor of the scores; None = 1 / sqrt(D).
        padded_prefix_lens: [R] int32; blocks of the mask start at multiples of `block_size` counted
            from here. None = 0.
        k_scale: [num_pages, Hc, page_size] uint8 beside caches of float8_e4m3fn codes, as in
            `store_kv_cache`; so is `v_scale`. The result has the bits of the one for caches of the
            values.
        out: [T, Hq, D] to fill; None allocates it.
        lse: [T, Hq] float32 to fill with the natural log-sum-exp of the scores; None skips it.
        workspace: scratch of `attention_workspace_bytes`; None allocates it.
        rows: get the codes of the rows [T, Hq D] of the result, those of `quantize_rows` with a scale for
            each 128 columns, of which D is a multiple; what `out` holds beside rows of codes only is
            not specified.

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
    codes, codes_scale, codes_only = rows or (None, None, False)
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
        k_scale,
        v_scale,
        out,
        lse,
        workspace,
        codes,
        codes_scale,
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        softcap=softcap,
        block_size=block_size,
        sliding_window=sliding_window,
        max_seqlen_q=max_seqlen_q,
        max_context_len=max_context_len,
        num_splits=num_splits,
        kv_layout=int(kv_layout),
        codes_only=codes_only,
    )
    return out


@fake("block_attention")
def _block_attention(
    arguments: FakeArguments,
    q: Tensor,
    k: Tensor,
    page_table: Tensor,
    out: Tensor,
    codes: Tensor | None,
    codes_scale: Tensor | None,
    scale: float,
    max_seqlen_q: int,
) -> None:
    arguments.check("q", FLOATS, (None, None, None))
    num_tokens, num_q_heads, head_dim = q.shape
    arguments.check("k", (q.dtype,), (num_tokens, None, head_dim))
    num_kv_heads = k.shape[1]
    arguments.require("k", num_kv_heads >= 1, "at least one KV head", num_kv_heads)
    arguments.require(
        "k",
        num_q_heads % num_kv_heads == 0,
        f"a number of KV heads that divides {num_q_heads}",
        num_kv_heads,
    )
    arguments.check("v", (q.dtype,), k.shape)
    check_caches(arguments, num_kv_heads, head_dim, (q.dtype,))
    arguments.check("page_table", INT32, (None, None))
    num_reqs = page_table.shape[0]
    arguments.check("cu_seqlens_q", INT32, (num_reqs + 1,))
    for name in (
        "context_lens",
        "valid_slices",
        "mask_kinds",
        "prefix_lens",
        "padded_prefix_lens",
        "q_starts",
    ):
        arguments.check(name, INT32, (num_reqs,))
    arguments.check("out", (q.dtype,), q.shape)
    arguments.check("lse", FLOAT32, (num_tokens, num_q_heads))
    if codes is not None or codes_scale is not None:
        is_whole = head_dim % QUANT_GROUP == 0
        arguments.require("q", is_whole, "a head dim of a multiple of 128 with codes", head_dim)
        groups = num_q_heads * head_dim // QUANT_GROUP
        arguments.check("codes_scale", FLOAT32, (groups, None))
        check_code_rows(arguments, "out", out.flatten(1), codes, codes_scale, "codes_scale")
    arguments.require("scale", math.isfinite(scale) and scale > 0, "a finite number above 0", scale)
    arguments.at_least("softcap", 0)
    arguments.at_least("block_size", 1)
    arguments.at_least("sliding_window", 0)
    arguments.at_least("max_context_len", 0)
    arguments.at_least("num_splits", 0)
    if max_seqlen_q < 1:
        arguments.require("max_seqlen_q", num_tokens == 0, "a value >= 1", max_seqlen_q)
