# SPDX-License-Identifier: Apache-2.0
"""Exchange between ranks: the twin in one memory, then ranks that share one GPU as streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from diffulex import ops
from diffulex.ops.comm import CollectiveAlgorithm, PeerGroup
from diffulex_ext import _core

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
EPS = 1e-6
INTS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
ONE_SHOT, TWO_SHOT = CollectiveAlgorithm.ONE_SHOT, CollectiveAlgorithm.TWO_SHOT


def bits(x: torch.Tensor) -> torch.Tensor:
    """As integers; every NaN is the same."""
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x).view(INTS[x.dtype])


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    differ = bits(got) != bits(want)
    assert not differ.any(), f"{int(differ.sum())} of {differ.numel()}, first {differ.nonzero()[0]}"


def make(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator).to(dtype)
    flat = x.view(-1)
    # Signed zeros, values that cancel, and those of no number.
    flat[::7] = -0.0
    flat[3::11] = 0.0
    if flat.numel() > 4096:
        flat[4001], flat[4003], flat[4005] = float("nan"), float("inf"), -float("inf")
    return x.to(device)


def rank_order_sum(parts: torch.Tensor) -> torch.Tensor:
    """fp32 [T, H] of parts [P, T, H]; a 16-bit -0 is +0."""
    parts = parts.float() if parts.dtype == torch.float32 else parts.float() + 0.0
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@DTYPES
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [64, 1024, 2816, 4096, 16384])
def test_twin_adds_in_rank_order(
    device: str, dtype: torch.dtype, num_ranks: int, width: int
) -> None:
    parts = make(num_ranks, 3, width, dtype=dtype, device=device)
    parts = torch.where(parts.isfinite(), parts, torch.ones_like(parts))
    residual = make(3, width, dtype=dtype, device=device, seed=1)
    residual = torch.where(residual.isfinite(), residual, torch.ones_like(residual))
    weight = make(width, dtype=dtype, device=device, seed=2).nan_to_num(1.0, 1.0, 1.0)
    total = rank_order_sum(parts) + residual.float()
    out = ops.sum_add_rms_norm(parts, residual, weight, EPS, weight_offset=0.5)
    assert_same_bits(residual, total.to(dtype))
    exact = total.double()
    exact *= torch.rsqrt((exact * exact).mean(-1, keepdim=True) + EPS)
    exact *= weight.double() + 0.5
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=1e-6)


@pytest.mark.cuda
@DTYPES
@pytest.mark.parametrize("width", [64, 1024, 2816, 16384])
def test_one_part_gives_the_bits_of_the_norm(dtype: torch.dtype, width: int) -> None:
    x = make(5, width, dtype=dtype, device="cuda") + 0.0
    residual = make(5, width, dtype=dtype, device="cuda", seed=1)
    weight = make(width, dtype=dtype, device="cuda", seed=2)
    summed = residual.clone()
    out = ops.sum_add_rms_norm(x[None].clone(), summed, weight, EPS)
    ops.add_rms_norm(x, residual, weight, EPS)
    assert_same_bits(summed, residual)
    assert_same_bits(out, x)


def test_a_value_that_cannot_be_sent_is_the_next_one(device: str) -> None:
    parts = torch.zeros(1, 1, 8, device=device)
    parts.view(torch.int32)[0, 0, 0] = -0x7FFF8000  # 0x80008000
    residual = torch.zeros(1, 8, device=device)
    ops.sum_add_rms_norm(parts, residual, None, EPS)
    assert int(residual.view(torch.int32)[0, 0]) == -0x7FFF7FFF


def test_plan_depends_on_the_ranks_and_the_bytes() -> None:
    mib = 1 << 20
    assert ops.collective_plan(2, 16 * mib) == ONE_SHOT
    assert ops.collective_plan(2, 16 * mib + 1) == CollectiveAlgorithm.LIBRARY
    assert ops.collective_plan(4, mib) == ONE_SHOT
    assert ops.collective_plan(4, mib + 1) == ops.collective_plan(4, 16 * mib) == TWO_SHOT
    assert ops.collective_plan(8, mib // 2) == ONE_SHOT
    assert ops.collective_plan(8, mib // 2 + 1) == TWO_SHOT
    assert ops.collective_plan(8, 16 * mib + 1) == CollectiveAlgorithm.LIBRARY
    with pytest.raises(ValueError, match="expected 2 to 8 ranks"):
        ops.collective_plan(9, 0)


def test_ranks_on_cpus_have_no_peer_memory() -> None:
    x, state = torch.zeros(2, 64), torch.zeros(_core.COLLECTIVE_STATE_WORDS, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="all_reduce: x: expected a CUDA tensor, got cpu"):
        torch.ops.diffulex.all_reduce(
            x, state, peers=[16, 32], rank=0, epoch_bytes=1 << 20, algorithm=0
        )


BAD_CALLS = [
    ({"peers": [16]}, "peers: expected 2 to 8 addresses, got 1"),
    ({"peers": [16, 0]}, "peers: expected addresses of peer_alloc or peer_open"),
    ({"rank": 2}, "rank: expected a place in peers, got 2"),
    ({"epoch_bytes": 128}, "epoch_bytes: expected a multiple of 16, at least 256, got 128"),
    ({"algorithm": 2}, "algorithm: expected 0 .one-shot. or 1 .two-shot., got 2"),
    ({"max_ctas": -1}, "max_ctas: expected a value >= 0, got -1"),
]


@pytest.mark.parametrize(("change", "text"), BAD_CALLS)
def test_arguments_are_checked_before_any_kernel(change: dict[str, object], text: str) -> None:
    x, state = torch.zeros(1, 64), torch.zeros(_core.COLLECTIVE_STATE_WORDS, dtype=torch.int64)
    numbers = {"peers": [16, 32], "rank": 0, "epoch_bytes": 1 << 20, "algorithm": 0} | change
    with pytest.raises(RuntimeError, match=text):
        torch.ops.diffulex.all_reduce(x, state, **numbers)


@pytest.mark.parametrize("shape", [(2, 60), (2, 16392)])
def test_odd_widths_are_refused(shape: tuple[int, int]) -> None:
    state = torch.zeros(_core.COLLECTIVE_STATE_WORDS, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="x: expected a last dimension that is a multiple of 8"):
        torch.ops.diffulex.all_reduce(
            torch.zeros(shape), state, peers=[16, 32], rank=0, epoch_bytes=1 << 20, algorithm=0
        )


class Ranks:
    """Ranks that are streams of one device: their kernels run side by side and wait for each other."""

    def __init__(self, count: int, timeout_s: float = 20.0) -> None:
        device = torch.device("cuda", 0)
        # All CTAs of all ranks fit on the device at once.
        self.groups = [PeerGroup(r, device, count, timeout_s, max_ctas=16) for r in range(count)]
        for group in self.groups:
            group.peers[:] = [other.address for other in self.groups]
        self.streams = [torch.cuda.Stream() for _ in range(count)]
        torch.ops.diffulex_control.warm_kernels(0)
        # A kernel that is loaded when it is first launched may wait for those that run, and these here
        # wait for what is launched next.
        warm = torch.ones(8, device="cuda", dtype=torch.bfloat16)
        mask = warm != 3
        mask |= warm != 1
        warm *= 0.5
        warm.zero_().copy_(warm.clone())
        torch.cuda._sleep(10)
        torch.cuda.synchronize()

    def close(self) -> None:
        """Frees the buffers, once nothing runs."""
        torch.cuda.synchronize()
        for group in self.groups:
            group.close()

    def each(self, call: Callable[[int], object]) -> None:
        """Calls with every rank on its stream; waits for none."""
        torch.cuda.current_stream().synchronize()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                call(rank)

    def check(self) -> None:
        torch.cuda.synchronize()
        assert [group.timed_out for group in self.groups] == [None] * len(self.groups)


@pytest.fixture(params=[2, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(request.param)
    yield made
    made.close()


def run_norms(
    ranks: Ranks, shape: tuple[int, int], dtype: torch.dtype, algorithm: CollectiveAlgorithm
) -> None:
    """The fused sum of all ranks against its twin."""
    count = len(ranks.groups)
    parts = make(count, *shape, dtype=dtype, device="cuda")
    residual = make(*shape, dtype=dtype, device="cuda", seed=1)
    weight = make(shape[1], dtype=dtype, device="cuda", seed=2)
    x, residuals = parts.clone(), [residual.clone() for _ in range(count)]
    want = ops.sum_add_rms_norm(parts, residual, weight, EPS, weight_offset=0.25)
    ranks.each(
        lambda r: ranks.groups[r].all_reduce_add_rms_norm(
            x[r], residuals[r], weight, EPS, algorithm, weight_offset=0.25
        )
    )
    ranks.check()
    for rank in range(count):
        assert_same_bits(residuals[rank], residual)
        assert_same_bits(x[rank], want)


def run_sums(
    ranks: Ranks, shape: tuple[int, int], dtype: torch.dtype, algorithm: CollectiveAlgorithm
) -> None:
    """The plain sum of all ranks."""
    parts = make(len(ranks.groups), *shape, dtype=dtype, device="cuda")
    want = rank_order_sum(parts).to(dtype)
    ranks.each(lambda r: ranks.groups[r].all_reduce(parts[r], algorithm))
    ranks.check()
    for part in parts:
        assert_same_bits(part, want)


def run_gathers(ranks: Ranks, parts: torch.Tensor, outs: list[torch.Tensor]) -> None:
    """The records of all ranks."""
    ranks.each(lambda r: ranks.groups[r].gather_records(parts[r], outs[r]))
    ranks.check()


def algorithms(ranks: Ranks) -> Sequence[CollectiveAlgorithm]:
    return (ONE_SHOT,) if len(ranks.groups) == 2 else (ONE_SHOT, TWO_SHOT)


@pytest.mark.cuda
@DTYPES
def test_sums_of_changing_sizes(ranks: Ranks, dtype: torch.dtype) -> None:
    sizes = [(1, 64), (129, 4096), (3, 16384), (0, 64), (32, 1024), (1024, 512), (2, 4096)]
    sizes += [(129, 2816), (1, 8), (32, 8192), (7, 1032)]
    for algorithm in algorithms(ranks):
        for rows, width in sizes:
            if rows * width * 4 * (len(ranks.groups) - 1) <= ranks.groups[0].epoch_bytes:
                run_norms(ranks, (rows, width), dtype, algorithm)
                run_sums(ranks, (rows, width), dtype, algorithm)


@pytest.mark.cuda
def test_dtypes_and_algorithms_take_turns(ranks: Ranks) -> None:
    """What one sum leaves behind is blank for whichever comes next."""
    for index in range(12):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[index % 3]
        algorithm = algorithms(ranks)[index % len(algorithms(ranks))]
        run_sums(ranks, (1 + index * 5 % 7, 64 << index % 5), dtype, algorithm)


@pytest.mark.cuda
def test_every_bit_pattern_of_16_bits_arrives(ranks: Ranks) -> None:
    every = torch.arange(65536, dtype=torch.int32, device="cuda").to(torch.int16)
    parts = torch.zeros(len(ranks.groups), 16, 4096, dtype=torch.bfloat16, device="cuda")
    parts[-1] = every.view(torch.bfloat16).view(16, 4096)
    want = rank_order_sum(parts).to(torch.bfloat16)
    ranks.each(lambda r: ranks.groups[r].all_reduce(parts[r], ONE_SHOT))
    ranks.check()
    for part in parts:
        assert_same_bits(part, want)


@pytest.mark.cuda
def test_records_arrive_in_rank_order(ranks: Ranks) -> None:
    count = len(ranks.groups)
    for rows, words in [(1, 1), (32, 10), (1024, 16), (3, 22), (0, 4), (257, 16)]:
        generator = torch.Generator().manual_seed(rows)
        limits = -(2**31), 2**31 - 1
        parts = torch.randint(*limits, (count, rows, words), generator=generator, dtype=torch.int32)
        parts = parts.cuda()
        outs = [torch.full_like(parts, 7) for _ in range(count)]
        run_gathers(ranks, parts, outs)
        assert all(torch.equal(out, parts) for out in outs)


@pytest.mark.cuda
def test_ten_thousand_calls(ranks: Ranks) -> None:
    count, width = len(ranks.groups), 512
    x = torch.ones(count, 16, width, dtype=torch.bfloat16, device="cuda")
    seen = torch.zeros(count, 16, width, dtype=torch.bool, device="cuda")
    scale = 1.0 / count
    for call in range(10_000):
        rows = 1 + call * 7 % 16

        def step(rank: int, rows: int = rows) -> None:
            ranks.groups[rank].all_reduce(x[rank, :rows], ONE_SHOT)
            seen[rank, :rows] |= x[rank, :rows] != count
            x[rank, :rows] *= scale

        if call % 100 == 0:
            ranks.check()
        for rank, stream in enumerate(ranks.streams):
            with torch.cuda.stream(stream):
                step(rank)
    ranks.check()
    assert not seen.any()


@pytest.mark.cuda
def test_graphs_and_calls_take_turns(ranks: Ranks) -> None:
    count = len(ranks.groups)
    source = make(count, 9, 2048, dtype=torch.bfloat16, device="cuda").nan_to_num(1.0, 1.0, 1.0)
    x = source.clone()
    residuals = [make(9, 2048, dtype=torch.bfloat16, device="cuda").nan_to_num(1, 1, 1)] * 1
    residuals = [residuals[0].clone() for _ in range(count)]
    twin = residuals[0].clone()
    weight = torch.ones(2048, dtype=torch.bfloat16, device="cuda")
    records = torch.arange(count * 40, dtype=torch.int32, device="cuda").view(count, 4, 10)
    outs = [torch.zeros_like(records) for _ in range(count)]

    def step(rank: int) -> None:
        x[rank].copy_(source[rank])
        ranks.groups[rank].all_reduce_add_rms_norm(x[rank], residuals[rank], weight, EPS, ONE_SHOT)
        ranks.groups[rank].gather_records(records[rank], outs[rank])

    graphs = []
    for rank, stream in enumerate(ranks.streams):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[rank], stream=stream):
            step(rank)
    for turn in range(30):
        for out in outs:
            out.zero_()
        ranks.each(step if turn % 3 == 2 else lambda rank: graphs[rank].replay())
        ranks.check()
        want = ops.sum_add_rms_norm(source, twin, weight, EPS)
        for rank in range(count):
            assert_same_bits(x[rank], want)
            assert_same_bits(residuals[rank], twin)
            assert torch.equal(outs[rank], records)
        run_sums(ranks, (1 + turn, 64), torch.bfloat16, ONE_SHOT)


@pytest.mark.cuda
@pytest.mark.parametrize("ahead", [1, 2])
def test_late_and_early_ranks(ranks: Ranks, ahead: int) -> None:
    """The others are 5 ms late, and meanwhile one has begun the next exchanges."""
    count = len(ranks.groups)
    parts = make(8, count, 5, 4096, dtype=torch.bfloat16, device="cuda")
    wants = [rank_order_sum(part).to(torch.bfloat16) for part in parts]
    torch.cuda.synchronize()

    def calls(rank: int) -> None:
        for index in range(8):
            if (rank > 0) == (index % (ahead + 1) == 0):
                torch.cuda._sleep(10_000_000)
            ranks.groups[rank].all_reduce(parts[index, rank], ONE_SHOT)

    ranks.each(calls)
    ranks.check()
    for index, want in enumerate(wants):
        for part in parts[index]:
            assert_same_bits(part, want)


@pytest.mark.cuda
def test_a_lost_rank_ends_the_wait() -> None:
    ranks = Ranks(2, timeout_s=0.2)
    x = torch.ones(3, 64, device="cuda")
    out = torch.zeros(2, 3, 4, dtype=torch.int32, device="cuda")
    ranks.groups[0].all_reduce(x, ONE_SHOT)
    torch.cuda.synchronize()
    assert ranks.groups[0].timed_out == (1, 0)
    begin = time.perf_counter()
    for _ in range(100):  # whatever follows does not wait again
        ranks.groups[0].all_reduce(x, ONE_SHOT)
        ranks.groups[0].gather_records(out[0], out)
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 1.0
    ranks.close()


@pytest.mark.cuda
@pytest.mark.parametrize("op", ["sum", "gather"])
def test_an_abort_ends_the_wait(op: str) -> None:
    ranks = Ranks(2, timeout_s=0.0)
    group = ranks.groups[1]
    out = torch.zeros(2, 3, 4, dtype=torch.int32, device="cuda")
    done = torch.cuda.Event()
    if op == "sum":
        group.all_reduce(torch.ones(3, 64, device="cuda"), ONE_SHOT)
    else:
        group.gather_records(out[1], out)
    done.record()
    time.sleep(0.05)
    assert not done.query()
    group.abort()
    begin = time.perf_counter()
    done.synchronize()
    assert time.perf_counter() - begin < 0.1
    assert group.timed_out is None
    ranks.close()


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 40])
def test_one_rank_after_the_other(rows: int) -> None:
    """Without kernels side by side, as a sanitizer needs it: the first sends its part, and is told not
    to wait; the second finds it."""
    ranks = Ranks(2)
    parts = make(2, rows, 4096, dtype=torch.bfloat16, device="cuda")
    want = rank_order_sum(parts).to(torch.bfloat16)
    records = torch.arange(2 * rows * 10, dtype=torch.int32, device="cuda").view(2, rows, 10)
    outs = torch.zeros(2, 2, rows, 10, dtype=torch.int32, device="cuda")
    ranks.groups[1].abort()
    for rank in (1, 0):
        ranks.groups[rank].all_reduce(parts[rank], ONE_SHOT)
        ranks.groups[rank].gather_records(records[rank], outs[rank])
        torch.cuda.synchronize()
    assert_same_bits(parts[0], want)
    assert torch.equal(outs[0], records)
    assert ranks.groups[0].timed_out is None
    ranks.close()
