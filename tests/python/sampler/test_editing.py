# SPDX-License-Identifier: Apache-2.0
"""The edit and dmax samplers on the published vectors, through their configuration."""

from __future__ import annotations

import math

import pytest
import torch

from diffulex.samplers.inputs import EditArrays, MergeArrays, RowFilters
from vectors import (
    BLOCK,
    COMMITTABLE,
    CONFIDENT,
    MASK,
    R0,
    R1,
    R2,
    R3,
    SAME,
    TIMED_OUT,
    Step,
    logits_of,
    sampler_of,
)

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
ROWS = (R0, R1, R2, R3)


def edit_arrays(
    device: str, edit: float = 0.5, post_edit_steps: int = 0, penalty: float | None = None
) -> EditArrays:
    """Of one block, with 16 steps after it is filled."""
    return EditArrays(
        torch.tensor([edit], device=device),
        torch.tensor([post_edit_steps], dtype=torch.int32, device=device),
        torch.tensor([16], dtype=torch.int32, device=device),
        None if penalty is None else torch.tensor([penalty], device=device),
    )


def edit_step(
    sampler: object,
    tokens: list[int],
    device: str,
    *,
    accept: float = 0.7,
    edit: float = 0.5,
    post_edit_steps: int = 0,
    open_steps: int = 0,
    editable_start: int = 1,
    penalty: float | None = None,
) -> Step:
    arrays = edit_arrays(device, edit, post_edit_steps, penalty)
    return Step(
        logits_of(*ROWS, device=device),
        tokens,
        [0, 1, 2, 3],
        threshold=accept,
        editable_start=editable_start,
        open_steps=open_steps,
        parts={"edit": arrays},
    ).run(sampler)


@DEVICES
@pytest.mark.parametrize(("accept", "edit"), [(0.7, 0.5), (0.5, 0.0)])
def test_edit_course(device: str, accept: float, edit: float) -> None:
    sampler = sampler_of("llada2dot1_mini", device)
    first = edit_step(sampler, [3, MASK, 5, MASK], device, accept=accept, edit=edit)
    assert first.writes == {1: 2, 2: 3}
    assert (first.ratio, first.flags & COMMITTABLE) == (0.0, 0)
    second = edit_step(sampler, [3, 2, 3, MASK], device, accept=accept, edit=edit, open_steps=1)
    assert second.writes == {3: 4}
    assert (second.ratio, second.flags & COMMITTABLE) == (1.0, 0)
    third = edit_step(sampler, [3, 2, 3, 4], device, accept=accept, edit=edit, open_steps=2)
    assert third.writes == {}
    assert third.flags & (COMMITTABLE | SAME) == COMMITTABLE | SAME


@DEVICES
def test_edit_runs_out_of_time(device: str) -> None:
    sampler = sampler_of("llada2dot1_mini", device)
    # The op counts the current step itself: the twentieth is the last.
    late = edit_step(sampler, [3, MASK, 5, MASK], device, open_steps=BLOCK + 16 - 1)
    assert late.writes == {1: 2, 2: 3, 3: 4}
    assert late.flags & (COMMITTABLE | TIMED_OUT) == COMMITTABLE | TIMED_OUT
    early = edit_step(sampler, [3, MASK, 5, MASK], device, open_steps=BLOCK + 16 - 2)
    assert early.writes == {1: 2, 2: 3}


@DEVICES
def test_repetition_penalty(device: str) -> None:
    sampler = sampler_of("llada2dot1_mini", device)
    # Position 1 stands behind token 2, the best id of its row.
    step = edit_step(sampler, [2, MASK, 3, 4], device, editable_start=0, penalty=2.0)
    assert step.writes[1] == 1
    assert float(step.inputs.confidence[0, 1]) == pytest.approx(0.207813, abs=1e-5)
    # A mask in front takes nothing; the first row of a block never loses anything.
    free = edit_step(sampler, [MASK, MASK, 3, 4], device, editable_start=0, penalty=2.0)
    assert free.writes[0] == 1
    assert float(free.inputs.confidence[0, 0]) == pytest.approx(0.92, abs=1e-5)
    # Taken from the mask, it would leave id 2 a share of .6 / .956767.
    assert float(free.inputs.confidence[0, 1]) == pytest.approx(0.6, abs=1e-6)


@DEVICES
def test_repetition_penalty_of_filtered_rows(device: str) -> None:
    """The kernel of the filters has no penalty: the logits carry it, once, in a copy."""
    sampler = sampler_of("llada2dot1_mini", device)
    logits = logits_of(*ROWS, device=device)
    before = logits.clone()
    arrays = edit_arrays(device, penalty=2.0)
    # Row 1, behind token 2, keeps one candidate; row 3, behind token 4, draws unfiltered.
    filters = RowFilters(
        torch.tensor([0, 1, 0, 0], dtype=torch.int32, device=device),
        torch.ones(4, device=device),
        torch.zeros(4, device=device),
    )
    step = Step(
        logits,
        [2, MASK, 4, MASK],
        [0, 1, 2, 3],
        temperature=1.0,
        uniforms=[0.5, 0.5, 0.5, 0.28],
        threshold=0.03,
        parts={"edit": arrays, "filters": filters},
    ).run(sampler)
    # R1: 1 has .10 / (.4 + .6 e^-2). R3 over its candidates: .05 * 4, then .25 e^-2, .10, .05; of
    # their .383834, .28 falls to id 2, and all of the row has .783834.
    taken = math.exp(-2)
    expected = [0.10 / (0.4 + 0.6 * taken), 0.05 / (0.75 + 0.25 * taken)]
    assert (step.writes[1], step.writes[3]) == (1, 2)
    assert step.inputs.confidence[0, 1::2].tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(logits, before)


