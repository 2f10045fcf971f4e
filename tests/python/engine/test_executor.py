# SPDX-License-Identifier: Apache-2.0
"""The executor between the step loop and the worker, and what listens to its steps."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from diffulex import ConfigError, Diffulex, SamplingParams
from diffulex.distributed.executor import Executor
from diffulex.engine import engine as engine_module
from diffulex.runner.local_executor import LocalExecutor
from tiny_engine import TinyModel

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


class Recorder:
    """Rows of every step, before and after it."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.num_over = 0

    def before_step(self, plan: Any) -> None:
        assert self.num_over == len(self.rows)
        self.rows.append(plan.num_rows)

    def after_step(self) -> None:
        self.num_over += 1


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_observer_is_told_of_every_executed_step(tiny: TinyModel, run_ahead: str) -> None:
    with tiny.engine(run_ahead=run_ahead) as engine:
        expected = engine.generate([[1, 2, 3]], PARAMS, summary=False)[0]
        recorder = engine._loop._executor.observer = Recorder()
        output = engine.generate([[1, 2, 3]], PARAMS, summary=False)[0]
        assert output.token_ids == expected.token_ids
        assert recorder.num_over == len(recorder.rows) == output.metrics.nfe > 3
        assert 0 not in recorder.rows
        assert (engine._executor.runner.num_ahead_steps > 0) == (run_ahead == "on")


def test_a_failed_step_is_over_for_nobody_and_the_next_one_is_executed(tiny: TinyModel) -> None:
    with tiny.engine(run_ahead="off") as engine:
        recorder = engine._loop._executor.observer = Recorder()
        sampler, engine._executor.runner.sampler = engine._executor.runner.sampler, _failing
        engine.add_request([1, 2, 3], PARAMS)
        with pytest.raises(RuntimeError, match="injected"):
            run_all(engine)
        engine._executor.runner.sampler = sampler
        recorder.num_over = len(recorder.rows)
        run_all(engine)
        assert recorder.num_over == len(recorder.rows)


def run_all(engine: Diffulex) -> None:
    while engine.has_unfinished():
        engine.step()


def _failing(inputs: object) -> None:
    raise RuntimeError("injected")


def test_executor_says_what_is_missing_and_closes_twice(tiny: TinyModel) -> None:
    executor = LocalExecutor()
    with pytest.raises(RuntimeError, match=r"expected load\(\) before"):
        executor.next_plan()
    with tiny.engine() as engine:
        executor = engine._loop._executor
        with pytest.raises(RuntimeError, match=r"expected execute\(\) before, got no step"):
            executor.collect(executor.next_plan())
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match=r"no close\(\), got no worker"):
        executor.next_plan()


