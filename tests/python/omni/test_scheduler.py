# SPDX-License-Identifier: Apache-2.0
"""The scheduler of workers without their model: who looks at the processes and who ends them."""

from __future__ import annotations

from collections import deque
from queue import Empty
from types import SimpleNamespace

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

from diffulex.omni import RequestAborted, RequestTimeout, WorkerDeadError  # noqa: E402
from diffulex.omni import scheduler as scheduling  # noqa: E402
from diffulex.omni.config import OmniDiffusionConfig  # noqa: E402
from diffulex.omni.diffusion_engine import DiffusionEngine  # noqa: E402
from diffulex.omni.message_queue import Kind, Message, MessageQueue  # noqa: E402
from diffulex.omni.scheduler import Scheduler  # noqa: E402
from diffulex.omni.worker import PipelineCall  # noqa: E402
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


class Workers:
    """Ranks by what they say; every time the engine waits in vain, a second passes."""

    def __init__(self, answer):
        self.now, self.said = 0.0, deque()
        self.answer, self.closed = answer, False

    def enqueue(self, kind, value=None, *, seq=0, ranks=None):
        for rank in range(2) if ranks is None else ranks:
            for word, told in self.answer(kind, value, rank):
                self.said.append(Message(word, seq, told, rank))

    def dequeue(self, _timeout_s):
        if self.said:
            return self.said.popleft()
        self.now += 1
        assert self.now < 100, "waits for ever"
        raise Empty

    def close(self):
        self.closed = True


def event(rank):
    names = {"request_ids": (str(rank),), "step": 1, "num_steps": 1, "call": rank, "num_calls": 2}
    return Kind.PROGRESS, {"event": names}


ABORTED = Kind.DONE, {"error": {"kind": "RequestAborted", "message": "stopped", "trace": ""}}
CALLS = [PipelineCall((str(r),), ("a",), None, (0,), 64, 64, 1, "pil", {}) for r in range(2)]


@pytest.fixture
def draw(monkeypatch):
    """Draws with two replicas that answer by a function; gives the scheduler and what came of it."""

    def run(answer, on_step, timeout_s=None, **keywords):
        queue, scheduler = Workers(answer), Scheduler()
        monkeypatch.setattr(scheduling, "time", SimpleNamespace(monotonic=lambda: queue.now))
        scheduler._config = OmniDiffusionConfig.from_kwargs(
            model="none", data_parallel_size=2, **keywords
        )
        scheduler._queue, scheduler._world, scheduler.state = queue, 2, "ready"
        scheduler._pool = SimpleNamespace(exited=list, kill=lambda: None)
        try:
            found = scheduler.add_req(
                CALLS, on_step and (lambda item: on_step(item, scheduler)), timeout_s
            )
        except Exception as error:
            found = error
        return found, scheduler

    return run


def test_replicas_step_while_one_is_asked_for_a_preview(draw):
    def answer(kind, value, rank):
        if kind == Kind.RPC:
            return [event(rank)]
        if value == "preview":
            return [(Kind.PROGRESS, {"preview": [f"of {rank}"]})]
        return [(Kind.DONE, {"result": [[["drawn"], None]] * 2})] if value == "go" else []

    seen = []
    found, _ = draw(answer, lambda item, _: seen.append((item.call, item.preview())))
    assert found.outputs == [["drawn"]] * 2
    assert seen == [(0, ["of 0"]), (1, ["of 1"])]


@pytest.mark.parametrize("how", ["abort", "request_timeout_s", "timeout_s"])
def test_a_request_ends_while_a_preview_does_not_come(draw, how):
    def answer(kind, value, rank):
        if kind == Kind.RPC:
            return [event(rank)]
        return [ABORTED] if kind == Kind.ABORT else []

    def ask(item, scheduler):
        if how == "abort":
            scheduler.abort(["1"])
        item.preview()

    engine_s, own_s = (9.0, 2.0) if how == "timeout_s" else (2.0, 3.0)
    found, scheduler = draw(answer, ask, own_s, request_timeout_s=engine_s)
    assert isinstance(found, RequestAborted if how == "abort" else RequestTimeout)
    assert ("got an abort" if how == "abort" else f"within 2 s ({how})") in str(found)
    assert scheduler.state == "ready"
    assert scheduler._queue.now < 10


def beat(is_stepping):
    return Message(Kind.HEARTBEAT, 1, {"step": 1, "is_stepping": is_stepping}, 0)


@pytest.mark.parametrize(
    ("step_s", "is_stepping", "patience_s"), [(None, False, 7), (3, True, 35), (3, False, 7)]
)
def test_workers_that_do_not_stop_are_ended(draw, monkeypatch, step_s, is_stepping, patience_s):
    """Before its first step, and after the last, a rank gets as long as in a collective; between them,
    ten of its steps more than the grace."""
    told, beats = [], [beat(is_stepping)]

    def answer(kind, _value, rank):
        if kind == Kind.ABORT:
            told.append(rank)
            return [ABORTED] if rank else []
        return []

    receive = Scheduler._receive

    def watch(scheduler):
        now = scheduler._queue.now
        if now == (step_s or 0) + 1:
            scheduler.abort(["0"])
        return beats.pop() if beats and now == step_s else receive(scheduler)

    monkeypatch.setattr(Scheduler, "_receive", watch)
    found, scheduler = draw(answer, None, dist_timeout_s=7.0, error_grace_s=5.0)
    assert isinstance(found, WorkerDeadError)
    assert f"workers [0]: expected them to stop within {patience_s} s of being told to" in str(
        found
    )
    assert (scheduler.state, found.rank, scheduler._queue.closed) == ("dead", 0, True)
    assert told == [0, 1]


@pytest.mark.parametrize("name", ["timeout_s", "request_timeout_s"])
def test_a_limit_of_one_request_ends_no_workers(draw, monkeypatch, name):
    """They may take as long for their step as after an abort; the limit of all requests ends them."""
    receive = Scheduler._receive

    def watch(scheduler):
        now = scheduler._queue.now
        if now == 20:
            scheduler._queue.said.extend(Message(*ABORTED[:1], 1, ABORTED[1], r) for r in range(2))
        return receive(scheduler)

    monkeypatch.setattr(Scheduler, "_receive", watch)
    engine_s = 2.0 if name == "request_timeout_s" else 60.0
    found, scheduler = draw(
        lambda *_: [], None, 2.0 if name == "timeout_s" else None, request_timeout_s=engine_s
    )
    assert isinstance(found, RequestTimeout)
    assert f"within 2 s ({name})" in str(found)
    assert scheduler.state == ("ready" if name == "timeout_s" else "dead")


def test_workers_that_do_not_start_again_are_dead(scheduler, monkeypatch):
    def fail(*_given):
        raise OSError("no memory")

    monkeypatch.setattr(scheduler, "initialize", fail)
    scheduler._config = scheduler._directory = None
    scheduler.state = "dead"
    with pytest.raises(OSError, match="no memory"):
        scheduler.restart()
    reason = "workers: expected them to start again, got: no memory"
    assert make_engine(scheduler).health() == {"state": "dead", "pids": [], "reason": reason}
