# SPDX-License-Identifier: Apache-2.0
"""accept_gemma and entropy_bound_mask against the worked vectors and their references."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import sampling_vectors as vectors
from diffulex import ops
from diffulex.ops import AcceptFlag, GemmaResult, StatsColumn
from reference.acceptance import accept_gemma_reference
from reference.filters import entropy_bound_mask_reference
from rewriting_cases import ints, moved

ARGMAX = [1, 2, 3, 7]
RENOISE = [6, 0, 2, 5]


def row_stats(device: str, temperature: float = 0.8) -> ops.TokenStats:
    """R0..R3 at a temperature, drawn with u = .5, .05, .5, .5; no id is excluded."""
    return ops.token_stats(
        vectors.logits(device),
        inv_temperature=torch.full((4,), 1 / temperature, device=device),
        uniforms=torch.tensor([0.5, 0.05, 0.5, 0.5], dtype=torch.float64, device=device),
        top_k=1,
    )


def gemma(
    device: str,
    *,
    tokens: list[int] | None = None,
    previous: list[int] | None = None,
    run: int = -1,
    left: int = 4,
    rows: list[int] | None = None,
    valid_len: int = 4,
    entropy: list[float] | None = None,
    bound: float = 0.1,
    stability: int = 1,
    kappa: float = 0.005,
) -> GemmaResult:
    stats = row_stats(device)
    assert stats.topk_ids is not None
    if entropy is not None:
        stats.stats[:, StatsColumn.ENTROPY] = torch.tensor(entropy, device=device)
    tensors = {
        "tokens": torch.tensor([tokens or [0, 0, 0, 0]], device=device),
        "row_index": ints(device, *(rows or range(4)))[None],
        "prev_argmax": torch.tensor([previous or [0, 0, 0, 0]], device=device),
        "stable_run": ints(device, run),
        "steps_left": ints(device, left),
        "renoise_ids": torch.tensor([RENOISE], device=device),
        "ids": stats.ids,
        "stats": stats.stats,
        "argmax_ids": stats.topk_ids[:, 0],
        "valid_len": ints(device, valid_len),
    }
    numbers: dict[str, Any] = {
        "entropy_bound": bound,
        "stability_threshold": stability,
        "confidence_threshold": kappa,
    }
    result = ops.accept_gemma(**tensors, **numbers)
    for actual, expected in zip(result, accept_gemma_reference(**tensors, **numbers)):
        assert torch.equal(actual, expected)
    return result


def flags(result: GemmaResult) -> AcceptFlag:
    return AcceptFlag(int(result.flags[0]))


def test_vector_g_row_stage(device: str) -> None:
    stats = row_stats(device)
    assert stats.topk_ids is not None
    assert stats.topk_ids[:, 0].tolist() == ARGMAX
    entropy = stats.stats[:, StatsColumn.ENTROPY].tolist()
    assert entropy == pytest.approx([0.183414, 1.098799, 0.084954, 1.503733], abs=1e-5)
    assert sum(entropy) / 4 == pytest.approx(0.717725, abs=1e-5)
    assert stats.ids.tolist() == [1, 1, 3, 6]


@pytest.mark.parametrize(
    ("bound", "canvas"), [(0.1, [1, 0, 3, 5]), (0.3, [1, 1, 3, 5]), (1.0, [1, 1, 3, 5])]
)
def test_vector_g_next_canvas(device: str, bound: float, canvas: list[int]) -> None:
    result = gemma(device, bound=bound)
    assert result.write_ids[0].tolist() == canvas
    assert result.argmax[0].tolist() == ARGMAX
    assert flags(result) == AcceptFlag(0)


def test_soft_cap_of_the_row_stage(device: str) -> None:
    logits = torch.tensor([[60.0, -60.0]], device=device)
    result = ops.token_stats(logits, softcap=30.0)
    assert float(result.stats[0, StatsColumn.MAX_LOGIT]) == pytest.approx(28.920827, abs=1e-5)


@pytest.mark.parametrize(("stability", "step"), [(0, 1), (1, 2), (2, 3)])
def test_vector_g_convergence(device: str, stability: int, step: int) -> None:
    run, previous = -1, None
    for current in range(1, 5):
        result = gemma(
            device, previous=previous, run=run, left=9, entropy=[0.004] * 4, stability=stability
        )
        converged = bool(flags(result) & AcceptFlag.CONVERGED)
        assert converged == (current >= step)
        if converged:
            assert result.write_ids[0].tolist() == ARGMAX
            break
        run = run + 1 if previous == ARGMAX and run >= 0 else 0
        previous = result.argmax[0].tolist()


def test_mean_entropy_is_compared_strictly(device: str) -> None:
    for entropy, confident in ((0.005, False), (0.004, True)):
        result = gemma(device, entropy=[entropy] * 4, previous=ARGMAX, run=3)
        assert bool(flags(result) & AcceptFlag.ALL_CONFIDENT) == confident
        assert bool(flags(result) & AcceptFlag.CONVERGED) == confident


def test_a_changed_argmax_resets_the_run(device: str) -> None:
    result = gemma(device, entropy=[0.001] * 4, previous=[1, 2, 3, 6], run=7)
    assert flags(result) & AcceptFlag.ALL_CONFIDENT
    assert not flags(result) & AcceptFlag.CONVERGED
    # No previous canvas: an equal one in the buffer does not count.
    first = gemma(device, entropy=[0.001] * 4, previous=ARGMAX, run=-1)
    assert not flags(first) & AcceptFlag.CONVERGED


def test_last_step_converges(device: str) -> None:
    result = gemma(device, left=1)
    assert result.write_ids[0].tolist() == ARGMAX
    assert flags(result) == AcceptFlag.CONVERGED
    stats = row_stats(device).stats
    assert torch.equal(result.confidence[0], stats[:, StatsColumn.MAX_PROB])
    same = gemma(device, left=1, tokens=ARGMAX)
    assert flags(same) == AcceptFlag.CONVERGED | AcceptFlag.SAME_AS_PREVIOUS


def test_shortened_canvas(device: str) -> None:
    # The last position would spoil the bound, the mean and the stability.
    entropy = [0.001, 0.002, 0.001, 9.0]
    result = gemma(device, valid_len=3, entropy=entropy, previous=[1, 2, 3, 0], run=0)
    assert result.write_ids[0].tolist() == [1, 2, 3, -1]
    assert result.argmax[0].tolist() == [1, 2, 3, -1]
    assert flags(result) & AcceptFlag.CONVERGED
    lowest_is_outside = gemma(device, valid_len=3, entropy=[0.3, 0.2, 0.4, 0.0], bound=0.0)
    assert lowest_is_outside.write_ids[0].tolist() == [RENOISE[0], 1, RENOISE[2], -1]
    padding = gemma(device, valid_len=0, left=1)
    assert padding.write_ids[0].tolist() == [-1] * 4
    assert flags(padding) == AcceptFlag.SAME_AS_PREVIOUS


def test_missing_and_bad_rows_write_nothing(device: str) -> None:
    result = gemma(device, rows=[0, 1, -1, 3], left=1)
    assert result.write_ids[0].tolist() == [-1] * 4
    assert flags(result) == AcceptFlag.SKIPPED | AcceptFlag.SAME_AS_PREVIOUS
    stats = ops.token_stats(torch.full((4, 8), torch.nan, device=device), top_k=1)
    assert stats.topk_ids is not None
    bad = ops.accept_gemma(
        torch.zeros(1, 4, dtype=torch.int64, device=device),
        ints(device, 0, 1, 2, 3)[None],
        torch.zeros(1, 4, dtype=torch.int64, device=device),
        ints(device, 0),
        ints(device, 1),
        torch.tensor([RENOISE], device=device),
        stats.ids,
        stats.stats,
        stats.topk_ids[:, 0],
        entropy_bound=0.1,
        stability_threshold=0,
        confidence_threshold=1.0,
    )
    assert bad.write_ids[0].tolist() == [-1] * 4
    assert flags(bad) == AcceptFlag.BAD_LOGITS | AcceptFlag.SAME_AS_PREVIOUS


def random_canvases(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_blocks, size = rng.randrange(1, 4), rng.choice([1, 4, 31, 32, 33, 256, 300, 1024])
    num_rows = num_blocks * size

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, 50, shape, generator=generator)

    def choices(*values: Any) -> list[Any]:
        return [rng.choice(values) for _ in range(num_blocks)]

    stats = torch.rand(num_rows, 8, generator=generator)
    # Multiples of 1/64: equal entropies are common and sums exact.
    scale = rng.choice([1, 64, 640])
    stats[:, StatsColumn.ENTROPY] = torch.randint(0, scale, (num_rows,), generator=generator) / 64
    argmax_ids = ids(num_rows)
    row_index = torch.randperm(num_rows, generator=generator).int().view(num_blocks, size)
    previous = argmax_ids[row_index.long()]
    if rng.random() < 0.3:
        previous[0, rng.randrange(size)] += 1
    draws = ids(num_rows)
    if rng.random() < 0.2:
        draws[rng.randrange(num_rows)] = -1
    if rng.random() < 0.2:
        row_index[rng.randrange(num_blocks), rng.randrange(size)] = -1
    tensors = {
        "tokens": ids(num_blocks, size),
        "row_index": row_index,
        "prev_argmax": previous,
        "stable_run": torch.tensor(choices(-1, 0, 1, 5)).int(),
        "steps_left": torch.tensor(choices(1, 2, 48)).int(),
        "renoise_ids": ids(num_blocks, size),
        "ids": draws,
        "stats": stats,
        "argmax_ids": argmax_ids,
        "valid_len": torch.tensor(choices(size, size, rng.randrange(size + 1))).int(),
    }
    numbers = {
        "entropy_bound": rng.choice([0.0, 0.25, 3.0, 100.0]),
        "stability_threshold": rng.choice([0, 1, 2]),
        "confidence_threshold": rng.choice([0.005, 0.5, 5.0]),
    }
    return tensors, numbers


@pytest.mark.every(7)
@pytest.mark.parametrize("seed", range(60))
def test_random_canvases(device: str, seed: int) -> None:
    tensors, numbers = random_canvases(seed)
    expected = accept_gemma_reference(**tensors, **numbers)
    actual = ops.accept_gemma(**moved(tensors, device), **numbers)
    for name, wanted, got in zip(GemmaResult._fields, expected, actual):
        assert torch.equal(got.cpu(), wanted), (name, numbers)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("row_index", 1024, "expected -1 or a row below"),
        ("valid_len", -1, "expected 0 to"),
        ("stable_run", -2, "expected a value >= -1, got -2"),
        ("steps_left", 0, "expected a value >= 1, got 0"),
        ("renoise_ids", -1, "expected an id >= 0, got -1"),
    ],
)
def test_data_errors(name: str, value: int, message: str) -> None:
    cases = (random_canvases(seed) for seed in range(100))
    tensors, numbers = next(c for c in cases if c[0]["tokens"].numel() < 1024)
    tensors["valid_len"].fill_(tensors["tokens"].shape[1])
    tensors[name].view(-1)[0] = value
    with pytest.raises(RuntimeError, match=rf"^diffulex::accept_gemma: {name}\[0\].*: {message}"):
        ops.accept_gemma(**tensors, **numbers)


@pytest.mark.parametrize(
    ("bound", "accepted"),
    [(0.1, [1, 0, 1, 0]), (0.3, [1, 1, 1, 0]), (1.0, [1, 1, 1, 0]), (0.0, [0, 0, 1, 0])],
)
def test_vector_g_entropy_bound(device: str, bound: float, accepted: list[int]) -> None:
    entropy = row_stats(device).stats[:, StatsColumn.ENTROPY].contiguous()
    assert ops.entropy_bound_mask(entropy, ints(device, 0, 4), bound=bound).tolist() == accepted


def test_entropy_bound_edge_cases(device: str) -> None:
    entropy = torch.tensor([0.5, 0.25, 0.25, 0.5, torch.nan, 0.0], device=device)
    one = ints(device, 0, 6)
    assert ops.entropy_bound_mask(entropy, one, bound=-1.0).tolist() == [1] * 6
    # 0 + .25 + .25 = .5 is within the bound, ties go to the lower row.
    assert ops.entropy_bound_mask(entropy, one, bound=0.5).tolist() == [1, 1, 1, 0, 0, 1]
    assert ops.entropy_bound_mask(entropy, one, bound=0.4).tolist() == [0, 1, 1, 0, 0, 1]
    # Rows past the last segment stay, an empty segment is nothing.
    out = torch.full((6,), 9, dtype=torch.uint8, device=device)
    ops.entropy_bound_mask(entropy, ints(device, 0, 2, 2, 4), bound=0.0, out=out)
    assert out.tolist() == [0, 1, 1, 0, 9, 9]


@pytest.mark.parametrize("seed", range(30))
def test_random_segments(device: str, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 4, 32, 100, 1024]) for _ in range(rng.randrange(1, 6))]
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    generator = torch.Generator().manual_seed(seed)
    entropy = torch.randint(0, 256, (offsets[-1],), generator=generator) / 64
    segments = torch.tensor(offsets).int()
    bound = rng.choice([-1.0, 0.0, 0.5, 20.0])
    expected = entropy_bound_mask_reference(entropy, segments, bound=bound)
    actual = ops.entropy_bound_mask(entropy.to(device), segments.to(device), bound=bound)
    assert torch.equal(actual.cpu(), expected)


def test_segment_errors() -> None:
    entropy = torch.zeros(2000)
    for offsets, message in (
        ([0, 1025], r"segments\[0\]: expected at most 1024 rows per segment, got 1025"),
        ([0, 5, 4], r"segments\[2\]: expected a non-decreasing"),
        ([1, 2], r"segments\[0\]: expected 0, got 1"),
        ([0, 1000, 2001], r"segments\[2\]: expected at most 2000, got 2001"),
    ):
        with pytest.raises(RuntimeError, match=rf"^diffulex::entropy_bound_mask: {message}"):
            ops.entropy_bound_mask(entropy, ints("cpu", *offsets), bound=0.0)
