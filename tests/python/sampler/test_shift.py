# SPDX-License-Identifier: Apache-2.0
"""Logits that predict the next position: saved rows, seeds, and draws from saved logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffulex.samplers.inputs import CarryArrays, RowFilters, SeedArrays
from vectors import CARRY, MASK, R0, R1, R2, R3, Step, logits_of, sampler_of

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
ALL_MASKS = [MASK] * 4
FIRST_RECORD, NUM_SLOTS, SLOT = 12, 3, 2


def carry(
    device: str,
    last_row: int = -1,
    *,
    sources: list[int] | None = None,
    num_rows: int = 0,
    has_draws: bool = False,
) -> CarryArrays:
    """One request in slot 2."""
    sources = sources or [-1] * num_rows

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return CarryArrays(
        last_row_index=ints([last_row]),
        request_slots=ints([SLOT]),
        logits_source=ints(sources),
        num_saved_sources=sum(source >= 0 for source in sources),
        has_sampled_requests=has_draws,
    )


def shifted_sampler(device: str) -> Any:
    sampler = sampler_of("dream", device, decoding_strategy="multi_bd")
    sampler.keep_rows(FIRST_RECORD, NUM_SLOTS)
    return sampler


@DEVICES
def test_carried_row_predicts_the_first_position(device: str) -> None:
    sampler = shifted_sampler(device)
    # The step that stores the block before: its last row is the second of its two rows.
    stored = Step(
        logits_of(R3, CARRY, device=device),
        [0, 0, 0, 0],
        [-1] * 4,
        parts={"carry": carry(device, last_row=1, num_rows=2)},
    )
    stored.run(sampler)
    for threshold, expected in ((0.91, {1: 1, 3: 3}), (0.97, {3: 3}), (0.89, {0: 0, 1: 1, 3: 3})):
        step = Step(
            logits_of(R0, R1, R2, device=device),
            ALL_MASKS,
            [FIRST_RECORD + SLOT, 0, 1, 2],
            threshold=threshold,
            parts={"carry": carry(device, num_rows=3)},
        ).run(sampler)
        assert step.writes == expected
        confidence = step.inputs.confidence[0].cpu()
        torch.testing.assert_close(confidence, torch.tensor([0.9, 0.92, 0.6, 0.96]))


@DEVICES
def test_slots_do_not_disturb_each_other(device: str) -> None:
    sampler = shifted_sampler(device)
    arrays = carry(device, last_row=0, num_rows=1)
    Step(logits_of(CARRY, device=device), [0] * 4, [-1] * 4, parts={"carry": arrays}).run(sampler)
    other = carry(device, last_row=0, num_rows=1)
    other.request_slots.fill_(SLOT - 1)
    Step(logits_of(R2, device=device), [0] * 4, [-1] * 4, parts={"carry": other}).run(sampler)
    # Neither does a request that has nothing to save, whatever its slot says.
    nothing = carry(device, last_row=-1, num_rows=1)
    Step(logits_of(R1, device=device), [0] * 4, [-1] * 4, parts={"carry": nothing}).run(sampler)
    for slot, expected in ((SLOT, 0), (SLOT - 1, 3)):
        step = Step(
            logits_of(R0, device=device),
            [MASK, 1, 1, 1],
            [FIRST_RECORD + slot, -1, -1, -1],
            parts={"carry": carry(device, num_rows=1)},
        ).run(sampler)
        assert step.writes == {0: expected}


@DEVICES
@pytest.mark.parametrize("has_filters", [False, True])
@pytest.mark.parametrize("draw", [0.05, 0.31, 0.5, 0.93])
def test_two_steps_propose_the_same(device: str, draw: float, has_filters: bool) -> None:
    """The row that a step reads directly, and the next step from the saved logits."""
    sampler = shifted_sampler(device)

    def filters(count: int) -> RowFilters | None:
        if not has_filters:
            return None
        return RowFilters(
            torch.full((count,), 5, dtype=torch.int32, device=device),
            torch.full((count,), 0.8, device=device),
            torch.zeros(count, device=device),
        )

    both = Step(
        logits_of(R3, R0, device=device),
        [MASK, MASK, 1, 1],
        [0, 1, -1, -1],
        temperature=1.5,
        uniforms=[draw, 0.5],
        threshold=0.0,
        parts={
            "carry": carry(device, last_row=0, num_rows=2, has_draws=True),
            "filters": filters(2),
        },
    ).run(sampler)
    alone = Step(
        logits_of(R1, R0, device=device),
        [MASK, MASK, 1, 1],
        [0, 1, -1, -1],
        temperature=1.5,
        uniforms=[draw, 0.5],
        threshold=0.0,
        parts={
            "carry": carry(device, sources=[SLOT, -1], has_draws=True),
            "filters": filters(2),
        },
    ).run(sampler)
    assert alone.writes == both.writes
    assert torch.equal(alone.inputs.confidence, both.inputs.confidence)


@DEVICES
@pytest.mark.parametrize(("threshold", "expected"), [(0.91, {1: 1, 3: 3}), (0.97, {3: 3})])
def test_local_shift_of_fast_dllm_v2(
    device: str, threshold: float, expected: dict[int, int]
) -> None:
    sampler = sampler_of("fast_dllm_v2", device, buffer_size=2)
    step = Step(
        logits_of(R0, R1, R2, device=device), [5, MASK, MASK, MASK], [-1, 0, 1, 2], threshold
    ).run(sampler)
    assert step.writes == expected


@DEVICES
def test_seed_of_the_next_block(device: str) -> None:
    sampler = sampler_of("fast_dllm_v2", device, buffer_size=2)
    seeds = SeedArrays(
        torch.tensor([-1, 1, -1], dtype=torch.int32, device=device),
        torch.full((3,), 99, dtype=torch.int64, device=device),
    )
    step = Step(
        logits_of(R0, R3, device=device), [5, MASK, 1, 1], [-1, 0, -1, -1], parts={"seeds": seeds}
    )
    step.run(sampler)
    # The mask is the best id of R3, and never chosen.
    assert seeds.pending_next_token.tolist() == [-1, 4, -1]
    assert step.writes == {1: 1}
    # A step without rows leaves no seed behind.
    empty = Step(logits_of(R0, device=device)[:0], [1] * 4, [-1] * 4, parts={"seeds": seeds})
    empty.run(sampler)
    assert seeds.pending_next_token.tolist() == [-1, -1, -1]


def test_logits_are_kept_only_once_a_request_draws() -> None:
    sampler = shifted_sampler("cpu")
    arrays = carry("cpu", last_row=0, num_rows=1)
    Step(logits_of(R0), [0] * 4, [-1] * 4, parts={"carry": arrays}).run(sampler)
    assert sampler.rows.saved_logits is None
    arrays = carry("cpu", last_row=0, num_rows=1, has_draws=True)
    Step(logits_of(R0), [0] * 4, [-1] * 4, parts={"carry": arrays}).run(sampler)
    assert sampler.rows.saved_logits.shape == (NUM_SLOTS + 1, 8)
    assert torch.equal(sampler.rows.saved_logits[SLOT], logits_of(R0)[0])
