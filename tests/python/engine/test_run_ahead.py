# SPDX-License-Identifier: Apache-2.0
"""Decode steps that the device plans itself equal those of the host, token for token.

The CPU plays the device: it runs the same row function of the rules, one step ahead. Every plan it
makes is compared with the scheduler's (`check_run_ahead`).
"""

from __future__ import annotations

import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex import ConfigError, SamplingParams
from diffulex.engine.output import RequestOutput
from diffulex.registry import AutoSampler
from diffulex.runner.loop_steps import StepVariant
from diffulex.runner.plan_check import PlanCheck, PlanMismatchError
from diffulex.runner.step_graphs import StepGraphs
from diffulex.samplers.base import MaskFillSampler
from diffulex.strategies.listing import strategy_named
from diffulex_ext import _core
from fixtures.checkpoints import EOS_ID
from fixtures.quick import quick
from run_ahead_cases import (
    FILL,
    ROUNDED,
    STRATEGIES,
    Place,
    answers,
    check_aborts_and_arrivals,
    compare,
    model_of,
    num_compared,
    pack_every_step,
    requests,
    tokens_with_interrupts,
)
from tiny_engine import TinyModel

pytestmark = pytest.mark.usefixtures("small_classes")
#: Of the quick tests: plain, with shifted logits after a whole prompt, sub-blocks, fed back embeddings.
FEW = ("multi_bd", "d2f_shifted", "dual_cache", "dmax")


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


