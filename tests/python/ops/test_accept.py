# SPDX-License-Identifier: Apache-2.0
"""accept_mask_fill against the worked vectors and the oracle of the acceptance table."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import sampling_vectors as vectors
from diffulex import ops
from diffulex.ops import AcceptFlag, AcceptResult, AcceptRule, ConfidenceKind, StatsColumn
from reference import dense as oracles

MASK = vectors.MASK


def one_block(
    device: str,
    *,
    tokens: list[int] | None = None,
    tau: float = 0.9,
    gate: bool = True,
    step: int = 0,
    start: int = 0,
    valid_len: int = 4,
    rows: list[int] | None = None,
    logits: torch.Tensor | None = None,
    **numbers: Any,
) -> AcceptResult:
    """The rows R0..R3 as the proposals of one block of four positions."""
    stats = ops.token_stats(
        vectors.logits(device) if logits is None else logits,
        forbidden_ids=vectors.mask_ids(device),
    )

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return ops.accept_mask_fill(
        torch.tensor([tokens or [MASK] * 4], device=device),
        ints(*(rows or range(4)))[None],
        ints(start),
        torch.tensor([gate], device=device).to(torch.uint8),
        torch.tensor([tau], device=device),
        ints(step),
        stats.ids,
        stats.stats,
        mask_token_id=MASK,
        valid_len=ints(valid_len),
        **numbers,
    )


def writes(result: AcceptResult) -> dict[int, int]:
    return {i: t for i, t in enumerate(result.write_ids[0].tolist()) if t >= 0}


VECTOR_C: list[tuple[dict[str, Any], dict[int, int]]] = [
    ({"tau": 0.90}, {0: 1, 2: 3}),
    ({"tau": 0.90, "gate": False}, {0: 1, 2: 3}),
    ({"tau": 0.97}, {2: 3}),
    ({"tau": 0.97, "gate": False}, {}),
    ({"tau": 0.90, "tokens": [5, MASK, 5, MASK]}, {1: 2}),
    ({"tau": 0.90, "tokens": [5, MASK, 5, MASK], "confidence_kind": ConfidenceKind.MARGIN}, {1: 2}),
    (
        {"tau": 0.90, "tokens": [5, MASK, 5, MASK], "confidence_kind": ConfidenceKind.NEG_ENTROPY},
        {1: 2},
    ),
    ({"rule": AcceptRule.STATIC, "denoising_steps": 2}, {0: 1, 2: 3}),
    ({"rule": AcceptRule.DYNAMIC, "tau": 0.85}, {0: 1, 2: 3}),
    ({"rule": AcceptRule.DYNAMIC, "tau": 0.97}, {2: 3}),
    ({"rule": AcceptRule.SEQUENTIAL, "denoising_steps": 2}, {0: 1, 1: 2}),
    ({"rule": AcceptRule.FACTOR, "factor": 2.0}, {0: 1, 1: 2, 2: 3}),
    ({"rule": AcceptRule.FACTOR, "factor": 1.0}, {0: 1, 2: 3}),
    ({"rule": AcceptRule.FACTOR, "factor": 0.2}, {2: 3}),
    ({"rule": AcceptRule.FACTOR, "factor": 0.05}, {2: 3}),
    ({"rule": AcceptRule.ENTROPY_BOUND, "entropy_bound": 0.1}, {2: 3}),
    ({"rule": AcceptRule.ENTROPY_BOUND, "entropy_bound": 0.5}, {0: 1, 2: 3}),
    ({"rule": AcceptRule.ENTROPY_BOUND, "entropy_bound": 3.0}, {0: 1, 1: 2, 2: 3, 3: 4}),
    ({"rule": AcceptRule.LEFTMOST_PREFIX, "tau": 0.5}, {0: 1, 1: 2, 2: 3}),
    ({"rule": AcceptRule.LEFTMOST_PREFIX, "tau": 0.7}, {0: 1}),
    ({"rule": AcceptRule.LEFTMOST_PREFIX, "tau": 0.95}, {0: 1}),
    ({"rule": AcceptRule.LEFTMOST_PREFIX, "tau": 0.95, "gate": False}, {}),
    ({"rule": AcceptRule.LEFTMOST_PREFIX, "tau": 0.0}, {0: 1, 1: 2, 2: 3, 3: 4}),
    (
        {
            "rule": AcceptRule.HIERARCHY,
            "tau": 0.97,
            "low_threshold": 0.4,
            "tokens": [MASK, MASK, 5, MASK],
        },
        {0: 1},
    ),
    (
        {
            "rule": AcceptRule.HIERARCHY,
            "tau": 0.97,
            "low_threshold": 0.2,
            "tokens": [MASK, MASK, 5, MASK],
        },
        {0: 1, 3: 4},
    ),
    (
        {
            "rule": AcceptRule.HIERARCHY,
            "tau": 0.97,
            "low_threshold": 0.2,
            "tokens": [MASK, MASK, 5, MASK],
            "gate": False,
        },
        {},
    ),
]


@pytest.mark.parametrize(("numbers", "expected"), VECTOR_C, ids=[str(c[0]) for c in VECTOR_C])
def test_vector_c(device: str, numbers: dict[str, Any], expected: dict[int, int]) -> None:
    result = one_block(device, **numbers)
    assert writes(result) == expected
    num_open = (numbers.get("tokens") or [MASK] * 4).count(MASK)
    assert int(result.masks_left[0]) == num_open - len(expected)


def test_threshold_is_strict_or_not(device: str) -> None:
    # Two equal logits: p is .5 exactly.
    logits = torch.full((4, 8), -torch.inf, device=device)
    logits[:, :2] = 0.0
    strict = one_block(device, tau=0.5, gate=False, logits=logits)
    assert writes(strict) == {}
    loose = one_block(
        device, tau=0.5, gate=False, logits=logits, rule=AcceptRule.THRESHOLD_NON_STRICT
    )
    assert writes(loose) == dict.fromkeys(range(4), 0)


def test_low_threshold_is_strict_and_the_best_of_all_is_taken(device: str) -> None:
    logits = torch.full((4, 8), -torch.inf, device=device)
    logits[:, :2] = 0.0
    tokens = [MASK, 5, MASK, MASK]
    for low, wanted in ((0.5, {0: 0}), (0.49, {0: 0, 2: 0})):
        result = one_block(
            device,
            tokens=tokens,
            tau=0.97,
            logits=logits,
            rule=AcceptRule.HIERARCHY,
            low_threshold=low,
        )
        assert writes(result) == wanted


def test_a_forced_position_ends_the_prefix(device: str) -> None:
    result = one_block(device, tau=0.9, rows=[1, 0, 2, 3], rule=AcceptRule.LEFTMOST_PREFIX)
    assert writes(result) == {0: 2}


def test_ranking_ties_go_to_the_lowest_position(device: str) -> None:
    logits = vectors.logits(device)[[1, 1, 1, 1]]
    for kind in ConfidenceKind:
        assert writes(one_block(device, tau=0.99, logits=logits, confidence_kind=kind)) == {0: 2}


def test_ranking_kinds_can_disagree(device: str) -> None:
    rows = [
        [0.46, 0.44, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01],
        [0.40, 0.10, 0.10, 0.10, 0.10, 0.08, 0.06, 0.06],
    ]
    logits = torch.tensor(rows, device=device).log()
    for kind, position in (
        (ConfidenceKind.MAX_PROB, 0),
        (ConfidenceKind.MARGIN, 1),
        (ConfidenceKind.NEG_ENTROPY, 0),
    ):
        result = one_block(
            device,
            tokens=[MASK, MASK, 1, 1],
            rows=[0, 1, -1, -1],
            logits=logits,
            confidence_kind=kind,
        )
        assert writes(result) == {position: 0}


@pytest.mark.parametrize(
    ("block_size", "steps", "counts"),
    [(4, 3, [2, 1, 1, 1, 1]), (32, 5, [7, 7, 6, 6, 6, 6]), (4, 0, [1, 1, 1, 1, 1]), (4, 1, [4, 4])],
)
def test_schedule(device: str, block_size: int, steps: int, counts: list[int]) -> None:
    logits = torch.randn(block_size, 8, generator=torch.Generator().manual_seed(1)).to(device)
    stats = ops.token_stats(logits, forbidden_ids=vectors.mask_ids(device))
    one = torch.ones(1, dtype=torch.int32, device=device)
    for step, count in enumerate(counts):
        for rule in (AcceptRule.STATIC, AcceptRule.DYNAMIC, AcceptRule.SEQUENTIAL):
            result = ops.accept_mask_fill(
                torch.full((1, block_size), MASK, device=device),
                torch.arange(block_size, dtype=torch.int32, device=device)[None],
                one * 0,
                one.to(torch.uint8),
                torch.full((1,), 1.0, device=device),
                one * step,
                stats.ids,
                stats.stats,
                mask_token_id=MASK,
                rule=rule,
                denoising_steps=steps,
            )
            assert len(writes(result)) == count


def test_forced_last_step_accepts_everything(device: str) -> None:
    numbers: dict[str, Any] = {"rule": AcceptRule.STATIC, "denoising_steps": 3}
    assert len(writes(one_block(device, step=2, **numbers))) == 1
    forced = one_block(device, step=2, force_accept_last_step=True, **numbers)
    assert writes(forced) == {0: 1, 1: 2, 2: 3, 3: 4}
    closed = one_block(device, step=2, gate=False, force_accept_last_step=True, **numbers)
    assert writes(closed) == {0: 1, 2: 3}
    assert len(writes(one_block(device, step=1, force_accept_last_step=True, **numbers))) == 1


def test_flags_of_a_finished_block(device: str) -> None:
    done = one_block(device, tau=0.1)
    assert (
        int(done.flags[0])
        == AcceptFlag.COMMITTABLE | AcceptFlag.ALL_CONFIDENT | AcceptFlag.PROGRESSED
    )
    assert done.confidence[0].tolist() == pytest.approx([0.92, 0.6, 0.96, 0.25], abs=1e-6)
    idle = one_block(device, tau=0.97, gate=False)
    assert int(idle.flags[0]) == AcceptFlag.SAME_AS_PREVIOUS
    full = one_block(device, tokens=[1, 2, 3, 4])
    assert int(full.flags[0]) == (
        AcceptFlag.COMMITTABLE | AcceptFlag.ALL_CONFIDENT | AcceptFlag.SAME_AS_PREVIOUS
    )
    assert full.confidence[0].tolist() == [0.0] * 4
    assert int(full.masks_left[0]) == 0


def test_masks_of_the_prompt_and_past_the_end_are_not_open(device: str) -> None:
    result = one_block(device, tau=0.1, start=1, valid_len=3)
    assert writes(result) == {1: 2, 2: 3}
    assert int(result.masks_left[0]) == 0
    assert int(result.flags[0]) & AcceptFlag.COMMITTABLE
    padding = one_block(device, tau=0.1, valid_len=0)
    assert writes(padding) == {}
    assert int(padding.masks_left[0]) == 0


def test_missing_row_skips_the_block(device: str) -> None:
    result = one_block(device, tau=0.1, rows=[0, 1, -1, 3])
    assert writes(result) == {}
    flags = AcceptFlag(int(result.flags[0]))
    assert AcceptFlag.SKIPPED in flags
    assert AcceptFlag.SAME_AS_PREVIOUS in flags
    assert AcceptFlag.COMMITTABLE not in flags
    assert AcceptFlag.PROGRESSED not in flags
    # A missing row of a decoded position is no reason to skip.
    decoded = one_block(device, tau=0.1, tokens=[MASK, MASK, 5, MASK], rows=[0, 1, -1, 3])
    assert writes(decoded) == {0: 1, 1: 2, 3: 4}
    assert not int(decoded.flags[0]) & AcceptFlag.SKIPPED


def test_bad_row_is_never_accepted(device: str) -> None:
    logits = vectors.logits(device)
    logits[2] = torch.nan
    for rule in AcceptRule:
        result = one_block(
            device,
            tau=0.1,
            logits=logits,
            rule=rule,
            denoising_steps=1,
            entropy_bound=9.0,
            factor=9.0,
        )
        assert 2 not in writes(result)
        assert int(result.flags[0]) & AcceptFlag.BAD_LOGITS
        assert not int(result.flags[0]) & AcceptFlag.COMMITTABLE


def test_mask_over_mask_is_no_progress(device: str) -> None:
    # Without exclusion the last row proposes the mask itself.
    stats = ops.token_stats(vectors.logits(device), exclusion=ops.ExclusionMode.OFF)
    assert int(stats.ids[3]) == MASK
    one = torch.ones(1, dtype=torch.int32, device=device)
    result = ops.accept_mask_fill(
        torch.full((1, 4), MASK, device=device),
        torch.arange(4, dtype=torch.int32, device=device)[None],
        one * 0,
        one.to(torch.uint8),
        torch.full((1,), 0.1, device=device),
        one * 0,
        stats.ids,
        stats.stats,
        mask_token_id=MASK,
    )
    assert writes(result) == {0: 1, 1: 2, 2: 3}
    assert int(result.masks_left[0]) == 1
    assert not int(result.flags[0]) & AcceptFlag.COMMITTABLE


def random_blocks(seed: int, device: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_blocks, block_size = rng.randrange(1, 6), rng.choice([1, 4, 8, 32, 64])
    num_rows = num_blocks * block_size
    num_columns = rng.choice([8, 100])
    spread = rng.choice([0.5, 3.0, 8.0])
    # A coarse grid makes equal confidences common.
    logits = (torch.randn(num_rows, num_columns, generator=generator) * spread).round()
    if rng.random() < 0.3:
        logits[rng.randrange(num_rows)] = torch.nan
    stats = ops.token_stats(
        logits,
        forbidden_ids=torch.tensor([MASK]),
        inv_temperature=torch.full((num_rows,), rng.choice([0.0, 2.0])),
        uniforms=torch.rand(num_rows, generator=generator, dtype=torch.float64),
    )
    tokens = torch.randint(0, 7, (num_blocks, block_size), generator=generator)
    masked = torch.rand(num_blocks, block_size, generator=generator) < rng.choice([0.3, 0.9, 1.0])
    tokens[masked] = MASK
    row_index = torch.randperm(num_rows, generator=generator).int().view(num_blocks, block_size)
    if rng.random() < 0.3:
        row_index[rng.randrange(num_blocks), rng.randrange(block_size)] = -1
    tensors = {
        "tokens": tokens,
        "row_index": row_index,
        "editable_start": torch.tensor(
            [rng.choice([0, 0, rng.randrange(block_size)]) for _ in range(num_blocks)]
        ).int(),
        "gate": torch.tensor([rng.randrange(2) for _ in range(num_blocks)], dtype=torch.uint8),
        "accept_threshold": torch.tensor([rng.choice([0.0, 0.3, 0.9]) for _ in range(num_blocks)]),
        "open_steps": torch.tensor([rng.randrange(7) for _ in range(num_blocks)]).int(),
        "ids": stats.ids,
        "stats": stats.stats,
        "valid_len": torch.tensor(
            [
                rng.choice([block_size, block_size, rng.randrange(block_size + 1)])
                for _ in range(num_blocks)
            ]
        ).int(),
    }
    numbers: dict[str, Any] = {
        "mask_token_id": MASK,
        "rule": rng.choice(list(AcceptRule)),
        "confidence_kind": rng.choice(list(ConfidenceKind)),
        "raw_confidence": rng.random() < 0.5,
        "denoising_steps": rng.choice([0, 1, 3, 5, 100]),
        "force_accept_last_step": rng.random() < 0.3,
        "factor": rng.choice([0.05, 1.0, 2.0]),
        "entropy_bound": rng.choice([0.0, 0.5, 3.0]),
        "low_threshold": rng.choice([0.0, 0.2, 0.5]),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()}, numbers


def expected_block(
    tensors: dict[str, torch.Tensor], numbers: dict[str, Any], block: int
) -> tuple[dict[int, int], list[float], int, int]:
    """(writes, confidence, masks left, flags) by the text of the acceptance table."""
    arrays = {name: tensor.cpu().tolist() for name, tensor in tensors.items()}
    tokens, block_size = arrays["tokens"][block], len(arrays["tokens"][block])
    open_set = [
        i
        for i in range(arrays["editable_start"][block], arrays["valid_len"][block])
        if tokens[i] == MASK
    ]
    which = StatsColumn.RAW_CONFIDENCE if numbers["raw_confidence"] else StatsColumn.CONFIDENCE
    tau = arrays["accept_threshold"][block]
    confidence = [0.0] * block_size
    positions = []
    flags = 0
    for i in open_set:
        row = arrays["row_index"][block][i]
        if row < 0:
            flags |= oracles.SKIPPED
            continue
        stats = arrays["stats"][row]
        if arrays["ids"][row] < 0:
            flags |= oracles.BAD
            continue
        kind = numbers["confidence_kind"]
        rank = stats[which]
        if kind == ConfidenceKind.MARGIN:
            # The subtraction is fp32, as in the op.
            rank = float(torch.tensor(stats[1]) - torch.tensor(stats[2]))
        elif kind == ConfidenceKind.NEG_ENTROPY:
            rank = -stats[StatsColumn.ENTROPY]
        confidence[i] = stats[which]
        positions.append(
            oracles.Position(i, arrays["ids"][row], stats[which], rank, stats[StatsColumn.ENTROPY])
        )
    steps, step = numbers["denoising_steps"] or block_size, arrays["open_steps"][block]
    taken = oracles.accept(
        positions,
        rule=int(numbers["rule"]),
        gate=bool(arrays["gate"][block]),
        tau=tau,
        count=oracles.schedule(block_size, steps, step),
        factor=numbers["factor"],
        bound=numbers["entropy_bound"],
        open_set=open_set,
        low=float(torch.tensor(numbers["low_threshold"])),
        # A block that missed its rows in the last scheduled step is still due afterwards.
        force_all=numbers["force_accept_last_step"] and step >= steps - 1,
    )
    if flags & oracles.SKIPPED:
        taken = set()
    left = len(open_set) - len(taken)
    flags |= oracles.PROGRESSED if taken else oracles.SAME
    if left == 0 and not flags & oracles.SKIPPED:
        flags |= oracles.COMMITTABLE
    strict = numbers["rule"] not in (
        AcceptRule.THRESHOLD_NON_STRICT,
        AcceptRule.LEFTMOST_PREFIX,
    )
    confident = [o.p > tau if strict else o.p >= tau for o in positions]
    if len(positions) == len(open_set) and all(confident):
        flags |= oracles.CONFIDENT
    return {o.index: o.id for o in positions if o.index in taken}, confidence, left, flags


@pytest.mark.every(9)
@pytest.mark.parametrize("seed", range(100))
def test_random_blocks(device: str, seed: int) -> None:
    tensors, numbers = random_blocks(seed, device)
    result = ops.accept_mask_fill(**tensors, **numbers)
    for block in range(tensors["tokens"].shape[0]):
        wanted, confidence, left, flags = expected_block(tensors, numbers, block)
        actual = {i: t for i, t in enumerate(result.write_ids[block].tolist()) if t != -1}
        assert actual == wanted, numbers
        assert result.confidence[block].tolist() == pytest.approx(confidence, abs=1e-7)
        assert int(result.masks_left[block]) == left
        assert int(result.flags[block]) == flags


def test_row_past_the_statistics(device: str) -> None:
    if device == "cpu":
        with pytest.raises(
            RuntimeError, match=r"^diffulex::accept_mask_fill: row_index.*: expected"
        ):
            one_block(device, rows=[0, 1, 2, 4])
    else:
        assert int(one_block(device, rows=[0, 1, 2, 4]).flags[0]) & AcceptFlag.SKIPPED


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(50))
def test_cpu_and_cuda_agree(seed: int) -> None:
    tensors, numbers = random_blocks(seed, "cpu")
    moved = {name: tensor.cuda() for name, tensor in tensors.items()}
    for expected, actual in zip(
        ops.accept_mask_fill(**tensors, **numbers), ops.accept_mask_fill(**moved, **numbers)
    ):
        assert torch.equal(actual.cpu(), expected)
