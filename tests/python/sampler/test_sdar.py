# SPDX-License-Identifier: Apache-2.0
"""The SDAR sampler on hand-made logits: what its settings mean for one step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex.config.config import Config
from diffulex.config.types import ModelFacts
from diffulex.families.spec import ModelSpec
from diffulex.registry import AutoSampler
from diffulex.samplers.base import MaskFillSampler, SamplerInputs

SdarSampler: Any = AutoSampler.get("sdar")
VOCAB, MASK, BLOCK = 12, 9, 4
COMMITTABLE, SAME, CONFIDENT, PROGRESSED, BAD = 1, 2, 4, 8, 32


def make_sampler(device: str = "cpu", **settings: Any) -> MaskFillSampler:
    spec = ModelSpec(
        "sdar", VOCAB, 8, 8, 1, 1, 1, 8, 64, 1e-6, 1e4, 8, block_size=BLOCK, mask_token_id=MASK
    )
    facts = ModelFacts("sdar", Path("/x"), spec, {}, tokenizer_vocab_size=11)
    return SdarSampler(Config.resolve("x", facts, {"device": device, **settings}))


def logits_for(probabilities: dict[int, float]) -> list[float]:
    """A row whose softmax has these values; the rest is shared by the other ids."""
    rest = (1 - sum(probabilities.values())) / (VOCAB - len(probabilities))
    return [math.log(probabilities.get(i, rest)) for i in range(VOCAB)]


def run(
    sampler: MaskFillSampler,
    rows: list[dict[int, float]],
    device: str = "cpu",
    *,
    gate: int = 1,
    threshold: float = 0.95,
    temperature: float = 0.0,
    uniforms: list[float] | None = None,
    logits: torch.Tensor | None = None,
) -> tuple[list[int], list[float], int, int]:
    """One block of masks, a row each; returns writes, confidences, masks left and flags."""
    if logits is None:
        logits = torch.tensor([logits_for(row) for row in rows], device=device)
    count = logits.size(0)

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    is_sampled = temperature > 0
    inputs = SamplerInputs(
        logits=logits,
        inv_temperature=torch.full((count,), 1 / temperature, device=device)
        if is_sampled
        else None,
        uniforms=torch.tensor(uniforms, dtype=torch.float64, device=device) if is_sampled else None,
        tokens=ints([[MASK] * count + [1] * (BLOCK - count)], torch.int64),  # type: ignore[list-item]
        row_index=ints([[*range(count), *[-1] * (BLOCK - count)]]),  # type: ignore[list-item]
        editable_start=ints([0]),
        valid_len=ints([BLOCK]),
        gate=ints([gate], torch.uint8),
        accept_threshold=torch.tensor([threshold], device=device),
        open_steps=ints([0]),
        total_steps=ints([1]),
        write_ids=ints([[-7] * BLOCK], torch.int64),  # type: ignore[list-item]
        confidence=torch.full((1, BLOCK), -7.0, device=device),
        masks_left=ints([-7]),
        flags=ints([-7]),
    )
    sampler(inputs)
    return (
        inputs.write_ids[0].tolist(),
        inputs.confidence[0].tolist(),
        int(inputs.masks_left[0]),
        int(inputs.flags[0]),
    )


def test_family_defaults() -> None:
    defaults = SdarSampler.family_defaults
    assert defaults["accept_threshold"] == 0.95
    assert defaults["acceptance_rule"] == "dynamic"
    assert defaults["temperature"] == 0.0


def test_confident_positions_are_accepted(device: str) -> None:
    rows = [{1: 0.97}, {2: 0.5}, {3: 0.96}, {4: 0.9}]
    writes, confidence, left, flags = run(make_sampler(device), rows, device)
    assert writes == [1, -1, 3, -1]
    assert confidence == pytest.approx([0.97, 0.5, 0.96, 0.9], abs=1e-5)
    assert left == 2
    assert flags & (COMMITTABLE | SAME | CONFIDENT | PROGRESSED) == PROGRESSED


def test_the_best_position_is_forced_through_an_open_gate(device: str) -> None:
    rows = [{1: 0.5}, {2: 0.7}, {3: 0.65}, {4: 0.6}]
    sampler = make_sampler(device)
    assert run(sampler, rows, device)[0] == [-1, 2, -1, -1]
    writes, _, left, flags = run(sampler, rows, device, gate=0)
    assert writes == [-1] * 4
    assert left == 4
    assert flags & SAME
    assert not flags & PROGRESSED
    assert run(make_sampler(device, forced_gate="always"), rows, device, gate=0)[0] == [
        -1,
        2,
        -1,
        -1,
    ]


def test_threshold_is_strict() -> None:
    row = torch.tensor([logits_for({1: 0.75})])
    confidence = torch.softmax(row, -1)[0, 1].item()
    sampler = make_sampler()
    assert run(sampler, [], logits=row, threshold=confidence, gate=0)[0][0] == -1
    below = math.nextafter(confidence, 0) - 1e-6
    assert run(sampler, [], logits=row, threshold=below, gate=0)[0][0] == 1
    lax = make_sampler(acceptance_rule="threshold_non_strict")
    stored = run(lax, [], logits=row, gate=0)[1][0]
    assert run(lax, [], logits=row, threshold=stored, gate=0)[0][0] == 1


def test_a_full_block_is_committable(device: str) -> None:
    writes, _, left, flags = run(make_sampler(device), [{5: 0.99}], device)
    assert writes == [5, -1, -1, -1]
    assert left == 0
    assert flags & COMMITTABLE
    assert flags & CONFIDENT


def test_mask_padding_and_suppressed_ids_are_never_chosen(device: str) -> None:
    # Id 9 is the mask, 11 lies past the tokenizer, 3 is suppressed: 5 remains with its true p.
    rows = [{MASK: 0.4, 11: 0.3, 3: 0.2, 5: 0.06}]
    writes, confidence, _, _ = run(make_sampler(device, suppress_token_ids=[3]), rows, device)
    assert writes[0] == 5
    assert confidence[0] == pytest.approx(0.06, abs=1e-5)
    again = make_sampler(device, suppress_token_ids=[3], mask_suppression="renormalize")
    writes, confidence, _, _ = run(again, rows, device)
    assert writes[0] == 5
    assert confidence[0] == pytest.approx(0.06 / (1 - 0.9), rel=1e-3)


def test_draws_follow_the_inverse_cdf_in_id_order(device: str) -> None:
    # Candidates are all ids but 9 and 11; half of the mass outside 2 and 4 is excluded.
    rows = [{2: 0.5, 4: 0.4}] * 3
    sampler = make_sampler(device)
    mass = 1 - 2 * 0.01
    edge = (0.02 + 0.5) / mass
    writes = run(
        sampler,
        rows,
        device,
        threshold=0.0,
        temperature=1.0,
        uniforms=[edge - 1e-3, edge + 0.011, 0.999],
    )[0]
    assert writes[:3] == [2, 4, 10]


def test_confidence_space() -> None:
    # At temperature 0.5 probabilities are squared: .6 and ten of .04 -> .36 / (.36 + 11 * rest^2).
    rows = [{1: 0.6}]
    rest = 0.4 / 11
    tempered = 0.36 / (0.36 + 11 * rest**2)
    arguments: dict[str, Any] = {"temperature": 0.5, "uniforms": [0.5], "threshold": 0.0}
    assert run(make_sampler(), rows, **arguments)[1][0] == pytest.approx(tempered, rel=1e-4)
    raw = make_sampler(confidence_space="raw")
    assert run(raw, rows, **arguments)[1][0] == pytest.approx(0.6, rel=1e-4)


def test_rows_without_finite_logits_are_flagged(device: str) -> None:
    logits = torch.tensor([logits_for({1: 0.99}), [math.nan] * VOCAB], device=device)
    writes, _, left, flags = run(make_sampler(device), [], device, logits=logits)
    assert writes[1] == -1
    assert left >= 1
    assert flags & BAD
    assert not flags & COMMITTABLE


def test_steps_without_rows() -> None:
    empty = torch.empty(0, VOCAB)
    writes, _, left, flags = run(make_sampler(), [], logits=empty)
    assert writes == [-1] * 4
    assert left == 0
    assert flags & COMMITTABLE


def test_unresolved_configuration_is_refused() -> None:
    class Unresolved:
        class sampler:  # noqa: N801
            acceptance_rule = None
            confidence_space = None

        model = None

    with pytest.raises(ValueError, match="expected a resolved configuration"):
        SdarSampler(Unresolved())  # type: ignore[arg-type]