@pytest.mark.parametrize("seeds", [(0,), pytest.param((1, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "block_size", "buffer_size"),
    quick(
        [
            (name, *shape)
            for name in STRATEGIES
            for shape in [(8, 1), (8, 3), (4, 6), (32, 2)]
            if shape[1] > 1
            or not name.startswith("dual")  # a dual cache has two sub-blocks at least
        ],
        [
            *((name, 8, 3) for name in FEW),
            ("multi_bd", 8, 1),
            ("edit", 4, 6),
        ],
    ),
)
def test_equals_the_host_loop(
    tiny: TinyModel, name: str, block_size: int, buffer_size: int, seeds: tuple[int, ...]
) -> None:
    shape = {"block_size": block_size, "buffer_size": buffer_size}
    settings = {**STRATEGIES[name][1], **shape, "max_num_reqs": 4, "page_size": 8}
    model = model_of(tiny, name)
    assert sum(compare(model, settings, seed) for seed in seeds) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_batch_size_and_stop_texts(place: Place, name: str) -> None:
    """Requests that only the host can end, among others, in batches of one to five."""
    model, settings = place.of(name, block_size=4, buffer_size=2, max_num_reqs=5)
    endless = {"max_nfe": None, "max_repetition_run": None, "stop_token_ids": ()}
    num_stopped = 0

    def outcomes(run_ahead: str) -> list[Any]:
        nonlocal num_stopped
        rng, result = random.Random(21), []
        with model.engine(**settings, run_ahead=run_ahead, check_run_ahead=True) as engine:
            for count in range(1, 6):
                prompts, params = requests(rng, count)
                params = [
                    dataclasses.replace(p, max_tokens=30, ignore_eos=True, **endless)
                    for p in params
                ]
                texts = [o.text for o in engine.generate(prompts, params, summary=False)]
                for index in range(0, count, 2):
                    stop = texts[index][len(texts[index]) // 2 :][:3]
                    params[index] = dataclasses.replace(params[index], stop=(stop,) if stop else ())
                num_ahead = engine._executor.runner.num_ahead_steps
                outputs = engine.generate(prompts, params, summary=False)
                assert (engine._executor.runner.num_ahead_steps > num_ahead) == (run_ahead == "on")
                cut = [len(o.text) < len(t) for o, t in zip(outputs, texts, strict=True)]
                num_stopped += sum(cut)
                num_steps = engine.stats().num_decode_steps
                result.append((answers(outputs), [o.text for o in outputs], num_steps))
        return result

    assert outcomes("on") == outcomes("off")
    assert num_stopped > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_tight_page_pools(place: Place, name: str) -> None:
    """Preempted and resumed in between; forwards may differ, tokens may not."""
    model, settings = place.of(
        name,
        block_size=8,
        buffer_size=3,
        page_size=8,
        num_pages=14,
        max_model_len=88,
        max_num_reqs=5,
        decode_headroom=False,
    )
    num_preemptions = 0
    for seed in range(3):
        prompts, params = requests(random.Random(seed), 8)
        params = [dataclasses.replace(p, max_nfe=None) for p in params]
        with model.engine(**settings, run_ahead="off") as engine:
            expected = engine.generate(prompts, params, summary=False)
        with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
            actual = engine.generate(prompts, params, summary=False)
            num_preemptions += engine.stats().num_preemptions
        assert [o.token_ids for o in actual] == [o.token_ids for o in expected]
        assert [o.completion_reason for o in actual] == [o.completion_reason for o in expected]
    assert num_preemptions > 0


@pytest.mark.parametrize("name", quick(STRATEGIES, FEW))
def test_aborts_and_arrivals_in_between(place: Place, name: str) -> None:
    """Requests come and go while steps run ahead; those that stay get their own tokens."""
    rng = random.Random(7)
    prompts, params = requests(rng, 12)
    model, settings = place.of(name, block_size=8, buffer_size=2, max_num_reqs=5)
    with model.engine(**settings, run_ahead="off") as engine:
        expected = engine.generate(prompts, params, summary=False)
    with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        num_done = check_aborts_and_arrivals(engine, (prompts, params), expected, rng, 0.15)
    assert num_done == len(prompts)


#: One strategy for each state that a step given up must leave as it was.
STATES = ("multi_bd", "multi_bd_shifted", "d2f_shifted", "dual_cache", "dual_blocks", "dmax")
POINTS = ("schedule_ahead", "run_ahead", "collect")


@pytest.mark.parametrize("name", quick(STATES, FEW))
def test_preempting_a_request_of_a_step_in_flight(tiny: TinyModel, name: str) -> None:
    prompts, params = requests(random.Random(8), 4)
    params = [dataclasses.replace(p, max_nfe=None, max_tokens=30, ignore_eos=True) for p in params]
    model, settings = Place(tiny, True).of(name, block_size=8, buffer_size=2)
    with model.engine(**settings, run_ahead="off") as engine:
        expected = engine.generate(prompts, params, summary=False)
    with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        ids = [engine.add_request(p, s) for p, s in zip(prompts, params, strict=True)]
        done: dict[int, RequestOutput] = {}
        for number in range(200):
            if not engine.has_unfinished():
                break
            done |= {s.req_id: s.output for s in engine.step() if s.output is not None}
            if number in (3, 6) and engine._loop._executor.is_ahead:
                engine._scheduler.preempt(ids[1])
        assert engine.stats().num_preemptions == 2
    assert [done[i].token_ids for i in ids] == [o.token_ids for o in expected]


def test_step_returns_the_outputs_of_one_step(tiny: TinyModel) -> None:
    """What `step` delivers, call by call, is that of the loop of the host."""
    prompts, params = requests(random.Random(3), 5)

    def deliveries(run_ahead: str) -> list[list[tuple[Any, ...]]]:
        settings = {**FILL, "block_size": 8, "buffer_size": 2, "run_ahead": run_ahead}
        with tiny.engine(**settings) as engine:
            for prompt, sampling in zip(prompts, params, strict=True):
                engine.add_request(prompt, sampling, has_snapshots=True)
            calls = []
            while engine.has_unfinished():
                calls.append([(s.req_id, s.token_ids, s.snapshot) for s in engine.step()])
            return calls

    assert deliveries("on") == deliveries("off")


@pytest.mark.parametrize("name", quick(STATES, FEW))
def test_failed_step_leaves_the_engine_usable(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    prompts, params = requests(random.Random(4), 4)
    params = [dataclasses.replace(p, max_nfe=None, max_tokens=24, ignore_eos=True) for p in params]
    model, settings = Place(tiny, True).of(name, block_size=8, buffer_size=2)
    with model.engine(**settings, run_ahead="off") as engine:
        expected = engine.generate(prompts, params, summary=False)
    with model.engine(**settings, run_ahead="on") as engine:
        ids = [engine.add_request(p, s) for p, s in zip(prompts, params, strict=True)]
        for _ in range(3):
            engine.step()
        loop = engine._executor.runner._decode_loop
        assert loop is not None
        with monkeypatch.context() as patch:

            def fail(variant: object) -> None:
                raise RuntimeError("no forward")

            patch.setattr(loop, "_enqueue", fail)
            with pytest.raises(RuntimeError, match="no forward"):
                engine.step()
        done: dict[int, RequestOutput] = {}
        while engine.has_unfinished():
            done |= {s.req_id: s.output for s in engine.step() if s.output is not None}
    assert [done[i].token_ids for i in ids] == [o.token_ids for o in expected]


@pytest.mark.parametrize(
    ("name", "point"),
    quick(
        [(name, point) for name in STATES for point in POINTS],
        [("multi_bd", point) for point in POINTS] + [(name, "run_ahead") for name in FEW],
    ),
)
def test_interrupts_while_a_step_runs_ahead(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, point: str, name: str
) -> None:
    """A second Ctrl-C at any point of a step: nothing stays in flight, no token is lost."""
    prompts, params = requests(random.Random(5), 4)
    params = [dataclasses.replace(p, max_nfe=None, max_tokens=24, ignore_eos=True) for p in params]
    model, settings = Place(tiny, True).of(name, block_size=8, buffer_size=2)
    with model.engine(**settings, run_ahead="off") as engine:
        expected = engine.generate(prompts, params, summary=False)
    with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        tokens = tokens_with_interrupts(engine, (prompts, params), point, monkeypatch)
    assert tokens == [o.token_ids for o in expected]


def test_no_page_changes_hands_while_the_device_may_use_it() -> None:
    """A request is aborted in front of a step that runs already; the others get no page of it."""
    fields = {"block_size": 4, "buffer_size": 2, "page_size": 4, "num_pages": 16}
    limits = {"max_num_reqs": 2, "max_num_batched_tokens": 64, "max_model_len": 32}
    options = _core.EngineOptions(**fields, **limits, mask_token_id=39, vocab_size=40)
    scheduler = _core.Scheduler(options, _core.KVCacheManager(options))
    params = _core.SamplingParams(max_tokens=16)
    prompts = ([1, 2, 3, 4, 5], [6, 7, 8, 9])
    ids = [scheduler.add_request(_core.Request(p, params, options)) for p in prompts]
    plan, ahead = _core.StepPlan(options), _core.StepPlan(options)
    output, batch = _core.SamplerOutput(options), _core.DecodeBatch(options)

    def complete(plan: _core.StepPlan) -> None:
        output.write_ids[:] = -1
        for blk in range(plan.num_blocks):
            is_open = plan.blk_tokens[blk] == 39
            output.write_ids[blk, is_open.argmax()] = 11
        scheduler.complete_step(plan, output)

    assert scheduler.schedule(plan) == _core.PlanKind.PREFILL
    assert not scheduler.can_run_ahead(plan)
    with pytest.raises(ValueError, match="start_run_ahead: expected a decode plan in flight"):
        scheduler.start_run_ahead(plan, batch)
    complete(plan)
    assert scheduler.schedule(plan) == _core.PlanKind.DECODE
    scheduler.start_run_ahead(plan, batch)
    assert scheduler.reserve_ahead(batch) != _core.RunAhead.STOP
    # The device runs the step after `plan` from here on, with the pages of both requests.
    assert scheduler.abort(ids[0])
    complete(plan)
    free = scheduler.stats().num_free_pages
    waiting = scheduler.add_request(_core.Request([21, 22, 23, 24, 25], params, options))
    assert scheduler.schedule_ahead(ahead) == _core.PlanKind.DECODE
    assert list(ahead.req_ids) == [ids[1]]
    assert scheduler.reserve_ahead(batch) == _core.RunAhead.STOP
    assert scheduler.stats().num_free_pages == free
    complete(ahead)
    # The device is idle: pages and slots go round again.
    assert scheduler.schedule(plan) == _core.PlanKind.PREFILL
    assert list(plan.req_ids) == [waiting]
    assert scheduler.stats().num_free_pages < free


def test_sampler_buffers_outlast_steps_larger_than_every_bucket(tiny: TinyModel) -> None:
    """Graphs keep their addresses. Here one decode step has 32 rows, and a prefill samples 35."""
    settings = {
        **FILL,
        "block_size": 4,
        "buffer_size": 8,
        "max_num_batched_tokens": 60,
        "enable_chunked_prefill": True,
        "run_ahead": "on",
    }
    with tiny.engine(**settings) as engine:
        runner = engine._executor.runner
        assert [b[-1] * rows for rows, b in runner._graphs.buckets.items()] == [32]
        rows: Any = runner.sampler
        addresses = [rows.rows._ids.data_ptr(), rows.rows._stats.data_ptr()]
        most, run = [], rows.rows.run

        def counting(inputs: Any, *args: Any) -> Any:
            most.append(inputs.logits.size(0))
            return run(inputs, *args)

        rows.rows.run = counting
        engine.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=4), summary=False)
        assert max(most) > 32
        assert addresses == [rows.rows._ids.data_ptr(), rows.rows._stats.data_ptr()]


def test_soft_stores_have_no_loop(tiny: TinyModel) -> None:
    """No step could run ahead; the engine keeps the graphs of the host's loop."""
    settings = {**STRATEGIES["dmax"][1], "run_ahead": "on", "enable_prefix_caching": False}
    model = model_of(tiny, "dmax")
    with model.engine(**settings, dmax_store_soft_embeddings=True) as engine:
        assert engine._executor.runner._decode_loop is None
    with model.engine(**settings) as engine:
        assert engine._executor.runner._decode_loop is not None


SdarSampler: type[MaskFillSampler] = AutoSampler.get("sdar")  # type: ignore[assignment]


class CountingSampler(SdarSampler):  # type: ignore[misc, valid-type]
    num_calls = 0

    def __call__(self, inputs: Any) -> None:
        type(self).num_calls += 1
        super().__call__(inputs)


class RecordedSampler(CountingSampler):
    is_capturable = True


@pytest.mark.parametrize(("own", "has_loop"), [(CountingSampler, False), (RecordedSampler, True)])
def test_own_samplers_see_every_step(
    tiny: TinyModel, own: type[CountingSampler], has_loop: bool
) -> None:
    """A replayed step runs no Python, so a custom class has to ask for it."""
    own.num_calls = 0
    AutoSampler.register("sdar", own, exist_ok=True)
    try:
        with tiny.engine(**FILL, run_ahead="on") as engine:
            assert (engine._executor.runner._decode_loop is not None) == has_loop
            outputs = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8), summary=False)
    finally:
        AutoSampler.register("sdar", SdarSampler, exist_ok=True)
    # Steps that only store are not sampled.
    assert own.num_calls >= sum(count > 0 for count in outputs[0].metrics.new_tokens_per_step) > 2


