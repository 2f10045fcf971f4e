# SPDX-License-Identifier: Apache-2.0
"""Preparation of a device, so that nothing is loaded lazily inside CUDA graph capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.ops.acceptance import accept_dmax, accept_edit, accept_gemma
from diffulex.ops.activation import Activation, act_and_mul
from diffulex.ops.attention import KvLayout, MaskKind, block_attention
from diffulex.ops.kv_cache import copy_kv_pages, load_kv_cache, store_kv_cache
from diffulex.ops.linear import linear_packed, pack_weight
from diffulex.ops.moe import fused_experts_packed, fused_moe
from diffulex.ops.norm import add_rms_norm, rms_norm, rms_norm_add
from diffulex.ops.rope import qk_norm_rope, qk_norm_rope_store, rotary_embedding
from diffulex.ops.routing import moe_topk, router_gemm
from diffulex.ops.sampling import (
    accept_mask_fill,
    entropy_bound_mask,
    merge_token_stats,
    sample_filtered,
    token_stats,
)
from diffulex.ops.soft_embedding import soft_embedding
from diffulex.ops.token_merge import (
    MergeKind,
    token_merge_embed,
    token_merge_finalize,
    token_merge_partial,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_PAGE_SIZE = 16
_NUM_PAGES = 32
_NUM_TOKENS = 4
_DISTINCT_WIDTH = 8


def warmup(
    device: torch.device | str = "cuda",
    *,
    dtype: torch.dtype = torch.bfloat16,
    head_dims: Sequence[int] = (128,),
    num_q_heads: int = 4,
    num_kv_heads: int = 1,
    hidden_size: int = 256,
    vocab_size: int = 4096,
    kv_layout: int = KvLayout.UNIFIED,
) -> None:
    """Loads every CUDA kernel, runs the ops once on tiny tensors and waits for the device.

    Call it before the first capture, with the dtype, head dims and head counts of the model: any op of
    any shape can be captured then. What the calls add is torch's own first use of the device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.ops.diffulex_control.warm_kernels(index)
    x = torch.ones(_NUM_TOKENS, hidden_size, dtype=dtype, device=device)
    weight = torch.ones(hidden_size, dtype=dtype, device=device)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x.clone(), weight, 1e-6)
    rms_norm_add(x, x.clone(), weight, 1e-6)
    for act in Activation:
        act_and_mul(x, act)
    if device.type == "cpu" and dtype == torch.float32:
        linear_packed(x, pack_weight(x), _NUM_TOKENS)
    for head_dim in head_dims:
        _warm_heads(device, dtype, head_dim, (num_q_heads, num_kv_heads), kv_layout)
    _warm_sampling(device, dtype, vocab_size)
    _warm_mixes(x)
    _warm_experts(x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _caches(
    device: torch.device, dtype: torch.dtype, num_kv_heads: int, head_dim: int, kv_layout: int
) -> tuple[Tensor, Tensor]:
    if kv_layout == KvLayout.UNIFIED:
        shape = (_NUM_PAGES, _PAGE_SIZE, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(
            shape, dtype=dtype, device=device
        )
    groups = head_dim // _DISTINCT_WIDTH
    k_shape = (_NUM_PAGES, num_kv_heads, groups, _PAGE_SIZE, _DISTINCT_WIDTH)
    v_shape = (_NUM_PAGES, num_kv_heads, head_dim, _PAGE_SIZE)
    return torch.zeros(k_shape, dtype=dtype, device=device), torch.zeros(
        v_shape, dtype=dtype, device=device
    )


def _warm_heads(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: tuple[int, int],
    kv_layout: int,
) -> None:
    num_q_heads, num_kv_heads = num_heads
    k_cache, v_cache = _caches(device, dtype, num_kv_heads, head_dim, kv_layout)
    positions = torch.arange(_NUM_TOKENS, device=device)
    angles = torch.zeros(_NUM_TOKENS, head_dim, device=device)
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.ones(_NUM_TOKENS, width, dtype=dtype, device=device)
    weight = torch.ones(head_dim, dtype=dtype, device=device)
    heads = qkv.view(_NUM_TOKENS, -1, head_dim)
    q, k, v = torch.split(heads, [num_q_heads, num_kv_heads, num_kv_heads], 1)
    for neox in (True, False):
        rotary_embedding(positions, q, k, angles, head_dim=head_dim, neox=neox)
        qk_norm_rope(
            qkv,
            positions,
            angles,
            weight,
            weight,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            eps=1e-6,
            neox=neox,
        )
        qk_norm_rope_store(
            qkv,
            positions,
            angles,
            weight,
            weight,
            k_cache,
            v_cache,
            positions,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            eps=1e-6,
            neox=neox,
            kv_layout=kv_layout,
        )
    store_kv_cache(k, v, k_cache, v_cache, positions.int(), kv_layout=kv_layout)
    copy_kv_pages(k_cache, v_cache, torch.tensor([[0, 1]], dtype=torch.int32, device=device))
    context_len = _PAGE_SIZE * _NUM_PAGES
    page_table = torch.arange(_NUM_PAGES, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([context_len], dtype=torch.int32, device=device)
    rows = torch.tensor([0, _NUM_TOKENS], dtype=torch.int32, device=device)
    kinds = torch.full_like(lens, MaskKind.BLOCK_CAUSAL)
    # One and several splits are different kernels.
    for num_splits in (1, 2):
        block_attention(
            q,
            k,
            v,
            k_cache,
            v_cache,
            page_table,
            rows,
            lens,
            rows[1:],
            kinds,
            block_size=_NUM_TOKENS,
            max_seqlen_q=_NUM_TOKENS,
            max_context_len=context_len,
            num_splits=num_splits,
            kv_layout=kv_layout,
        )
    load_kv_cache(
        k_cache,
        v_cache,
        k,
        v,
        page_table,
        lens,
        rows,
        torch.tensor([0, context_len + _NUM_TOKENS], dtype=torch.int32, device=device),
        context_len + _NUM_TOKENS,
        kv_layout=kv_layout,
    )


def _warm_sampling(device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    logits = torch.zeros(_NUM_TOKENS, vocab_size, dtype=dtype, device=device)
    temperature = torch.ones(_NUM_TOKENS, device=device)
    uniforms = torch.full((_NUM_TOKENS,), 0.5, dtype=torch.float64, device=device)
    token_stats(logits, inv_temperature=temperature, uniforms=uniforms)
    token_stats(logits, top_k=2)
    part = token_stats(logits, partial=True)
    merge_token_stats(part.ids[None], part.stats[None])
    top_p = torch.full((_NUM_TOKENS,), 0.5, device=device)
    sample_filtered(logits, temperature, uniforms, part, top_p=top_p)
    row_index = torch.arange(_NUM_TOKENS, dtype=torch.int32, device=device)[None]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    one = torch.ones(1, dtype=torch.int32, device=device)
    gate = one.to(torch.uint8)
    threshold = torch.zeros(1, device=device)
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64, device=device)
    block = (tokens, row_index, zero, gate, threshold)
    rows = (part.ids, part.stats)
    accept_mask_fill(*block, zero, *rows, mask_token_id=0)
    accept_edit(*block, threshold, zero, zero, *rows, mask_token_id=0, max_post_edit_steps=1)
    accept_dmax(*block, zero, *rows, mask_token_id=0, merge_top_k=1)
    accept_gemma(
        tokens,
        row_index,
        tokens,
        zero,
        one,
        tokens,
        *rows,
        part.ids,
        entropy_bound=0.1,
        stability_threshold=1,
        confidence_threshold=0.1,
    )
    segments = torch.tensor([0, _NUM_TOKENS], dtype=torch.int32, device=device)
    entropy_bound_mask(temperature, segments, bound=0.1)


def _warm_mixes(x: Tensor) -> None:
    table = x.clone()
    hidden = x.clone()
    ids = torch.zeros(_NUM_TOKENS, 1, dtype=torch.int64, device=x.device)
    probs = torch.ones(_NUM_TOKENS, 1, device=x.device)
    mask = torch.ones(_NUM_TOKENS, dtype=torch.uint8, device=x.device)
    descriptors = (mask, ids, probs, probs[:, 0].contiguous())
    for kind in MergeKind:
        token_merge_embed(hidden, table, *descriptors, mask_token_id=0, merge_kind=kind)
    partial = token_merge_partial(table, *descriptors, mask_token_id=0)
    token_merge_finalize(partial, mask, hidden, renormalize=True)
    logits = torch.zeros(_NUM_TOKENS, _NUM_TOKENS, dtype=x.dtype, device=x.device)
    # Aligned rows of a 16-bit table and others go to different kernels.
    soft_embedding(logits, probs[:, 0].contiguous(), table)
    soft_embedding(logits, probs[:, 0].contiguous(), table[:, 1:])


def _warm_experts(x: Tensor) -> None:
    # Kernels differ by the number of experts and by the rows that an expert gets on average.
    for num_experts in (2, 200, 300):
        moe_topk(torch.zeros(_NUM_TOKENS, num_experts, device=x.device), 1)
    num_experts, width = 2, x.shape[1]
    for dtype in (torch.float32, torch.bfloat16):
        logits = router_gemm(x, torch.ones(num_experts, width, dtype=dtype, device=x.device))
    w13 = x.new_zeros(num_experts, 2 * width, width)
    w2 = x.new_zeros(num_experts, width, width)
    for num_rows in (16, 32, 64, 128):
        rows = x.new_zeros(num_rows, width)
        repeats = num_rows // _NUM_TOKENS
        routing = moe_topk(logits.repeat(repeats, 1), 1)
        fused_moe(rows, w13, w2, *routing)
        offsets = torch.tensor([0, 1, num_rows], dtype=torch.int32, device=x.device)
        fused_experts_packed(rows, w13, w2, offsets)