@DEVICES
@pytest.mark.parametrize(
    ("space", "expected"), [("raw", 0.6), ("tempered", 0.935065), ("processed", 1.0)]
)
def test_spaces_of_an_edit(device: str, space: str, expected: float) -> None:
    """Only what is compared changes: the draw is the same."""
    sampler = sampler_of("llada2dot1_mini", device, confidence_space=space)
    filters = RowFilters(
        torch.zeros(4, dtype=torch.int32, device=device),
        torch.full((4,), 0.5, device=device),
        torch.zeros(4, device=device),
    )
    arrays = edit_arrays(device)
    writes = {}
    for threshold in (expected - 1e-3, expected + 1e-3):
        step = Step(
            logits_of(R1, R1, R1, R1, device=device),
            [2, MASK, 2, 2],
            [0, 1, 2, 3],
            threshold=threshold,
            gate=0,
            temperature=0.5,
            parts={"edit": arrays, "filters": filters},
        ).run(sampler)
        assert float(step.inputs.confidence[0, 1]) == pytest.approx(expected, abs=1e-5)
        writes[threshold > expected] = step.writes
    assert writes == {False: {1: 2}, True: {}}


def merge_arrays(top_k: int, device: str) -> MergeArrays:
    return MergeArrays(
        torch.full((1, BLOCK), 9, dtype=torch.uint8, device=device),
        torch.zeros(1, BLOCK, top_k, dtype=torch.int64, device=device),
        torch.zeros(1, BLOCK, top_k, device=device),
        torch.zeros(1, BLOCK, device=device),
    )


def dmax_step(
    sampler: object, tokens: list[int], device: str, top_k: int = 1, **fields: object
) -> tuple[Step, MergeArrays]:
    merge = merge_arrays(top_k, device)
    step = Step(
        logits_of(*ROWS, device=device),
        tokens,
        [0, 1, 2, 3],
        threshold=0.5,
        parts={"merge": merge},
        **fields,  # type: ignore[arg-type]
    ).run(sampler)
    return step, merge


@DEVICES
def test_dmax_course(device: str) -> None:
    sampler = sampler_of("llada2_mini_dmax", device)
    first, merge = dmax_step(sampler, [MASK] * 4, device)
    assert first.writes == {0: 1, 1: 2, 2: 3}
    assert not first.flags & COMMITTABLE
    assert merge.valid[0].tolist() == [1, 1, 1, 0]
    assert merge.topk_ids[0, :3, 0].tolist() == [1, 2, 3]
    probabilities, residual = merge.topk_probs[0, :3, 0].cpu(), merge.residual[0, :3].cpu()
    torch.testing.assert_close(probabilities, torch.tensor([0.92, 0.6, 0.96]))
    torch.testing.assert_close(residual, torch.tensor([0.08, 0.4, 0.04]), atol=1e-6, rtol=0)
    second, merge = dmax_step(sampler, [1, 2, 3, MASK], device, open_steps=1)
    assert second.writes == {3: 4}
    assert not second.flags & COMMITTABLE
    assert merge.valid[0].tolist() == [1, 1, 1, 1]
    assert merge.residual[0, 3].item() == pytest.approx(0.75, abs=1e-6)
    third, _ = dmax_step(sampler, [1, 2, 3, 4], device, open_steps=2)
    assert third.writes == {}
    assert third.flags & COMMITTABLE
    assert not third.flags & CONFIDENT
    # A token of the prompt takes no part.
    prompt, _ = dmax_step(sampler, [5, 2, 3, 4], device, editable_start=1)
    assert prompt.writes == {}
    assert prompt.flags & COMMITTABLE


@DEVICES
def test_dmax_fast_path(device: str) -> None:
    sampler = sampler_of("llada2_mini_dmax", device, dmax_sampler_fast_path=True)
    step, _ = dmax_step(sampler, [1, 2, 3, 4], device)
    assert step.flags & CONFIDENT


@DEVICES
def test_dmax_candidates_are_those_at_temperature_one(device: str) -> None:
    sampler = sampler_of("llada2_mini_dmax", device, token_merge_top_k=2)
    greedy, expected = dmax_step(sampler, [1, 2, 3, 4], device, top_k=2)
    drawn, merge = dmax_step(
        sampler, [1, 2, 3, 4], device, top_k=2, temperature=0.5, uniforms=[0.5] * 4
    )
    assert greedy.writes == drawn.writes
    assert torch.equal(merge.topk_ids, expected.topk_ids)
    torch.testing.assert_close(merge.topk_probs, expected.topk_probs)
    ids, probabilities = merge.topk_ids[0, 1].tolist(), merge.topk_probs[0, 1].tolist()
    assert ids == [2, 1]
    assert probabilities == pytest.approx([0.6, 0.1], abs=1e-6)
    assert merge.residual[0, 1].item() == pytest.approx(0.3, abs=1e-6)


def test_editing_samplers_do_not_write_masks() -> None:
    sampler = sampler_of("llada2dot1_mini")
    row = (0.01,) * 7 + (0.93,)
    logits = torch.tensor([[math.log(p) for p in row]] * 4)
    arrays = edit_arrays("cpu", edit=0.0)
    step = Step(logits, [0, 1, 2, MASK], [0, 1, 2, 3], threshold=0.5, parts={"edit": arrays})
    assert MASK not in step.run(sampler).writes.values()