def test_a_watched_request_joins_steps_that_run_ahead(tiny: TinyModel) -> None:
    """Its log-probabilities are those of the host's loop, and the others lose nothing."""
    prompts, params = requests(random.Random(11), 3)
    params = [dataclasses.replace(p, max_nfe=None, max_tokens=40, ignore_eos=True) for p in params]
    params[2] = dataclasses.replace(params[2], max_tokens=6, logprobs=2)
    settings = {**FILL, "block_size": 8, "buffer_size": 2}

    def outputs(run_ahead: str) -> list[RequestOutput]:
        with tiny.engine(**settings, run_ahead=run_ahead) as engine:
            ids = [engine.add_request(p, s) for p, s in zip(prompts[:2], params[:2], strict=True)]
            done: dict[int, RequestOutput] = {}
            ahead_steps = []
            for number in range(200):
                if number == 4:
                    assert engine._loop._executor.is_ahead == (run_ahead == "on")
                    ids.append(engine.add_request(prompts[2], params[2]))
                if not engine.has_unfinished():
                    break
                done |= {s.req_id: s.output for s in engine.step() if s.output is not None}
                ahead_steps.append(engine._executor.runner.num_ahead_steps)
            if run_ahead == "on":
                assert ahead_steps[-1] > ahead_steps[4] + 2  # it goes on when nobody watches
        return [done[i] for i in ids]

    actual, expected = outputs("on"), outputs("off")
    assert answers(actual) == answers(expected)
    assert actual[2].logprobs is not None
    assert expected[2].logprobs is not None
    for have, want in zip(actual[2].logprobs, expected[2].logprobs, strict=True):
        assert (have.token_id, have.step) == (want.token_id, want.step)
        assert have.logprob == pytest.approx(want.logprob, abs=1e-4)


