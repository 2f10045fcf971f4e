# SPDX-License-Identifier: Apache-2.0
"""Recordings of torch's profiler: life, names of files, sharing, failures."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex.profiling import TorchProfileSession, profile_scopes_enabled, record_function
from diffulex.profiling.export import SUFFIXES, summary_rows


def make(directory: Path, component: str = "engine", rank: int | None = None, **config: Any):
    return TorchProfileSession(component, rank, {"torch_profiler_dir": str(directory), **config})


def work() -> None:
    with record_function("diffulex.engine.work"):
        torch.ones(8, 8) @ torch.ones(8, 8)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_scopes_are_nothing_without_a_recording(tmp_path: Path) -> None:
    assert not profile_scopes_enabled()
    assert record_function("a") is record_function("b")
    session = make(tmp_path, delay_iterations=1)
    session.start()
    assert not profile_scopes_enabled()
    session.step()
    assert profile_scopes_enabled()
    session.stop()
    assert not profile_scopes_enabled()


def test_four_files(tmp_path: Path) -> None:
    session = make(tmp_path, run_id="run", record_shapes=True, rank=3, component="model_runner")
    session.start()
    work()
    session.stop()
    session.stop()
    assert names(tmp_path) == sorted(f"run.model_runner.rank3.{suffix}" for suffix in SUFFIXES)
    rows = json.loads(session.files["summary.json"].read_text())
    (row,) = [row for row in rows if row["name"] == "diffulex.engine.work"]
    assert row["count"] == 1
    assert row["cpu_us"] >= row["self_cpu_us"] > 0
    has_cuda = torch.cuda.is_available()
    assert (row["cuda_us"] is None) is not has_cuda
    assert any(row["input_shapes"] == "[[8, 8], [8, 8]]" for row in rows)
    with session.files["summary.csv"].open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["name"] for row in table] == [row["name"] for row in rows]
    if not has_cuda:
        assert {row["self_cuda_us"] for row in table} == {""}
        assert [row["self_cpu_us"] for row in rows] == sorted(
            (row["self_cpu_us"] for row in rows), reverse=True
        )
    assert "diffulex.engine.work" in session.files["summary.txt"].read_text()
    events = json.loads(session.files["trace.json"].read_text())["traceEvents"]
    assert any(event.get("name") == "diffulex.engine.work" for event in events)


def test_names_of_runs(tmp_path: Path) -> None:
    session = make(tmp_path)
    for prefix in ("../p", "p", None):
        session.start(prefix)
        session.stop()
    traces = [path.name for path in tmp_path.glob("*.trace.json")]
    assert {"p.engine.trace.json", "p-2.engine.trace.json"} < set(traces)
    (dated,) = (name for name in traces if not name.startswith("p"))
    assert re.fullmatch(r"\d{8}_\d{6}\.engine\.trace\.json", dated)


@pytest.mark.parametrize(("delay", "most"), [(0, 0), (0, 2), (3, 0), (2, 2)])
def test_steps_to_skip_and_to_record(tmp_path: Path, delay: int, most: int) -> None:
    session = make(tmp_path, delay_iterations=delay, max_iterations=most)
    assert session.enabled
    assert not session.active
    session.step()
    assert session.steps == 0
    session.start("p")
    for num_steps in range(1, 6):
        session.step()
        is_over = most > 0 and num_steps >= delay + most
        assert session.active is not is_over
        assert session.stopped is is_over
        assert session.running is (num_steps >= delay and not is_over)
        assert session.steps == (num_steps if not is_over else delay + most)
        recorded = max(num_steps - delay, 0)
        assert session.active_steps == (min(recorded, most) if most else recorded)
        assert bool(names(tmp_path)) is is_over
    session.stop()
    first = session.active_steps
    session.start("q", max_iterations=1)
    for _ in range(delay + 1):
        session.step()
    assert session.stopped
    assert session.active_steps == 1
    assert session.profiled_steps == first + 1


def test_a_second_start_is_ignored(tmp_path: Path) -> None:
    session = make(tmp_path)
    session.start("first")
    session.start("second")
    session.stop()
    assert names(tmp_path) == sorted(f"first.engine.{suffix}" for suffix in SUFFIXES)


def test_a_session_that_is_off() -> None:
    for config in (None, {"profiler": None}):
        session = TorchProfileSession("engine", config=config)
        assert not session.enabled
        with pytest.raises(RuntimeError, match="profiler: expected profiler_config"):
            session.start()
        session.step()
        session.stop()


@pytest.mark.parametrize("is_owner_first", [True, False])
def test_a_process_has_one_profiler(tmp_path: Path, is_owner_first: bool) -> None:
    """Two of torch's would lose the events of one and crash in the export."""
    engine, runner = make(tmp_path, run_id="r"), make(tmp_path, "model_runner", 0, run_id="r")
    engine.start()
    runner.start()
    work()
    for session in (engine, runner) if is_owner_first else (runner, engine):
        session.step()
        session.stop()
    assert not profile_scopes_enabled()
    assert len(names(tmp_path)) == 2 * len(SUFFIXES)
    alias = tmp_path / "r.model_runner.rank0.trace.json"
    assert alias.resolve() == engine.files["trace.json"].resolve()
    assert runner.files["trace.json"] == alias
    events = json.loads(alias.read_text())["traceEvents"]
    assert any(event.get("name") == "diffulex.engine.work" for event in events)
    engine.start()
    engine.stop()
    assert (tmp_path / "r-2.engine.trace.json").exists()


