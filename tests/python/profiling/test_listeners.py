# SPDX-License-Identifier: Apache-2.0
"""NVTX ranges and times of stages. Without a device: ranges and events are recorded by fakes."""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex.errors import ConfigError
from diffulex.profiling.nvtx_ranges import NvtxRanges, nvtx_package
from diffulex.profiling.profiler import Profiler, Recorded
from diffulex.profiling.scopes import Instrument, Stage
from diffulex.profiling.stage_timer import COLUMNS, CudaStageTimer

AREAS = {
    "step": "engine",
    "model_runner_run": "engine",
    "prepare_reqs_for_execution": "engine",
    "model_forward": "multi_block",
}


class Work:
    """Stages of a step, one inside of the other."""

    def step(self) -> None:
        self.prepare_reqs_for_execution([1, 2, 3])
        self.model_runner_run(SimpleNamespace(num_rows=24))

    def prepare_reqs_for_execution(self, ids: list[int]) -> None:
        pass

    def model_runner_run(self, plan: Any) -> None:
        self.model_forward()

    def model_forward(self) -> None:
        pass


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def instrument(work: Work) -> Instrument:
    return Instrument(lambda: [Stage(work, name, area, name) for name, area in AREAS.items()])


class Nvtx(ModuleType):
    """Records what a tool would see."""

    def __init__(self) -> None:
        super().__init__("nvtx")
        self.seen: list[Any] = []

    def get_domain(self, name: str) -> Any:
        self.seen.append(name)
        return SimpleNamespace(
            get_event_attributes=lambda message, payload=None: (message, payload),
            push_range=self.seen.append,
            pop_range=lambda: self.seen.append("end"),
        )


def test_ranges(work: Work, instrument: Instrument, monkeypatch: pytest.MonkeyPatch) -> None:
    nvtx = Nvtx()
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    assert nvtx_package() is nvtx
    instrument.add(NvtxRanges(instrument))
    work.step()
    work.step()
    inner = [
        ("prepare_reqs_for_execution", 3), "end",
        ("model_runner_run", 24), ("model_forward", None), "end", "end",
    ]  # fmt: skip
    assert nvtx.seen == ["diffulex", ("step", 0), *inner, "end", ("step", 1), *inner, "end"]


def test_ranges_need_their_package(instrument: Instrument, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert nvtx_package() is None
    with pytest.raises(
        ConfigError, match=r"DIFFULEX_NVTX: expected the package nvtx \(pip install"
    ):
        NvtxRanges(instrument)


def test_methods_are_put_back(work: Work, instrument: Instrument) -> None:
    opened: list[str] = []

    def opener(stage: Stage) -> Any:
        opened.append(stage.scope)
        return open(os.devnull)

    instrument.add(opener)
    assert set(vars(work)) == set(AREAS)
    instrument.remove(print)
    work.step()
    assert opened[:2] == ["diffulex.engine.step", "diffulex.engine.prepare_reqs_for_execution"]
    instrument.remove(opener)
    assert vars(work) == {}
    assert not instrument.is_installed
    instrument.add(opener)
    instrument.clear()
    assert vars(work) == {}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_times_on_the_host(work: Work, instrument: Instrument, tmp_path: Path) -> None:
    timer = CudaStageTimer(tmp_path / "times.csv", 2, "cpu", rank=3)
    instrument.add(timer)
    work.model_forward()  # before the first step
    for _ in range(4):
        work.step()
    assert timer.is_over
    assert timer.path == tmp_path / "times.rank3.csv"
    rows = rows_of(timer.path)
    assert tuple(rows[0]) == COLUMNS
    stages = ["prepare_reqs_for_execution", "model_forward", "model_runner_run", "total"]
    assert [(row["step"], row["stage"]) for row in rows] == [
        (step, stage) for step in "01" for stage in stages
    ]
    assert {row["scope"] for row in rows} == {"engine", "multi_block"}
    assert {(r["rank"], r["pid"], r["device"]) for r in rows} == {("3", str(os.getpid()), "cpu")}
    assert {(row["cuda_ms"], row["exception"]) for row in rows} == {("", "")}
    total, inside = float(rows[3]["cpu_ms"]), float(rows[2]["cpu_ms"])
    assert total >= inside >= 0
    timer.close()


def test_several_processes_share_a_file(tmp_path: Path) -> None:
    for _ in range(2):
        CudaStageTimer(tmp_path / "t.csv", 1, "cpu").close()
    assert (tmp_path / "t.rank0.csv").read_text().count("scope") == 1


def test_a_stage_that_fails(work: Work, instrument: Instrument, tmp_path: Path) -> None:
    timer = CudaStageTimer(tmp_path / "t.csv", 5, "cpu")
    work.model_forward = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    instrument.add(timer)
    with pytest.raises(ZeroDivisionError):
        work.step()
    timer.close()
    failed = {row["stage"]: row["exception"] for row in rows_of(timer.path)}
    assert failed == {
        "prepare_reqs_for_execution": "",
        "model_runner_run": "ZeroDivisionError",
        "total": "ZeroDivisionError",
    }


class Events:
    """CUDA events whose clock is a counter; says when one is waited for."""

    def __init__(self) -> None:
        self.now, self.waits, self.is_capturing = 0, 0, False

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=-1)

        def record() -> None:
            self.now += 1
            event.at = self.now

        event.record = record
        event.synchronize = self._wait
        event.elapsed_time = lambda end: float(end.at - event.at)
        return event

    def _wait(self) -> None:
        self.waits += 1


