# SPDX-License-Identifier: Apache-2.0
"""Steps that the device plans for valid rows alone decide what whole ones do, bit for bit.

The CPU plays the device, and every plan is compared with the scheduler's (`check_run_ahead`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffulex import SamplingParams
from diffulex.engine.engine import Diffulex
from diffulex.runner import packed_steps, row_share
from diffulex.runner.decode_loop import DecodeLoop
from diffulex.runner.loop_steps import StepVariant
from diffulex.runner.packed_steps import head_row_counts, num_head_graphs
from diffulex.runner.plan_check import PlanCheck, PlanMismatchError
from fixtures.quick import quick
from run_ahead_cases import (
    FILL,
    PACKING,
    ROUNDED,
    STRATEGIES,
    Place,
    answers,
    check_aborts_and_arrivals,
    loop_of,
    model_of,
    pack_every_step,
    requests,
    tokens_with_interrupts,
)
from step_watch import Watched
from tiny_engine import TinyModel


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[StepVariant]:
    """The variants of all steps of loops that graphs do not replay."""
    variants: list[StepVariant] = []
    enqueue = DecodeLoop._enqueue

    def enqueued(self: DecodeLoop, variant: StepVariant) -> None:
        variants.append(variant)
        enqueue(self, variant)

    monkeypatch.setattr(DecodeLoop, "_enqueue", enqueued)
    return variants


@pytest.mark.parametrize("name", PACKING)
@pytest.mark.parametrize(("block_size", "buffer_size"), quick([(4, 6), (8, 3), (32, 2)], [(8, 3)]))
def test_packed_steps_of_the_loop_decide_bit_for_bit_what_whole_ones_do(
    tiny: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    launched: list[StepVariant],
    name: str,
    block_size: int,
    buffer_size: int,
) -> None:
    shape = {"block_size": block_size, "buffer_size": buffer_size, "max_num_reqs": 4}
    settings = {**STRATEGIES[name][1], **shape, "page_size": 8}
    model = model_of(tiny, name)
    prompts, params = requests(random.Random(buffer_size), 9)
    seen = []
    for kind in ("host", "whole", "packed"):
        run_ahead = "off" if kind == "host" else "on"
        with monkeypatch.context() as patch:
            if kind == "packed":
                pack_every_step(patch)
            launched.clear()
            with model.engine(**settings, run_ahead=run_ahead, check_run_ahead=True) as engine:
                watched = Watched(engine, patch)
                outputs = engine.generate(prompts, params, summary=False)
                seen.append((answers(outputs), watched.decided))
                num_packed = 0 if kind == "host" else loop_of(engine).num_packed_steps
                assert (num_packed > 3) == (kind == "packed")
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0][1]) > 80
    assert all(variant.head_rows > 0 for variant in launched)
    assert any(variant.bucket.packed_rows for variant in launched)
    num_logits = {v.bucket.num_reqs * block_size * buffer_size: v.head_rows for v in launched}
    assert all(rows <= most for most, rows in num_logits.items())


@pytest.mark.parametrize("name", quick(PACKING, ["multi_bd", "d2f_shifted", "dmax"]))
def test_steps_change_between_whole_and_packed_ones(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Requests that end and new ones change the share of void rows, and with it how steps are run."""
    monkeypatch.setattr(row_share.LOOP_LIMITS, "rows", 0)
    monkeypatch.setattr(row_share.LOOP_LIMITS, "products", 0.0)
    settings = {**STRATEGIES[name][1], "block_size": 8, "buffer_size": 3, "max_num_reqs": 4}
    model = model_of(tiny, name)
    prompts, params = requests(random.Random(3), 12)
    with model.engine(**settings, run_ahead="off") as engine:
        expected = engine.generate(prompts, params, summary=False)
    with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        counts = []
        actual = []
        for low in (2.0, 0.0, 0.8, 2.0):
            monkeypatch.setattr(row_share, "LOW_SHARE", low)
            monkeypatch.setattr(row_share.LOOP_LIMITS, "upper_share", max(low, 0.1))
            actual.append(engine.generate(prompts, params, summary=False))
            counts.append(loop_of(engine).num_packed_steps)
    assert all(answers(outputs) == answers(expected) for outputs in actual)
    assert 0 < counts[0] < counts[3]
    assert counts[1] <= counts[0] + 1  # the share is that of the steps before


