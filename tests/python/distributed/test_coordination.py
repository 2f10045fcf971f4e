# SPDX-License-Identifier: Apache-2.0
"""What the loop over several replicas does when they misbehave; replicas are the ends of pipes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from diffulex import Diffulex, SamplingParams
from diffulex.distributed import child_process, start
from diffulex.distributed.executor import StepCounts
from diffulex.distributed.outbox import Outbox
from diffulex.engine.interrupt import uninterrupted
from diffulex.engine.metrics import RequestMetrics, RunStats
from diffulex.engine.output import RequestOutput, StepOutput
from diffulex.engine.replicas import loop as loop_module
from diffulex.engine.replicas import replica as replica_module
from diffulex.engine.replicas.loop import ReplicaLoop
from diffulex.engine.replicas.process import ReplicaServer
from diffulex.engine.replicas.replica import Replica
from diffulex.errors import EngineDeadError, OutOfPagesError
from fixtures.gate import Gate
from fixtures.processes import PATIENCE_S, is_there, until

PROMPT = (5, 6, 7)
PARAMS = SamplingParams(max_tokens=64)
GAUGES = (StepCounts(), 0, 0)


class FakeChild:
    """A process that is not there; `end` is what the loop would read and write at the other side."""

    def __init__(self, pid: int = 4711) -> None:
        self.connection, self.end = multiprocessing.Pipe()
        self.outbox: Any = None
        self.pid = pid
        self.last_lines: deque[str] = deque()
        self.returncode: int | None = None
        self.process = SimpleNamespace(poll=lambda: self.returncode, send_signal=self.signalled)
        self.signals: list[int] = []

    has_ended = child_process.ChildProcess.has_ended

    def signalled(self, number: int) -> None:
        self.signals.append(number)
        self.returncode = -number

    def stop(self, grace_s: float = 0.0) -> None:
        self.release()

    def release(self) -> None:
        self.connection.close()

    def describe_end(self) -> str:
        return "was killed by SIGKILL"

    def received(self) -> list[Any]:
        """What it was sent so far."""
        messages = []
        until(lambda: not self.outbox._num_bytes)
        while self.end.poll():
            messages.append(self.end.recv())
        return messages

    def die(self) -> None:
        """Ends, while some other process holds its pipe."""
        self.returncode = -9

    def step(self, *outputs: StepOutput, total_s: float = 0.0) -> None:
        stats = RunStats(num_steps=1, total_s=total_s, decode_s=total_s)
        self.end.send(("step", [*outputs], stats, GAUGES, ()))


@pytest.fixture(scope="module")
def alone() -> Iterator[Diffulex]:
    with Diffulex("demo", device="cpu", max_num_reqs=3, num_pages=15) as engine:
        yield engine


@pytest.fixture
def make(alone: Diffulex, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    loops = []

    def made(count: int = 2) -> tuple[ReplicaLoop, list[Any]]:
        children: list[Any] = [FakeChild() for _ in range(count)]
        replicas = [Replica(i, child, "cpu") for i, child in enumerate(children)]
        for replica in replicas:
            replica.num_pages = 15
            replica.child.outbox = replica.outbox  # type: ignore[attr-defined]
        monkeypatch.setattr(loop_module, "start_replicas", lambda *_: replicas)
        options: Any = None
        loops.append(ReplicaLoop(alone.config, options, alone.tokenizer))
        return loops[-1], children

    yield made
    for loop in loops:
        for replica in loop.replicas:
            replica.child.returncode = 0  # type: ignore[attr-defined]
        loop.close()


def final(req_id: int, *token_ids: int, reason: str = "max_tokens") -> StepOutput:
    output = RequestOutput(req_id, PROMPT, token_ids, "", "", reason, RequestMetrics(queue_s=0.0))
    return StepOutput(req_id, token_ids, len(token_ids), True, output)


def results(loop: ReplicaLoop) -> list[RequestOutput]:
    found = [step.output for step in loop.router.unclaimed if step.output is not None]
    loop.router.unclaimed.clear()
    return found


class Mine(SamplingParams):
    """Unknown to any other process."""


def test_a_class_of_the_program_is_not_sent(make: Any) -> None:
    loop, (child,) = make(1)
    loop.add(PROMPT, Mine(max_tokens=4, temperature=0.5, stop=["x"]))
    ((kind, _, _, params, _),) = child.received()
    assert kind == "add"
    assert type(params) is SamplingParams
    assert (params.max_tokens, params.temperature, params.stop) == (4, 0.5, ("x",))


class Unsendable(str):
    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not to be pickled")


def test_a_request_that_does_not_pickle_ends(make: Any) -> None:
    loop, (child,) = make(1)
    loop.add(PROMPT, SamplingParams(max_tokens=8, stop=[Unsendable("x")]))
    (output,) = results(loop)
    assert output.completion_reason == "error"
    assert output.error == "request 0: cannot be sent: TypeError: not to be pickled"
    assert child.received() == []
    assert not loop.has_unfinished()


class Unreadable:
    def __reduce__(self) -> Any:
        return fail, ()


def fail() -> None:
    raise AttributeError("no such class")


def test_an_unreadable_message_is_the_end_of_its_replica(make: Any) -> None:
    loop, (child,) = make(1)
    loop.add(PROMPT, PARAMS)
    child.end.send(Unreadable())
    with pytest.raises(EngineDeadError, match="sent what cannot be read: AttributeError: no such"):
        loop.run()


def test_threads_do_not_mix_their_messages(make: Any) -> None:
    """Messages above the size of the pipe are written in parts."""
    loop, (child,) = make(1)
    message = ("x", bytes(1 << 20))
    senders = [
        threading.Thread(target=lambda: [loop.replicas[0].send(message) for _ in range(4)])
        for _ in range(4)
    ]
    for sender in senders:
        sender.start()
    assert all(child.end.recv() == message for _ in range(16))
    for sender in senders:
        sender.join()


@pytest.mark.slow
def test_a_stopped_replica_keeps_nobody_waiting(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads nothing, so that its pipe fills; the other one decodes."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    loop, (first, _) = make(2)
    child = child_process.ChildProcess("children:sleeps", "sleeps", {})
    os.kill(child.pid, signal.SIGSTOP)
    loop.replicas[1] = stuck = Replica(1, child, "cpu")
    prompt = (5,) * 100_000

    def add_all() -> None:
        for _ in range(4):
            loop.abort(loop.add(PROMPT, PARAMS))
            for req_id in loop.open:
                stuck.send(("add", req_id, prompt))

    adding = threading.Thread(target=add_all, daemon=True)
    adding.start()
    adding.join(PATIENCE_S)
    assert not adding.is_alive()
    (req_id, *_) = [i for i, request in loop.open.items() if request.ticket.replica == 0]
    first.step(final(req_id, 9))
    loop.run()
    assert [output.token_ids for output in results(loop)] == [(9,)]
    replica_module.end_replicas([stuck], 0.0)
    stuck.is_alive = False
    until(lambda: not stuck.outbox._thread.is_alive())
    assert not is_there(child.pid)


def test_a_death_is_seen_while_others_hold_the_pipe(make: Any) -> None:
    """And while another replica has always something to say; what it had sent still counts."""
    loop, (first, second) = make(2)
    req_id = loop.add(PROMPT, PARAMS)
    other = loop.add(PROMPT, PARAMS)
    second.step(final(other, 9))
    second.die()
    first.step()
    loop.run()
    assert [output.token_ids for output in results(loop)] == [(9,)]
    first.step()
    loop.run()
    assert [replica.is_alive for replica in loop.replicas] == [True, False]
    first.die()
    with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
        loop.run()
    assert req_id in loop.open


def test_a_step_that_fails_is_raised_and_the_replica_stays(make: Any) -> None:
    loop, (child,) = make(1)
    req_id = loop.add(PROMPT, PARAMS)
    for kind, known in (("OutOfPagesError", OutOfPagesError), ("ValueError", ValueError)):
        child.end.send(("step_failed", (kind, "too much", "")))
        with pytest.raises(known, match=r"^replica 0: too much$"):
            loop.run()
        child.step(StepOutput(req_id, (1,), 1))
        loop.run()
    child.end.send(("step_failed", ("OwnError", "too much", "")))
    with pytest.raises(RuntimeError, match=r"^replica 0: OwnError: too much$"):
        loop.run()
    assert [message[0] for message in child.received()] == ["add", "go_on", "go_on"]
    # Its caller is gone: aborted before the next step.
    child.step(final(req_id, reason="aborted"))
    loop.abandon({req_id})
    assert [message[0] for message in child.received()] == ["abort", "go_on"]
    assert not loop.open


class FailingEngine:
    """Its first step fails."""

    def __init__(self) -> None:
        ledger = SimpleNamespace(run_stats=RunStats(), num_active_blocks=0)
        self._loop = SimpleNamespace(ledger=ledger, counts=StepCounts(), num_watched=0)
        self.config = SimpleNamespace(model=SimpleNamespace(device="cpu"))
        self.num_steps = 0

    def has_unfinished(self) -> bool:
        return True

    def step(self) -> list[StepOutput]:
        self.num_steps += 1
        if self.num_steps == 1:
            raise ValueError("bad\nstep")
        return []


def test_a_replica_outlives_a_step_that_fails() -> None:
    connection, end = multiprocessing.Pipe()
    engine: Any = FailingEngine()
    inbox = queue.SimpleQueue[Any]()
    outbox = Outbox(connection, lambda: None)
    replica = ReplicaServer(engine, outbox)
    assert replica.serve(inbox)
    kind, (name, text, _) = end.recv()
    assert (kind, name, text) == ("step_failed", "ValueError", "bad step")
    inbox.put(("go_on",))
    assert replica.serve(inbox)
    assert end.recv()[0] == "step"
    assert engine.num_steps == 2
    outbox.close()


def test_a_dead_engine_refuses_no_request() -> None:
    """It ends, and the parent asks another one."""
    connection, end = multiprocessing.Pipe()
    outbox, inbox = Outbox(connection, lambda: None), queue.SimpleQueue[Any]()
    replica = ReplicaServer(cast("Any", DeadEngine()), outbox)
    for message in (("add", 0, PROMPT, PARAMS, {}), ("exit",)):
        inbox.put(message)
    with pytest.raises(EngineDeadError, match="rank 1 is gone"):
        replica.serve(inbox)
    outbox.close()
    assert not end.poll()


class DeadEngine:
    def has_unfinished(self) -> bool:
        return False

    def add_request(self, *_: Any) -> int:
        raise EngineDeadError("rank 1 is gone")


def test_a_replica_that_nobody_reads_makes_no_steps_until_there_is_room() -> None:
    gate, inbox, engine = Gate(), queue.SimpleQueue[Any](), FailingEngine()
    engine.num_steps = 1
    outbox = Outbox(gate, lambda: inbox.put(("room",)), max_bytes=1)
    replica = ReplicaServer(cast("Any", engine), outbox)
    assert replica.serve(inbox)
    assert outbox.is_full
    inbox.put(("exit",))
    assert not replica.serve(inbox)  # without a step before
    gate.let_through(1)
    assert inbox.get(timeout=120.0) == ("room",)
    assert replica.serve(inbox)
    assert engine.num_steps == 3
    gate.let_through(1)
    outbox.close()


def test_a_request_is_not_the_end_of_every_replica(make: Any) -> None:
    loop, children = make(4)
    req_id = loop.add(PROMPT, PARAMS)
    for _ in range(3):
        index = loop.open[req_id].ticket.replica
        children[index].die()
        loop._receive()
    (output,) = results(loop)
    assert output.error == (
        f"request {req_id}: lost with 3 replicas, the last one: replica {index} (pid 4711, cpu)"
        " was killed by SIGKILL"
    )
    assert sum(replica.is_alive for replica in loop.replicas) == 1
    assert loop._choice.num_inflight(0) == 0


def test_an_aborted_request_whose_replica_dies_keeps_its_tokens(make: Any, alone: Diffulex) -> None:
    loop, children = make(2)
    req_id = loop.add(PROMPT, PARAMS)
    index = loop.open[req_id].ticket.replica
    children[index].step(StepOutput(req_id, (40, 41), 2))
    loop.run()
    loop.abort(req_id)
    children[index].die()
    loop._receive()
    (output,) = results(loop)
    assert (output.completion_reason, output.token_ids) == ("aborted", (40, 41))
    assert output.text == alone.tokenizer.decode([40, 41])
    assert children[1 - index].received() == []


def test_an_abort_after_a_loss_keeps_what_was_seen(make: Any) -> None:
    """Of a request that another replica decodes again, and of one that none has yet."""
    loop, children = make(2)
    req_id = loop.add(PROMPT, PARAMS)
    index = loop.open[req_id].ticket.replica
    children[index].step(StepOutput(req_id, (40, 41), 2))
    loop.run()
    children[index].die()
    loop._receive()
    loop.abort(req_id)
    children[1 - index].step(final(req_id, 40, reason="aborted"))
    loop.run()
    (output,) = results(loop)
    assert (output.completion_reason, output.token_ids) == ("aborted", (40, 41))


def greeting(*messages: Any) -> FakeChild:
    child = FakeChild()
    for message in messages:
        child.end.send(message)
    return child


def test_replicas_are_waited_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one that fails is the error while the first one loads; limits do not add up."""
    loads = Replica(0, greeting(("hello",)), "cpu")  # type: ignore[arg-type]
    fails = Replica(1, greeting(("hello",), ("failed", ("ConfigError", "bad", ""))), "cpu")  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"^replica 1: bad$"):
        replica_module._await_all([loads, fails], 60.0)
    slow = [Replica(i, greeting(("hello",)), "cpu") for i in range(8)]  # type: ignore[arg-type]
    begin = time.monotonic()
    message = r"did not load its weights within 0.5 s \(distributed_timeout_seconds\)"
    with pytest.raises(EngineDeadError, match=message):
        replica_module._await_all(slow, 0.5)
    assert time.monotonic() - begin < 3.5
    ready = [Replica(i, greeting(("hello",), ("ready", 7, 0.5)), "cpu") for i in range(2)]  # type: ignore[arg-type]
    replica_module._await_all(ready, 60.0)
    assert [(replica.num_pages, replica.warm_up_s) for replica in ready] == [(7, 0.5)] * 2


