# SPDX-License-Identifier: Apache-2.0
"""accept_dmax against the worked vectors and its reference."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import sampling_vectors as vectors
from diffulex import ops
from diffulex.ops import AcceptFlag, DmaxResult
from reference.acceptance import accept_dmax_reference
from rewriting_cases import MASK, moved, one_block, random_blocks, writes


def assert_close(actual: DmaxResult, expected: DmaxResult) -> None:
    for name, wanted, got in zip(DmaxResult._fields, expected, actual):
        if wanted is None or got is None:
            assert wanted is got, name
        elif name == "merge_residual":
            assert torch.allclose(got.cpu(), wanted.cpu(), atol=1e-6), name
        else:
            assert torch.equal(got.cpu(), wanted.cpu()), name


def dmax(
    device: str, tokens: list[int], *, merge_top_k: int = 1, fast_path: bool = False, **options: Any
) -> DmaxResult:
    lists = options.pop("lists", {})
    tensors = one_block(device, tokens, **options) | lists
    numbers: dict[str, Any] = {
        "mask_token_id": MASK,
        "merge_top_k": merge_top_k,
        "fast_path": fast_path,
    }
    result = ops.accept_dmax(**tensors, **numbers)
    assert_close(result, accept_dmax_reference(**tensors, **numbers))
    return result


def flags(result: DmaxResult) -> AcceptFlag:
    return AcceptFlag(int(result.flags[0]))


def descriptors(result: DmaxResult) -> list[tuple[list[int], list[float], float] | None]:
    assert result.merge_valid is not None
    assert result.merge_ids is not None
    assert result.merge_probs is not None
    assert result.merge_residual is not None
    return [
        (ids, probs, residual) if valid else None
        for valid, ids, probs, residual in zip(
            result.merge_valid[0].tolist(),
            result.merge_ids[0].tolist(),
            result.merge_probs[0].tolist(),
            result.merge_residual[0].tolist(),
        )
    ]


FIRST_THREE = [([1], [0.92], 0.08), ([2], [0.60], 0.40), ([3], [0.96], 0.04)]


def assert_descriptors(result: DmaxResult, expected: list[Any]) -> None:
    actual = descriptors(result)
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected):
        if wanted is None:
            assert got is None
            continue
        assert got is not None
        assert got[0] == wanted[0]
        assert got[1] == pytest.approx(wanted[1], abs=1e-6)
        assert got[2] == pytest.approx(wanted[2], abs=1e-6)


def test_vector_f(device: str) -> None:
    first = dmax(device, [MASK] * 4)
    assert writes(first.write_ids) == {0: 1, 1: 2, 2: 3}
    assert flags(first) == AcceptFlag.PROGRESSED
    assert int(first.masks_left[0]) == 1
    assert_descriptors(first, [*FIRST_THREE, None])
    # What has no descriptor reads as the mask with no weight.
    assert first.merge_ids is not None
    assert first.merge_ids[0, 3].tolist() == [MASK]

    second = dmax(device, [1, 2, 3, MASK], step=1)
    assert writes(second.write_ids) == {3: 4}
    assert flags(second) == AcceptFlag.PROGRESSED
    assert_descriptors(second, [*FIRST_THREE, ([4], [0.25], 0.75)])

    third = dmax(device, [1, 2, 3, 4], step=2)
    assert writes(third.write_ids) == {}
    assert flags(third) == AcceptFlag.COMMITTABLE | AcceptFlag.SAME_AS_PREVIOUS
    assert_descriptors(third, [*FIRST_THREE, ([4], [0.25], 0.75)])
    assert float(third.same_token_ratio[0]) == 1.0


def test_vector_f_without_exclusion_never_commits_a_mask(device: str) -> None:
    result = dmax(device, [1, 2, 3, MASK], step=1, exclusion=ops.ExclusionMode.OFF)
    assert writes(result.write_ids) == {}
    assert int(result.masks_left[0]) == 1
    assert flags(result) == AcceptFlag.SAME_AS_PREVIOUS


def test_vector_f_fast_path(device: str) -> None:
    result = dmax(device, [1, 2, 3, 4], step=2, fast_path=True)
    assert flags(result) & AcceptFlag.ALL_CONFIDENT
    assert result.confidence[0].tolist() == [1.0] * 4
    assert_descriptors(result, [([t], [1.0], 0.0) for t in (1, 2, 3, 4)])
    # Open positions keep their own probability.
    opened = dmax(device, [1, 2, 3, MASK], step=1, fast_path=True)
    assert not flags(opened) & AcceptFlag.ALL_CONFIDENT
    assert_descriptors(opened, [*[([t], [1.0], 0.0) for t in (1, 2, 3)], ([4], [0.25], 0.75)])


def test_vector_f_prompt_positions_do_not_count(device: str) -> None:
    result = dmax(device, [5, 2, 3, 4], start=1)
    assert writes(result.write_ids) == {}
    assert flags(result) & AcceptFlag.COMMITTABLE
    assert descriptors(result)[0] is None
    assert float(result.confidence[0, 0]) == 0.0


def test_refresh_ignores_the_threshold(device: str) -> None:
    result = dmax(device, [6, 6, 6, 6], tau=0.99, gate=False)
    assert writes(result.write_ids) == {0: 1, 1: 2, 2: 3, 3: 4}
    assert float(result.same_token_ratio[0]) == 0.0
    assert not flags(result) & (AcceptFlag.COMMITTABLE | AcceptFlag.PROGRESSED)


def test_prefix_threshold_is_not_strict(device: str) -> None:
    logits = torch.full((4, 8), -torch.inf, device=device)
    logits[:, :2] = 0.0  # p is .5 exactly
    half = dmax(device, [MASK] * 4, tau=0.5, gate=False, logits=logits)
    assert writes(half.write_ids) == dict.fromkeys(range(4), 0)
    above = dmax(device, [MASK] * 4, tau=0.51, gate=False, logits=logits)
    assert writes(above.write_ids) == {}
    forced = dmax(device, [MASK] * 4, tau=0.51, logits=logits)
    assert writes(forced.write_ids) == {0: 0}


def test_all_confident_uses_its_own_constant(device: str) -> None:
    logits = vectors.logits(device)[[0, 2, 0, 2]]
    result = dmax(device, [MASK] * 4, tau=0.1, logits=logits)
    assert flags(result) == (
        AcceptFlag.COMMITTABLE | AcceptFlag.ALL_CONFIDENT | AcceptFlag.PROGRESSED
    )


def test_the_argmax_decides_not_the_draw(device: str) -> None:
    # What is written was drawn; how sure the model is and the descriptors are those of its argmax.
    tensors = one_block(device, [1, 2, 3, 4])
    column = ops.StatsColumn
    tensors["ids"] = torch.tensor([1, 2, 3, 0], device=device)
    for drawn, largest, is_confident in ((0.1, 0.9, True), (1.0, 0.89, False)):
        tensors["stats"][:, column.RAW_CONFIDENCE] = drawn
        lists = {
            "topk_ids": torch.tensor([[5, 6]] * 4, device=device),
            "topk_probs": torch.tensor([[largest, 0.2]] * 4, device=device),
            "argmax_ids": torch.tensor([5] * 4, device=device),
        }
        numbers: dict[str, Any] = {"mask_token_id": MASK, "merge_top_k": 2}
        result = ops.accept_dmax(**tensors, **lists, **numbers)
        assert_close(result, accept_dmax_reference(**tensors, **lists, **numbers))
        assert writes(result.write_ids) == {3: 0}
        assert bool(flags(result) & AcceptFlag.ALL_CONFIDENT) == is_confident
        assert bool(flags(result) & AcceptFlag.COMMITTABLE) == is_confident
        # The probabilities exceed 1 together: no residual, never a negative one.
        assert_descriptors(result, [([5, 6], [largest, 0.2], 0.0)] * 4)


def test_step_bound_forces_the_rest(device: str) -> None:
    # Three earlier open steps: the current one is the B-th.
    result = dmax(device, [1, 2, MASK, MASK], tau=0.99, step=3)
    assert writes(result.write_ids) == {2: 3, 3: 4}
    assert flags(result) & AcceptFlag.COMMITTABLE
    assert flags(result) & AcceptFlag.TIMED_OUT
    assert_descriptors(result, [*FIRST_THREE, ([4], [0.25], 0.75)])
    for early in (
        dmax(device, [1, 2, MASK, MASK], tau=0.99, step=2),
        dmax(device, [1, 2, MASK, MASK], tau=0.99, step=3, gate=False),
    ):
        assert not flags(early) & (AcceptFlag.COMMITTABLE | AcceptFlag.TIMED_OUT)


def test_lists_give_the_descriptors(device: str) -> None:
    greedy = ops.token_stats(
        vectors.logits(device), forbidden_ids=vectors.mask_ids(device), top_k=2
    )
    lists = {"topk_ids": greedy.topk_ids, "topk_probs": greedy.topk_probs}
    result = dmax(device, [MASK, 2, MASK, MASK], merge_top_k=2, lists=lists)
    assert_descriptors(
        result,
        [
            ([1, 0], [0.92, 0.02], 0.06),
            ([2, 1], [0.60, 0.10], 0.30),
            ([3, 0], [0.96, 0.005], 0.035),
            None,
        ],
    )
    # A column of the list is a legal argmax although it is strided.
    lists["argmax_ids"] = greedy.topk_ids[:, 0]
    again = dmax(device, [MASK, 2, MASK, MASK], merge_top_k=2, lists=lists)
    assert_descriptors(again, descriptors(result))
    assert dmax(device, [MASK] * 4, merge_top_k=0).merge_ids is None


def test_missing_and_bad_rows(device: str) -> None:
    for rows in ([0, -1, 2, 3], [0, 1, 2, -1]):
        skipped = dmax(device, [MASK, MASK, 3, 4], tau=0.0, step=9, rows=rows)
        assert writes(skipped.write_ids) == {}
        assert flags(skipped) == AcceptFlag.SKIPPED | AcceptFlag.SAME_AS_PREVIOUS
        assert descriptors(skipped) == [None] * 4
    logits = vectors.logits(device)
    logits[1] = torch.nan
    # The prefix stops at the bad row even with a threshold of 0.
    bad = dmax(device, [MASK, MASK, MASK, 6], tau=0.0, logits=logits)
    assert writes(bad.write_ids) == {0: 1, 3: 4}
    assert flags(bad) & AcceptFlag.BAD_LOGITS
    assert not flags(bad) & (AcceptFlag.COMMITTABLE | AcceptFlag.ALL_CONFIDENT)
    assert descriptors(bad)[1] is None
    last = dmax(device, [MASK, MASK, MASK, 6], tau=0.0, logits=logits, step=3)
    assert writes(last.write_ids) == {0: 1, 2: 3, 3: 4}
    assert not flags(last) & AcceptFlag.COMMITTABLE


def random_dmax(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, lists = random_blocks(seed)
    rng = random.Random(-seed)
    top_k = rng.choice([0, 1, 1, 2, 4])
    if top_k > 1 or rng.random() < 0.5:
        tensors |= lists
        if rng.random() < 0.5:
            tensors["argmax_ids"] = lists["topk_ids"][:, 0]
    numbers = {"mask_token_id": MASK, "merge_top_k": top_k, "fast_path": rng.random() < 0.3}
    return tensors, numbers


@pytest.mark.every(9)
@pytest.mark.parametrize("seed", range(150))
def test_random_blocks(device: str, seed: int) -> None:
    tensors, numbers = random_dmax(seed)
    actual = ops.accept_dmax(**moved(tensors, device), **numbers)
    assert_close(actual, accept_dmax_reference(**tensors, **numbers))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("row_index", -2, "expected -1 or a row below 4, got -2"),
        ("editable_start", -1, "expected 0 to 4, got -1"),
        ("valid_len", 5, "expected 0 to 4, got 5"),
        ("open_steps", -1, "expected a value >= 0, got -1"),
    ],
)
def test_data_errors(name: str, value: int, message: str) -> None:
    tensors = one_block("cpu", [3, MASK, 5, MASK])
    tensors[name].view(-1)[0] = value
    with pytest.raises(RuntimeError, match=rf"^diffulex::accept_dmax: {name}\[0\].*: {message}"):
        ops.accept_dmax(**tensors, mask_token_id=MASK)
