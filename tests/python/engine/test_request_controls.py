# SPDX-License-Identifier: Apache-2.0
"""What a request sets of the decoding rule: the answer is that of an engine with the same default."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from diffulex import SamplingParams
from fixtures.quick import quick
from run_ahead_cases import Place, Requests, answers, compare

#: Settings of requests that share a batch.
CONTROLS: tuple[dict[str, Any], ...] = (
    {},
    {"max_post_edit_steps": 0},
    {"max_post_edit_steps": 3, "penalty_lambda": 0.0},
    {"penalty_lambda": 4.0},
    {"max_post_edit_steps": 1, "penalty_lambda": 12.0, "remask_threshold": 0.1},
    {"penalty_lambda": 0.5},
)
SHAPE = {"block_size": 8, "buffer_size": 2, "page_size": 8, "max_num_reqs": 8}
#: What the engine does with requests that set nothing.
DEFAULTS = {"max_post_edit_steps": 2, "penalty_lambda": 1.0}


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("graphs", marks=pytest.mark.cuda),
        pytest.param("eager", marks=pytest.mark.cuda),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    kind = request.param
    tiny = request.getfixturevalue("tiny" if kind == "cpu" else "tiny_cuda")
    return Place(tiny, kind == "eager")


def controlled(rng: random.Random, count: int) -> Requests:
    """Requests of all controls, greedy, drawn and filtered."""
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(16, 40),
            ignore_eos=True,
            temperature=rng.choice((0.0, 0.8)),
            top_k=rng.choice((None, 5)),
            seed=rng.getrandbits(64),
            **CONTROLS[index % len(CONTROLS)],
        )
        for index in range(count)
    ]
    return prompts, params


def plain(params: SamplingParams) -> SamplingParams:
    """The request without what the engine's defaults give it."""
    return dataclasses.replace(
        params, max_post_edit_steps=None, penalty_lambda=None, remask_threshold=None
    )


@pytest.mark.parametrize("run_ahead", quick(["off", "on"], ["on"]))
def test_a_batch_of_values_equals_engines_of_each(place: Place, run_ahead: str) -> None:
    model, settings = place.of("edit", **SHAPE, run_ahead=run_ahead, check_run_ahead=True)
    prompts, params = controlled(random.Random(5), 12)
    with model.engine(**settings, **DEFAULTS) as engine:
        batched = answers(engine.generate(prompts, params, summary=False))
        unset = answers(engine.generate(prompts, [plain(p) for p in params], summary=False))
    for first, control in enumerate(CONTROLS):
        mine = range(first, len(prompts), len(CONTROLS))
        own = {k: v for k, v in control.items() if k != "remask_threshold"}
        with model.engine(**settings, **{**DEFAULTS, **own}) as engine:
            for index in mine:
                alone = engine.generate([prompts[index]], [plain(params[index])], summary=False)
                assert answers(alone) == [batched[index]], (control, index)
        # Each control changes an answer or the number of its forwards.
        assert not own or [batched[i] for i in mine] != [unset[i] for i in mine], control


def test_values_of_requests_run_ahead(place: Place) -> None:
    """The device has the plans of the scheduler; batches change as requests end."""
    model, settings = place.of("edit", **SHAPE, **DEFAULTS)
    assert compare(model, settings, seed=3, count=12, make=controlled) > 5


@pytest.mark.slow
def test_preempted_requests_keep_their_values(place: Place) -> None:
    model, settings = place.of("edit", **SHAPE, **DEFAULTS)
    prompts, params = controlled(random.Random(11), 12)
    tight = {"num_pages": 14, "max_model_len": 88, "decode_headroom": False}
    outcomes = []
    for extra in ({}, tight, {**tight, "run_ahead": "on", "check_run_ahead": True}):
        with model.engine(**settings, **extra) as engine:
            outputs = engine.generate(prompts, params, summary=False)
            assert bool(extra) == (engine.stats().num_preemptions > 0)
            outcomes.append([o.token_ids for o in outputs])
    assert outcomes[0] == outcomes[1] == outcomes[2]