@pytest.mark.parametrize("name", quick(PACKING, ["multi_bd", "d2f_shifted"]))
def test_aborts_and_arrivals_in_between(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pack_every_step(monkeypatch)
    rng = random.Random(7)
    prompts, params = requests(rng, 12)
    model, settings = Place(tiny, True).of(name, block_size=8, buffer_size=3, max_num_reqs=5)
    with model.engine(**settings, run_ahead="off") as engine:
        expected = engine.generate(prompts, params, summary=False)
    with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        num_done = check_aborts_and_arrivals(engine, (prompts, params), expected, rng, 0.15)
        assert loop_of(engine).num_packed_steps > 3
    assert num_done == len(prompts)


@pytest.mark.parametrize("point", ["schedule_ahead", "run_ahead", "collect"])
def test_interrupts_while_a_packed_step_runs_ahead(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    pack_every_step(monkeypatch)
    prompts, params = requests(random.Random(5), 4)
    params = [dataclasses.replace(p, max_nfe=None, max_tokens=24, ignore_eos=True) for p in params]
    settings = {**FILL, "block_size": 8, "buffer_size": 3}
    with tiny.engine(**settings, run_ahead="off") as engine:
        expected = engine.generate(prompts, params, summary=False)
    with tiny.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        tokens = tokens_with_interrupts(engine, (prompts, params), point, monkeypatch)
        assert loop_of(engine).num_packed_steps > 3
    assert tokens == [o.token_ids for o in expected]


def test_one_block_in_flight_is_never_packed(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, launched: list[StepVariant]
) -> None:
    pack_every_step(monkeypatch)
    with tiny.engine(**FILL, block_size=8, buffer_size=1, run_ahead="on") as engine:
        engine.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=24), summary=False)
        loop = loop_of(engine)
        assert loop._packed is None
        assert loop.num_packed_steps == 0
    assert launched
    assert not any(variant.head_rows for variant in launched)


def test_small_models_run_whole_steps(tiny: TinyModel) -> None:
    """Their void rows cost less than the wait for their number."""
    settings = {**FILL, "block_size": 32, "buffer_size": 4, "max_num_reqs": 4, "run_ahead": "on"}
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    with tiny.engine(**settings) as engine:
        engine.generate([[1, 2, 3]] * 4, params, summary=False)
        assert engine._executor.runner.num_ahead_steps > 1
        assert loop_of(engine).num_packed_steps == 0


def test_row_counts_of_heads() -> None:
    assert head_row_counts(1024) == (64, 128, 256, 512, 1024)
    assert head_row_counts(96) == (64, 96)
    assert head_row_counts(64) == (64,)
    assert head_row_counts(24) == (24,)


Change = Callable[[Diffulex], Diffulex]
GRAPHS: dict[str, Any] = {
    **{"block_size": 8, "buffer_size": 4, "page_size": 8, "max_num_reqs": 4},
    "decoding_thresholds": {"accept_threshold": 0.8},
}


def run_twice(engine: Diffulex, runs: list[Any]) -> list[list[tuple[Any, ...]]]:
    return [answers(engine.generate(*run, summary=False)) for run in (*runs, *runs)]


def test_graphs_of_packed_steps_are_captured_at_the_start(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, as_cuda: Change, launched: list[StepVariant]
) -> None:
    """Forwards by their rows, and what follows them by the rows of the head."""
    pack_every_step(monkeypatch)
    prompts, params = requests(random.Random(1), 9)
    params = [dataclasses.replace(p, temperature=0.0) for p in params]
    with tiny.engine(**GRAPHS, run_ahead="off") as engine:
        expected = answers(engine.generate(prompts, params, summary=False))
    with tiny.engine(**GRAPHS, run_ahead="on", check_run_ahead=True) as engine:
        runner = as_cuda(engine)._executor.runner
        forwards, graphs = runner._graphs.forwards, loop_of(engine)._step_graphs
        assert forwards is not None
        assert graphs is not None
        before = forwards.captured, graphs.keys
        heads = [key for key in graphs.keys if key.head_rows]
        assert {key.bucket.num_reqs for key in heads} == {1, 2, 4}
        assert {key.head_rows for key in heads if key.bucket.num_reqs == 4} == {64, 128}
        assert {b.packed_rows for b in forwards.captured if b.num_reqs == 4} == {0, 32, 64, 96}
        assert forwards.captured[0] == runner._graphs.shapes()[0]
        assert num_head_graphs(engine.config, runner._graphs) == len(heads)
        launched.clear()
        first, second = run_twice(engine, [(prompts, params)])
        assert first == second == expected
        assert (forwards.captured, graphs.keys) == before
        assert loop_of(engine).num_packed_steps > 10
        assert launched == []
        assert runner.num_graph_steps >= engine.stats().num_decode_steps


