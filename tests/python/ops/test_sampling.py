# SPDX-License-Identifier: Apache-2.0
"""token_stats and merge_token_stats against fp64 and the worked vectors."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

import sampling_vectors as vectors
from diffulex import ops
from diffulex.ops import ExclusionMode, StatsColumn, TokenStats
from reference import dense as oracles

MODES = {
    "exclude": ExclusionMode.EXCLUDE,
    "renormalize": ExclusionMode.RENORMALIZE,
    "off": ExclusionMode.OFF,
}


def column(result: TokenStats, which: StatsColumn) -> list[float]:
    return result.stats[:, which].tolist()


def margins(result: TokenStats) -> list[float]:
    return (
        result.stats[:, StatsColumn.MAX_PROB] - result.stats[:, StatsColumn.SECOND_PROB]
    ).tolist()


# --- worked vectors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "ids", "p", "margin"),
    [
        ("exclude", [1, 2, 3, 4], [0.92, 0.6, 0.96, 0.25], [0.9, 0.5, 0.955, 0.15]),
        (
            "renormalize",
            [1, 2, 3, 4],
            [0.929293, 0.631579, 0.969697, 0.416667],
            [0.909091, 0.526316, 0.964646, 0.25],
        ),
        ("off", [1, 2, 3, 7], [0.92, 0.6, 0.96, 0.4], [0.9, 0.5, 0.95, 0.15]),
    ],
)
def test_vector_a(
    device: str, mode: str, ids: list[int], p: list[float], margin: list[float]
) -> None:
    result = ops.token_stats(
        vectors.logits(device), forbidden_ids=vectors.mask_ids(device), exclusion=MODES[mode]
    )
    assert result.ids.tolist() == ids
    assert column(result, StatsColumn.CONFIDENCE) == pytest.approx(p, abs=1e-6)
    assert column(result, StatsColumn.RAW_CONFIDENCE) == pytest.approx(p, abs=1e-6)
    assert margins(result) == pytest.approx(margin, abs=2e-6)
    if mode != "renormalize":
        entropy = [0.431262, 1.435474, 0.244190, 1.692281]
        assert column(result, StatsColumn.ENTROPY) == pytest.approx(entropy, abs=2e-6)
        assert column(result, StatsColumn.LOGSUMEXP) == pytest.approx([0.0] * 4, abs=2e-6)


def test_vector_a_at_half_temperature(device: str) -> None:
    # u is chosen inside the step of the greedy id, so that the draw is that id.
    u = [0.5, 0.5, 0.5, 0.5]
    result = ops.token_stats(
        vectors.logits(device),
        forbidden_ids=vectors.mask_ids(device),
        inv_temperature=torch.full((4,), 2.0, device=device),
        uniforms=torch.tensor(u, dtype=torch.float64, device=device),
    )
    assert result.ids.tolist() == [1, 2, 3, 4]
    p = [0.998820, 0.935065, 0.999729, 0.255102]
    assert column(result, StatsColumn.CONFIDENCE) == pytest.approx(p, abs=2e-6)
    entropy = [0.011199, 0.353847, 0.002972, 0.991237]
    assert column(result, StatsColumn.ENTROPY) == pytest.approx(entropy, abs=2e-6)
    lse = [-0.165582, -0.954512, -0.081373, -1.406497]
    assert column(result, StatsColumn.LOGSUMEXP) == pytest.approx(lse, abs=2e-6)
    raw = [0.92, 0.6, 0.96, 0.25]
    assert column(result, StatsColumn.RAW_CONFIDENCE) == pytest.approx(raw, abs=2e-6)


def test_vector_a_partial_merge(device: str) -> None:
    row = vectors.logits(device)[:1]
    parts = [
        ops.token_stats(half.contiguous(), partial=True, vocab_start=start)
        for half, start in ((row[:, :4], 0), (row[:, 4:], 4))
    ]
    assert parts[0].stats[0, :3].tolist() == pytest.approx(
        [-0.083382, 1.043478, -0.181531], abs=1e-6
    )
    assert parts[1].stats[0, :3].tolist() == pytest.approx([-4.605170, 4.0, 0.0], abs=1e-6)
    merged = ops.merge_token_stats(
        torch.stack([part.ids for part in parts]), torch.stack([part.stats for part in parts])
    )
    assert merged.ids.tolist() == [1]
    assert column(merged, StatsColumn.CONFIDENCE) == pytest.approx([0.92], abs=1e-6)
    assert column(merged, StatsColumn.ENTROPY) == pytest.approx([0.431262], abs=1e-6)


def test_vector_a_ties_go_to_the_lowest_id(device: str) -> None:
    row = torch.tensor([[0.1, 0.3, 0.3, 0.05, 0.05, 0.05, 0.05, 0.1]], device=device).log()
    result = ops.token_stats(row, top_k=3)
    assert result.ids.tolist() == [1]
    assert result.topk_ids is not None
    assert result.topk_ids.tolist() == [[1, 2, 0]]
    two = torch.tensor([[0.0, 0.0] + [-torch.inf] * 6], device=device)
    assert column(ops.token_stats(two), StatsColumn.CONFIDENCE) == [0.5]


def test_vector_a_nan_past_the_vocabulary_changes_nothing(device: str) -> None:
    logits = vectors.logits(device)
    poisoned = torch.cat([logits, torch.full((4, 3), torch.nan, device=device)], 1)
    clean = ops.token_stats(logits, forbidden_ids=vectors.mask_ids(device))
    result = ops.token_stats(poisoned, forbidden_ids=vectors.mask_ids(device), vocab_limit=8)
    assert torch.equal(result.ids, clean.ids)
    torch.testing.assert_close(result.stats[:, :7], clean.stats[:, :7])
    assert column(result, StatsColumn.BAD_COUNT) == [3.0] * 4


@pytest.mark.parametrize(
    ("mode", "u", "ids", "raw"),
    [
        ("exclude", [0.5] * 4, [1, 2, 3, 4], None),
        ("off", [0.5] * 4, [1, 2, 3, 5], None),
        ("exclude", [0.01, 0.97, 0.99, 0.95], [0, 6, 5, 6], [0.02, 0.05, 0.005, 0.05]),
    ],
)
def test_vector_b_draws(
    device: str, mode: str, u: list[float], ids: list[int], raw: list[float] | None
) -> None:
    result = ops.token_stats(
        vectors.logits(device),
        forbidden_ids=vectors.mask_ids(device),
        exclusion=MODES[mode],
        inv_temperature=torch.ones(4, device=device),
        uniforms=torch.tensor(u, dtype=torch.float64, device=device),
    )
    assert result.ids.tolist() == ids
    if raw is not None:
        assert column(result, StatsColumn.RAW_CONFIDENCE) == pytest.approx(raw, abs=1e-6)


def test_vector_e_penalty(device: str) -> None:
    # Row R1 with penalty 2 on its favourite id 2: argmax 1, p .207813.
    result = ops.token_stats(
        vectors.logits(device)[1:2],
        penalty_ids=torch.tensor([2], device=device),
        penalties=torch.tensor([2.0], device=device),
        forbidden_ids=vectors.mask_ids(device),
    )
    assert result.ids.tolist() == [1]
    assert column(result, StatsColumn.CONFIDENCE) == pytest.approx([0.207813], abs=1e-6)


# --- random rows ---------------------------------------------------------------------------------


def random_call(
    seed: int, device: str
) -> tuple[torch.Tensor, dict[str, Any], list[dict[str, Any]]]:
    """(logits, arguments of the op, arguments of the oracle per row)."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_columns = rng.choice([1, 2, 50, 1000, 2048, 2049, 5003, 12345])
    num_rows = rng.randrange(1, 6)
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    spread = rng.choice([0.1, 3.0, 10.0])
    logits = (torch.randn(num_rows, num_columns, generator=generator) * spread).to(dtype)
    for bad in rng.choice([[], [], [torch.nan, -torch.inf, torch.nan, torch.inf]]):
        logits[rng.randrange(num_rows), rng.randrange(num_columns)] = bad
    mode = rng.choice(list(MODES))
    limit = rng.choice([-1, num_columns, max(1, num_columns - 7)])
    count = rng.randrange(4)
    forbidden = tuple(rng.randrange(-1, num_columns) for _ in range(count))
    softcap = rng.choice([0.0, 0.0, 30.0])
    penalty = 0.0 if softcap else rng.choice([0.0, 1.5])
    penalties = [penalty * (row % 3) for row in range(num_rows)]
    penalty_ids = [rng.randrange(-1, num_columns) for _ in range(num_rows)]
    temperatures = [rng.choice([0.0, 0.5, 1.0, 1.7]) for _ in range(num_rows)]
    uniforms = [rng.random() for _ in range(num_rows)]
    top_k = rng.choice([0, 1, 5, min(64, num_columns)])
    inverse = torch.tensor([1 / t if t else 0.0 for t in temperatures], dtype=torch.float32)
    arguments = {
        "forbidden_ids": torch.tensor(forbidden, dtype=torch.int64, device=device),
        "vocab_limit": limit,
        "exclusion": MODES[mode],
        "softcap": softcap,
        "penalty_ids": torch.tensor(penalty_ids, device=device),
        "penalties": torch.tensor(penalties, dtype=torch.float32, device=device),
        "inv_temperature": inverse.to(device),
        "uniforms": torch.tensor(uniforms, dtype=torch.float64, device=device),
        "top_k": top_k,
    }
    per_row = [
        {
            "inv_temperature": float(inverse[row]),
            "uniform": uniforms[row],
            "forbidden": forbidden,
            "limit": limit,
            "mode": mode,
            "softcap": softcap,
            "penalty": penalties[row],
            "penalty_id": penalty_ids[row],
            "top_k": top_k,
        }
        for row in range(num_rows)
    ]
    return logits.to(device), arguments, per_row