def test_times_on_a_device_are_read_steps_later(
    work: Work, instrument: Instrument, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    monkeypatch.setattr(torch.cuda, "Event", events.event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: events.is_capturing)
    timer = CudaStageTimer(tmp_path / "t.csv", 20, "cuda:0")
    instrument.add(timer)
    for _ in range(8):
        work.step()
    assert events.waits == 0
    work.step()
    assert events.waits == len(AREAS)  # those of the first step
    events.is_capturing = True  # events would become part of the graph
    work.step()
    timer.close()
    rows = rows_of(timer.path)
    assert [row["cuda_ms"] for row in rows[:4]] == ["1.0000", "1.0000", "3.0000", "7.0000"]
    assert {row["cuda_ms"] for row in rows[-4:]} == {""}
    assert {row["device"] for row in rows} == {"cuda:0"}


@pytest.mark.parametrize(
    ("path", "count", "message"),
    [
        ("t.csv", "0", "MAX_STEPS: expected an int >= 1, got '0'"),
        ("t.csv", "x", "MAX_STEPS: expected an int >= 1, got 'x'"),
        ("no/t.csv", "5", "TIMING_PATH: expected a file that can be written, got .*no/t.csv"),
    ],
)
def test_bad_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, count: str, message: str
) -> None:
    monkeypatch.setenv("DIFFULEX_CUDA_STAGE_TIMING_MAX_STEPS", count)
    assert CudaStageTimer.of_environment("cpu") is None
    monkeypatch.setenv("DIFFULEX_CUDA_STAGE_TIMING_PATH", str(tmp_path / path))
    with pytest.raises(ConfigError, match=message):
        CudaStageTimer.of_environment("cpu")


class Others:
    """Ranks whose recordings are texts."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.answer = Recorded(("a",))

    def start_recording(self, name: str) -> None:
        self.told.append(name)

    def stop_recording(self) -> list[Recorded]:
        self.told.append("stop")
        return [self.answer]


def test_other_ranks_record_the_same_steps(tmp_path: Path) -> None:
    others = Others()
    config = {"torch_profiler_dir": str(tmp_path), "delay_iterations": 2}
    profiler = Profiler(config, Instrument(list), others)
    profiler.start("run", 1)
    profiler.after_step()
    assert others.told == []
    profiler.after_step()
    assert others.told == ["run"]
    profiler.after_step()
    assert others.told == ["run", "stop"]
    assert profiler.stop()["files"][-1] == "a"
    others.answer = Recorded(error="no space")
    profiler.start("run", 0)
    profiler.after_step()
    profiler.after_step()
    with pytest.raises(RuntimeError, match="the recording is lost: rank 1: no space"):
        profiler.stop()
    profiler.start("run", 0)
    assert "files" in profiler.stop()  # it ended before it began
    profiler.close()