@pytest.mark.parametrize(("most", "num_reqs"), [(3, [1]), (9, [1, 2]), (15, [1, 2, 4])])
def test_of_too_many_forwards_those_of_few_requests_are_captured(
    tiny: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    as_cuda: Change,
    caplog: pytest.LogCaptureFixture,
    most: int,
    num_reqs: list[int],
) -> None:
    """The largest of all comes first, so that the others share its memory. Steps are packed where
    fewer rows have a forward, and whole elsewhere."""
    pack_every_step(monkeypatch)
    monkeypatch.setattr(packed_steps, "_MAX_FORWARDS", most)
    prompts, params = requests(random.Random(1), 9)
    params = [dataclasses.replace(p, temperature=0.0) for p in params]
    with tiny.engine(**GRAPHS, run_ahead="off") as engine:
        expected = answers(engine.generate(prompts, params, summary=False))
    with tiny.engine(**GRAPHS, run_ahead="on", check_run_ahead=True) as engine:
        with caplog.at_level("INFO", logger="diffulex"):
            runner = as_cuda(engine)._executor.runner
        forwards, graphs = runner._graphs.forwards, loop_of(engine)._step_graphs
        assert forwards is not None
        assert graphs is not None
        shapes = runner._graphs.shapes()
        assert forwards.captured[0] == shapes[0]
        kept = forwards.captured[1:]
        assert len(kept) == most
        assert sorted({b.num_reqs for b in kept}) == num_reqs
        heads = [key for key in graphs.keys if key.head_rows]
        assert {key.bucket.num_reqs for key in heads} == set(num_reqs)
        assert num_head_graphs(engine.config, runner._graphs) == len(heads)
        assert f"no graph of {len(shapes) - len(kept)} forwards" in caplog.text
        assert run_twice(engine, [(prompts, params)]) == [expected, expected]
        assert loop_of(engine).num_packed_steps > 3


def test_draws_get_their_graphs_at_their_first_step(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, as_cuda: Change
) -> None:
    pack_every_step(monkeypatch)
    asked = requests(random.Random(2), 9)
    with tiny.engine(**GRAPHS, run_ahead="off") as engine:
        expected = answers(engine.generate(*asked, summary=False))
    with tiny.engine(**GRAPHS, run_ahead="on", check_run_ahead=True) as engine:
        graphs = loop_of(as_cuda(engine))._step_graphs
        assert graphs is not None
        assert not any(key.is_drawn for key in graphs.keys)
        first = answers(engine.generate(*asked, summary=False))
        keys = graphs.keys
        drawn = {key.head_rows for key in keys if key.is_drawn and key.bucket.num_reqs == 4}
        assert drawn == {64, 128}
        second = answers(engine.generate(*asked, summary=False))
        assert graphs.keys == keys
    assert first == second == expected


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_capture_that_fails_leaves_steps_without_its_graph(
    tiny: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    as_cuda: Change,
    caplog: pytest.LogCaptureFixture,
    is_strict: bool,
) -> None:
    """Forwards that have none are those of the next larger shape, and the rest runs by itself."""
    pack_every_step(monkeypatch)
    asked = requests(random.Random(2), 9)
    with tiny.engine(**GRAPHS, run_ahead="off") as engine:
        expected = answers(engine.generate(*asked, summary=False))
    with tiny.engine(
        **GRAPHS, run_ahead="on", check_run_ahead=True, require_fast_paths=is_strict
    ) as engine:
        runner = as_cuda(engine)._executor.runner
        loop, forwards = loop_of(engine), runner._graphs.forwards
        graphs = loop._step_graphs
        assert forwards is not None
        assert graphs is not None
        for bucket in forwards.captured:
            if bucket.packed_rows in (32, 64):
                del forwards._graphs._runs[bucket]  # type: ignore[attr-defined]

        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError("no memory for a graph")

        monkeypatch.setattr(graphs, "capture", fail)
        if is_strict:
            with pytest.raises(RuntimeError, match="no memory for a graph"):
                engine.generate(*asked, summary=False)
            return
        first = answers(engine.generate(*asked, summary=False))
        num_warnings = len([r for r in caplog.records if "no graph of" in r.message])
        assert num_warnings == len(loop._uncaptured) > 0
        assert answers(engine.generate(*asked, summary=False)) == first == expected
        assert len([r for r in caplog.records if "no graph of" in r.message]) == num_warnings
        assert loop.num_packed_steps > 10