def check_row(result: TokenStats, row: int, expected: oracles.RowStats, num_columns: int) -> None:
    chosen = int(result.ids[row])
    stats = result.stats[row].tolist()
    assert stats[StatsColumn.BAD_COUNT] == expected.bad_count
    if expected.id < 0:
        assert chosen == -1
        assert stats[:7] == [0.0] * 7
        return
    if chosen != expected.id:
        # Only a draw that rounding moved over the edge of its step may differ.
        assert expected.cdf is not None
        raise AssertionError(f"row {row}: id {chosen}, expected {expected.id}")
    for which in (0, 1, 2, 6):
        assert stats[which] == pytest.approx(expected.columns()[which], rel=1e-4, abs=1e-7), which
    entropy_tolerance = 1e-4 * max(1.0, math.log(num_columns))
    assert stats[StatsColumn.ENTROPY] == pytest.approx(expected.entropy, abs=entropy_tolerance)
    assert stats[StatsColumn.LOGSUMEXP] == pytest.approx(expected.logsumexp, abs=2e-5, rel=1e-6)
    assert stats[StatsColumn.MAX_LOGIT] == pytest.approx(expected.max_logit, abs=1e-5, rel=1e-6)
    if result.topk_ids is not None:
        assert result.topk_probs is not None
        assert result.topk_ids[row].tolist() == expected.topk_ids
        np.testing.assert_allclose(
            result.topk_probs[row].tolist(), expected.topk_probs, rtol=1e-4, atol=1e-7
        )


