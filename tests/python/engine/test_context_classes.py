# SPDX-License-Identifier: Apache-2.0
"""Decode steps are launched for bounds on the context, which every loop chooses alike."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from diffulex import SamplingParams
from diffulex.engine.engine import Diffulex
from diffulex.ops.workspace import attention_splits
from diffulex.runner.context_classes import ContextClasses
from diffulex.runner.decode_graphs import Bucket
from diffulex.runner.decode_loop import DecodeLoop
from diffulex.runner.loop_steps import StepVariant
from fixtures.quick import quick
from tiny_engine import TinyModel

SETTINGS: dict[str, Any] = {
    "block_size": 8,
    "page_size": 8,
    "max_num_reqs": 4,
    "decoding_thresholds": {"accept_threshold": 0.3},
}
BOUNDS = (16, 24, 40, 64, 128)


def requests(seed: int, count: int, longest: int = 60) -> tuple[list[list[int]], list[Any]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 40),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.sample(range(256), 8) if rng.random() < 0.5 else (),
            temperature=rng.choice((0.0, 0.0, 0.8)),
            seed=rng.getrandbits(64),
        )
        for _ in range(count)
    ]
    return prompts, params


def dividing(tiny: TinyModel, *, is_hopper: bool, limit: int) -> ContextClasses:
    """Classes as on a GPU."""
    classes = ContextClasses(tiny.config(**SETTINGS))
    classes._is_dividing, classes._is_hopper, classes._limit = True, is_hopper, limit
    return classes


def test_one_class_where_keys_are_not_divided(tiny: TinyModel) -> None:
    assert ContextClasses(tiny.config()).bounds(1, 32) == (128,)
    assert not ContextClasses(tiny.config(batch_invariant=True))._is_dividing


@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize("limit", [128, 2048, 4064, 32768])
@pytest.mark.parametrize("rows", [4, 32, 128, 600])
def test_classes_are_few_and_differ(
    tiny: TinyModel, is_hopper: bool, limit: int, rows: int
) -> None:
    classes = dividing(tiny, is_hopper=is_hopper, limit=limit)
    spec = tiny.facts.spec
    for num_reqs in (1, 2, 8, 16, 64, 512):
        bounds = classes.bounds(num_reqs, rows)
        assert bounds == tuple(sorted(set(bounds)))
        assert bounds[-1] == limit
        assert len(bounds) <= 6
        splits = [
            [attention_splits(num_reqs, *s, rows, b, is_hopper) for s in spec.attention_shapes]
            for b in bounds
        ]
        assert all(one != two for one, two in pairwise(splits))
        for context_len in (0, 1, *bounds, *(b - 1 for b in bounds), *(b + 1 for b in bounds[:-1])):
            bound = classes.bound(num_reqs, rows, context_len)
            assert bound == min(b for b in bounds if b >= context_len)
    # A full device needs no division.
    assert classes.bounds(512, rows) == (limit,)


def test_short_contexts_are_divided_less(tiny: TinyModel) -> None:
    classes = dividing(tiny, is_hopper=True, limit=32768)
    assert len(classes.bounds(1, 32)) > 1
    (shape,) = tiny.facts.spec.attention_shapes
    first, *_, last = (
        attention_splits(1, *shape, 32, bound, True) for bound in classes.bounds(1, 32)
    )
    assert first < last


@pytest.mark.parametrize(
    ("strategy", "buffer_size"),
    quick([(s, n) for s in ("multi_bd", "d2f") for n in (1, 3)], [("multi_bd", 3)]),
)
def test_steps_that_run_ahead_find_their_class(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, strategy: str, buffer_size: int
) -> None:
    """The CPU's attention refuses contexts beyond the bound, so that one too small would raise."""
    model = tiny if strategy == "multi_bd" else tiny.under("llada")
    settings = {**SETTINGS, "decoding_strategy": strategy, "buffer_size": buffer_size}
    calls = [requests(1, 12), requests(2, 6, longest=4)]
    with model.engine(**settings, run_ahead="off") as engine:
        expected = [engine.generate(*call, summary=False) for call in calls]
    monkeypatch.setattr(ContextClasses, "_find_bounds", lambda *_: BOUNDS)
    launched: list[Bucket] = []
    enqueue = DecodeLoop._enqueue

    def counting(self: DecodeLoop, variant: StepVariant) -> None:
        launched.append(variant.bucket)
        enqueue(self, variant)

    monkeypatch.setattr(DecodeLoop, "_enqueue", counting)
    with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        actual = [engine.generate(*call, summary=False) for call in calls]
        assert engine._executor.runner.num_ahead_steps > 10
    for outputs, others in zip(actual, expected, strict=True):
        assert [o.token_ids for o in outputs] == [o.token_ids for o in others]
    assert {bucket.max_context_len for bucket in launched} == set(BOUNDS)


