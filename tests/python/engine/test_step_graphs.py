# SPDX-License-Identifier: Apache-2.0
"""When steps are captured and which graph they replay: the CPU with graphs that run anew each time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffulex import SamplingParams
from diffulex.engine.engine import Diffulex
from diffulex.runner import step_graphs
from diffulex.runner.loop_steps import StepVariant
from replayed_graphs import BOUNDS, Replayed
from tiny_engine import TinyModel

SETTINGS: dict[str, Any] = {
    "block_size": 8,
    "buffer_size": 2,
    "page_size": 8,
    "max_num_reqs": 4,
    "decoding_thresholds": {"accept_threshold": 0.8},
}


def requests(seed: int, count: int, **params: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 50))] for _ in range(count)]
    chosen = [
        SamplingParams(
            max_tokens=rng.randint(1, 40), ignore_eos=True, seed=rng.getrandbits(64), **params
        )
        for _ in range(count)
    ]
    return prompts, chosen


def variants(engine: Diffulex) -> tuple[StepVariant, ...]:
    loop = engine._executor.runner._decode_loop
    assert loop is not None
    assert loop._step_graphs is not None
    return loop._step_graphs.keys


def expected_of(tiny: TinyModel, *calls: Any, **settings: Any) -> list[list[tuple[int, ...]]]:
    with tiny.engine(**SETTINGS, **settings, run_ahead="off") as engine:
        return [[o.token_ids for o in engine.generate(*call, summary=False)] for call in calls]


def test_greedy_steps_need_no_capture(
    tiny: TinyModel, as_cuda: Callable[[Diffulex], Diffulex]
) -> None:
    call = requests(1, 9)
    expected = expected_of(tiny, call)
    with tiny.engine(**SETTINGS, run_ahead="on", check_run_ahead=True) as engine:
        before = variants(as_cuda(engine))
        assert (
            {v.bucket.num_reqs for v in before}
            == set(engine._executor.runner.graph_buckets)
            == {1, 2, 4}
        )
        assert {v.bucket.max_context_len for v in before} == set(BOUNDS)
        outputs = engine.generate(*call, summary=False)
        assert variants(engine) == before
        runner = engine._executor.runner
        assert runner.num_graph_steps >= engine.stats().num_decode_steps
        assert runner.num_ahead_steps > 10
        assert runner._graphs.forwards is not None
        assert runner._graphs.forwards.captured == ()
    assert [o.token_ids for o in outputs] == expected[0]


def test_the_books_of_a_step_count_graphs_without_a_copy_of_them(
    tiny: TinyModel, as_cuda: Callable[[Diffulex], Diffulex], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny.engine(**SETTINGS, run_ahead="on") as engine:
        expected = len(variants(as_cuda(engine)))
        monkeypatch.delattr(Replayed, "keys")
        assert engine._executor.counts.captured == expected > 0


def test_drawn_steps_are_captured_when_they_come(
    tiny: TinyModel, as_cuda: Callable[[Diffulex], Diffulex]
) -> None:
    """Running ahead pauses for a capture at most once per shape."""
    calls = [requests(2, 6, temperature=0.9), requests(3, 6, temperature=0.9, top_k=7)]
    expected = expected_of(tiny, *calls)
    with tiny.engine(**SETTINGS, run_ahead="on", check_run_ahead=True) as engine:
        before = variants(as_cuda(engine))
        actual = [engine.generate(*call, summary=False) for call in calls]
        added = variants(engine)[len(before) :]
        assert {(v.is_drawn, v.is_filtered) for v in added} == {(True, False), (True, True)}
        assert len({v.bucket.max_context_len for v in added}) > 1
        runner = engine._executor.runner
        assert runner.num_graph_steps >= engine.stats().num_decode_steps
        assert runner.num_ahead_steps > 10
    assert [[o.token_ids for o in outputs] for outputs in actual] == expected


def test_draws_by_default_are_captured_beforehand(
    tiny: TinyModel, as_cuda: Callable[[Diffulex], Diffulex]
) -> None:
    call = requests(4, 5)
    draws = {"temperature": 0.8, "top_p": 0.9}
    expected = expected_of(tiny, call, **draws)
    with tiny.engine(**SETTINGS, **draws, run_ahead="on") as engine:
        before = variants(as_cuda(engine))
        assert {(v.is_drawn, v.is_filtered) for v in before} == {(False, False), (True, True)}
        outputs = engine.generate(*call, summary=False)
        assert variants(engine) == before
    assert [o.token_ids for o in outputs] == expected[0]


def test_watched_requests_replay_forwards(
    tiny: TinyModel, as_cuda: Callable[[Diffulex], Diffulex]
) -> None:
    """They come and go among others; the loop takes its own steps before and after."""
    prompts, params = requests(5, 8)
    params[3] = dataclasses.replace(params[3], max_tokens=10, logprobs=2)
    params[5] = dataclasses.replace(params[5], max_tokens=10, min_tokens=3)
    expected = expected_of(tiny, (prompts, params))
    with tiny.engine(**SETTINGS, run_ahead="on", check_run_ahead=True) as engine:
        runner = as_cuda(engine)._executor.runner
        outputs = engine.generate(prompts, params, summary=False)
        forwards = runner._graphs.forwards
        assert forwards is not None
        # The largest is first, so that the others, in any order, share its memory.
        assert forwards.captured[0] == runner._graphs.shapes()[0]
        assert len(forwards.captured) > 1
        assert runner._graphs.num_steps > 5
        assert runner.num_ahead_steps > 5
        assert runner.num_graph_fallbacks == 0
        assert runner.num_graph_steps >= engine.stats().num_decode_steps
    assert [o.token_ids for o in outputs] == expected[0]
    assert outputs[3].logprobs is not None
    assert len(outputs[3].logprobs) == len(outputs[3].token_ids)


@pytest.mark.parametrize("strategy", ["multi_bd", "fast_dllm_v2"])
def test_the_hosts_loop_replays_forwards(
    tiny: TinyModel, as_cuda: Callable[[Diffulex], Diffulex], strategy: str
) -> None:
    model, settings = tiny, dict(SETTINGS)
    if strategy == "fast_dllm_v2":
        model, settings["decoding_strategy"] = tiny.under("fast_dllm_v2"), strategy
    # Requests of fast_dllm_v2 may have rows of two kinds in one step, which no graph takes.
    call = requests(6, 7 if strategy == "multi_bd" else 1)
    with model.engine(**settings, run_ahead="off") as engine:
        expected = engine.generate(*call, summary=False)
    with model.engine(**settings, run_ahead="off") as engine:
        runner = as_cuda(engine)._executor.runner
        forwards = runner._graphs.forwards
        assert forwards is not None
        before = forwards.captured
        assert before == tuple(b for b in runner._graphs.shapes() if not b.packed_rows)
        assert before[0] == runner._graphs.shapes()[0]
        outputs = engine.generate(*call, summary=False)
        # Packed ones come when they are needed, to the memory of the largest.
        assert forwards.captured[: len(before)] == before
        assert all(bucket.packed_rows for bucket in forwards.captured[len(before) :])
        assert runner.num_graph_steps == engine.stats().num_decode_steps > 5
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


def test_graphs_take_the_stream_of_graphs_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps scratch for every stream for ever; living graphs must not share one."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: object())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    device = torch.device("meta")  # no engine has streams of it
    first, second = (step_graphs.StepGraphs[int](device) for _ in range(2))
    stream = first._stream
    assert second._stream is not stream
    del first
    third = step_graphs.StepGraphs[int](device)
    assert third._stream is stream
    assert step_graphs._idle_streams[device] == []
