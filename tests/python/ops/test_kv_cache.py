# SPDX-License-Identifier: Apache-2.0
"""store_kv_cache, load_kv_cache and copy_kv_pages in both layouts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from diffulex import ops
from reference import dense as oracles

LAYOUTS = pytest.mark.parametrize("layout", [0, 1])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def caches(
    layout: int,
    num_pages: int,
    page_size: int,
    heads: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    *,
    width: int = 8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned caches."""
    if layout == 0:
        shapes = [(num_pages, page_size, heads, dim)] * 2
    else:
        shapes = [
            (num_pages, heads, dim // width, page_size, width),
            (num_pages, heads, dim, page_size),
        ]
    k, v = (torch.full(shape, torch.nan, dtype=dtype, device=device) for shape in shapes)
    return k, v


def slot_rows(cache: torch.Tensor, which: str, layout: int, page_size: int) -> np.ndarray:
    """[num_slots, heads, D] view of a cache, slot by slot."""
    array = cache.cpu().float().numpy()
    rows = [
        oracles.cached_row(array, which, layout, slot // page_size, slot % page_size)
        for slot in range(array.shape[0] * page_size)
    ]
    return np.stack(rows)


@DTYPES
@LAYOUTS
@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (3, 80), (1, 128)])
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_store(
    device: str,
    dtype: torch.dtype,
    layout: int,
    heads: int,
    dim: int,
    page_size: int,
    index: torch.dtype,
) -> None:
    num_pages, num_rows = 5, 11
    k_cache, v_cache = caches(layout, num_pages, page_size, heads, dim, dtype, device)
    packed = torch.randn(num_rows, 2 * heads + 1, dim).to(dtype).to(device)
    k, v = packed[:, :heads], packed[:, heads : 2 * heads]
    slots = torch.randperm(num_pages * page_size)[:num_rows]
    slots[[1, 4, 10]] = -1
    ops.store_kv_cache(k, v, k_cache, v_cache, slots.to(index).to(device), kv_layout=layout)
    for which, cache, rows in (("k", k_cache, k), ("v", v_cache, v)):
        expected = np.full((num_pages * page_size, heads, dim), np.nan, dtype=np.float32)
        for n, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = rows[n].cpu().float().numpy()
        np.testing.assert_array_equal(slot_rows(cache, which, layout, page_size), expected)


@LAYOUTS
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_store_converts_with_round_to_nearest_even(
    device: str, layout: int, source: torch.dtype, target: torch.dtype
) -> None:
    k_cache, v_cache = caches(layout, 2, 8, 2, 64, target, device)
    k, v = (torch.randn(16, 2, 64).to(source).to(device) for _ in range(2))
    ops.store_kv_cache(k, v, k_cache, v_cache, torch.arange(16, device=device), kv_layout=layout)
    for which, cache, rows in (("k", k_cache, k), ("v", v_cache, v)):
        expected = rows.cpu().to(target).float().numpy()
        np.testing.assert_array_equal(slot_rows(cache, which, layout, 8), expected)


