# SPDX-License-Identifier: Apache-2.0
"""What is read from the traces of several ranks: made here, so that every number is known."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "benchmarks" / "python"
#: Microseconds; a step has two sums and one exchange of records.
PERIOD, SUM, RECORDS = 1000.0, 40.0, 10.0
#: Beginnings within a step.
FIRST, SECOND, LAST = 100.0, 500.0, 900.0


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return import_module("rank_traces").rank_totals


def event(name: str, begin: float, duration: float, cat: str) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": begin, "dur": duration, "cat": cat}


def write(path: Path, steps: range, late: float, *, on_gpu: bool) -> Path:
    """A rank that begins each first sum so late; every exchange ends at the same time on all ranks."""
    names = ("gloo:all_reduce", "gloo:all_gather")
    if on_gpu:
        names = ("void diffulex::one_shot_kernel<float, 8>", "gather_records_kernel(GatherArgs)")
    cat = "kernel" if on_gpu else "user_annotation"
    events = [event("diffulex.engine.step", 0, 9, "user_annotation"), {"ph": "M", "name": "gloo:"}]
    for step in steps:
        at = step * PERIOD
        events += [
            event(names[0], at + FIRST + late, SUM - late, cat),
            event(names[0], at + SECOND, SUM, cat),
            event(names[1], at + LAST, RECORDS, cat),
            event("product", at + FIRST + SUM, 200, "kernel" if on_gpu else "cpu_op"),
        ]
    path.write_text(json.dumps({"traceEvents": events[::-1]}))
    return path


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("begin", [0, 1, 2], ids=["one more", "as many", "one less"])
def test_totals_of_two_ranks(read: Any, tmp_path: Path, begin: int, on_gpu: bool) -> None:
    """The recording of the second one may begin and end one step earlier or later."""
    own = write(tmp_path / "0", range(1, 9), 0.0, on_gpu=on_gpu)
    other = write(tmp_path / "1", range(begin, begin + 8), 30.0, on_gpu=on_gpu)
    (first, second), skew = read([own, other])
    assert skew == second.late_us == 30.0
    assert first.late_us == 0.0
    for rank, each, late in ((0, first, 0.0), (1, second, 30.0)):
        assert (each.rank, each.steps, each.step_ms, each.exchanges) == (rank, 6, 1.0, 3.0)
        # From one first exchange to the next: of a late one the first is short.
        waited = 2 * SUM - late + RECORDS
        assert each.exchange_us == waited
        assert each.exchange_percent == round(100 * waited / PERIOD, 2)
        busy = round(100 * (waited + 200) / PERIOD, 2)
        assert each.busy_percent == (busy if on_gpu else None)


def test_steps_that_sample_nothing_count(read: Any, tmp_path: Path) -> None:
    """Every third one ends without the exchange of rows."""

    def edit(path: Path) -> Path:
        events = json.loads(path.read_text())["traceEvents"]
        kept = [
            e
            for e in events
            if "gather" not in e["name"] or e["ts"] // PERIOD % 3 or e["ts"] < PERIOD
        ]
        assert len(kept) == len(events) - 2
        path.write_text(json.dumps({"traceEvents": kept}))
        return path

    own, other = (
        edit(write(tmp_path / name, range(8), late, on_gpu=False))
        for name, late in (("0", 20.0), ("1", 0.0))
    )
    (first, second), skew = read([own, other])
    assert (first.steps, second.steps, first.step_ms, skew) == (6, 6, 1.0, 20.0)
    assert first.exchanges == round((2 * 6 + 4) / 6, 2)


def test_steps_of_different_sums_are_refused(read: Any, tmp_path: Path) -> None:
    trace = write(tmp_path / "0", range(8), 0.0, on_gpu=False)
    events = json.loads(trace.read_text())["traceEvents"]
    events.append(event("gloo:all_reduce", 3 * PERIOD + 700, 1, "user_annotation"))
    trace.write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(ValueError, match=r"^expected as many sums in every step, got \[2, 3\]$"):
        read([trace, trace])


def test_ops_without_those_that_they_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    events = [
        {**event("outer", 0, 100, "cpu_op"), "tid": 1},
        {**event("inner", 0, 30, "cpu_op"), "tid": 1},
        {**event("inner", 40, 20, "cpu_op"), "tid": 1},
        {**event("innermost", 45, 5, "cpu_op"), "tid": 1},
        {**event("outer", 100, 7, "cpu_op"), "tid": 1},
        {**event("inner", 50, 4, "cpu_op"), "tid": 2},
        {**event("gloo:all_reduce", 10, 80, "user_annotation"), "tid": 1},
        {**event("a scope", 0, 200, "user_annotation"), "tid": 1},
    ]
    trace = tmp_path / "trace"
    trace.write_text(json.dumps({"traceEvents": events}))
    found = import_module("rank_traces").host_work(trace)
    assert sorted((item.name, item.end - item.begin) for item in found) == [
        ("gloo:all_reduce", 80.0),
        ("inner", 4.0),
        ("inner", 15.0),
        ("inner", 30.0),
        ("innermost", 5.0),
        ("outer", 7.0),
        ("outer", 50.0),
    ]


def test_traces_that_have_no_steps_are_refused(read: Any, tmp_path: Path) -> None:
    whole = write(tmp_path / "0", range(5), 0.0, on_gpu=False)
    short = write(tmp_path / "1", range(2), 0.0, on_gpu=False)
    with pytest.raises(ValueError, match=r"^expected exchanges of at least 2 steps, got 1$"):
        read([whole, short])
