# SPDX-License-Identifier: Apache-2.0
"""Settings that act on the rows: filters, their order, spaces of confidence, demotion."""

from __future__ import annotations

import pytest
import torch

from diffulex.samplers.inputs import EditArrays, MergeArrays, RowFilters
from vectors import BLOCK, MASK, R0, R1, R2, Step, logits_of, sampler_of

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def filters(device: str, count: int, top_k: int = 0, top_p: float = 1.0) -> RowFilters:
    return RowFilters(
        torch.full((count,), top_k, dtype=torch.int32, device=device),
        torch.full((count,), top_p, device=device),
        torch.zeros(count, device=device),
    )


def one_row(
    sampler: object, device: str, draw: float, top_k: int = 0, top_p: float = 1.0
) -> tuple[int, float]:
    """Token and confidence of R1 at temperature 1."""
    step = Step(
        logits_of(R1, device=device),
        [MASK, 1, 1, 1],
        [0, -1, -1, -1],
        temperature=1.0,
        uniforms=[draw],
        parts={"filters": filters(device, 1, top_k, top_p)},
    ).run(sampler)
    return step.writes[0], float(step.inputs.confidence[0, 0])


@DEVICES
def test_nucleus_and_candidates(device: str) -> None:
    sampler = sampler_of("dream", device)
    assert one_row(sampler, device, 0.10, top_p=0.65) == (1, pytest.approx(0.142857, abs=1e-5))
    assert one_row(sampler, device, 0.50, top_p=0.65) == (2, pytest.approx(0.857143, abs=1e-5))
    assert one_row(sampler, device, 0.50, top_k=2) == (2, pytest.approx(0.857143, abs=1e-5))
    # Six ids share the third place: all eight are kept.
    assert one_row(sampler, device, 0.01, top_k=3) == (0, pytest.approx(0.05, abs=1e-5))


@DEVICES
def test_order_of_the_filters(device: str) -> None:
    # Of R1, top-p .7 alone keeps ids 2 (.6) and 1, and of the six ids at .05 the lowest.
    # After top-k 2, id 2 has .857: id 1 comes after more than .7 and goes.
    p_first = one_row(sampler_of("dream", device), device, 0.01, top_k=2, top_p=0.7)
    k_first = one_row(sampler_of("sdar", device), device, 0.01, top_k=2, top_p=0.7)
    assert p_first == (1, pytest.approx(0.142857, abs=1e-5))
    assert k_first == (2, pytest.approx(1.0, abs=1e-6))


TOP_P_FIRST, TOP_K_FIRST = 1, 2


@DEVICES
@pytest.mark.parametrize(
    ("name", "strategy", "expected"),
    [
        ("dream", "d2f", TOP_P_FIRST),
        ("diffucoder", "d2f", TOP_P_FIRST),
        ("llada", "d2f", TOP_P_FIRST),
        ("sdar", "multi_bd", TOP_K_FIRST),
        ("sdar_moe", "multi_bd", TOP_K_FIRST),
        ("dream_reasoner", "multi_bd", TOP_K_FIRST),
        ("llada2", "multi_bd", TOP_K_FIRST),
        ("llada2dot1_mini", "multi_bd", TOP_K_FIRST),
        ("llada2_mini_dmax", "dmax", TOP_K_FIRST),
    ],
)
def test_every_family_has_its_order(device: str, name: str, strategy: str, expected: int) -> None:
    """As above: the lowest draw tells whether id 1 is still there."""
    sampler = sampler_of(name, device, decoding_strategy=strategy)
    merge = MergeArrays(
        torch.zeros(1, BLOCK, dtype=torch.uint8, device=device),
        torch.zeros(1, BLOCK, 1, dtype=torch.int64, device=device),
        torch.zeros(1, BLOCK, 1, device=device),
        torch.zeros(1, BLOCK, device=device),
    )
    count = torch.zeros(1, dtype=torch.int32, device=device)
    edit = EditArrays(torch.tensor([0.99], device=device), count, count + 16, None)
    own = {"llada2dot1_mini": {"edit": edit}, "llada2_mini_dmax": {"merge": merge}}
    step = Step(
        logits_of(R1, R0, R0, R0, device=device),
        [MASK, 1, 1, 1],
        [0, 1, 2, 3],
        temperature=1.0,
        uniforms=[0.01, 0.5, 0.5, 0.5],
        parts={"filters": filters(device, 4, 2, 0.7), **own.get(name, {})},
    ).run(sampler)
    assert step.writes[0] == expected


