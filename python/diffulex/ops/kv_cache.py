# SPDX-License-Identifier: Apache-2.0
"""Paged KV cache: store, gather, copy. A slot is `page_id * page_size + offset`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.ops.attention import KvLayout, gather_cached, page_size_of

if TYPE_CHECKING:
    from torch import Tensor


@torch.no_grad()
def store_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: int = KvLayout.UNIFIED,
) -> None:
    """Writes row n of k and v [N, Hkv, D] to slot `slot_mapping[n]`; negative slots are skipped."""
    torch.ops.diffulex.store_kv_cache(
        k, v, k_cache, v_cache, slot_mapping, None, None, kv_layout=int(kv_layout)
    )


@torch.no_grad()
def load_kv_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    num_rows: int,
    *,
    kv_layout: int = KvLayout.UNIFIED,
) -> tuple[Tensor, Tensor]:
    """Gathers, per request, the cached part and then the in-flight part.

    Args:
        cu_seqlens_k: [R + 1], differences = context length + in-flight rows.
        num_rows: rows of the result, at least `cu_seqlens_k[R]`; further rows are 0.

    Returns:
        (k, v), each [num_rows, Hkv, D] in the dtype of `k_new`.
    """
    shape = (num_rows, *k_new.shape[1:])
    k_out = torch.empty(shape, dtype=k_new.dtype, device=k_new.device)
    v_out = torch.empty_like(k_out)
    torch.ops.diffulex.load_kv_cache(
        k_cache,
        v_cache,
        k_new,
        v_new,
        page_table,
        context_lens,
        cu_seqlens_q,
        cu_seqlens_k,
        None,
        None,
        k_out,
        v_out,
        kv_layout=int(kv_layout),
    )
    return k_out, v_out


@torch.no_grad()
def copy_kv_pages(k_cache: Tensor, v_cache: Tensor, src_dst: Tensor) -> None:
    """Copies page `src_dst[i, 0]` to page `src_dst[i, 1]`; pairs with a negative id are skipped."""
    torch.ops.diffulex.copy_kv_pages(k_cache, v_cache, src_dst)


@torch.no_grad()
def store_kv_cache_reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: int = KvLayout.UNIFIED,
) -> None:
    """Pure torch twin of `store_kv_cache`; synchronises."""
    page_size = page_size_of(k_cache, kv_layout)
    num_kv_heads, head_dim = k.shape[1:]
    rows = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[rows].long()
    pages, offsets = slots // page_size, slots % page_size
    keys, values = k[rows].to(k_cache.dtype), v[rows].to(v_cache.dtype)
    if kv_layout == KvLayout.UNIFIED:
        k_cache[pages, offsets, :num_kv_heads, :head_dim] = keys
        v_cache[pages, offsets, :num_kv_heads, :head_dim] = values
    else:
        k_cache[pages, :, :, offsets] = keys.reshape(
            len(rows), num_kv_heads, k_cache.shape[2], k_cache.shape[4]
        )
        v_cache[pages, :, :, offsets] = values


@torch.no_grad()
def load_kv_cache_reference(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    num_rows: int,
    *,
    kv_layout: int = KvLayout.UNIFIED,
) -> tuple[Tensor, Tensor]:
    """Pure torch twin of `load_kv_cache`; synchronises."""
    num_kv_heads, head_dim = k_new.shape[1:]
    k_out = k_new.new_zeros(num_rows, num_kv_heads, head_dim)
    v_out = torch.zeros_like(k_out)
    for request, context_len in enumerate(context_lens.tolist()):
        first, last = (int(end) for end in cu_seqlens_q[request : request + 2])
        start = int(cu_seqlens_k[request])
        keys, values, _ = gather_cached(
            k_cache, v_cache, page_table[request], context_len, num_kv_heads, head_dim, kv_layout
        )
        middle, end = start + context_len, start + context_len + last - first
        k_out[start:middle], v_out[start:middle] = keys.to(k_out.dtype), values.to(v_out.dtype)
        k_out[middle:end], v_out[middle:end] = k_new[first:last], v_new[first:last]
    return k_out, v_out


@torch.no_grad()
def copy_kv_pages_reference(k_cache: Tensor, v_cache: Tensor, src_dst: Tensor) -> None:
    """Pure torch twin of `copy_kv_pages`; synchronises."""
    pairs = src_dst[(src_dst >= 0).all(1)].long()
    k_cache[pairs[:, 1]] = k_cache[pairs[:, 0]]
    v_cache[pairs[:, 1]] = v_cache[pairs[:, 0]]