def test_names_of_one_recording_have_one_time(tmp_path: Path, monkeypatch) -> None:
    """Seconds pass while torch's profiler begins."""
    times = iter(("20260101_000000", "20260101_000006"))
    clock = SimpleNamespace(strftime=lambda _: next(times))
    monkeypatch.setattr("diffulex.profiling.session.time", clock)
    sessions = make(tmp_path), make(tmp_path, "model_runner", 0)
    for session in sessions:
        session.start()
    work()
    for session in reversed(sessions):
        session.stop()
    assert {name.partition(".")[0] for name in names(tmp_path)} == {"20260101_000000"}
    assert len(names(tmp_path)) == 2 * len(SUFFIXES)


def test_a_recording_that_cannot_be_written(tmp_path: Path, caplog, monkeypatch) -> None:
    occupied = tmp_path / "traces"
    occupied.write_text("a file")
    session = make(occupied, max_iterations=1)
    session.start("p")
    session.step()
    assert session.stopped
    assert "FileExistsError" in (session.error or "")
    assert "the recording is lost" in caplog.text
    session.stop()

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr("diffulex.profiling.session.export_recording", fail)
    session = make(tmp_path)
    session.start("q")
    session.stop()
    assert session.files == {}
    text = (tmp_path / "q.engine.error.txt").read_text()
    assert text == "RuntimeError: disk full\n"


def test_a_recording_that_cannot_begin(tmp_path: Path, monkeypatch, caplog) -> None:
    def fail(profiler: object) -> None:
        raise RuntimeError("busy")

    monkeypatch.setattr("torch.profiler.profile.start", fail)
    session = make(tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="busy"):
            session.start()
    assert not session.active
    delayed = make(tmp_path, delay_iterations=2)
    delayed.start()
    delayed.step()
    assert not caplog.text
    delayed.step()
    assert "busy" in caplog.text
    assert delayed.stopped
    assert not profile_scopes_enabled()


def test_large_traces_are_pointed_out(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr("diffulex.profiling.export._LARGE_TRACE_BYTES", 100)
    session = make(tmp_path)
    session.start()
    session.stop()
    assert "expected a trace below 1 GiB" in caplog.text
    assert "set max_iterations" in caplog.text


class Event:
    """A row of torch's table with times of a device."""

    def __init__(self, key: str, cpu: float, device: float) -> None:
        self.key, self.count, self.input_shapes = key, 1, [[1]]
        self.self_cpu_time_total = self.cpu_time_total = cpu
        self.self_device_time_total = self.device_time_total = device
        self.self_cpu_memory_usage = self.self_device_memory_usage = 0


def test_rows_are_sorted_by_device_time_where_there_is_any() -> None:
    events = [Event("host", 9.0, 1.0), Event("kernel", 1.0, 9.0)]
    rows = summary_rows(events, has_device=True, has_shapes=False)
    assert [row["name"] for row in rows] == ["kernel", "host"]
    assert rows[0]["self_cuda_us"] == 9.0
    rows = summary_rows(events, has_device=False, has_shapes=True)
    assert [row["name"] for row in rows] == ["host", "kernel"]
    assert rows[0]["self_cuda_us"] is None


class Runtime:
    """Counts the calls that begin and end the range of Nsight."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


def test_the_range_of_nsight(tmp_path: Path, monkeypatch) -> None:
    runtime, activities = Runtime(), []
    real = torch.profiler.profile

    def profile(*, activities: list[Any], **settings: Any) -> Any:
        seen.append(activities)
        return real(activities=[torch.profiler.ProfilerActivity.CPU], **settings)

    seen: list[Any] = activities
    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    session = make(tmp_path)
    session.start("plain")
    session.stop()
    assert runtime.calls == ["synchronize"]
    assert torch.profiler.ProfilerActivity.CUDA in seen[0]
    monkeypatch.setenv("DIFFULEX_CUDA_PROFILER_API", "1")
    session.start("nsight")
    session.stop()
    assert runtime.calls[1:] == ["cudaProfilerStart", "cudaProfilerStop"]
    assert seen[1] == [torch.profiler.ProfilerActivity.CPU]