def contexts_of(engine: Diffulex, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(step, context the host announced for the next step, context it has) of every step."""
    scheduler, seen = engine._scheduler, []
    complete = scheduler.complete_step

    class Watching:
        def __getattr__(self, name: str) -> Any:
            return getattr(scheduler, name)

        def complete_step(self, plan: Any, output: Any) -> Any:
            is_known = scheduler.can_run_ahead(plan)
            ahead = scheduler.context_len_ahead() if is_known else -1
            seen.append((int(plan.step_id), ahead, int(plan.max_context_len)))
            return complete(plan, output)

    monkeypatch.setattr(engine._loop, "_scheduler", Watching())
    return seen


def test_the_context_of_the_next_step_is_known(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both loops find the same class: no request ends here, so the announcement is exact."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with tiny.engine(**SETTINGS, buffer_size=3, run_ahead="on") as engine:
        seen = contexts_of(engine, monkeypatch)
        engine.generate([[1, 2, 3] * 9], params, summary=False)
    pairs = [(one[1], two[2]) for one, two in pairwise(seen) if one[1] >= 0]
    assert len(pairs) > 10
    assert all(announced == have for announced, have in pairs)
    assert len({have for _, have in pairs}) > 5


LONG: dict[str, Any] = {
    "block_size": 32,
    "page_size": 32,
    "max_model_len": 4096,
    "max_num_reqs": 2,
    "num_pages": 320,
    "max_num_batched_tokens": 8192,
    "decoding_thresholds": {"accept_threshold": 0.8},
}


def captured_variants(engine: Diffulex) -> tuple[StepVariant, ...]:
    loop = engine._executor.runner._decode_loop
    assert loop is not None
    assert loop._step_graphs is not None
    return loop._step_graphs.keys


@pytest.mark.cuda
@pytest.mark.parametrize("buffer_size", [1, 4])
def test_a_context_that_grows_through_the_classes(
    tiny_cuda_bf16: TinyModel, buffer_size: int
) -> None:
    """Graphs and eager steps give the same tokens on both sides of a bound."""
    settings = {**LONG, "buffer_size": buffer_size}
    rng = random.Random(3)
    with tiny_cuda_bf16.engine(**settings) as engine:
        variants = captured_variants(engine)
        bounds = sorted({variant.bucket.max_context_len for variant in variants})
        lengths = [max(bound - 64, 1) for bound in bounds[:-1]] or [400]
        prompts = [[rng.randrange(256) for _ in range(length)] for length in lengths]
        params = SamplingParams(max_tokens=160, ignore_eos=True)
        outputs = [engine.generate([p], params, summary=False)[0] for p in prompts]
        assert captured_variants(engine) == variants
        assert engine._executor.runner.num_graph_fallbacks == 0
        assert engine._executor.runner.num_ahead_steps > 10
    with tiny_cuda_bf16.engine(**settings, enforce_eager=True) as engine:
        eager = [engine.generate([p], params, summary=False)[0] for p in prompts]
    assert [o.token_ids for o in eager] == [o.token_ids for o in outputs]


@pytest.mark.cuda
def test_drawn_steps_are_captured_for_the_class_they_reach(tiny_cuda_bf16: TinyModel) -> None:
    """Running ahead pauses where the next class has no graph for draws yet."""
    rng = random.Random(4)
    with tiny_cuda_bf16.engine(**LONG) as engine:
        before = captured_variants(engine)
        bounds = sorted({v.bucket.max_context_len for v in before if v.bucket.num_reqs == 1})
        if len(bounds) < 2:
            pytest.skip("one class")
        prompt = [rng.randrange(256) for _ in range(bounds[0] - 64)]
        params = SamplingParams(max_tokens=160, ignore_eos=True, temperature=0.9, seed=5)
        drawn = engine.generate([prompt], params, summary=False)[0]
        added = captured_variants(engine)[len(before) :]
        assert {v.bucket.max_context_len for v in added} == set(bounds[:2])
        assert all(v.is_drawn and not v.is_filtered for v in added)
        assert engine._executor.runner.num_graph_steps >= engine.run_stats.num_steps - 1
    with tiny_cuda_bf16.engine(**LONG, enforce_eager=True) as engine:
        assert engine.generate([prompt], params, summary=False)[0].token_ids == drawn.token_ids


@pytest.mark.cuda
def test_default_draws_are_captured_beforehand(tiny_cuda_bf16: TinyModel) -> None:
    filters = {"temperature": 0.7, "top_k": 20}
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    with tiny_cuda_bf16.engine(**LONG, **filters) as engine:
        before = captured_variants(engine)
        assert {(v.is_drawn, v.is_filtered) for v in before} == {(False, False), (True, True)}
        drawn = engine.generate([[1, 2, 3]], params, summary=False)[0]
        assert captured_variants(engine) == before
    with tiny_cuda_bf16.engine(**LONG, **filters, enforce_eager=True) as engine:
        assert engine.generate([[1, 2, 3]], params, summary=False)[0].token_ids == drawn.token_ids


@pytest.mark.cuda
def test_watched_requests_replay_forwards(tiny_cuda: TinyModel) -> None:
    """The host looks at their logits, so the loop cannot take them; the forward is a graph still."""
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = {**SETTINGS, "buffer_size": 2}
    prompts, params = requests(8, 3)
    watched = [SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, min_tokens=4)] * 3
    with tiny_cuda.engine(**settings, enforce_eager=True, run_ahead="off") as engine:
        expected = engine.generate(prompts, watched, summary=False)
        plain = engine.generate(prompts, params, summary=False)
    with tiny_cuda.engine(**settings) as engine:
        forwards = engine._executor.runner._graphs.forwards
        assert forwards is not None
        assert forwards.captured == ()
        outputs = engine.generate(prompts, watched, summary=False)
        assert forwards.captured
        assert engine._executor.runner.num_ahead_steps == 0
        assert outputs.stats.num_graph_steps > 5
        assert outputs.stats.num_graph_fallbacks == 0
        # The loop goes on with its own graphs.
        after = engine.generate(prompts, params, summary=False)
        assert engine._executor.runner.num_ahead_steps > 0
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.token_ids for o in after] == [o.token_ids for o in plain]
    for have, want in zip(outputs, expected, strict=True):
        assert have.logprobs is not None
        assert want.logprobs is not None
        assert [p.logprob for p in have.logprobs] == pytest.approx(
            [p.logprob for p in want.logprobs], abs=1e-3
        )
