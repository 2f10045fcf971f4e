# SPDX-License-Identifier: Apache-2.0
"""The line of a busy engine: when it comes, what it says, and the last one."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from diffulex import SamplingParams
from diffulex.engine.metrics import RunStats
from diffulex.serving.backend_worker import default_engine_factory
from diffulex.serving.engine_line import EngineLine
from diffulex.wire.protocol import PromptInput, ServingGenerate


class Engine:
    """Counters that a test sets; counts how often they are asked for."""

    def __init__(self) -> None:
        self.run_stats = RunStats()
        self.num_asked = 0
        self.counts = SimpleNamespace(
            num_pages=200, num_free_pages=125, num_running=4, num_waiting=2, num_finished=0,
            num_prefix_hit_tokens=0, num_prefix_query_tokens=0, num_decode_steps=0,
            num_preemptions=0,
        )  # fmt: skip

    def stats(self) -> Any:
        self.num_asked += 1
        return self.counts


@pytest.fixture
def engine() -> Engine:
    return Engine()


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "diffulex.engine"]


def run(engine: Engine, line: EngineLine, first: int, last: int, step_s: float = 0.5) -> None:
    """Steps that end at the given halves of seconds; one in five is a prefill of 100 rows."""
    for index in range(first, last):
        is_decode = index % 5 != 0
        engine.run_stats.add_step(step_s, 4, 100, 0 if is_decode else 100)
        engine.run_stats.decided_tokens += 8
        engine.run_stats.committed_tokens += 6
        engine.counts.num_decode_steps += is_decode
        engine.run_stats.num_graph_steps += is_decode and index % 2
        line.after_step(index * step_s)


def test_a_line_every_ten_seconds(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diffulex.engine")
    line = EngineLine(engine)  # type: ignore[arg-type]
    run(engine, line, 0, 20)
    assert messages(caplog) == []
    engine.counts.num_prefix_hit_tokens, engine.counts.num_prefix_query_tokens = 30, 120
    run(engine, line, 20, 65)
    # 20 steps in 10 s: four prefills of 100 rows, half of the decode steps with a graph.
    assert messages(caplog) == [
        "running 4, waiting 2, KV 37.5%, prefix hits 25.0%, 2.0 steps/s, prefill 40.0 tok/s,"
        " decided 16.0 tok/s, committed 12.0 tok/s, TPF 1.50, graphs 50.0%",
        "running 4, waiting 2, KV 37.5%, prefix hits -, 2.0 steps/s, prefill 40.0 tok/s,"
        " decided 16.0 tok/s, committed 12.0 tok/s, TPF 1.50, graphs 50.0%",
        "running 4, waiting 2, KV 37.5%, prefix hits -, 2.0 steps/s, prefill 40.0 tok/s,"
        " decided 16.0 tok/s, committed 12.0 tok/s, TPF 1.50, graphs 50.0%",
    ]
    assert engine.num_asked == 4


def test_idle_is_silent_and_no_time_of_it_counts(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "diffulex.engine")
    line = EngineLine(engine)  # type: ignore[arg-type]
    run(engine, line, 0, 3)
    run(engine, line, 1000, 1005)  # minutes later
    assert messages(caplog) == []
    run(engine, line, 1005, 1021)
    (text,) = messages(caplog)
    assert "2.0 steps/s" in text


def test_nothing_to_divide_by(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diffulex.engine")
    engine.counts.num_pages = engine.counts.num_free_pages = 0
    line = EngineLine(engine, interval_s=1.0)  # type: ignore[arg-type]
    for now in (0.0, 0.5, 1.0):
        line.after_step(now)
    (text,) = messages(caplog)
    assert "KV -, prefix hits -, 0.0 steps/s" in text
    assert text.endswith("TPF -, graphs -")
    line.final()
    assert len(messages(caplog)) == 1


def test_a_served_engine_writes_both(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diffulex.engine")
    engine = default_engine_factory("demo", device="cpu", max_num_reqs=2, num_pages=64)
    engine._line = EngineLine(engine.engine, interval_s=1e-6)
    engine._line._interval_s = 1e9  # one line is due at once, and no pause is that long
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    engine.run_serving_tick([ServingGenerate("a", PromptInput([5, 6, 7]), params)])
    engine._line._due = 0.0
    while not engine.is_finished():
        engine.run_serving_tick([])
    engine.exit()
    engine.exit()
    busy, last = [text for text in messages(caplog) if text.startswith(("running", "served"))]
    assert busy.startswith("running 1, waiting 0, KV ")
    assert last.startswith("served 1 requests in ")
    assert " 24 tokens committed" in last


def test_a_long_step_is_not_silent(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diffulex.engine")
    line = EngineLine(engine, clock=lambda: 0.0)  # type: ignore[arg-type]
    run(engine, line, 0, 3)
    line.before_step(1.5, 3)
    for second in range(2, 46):
        line.while_running(float(second))
    assert messages(caplog) == [
        f"step 4 has taken {seconds}s so far, 3 requests open" for seconds in (10, 20, 30, 40)
    ]
    assert engine.num_asked == 1
    caplog.clear()
    engine.run_stats.add_step(44.5, 4, 100, 0)
    line.after_step(46.0)
    (text,) = messages(caplog)
    # Not a pause: the time of the step counts.
    assert text.startswith("running 4, waiting 2, KV 37.5%, prefix hits -, 0.1 steps/s")
    caplog.clear()
    line.while_running(60.0)
    line.before_step(100.0, 1)
    line.while_running(109.9)
    line.end_step()  # it failed
    line.while_running(200.0)
    assert messages(caplog) == []
    line.close()
    line.close()


def test_a_look_between_two_statements_sees_no_long_step(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """As of the other thread, after each assignment."""

    class Watched(EngineLine):
        now = 0.0

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if "_stop" in vars(self):
                self.while_running(self.now)

    caplog.set_level(logging.INFO, "diffulex.engine")
    line = Watched(engine, clock=lambda: 0.0)  # type: ignore[arg-type]
    for now in (5.0, 100.0, 200.0):
        Watched.now = now
        line.before_step(now, 3)
        line.end_step()
    assert messages(caplog) == []
    line.close()


def test_a_thread_watches_the_steps(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees the running step on its own, and ends with the engine."""
    caplog.set_level(logging.INFO, "diffulex.engine")
    monkeypatch.setattr("diffulex.serving.engine_line._WATCH_S", 0.001)
    line = EngineLine(engine, clock=lambda: 12.0)  # type: ignore[arg-type]
    said, real = threading.Event(), line.while_running

    def seen(now: float) -> None:
        real(now)
        said.set()

    monkeypatch.setattr(line, "while_running", seen)
    line.before_step(0.0, 2)
    watch = line._watch
    assert watch is not None
    assert said.wait(30)
    line.close()
    assert not watch.is_alive()
    # Engines of other tests may have threads of their own, which log as well.
    mine = [record.getMessage() for record in caplog.records if record.thread == watch.ident]
    assert mine == ["step 1 has taken 12s so far, 2 requests open"]