def test_engine_records_steps(tiny: TinyModel, tmp_path: Path) -> None:
    config = {"torch_profiler_dir": str(tmp_path), "max_iterations": 2}
    with tiny.engine(profiler_config=config) as engine:
        assert engine.start_profile("steps") == {"directory": str(tmp_path)}
        assert engine.is_profiling
        with pytest.raises(RuntimeError, match="no recording under way, got one"):
            engine.start_profile()
        engine.generate([[1, 2, 3]], PARAMS, summary=False)
        assert not engine.is_profiling
        result = engine.stop_profile()  # it ended by itself
        with pytest.raises(RuntimeError, match="got none"):
            engine.stop_profile()
    trace = tmp_path / "steps.engine.trace.json"
    assert result["trace"] == str(trace)
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_engine_without_a_profiler_says_how_to_get_one(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        assert engine._loop._executor.observer is None
        with pytest.raises(RuntimeError, match="profiler: expected profiler_config"):
            engine.start_profile()


class RemoteExecutor:
    """Has the members of `Executor` and no others: a worker in another process looks like this."""

    def __init__(self) -> None:
        self._inner = LocalExecutor()
        self.asked: set[str] = set()
        self.is_closed = False

    def __getattr__(self, name: str) -> Any:
        if name not in vars(Executor) and name not in Executor.__annotations__:
            raise AttributeError(f"Executor: expected a member of the protocol, got {name}")
        self.asked.add(name)
        return getattr(self._inner, name)

    def close(self) -> None:
        self.is_closed = True
        self._inner.close()


def test_an_engine_needs_of_its_executor_what_the_protocol_has(tiny: TinyModel) -> None:
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=16, min_tokens=8),
    ]
    with tiny.engine() as engine:
        expected = engine.generate([[1, 2, 3], [4, 5]], params, summary=False)
    executor = RemoteExecutor()
    config = tiny.config()
    with Diffulex.from_components(config, tiny.model, tiny.facts.tokenizer, executor) as engine:
        outputs = engine.generate([[1, 2, 3], [4, 5]], params, summary=False)
        assert engine.num_watched_requests == 0
        assert engine._loop.rank_skew_s is None
        assert not engine.has_unfinished()
        assert engine.step() == []
        assert engine.update_weights(tiny.model.weight_table()) > 20
        assert len(engine.score([[1, 2, 3]], [(1, 3)], mc_num=2)) == 1
    for output, other in zip(outputs, expected, strict=True):
        assert output.token_ids == other.token_ids
        assert output.logprobs == other.logprobs
    assert outputs.stats.num_graph_steps == expected.stats.num_graph_steps == 0
    members = {name for name in vars(Executor) if not name.startswith("_")}
    # No other engine calls, no replica listens, the pages are given, no adapter is loaded, nothing is
    # recorded, and `close` is not passed on.
    unused = {"close", "num_pages", "load_adapter", "unload_adapter", "stages", "call", "on_death"}
    unused |= {"start_recording", "stop_recording"}
    assert executor.asked - set(Executor.__annotations__) == members - unused
    assert executor.is_closed


def test_an_engine_that_cannot_start_closes_its_executor(tiny: TinyModel) -> None:
    executor = RemoteExecutor()
    config = tiny.config(num_pages=-1)
    executor.num_pages = _no_pages
    with pytest.raises(ConfigError, match="injected"):
        Diffulex.from_components(config, tiny.model, None, executor)
    assert executor.is_closed
    with pytest.raises(RuntimeError, match="got no worker"):
        executor.next_plan()


def _no_pages() -> int:
    raise ConfigError("injected")


def test_an_executor_that_cannot_close_does_not_hide_why_the_engine_failed(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(engine_module, "_give_memory_back", lambda: given_back.append(True))
    executor = RemoteExecutor()
    executor.num_pages = _no_pages
    executor.close = _no_connection  # type: ignore[method-assign]
    with (
        caplog.at_level(logging.ERROR, "diffulex"),
        pytest.raises(ConfigError, match="injected") as refused,
    ):
        Diffulex.from_components(tiny.config(num_pages=-1), tiny.model, None, executor)
    assert refused.value.__context__ is None
    assert given_back == [True]
    assert "close of the executor" in caplog.text
    assert "BrokenPipeError: no connection" in caplog.text


def _no_connection() -> None:
    raise BrokenPipeError("no connection")


class EmptyExecutor(RemoteExecutor):
    """Has a length, as a pool of workers that has none yet, and is therefore false."""

    def __len__(self) -> int:
        return 0


def test_a_given_executor_is_taken_although_it_is_false(tiny: TinyModel) -> None:
    executor = EmptyExecutor()
    with Diffulex.from_components(tiny.config(), tiny.model, None, executor):
        assert "load" in executor.asked
    assert executor.is_closed


def test_counts_outlive_the_worker(tiny: TinyModel) -> None:
    with tiny.engine(run_ahead="on") as engine:
        engine.generate([[1, 2, 3]], PARAMS, summary=False)
        executor = engine._executor
        counts = executor.counts
        assert counts.ahead > 0
    assert executor.counts == counts
    assert executor.num_watched == 0
