# SPDX-License-Identifier: Apache-2.0
"""One replica as its parent sees it: how it starts, what it is sent, how it ended."""

from __future__ import annotations

import builtins
import contextlib
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, cast

from diffulex import errors
from diffulex.config.parse import Options
from diffulex.distributed.child_process import start_error, stop_all
from diffulex.distributed.coupling import Coupling
from diffulex.distributed.executor import StepCounts
from diffulex.distributed.layout import replica_settings
from diffulex.distributed.outbox import Outbox
from diffulex.distributed.start import replica_starter
from diffulex.engine.interrupt import uninterrupted
from diffulex.errors import DiffulexError, EngineDeadError
from diffulex.log import log_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.config.config import Config
    from diffulex.distributed.child_process import ChildProcess

__all__ = ["Replica", "end_replicas", "start_replicas"]

_TARGET = "diffulex.engine.replicas.process:run_replica"
#: A process that imports torch on a loaded host has been seen to take half a minute.
_HELLO_S = 120.0
_POLL_S = 0.1


class Replica:
    """A process with an engine, and what it last said about itself.

    Args:
        index: its number.
        child: the process.
        device: where it runs, as shown in errors.
    """

    def __init__(self, index: int, child: ChildProcess, device: str) -> None:
        self.index = index
        self.device = device
        self.is_alive = True
        self.num_pages = 0
        self.warm_up_s = 0.0
        self.counts = StepCounts()
        self.num_watched = 0
        self.num_active_blocks = 0
        #: It waits for `go_on` since a step failed.
        self.is_halted = False
        #: What it answered to the last question; None: not yet.
        self.answer: Any = None
        self.child = child
        self._num_asked = 0
        self.outbox = Outbox(child.connection, lambda: None)
        #: What it is to do next, until when, and how its time is named.
        self._stage = ("start", time.monotonic() + _HELLO_S, f"{_HELLO_S:g} s")

    def send(self, message: Any) -> None:
        """Sends it, from any thread, and waits for nobody; what a process that is gone would have read is
        lost, as `receive` will tell. Raises whatever the pickling of the message does."""
        with uninterrupted():
            self.outbox.put(message)

    def ask(self, what: str) -> None:
        """Asks a question; `answer` is None until it comes."""
        self.answer = None
        self._num_asked += 1
        self.send(("ask", self._num_asked, what))

    def answered(self, number: int, answer: Any) -> None:
        """Keeps what it says, unless that is for a question that nobody waits for any more."""
        if number == self._num_asked:
            self.answer = answer

    def go_on(self) -> None:
        """Lets it make steps again after one that failed."""
        if self.is_halted:
            self.is_halted = False
            self.send(("go_on",))

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the process is gone, or has sent what cannot be read, as its text says then.
        """
        try:
            with uninterrupted():
                return self.child.connection.recv()
        except (EOFError, OSError) as error:
            raise EOFError from error
        except Exception as error:
            text = " ".join(str(error).split())
            raise EOFError(f"sent what cannot be read: {type(error).__name__}: {text}") from error

    def greet(self, timeout_s: float) -> bool:
        """Takes the next message of a process that starts; whether its engine serves.

        Args:
            timeout_s: for loading, from now on.

        Raises:
            DiffulexError: it failed or died.
        """
        try:
            kind, *content = self.receive()
        except EOFError as end:
            raise self.death(str(end) or self.child.describe_end()) from None
        if kind == "failed":
            raise self._failure(*content[0])
        if kind == "ready":
            self.num_pages, self.warm_up_s = content
            return True
        limit = f"{timeout_s:g} s (distributed_timeout_seconds)"
        self._stage = ("load its weights", time.monotonic() + timeout_s, limit)
        return False

    def check_start(self) -> None:
        """EngineDeadError when it has ended or takes too long, and has nothing more to say."""
        if self.child.has_ended:
            raise self.death(self.child.describe_end())
        what, end, limit = self._stage
        if time.monotonic() > end and not self.child.connection.poll():
            raise self.death(f"did not {what} within {limit}")

    def step_error(self, kind: str, text: str, details: str) -> Exception:
        """What a step of it raised, with its number in front; RuntimeError for types unknown here."""
        known = getattr(errors, kind, getattr(builtins, kind, None))
        message = f"replica {self.index}: {text}"
        if isinstance(known, type) and issubclass(known, Exception):
            with contextlib.suppress(TypeError):  # it takes more than a text
                return known(message)
        return RuntimeError(f"replica {self.index}: {kind}: {text}")

    def _failure(self, kind: str, text: str, details: str) -> DiffulexError:
        """The error that its constructor raised, with its number in front."""
        error = start_error(f"replica {self.index}", kind, text)
        return self.death(f"could not start: {kind}: {text}") if error is None else error

    def death(self, how: str) -> EngineDeadError:
        """The error that says how it ended."""
        child = self.child
        return EngineDeadError(
            f"replica {self.index} (pid {child.pid}, {self.device}) {how}",
            rank=self.index,
            pid=child.pid,
            device=self.device,
            last_lines=tuple(child.last_lines),
        )


def end_replicas(replicas: Sequence[Replica], *grace_s: float) -> None:
    """Ends the processes of all of them, as `stop_all`."""
    stop_all([replica.child for replica in replicas], *grace_s)
    for replica in replicas:
        replica.outbox.drop()


def start_replicas(
    config: Config, options: Options, place: tuple[str, int, str] | None = None
) -> list[Replica]:
    """Starts every replica and waits until all of them serve.

    Args:
        config: of the engine.
        options: from which each replica makes its own.
        place: where replicas that share the experts find each other; None: they share nothing.

    Raises:
        DiffulexError: one of them does not; all of them are ended.
    """
    parallel, given_device = config.parallel, options.given.get("device", "auto")
    starter = replica_starter(parallel, config.model.device, given_device)
    replicas: list[Replica] = []
    try:
        for index in range(parallel.data_parallel_size):
            child, own = starter.start(index, _TARGET)
            name = ", ".join(f"cuda:{device}" for device in own) or "cpu"
            replicas.append(Replica(index, child, name))
            given = replica_settings(options.given, own, index)
            coupling = None if place is None else Coupling(index, place)
            told = Options(options.model, given), log_settings(), index, coupling
            replicas[-1].send(told)
        _await_all(replicas, parallel.distributed_timeout_seconds)
    except BaseException:
        end_replicas(replicas, 0.0)
        starter.close()
        raise
    return replicas


def _await_all(replicas: list[Replica], timeout_s: float) -> None:
    """Waits for all of them at once: the first one that fails is the error."""
    starting = {replica.child.connection: replica for replica in replicas}
    while starting:
        for connection in wait(starting, _POLL_S):
            if starting[cast("Any", connection)].greet(timeout_s):
                del starting[cast("Any", connection)]
        for replica in starting.values():
            replica.check_start()