@pytest.mark.parametrize("is_packed", [False, True])
def test_only_want_of_memory_leaves_a_graph_out(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, as_cuda: Change, is_packed: bool
) -> None:
    """Every other failure of a capture is one of the step, and of whole steps that one as well."""
    if is_packed:
        pack_every_step(monkeypatch)
    asked = requests(random.Random(2), 9)
    with tiny.engine(**GRAPHS, run_ahead="on") as engine:
        graphs = loop_of(as_cuda(engine))._step_graphs
        assert graphs is not None
        kind = RuntimeError if is_packed else torch.OutOfMemoryError

        def fail(*_: object) -> None:
            raise kind("the capture failed")

        monkeypatch.setattr(graphs, "capture", fail)
        with pytest.raises(kind, match="the capture failed"):
            engine.generate(*asked, summary=False)


def test_a_head_of_too_few_rows_is_found(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_every_step(monkeypatch)
    keep = PlanCheck.keep

    def keep_less(self: PlanCheck, place: int, views: Any, variant: StepVariant) -> None:
        assert variant.head_rows > 0
        keep(self, place, views, variant._replace(head_rows=1))

    monkeypatch.setattr(PlanCheck, "keep", keep_less)
    settings = {**GRAPHS, "run_ahead": "on", "check_run_ahead": True}
    with tiny.engine(**settings) as engine, pytest.raises(PlanMismatchError, match="head_rows"):
        engine.generate(*requests(random.Random(2), 9), summary=False)


def test_without_a_forward_for_all_rows_steps_are_whole(
    tiny: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    as_cuda: Change,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the capture of forwards fails at the start: one line of the log, and the loop as before."""
    pack_every_step(monkeypatch)
    asked = requests(random.Random(2), 9)
    with tiny.engine(**GRAPHS, run_ahead="off") as engine:
        expected = answers(engine.generate(*asked, summary=False))
    with tiny.engine(**GRAPHS, run_ahead="on", check_run_ahead=True) as engine:
        runner = engine._executor.runner

        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError("no memory for a graph")

        from diffulex.runner.decode_graphs import ForwardGraphs

        with monkeypatch.context() as patch:
            patch.setattr(ForwardGraphs, "_capture", fail)
            as_cuda(engine)
        assert len([r for r in caplog.records if "no memory for a graph" in r.message]) == 1
        assert answers(engine.generate(*asked, summary=False)) == expected
        assert loop_of(engine).num_packed_steps == 0
        assert runner.num_ahead_steps > 3


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in PACKING if name not in ROUNDED])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_packed_steps_on_cuda(
    tiny_cuda: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str, enforce_eager: bool
) -> None:
    """Packed, whole and of the host; a second run takes no memory and captures no graph."""
    shape = {"block_size": 8, "buffer_size": 4, "max_num_reqs": 6, "page_size": 8}
    model, settings = Place(tiny_cuda, enforce_eager).of(name, **shape)
    asked = requests(random.Random(2), 9)
    with model.engine(**settings, run_ahead="off") as engine:
        expected = answers(engine.generate(*asked, summary=False))
    with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        assert answers(engine.generate(*asked, summary=False)) == expected
        assert loop_of(engine).num_packed_steps == 0
    pack_every_step(monkeypatch)
    with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        assert answers(engine.generate(*asked, summary=False)) == expected
        assert loop_of(engine).num_packed_steps > 3
    with model.engine(**settings, run_ahead="on") as engine:
        runner = engine._executor.runner
        first = answers(engine.generate(*asked, summary=False))
        num_graphs, num_bytes = runner.num_graphs, torch.cuda.memory_allocated()
        num_launched = loop_of(engine).num_packed_steps
        assert num_launched > 3
        assert answers(engine.generate(*asked, summary=False)) == first == expected
        assert runner.num_graphs == num_graphs
        assert torch.cuda.memory_allocated() == num_bytes
        if not enforce_eager:
            assert runner.num_graph_steps >= num_launched
