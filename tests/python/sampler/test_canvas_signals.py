# SPDX-License-Identifier: Apache-2.0
"""Self-conditioning signals that the canvas sampler leaves for the next step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex.samplers.inputs import CanvasArrays, SamplerInputs
from vectors import BLOCK, CONVERGED, R0, R1, R2, R3, VOCAB, logits_of, sampler_of

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
ROWS = (R0, R1, R2, R3)
NUM_SLOTS = 4
TEMPERATURE = 0.8
UNTOUCHED = -5.0
#: Of R0 at temperature .8 over W[v] = (.2 v, .2 v + .1), times the root of the hidden size.
SIGNAL_OF_R0 = (0.300800, 0.442221)


def canvas_sampler(device: str) -> Any:
    sampler = sampler_of("diffusion_gemma", device, diffusion_gemma_max_denoising_steps=4)
    ids = torch.arange(VOCAB, dtype=torch.float32, device=device)
    weight = torch.stack((0.2 * ids, 0.2 * ids + 0.1), 1)
    sampler.bind_model(SimpleNamespace(soft_embedding_weight=weight, embed_scale=2**0.5))
    return sampler


def run(
    sampler: Any,
    device: str,
    slots: list[int],
    steps_left: list[int],
    signals: torch.Tensor,
) -> SamplerInputs:
    """One step of a canvas per slot, each over the rows R0 to R3."""
    count = len(slots)

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def blocks(value: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full((count, BLOCK), value, dtype=dtype, device=device)

    rows = BLOCK * count
    inputs = SamplerInputs(
        logits=logits_of(*ROWS * count, device=device),
        inv_temperature=torch.full((rows,), 1 / TEMPERATURE, device=device),
        uniforms=torch.full((rows,), 0.5, dtype=torch.float64, device=device),
        tokens=blocks(0),
        row_index=ints([[block * BLOCK + rel for rel in range(BLOCK)] for block in range(count)]),
        editable_start=ints([0] * count),
        valid_len=ints([BLOCK] * count),
        gate=ints([0] * count, torch.uint8),
        accept_threshold=torch.zeros(count, device=device),
        open_steps=ints([0] * count),
        total_steps=ints([1] * count),
        write_ids=blocks(-2),
        confidence=blocks(0, torch.float32),
        masks_left=ints([-1] * count),
        flags=ints([0] * count),
        canvas=CanvasArrays(
            prev_argmax=blocks(-1),
            stable_run=ints([-1] * count),
            steps_left=ints(steps_left),
            renoise_ids=blocks(5),
            request_slots=ints(slots),
            argmax=blocks(-2),
            signals=signals,
        ),
    )
    sampler(inputs)
    return inputs


@DEVICES
def test_signals_of_open_and_converged_canvases(device: str) -> None:
    sampler = canvas_sampler(device)
    signals = torch.full((NUM_SLOTS * BLOCK, 2), UNTOUCHED, device=device)
    by_slot = signals.view(NUM_SLOTS, BLOCK, 2)
    inputs = run(sampler, device, [2, 0], [4, 4], signals)
    assert [flags & CONVERGED for flags in inputs.flags.tolist()] == [0, 0]
    for slot in (0, 2):
        assert by_slot[slot, 0].tolist() == pytest.approx(SIGNAL_OF_R0, abs=1e-5)
    assert torch.equal(by_slot[0], by_slot[2])
    assert (by_slot[1::2] == UNTOUCHED).all()
    # The canvas of slot 2 is at its last step: it has no next one.
    before = by_slot[0].clone()
    inputs = run(sampler, device, [2, 0], [1, 3], signals)
    assert [flags & CONVERGED for flags in inputs.flags.tolist()] == [CONVERGED, 0]
    assert (by_slot[2] == 0).all()
    assert torch.equal(by_slot[0], before)
    assert (by_slot[1::2] == UNTOUCHED).all()
