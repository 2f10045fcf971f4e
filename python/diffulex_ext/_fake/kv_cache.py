# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the KV cache ops and the cache checks other families share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex_ext._fake.arguments import FakeArguments
from diffulex_ext._fake.registry import FLOATS, INDEX, INT32, register

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

_PAGE_SIZES = (4, 8, 16, 32, 64, 128, 256)


def _check_page_size(arguments: FakeArguments, page_size: int) -> None:
    expected = f"a page size of {_PAGE_SIZES}"
    arguments.require("k_cache", page_size in _PAGE_SIZES, expected, page_size)


def check_caches(
    arguments: FakeArguments,
    k_cache: Tensor,
    v_cache: Tensor,
    num_kv_heads: int,
    head_dim: int,
    kv_layout: int,
    dtypes: Sequence[torch.dtype],
) -> None:
    arguments.choice("kv_layout", kv_layout, 1)
    if kv_layout == 0:
        arguments.tensor("k_cache", k_cache, dtypes, (None,) * 4)
        arguments.tensor("v_cache", v_cache, (k_cache.dtype,), (*k_cache.shape[:2], None, None))
        page_size = k_cache.shape[1]
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            arguments.require(
                name,
                cache.shape[2] >= num_kv_heads,
                f"room for {num_kv_heads} heads",
                cache.shape[2],
            )
            arguments.require(
                name, cache.shape[3] >= head_dim, f"room for head_dim {head_dim}", cache.shape[3]
            )
        _check_page_size(arguments, page_size)
        return
    arguments.tensor("k_cache", k_cache, dtypes, (None, num_kv_heads, None, None, None))
    num_pages, _, groups, page_size, width = k_cache.shape
    arguments.require(
        "k_cache", groups * width == head_dim, f"D/x * x = {head_dim}", groups * width
    )
    arguments.tensor(
        "v_cache", v_cache, (k_cache.dtype,), (num_pages, num_kv_heads, head_dim, page_size)
    )
    _check_page_size(arguments, page_size)


@register("store_kv_cache")
def _store_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    kv_layout: int = 0,
) -> None:
    arguments = FakeArguments("store_kv_cache", k)
    arguments.tensor("k", k, FLOATS, (None, None, None))
    arguments.tensor("v", v, (k.dtype,), k.shape)
    arguments.unsupported("k_scale", k_scale)
    arguments.unsupported("v_scale", v_scale)
    check_caches(arguments, k_cache, v_cache, k.shape[1], k.shape[2], kv_layout, FLOATS)
    arguments.tensor("slot_mapping", slot_mapping, INDEX, (k.shape[0],))


@register("load_kv_cache")
def _load_kv_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_out: Tensor,
    v_out: Tensor,
    *,
    kv_layout: int = 0,
) -> None:
    arguments = FakeArguments("load_kv_cache", k_cache)
    arguments.tensor("k_new", k_new, FLOATS, (None, None, None))
    _, num_kv_heads, head_dim = k_new.shape
    arguments.tensor("v_new", v_new, (k_new.dtype,), k_new.shape)
    arguments.unsupported("k_scale", k_scale)
    arguments.unsupported("v_scale", v_scale)
    check_caches(arguments, k_cache, v_cache, num_kv_heads, head_dim, kv_layout, FLOATS)
    arguments.tensor("page_table", page_table, INT32, (None, None))
    num_reqs = page_table.shape[0]
    arguments.tensor("context_lens", context_lens, INT32, (num_reqs,))
    arguments.tensor("cu_seqlens_q", cu_seqlens_q, INT32, (num_reqs + 1,))
    arguments.tensor("cu_seqlens_k", cu_seqlens_k, INT32, (num_reqs + 1,))
    arguments.tensor("k_out", k_out, (k_new.dtype,), (None, num_kv_heads, head_dim))
    arguments.tensor("v_out", v_out, (k_new.dtype,), k_out.shape)


@register("copy_kv_pages")
def _copy_kv_pages(k_cache: Tensor, v_cache: Tensor, src_dst: Tensor) -> None:
    arguments = FakeArguments("copy_kv_pages", k_cache)
    arguments.require("k_cache", k_cache.dim() >= 2, "at least 2 dimensions", k_cache.dim())
    arguments.tensor("v_cache", v_cache, (v_cache.dtype,), (k_cache.shape[0], *v_cache.shape[1:]))
    arguments.tensor("src_dst", src_dst, INT32, (None, 2))
