# SPDX-License-Identifier: Apache-2.0
"""Step records: packing, wrap-around, streams, files for Perfetto, their cost."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from diffulex.errors import ConfigError
from diffulex.profiling.__main__ import main
from diffulex.profiling.perfetto import trace_of_steps, write_perfetto
from diffulex.profiling.ring import STEP_DTYPE, StepRing, StepTimes, read_step_trace

STAGES = ("schedule_us", "prepare_us", "forward_us", "sample_us", "postprocess_us")


def times(start: float, bucket: int = -1) -> StepTimes:
    result = StepTimes()
    result.start(start)
    result.scheduled, result.forward = start + 1e-3, start + 3e-3
    result.sample, result.collected = start + 6e-3, start + 10e-3
    result.graph_bucket = bucket
    return result


def fill(ring: StepRing, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        reqs = (0, 4) if step % 2 else (4, 0)
        ring.add(times(float(step), step % 3), step + 15e-3, *reqs, 32, step, 5, 6, 7)


def test_a_record() -> None:
    ring = StepRing(4)
    fill(ring, 2)
    first, second = ring.last()
    assert tuple(first)[:2] == (0, 0)
    assert [first[name] for name in STAGES] == pytest.approx([1e3, 2e3, 3e3, 4e3, 5e3], rel=1e-5)
    assert second["t_start_ns"] == 10**9
    assert (first["n_prefill"], first["n_decode"]) == (4, 0)
    assert (second["n_prefill"], second["n_decode"]) == (0, 4)
    names = ("query_rows", "kv_pages_used", "graph_bucket", "decided", "committed_blocks")
    assert [second[name] for name in (*names, "preempted")] == [32, 1, 1, 5, 6, 7]


def test_stages_that_are_not_told_belong_to_the_forward() -> None:
    ring, step = StepRing(1), StepTimes()
    step.start(1.0)
    step.scheduled, step.collected = 2.0, 5.0
    ring.add(step, 6.0, 0, 1, 1, 1, 1, 1, 0)
    (record,) = ring.last()
    assert [record[name] for name in STAGES] == [1e6, 0, 3e6, 0, 1e6]
    assert record["graph_bucket"] == -1


@pytest.mark.parametrize("count", [0, 3, 8, 9, 21])
def test_wrap_around(count: int) -> None:
    ring = StepRing(8)
    fill(ring, count)
    kept = list(range(max(count - 8, 0), count))
    assert ring.last()["step"].tolist() == kept
    assert ring.last(3)["step"].tolist() == kept[-3:]
    assert ring.last(0).size == 0
    assert ring.last(100)["step"].tolist() == kept
    with pytest.raises(ValueError, match="expected last_n >= 0, got -1"):
        ring.last(-1)


def test_a_reader_beside_the_writer_sees_whole_records_in_order() -> None:
    ring, is_over = StepRing(64), threading.Event()

    def write() -> None:
        fill(ring, 20_000)
        is_over.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not is_over.is_set():
        records = ring.last()
        assert (np.diff(records["step"]) == 1).all()
        assert (records["kv_pages_used"] == records["step"]).all()
    writer.join()


def test_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("DIFFULEX_STEP_TRACE", str(path))
    first, second = StepRing.of(2), StepRing.of(0)
    assert first is not None
    assert second is not None
    fill(first, 5)
    fill(second, 1)
    for ring in (first, second, first):
        ring.close()
    with path.open() as lines:
        records = read_step_trace(lines)
    # Several engines append to one file, each whole lines.
    assert sorted(record["step"] for record in records) == [0, 0, 1, 2, 3, 4]
    assert set(records[0]) == {"pid", *(STEP_DTYPE.names or ())}
    monkeypatch.delenv("DIFFULEX_STEP_TRACE")
    assert StepRing.of(0) is None


def test_a_stream_is_on_disk_while_the_engine_runs(tmp_path: Path) -> None:
    ring = StepRing(2, str(tmp_path / "steps.jsonl"))
    fill(ring, 3)  # a second apart
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) >= 2
    ring.close()


def test_a_stream_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"DIFFULEX_STEP_TRACE: expected a file .* got .*x/y"):
        StepRing(1, str(tmp_path / "x" / "y"))


def test_a_stream_that_fails_is_given_up_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    ring = StepRing(8, "/dev/full")
    fill(ring, 4)  # a second apart: each is written at once
    ring.close()
    ring.close()
    assert ring.last()["step"].tolist() == [0, 1, 2, 3]
    (record,) = caplog.records
    assert record.getMessage() == (
        "DIFFULEX_STEP_TRACE: no more records are written: No space left on device"
    )


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:50]))
    ring = StepRing(8, str(tmp_path / "steps.jsonl"))
    fill(ring, 3)
    ring.close()
    with (tmp_path / "steps.jsonl").open() as lines:
        assert [record["step"] for record in read_step_trace(lines)] == [0, 1, 2]


def test_perfetto(tmp_path: Path) -> None:
    ring = StepRing(8)
    fill(ring, 2)
    write_perfetto(ring.last(), tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in slices if "args" in event]
    assert [event["name"] for event in steps] == ["prefill", "decode"]
    assert steps[1]["args"]["graph_bucket"] == 1
    assert steps[1]["ts"] == pytest.approx(1e6)
    for step in steps:
        inside = [e for e in slices if e is not step and 0 <= e["ts"] - step["ts"] < step["dur"]]
        names = ["schedule", "prepare", "forward", "sample", "postprocess"]
        assert [event["name"] for event in inside] == names
        assert sum(event["dur"] for event in inside) == pytest.approx(step["dur"])
    counters = {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert counters == {"kv_pages_used", "query_rows", "decided"}


def test_conversion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = StepRing(2, str(tmp_path / "steps.jsonl"))
    fill(ring, 3)
    ring.close()
    source, target = str(tmp_path / "steps.jsonl"), str(tmp_path / "trace.json")
    assert main([source, target]) == 0
    assert capsys.readouterr().out == f"3 steps in {target}\n"
    with open(source) as lines:
        expected = trace_of_steps(read_step_trace(lines))
    assert json.loads(Path(target).read_text()) == expected
    (tmp_path / "bad.jsonl").write_text('{"step": 1}\n')
    assert main([str(tmp_path / "bad.jsonl"), target]) == 1
    assert 'expected a record in line 1, got \'{"step": 1}' in capsys.readouterr().err
    assert main([str(tmp_path / "none"), target]) == 1


@pytest.mark.alone
def test_a_record_costs_less_than_two_microseconds() -> None:
    """Processor time of this thread, the best of several: a loaded host does not count."""
    ring, step = StepRing(1024), times(1.0)
    best = float("inf")
    for _ in range(20):
        start = time.thread_time()
        for _ in range(1000):
            step.start(1.0)
            ring.add(step, 2.0, True, 4, 32, 3, 5, 6, 7)
        best = min(best, (time.thread_time() - start) / 1000)
    assert best < 2e-6