def test_requests_watched_on_the_host_keep_the_host_loop(tiny: TinyModel) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)
    with tiny.engine(**FILL, run_ahead="on") as engine:
        engine.generate([[1, 2, 3]], params, summary=False)
        assert engine._executor.runner.num_ahead_steps == 0


def test_automatic_cap_is_derived_on_the_host(tiny: TinyModel) -> None:
    settings = {**FILL, "block_size": 8, "auto_max_nfe": True, "auto_max_nfe_warmup_steps": 3}
    assert compare(tiny, settings, 6) > 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("positions", {}),
        ("bucket", {"num_reqs": 2}),
        ("bucket", {"max_context_len": 24}),
    ],
)
def test_check_notices_a_wrong_plan(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str, change: dict[str, int]
) -> None:
    keep = PlanCheck.keep

    def wrong(self: PlanCheck, place: int, views: Any, variant: StepVariant) -> None:
        bucket = variant.bucket._replace(**change)
        keep(self, place, views, variant._replace(bucket=bucket))
        if name == "positions":
            self._kept[place][1][name][0] += 1

    monkeypatch.setattr(PlanCheck, "keep", wrong)
    with (
        tiny.engine(**FILL, run_ahead="on", check_run_ahead=True) as engine,
        pytest.raises(PlanMismatchError, match=f"check_run_ahead: {name}: expected"),
    ):
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8), summary=False)


