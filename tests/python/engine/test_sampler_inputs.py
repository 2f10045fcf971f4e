# SPDX-License-Identifier: Apache-2.0
"""Parts of a step that a sampler gets: which there are, and what outlives the step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cases import random_prompt
from diffulex import SamplingParams
from diffulex.runner import model_runner
from diffulex.runner.batch import StepBuffers, StepShape
from diffulex.runner.sampler_inputs import SamplerInputsBuilder
from diffulex.strategies.listing import strategy_named
from diffulex.strategies.traits import StrategyTraits
from diffulex_ext import _core
from tiny_engine import TinyModel


def builder_of(
    traits: StrategyTraits | None = None, **fields: Any
) -> tuple[SamplerInputsBuilder, StepBuffers]:
    options = _core.EngineOptions(
        block_size=4, page_size=4, num_pages=8, max_num_reqs=2, max_model_len=16, **fields
    )
    buffers = StepBuffers(options, torch.device("cpu"))
    traits = traits or strategy_named(options.strategy).traits
    return SamplerInputsBuilder(options, traits, buffers.sampler, None), buffers


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


def test_parts_follow_the_given_traits() -> None:
    """The record decides, which no name is looked up for."""
    fields = {"strategy": "fast_dllm_v2", "buffer_size": 2}
    traits = strategy_named("fast_dllm_v2").traits
    for given, has_seeds in ((traits, True), (StrategyTraits(), False)):
        builder, buffers = builder_of(given, **fields)
        inputs = builder.inputs(buffers.views, shape(any_sampled=False), torch.zeros(4, 8))
        assert (inputs.seeds is not None) == has_seeds


def test_only_the_runner_of_a_model_looks_strategies_up() -> None:
    folder = Path(model_runner.__file__).parent
    names = {p.name for p in folder.glob("*.py") if "strategy_named" in p.read_text("utf-8")}
    assert names == {"model_runner.py"}


def test_views_of_a_size_are_made_once() -> None:
    builder, buffers = builder_of()
    logits = torch.zeros(4, 8)
    one, two = (StepShape(4 * blocks, blocks, blocks, 4 * blocks, False, 0, 0) for blocks in (1, 2))
    first = builder.inputs(buffers.views, one, logits)
    again = builder.inputs(buffers.views, one, logits)
    assert all(getattr(again, name) is getattr(first, name) for name in ("tokens", "write_ids"))
    buffers.views.blk_tokens[:] = torch.arange(8).view(2, 4)
    assert again.tokens.tolist() == [[0, 1, 2, 3]]
    other = builder.inputs(buffers.views, two, logits)
    assert other.tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert builder.inputs(buffers.views, one, logits).tokens.tolist() == [[0, 1, 2, 3]]


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
        assert not engine._executor.runner._inputs_builder.has_sampled_requests
        engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True), summary=False)
        assert engine._executor.runner.sampler.rows.saved_logits is None
        assert not engine._executor.runner._inputs_builder.has_sampled_requests
        engine.add_request(prompt, params)
        assert engine._executor.runner._inputs_builder.has_sampled_requests
        output = None
        while engine.has_unfinished():
            for result in engine.step():
                output = result.output
            saved = engine._executor.runner.sampler.rows.saved_logits
            assert saved is not None
            assert saved.any()
        assert output is not None
