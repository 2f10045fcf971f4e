# SPDX-License-Identifier: Apache-2.0
"""Attention of the Hopper kernels over caches of e4m3 codes: the bits of those over the values."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from attention_cases import AttentionCase
from diffulex import ops
from scaled_caches import NEVER, coded_caches

pytestmark = pytest.mark.cuda

BLOCK = 32


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if not ops.has_hopper_kernels(torch.device("cuda")):
        pytest.skip("needs the Hopper kernels")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests of (context, rows in flight)."""

    parts: tuple[tuple[int, int], ...]
    dim: int = 128
    heads: tuple[int, int] = (8, 2)
    page: int = 32
    splits: int = 0
    window: int = 0
    softcap: float = 0.0
    kind: ops.MaskKind = ops.MaskKind.BLOCK_CAUSAL
    #: Elements between one head of the caches and the next, beside its own.
    gap: int = 0


def values_of(cache: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[pages, page, heads, D] bfloat16: what codes and scale bytes stand for."""
    factor = torch.exp2(scale.permute(0, 2, 1).double() - 127)[..., None]
    factor = torch.where(scale.permute(0, 2, 1)[..., None] == NEVER, torch.nan, factor)
    return (cache.double() * factor).to(torch.bfloat16)


def stored(batch: Batch, seed: int = 0) -> tuple[AttentionCase, AttentionCase]:
    """The batch over codes, whose unwritten slots hold what no one may read, and over their values."""
    torch.manual_seed(seed)
    num_q, num_kv = batch.heads
    counts = [-(-context // batch.page) for context, _ in batch.parts]
    rows = sum(length for _, length in batch.parts)
    num_pages = sum(counts) + 3
    caches = {
        name: part.cuda()
        for name, part in coded_caches(num_pages, batch.page, num_kv, batch.dim + batch.gap).items()
    }
    pages = torch.randperm(num_pages, device="cuda", dtype=torch.int32)[: sum(counts)].split(counts)
    table = torch.full((len(counts), max([*counts, 1]) + 1), -1, dtype=torch.int32, device="cuda")
    for row, mine, (context, _) in zip(table, pages, batch.parts):
        row[: len(mine)] = mine
        positions = torch.arange(context, device="cuda")
        slots = mine[positions // batch.page].long() * batch.page + positions % batch.page
        magnitude = 2.0 ** torch.randint(-3, 2, (2, context, num_kv, 1), device="cuda").float()
        k, v = (torch.randn(2, context, num_kv, batch.dim, device="cuda") * magnitude).bfloat16()
        ops.store_kv_cache(k, v, slot_mapping=slots, **caches)
    packed = torch.randn(rows, num_q + 2 * num_kv, batch.dim, device="cuda").bfloat16()
    q, k, v = torch.split(packed, [num_q, num_kv, num_kv], 1)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    ends = torch.tensor([length for _, length in batch.parts]).cumsum(0).tolist()
    shared: dict[str, torch.Tensor | None] = {
        "q": q,
        "k": k,
        "v": v,
        "page_table": table,
        "cu_seqlens_q": ints([0, *ends]),
        "context_lens": ints([context for context, _ in batch.parts]),
        "valid_slices": ints(ends),
        "mask_kinds": ints([int(batch.kind)] * len(ends)),
    }
    numbers: dict[str, Any] = {
        "scale": batch.dim**-0.5,
        "softcap": batch.softcap,
        "block_size": BLOCK,
        "sliding_window": batch.window,
        "max_seqlen_q": max(length for _, length in batch.parts),
        "max_context_len": max(context for context, _ in batch.parts),
        "num_splits": batch.splits,
        "kv_layout": 0,
    }
    plain = {
        f"{name}_cache": values_of(caches[f"{name}_cache"], caches[f"{name}_scale"])
        for name in ("k", "v")
    }
    return (
        AttentionCase({**shared, **caches}, numbers, []),
        AttentionCase({**shared, **plain}, numbers, []),
    )


def assert_same_bits(codes: AttentionCase, values: AttentionCase) -> None:
    for found, want in zip(codes.run(), values.run()):
        torch.cuda.synchronize()
        assert not torch.isnan(found).any()
        assert torch.equal(found, want)


DIMS = pytest.mark.parametrize("dim", [64, 128, 256, 512])


def test_the_smallest_call() -> None:
    """One page and one row: what a hang is found with."""
    assert_same_bits(*stored(Batch(((8, 1),), page=8)))


@DIMS
@pytest.mark.parametrize("page", [8, 16, 32, 64, 128, 256])
def test_pages(dim: int, page: int) -> None:
    """Contexts that end in a page, behind it and one short of it."""
    parts = tuple((context, 32) for context in (page, page + 1, 3 * page - 1, 0, 700))
    assert_same_bits(*stored(Batch(parts, dim, page=page)))


@DIMS
@pytest.mark.parametrize("splits", [0, 1, 2, 5, 16, 32])
@pytest.mark.parametrize("length", [1, 16, 32, 96])
def test_decode(dim: int, splits: int, length: int) -> None:
    """Ragged batches, in clusters and in two kernels; tiles of 64 and 128 rows."""
    parts = ((1500, length), (31, length), (4096, length), (0, 1), (128, length))
    assert_same_bits(*stored(Batch(parts, dim, splits=splits)))


@DIMS
@pytest.mark.parametrize("context", [0, 77, 1024])
def test_prefill(dim: int, context: int) -> None:
    """Tiles in flight, alone and before cached ones, more units than processors."""
    assert_same_bits(*stored(Batch(((context, 800), (64, 129), (context, 260)), dim)))


@DIMS
@pytest.mark.parametrize("window", [1, 40, 200, 1024])
def test_windows(dim: int, window: int) -> None:
    """Of the first tiles some pages are never fetched."""
    assert_same_bits(*stored(Batch(((3000, 32), (100, 64), (900, 300)), dim, window=window)))


@DIMS
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (28, 4), (64, 1), (16, 16)])
def test_groups(dim: int, heads: tuple[int, int]) -> None:
    assert_same_bits(*stored(Batch(((600, 32), (33, 4)), dim, heads, softcap=30.0)))


@DIMS
def test_heads_with_gaps(dim: int) -> None:
    assert_same_bits(*stored(Batch(((300, 32), (70, 5)), dim, gap=64)))


@pytest.mark.parametrize("most", [32, 69])
@DIMS
def test_many_units(dim: int, most: int) -> None:
    """Every CTA takes several units: rings and phases go on from one to the next. Two heads share
    keys, so that 32 rows take tiles of 64, with two converters, and 69 those of 128, with one."""
    lengths = random.Random(dim)
    parts = tuple((lengths.randrange(900), lengths.randint(1, most)) for _ in range(300))
    assert_same_bits(*stored(Batch(parts, dim, (8, 4), page=16, splits=1)))


@DIMS
def test_unmapped_pages(dim: int) -> None:
    """Pages that are not there are zeros that no row sees."""
    codes, values = stored(Batch(((1000, 32), (500, 32)), dim, page=16))
    for case in (codes, values):
        table = case.tensors["page_table"]
        assert table is not None
        table = table.clone()
        table[0, 3:9] = -1
        table[1, 0] = -5
        table[1, 20] = -1
        case.tensors["page_table"] = table
    assert_same_bits(codes, values)


@DIMS
def test_heads_with_nan_stay_visible(dim: int) -> None:
    codes, values = stored(Batch(((300, 32), (300, 32)), dim))
    table = codes.tensors["page_table"]
    assert table is not None
    page = int(table[0, 2])
    for case in (codes, values):
        for name in ("k", "v"):
            cache, scale = case.tensors[f"{name}_cache"], case.tensors.get(f"{name}_scale")
            assert cache is not None
            if scale is None:
                cache[page, 3, 1] = torch.nan
            else:
                cache.view(torch.uint8)[page, 3, 1] = 0
                scale[page, 1, 3] = NEVER
    for found, want in zip(codes.run(), values.run()):
        assert torch.equal(torch.isnan(found), torch.isnan(want))
        assert torch.isnan(found).any()
        assert torch.equal(found.nan_to_num(7.0), want.nan_to_num(7.0))


def test_every_code_below_every_scale() -> None:
    """The values of all codes, by way of the products."""
    codes, _ = stored(Batch(((512, 32),), 256, (1, 1), page=64))
    cache, scale = codes.tensors["v_cache"], codes.tensors["v_scale"]
    k_cache, k_scale = codes.tensors["k_cache"], codes.tensors["k_scale"]
    assert cache is not None
    assert scale is not None
    assert k_cache is not None
    assert k_scale is not None
    every = torch.arange(256, dtype=torch.uint8, device="cuda")
    every = torch.where(every & 0x7F == 0x7F, 0, every)
    cache.view(torch.uint8)[:] = every
    scale[:] = torch.arange(scale.numel(), device="cuda").view(scale.shape) % 108 + 27
    k_cache.view(torch.uint8)[:] = every.flip(0)
    k_scale[:] = scale // 2 + 20
    values = dataclasses.replace(codes, tensors=dict(codes.tensors))
    for name in ("k", "v"):
        part, byte = values.tensors[f"{name}_cache"], values.tensors.pop(f"{name}_scale")
        assert part is not None
        assert byte is not None
        values.tensors[f"{name}_cache"] = values_of(part, byte)
    assert_same_bits(codes, values)


@DIMS
def test_unaligned_scales_take_another_kernel(dim: int) -> None:
    """Bytes that cannot be copied by fours: near the result, not its bits."""
    codes, _ = stored(Batch(((700, 32), (40, 32)), dim))
    other = dataclasses.replace(codes, tensors=dict(codes.tensors))
    for name in ("k_scale", "v_scale"):
        scale = codes.tensors[name]
        assert scale is not None
        room = torch.full((scale.numel() + 1,), NEVER, dtype=torch.uint8, device="cuda")
        room[1:] = scale.flatten()
        other.tensors[name] = room[1:].view(scale.shape)
    assert kernels_of(codes)
    assert all("sm90" in name for name in kernels_of(codes))
    assert not any("sm90" in name for name in kernels_of(other))
    torch.testing.assert_close(codes.run()[0], other.run()[0], rtol=2e-2, atol=2e-2)


def kernels_of(case: AttentionCase) -> list[str]:
    """Names of the attention kernels that a call launches."""
    case.run()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        case.run()
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages() if "attention_kernel" in event.key]


@DIMS
def test_a_store_in_front(dim: int) -> None:
    """Codes and scales that the kernel ahead has just written, over and over; and no call differs."""
    codes, _ = stored(Batch(((256, 32), (512, 32)), dim))
    caches = {
        name: part for name, part in codes.tensors.items() if "cache" in name or "scale" in name
    }
    first = caches["k_cache"]
    assert first is not None
    num_slots = first.shape[0] * first.shape[1]
    rows = torch.randn(8, 2, num_slots, 2, dim, device="cuda").bfloat16()
    slots = torch.arange(num_slots, device="cuda")
    wants = []
    for k, v in rows:
        ops.store_kv_cache(k, v, slot_mapping=slots, **caches)
        torch.cuda.synchronize()
        wants.append(codes.run())
    for turn in range(40):
        k, v = rows[turn % 8]
        ops.store_kv_cache(k, v, slot_mapping=slots, **caches)
        for found, want in zip(codes.run(), wants[turn % 8]):
            assert torch.equal(found, want)


def test_replays_of_a_graph() -> None:
    codes, values = stored(Batch(((9000, 32),) * 2))
    want = values.run()
    codes.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = codes.run()
    for _ in range(20):
        graph.replay()
    for ours, theirs in zip(found, want):
        assert torch.equal(ours, theirs)
