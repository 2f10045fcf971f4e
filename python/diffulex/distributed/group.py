# SPDX-License-Identifier: Apache-2.0
"""The workers of the ranks that share a model with this process, which is the first of them.

The group is alive or dead, and dead for good: when one worker ends, fails or does not answer, all of them
are ended, and what is raised from then on says which one it was. A thread reads what they send, so that
this is known within a moment whatever the ranks are doing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
import weakref
from collections import deque
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler, send_handle
from typing import TYPE_CHECKING, Any, NoReturn

from diffulex.distributed.child_process import ChildProcess, start_error, stop_all, with_hint
from diffulex.distributed.start import rank_starter
from diffulex.errors import DiffulexError, EngineDeadError
from diffulex.log import get_logger, lead_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["WorkerGroup"]

logger = get_logger(__name__)

_POLL_S = 0.5
#: A rank that lost another one says so before the end of that one is seen.
_CAUSE_S = 1.0


class _Pipes:
    """The pipes of all workers and a thread that reads them. Belongs to a group, which may be dropped
    without `close`: the thread does not hold it."""

    def __init__(self, children: Sequence[ChildProcess], devices: Sequence[str]) -> None:
        self.children = children
        self.devices = devices
        self.has_started = False
        #: Replies of each worker that were not taken yet.
        self.replies: list[deque[Any]] = [deque() for _ in children]
        #: When each worker began the step that was last looked at.
        self.began = [0.0] * len(children)
        self.changed = threading.Condition()
        self.death: DiffulexError | None = None
        #: Called once when the group has died, from any thread.
        self.on_death: Callable[[DiffulexError], None] | None = None
        self._pid = os.getpid()
        #: What a rank said of another one, and until when that one is given to show its end.
        self._hearsay: tuple[float, DiffulexError] | None = None
        self._woken, self._waker = multiprocessing.Pipe(duplex=False)
        self._reader = threading.Thread(target=self._read, name="diffulex-ranks", daemon=True)
        self._reader.start()
        lead_ranks(1)

    def _read(self) -> None:
        try:
            self._watch()
        except Exception as error:  # of a cluster that does not answer
            text = " ".join(str(error).split())
            self.die(EngineDeadError(f"ranks cannot be watched: {type(error).__name__}: {text}"))

    def _watch(self) -> None:
        pipes: dict[Any, int] = {c.connection: i for i, c in enumerate(self.children)}
        while self.death is None:
            seconds = _POLL_S if self._hearsay is None else self._hearsay[0] - time.monotonic()
            for source in wait([*pipes, self._woken], max(0.0, seconds)):
                if source is self._woken:
                    return
                self._take(pipes[source])
            for index, child in enumerate(self.children):
                if child.has_ended:
                    self.die(self.error(index, child.describe_end()))
            if self._hearsay is not None and time.monotonic() >= self._hearsay[0]:
                self.die(self._hearsay[1])

    def _take(self, index: int) -> None:
        child = self.children[index]
        try:
            kind, *content = child.connection.recv()
        except (EOFError, OSError):
            self.die(self.error(index, child.describe_end()))
            return
        if kind == "began":
            self.began[index] = content[0]
            return
        if kind == "reply":
            with self.changed:
                self.replies[index].append(content[0])
                self.changed.notify_all()
            return
        is_hearsay, (name, text, details) = content
        logger.debug("rank %d: %s", index + 1, details)
        if is_hearsay:
            if self._hearsay is None:
                error = self.error(index, text, is_hearsay=True)
                self._hearsay = time.monotonic() + _CAUSE_S, error
            return
        own = None if self.has_started else start_error(f"rank {index + 1}", name, text)
        what = "failed in a step" if self.has_started else "could not start"
        text = text if self.has_started else with_hint(text)
        self.die(own or self.error(index, f"{what}: {name}: {text}"))

    def error(self, index: int, how: str, *, is_hearsay: bool = False) -> EngineDeadError:
        """The error that says what became of a worker."""
        child, rank = self.children[index], index + 1
        return EngineDeadError(
            f"rank {rank} (pid {child.pid}, {self.devices[index]}) {how}",
            rank=rank,
            pid=child.pid,
            device=self.devices[index],
            last_lines=tuple(child.last_lines),
            is_hearsay=is_hearsay,
        )

    def die(self, error: DiffulexError) -> DiffulexError:
        """Ends all workers; returns the first cause there was."""
        with self.changed:
            if self.death is None:
                self.death = error
                try:
                    if self.on_death is not None:
                        self.on_death(error)
                finally:
                    self._kill_all()
                    self.changed.notify_all()
            return self.death

    def _kill_all(self) -> None:
        for rank, child in enumerate(self.children, 1):
            try:
                child.process.kill()
            except Exception as failure:  # noqa: PERF203 (of a cluster; the others end all the same)
                logger.warning("rank %d cannot be killed: %s", rank, failure)

    def close(self, message: bytes | None = None) -> None:
        """Ends the workers, which get this last message first. Idempotent."""
        if os.getpid() != self._pid:  # a fork: they are not its own
            return
        if (
            threading.current_thread() is self._reader
        ):  # where a group was collected; it has to end first
            threading.Thread(target=self.close, name="diffulex-ranks-end").start()
            return
        with contextlib.suppress(OSError):
            self._waker.send(None)
        self._reader.join()
        is_graceful = message is not None and self.death is None
        for child in self.children if is_graceful else ():
            with contextlib.suppress(OSError):
                child.connection.send_bytes(message or b"")
        if not is_graceful:
            self._kill_all()
        stop_all(self.children)
        for end in (self._woken, self._waker):
            end.close()
        lead_ranks(-1)


class WorkerGroup:
    """Starts the workers of all ranks but the first, and ends them with itself.

    Args:
        target: `module:function` that each of them runs, see `ChildProcess`.
        size: ranks there are, this process included.
        devices: where each of them runs, as shown in errors.
        environment: variables in which they differ from this process.
    """

    def __init__(
        self, target: str, size: int, devices: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        children: list[ChildProcess] = []
        starter = rank_starter()
        #: As in `RankStarter`.
        self.host, self.shares_memory = starter.host, starter.shares_memory
        try:
            for rank in range(1, size):
                children.append(starter.start(target, rank, environment))  # noqa: PERF401 (ended below)
        except BaseException:
            stop_all(children, 0.0)
            raise
        self._pipes = _Pipes(children, devices)
        self._end = weakref.finalize(self, self._pipes.close)
        self._sending = threading.Lock()

    @property
    def size(self) -> int:
        """Ranks there are."""
        return len(self._pipes.children) + 1

    @property
    def death(self) -> DiffulexError | None:
        """Why the group is dead; None: it is alive."""
        return self._pipes.death

    def on_death(self, call: Callable[[DiffulexError], None] | None) -> None:
        """What is called with `death`, for example to leave an exchange with ranks that are gone; it
        must not wait."""
        self._pipes.on_death = call

    def check(self) -> None:
        """Raises `death`, if there is one."""
        if self._pipes.death is not None:
            raise self._pipes.death

    def send_each(self, messages: Sequence[Any], handle: int | None = None) -> None:
        """Sends every worker its message, and a file after it. What one that is gone would have read is
        lost, as `check` will tell."""
        with self._sending:
            for child, message in zip(self._pipes.children, messages, strict=True):
                with contextlib.suppress(OSError):
                    child.connection.send_bytes(ForkingPickler.dumps(message))
                    if handle is not None:
                        send_handle(child.connection, handle, child.pid)

    def send(self, message: Any, handle: int | None = None) -> None:
        """Sends all workers one message, as `send_each`."""
        self.send_each([message] * (self.size - 1), handle)

    def replies(self, what: str, timeout_s: float, limit: str) -> list[Any]:
        """The next reply of every worker.

        Args:
            what: what they do before it, for the error.
            timeout_s: longest wait.
            limit: how that time is named.

        Raises:
            DiffulexError: the group is dead, or a worker took too long, of which it is dead now.
        """
        pipes, end = self._pipes, time.monotonic() + timeout_s
        with pipes.changed:
            while not all(pipes.replies) and pipes.death is None:
                left = end - time.monotonic()
                if left <= 0:
                    late = next(i for i, got in enumerate(pipes.replies) if not got)
                    pipes.die(pipes.error(late, f"did not {what} within {limit}"))
                    break
                pipes.changed.wait(left)
            self.check()
            return [got.popleft() for got in pipes.replies]

    def skew_s(self, told: float) -> float | None:
        """Seconds from `told`, a time of `time.monotonic`, to the last worker that has said when it began
        what it was told of then; None: one has not said it yet, or may have another clock."""
        began = min(self._pipes.began)
        is_known = self.shares_memory and began >= told
        return max(self._pipes.began) - told if is_known else None

    def started(self) -> None:
        """Every rank is ready: errors of workers are those of steps from now on."""
        self._pipes.has_started = True

    def fail(self, error: BaseException, what: str, *, is_hearsay: bool) -> NoReturn:
        """Ends the group, in which this rank has failed; raises why, or what is no `Exception` itself.

        Args:
            error: what it raised.
            what: what it was doing.
            is_hearsay: the cause is another rank, which may have shown it already or will.
        """
        pipes = self._pipes
        if is_hearsay:
            with pipes.changed:
                pipes.changed.wait_for(lambda: pipes.death is not None, _CAUSE_S)
        text = " ".join(str(error).split())
        if is_hearsay:
            text = f"{text} ({what})"
        else:
            text = f"rank 0 failed in {what}: {type(error).__name__}: {text}"
        death = pipes.die(EngineDeadError(text, pid=os.getpid(), is_hearsay=is_hearsay))
        if not isinstance(error, Exception):
            raise error
        raise death from error

    def disagree(self, rank: int, text: str) -> NoReturn:
        """Ends the group, in which a rank has decided something else than this one."""
        raise self._pipes.die(EngineDeadError(text, rank=rank))

    def close(self, message: Any) -> None:
        """Ends the workers, which get this last message first. Idempotent."""
        if self._end.detach() is not None:
            self._pipes.close(bytes(ForkingPickler.dumps(message)))
