# SPDX-License-Identifier: Apache-2.0
"""The workers of a group: ended with it, whoever drops it and whatever goes wrong on the way."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from diffulex import log
from diffulex.distributed.group import WorkerGroup
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
    until(lambda: log._Process.num_groups == before and threading.active_count() == threads)
    assert not any(map(is_there, workers))