def test_deaths_before_and_after_the_greeting_are_errors() -> None:
    for messages in ([], [("hello",)]):
        child = greeting(*messages)
        child.end.close()
        with pytest.raises(EngineDeadError, match=r"replica 0 .* was killed by SIGKILL"):
            replica_module._await_all([Replica(0, child, "cpu")], 60.0)  # type: ignore[arg-type]


def test_a_child_is_stopped_when_its_options_cannot_be_sent(
    alone: Diffulex, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[Any] = []

    def child(*_: Any) -> FakeChild:
        children.append(FakeChild())
        return children[-1]

    monkeypatch.setattr(start, "ChildProcess", child)
    given = {"x": Unsendable("x")}
    parallel = dataclasses.replace(alone.config.parallel, data_parallel_size=2)
    config = dataclasses.replace(alone.config, parallel=parallel)
    options: Any = SimpleNamespace(model=Unsendable("x"), given=given)
    with pytest.raises(TypeError, match="not to be pickled"):
        replica_module.start_replicas(config, options)
    assert [child.signals for child in children] == [[signal.SIGTERM]]
    assert children[0].connection.closed


def test_an_answer_to_an_earlier_question_is_dropped(make: Any) -> None:
    loop, (child,) = make(1)
    replica = loop.replicas[0]
    replica.ask("stats")  # whose caller is gone
    child.end.send(("answer", 1, {"num_waiting": 5}))
    child.end.send(("answer", 2, 3))
    assert loop.flush_prefix_cache() == 3
    assert child.received() == [("ask", 1, "stats"), ("ask", 2, "flush_prefix_cache")]


def test_an_interrupt_waits_for_a_message() -> None:
    seen = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(seen)
    assert seen == ["first", "second"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupted(seen: list[str]) -> None:
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("first")
        os.kill(os.getpid(), signal.SIGINT)
        seen.append("second")


def test_the_time_in_the_queue_is_that_since_the_request(make: Any) -> None:
    loop, (child,) = make(1)
    req_id = loop.add(PROMPT, PARAMS)
    loop.open[req_id].record.added_at -= 100.0
    child.step(final(req_id, 9), total_s=30.0)
    loop.run()
    (output,) = results(loop)
    assert 70.0 <= output.metrics.queue_s < 100.0


def test_a_fork_leaves_the_replicas_alone(make: Any) -> None:
    loop, (child,) = make(1)
    loop._pid, parent = 1, loop._pid
    end, (function, arguments, _) = loop._end, loop._end.peek()[1:]
    function(arguments[0], 1, arguments[2])
    assert child.received() == []
    assert child.signals == []
    loop._pid = parent
    assert end.alive
    assert arguments[1] == os.getpid()


def test_close_after_an_interrupt_goes_on(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, (child,) = make(1)

    def interrupt(children: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(replica_module, "stop_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.close()
    assert not loop.is_closed
    child.returncode = 0
    loop.close()
    assert loop.is_closed
    assert child.connection.closed
