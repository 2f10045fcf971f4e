# SPDX-License-Identifier: Apache-2.0
"""block_attention against the fp64 oracle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import attention_cases
from attention_cases import AttentionCase, poison, random_case
from diffulex import ops
from reference import dense as oracles
from tolerance import assert_accurate, to_numpy

NUM_SEEDS = 64


def check(case: AttentionCase) -> None:
    out, lse = case.run()
    expected, expected_lse, base = case.expected()
    dtype = out.dtype
    assert_accurate(
        out,
        expected,
        base,
        cap=attention_cases.CAP[dtype] * max(1, np.abs(expected).max(initial=0)),
    )
    tolerance = attention_cases.LSE_TOLERANCE[dtype]
    np.testing.assert_allclose(to_numpy(lse), expected_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.every(7)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_random_masks(device: str, seed: int) -> None:
    check(random_case(seed, device))


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(NUM_SEEDS, 200))
def test_random_masks_more(seed: int) -> None:
    check(random_case(seed, "cuda"))


@pytest.mark.every(5)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("seed", range(12))
def test_unseen_values_do_not_matter(device: str, seed: int, value: float) -> None:
    case = random_case(seed, device)
    clean, poisoned = poison(case, 0.5).run(), poison(case, value).run()
    for expected, actual in zip(clean, poisoned):
        assert torch.equal(expected, actual)
    assert torch.isfinite(clean[0]).all()


@pytest.mark.parametrize("layout", [0, 1])
def test_page_table_entries_past_the_pages_are_invisible(layout: int) -> None:
    # CUDA only: the CPU kernel reports them (test_bad_data_raises_on_cpu).
    case = random_case(3, "cpu", layout=layout)
    page_table = case.tensors["page_table"]
    k_cache = case.tensors["k_cache"]
    assert page_table is not None
    assert k_cache is not None
    page_table[:, 0] = k_cache.shape[0]
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    moved = AttentionCase(
        {n: None if t is None else t.cuda() for n, t in case.tensors.items()},
        case.numbers,
        case.requests,
    )
    check(moved)


def simple_case(
    device: str,
    lengths: list[int],
    contexts: list[int],
    *,
    kind: int = oracles.BLOCK_CAUSAL,
    heads: tuple[int, int] = (2, 1),
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
) -> AttentionCase:
    """Requests of one kind with identity page tables."""
    generator = torch.Generator().manual_seed(0)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_q_heads, num_kv_heads = heads
    max_pages = max([1, *(-(-c // page_size) for c in contexts)])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)

    num_pages = len(lengths) * max_pages if any(contexts) else 0
    tables = np.arange(len(lengths) * max_pages, dtype=np.int32).reshape(-1, max_pages)
    tensors = {
        "q": normal(int(starts[-1]), num_q_heads, 64),
        "k": normal(int(starts[-1]), num_kv_heads, 64),
        "v": normal(int(starts[-1]), num_kv_heads, 64),
        "k_cache": normal(num_pages, page_size, num_kv_heads, 64),
        "v_cache": normal(num_pages, page_size, num_kv_heads, 64),
        "page_table": ints(tables if num_pages else np.full_like(tables, -1)),
        "cu_seqlens_q": ints(starts),
        "context_lens": ints(contexts),
        "valid_slices": ints(starts[1:]),
        "mask_kinds": ints([kind] * len(lengths)),
    }
    numbers = {
        "scale": 0.125,
        "softcap": 0.0,
        "block_size": 4,
        "sliding_window": 0,
        "max_seqlen_q": max([1, *lengths]),
        "max_context_len": max([0, *contexts]),
        "num_splits": 0,
        "kv_layout": 0,
    }
    requests = [oracles.Request(kind, c, n, c) for n, c in zip(lengths, contexts)]
    return AttentionCase(tensors, numbers, requests)


@pytest.mark.parametrize(
    ("lengths", "contexts", "kind"),
    [
        ([], [], oracles.FULL),
        ([0], [0], oracles.FULL),
        ([0, 4, 0], [16, 0, 8], oracles.BLOCK_CAUSAL),
        ([1], [0], oracles.CAUSAL),
        ([4], [0], oracles.CACHE_ONLY),
        ([4], [64], oracles.CACHE_ONLY),
        ([4, 4], [16, 32], oracles.FULL),
    ],
)
def test_degenerate_batches(
    device: str, lengths: list[int], contexts: list[int], kind: int
) -> None:
    check(simple_case(device, lengths, contexts, kind=kind))


@pytest.mark.parametrize("head_dim", [32, 80, 96, 512])
def test_other_head_dims(device: str, head_dim: int) -> None:
    case = simple_case(device, [5, 3], [20, 7])
    for name in ("q", "k", "v", "k_cache", "v_cache"):
        tensor = case.tensors[name]
        assert tensor is not None
        case.tensors[name] = tensor.repeat_interleave(8, -1)[..., :head_dim].contiguous()
    check(case)


def test_rows_past_the_batch_are_zero(device: str) -> None:
    case = simple_case(device, [4, 4], [16, 16])
    valid = case.tensors["valid_slices"]
    starts = case.tensors["cu_seqlens_q"]
    assert valid is not None
    assert starts is not None
    starts[2] = 6
    valid[:] = torch.tensor([2, 5], dtype=torch.int32)
    case.requests = [
        dataclasses.replace(case.requests[0], nv=2),
        dataclasses.replace(case.requests[1], nv=1),
    ]
    out, lse = case.run()
    for row in (2, 3, 5, 6, 7):
        assert torch.all(out[row] == 0)
        assert torch.all(lse[row] == -torch.inf)
    check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("skip", [0, 1, 8])
@pytest.mark.parametrize("gap", [0, 8])
def test_zero_rows_between_what_belongs_to_others(
    device: str, dtype: torch.dtype, skip: int, gap: int
) -> None:
    """The output is a part of a larger tensor, at any alignment; rows past the real ones are zero."""
    case = simple_case(device, [40, 70], [96, 33], dtype=dtype)
    valid = case.tensors["valid_slices"]
    assert valid is not None
    valid[:] = torch.tensor([7, 105], dtype=torch.int32)
    rows, heads, dim = case.run()[0].shape
    frame = torch.full((rows * heads * (dim + gap) + skip,), 7.0, dtype=dtype, device=device)
    out = frame[skip:].view(rows, heads, dim + gap)[..., :dim]
    ops.block_attention(*case.tensors.values(), **case.numbers, out=out)
    assert torch.all(out[7:40] == 0)
    assert torch.all(out[105:] == 0)
    expected = case.run()[0]
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=0)
    assert torch.all(frame[:skip] == 7.0)
    assert torch.all(frame[skip:].view(rows, heads, dim + gap)[..., dim:] == 7.0)


@pytest.mark.parametrize("length", [20, 32, 40])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_walks_that_begin_with_short_tiles(device: str, length: int, num_splits: int) -> None:
    """Kernels multiply few keys where the block in flight, the end of the cache, or both are short; what
    lies past the context is not a number."""
    contexts = [1, 31, 32, 33, 127, 128, 129, 160, 161, 288, 300]
    lengths = [length] * len(contexts)
    case = simple_case(device, lengths, contexts, heads=(4, 1), dtype=torch.bfloat16)
    for name in ("k_cache", "v_cache"):
        cache = case.tensors[name]
        assert cache is not None
        rows = cache.view(len(contexts), -1, *cache.shape[2:])
        for request, context in zip(rows, contexts, strict=True):
            request[context:] = torch.nan
    case.numbers |= {"num_splits": num_splits, "block_size": 32}
    check(case)


def test_long_context(device: str) -> None:
    check(simple_case(device, [8, 4], [1500, 640], heads=(4, 2), page_size=64))


@pytest.mark.parametrize("num_splits", [1, 2, 3, 8, 32])
def test_split_counts_agree(device: str, num_splits: int) -> None:
    case = simple_case(device, [8, 4], [1500, 640], heads=(4, 2), page_size=64)
    case.numbers["num_splits"] = num_splits
    check(case)


@pytest.mark.parametrize("seed", [1, 5, 9])
def test_results_repeat_bit_for_bit(device: str, seed: int) -> None:
    case = random_case(seed, device)
    first = case.run()
    for _ in range(20):
        again = case.run()
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_lse_and_workspace_are_optional(device: str) -> None:
    case = simple_case(device, [4], [32])
    tensors, numbers = dict(case.tensors), case.numbers
    out = ops.block_attention(*tensors.values(), **numbers)
    assert torch.equal(out, case.run()[0])


def test_default_scale_is_that_of_the_head_dim(device: str) -> None:
    case = simple_case(device, [4], [32])
    assert case.numbers["scale"] == 64**-0.5
    assert torch.equal(case.run()[0], case.run(scale=None)[0])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("page_table", [[9]], "page_table"),
        ("cu_seqlens_q", [0, -1], "cu_seqlens_q"),
        ("cu_seqlens_q", [0, 5], "cu_seqlens_q"),
        ("cu_seqlens_q", [1, 4], "cu_seqlens_q"),
        ("mask_kinds", [7], "mask_kinds"),
    ],
)
def test_bad_data_raises_on_cpu(name: str, value: list[int], message: str) -> None:
    case = simple_case("cpu", [4], [8])
    case.tensors[name] = torch.tensor(value, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=rf"^diffulex::block_attention: {message}.*: expected"):
        case.run()


def test_no_write_happens_before_an_error() -> None:
    case = simple_case("cpu", [4], [8])
    case.tensors["page_table"] = torch.tensor([[9]], dtype=torch.int32)
    out = torch.full((4, 2, 64), 7.0)
    with pytest.raises(RuntimeError, match=r"^diffulex::block_attention: "):
        ops.block_attention(*case.tensors.values(), **case.numbers, out=out)
    assert torch.all(out == 7.0)


def test_unaligned_memory_is_served_or_refused(device: str) -> None:
    case = simple_case(device, [4], [32], dtype=torch.bfloat16)
    expected = case.run()[0]
    for name in ("q", "k", "v", "k_cache", "v_cache"):
        tensor = case.tensors[name]
        assert tensor is not None
        storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)
        case.tensors[name] = storage[1:].view(tensor.shape).copy_(tensor)
    try:
        actual = case.run()[0]
    except RuntimeError as error:
        assert str(error).startswith("diffulex::block_attention: ")  # noqa: PT017
    else:
        torch.testing.assert_close(actual, expected, atol=2e-2, rtol=0)


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(16))
def test_cpu_and_cuda_agree(seed: int) -> None:
    case = random_case(seed, "cpu", dtype=torch.float32)
    moved = AttentionCase(
        {n: None if t is None else t.cuda() for n, t in case.tensors.items()},
        case.numbers,
        case.requests,
    )
    for expected, actual in zip(case.run(), moved.run()):
        torch.testing.assert_close(actual.cpu(), expected, atol=2e-5, rtol=2e-5)