#: Arrays that say where the scheduler put rows and blocks, and those that no step on a device uses.
NOT_COMPARED = {
    *("cu_seqlens_q", "cu_seqlens_k"),
    *("blk_req", "blk_id", "blk_start", "blk_row0", "blk_prev_row", "blk_request_slot", "blk_step"),
    *("row_mode", "prefix_lens", "padded_prefix_lens", "req_ids", "request_slots"),
}


@pytest.mark.parametrize(
    ("name", "is_packed"),
    [
        *((name, False) for name in ("edit", "d2f_shifted", "dual_cache", "dmax")),
        *((name, True) for name in ("edit", "d2f_shifted", "dmax")),
    ],
)
def test_check_compares_every_array_of_the_list(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str, is_packed: bool
) -> None:
    """Of those that the strategy uses; one that is added to the list is compared as well."""
    if is_packed:
        pack_every_step(monkeypatch)
    compare_plans = PlanCheck.compare
    present, noticed = set[str](), set[str]()

    def compare_changed(self: PlanCheck, plan: _core.StepPlan, place: int, graphs: Any) -> None:
        present.update(field.name for field in plan.fields() if field.nbytes)
        before = bucket, arrays, layout = self._kept[place]
        num_live, num_compared = self._num_live, self.num_compared
        for array in arrays.keys() - noticed:
            self._kept[place] = bucket, {**arrays, array: arrays[array] + 1}, layout
            try:  # none of its entries may be used in this step
                compare_plans(self, plan, place, graphs)
            except PlanMismatchError as error:
                if str(error).startswith(f"check_run_ahead: {array}: "):
                    noticed.add(array)
            self._num_live, self.num_compared = num_live, num_compared
        self._kept[place] = before
        compare_plans(self, plan, place, graphs)

    monkeypatch.setattr(PlanCheck, "compare", compare_changed)
    model, settings = Place(tiny, True).of(name, block_size=8, buffer_size=2)
    with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=24, temperature=0.5), summary=False)
    unused = set() if "shifted" in name else {"last_row_index"}
    assert noticed == present - NOT_COMPARED - unused