@DEVICES
@pytest.mark.parametrize(
    ("space", "expected"), [("processed", 0.857143), ("tempered", 0.6), ("raw", 0.6)]
)
def test_spaces_of_confidence(device: str, space: str, expected: float) -> None:
    sampler = sampler_of("dream", device, confidence_space=space)
    assert one_row(sampler, device, 0.5, top_p=0.65) == (2, pytest.approx(expected, abs=1e-5))


@DEVICES
def test_tempered_confidence_is_that_before_the_filters(device: str) -> None:
    sampler = sampler_of("fast_dllm_v2", device, buffer_size=2)
    step = Step(
        logits_of(R1, device=device),
        [1, MASK, 1, 1],
        [-1, 0, -1, -1],
        temperature=0.5,
        uniforms=[0.5],
        parts={"filters": filters(device, 1, top_p=0.5)},
    ).run(sampler)
    assert step.writes == {1: 2}
    # Of softmax(2 l) of R1; the nucleus has this id alone, with a share of 1.
    assert float(step.inputs.confidence[0, 1]) == pytest.approx(0.935065, abs=1e-5)


@DEVICES
def test_demoted_ids_are_taken_only_when_nothing_else_is(device: str) -> None:
    sampler = sampler_of("dream", device, demote_token_ids=[1, 3])
    rows = logits_of(R0, R1, R2, device=device)
    step = Step(rows, [MASK, MASK, MASK, 1], [0, 1, 2, -1], threshold=0.9).run(sampler)
    # R0 and R2 propose demoted ids with .92 and .96.
    assert step.writes == {1: 2}
    closed = Step(rows, [MASK, MASK, MASK, 1], [0, 1, 2, -1], threshold=0.9, gate=0)
    assert closed.run(sampler).writes == {}
    only = Step(rows, [MASK, 1, MASK, 1], [0, -1, 2, -1], threshold=0.0).run(sampler)
    assert only.writes == {0: 1}


@DEVICES
@pytest.mark.parametrize("ranking", ["max_prob", "margin_confidence", "neg_entropy"])
def test_demotion_reaches_every_ranking(device: str, ranking: str) -> None:
    sampler = sampler_of("dream", device, demote_token_ids=[3], confidence_type=ranking)
    rows = logits_of(R2, R1, device=device)
    step = Step(rows, [MASK, MASK, 1, 1], [0, 1, -1, -1], threshold=0.99).run(sampler)
    assert step.writes == {1: 2}


@DEVICES
def test_leftmost_prefix_and_hierarchy(device: str) -> None:
    rows = logits_of(R0, R1, R2, (0.05, 0.05, 0.05, 0.05, 0.25, 0.10, 0.05, 0.40), device=device)

    def accepted(tokens: list[int], threshold: float, **settings: object) -> set[int]:
        sampler = sampler_of("dream", device, **settings)
        return set(Step(rows, tokens, [0, 1, 2, 3], threshold=threshold).run(sampler).writes)

    for threshold, expected in ((0.5, {0, 1, 2}), (0.7, {0}), (0.95, {0}), (0.0, {0, 1, 2, 3})):
        got = accepted([MASK] * 4, threshold, acceptance_rule="leftmost_prefix")
        assert got == expected, threshold
    holes = [MASK, MASK, 1, MASK]
    for low, expected in ((0.4, {0}), (0.2, {0, 3})):
        got = accepted(holes, 0.97, acceptance_rule="hierarchy", low_threshold=low)
        assert got == expected, low
