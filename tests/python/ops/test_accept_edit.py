# SPDX-License-Identifier: Apache-2.0
"""accept_edit against the worked vectors and its reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import sampling_vectors as vectors
from diffulex import ops
from diffulex.ops import AcceptFlag, ConfidenceKind, EditResult
from reference.acceptance import accept_edit_reference
from rewriting_cases import MASK, ints, moved, one_block, random_blocks, writes


def edit(
    device: str,
    tokens: list[int],
    *,
    tau: float = 0.7,
    edit_tau: float = 0.5,
    post: int = 0,
    max_post: int = 16,
    start: int = 1,
    **options: Any,
) -> EditResult:
    kind = options.pop("confidence_kind", ConfidenceKind.MAX_PROB)
    tensors = one_block(device, tokens, tau=tau, start=start, **options)
    numbers: dict[str, Any] = {
        "mask_token_id": MASK,
        "confidence_kind": kind,
    }
    tensors |= {
        "edit_threshold": torch.tensor([edit_tau], device=device),
        "post_edit_steps": ints(device, post),
        "max_post_edit_steps": ints(device, max_post),
    }
    result = ops.accept_edit(**tensors, **numbers)
    for actual, expected in zip(result, accept_edit_reference(**tensors, **numbers)):
        assert torch.equal(actual, expected)
    return result


def flags(result: EditResult) -> AcceptFlag:
    return AcceptFlag(int(result.flags[0]))


@pytest.mark.parametrize(("tau", "edit_tau"), [(0.7, 0.5), (0.5, 0.0)])
def test_vector_e(device: str, tau: float, edit_tau: float) -> None:
    steps = [
        ([3, MASK, 5, MASK], {1: 2, 2: 3}, 0.0, False),
        ([3, 2, 3, MASK], {3: 4}, 1.0, False),
        ([3, 2, 3, 4], {}, 1.0, True),
    ]
    for step, (tokens, wanted, ratio, done) in enumerate(steps):
        result = edit(device, tokens, tau=tau, edit_tau=edit_tau, step=step)
        assert writes(result.write_ids) == wanted
        assert float(result.same_token_ratio[0]) == ratio
        assert bool(flags(result) & AcceptFlag.COMMITTABLE) == done
        assert bool(flags(result) & AcceptFlag.SAME_AS_PREVIOUS) == done
        assert int(result.masks_left[0]) == [1, 0, 0][step]
        assert result.confidence[0].tolist() == pytest.approx([0, 0.6, 0.96, 0.25], abs=1e-6)


def test_vector_e_without_exclusion_turns_a_token_into_a_mask(device: str) -> None:
    result = edit(device, [3, 2, 3, 4], tau=0.5, edit_tau=0.0, exclusion=ops.ExclusionMode.OFF)
    assert writes(result.write_ids) == {3: MASK}
    assert float(result.same_token_ratio[0]) == pytest.approx(2 / 3, abs=1e-6)
    assert int(result.masks_left[0]) == 1
    assert not flags(result) & (AcceptFlag.COMMITTABLE | AcceptFlag.PROGRESSED)


def test_vector_e_penalty(device: str) -> None:
    result = ops.token_stats(
        vectors.logits(device)[1:2],
        forbidden_ids=vectors.mask_ids(device),
        penalty_ids=torch.tensor([2], device=device),
        penalties=torch.tensor([2.0], device=device),
    )
    assert int(result.ids[0]) == 1
    assert float(result.stats[0, 0]) == pytest.approx(0.207813, abs=1e-6)


def test_vector_e_timeout(device: str) -> None:
    # 19 earlier open steps: the current one is the 20th, B + 16.
    result = edit(device, [3, MASK, 5, MASK], step=19)
    assert writes(result.write_ids) == {1: 2, 2: 3, 3: 4}
    assert flags(result) & AcceptFlag.COMMITTABLE
    assert flags(result) & AcceptFlag.TIMED_OUT
    assert not flags(edit(device, [3, MASK, 5, MASK], step=18)) & AcceptFlag.TIMED_OUT
    # A closed gate does not count the current step.
    closed = edit(device, [3, MASK, 5, MASK], step=19, gate=False)
    assert not flags(closed) & AcceptFlag.TIMED_OUT
    assert writes(closed.write_ids) == {2: 3}


def test_closed_gate_forces_nothing(device: str) -> None:
    result = edit(device, [3, MASK, 3, MASK], gate=False)
    assert writes(result.write_ids) == {}
    assert flags(result) == AcceptFlag.SAME_AS_PREVIOUS
    passing = edit(device, [3, MASK, 3, MASK], tau=0.5, gate=False)
    assert writes(passing.write_ids) == {1: 2}
    assert flags(passing) == AcceptFlag.PROGRESSED


def test_post_edit_steps(device: str) -> None:
    # Edits go on at full budget minus one; at the budget the block commits with that step's edits.
    for post, committed in ((0, False), (1, False), (2, True), (3, True)):
        result = edit(device, [3, 2, 5, 4], max_post=3, post=post)
        assert bool(flags(result) & AcceptFlag.COMMITTABLE) == committed, post
        # Past the budget, which a correct engine never reaches, edits are discarded.
        assert writes(result.write_ids) == ({} if post == 3 else {2: 3})
    at_once = edit(device, [3, MASK, 3, 4], max_post=0)
    assert writes(at_once.write_ids) == {1: 2}
    assert flags(at_once) & AcceptFlag.COMMITTABLE


def test_masks_outside_the_editable_part(device: str) -> None:
    result = edit(device, [MASK, 2, 3, MASK], valid_len=3)
    assert writes(result.write_ids) == {}
    assert int(result.masks_left[0]) == 0
    assert flags(result) & AcceptFlag.COMMITTABLE
    padding = edit(device, [MASK] * 4, start=0, valid_len=0)
    assert writes(padding.write_ids) == {}
    assert int(padding.masks_left[0]) == 0
    assert float(padding.same_token_ratio[0]) == 1.0


def test_missing_rows_skip_the_block(device: str) -> None:
    # Also the row of a decoded position, which may be edited.
    for rows in ([0, -1, 2, 3], [0, 1, -1, 3]):
        result = edit(device, [3, MASK, 5, MASK], tau=0.1, step=30, rows=rows)
        assert writes(result.write_ids) == {}
        assert flags(result) == AcceptFlag.SKIPPED | AcceptFlag.SAME_AS_PREVIOUS
        assert int(result.masks_left[0]) == 2
    # The prompt part needs none.
    assert writes(edit(device, [3, MASK, 5, 4], rows=[-1, 1, 2, 3]).write_ids) == {1: 2, 2: 3}


def test_bad_rows(device: str) -> None:
    logits = vectors.logits(device)
    logits[1:3] = torch.nan
    result = edit(device, [3, MASK, 5, MASK], tau=0.0, edit_tau=0.0, step=30, logits=logits)
    assert writes(result.write_ids) == {3: 4}
    assert flags(result) & AcceptFlag.BAD_LOGITS
    assert flags(result) & AcceptFlag.TIMED_OUT
    assert not flags(result) & AcceptFlag.COMMITTABLE
    assert int(result.masks_left[0]) == 1


def test_both_thresholds_are_strict(device: str) -> None:
    logits = torch.full((4, 8), -torch.inf, device=device)
    logits[:, :2] = 0.0  # p is .5 exactly
    for tau, edit_tau, wanted in (
        (0.5, 0.5, {}),
        (0.49, 0.5, {2: 0, 3: 0}),
        (0.5, 0.49, {1: 0}),
    ):
        tokens = [3, 5, MASK, MASK]
        result = edit(device, tokens, tau=tau, edit_tau=edit_tau, gate=False, logits=logits)
        assert writes(result.write_ids) == wanted


def test_ranking_decides_the_forced_position(device: str) -> None:
    rows = [
        [0.46, 0.44, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01],
        [0.40, 0.10, 0.10, 0.10, 0.10, 0.08, 0.06, 0.06],
    ] * 2
    logits = torch.tensor(rows, device=device).log()
    for kind, position in zip(ConfidenceKind, (0, 1, 0)):
        result = edit(device, [MASK, MASK, 0, 0], start=0, logits=logits, confidence_kind=kind)
        assert writes(result.write_ids) == {position: 0}


def random_edit(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, _ = random_blocks(seed)
    rng = random.Random(-seed)
    num_blocks, block_size = tensors["tokens"].shape

    def choices(*values: Any) -> list[Any]:
        return [rng.choice(values) for _ in range(num_blocks)]

    limits = torch.tensor(choices(0, 2, 16)).int()
    tensors |= {
        "edit_threshold": torch.tensor(choices(0.0, 0.3, 0.9)),
        "post_edit_steps": torch.tensor(
            [rng.choice((0, 1, k, k + 1)) for k in limits.tolist()]
        ).int(),
        "max_post_edit_steps": limits,
        "open_steps": torch.tensor(
            [rng.choice((0, 3, block_size + k - 1, block_size + k)) for k in limits.tolist()]
        ).int(),
    }
    numbers = {
        "mask_token_id": MASK,
        "confidence_kind": rng.choice(list(ConfidenceKind)),
        "raw_confidence": rng.random() < 0.5,
    }
    return tensors, numbers


@pytest.mark.every(9)
@pytest.mark.parametrize("seed", range(150))
def test_random_blocks(device: str, seed: int) -> None:
    tensors, numbers = random_edit(seed)
    expected = accept_edit_reference(**tensors, **numbers)
    actual = ops.accept_edit(**moved(tensors, device), **numbers)
    for name, wanted, got in zip(EditResult._fields, expected, actual):
        assert torch.equal(got.cpu(), wanted), (name, numbers)


def test_batch_equals_single_blocks(device: str) -> None:
    cases = (random_edit(seed) for seed in range(100))
    tensors, numbers = next(case for case in cases if case[0]["tokens"].shape[0] >= 4)
    tensors = moved(tensors, device)
    whole = ops.accept_edit(**tensors, **numbers)
    per_row = {"ids", "stats"}
    for block in range(tensors["tokens"].shape[0]):
        alone = {n: t if n in per_row else t[block : block + 1] for n, t in tensors.items()}
        for batched, single in zip(whole, ops.accept_edit(**alone, **numbers)):
            assert torch.equal(batched[block], single[0])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("row_index", 4, "expected -1 or a row below 4, got 4"),
        ("editable_start", 5, "expected 0 to 4, got 5"),
        ("valid_len", -1, "expected 0 to 4, got -1"),
        ("open_steps", -1, "expected a value >= 0, got -1"),
        ("post_edit_steps", -2, "expected a value >= 0, got -2"),
        ("max_post_edit_steps", -1, "expected a value >= 0, got -1"),
    ],
)
def test_data_errors(name: str, value: int, message: str) -> None:
    tensors = one_block("cpu", [3, MASK, 5, MASK])
    tensors |= {
        "edit_threshold": torch.tensor([0.5]),
        "post_edit_steps": ints("cpu", 0),
        "max_post_edit_steps": ints("cpu", 16),
    }
    tensors[name].view(-1)[0] = value
    with pytest.raises(RuntimeError, match=rf"^diffulex::accept_edit: {name}\[0\].*: {message}"):
        ops.accept_edit(**tensors, mask_token_id=MASK)
