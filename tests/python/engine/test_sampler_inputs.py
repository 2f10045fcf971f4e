# SPDX-License-Identifier: Apache-2.0
"""Parts of a step that a sampler gets: which there are, and what outlives the step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cases import random_prompt
from diffulex import SamplingParams
from diffulex.runner.batch import StepBuffers, StepShape
from diffulex.runner.sampler_inputs import SamplerInputsBuilder
from diffulex_ext import _core
from tiny_engine import TinyModel


def builder_of(**fields: Any) -> tuple[SamplerInputsBuilder, StepBuffers]:
    options = _core.EngineOptions(
        block_size=4, page_size=4, num_pages=8, max_num_reqs=2, max_model_len=16, **fields
    )
    buffers = StepBuffers(options, torch.device("cpu"))
    return SamplerInputsBuilder(options, buffers.sampler, None), buffers


def shape(*, any_sampled: bool) -> StepShape:
    return StepShape(4, 1, 1, 4, any_sampled, 0, 0)


def test_draws_are_remembered() -> None:
    """The row that a later draw starts from is saved in a step that draws nothing."""
    builder, buffers = builder_of(logits_shift=True)
    logits = torch.zeros(4, 8)

    def has_draws(any_sampled: bool) -> bool:
        carry = builder.inputs(buffers.views, shape(any_sampled=any_sampled), logits).carry
        assert carry is not None
        return carry.has_sampled_requests

    assert [has_draws(draws) for draws in (False, True, False)] == [False, True, True]


def test_parts_follow_the_strategy() -> None:
    logits = torch.zeros(4, 8)
    for fields, parts in (
        ({}, set()),
        ({"logits_shift": True}, {"carry"}),
        ({"is_editing": True}, {"edit"}),
        ({"strategy": "dmax", "token_merge_top_k": 2}, {"merge"}),
        ({"strategy": "fast_dllm_v2", "buffer_size": 2}, {"seeds"}),
    ):
        builder, buffers = builder_of(**fields)
        inputs = builder.inputs(buffers.views, shape(any_sampled=False), logits)
        names = ("carry", "seeds", "edit", "merge", "canvas", "filters")
        assert {name for name in names if getattr(inputs, name) is not None} == parts, fields
        is_rewriting = bool({"edit", "merge"} & parts)
        assert (inputs.same_token_ratio is not None) == is_rewriting


@pytest.mark.parametrize("length", [4, 8])
def test_a_drawing_request_saves_logits_from_its_first_step(tiny: TinyModel, length: int) -> None:
    """Its prompt ends with a block, so the first token is drawn from a row of the prefill."""
    model = tiny.under("dream", shift=True)
    prompt = random_prompt(random.Random(3), length)
    params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=1.0, seed=2)
    settings = {
        "acceptance_rule": "threshold",
        "block_size": 4,
        "buffer_size": 1,
        "decoding_strategy": "multi_bd",
    }
    with model.engine(**settings) as engine:
        assert not engine._runner._inputs_builder.has_sampled_requests
        engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True), summary=False)
        assert engine._runner.sampler.rows.saved_logits is None
        assert not engine._runner._inputs_builder.has_sampled_requests
        engine.add_request(prompt, params)
        assert engine._runner._inputs_builder.has_sampled_requests
        output = None
        while engine.has_unfinished():
            for result in engine.step():
                output = result.output
            saved = engine._runner.sampler.rows.saved_logits
            assert saved is not None
            assert saved.any()
        assert output is not None