def test_off_by_default_on_the_cpu_and_bad_values(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        assert engine._executor.runner._decode_loop is None
    with pytest.raises(ConfigError, match="run_ahead"):
        tiny.config(run_ahead="maybe")


@pytest.mark.parametrize("name", STRATEGIES)
def test_auto_runs_ahead_unless_every_step_rounds_otherwise(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings = STRATEGIES[name][1]
    traits = strategy_named(settings.get("decoding_strategy", "multi_bd")).traits
    with model_of(tiny, name).engine(**settings) as engine:
        runner = engine._executor.runner
        assert not runner._wants_loop(traits)
        monkeypatch.setattr(runner, "_is_cuda", True)
        assert runner._wants_loop(traits) == (name not in ROUNDED)
        monkeypatch.undo()


def test_end_of_all_requests_leaves_nothing_in_flight(tiny: TinyModel) -> None:
    """The step after the last one is void, and a later request starts afresh."""
    settings = {**FILL, "block_size": 8, "run_ahead": "on", "check_run_ahead": True}
    params = SamplingParams(max_tokens=20, stop_token_ids=(EOS_ID,))
    with tiny.engine(**settings) as engine:
        first = engine.generate([[5, 6, 7]], params, summary=False)
        assert not engine.has_unfinished()
        second = engine.generate([[5, 6, 7]], params, summary=False)
    assert answers(first) == answers(second)


@pytest.mark.cuda
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ROUNDED])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_equals_the_host_loop_on_cuda(tiny_cuda: TinyModel, name: str, enforce_eager: bool) -> None:
    shape = {"block_size": 8, "buffer_size": 3, "max_num_reqs": 4, "page_size": 8}
    model, settings = Place(tiny_cuda, enforce_eager).of(name, **shape)
    assert sum(compare(model, settings, seed) for seed in (1, 2)) > 5


@pytest.mark.cuda
@pytest.mark.parametrize("name", sorted(ROUNDED))
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_plans_of_the_device_on_cuda(tiny_cuda: TinyModel, name: str, enforce_eager: bool) -> None:
    """Every plan is the scheduler's; only what is done with it rounds otherwise. Modes of a dual cache
    share steps, so that most run ahead."""
    shape = {"block_size": 8, "buffer_size": 3, "max_num_reqs": 4, "page_size": 8}
    settings = {**STRATEGIES[name][1], **shape, "enforce_eager": enforce_eager}
    prompts, params = requests(random.Random(1), 9)
    model = model_of(tiny_cuda, name)
    with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        engine.generate(prompts, params, summary=False)
        num_ahead, num_steps = engine._executor.runner.num_ahead_steps, num_compared(engine)
        assert num_steps > num_ahead > 3
        assert 2 * num_ahead > num_steps


@pytest.mark.cuda
def test_device_loop_equals_the_cpu(tiny: TinyModel, tiny_cuda: TinyModel, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts, params = requests(random.Random(9), 10)
    settings = {**FILL, "block_size": 8, "buffer_size": 2}
    with tiny.engine(**settings) as engine:
        expected = engine.generate(prompts, params, summary=False)
    with tiny_cuda.engine(**settings) as engine:
        actual = engine.generate(prompts, params, summary=False)
        assert engine._executor.runner.num_ahead_steps > 3
        assert engine._executor.runner.num_graph_steps > 3
    assert answers(actual) == answers(expected)


@pytest.mark.cuda
def test_other_threads_may_allocate_during_a_capture() -> None:
    """`add_request` of another thread may come while a variant is captured."""
    device = torch.device("cuda", torch.cuda.current_device())
    graphs: StepGraphs[str] = StepGraphs(device)
    value = torch.zeros(4, device=device)
    errors: list[BaseException] = []

    def add() -> None:
        try:
            torch.tensor(list(range(1 << 20)), device=device)
        except RuntimeError as error:
            errors.append(error)

    def run() -> None:
        thread = threading.Thread(target=add)
        thread.start()
        thread.join()
        value.add_(1)

    graphs.capture("step", lambda: None, run)
    assert not errors
    value.zero_()
    graphs.replay("step")
    assert value.tolist() == [1.0] * 4
