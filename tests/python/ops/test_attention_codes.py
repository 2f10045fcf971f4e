# SPDX-License-Identifier: Apache-2.0
"""Codes of what attention writes: those of `quantize_rows`, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffulex import ops
from scaled_caches import coded_caches

CODES = pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
SOURCES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
DIMS = pytest.mark.parametrize("head_dim", [128, 256, 512])
Call = dict[str, Any]


def call_of(
    device: str,
    head_dim: int,
    dtype: torch.dtype,
    requests: tuple[tuple[int, int, int], ...],
    *,
    heads: tuple[int, int] = (8, 2),
    page_size: int = 16,
    num_splits: int = 0,
    has_coded_cache: bool = False,
) -> Call:
    """Attention of requests of so many rows, real rows and cached keys, and of two rows behind the last.

    Values of one head are zeros, of one sequence far from one in size; one row sees a NaN.
    """
    generator = torch.Generator().manual_seed(head_dim + len(requests))
    q_heads, kv_heads = heads

    def normal(*shape: int) -> torch.Tensor:
        rows = torch.randn(*shape, head_dim, generator=generator)
        return (rows * torch.exp2(torch.arange(shape[-1]) * 5.0)[:, None]).to(dtype)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    ends = torch.tensor([rows for rows, _, _ in requests]).cumsum(0).tolist()
    num_rows = ends[-1] + 2
    counts = [-(-context // page_size) for _, _, context in requests]
    q = torch.randn(num_rows, q_heads, head_dim, generator=generator).to(dtype)
    k = torch.randn(num_rows, kv_heads, head_dim, generator=generator).to(dtype)
    v = normal(num_rows, kv_heads)
    keys = torch.randn(sum(counts) + 1, page_size, kv_heads, head_dim, generator=generator)
    caches = {"k_cache": keys.to(dtype), "v_cache": normal(sum(counts) + 1, page_size, kv_heads)}
    v[:, 0] = 0
    caches["v_cache"][:, :, 0] = 0
    v[ends[0] :, 1] *= 1e-4
    v[0, 1, 5] = torch.nan
    if has_coded_cache:
        coded = coded_caches(sum(counts) + 1, page_size, kv_heads, head_dim)
        slots = torch.arange((sum(counts) + 1) * page_size)
        rows = [caches[name].flatten(0, 1) for name in ("k_cache", "v_cache")]
        ops.store_kv_cache(*rows, slot_mapping=slots, **coded)
        caches = coded
    pages = torch.randperm(sum(counts), generator=generator).int()
    table = torch.full((len(requests), max(1, *counts)), -1, dtype=torch.int32)
    for row, part in zip(table, pages.split(counts)):
        row[: len(part)] = part
    starts = [0, *ends]
    tensors = {"q": q, "k": k, "v": v, **caches, "page_table": table}
    return {
        **{name: tensor.to(device) for name, tensor in tensors.items()},
        "cu_seqlens_q": ints(*starts),
        "context_lens": ints(*(context for _, _, context in requests)),
        "valid_slices": ints(*(start + real for start, (_, real, _) in zip(starts, requests))),
        "mask_kinds": ints(*([int(ops.MaskKind.BLOCK_CAUSAL)] * len(requests))),
        "block_size": 4,
        "max_seqlen_q": max(rows for rows, _, _ in requests),
        "max_context_len": max(context for _, _, context in requests),
        "num_splits": num_splits,
    }


def framed(
    call: Call, kind: torch.dtype, left: int
) -> tuple[ops.QuantizedRows, list[torch.Tensor]]:
    """Memory for codes inside of other memory, and that memory, which holds sevens."""
    rows, heads, dim = call["q"].shape
    frame = torch.full((rows + 2, heads * dim + 16), 7, dtype=torch.uint8, device=call["q"].device)
    codes = frame[1 : rows + 1, left : left + heads * dim].view(kind)
    scale = torch.full((heads * dim // 128, rows + 5), 7.0, device=call["q"].device)
    return ops.QuantizedRows(codes, scale), [frame, scale]


def writes_codes(call: Call, kind: torch.dtype) -> bool:
    """Whether a kernel writes codes in the place of rows, and none quantises rows afterwards."""
    q = call["q"]
    is_hopper = q.device.type == "cuda" and ops.has_hopper_kernels(q.device)
    has_plain_pages = "k_scale" not in call and "kv_layout" not in call
    is_copied = has_plain_pages and 8 <= call["k_cache"].size(1) <= 256
    is_written = q.dtype == torch.bfloat16 and q.size(2) == 128 and kind == torch.float8_e4m3fn
    if not (is_hopper and is_copied and is_written):
        return False
    # Where keys are whole, units must be more than there are multiprocessors.
    num_requests, heads, kv_heads = len(call["context_lens"]), q.size(1), call["k"].size(1)
    tokens = max(1, 128 // (heads // kv_heads))
    units = num_requests * kv_heads * -(-call["max_seqlen_q"] // tokens)
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    return call["num_splits"] > 1 or units > processors


def expect_codes(call: Call, kind: torch.dtype, *, lefts: tuple[int, ...] = (8, 3)) -> None:
    lse = torch.full(call["q"].shape[:2], torch.nan, device=call["q"].device)
    plain = ops.block_attention(**call, lse=lse)
    assert plain.isnan().any()
    assert not plain[-2:].any()
    want = ops.quantize_rows(plain.flatten(1), kind)
    num_rows, width = want.codes.shape
    for left in lefts:  # aligned for pieces of 8, or not
        for codes_only in (False, True):
            rows, (frame, scale) = framed(call, kind, left)
            room = plain.new_full((num_rows + 2, *plain.shape[1:]), 7.0)
            found, found_lse = room[1:-1], torch.full_like(lse, torch.nan)
            ops.block_attention(
                **call, out=found, lse=found_lse, rows=rows._replace(codes_only=codes_only)
            )
            assert torch.equal(rows.codes.view(torch.uint8), want.codes.view(torch.uint8))
            assert torch.equal(rows.scale[:, :num_rows], want.scale[:, :num_rows])
            assert torch.equal(found_lse.nan_to_num(1.0), lse.nan_to_num(1.0))
            if not codes_only:
                assert torch.equal(found.nan_to_num(1.0), plain.nan_to_num(1.0))
            elif left % 8 == 0 and writes_codes(call, kind):
                assert (found == 7).all()
            # Nothing beside them is written.
            assert (room[[0, -1]] == 7).all()
            assert (scale[:, num_rows:] == 7).all()
            frame[1:-1, left : left + width] = 7
            assert (frame == 7).all()


@pytest.mark.every(7)
@CODES
@SOURCES
@DIMS
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_packed_rows(
    device: str, kind: torch.dtype, dtype: torch.dtype, head_dim: int, page_size: int
) -> None:
    """Requests of one to three tiles, with rows that are not real and without a cached key."""
    requests = ((40, 37, 70), (8, 8, 0), (1, 1, 33), (5, 0, 9))
    expect_codes(call_of(device, head_dim, dtype, requests, page_size=page_size), kind)


@CODES
@pytest.mark.parametrize("has_coded_cache", [False, True])
@pytest.mark.parametrize(("num_rows", "pairs"), [(5, 40), (40, 20)])
def test_many_units(
    device: str, kind: torch.dtype, has_coded_cache: bool, num_rows: int, pairs: int
) -> None:
    """More units than multiprocessors, whose keys are whole: one kernel writes their codes."""
    requests = ((num_rows, num_rows - 1, 20), (num_rows, num_rows, 0)) * pairs
    options: Call = {"num_splits": 1, "has_coded_cache": has_coded_cache}
    call = call_of(device, 128, torch.bfloat16, requests, **options)
    expect_codes(call, kind, lefts=(8,))


@pytest.mark.every(7)
@CODES
@SOURCES
@DIMS
@pytest.mark.parametrize("num_splits", [0, 2, 4, 8, 24])
@pytest.mark.parametrize("others", [1, 2])
def test_split_keys(
    device: str,
    kind: torch.dtype,
    dtype: torch.dtype,
    head_dim: int,
    num_splits: int,
    others: int,
) -> None:
    """Few rows of a long context beside short ones: clusters of each size, several, and where units are
    too many for these a second kernel (24 splits beside two others)."""
    requests = ((6, 5, 2100), *((4, 4, 3), (3, 3, 40))[:others])
    call = call_of(device, head_dim, dtype, requests, page_size=64, num_splits=num_splits)
    expect_codes(call, kind, lefts=(8,))


@pytest.mark.every(7)
@CODES
@DIMS
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (16, 2)])
@pytest.mark.parametrize("num_splits", [1, 8])
def test_heads(
    device: str, kind: torch.dtype, head_dim: int, heads: tuple[int, int], num_splits: int
) -> None:
    requests = ((16, 16, 300), (3, 2, 40))
    call = call_of(device, head_dim, torch.bfloat16, requests, heads=heads, num_splits=num_splits)
    expect_codes(call, kind)


@pytest.mark.every(7)
@CODES
@DIMS
@pytest.mark.parametrize("page_size", [8, 256])
@pytest.mark.parametrize("num_splits", [1, 2, 8, 24])
@pytest.mark.parametrize(
    "requests", [((8, 8, 1300), (36, 33, 20)), ((8, 7, 2100), (4, 4, 3), (3, 3, 40))]
)
def test_caches_of_codes(
    device: str,
    kind: torch.dtype,
    head_dim: int,
    page_size: int,
    num_splits: int,
    requests: tuple[tuple[int, int, int], ...],
) -> None:
    options: Call = {"page_size": page_size, "num_splits": num_splits, "has_coded_cache": True}
    expect_codes(call_of(device, head_dim, torch.bfloat16, requests, **options), kind)


@CODES
@pytest.mark.parametrize("head_dim", [128, 384])
def test_other_layouts_and_head_dims(device: str, kind: torch.dtype, head_dim: int) -> None:
    """Which the generic kernels have: other strides of the cache, and three groups a head."""
    call = call_of(device, head_dim, torch.bfloat16, ((8, 6, 90), (4, 4, 600)), num_splits=4)
    if head_dim == 128:
        k, v = call["k_cache"], call["v_cache"]
        call["k_cache"] = k.unflatten(-1, (-1, 8)).permute(0, 2, 3, 1, 4).contiguous()
        call["v_cache"] = v.permute(0, 2, 3, 1).contiguous()
        call["kv_layout"] = ops.KvLayout.DISTINCT
    expect_codes(call, kind)


def test_no_rows_and_no_requests(device: str) -> None:
    call = call_of(device, 128, torch.bfloat16, ((4, 4, 9),))
    for name in ("page_table", "context_lens", "valid_slices", "mask_kinds"):
        call[name] = call[name][:0]
    call["cu_seqlens_q"] = call["cu_seqlens_q"][:1]
    rows, (_, scale) = framed(call, torch.int8, 0)
    ops.block_attention(**call, rows=rows)
    assert not rows.codes.any()
    assert (scale[:, : len(rows.codes)] == 1).all()
    for name in ("q", "k", "v"):
        call[name] = call[name][:0]
    rows, (frame, scale) = framed(call, torch.int8, 0)
    ops.block_attention(**call, rows=rows)
    assert (frame == 7).all()
    assert (scale == 7).all()


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("head_dim", "change", "message"),
    [
        (64, {}, "q: expected a head dim of a multiple of 128 with codes, got 64"),
        (
            128,
            {"codes": None},
            "(codes: expected a tensor, got none|codes_scale: expected none without codes, got )",
        ),
        (128, {"codes_scale": None}, "codes_scale: expected a tensor"),
        (128, {"codes": torch.half}, "codes: expected dtype float8_e4m3fn or int8, got float16"),
        (128, {"codes": (10, 1025)}, "codes: expected shape "),
        (128, {"codes": (11, 1024)}, "codes: expected shape "),
        # One scale of all heads of a row.
        (128, {"codes_scale": (1, 12)}, r"codes_scale: expected shape \[8, \*\], got \[1, 12\]"),
        (128, {"codes_scale": (8, 9)}, "codes_scale: expected at least 10 columns"),
        (128, {"codes_scale": torch.half}, "codes_scale: expected dtype float32, got float16"),
    ],
)
def test_errors(place: str, head_dim: int, change: dict[str, Any], message: str) -> None:
    call = call_of("cpu", head_dim, torch.bfloat16, ((8, 8, 20),))
    made: dict[str, torch.Tensor | None] = {
        "codes": torch.zeros(10, 8 * head_dim, dtype=torch.int8),
        "codes_scale": torch.zeros(8 * head_dim // 128, 12),
    }
    for name, how in change.items():
        part = made[name]
        assert part is not None
        if how is None:
            made[name] = None
        elif isinstance(how, tuple):
            made[name] = torch.zeros(how, dtype=part.dtype)
        else:
            made[name] = part.to(how)
    rows: Any = (*(None if part is None else part.to(place) for part in made.values()), False)
    call = {
        name: part.to(place) if isinstance(part, torch.Tensor) else part
        for name, part in call.items()
    }
    space = torch.empty(0, dtype=torch.uint8, device=place)
    with pytest.raises(RuntimeError, match=rf"^diffulex::block_attention: {message}"):
        ops.block_attention(**call, rows=rows, workspace=space)


def test_heads_lie_side_by_side() -> None:
    call = call_of("cpu", 128, torch.bfloat16, ((8, 8, 20),))
    out = torch.empty(10, 8, 136, dtype=torch.bfloat16)[..., :128]
    rows, _ = framed(call, torch.int8, 0)
    with pytest.raises(RuntimeError, match=r"^diffulex::block_attention: out: expected "):
        ops.block_attention(**call, out=out, rows=rows)


@pytest.mark.cuda
@CODES
@pytest.mark.parametrize("has_coded_cache", [False, True])
@pytest.mark.parametrize("requests", [((32, 32, 2000),), ((32, 30, 100),) * 8, ((300, 300, 0),)])
def test_a_captured_graph(
    kind: torch.dtype, has_coded_cache: bool, requests: tuple[tuple[int, int, int], ...]
) -> None:
    """Products that read the codes overlap the end of attention, which the next call overwrites."""
    call = call_of("cuda", 128, torch.bfloat16, requests, has_coded_cache=has_coded_cache)
    call["v"].nan_to_num_(1.0)
    num_rows, width = len(call["q"]), call["q"][0].numel()
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(256, width, generator=generator).cuda()
    scheme = ops.WeightScheme.INT8 if kind == torch.int8 else ops.WeightScheme.FP8
    codes, scale = ops.quantize_weight(weight, scheme)
    rows = ops.new_quantized_rows(num_rows, width, kind, weight.device)
    other = call["v"].flip(0).contiguous()

    def product(rows: ops.QuantizedRows) -> torch.Tensor:
        out = torch.empty(num_rows, 256, dtype=torch.bfloat16, device="cuda")
        return ops.linear_scaled(rows, codes, scale, out=out)

    def chain(is_fused: bool) -> list[torch.Tensor]:
        found = []
        with ops.settled_weights():
            for v in (call["v"], other) * 3:
                out = ops.block_attention(
                    **{**call, "v": v}, rows=rows._replace(codes_only=True) if is_fused else None
                )
                if not is_fused:
                    ops.quantize_rows_into(out.flatten(1), rows)
                found.append(product(rows))
        return found

    want = [tensor.clone() for tensor in chain(False)]
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(20):
        graph.replay()
        for tensor, expected in zip(found, want, strict=True):
            assert torch.equal(tensor, expected)