def test_store_into_a_capacity_cache(device: str) -> None:
    # A slice of one allocation with more heads and dims than the layer has.
    backing = torch.full((2, 3, 4, 5, 96), 7.0, device=device)
    k_cache, v_cache = backing[0], backing[1]
    k, v = (torch.randn(4, 2, 64, device=device) for _ in range(2))
    ops.store_kv_cache(k, v, k_cache, v_cache, torch.tensor([11, 0, -1, 5], device=device))
    for cache, rows in ((k_cache, k), (v_cache, v)):
        expected = torch.full_like(cache, 7.0)
        for n, slot in ((0, 11), (1, 0), (3, 5)):
            expected[slot // 4, slot % 4, :2, :64] = rows[n]
        assert torch.equal(cache, expected)


@LAYOUTS
@pytest.mark.parametrize("slot", [40, 2**30])
def test_slots_out_of_range(device: str, layout: int, slot: int) -> None:
    k_cache, v_cache = caches(layout, 5, 8, 2, 64, torch.float32, device)
    k, v = (torch.randn(2, 2, 64, device=device) for _ in range(2))
    slots = torch.tensor([3, slot], device=device)
    if device == "cpu":
        with pytest.raises(
            RuntimeError, match=r"^diffulex::store_kv_cache: slot_mapping.*expected"
        ):
            ops.store_kv_cache(k, v, k_cache, v_cache, slots, kv_layout=layout)
        assert torch.isnan(k_cache).all()
    else:
        ops.store_kv_cache(k, v, k_cache, v_cache, slots, kv_layout=layout)
        written = ~np.isnan(slot_rows(k_cache, "k", layout, 8)).any((1, 2))
        assert written.nonzero()[0].tolist() == [3]


@pytest.mark.parametrize("seed", range(12))
def test_load_gathers_cache_and_new_rows(device: str, seed: int) -> None:
    rng = random.Random(seed)
    layout, page_size, heads, dim = rng.randrange(2), rng.choice([4, 8, 16]), 2, 64
    cache_dtype, dtype = (rng.choice([torch.float32, torch.bfloat16]) for _ in range(2))
    num_reqs = rng.randrange(1, 5)
    # Exact multiples of the page have their last page, too.
    contexts = [
        rng.choice([0, page_size, 3 * page_size, rng.randrange(40)]) for _ in range(num_reqs)
    ]
    lengths = [rng.choice([0, 1, 3, 8]) for _ in range(num_reqs)]
    max_pages = 1 + max(-(-c // page_size) for c in contexts)
    num_pages = num_reqs * max_pages
    k_cache, v_cache = caches(layout, num_pages, page_size, heads, dim, cache_dtype, device)
    k_cache.normal_()
    v_cache.normal_()
    page_table = torch.randperm(num_pages).int().view(num_reqs, max_pages)
    if contexts[0] > 0:
        page_table[0, 0] = -1
    starts_q = np.concatenate([[0], np.cumsum(lengths)])
    starts_k = np.concatenate([[0], np.cumsum(np.add(lengths, contexts))])
    k_new, v_new = (torch.randn(starts_q[-1], heads, dim).to(dtype).to(device) for _ in range(2))
    num_rows = int(starts_k[-1]) + 3
    arguments = (
        k_cache,
        v_cache,
        k_new,
        v_new,
        page_table.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        torch.tensor(starts_q, dtype=torch.int32, device=device),
        torch.tensor(starts_k, dtype=torch.int32, device=device),
        num_rows,
    )
    out = ops.load_kv_cache(*arguments, kv_layout=layout)
    for which, cache, new, actual in zip("kv", (k_cache, v_cache), (k_new, v_new), out):
        slots = torch.from_numpy(slot_rows(cache, which, layout, page_size)).to(dtype)
        expected = torch.zeros(num_rows, heads, dim, dtype=dtype)
        for r, context in enumerate(contexts):
            row = int(starts_k[r])
            for j in range(context):
                page = int(page_table[r, j // page_size])
                if page >= 0:
                    expected[row + j] = slots[page * page_size + j % page_size]
            first, last = int(starts_q[r]), int(starts_q[r + 1])
            expected[row + context : row + context + last - first] = new[first:last].cpu()
        assert torch.equal(actual.cpu(), expected)


def test_load_rejects_lengths_that_do_not_add_up() -> None:
    k_cache, v_cache = caches(0, 2, 4, 1, 64, torch.float32, "cpu")
    new = torch.zeros(2, 1, 64)
    one = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"^diffulex::load_kv_cache: cu_seqlens_k.*: expected"):
        ops.load_kv_cache(
            k_cache,
            v_cache,
            new,
            new,
            torch.zeros(1, 1, dtype=torch.int32),
            one,
            torch.tensor([0, 2], dtype=torch.int32),
            torch.tensor([0, 5], dtype=torch.int32),
            6,
        )


@LAYOUTS
@DTYPES
def test_store_then_load_round_trip(device: str, layout: int, dtype: torch.dtype) -> None:
    page_size, context = 8, 24
    k_cache, v_cache = caches(layout, 4, page_size, 2, 64, dtype, device)
    k, v = (torch.randn(context, 2, 64).to(dtype).to(device) for _ in range(2))
    pages = torch.tensor([2, 0, 3], dtype=torch.int32, device=device)
    tokens = torch.arange(context, device=device)
    slots = pages[tokens // page_size] * page_size + tokens % page_size
    ops.store_kv_cache(k, v, k_cache, v_cache, slots, kv_layout=layout)
    empty = torch.zeros(0, 2, 64, dtype=dtype, device=device)
    k_out, v_out = ops.load_kv_cache(
        k_cache,
        v_cache,
        empty,
        empty,
        pages[None],
        torch.tensor([context], dtype=torch.int32, device=device),
        torch.tensor([0, 0], dtype=torch.int32, device=device),
        torch.tensor([0, context], dtype=torch.int32, device=device),
        context,
        kv_layout=layout,
    )
    assert torch.equal(k_out, k)
    assert torch.equal(v_out, v)


@LAYOUTS
@DTYPES
def test_copy_pages(device: str, layout: int, dtype: torch.dtype) -> None:
    k_cache, v_cache = caches(layout, 6, 4, 2, 64, dtype, device)
    k_cache.normal_()
    v_cache.normal_()
    pairs = [[0, 3], [-1, 4], [5, 1], [2, -1]]
    src_dst = torch.tensor(pairs, dtype=torch.int32, device=device)
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    for cache in expected:
        for source, target in pairs:
            if source >= 0 and target >= 0:
                cache[target] = cache[source]
    ops.copy_kv_pages(k_cache, v_cache, src_dst)
    for actual, wanted in zip((k_cache, v_cache), expected):
        assert torch.equal(actual, wanted)


def test_copy_page_out_of_range(device: str) -> None:
    k_cache, v_cache = caches(0, 3, 4, 1, 64, torch.float32, device)
    k_cache.fill_(1)
    v_cache.fill_(2)
    src_dst = torch.tensor([[0, 3]], dtype=torch.int32, device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"^diffulex::copy_kv_pages: src_dst.*expected"):
            ops.copy_kv_pages(k_cache, v_cache, src_dst)
    else:
        ops.copy_kv_pages(k_cache, v_cache, src_dst)
    assert torch.all(k_cache == 1)
    assert torch.all(v_cache == 2)
