# SPDX-License-Identifier: Apache-2.0
"""sample_filtered against the worked vectors and its fp64 reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import sampling_vectors as vectors
from diffulex import ops
from diffulex.ops import ConfidenceSpace, ExclusionMode, FilterOrder, StatsColumn, TokenStats
from diffulex_edge.runtime.filters import kept_ids
from reference.filters import sample_filtered_reference

R1 = 1


def untouched(num_rows: int, device: str) -> TokenStats:
    return TokenStats(
        torch.full((num_rows,), -9, device=device),
        torch.full((num_rows, 8), -7.0, device=device),
        None,
        None,
    )


def sample(
    device: str,
    rows: torch.Tensor,
    uniforms: list[float],
    *,
    inv_temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    **options: Any,
) -> TokenStats:
    """The same filters for every row; the mask is forbidden."""
    count = len(uniforms)
    rows = rows.to(device)

    def same(value: float | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if value is None else torch.full((count,), value, dtype=dtype, device=device)

    options.setdefault("forbidden_ids", vectors.mask_ids(device))
    return ops.sample_filtered(
        rows,
        torch.full((count,), inv_temperature, device=device),
        torch.tensor(uniforms, dtype=torch.float64, device=device),
        untouched(count, device),
        top_k=same(top_k, torch.int32),
        top_p=same(top_p, torch.float32),
        min_p=same(min_p, torch.float32),
        **options,
    )


def support(device: str, row: torch.Tensor, **options: Any) -> dict[int, float]:
    """Ids that can be drawn with their probabilities, by a grid of uniforms."""
    grid = [(i + 0.5) / 400 for i in range(400)]
    result = sample(device, row[None].expand(400, -1).contiguous(), grid, **options)
    return {
        int(token): float(stats[StatsColumn.CONFIDENCE])
        for token, stats in zip(result.ids, result.stats)
    }


def probabilities(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log().float()


def test_vector_b(device: str) -> None:
    row = vectors.logits(device)[R1]
    for options in ({"top_p": 0.65}, {"top_k": 2}):
        kept = support(device, row, **options)
        assert kept == pytest.approx({1: 0.142857, 2: 0.857143}, abs=1e-6)
    # A six-way tie at the third value: all eight stay, the mask among them but not drawable.
    kept = support(device, row, top_k=3)
    assert sorted(kept) == list(range(7))
    assert kept[2] == pytest.approx(0.6, abs=1e-6)
    drawn = sample(device, row[None].expand(2, -1).contiguous(), [0.10, 0.50], top_p=0.65)
    assert drawn.ids.tolist() == [1, 2]
    assert drawn.stats[:, StatsColumn.RAW_CONFIDENCE].tolist() == pytest.approx(
        [0.1, 0.6], abs=1e-6
    )


def test_record_columns(device: str) -> None:
    row = vectors.logits(device)[R1][None]
    result = sample(device, row, [0.1], top_p=0.65)
    expected = [0.142857, 0.857143, 0.142857, 0.410116, -0.356675, -0.510826, 0.1, 0.0]
    assert result.stats[0].tolist() == pytest.approx(expected, abs=1e-5)
    tempered = sample(device, row, [0.1], top_p=0.65, confidence_space=ConfidenceSpace.TEMPERED)
    assert int(tempered.ids[0]) == 1
    expected = [0.1, 0.6, 0.1, 1.435474, 0.0, -0.510826, 0.1, 0.0]
    assert tempered.stats[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_temperature_comes_before_the_filters(device: str) -> None:
    row = vectors.logits(device)[R1]
    # T = .5: p is proportional to the square: .36 : .01 : 6 x .0025, top-p .94 keeps two.
    kept = support(device, row, inv_temperature=2.0, top_p=0.94)
    assert kept == pytest.approx({1: 0.01 / 0.37, 2: 0.36 / 0.37}, abs=1e-6)


def test_order_of_the_filters(device: str) -> None:
    row = probabilities(0.4, 0.3, 0.2, 0.1)
    options: dict[str, Any] = {"top_k": 2, "top_p": 0.5, "forbidden_ids": None}
    # top-p sees .4 + .3: before 1 the sum is .4 of the whole, but .571 of the two that top-k left.
    both = support(device, row, filter_order=FilterOrder.TOP_P_FIRST, **options)
    assert sorted(both) == [0, 1]
    first = support(device, row, filter_order=FilterOrder.TOP_K_FIRST, **options)
    assert sorted(first) == [0]
    # min-p takes its share of what is left too: .4/.9 and .3/.9 and .2/.9 keep ratio .5.
    for order in FilterOrder:
        kept = support(device, row, min_p=0.6, forbidden_ids=None, filter_order=order)
        assert sorted(kept) == [0, 1]
    late = support(
        device, row, min_p=0.6, top_p=0.5, forbidden_ids=None, filter_order=FilterOrder.TOP_K_FIRST
    )
    assert sorted(late) == [0]


def test_top_p_boundaries(device: str) -> None:
    row = torch.zeros(8, device=device)  # eight equal probabilities of 1/8
    # The boundary element stays: its exclusive prefix sum equals top_p. Ties go to lower ids.
    for top_p, count in ((0.25, 3), (0.24, 2), (0.0, 1), (-3.0, 1), (0.126, 2)):
        kept = support(device, row, top_p=top_p, forbidden_ids=None)
        assert sorted(kept) == list(range(count)), top_p
        assert kept[0] == pytest.approx(1 / count, abs=1e-6)


def test_boundaries_are_exact(device: str) -> None:
    # Masses of exactly 1 under two keys: the mass before id 1 is top_p of the whole.
    row = torch.full((1, 8), -torch.inf)
    row[0, :2] = torch.tensor([0.0, -1e-30])
    assert sample(device, row, [0.75], top_p=0.5).ids.tolist() == [1]
    # A running mass of exactly u does not take its id.
    row[0, 1] = 0.0
    assert sample(device, row, [0.5], top_k=2).ids.tolist() == [1]


def test_mask_takes_part_in_the_filters(device: str) -> None:
    row = vectors.logits(device)[3]  # .40 mask, .25, .10, ...
    kept = support(device, row, top_k=2)
    # The probability is that before the restriction to candidates: .25 / .65.
    assert kept == pytest.approx({4: 0.25 / 0.65}, abs=1e-6)
    off = support(device, row, top_k=2, exclusion=ExclusionMode.OFF)
    assert off == pytest.approx({4: 0.25 / 0.65, 7: 0.40 / 0.65}, abs=1e-6)
    out = support(device, row, top_k=2, exclusion=ExclusionMode.RENORMALIZE)
    assert out == pytest.approx({4: 0.25 / 0.35, 5: 0.10 / 0.35}, abs=1e-6)


def test_empty_intersection_takes_the_best_candidate(device: str) -> None:
    row = vectors.logits(device)[3][None]
    for options in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        result = sample(device, row, [0.9], inv_temperature=2.0, **options)
        assert result.ids.tolist() == [4]
        # Unfiltered, at T = .5.
        assert float(result.stats[0, StatsColumn.CONFIDENCE]) == pytest.approx(0.255102, abs=1e-6)
        assert float(result.stats[0, StatsColumn.ENTROPY]) == pytest.approx(0.991237, abs=1e-5)
        assert float(result.stats[0, StatsColumn.RAW_CONFIDENCE]) == pytest.approx(0.25, abs=1e-6)


def test_inactive_rows_stay(device: str) -> None:
    rows = vectors.logits(device)
    result = ops.sample_filtered(
        rows,
        torch.tensor([0.0, 1.0, 1.0, 1.0], device=device),
        torch.full((4,), 0.5, dtype=torch.float64, device=device),
        untouched(4, device),
        top_k=torch.tensor([2, 0, -1, 2], dtype=torch.int32, device=device),
        top_p=torch.tensor([0.5, 1.0, 1.5, 1.0], device=device),
        min_p=torch.tensor([0.5, 0.0, -1.0, 0.0], device=device),
        forbidden_ids=vectors.mask_ids(device),
    )
    assert result.ids.tolist() == [-9, -9, -9, 4]
    assert torch.equal(result.stats[:3].cpu(), torch.full((3, 8), -7.0))
    assert not (result.stats[3] == -7.0).any()


def test_rows_without_candidates(device: str) -> None:
    rows = torch.full((3, 8), torch.nan)
    rows[1] = torch.inf
    rows[2] = -torch.inf
    rows[2, vectors.MASK] = 1.0
    result = sample(device, rows, [0.5] * 3, top_k=4)
    # +inf acts as the largest finite value: a candidate.
    assert result.ids.tolist() == [-1, 3, -1]
    assert result.stats[0].tolist() == [0.0] * 7 + [8.0]
    assert result.stats[2].tolist() == [0.0] * 7 + [7.0]
    assert float(result.stats[1, StatsColumn.BAD_COUNT]) == 8.0
    index = torch.tensor([-1], device=device)
    empty = sample(device, rows, [0.5], top_k=4, row_index=index)
    assert empty.ids.tolist() == [-1]
    assert empty.stats[0].tolist() == [0.0] * 8


def test_extra_rows_and_vocabulary_limit(device: str) -> None:
    rows = vectors.logits(device)
    index = torch.tensor([5], device=device)
    result = sample(
        device,
        rows[:4],
        [0.5],
        top_k=2,
        row_index=index,
        extra_logits=rows[2:].contiguous(),
        vocab_limit=4,
    )
    # Row 5 is R3; ids from 4 on may not be drawn, so nothing that top-k keeps may.
    assert result.ids.tolist() == [0]
    assert float(result.stats[0, StatsColumn.CONFIDENCE]) == pytest.approx(0.05, abs=1e-6)


def random_rows(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_columns = 6, rng.choice([1, 2, 8, 50, 1000, 4999])
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    logits = torch.randn(num_rows + 1, num_columns, generator=generator) * rng.choice(
        [0.5, 3.0, 9.0]
    )
    if rng.random() < 0.5:
        logits = (logits * 2).round() / 2  # ties
    if rng.random() < 0.2:
        logits[0] = torch.nan
    if rng.random() < 0.2:
        logits[1, ::3] = -torch.inf

    def floats(*values: float) -> torch.Tensor:
        return torch.tensor([rng.choice(values) for _ in range(num_rows)])

    tensors = {
        "logits": logits.to(dtype),
        "inv_temperature": floats(0.0, 0.7, 1.0, 1.3, 2.0),
        "uniforms": torch.rand(num_rows, generator=generator, dtype=torch.float64),
        "row_index": torch.randint(-1, num_rows + 1, (num_rows,), generator=generator),
        "top_k": floats(-1, 0, 1, 3, 40, 100000).int(),
        "top_p": floats(0.0, 0.313, 0.7171, 0.953, 1.0, 1.0),
        "min_p": floats(0.0, 0.0, 0.0213, 0.513),
        "forbidden_ids": torch.tensor([0, -1, num_columns - 1]),
    }
    numbers = {
        "vocab_limit": rng.choice([-1, num_columns, max(1, num_columns - 3)]),
        "softcap": rng.choice([0.0, 0.0, 5.0]),
        "exclusion": rng.choice(list(ExclusionMode)),
        "filter_order": rng.choice(list(FilterOrder)),
        "confidence_space": rng.choice(list(ConfidenceSpace)),
    }
    return tensors, numbers


@pytest.mark.every(7)
@pytest.mark.parametrize("seed", range(120))
def test_random_rows(device: str, seed: int) -> None:
    tensors, numbers = random_rows(seed)
    num_rows = tensors["row_index"].shape[0]
    expected = sample_filtered_reference(**tensors, **numbers, out=untouched(num_rows, "cpu"))
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    actual = ops.sample_filtered(**on_device, **numbers, out=untouched(num_rows, device))
    assert torch.equal(actual.ids.cpu(), expected.ids), numbers
    assert torch.allclose(actual.stats.cpu(), expected.stats, rtol=1e-4, atol=2e-5), numbers


@pytest.mark.slow
def test_draws_follow_the_filtered_distribution(device: str) -> None:
    count = 100_000
    row = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 2
    kept = kept_ids(row.tolist(), 20, 0.9, 0.0, order=FilterOrder.TOP_P_FIRST, beta=1.0)
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    result = ops.sample_filtered(
        row[None].to(device),
        torch.ones(count, device=device),
        uniforms.to(device),
        untouched(count, device),
        row_index=torch.zeros(count, dtype=torch.int32, device=device),
        top_k=torch.full((count,), 20, dtype=torch.int32, device=device),
        top_p=torch.full((count,), 0.9, device=device),
    )
    counts = torch.bincount(result.ids.cpu(), minlength=50).double()
    wanted = torch.zeros(50, dtype=torch.float64)
    wanted[kept] = torch.softmax(row.double()[kept], 0) * count
    assert counts[wanted == 0].sum() == 0
    used = wanted > 0
    chi_square = float(((counts - wanted)[used] ** 2 / wanted[used]).sum())
    # 99.9 % quantile of at most 19 degrees of freedom.
    assert chi_square < 43.8


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_and_cuda_agree_on_a_real_vocabulary(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(32, 151936, generator=generator) * 3).to(dtype)
    tensors = {
        "logits": logits,
        "inv_temperature": torch.full((32,), 1.25),
        "uniforms": torch.rand(32, generator=generator, dtype=torch.float64),
        "top_k": torch.tensor([0, 50, 1000, 0] * 8, dtype=torch.int32),
        "top_p": torch.tensor([0.95, 1.0, 0.8, 0.5] * 8),
        "forbidden_ids": torch.tensor([151669]),
    }
    expected = ops.sample_filtered(**tensors, out=untouched(32, "cpu"))
    moved = {name: tensor.cuda() for name, tensor in tensors.items()}
    actual = ops.sample_filtered(**moved, out=untouched(32, "cuda"))
    assert torch.equal(actual.ids.cpu(), expected.ids)
    assert torch.allclose(actual.stats.cpu(), expected.stats, rtol=1e-4, atol=1e-4)
    again = ops.sample_filtered(**moved, out=untouched(32, "cuda"))
    assert torch.equal(again.stats, actual.stats)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("row_index", 9, "expected -1 or a row below 4, got 9"),
        ("inv_temperature", -1.0, "expected a finite value >= 0, got -1"),
        ("uniforms", 1.0, r"expected a value in \(0, 1\), got 1"),
        ("top_p", torch.nan, "expected a number, got -?nan"),
        ("min_p", 1.5, "expected a value <= 1, got 1.5"),
    ],
)
def test_data_errors(name: str, value: float, message: str) -> None:
    tensors = {
        "logits": vectors.logits("cpu"),
        "inv_temperature": torch.ones(4),
        "uniforms": torch.full((4,), 0.5, dtype=torch.float64),
        "row_index": torch.arange(4),
        "top_p": torch.full((4,), 0.5),
        "min_p": torch.zeros(4),
    }
    tensors[name][2] = value
    out = untouched(4, "cpu")
    with pytest.raises(RuntimeError, match=rf"^diffulex::sample_filtered: {name}\[2\]: {message}"):
        ops.sample_filtered(**tensors, out=out)
    assert (out.ids == -9).all()
