# SPDX-License-Identifier: Apache-2.0
"""The scheduler of workers without their model: who looks at the processes and who ends them."""

from __future__ import annotations

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

from diffulex.omni import WorkerDeadError  # noqa: E402
from diffulex.omni.diffusion_engine import DiffusionEngine  # noqa: E402
from diffulex.omni.message_queue import MessageQueue  # noqa: E402
from diffulex.omni.scheduler import Scheduler  # noqa: E402
from diffulex.omni.worker_pool import ExitedWorker  # noqa: E402


class Pool:
    """Two processes, of which the second has been killed."""

    def __init__(self):
        self.pids = [1, 2]
        self.num_kills = 0
        self.on_kill = lambda: None

    def exited(self):
        return [ExitedWorker(1, -9)]

    def kill(self):
        self.num_kills += 1
        self.on_kill()


@pytest.fixture
def scheduler():
    made = Scheduler()
    made._queue = MessageQueue(2)
    made._pool = Pool()
    made.state = "ready"
    yield made
    made._queue.close()


def make_engine(scheduler):
    engine = object.__new__(DiffusionEngine)
    engine._worker = scheduler
    return engine


REASON = (
    "worker 1: expected a running process, got one that was killed by SIGKILL"
    " (possibly out of memory)"
)


def test_a_health_probe_only_looks(scheduler):
    engine = make_engine(scheduler)
    for _ in range(2):
        assert engine.health() == {"state": "dead", "pids": [], "reason": REASON}
    # The thread that draws may be polling the socket.
    assert not scheduler._queue._socket.closed
    assert scheduler._pool.num_kills == 0
    for _ in range(2):
        with pytest.raises(WorkerDeadError) as raised:
            scheduler.check_alive()
        assert str(raised.value) == REASON
        assert (raised.value.rank, raised.value.exitcode) == (1, -9)
    assert scheduler._queue._socket.closed
    assert scheduler._pool.num_kills == 1
    assert engine.health() == {"state": "dead", "pids": [], "reason": REASON}


def test_workers_are_dead_while_they_are_being_ended(scheduler):
    engine, seen = make_engine(scheduler), []
    scheduler._pool.on_kill = lambda: seen.append(engine.health()["state"])
    with pytest.raises(WorkerDeadError):
        scheduler.check_alive()
    assert seen == ["dead"]


def test_workers_that_were_told_to_leave_have_not_died(scheduler):
    for state in ("closing", "closed"):
        scheduler.state = state
        assert scheduler.death() is None