def away_from_edges(expected: oracles.RowStats, uniform: float) -> bool:
    """Whether rounding of the cumulative sum cannot change the draw."""
    if expected.cdf is None:
        return True
    return bool(np.abs(expected.cdf - uniform).min() > 1e-5)


@pytest.mark.every(7)
@pytest.mark.parametrize("seed", range(80))
def test_random_rows(device: str, seed: int) -> None:
    logits, arguments, per_row = random_call(seed, device)
    result = ops.token_stats(logits, **arguments)
    for row, numbers in enumerate(per_row):
        expected = oracles.token_stats_row(logits[row].cpu().double().numpy(), **numbers)
        if away_from_edges(expected, numbers["uniform"]):
            check_row(result, row, expected, logits.shape[1])


def test_greedy_compares_before_the_soft_cap(device: str) -> None:
    # Both saturate at 30 in fp32; the larger raw logit wins although its id is higher.
    logits = torch.tensor([[500.0, 600.0, 1.0]], device=device)
    result = ops.token_stats(logits, softcap=30.0, top_k=2)
    assert result.ids.tolist() == [1]
    assert result.topk_ids is not None
    assert result.topk_ids.tolist() == [[1, 0]]
    assert column(result, StatsColumn.CONFIDENCE) == pytest.approx([0.5], abs=1e-5)


def test_soft_cap_value(device: str) -> None:
    logits = torch.tensor([[60.0, -torch.inf]], device=device)
    result = ops.token_stats(logits, softcap=30.0)
    assert column(result, StatsColumn.LOGSUMEXP) == pytest.approx([28.920827], abs=1e-5)


def test_rows_without_candidates(device: str) -> None:
    logits = torch.full((4, 8), -torch.inf, device=device)
    logits[1, 7] = 3.0
    logits[2] = torch.nan
    logits[3, 2] = 0.0
    result = ops.token_stats(logits, forbidden_ids=vectors.mask_ids(device), top_k=2)
    assert result.ids.tolist() == [-1, -1, -1, 2]
    assert torch.all(result.stats[:3, :7] == 0)
    assert column(result, StatsColumn.BAD_COUNT) == [8.0, 7.0, 8.0, 7.0]
    assert result.topk_ids is not None
    assert result.topk_ids.tolist() == [[-1, -1], [-1, -1], [-1, -1], [2, -1]]


