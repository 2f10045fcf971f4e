# SPDX-License-Identifier: Apache-2.0
"""Processes that belong to this one: how they end, and what does not keep them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffulex.distributed.child_process import ChildProcess, stop_all
from diffulex.distributed.start import _LocalRanks, number_replica, rank_starter

#: Generous: the host may be loaded.
SOON_S = 20.0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ChildProcess]]:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    children: list[ChildProcess] = []
    yield children
    for child in children:
        child.process.kill()
        child.process.wait()


def start(started: list[ChildProcess], target: str) -> ChildProcess:
    started.append(ChildProcess(f"children:{target}", target, {}))
    return started[-1]


def test_a_message_that_cannot_be_taken_ends_the_child(started: list[ChildProcess]) -> None:
    child = start(started, "refuses")
    child.connection.send("such thing")
    assert child.process.wait(SOON_S) == 1
    assert child.describe_end() == "ended with exit code 1"
    assert child.last_lines[-1] == "AttributeError: no such thing"


def test_what_a_child_started_does_not_hold_its_pipe(started: list[ChildProcess]) -> None:
    child = start(started, "leaves_a_child")
    assert child.connection.poll(SOON_S)
    pid = child.connection.recv()
    try:
        assert child.connection.poll(SOON_S)
        with pytest.raises(EOFError):
            child.connection.recv()
    finally:
        os.kill(pid, signal.SIGKILL)


class Closed:
    """A standard error that somebody has closed."""

    def write(self, text: str) -> None:
        raise BrokenPipeError

    flush = write


def test_lines_are_read_where_they_cannot_be_shown(
    started: list[ChildProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Closed())
    child = start(started, "writes")
    assert child.connection.poll(SOON_S)
    assert child.connection.recv() == "written"
    child.stop(0.0)
    child.describe_end()
    assert child.last_lines[-1] == f"{999:0200d}"


def test_unread_output_does_not_keep_a_child(started: list[ChildProcess]) -> None:
    """It ends by itself as soon as its output is thrown away, without a signal."""
    child = start(started, "floods")
    assert child.connection.poll(SOON_S)
    assert child.connection.recv() == "begins"
    stop_all([child], SOON_S)
    assert child.process.returncode == 0


def test_children_are_stopped_together(started: list[ChildProcess]) -> None:
    children = [start(started, "sleeps") for _ in range(6)]
    begin = time.monotonic()
    stop_all(children, 1.5)
    assert time.monotonic() - begin < 8.0
    assert [child.process.returncode for child in children] == [-signal.SIGTERM] * 6
    stop_all(children)


def test_every_line_of_a_child_has_its_name(
    started: list[ChildProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that are objects have it inside, so that they stay objects."""
    child = start(started, "logs")
    assert child.connection.poll(SOON_S)
    assert child.connection.recv() == "logged"
    child.stop(0.0)
    child.describe_end()
    lines = capsys.readouterr().err.splitlines()
    # Libraries of the child may warn as well.
    text, as_object, other = [line for line in lines if "said" in line or "not a log" in line]
    assert text.startswith("logs: 2")
    assert text.endswith(" INFO    engine said")
    assert json.loads(as_object)["process"] == "own name"
    assert other == "logs: {not a log line}"


#: A package of that name, and none.
TITLES = {
    "told = []\nsetproctitle = told.append": ["diffulex-worker-3.2"],
    "raise ImportError": [],
}


@pytest.mark.parametrize("package", TITLES)
def test_a_title_needs_a_package(
    started: list[ChildProcess], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str
) -> None:
    (tmp_path / "setproctitle.py").write_text(package)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_LocalRanks, "replica", 0)
    number_replica(3)
    started.append(rank_starter().start("children:tells_its_title", 2, {}))
    started.append(ChildProcess("children:tells_its_title", "without", {}))
    for child, expected in zip(started, (TITLES[package], []), strict=True):
        assert child.connection.poll(SOON_S)
        told, command = child.connection.recv()
        assert told == expected
        assert b"importlib.import_module(module)" in command


def test_a_title_is_what_the_system_shows(started: list[ChildProcess]) -> None:
    pytest.importorskip("setproctitle", reason="shows nothing else")
    started.append(rank_starter().start("children:tells_its_title", 2, {}))
    assert started[0].connection.poll(SOON_S)
    _, command = started[0].connection.recv()
    assert command.rstrip(b"\0") == b"diffulex-worker-0.2"
