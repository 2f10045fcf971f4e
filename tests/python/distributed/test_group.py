# SPDX-License-Identifier: Apache-2.0
"""The workers of a group: ended with it, whoever drops it and whatever goes wrong on the way."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from diffulex import log
from diffulex.distributed.group import WorkerGroup
from diffulex.errors import EngineDeadError
from fixtures.processes import is_there, until


@pytest.fixture(autouse=True)
def _children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def group_of(size: int) -> WorkerGroup:
    return WorkerGroup("children:sleeps", size, ["cpu"] * (size - 1), {})


def test_a_group_that_its_own_thread_collects_ends_whole() -> None:
    before, threads = log._Process.num_groups, threading.active_count()
    held = [group_of(3)]
    pipes = held[0]._pipes
    workers = [child.pid for child in pipes.children]
    in_reader = []

    def drop(error: object) -> None:
        in_reader.append(threading.current_thread().name)
        held.clear()

    held[0].on_death(drop)
    os.kill(workers[0], signal.SIGKILL)
    until(lambda: pipes._waker.closed and all(child.connection.closed for child in pipes.children))
    assert in_reader == ["diffulex-ranks"]
    until(lambda: log._Process.num_groups <= before and threading.active_count() <= threads)
    assert not any(map(is_there, workers))


def refuse(*_: object) -> NoReturn:
    raise OSError("the cluster does\nnot answer")


class Deaf:
    """A process that cannot be ended, as one of a cluster that does not answer."""

    def __init__(self, process: Any) -> None:
        self._process = process

    kill = refuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


class Unknown(Deaf):
    """Nor can it be asked whether it has ended."""

    poll = refuse


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Deaf, r"^rank 2 \(pid \d+, cpu\) was killed by SIGKILL, possibly out of memory$"),
        (Unknown, "^ranks cannot be watched: OSError: the cluster does not answer$"),
    ],
)
def test_a_worker_that_cannot_be_killed_keeps_no_other(kind: Any, text: str) -> None:
    group = group_of(4)
    children = group._pipes.children
    own = children[0].process
    children[0].process = kind(own)
    try:
        if kind is Deaf:
            os.kill(children[1].pid, signal.SIGKILL)
        until(lambda: not any(is_there(child.pid) for child in children[1:]))
        until(lambda: group.death is not None)
        with pytest.raises(EngineDeadError, match=text):
            group.check()
    finally:
        children[0].process = own
        group.close(("exit",))
    assert not is_there(own.pid)