def test_infinite_logit_is_the_largest_finite(device: str) -> None:
    logits = torch.zeros(1, 8, device=device)
    logits[0, 3] = torch.inf
    for inverse in (0.0, 4.0):
        result = ops.token_stats(
            logits,
            inv_temperature=torch.tensor([inverse], device=device),
            uniforms=torch.tensor([0.9], dtype=torch.float64, device=device),
        )
        assert result.ids.tolist() == [3]
        assert column(result, StatsColumn.CONFIDENCE) == [1.0]
        assert column(result, StatsColumn.ENTROPY) == pytest.approx([0.0], abs=1e-6)
        assert torch.isfinite(result.stats).all()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_row_index_and_extra_rows(device: str, index: torch.dtype) -> None:
    logits, extra = torch.randn(3, 70, device=device), torch.randn(2, 70, device=device)
    rows = torch.tensor([4, -1, 0, 3, 2, 2], dtype=index, device=device)
    result = ops.token_stats(logits, extra_logits=extra, row_index=rows, top_k=2)
    everything = ops.token_stats(torch.cat([logits, extra]), top_k=2)
    for row, source in enumerate(rows.tolist()):
        if source < 0:
            assert int(result.ids[row]) == -1
            assert torch.all(result.stats[row] == 0)
            continue
        for actual, expected in zip(result, everything):
            assert actual is not None
            assert expected is not None
            assert torch.equal(actual[row], expected[source])


def test_row_index_out_of_range(device: str) -> None:
    logits = torch.randn(3, 70, device=device)
    rows = torch.tensor([0, 3], dtype=torch.int32, device=device)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=r"^diffulex::token_stats: row_index.*: expected"):
            ops.token_stats(logits, row_index=rows)
    else:
        assert ops.token_stats(logits, row_index=rows).ids.tolist()[1] == -1


def test_padded_row_stride(device: str) -> None:
    padded = torch.full((4, 72), torch.nan, device=device)
    padded[:, :70] = torch.randn(4, 70, device=device)
    view = padded[:, :70]
    for actual, expected in zip(ops.token_stats(view), ops.token_stats(view.contiguous())):
        assert actual is None or torch.equal(actual, expected)


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("mode", list(MODES))
def test_shards_give_the_record_of_the_whole_row(
    device: str, shards: int, top_k: int, mode: str
) -> None:
    logits = torch.randn(6, 8000, device=device) * 4
    logits[0, [17, 4000, 7999]] = 50.0
    logits[1] = -torch.inf
    logits[2, 5] = torch.nan
    forbidden = torch.tensor([4001, 3], device=device)
    numbers: dict[str, Any] = {
        "forbidden_ids": forbidden,
        "vocab_limit": 7990,
        "exclusion": MODES[mode],
        "top_k": top_k,
    }
    whole = ops.token_stats(logits, **numbers)
    width = logits.shape[1] // shards
    parts = [
        ops.token_stats(
            logits[:, start : start + width].contiguous(),
            partial=True,
            vocab_start=start,
            **numbers,
        )
        for start in range(0, logits.shape[1], width)
    ]
    stacked = [
        None if tensors[0] is None else torch.stack(list(tensors)) for tensors in zip(*parts)
    ]
    merged = ops.merge_token_stats(*stacked)
    assert torch.equal(merged.ids, whole.ids)
    torch.testing.assert_close(merged.stats, whole.stats, rtol=1e-5, atol=2e-5)
    if top_k:
        assert merged.topk_ids is not None
        assert whole.topk_ids is not None
        assert torch.equal(merged.topk_ids, whole.topk_ids)
        torch.testing.assert_close(merged.topk_probs, whole.topk_probs, rtol=1e-4, atol=1e-6)


def test_results_repeat_and_rows_are_independent(device: str) -> None:
    logits, arguments, per_row = random_call(11, device)
    first = ops.token_stats(logits, **arguments)
    for _ in range(20):
        again = ops.token_stats(logits, **arguments)
        assert all(torch.equal(a, b) for a, b in zip(first, again) if a is not None)
    for row in range(len(per_row)):
        one = {
            name: value[row : row + 1]
            if name in ("penalty_ids", "penalties", "inv_temperature", "uniforms")
            else value
            for name, value in arguments.items()
        }
        alone = ops.token_stats(logits[row : row + 1], **one)
        assert torch.equal(alone.ids[0], first.ids[row])
        assert torch.equal(alone.stats[0], first.stats[row])


