# SPDX-License-Identifier: Apache-2.0
"""Paged KV cache: store, gather, copy. A slot is `page_id * page_size + offset`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.ops.attention import KvLayout
from diffulex.ops.fakes import (
    CODES,
    FLOATS,
    INDEX,
    INT32,
    FakeArguments,
    check_caches,
    check_scale_pair,
    check_scale_shapes,
    fake,
)

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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_layout: int = KvLayout.UNIFIED,
) -> None:
    """Writes row n of k and v [N, Hkv, D] to slot `slot_mapping[n]`; negative slots are skipped.

    Args:
        k_scale: [num_pages, Hc, page_size] uint8 beside float8_e4m3fn caches, which hold codes: a
            value is code * 2^(scale - 127), with one scale per slot and head.
        v_scale: as `k_scale`.
    """
    torch.ops.diffulex.store_kv_cache(
        k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale, kv_layout=int(kv_layout)
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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_layout: int = KvLayout.UNIFIED,
) -> tuple[Tensor, Tensor]:
    """Gathers, per request, the cached part and then the in-flight part.

    Args:
        cu_seqlens_k: [R + 1], differences = context length + in-flight rows.
        num_rows: rows of the result, at least `cu_seqlens_k[R]`; further rows are 0.
        k_scale: with codes, as in `store_kv_cache`; so is `v_scale`.

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
        k_scale,
        v_scale,
        k_out,
        v_out,
        kv_layout=int(kv_layout),
    )
    return k_out, v_out


@torch.no_grad()
def copy_kv_pages(
    k_cache: Tensor,
    v_cache: Tensor,
    src_dst: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Copies page `src_dst[i, 0]` to page `src_dst[i, 1]`; pairs with a negative id are skipped.

    Scales, as in `store_kv_cache`, are copied along.
    """
    torch.ops.diffulex.copy_kv_pages(k_cache, v_cache, src_dst, k_scale, v_scale)


@fake("store_kv_cache")
def _store_kv_cache(arguments: FakeArguments, k: Tensor) -> None:
    arguments.check("k", FLOATS, (None, None, None))
    arguments.check("v", (k.dtype,), k.shape)
    check_caches(arguments, k.shape[1], k.shape[2], FLOATS)
    arguments.check("slot_mapping", INDEX, (k.shape[0],))


@fake("load_kv_cache")
def _load_kv_cache(
    arguments: FakeArguments, k_new: Tensor, page_table: Tensor, k_out: Tensor
) -> None:
    arguments.check("k_new", FLOATS, (None, None, None))
    _, num_kv_heads, head_dim = k_new.shape
    arguments.check("v_new", (k_new.dtype,), k_new.shape)
    check_caches(arguments, num_kv_heads, head_dim, FLOATS)
    arguments.check("page_table", INT32, (None, None))
    num_reqs = page_table.shape[0]
    arguments.check("context_lens", INT32, (num_reqs,))
    arguments.check("cu_seqlens_q", INT32, (num_reqs + 1,))
    arguments.check("cu_seqlens_k", INT32, (num_reqs + 1,))
    arguments.check("k_out", (k_new.dtype,), (None, num_kv_heads, head_dim))
    arguments.check("v_out", (k_new.dtype,), k_out.shape)


@fake("copy_kv_pages")
def _copy_kv_pages(arguments: FakeArguments, k_cache: Tensor, v_cache: Tensor) -> None:
    check_scale_pair(arguments)
    arguments.require("k_cache", k_cache.dim() >= 2, "at least 2 dimensions", k_cache.dim())
    arguments.check("v_cache", (v_cache.dtype,), (k_cache.shape[0], *v_cache.shape[1:]))
    if arguments["k_scale"] is not None:
        for name in ("k_cache", "v_cache"):
            arguments.check(name, CODES, (None,) * 4)
        check_scale_shapes(arguments)
    arguments.check("src_dst", INT32, (None, 2))
