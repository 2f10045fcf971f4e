# SPDX-License-Identifier: Apache-2.0
"""The view of a completed step by request and block."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from diffulex.samplers.sample_output import SampleOutput
from diffulex_ext import _core

MASK = 99
MAPS = (
    "true_local_ids_map",
    "accepted_ids_map",
    "sampled_tokens_map",
    "mask_token_rel_ids_map",
    "confidence_map",
    "initial_confidence_map",
    "block_writes_map",
    "block_state_map",
    "token_merge_map",
)


class Scheduled:
    """Requests of the core at their first decode step, of blocks of four."""

    def __init__(self, prompts: list[list[int]], **fields: Any) -> None:
        defaults = {
            "block_size": 4,
            "page_size": 4,
            "num_pages": 32,
            "max_num_reqs": 3,
            "max_model_len": 32,
            "max_num_batched_tokens": 64,
            "mask_token_id": MASK,
            "vocab_size": 100,
        }
        options = _core.EngineOptions(**{**defaults, **fields})
        self.core = _core.EngineCore(options)
        self.plan, self.output = _core.StepPlan(options), _core.SamplerOutput(options)
        params = _core.SamplingParams(max_tokens=8, ignore_eos=True)
        self.ids = [str(self.core.add_request(prompt, params)) for prompt in prompts]
        self.schedule()

    def schedule(self) -> None:
        self.core.schedule(self.plan)
        self.output.clear(self.plan.num_blocks)

    def complete(self) -> SampleOutput:
        self.core.complete_step(self.plan, self.output)
        return SampleOutput.of_step(self.plan, self.output, MASK)


def until_blocks(steps: Scheduled, count: int) -> None:
    """Skips the steps that only fill the cache."""
    for _ in range(8):
        if steps.plan.num_blocks == count:
            return
        steps.complete()
        steps.schedule()
    raise AssertionError(f"no step with {count} blocks")


def test_maps_have_the_published_names() -> None:
    assert tuple(item.name for item in fields(SampleOutput)) == MAPS


def test_a_block_that_is_filled() -> None:
    # A prompt of five: the second block is [5, mask, mask, mask], writable from 1.
    steps = Scheduled([[1, 2, 3, 4, 5]])
    until_blocks(steps, 1)
    output = steps.output
    output.write_ids[0] = [-1, 7, -1, 8]
    output.confidence[0] = [0.0, 0.75, 0.25, 0.5]
    output.masks_left[0] = 1
    output.flags[0] = 8
    view = steps.complete()
    (req,) = steps.ids
    assert view.mask_token_rel_ids_map == {req: {"1": [1, 2, 3]}}
    assert view.accepted_ids_map == {req: {"1": [0, 2]}}
    assert view.true_local_ids_map == {req: {"1": [1, 3]}}
    assert view.sampled_tokens_map == {req: {"1": [7, -1, 8]}}
    assert view.confidence_map == {req: {"1": [0.75, 0.25, 0.5]}}
    assert view.initial_confidence_map == view.confidence_map
    assert view.block_writes_map == {req: {"1": {1: 7, 3: 8}}}
    assert view.block_state_map == {
        req: {
            "1": {
                "committable": False,
                "same_as_previous": False,
                "same_token_ratio": 1.0,
                "all_confident": False,
            }
        }
    }
    assert view.token_merge_map == {req: {}}


def test_diagnostics_of_the_sampler() -> None:
    steps = Scheduled([[1, 2, 3, 4, 5]])
    until_blocks(steps, 1)
    steps.output.write_ids[0] = [-1, -1, 6, -1]
    steps.output.confidence[0] = [0.0, 0.75, 0.25, 0.5]
    view = SampleOutput.of_step(
        steps.plan,
        steps.output,
        MASK,
        proposals=np.array([[5, 4, 6, 3]]),
        ranking=np.array([[0, -3, -1, -2]], np.float32),
    )
    (req,) = steps.ids
    assert view.sampled_tokens_map == {req: {"1": [4, 6, 3]}}
    assert view.confidence_map == {req: {"1": [-3.0, -1.0, -2.0]}}
    assert view.initial_confidence_map == {req: {"1": [0.75, 0.25, 0.5]}}
    with pytest.raises(ValueError, match=r"expected ranking of shape \(1, 4\), got \(2, 4\)"):
        SampleOutput.of_step(steps.plan, steps.output, MASK, ranking=np.zeros((2, 4), np.float32))


def test_requests_without_blocks_are_in_every_map() -> None:
    # Whole blocks of a prompt have a separate forward under fast_dllm_v2, which samples nothing.
    fields = {"strategy": "fast_dllm_v2", "buffer_size": 2}
    steps = Scheduled([[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9]], **fields)
    assert (steps.plan.num_reqs, steps.plan.num_blocks) == (2, 0)
    view = steps.complete()
    for name in MAPS:
        assert getattr(view, name) == {req: {} for req in steps.ids}, name


def test_edits_and_states() -> None:
    steps = Scheduled([[1, 2, 3, 4, 5]], is_editing=True)
    until_blocks(steps, 1)
    steps.output.write_ids[0] = [-1, 7, 8, 9]
    steps.output.flags[0] = 8
    steps.complete()
    steps.schedule()
    assert steps.plan.blk_tokens[0].tolist() == [5, 7, 8, 9]
    # Position 1 is written with the token it has, which is no change.
    steps.output.write_ids[0] = [-1, 7, 3, -1]
    steps.output.same_token_ratio[0] = 0.5
    steps.output.flags[0] = 1 | 2 | 4
    view = SampleOutput.of_step(steps.plan, steps.output, MASK)
    (req,) = steps.ids
    assert view.block_writes_map == {req: {"1": {2: 3}}}
    assert view.accepted_ids_map == view.mask_token_rel_ids_map == {req: {"1": []}}
    assert view.block_state_map[req]["1"] == {
        "committable": True,
        "same_as_previous": True,
        "same_token_ratio": 0.5,
        "all_confident": True,
    }


def test_merge_descriptors_have_absolute_positions() -> None:
    steps = Scheduled([[1, 2, 3, 4, 5]], strategy="dmax", token_merge_top_k=2)
    until_blocks(steps, 1)
    output = steps.output
    output.write_ids[0] = [-1, 7, -1, -1]
    output.merge_valid[0] = [0, 1, 0, 0]
    output.merge_topk_ids[0, 1] = [7, 3]
    output.merge_topk_probs[0, 1] = [0.5, 0.25]
    output.merge_residual[0, 1] = 0.25
    view = steps.complete()
    descriptor = {"topk_ids": [7, 3], "topk_probs": [0.5, 0.25], "residual_prob": 0.25}
    assert view.token_merge_map == {steps.ids[0]: {4: None, 5: descriptor, 6: None, 7: None}}


def test_a_converged_canvas_has_a_length() -> None:
    steps = Scheduled([[1, 2, 3]], strategy="diffusion_gemma")
    until_blocks(steps, 1)
    steps.output.write_ids[0] = [1, 2, 3, 4]
    steps.output.flags[0] = 128
    view = SampleOutput.of_step(steps.plan, steps.output, -1)
    (state,) = view.block_state_map[steps.ids[0]].values()
    assert state["valid_commit_len"] == 4
    (opened,) = view.mask_token_rel_ids_map[steps.ids[0]].values()
    assert opened == []


def test_merge_is_a_union_of_every_map() -> None:
    one, two = (
        SampleOutput(**{name: {req: {"0": [req]}} for name in MAPS})  # type: ignore[arg-type]
        for req in ("3", "5")
    )
    merged = SampleOutput.merge([one, two])
    for name in MAPS:
        assert getattr(merged, name) == {"3": {"0": ["3"]}, "5": {"0": ["5"]}}, name
    assert SampleOutput.merge([]) == SampleOutput()
    with pytest.raises(ValueError, match="expected each request in one part, got 3 in two"):
        SampleOutput.merge([one, one])