def test_outputs_are_written_in_full(device: str) -> None:
    logits = torch.randn(3, 70, device=device)
    out = TokenStats(
        torch.full((3,), -7, device=device),
        torch.full((3, 8), torch.nan, device=device),
        torch.full((3, 4), -7, device=device),
        torch.full((3, 4), torch.nan, device=device),
    )
    result = ops.token_stats(logits, out=out)
    assert result is out
    fresh = ops.token_stats(logits, top_k=4)
    assert all(torch.equal(a, b) for a, b in zip(out, fresh) if b is not None)


def test_draws_follow_the_distribution(device: str) -> None:
    # 1e5 draws on V = 50, stratified into independent uniforms; chi-square at p = 1e-6 for 48 df.
    num_draws, num_columns = 100_000, 50
    generator = torch.Generator().manual_seed(5)
    row = torch.randn(1, num_columns, generator=generator)
    probabilities = torch.softmax(row[0].double() / 1.3, 0)
    probabilities[7] = 0
    probabilities /= probabilities.sum()
    uniforms = torch.rand(num_draws, generator=generator, dtype=torch.float64)
    result = ops.token_stats(
        row.to(device),
        row_index=torch.zeros(num_draws, dtype=torch.int32, device=device),
        inv_temperature=torch.full((num_draws,), 1 / 1.3, device=device),
        uniforms=uniforms.to(device),
        forbidden_ids=torch.tensor([7], device=device),
    )
    counts = torch.bincount(result.ids.cpu(), minlength=num_columns).double()
    assert counts[7] == 0
    expected = probabilities * num_draws
    kept = expected > 0
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    assert statistic < 115


def test_infinite_logits_share_the_probability(device: str) -> None:
    logits = torch.zeros(2, 3_000, device=device)
    logits[0, [5, 2_900]] = torch.inf
    logits[1, 7] = torch.inf
    result = ops.token_stats(logits)
    assert result.ids.tolist() == [5, 7]
    # confidence, best, second, entropy; an infinite logit counts as the largest float32.
    expected = torch.tensor([[0.5, 0.5, 0.5, math.log(2)], [1.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(result.stats[:, :4].cpu(), expected, rtol=1e-6, atol=1e-6)
    assert result.stats[:, 7].tolist() == [2.0, 1.0]


@pytest.mark.cuda
def test_cpu_and_cuda_draw_the_same_ids_of_a_small_vocabulary() -> None:
    generator = torch.Generator().manual_seed(4)
    arguments = {
        "row_index": torch.arange(100).repeat(1_000).int(),
        "inv_temperature": torch.full((100_000,), 1 / 1.3),
        "uniforms": torch.rand(100_000, generator=generator, dtype=torch.float64),
    }
    logits = torch.randn(100, 50, generator=generator)
    cpu = ops.token_stats(logits, **arguments)
    cuda = ops.token_stats(logits.cuda(), **{name: t.cuda() for name, t in arguments.items()})
    assert (cpu.ids == cuda.ids.cpu()).double().mean() >= 0.9999


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_and_cuda_draw_the_same_ids(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(500, 30_000, generator=generator) * 3).to(dtype)
    row_index = torch.arange(500).repeat(8).int()
    arguments = {
        "row_index": row_index,
        "inv_temperature": torch.linspace(0.5, 2.0, len(row_index)),
        "uniforms": torch.rand(len(row_index), generator=generator, dtype=torch.float64),
        "forbidden_ids": torch.tensor([29_999]),
    }
    cpu = ops.token_stats(logits, **arguments)
    cuda = ops.token_stats(logits.cuda(), **{name: t.cuda() for name, t in arguments.items()})
    same = cpu.ids == cuda.ids.cpu()
    # 30,000 boundaries of the distribution function: a few uniforms fall within rounding of one.
    scaled = logits.double()[row_index.long()] * arguments["inv_temperature"].double()[:, None]
    scaled[:, 29_999] = -torch.inf
    bounds = torch.softmax(scaled, dim=-1).cumsum(dim=-1)
    gap = (bounds - arguments["uniforms"][:, None]).abs().amin(dim=-1)
    assert not (gap[~same] >= 1e-6).any()
    assert same.double().mean() >= 0.99
    torch.testing.assert_close(cuda.stats.cpu()[same], cpu.stats[same], rtol=1e-4, atol=1e-4)
    greedy = ops.token_stats(logits).ids
    assert torch.equal(ops.token_stats(logits.cuda()).ids.cpu(), greedy)
