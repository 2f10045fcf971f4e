# SPDX-License-Identifier: Apache-2.0
"""A backend in a thread of this process, and its two queues.

event loop ── commands ──> SyncBackendWorker on the engine's thread ── events ──> event loop
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from diffulex.log import get_logger
from diffulex.serving.backend_worker import SyncBackendWorker
from diffulex.serving.heartbeat import StepStatus
from diffulex.wire import messages

__all__ = ["InprocBackend", "InprocCommands", "InprocEvents", "QueuedCommand"]

logger = get_logger(__name__)

T = TypeVar("T")

_NOT_RUNNING = "EngineLoop: expected it to run, got one that does not"


@dataclass(frozen=True, slots=True)
class QueuedCommand:
    """A command on its way to the engine."""

    command: messages.ServingCommand


@dataclass(frozen=True, slots=True)
class _QueuedCall:
    """A function on its way to the engine's thread."""

    function: Callable[[], Any]
    result: Future[Any]

    def run(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.function())
        except BaseException as error:
            self.result.set_exception(error)


class InprocCommands:
    """Commands from an event loop to a thread, and calls that the thread makes between them."""

    def __init__(self) -> None:
        self._items: deque[QueuedCommand | _QueuedCall] = deque()
        self._has_items = threading.Condition()
        self._is_waking = False
        self._is_stopped = False

    async def put(self, command: messages.ServingCommand) -> None:
        """Queues a command. An abort takes back what has not begun."""
        with self._has_items:
            is_withdrawn = isinstance(command, messages.ServingAbort) and self._withdraw(
                command.rid
            )
            if is_withdrawn or self._is_stopped:
                return
            self._items.append(QueuedCommand(command))
        self._wake_soon()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queues a call."""
        call = _QueuedCall(function, Future())
        with self._has_items:
            if self._is_stopped:
                raise RuntimeError(_NOT_RUNNING)
            self._items.append(call)
        self._wake_soon()
        return call.result

    def get(self, timeout_s: float | None = None) -> messages.ServingCommand:
        """The next command, on the engine's thread; queue.Empty when none came in time."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._has_items:
                while not self._items:
                    left = None if end is None else end - time.monotonic()
                    if self._is_stopped or (left is not None and left <= 0):
                        raise queue.Empty
                    self._has_items.wait(left)
                item = self._items.popleft()
            if isinstance(item, QueuedCommand):
                return item.command
            item.run()

    def empty(self) -> bool:
        """Whether no command is there; on the engine's thread."""
        while True:
            with self._has_items:
                if not self._items or isinstance(self._items[0], QueuedCommand):
                    return not self._items
                call = self._items.popleft()
            assert isinstance(call, _QueuedCall)
            call.run()

    def stop(self) -> None:
        """The backend leaves when it has read what is there; further commands are dropped."""
        with self._has_items:
            if not self._is_stopped:
                self._is_stopped = True
                self._items.append(QueuedCommand(messages.ServingShutdown()))
            self._has_items.notify()

    def open(self) -> None:
        """A thread is about to read."""
        with self._has_items:
            self._items.clear()
            # An event loop that ended may not have woken its thread.
            self._is_stopped = self._is_waking = False

    def close(self) -> None:
        """The thread has ended: nothing that is left will be done."""
        with self._has_items:
            left, self._items = self._items, deque()
            self._is_stopped = True
        for item in left:
            if isinstance(item, _QueuedCall) and item.result.set_running_or_notify_cancel():
                item.result.set_exception(RuntimeError(_NOT_RUNNING))

    def _withdraw(self, rid: str) -> bool:
        for item in self._items:
            command = item.command if isinstance(item, QueuedCommand) else None
            if isinstance(command, messages.JobCommand) and command.rid == rid:
                self._items.remove(item)
                return True
        return False

    def _wake_soon(self) -> None:
        """Wakes the thread when this turn of the event loop is over, so that it takes all of it."""
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        with self._has_items:
            self._has_items.notify()


class InprocEvents:
    """Events from a thread to an event loop."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[messages.ServingMessage] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_dropped = 0

    def open(self) -> None:
        """Belongs to the running event loop from now on; what is left of before is dropped."""
        self._loop, self._items = asyncio.get_running_loop(), asyncio.Queue()

    def put(self, message: messages.ServingMessage) -> None:
        """Hands the message to the event loop; from any thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, message)
        except RuntimeError:  # the event loop is closed
            self.num_dropped += 1

    async def get(self) -> messages.ServingMessage:
        """The next message."""
        return await self._items.get()

    def stop(self, linger_s: float = 0.0) -> None:
        """Nothing is to be closed."""


class InprocBackend:
    """An engine and its worker, in a thread. Belongs to one event loop at a time.

    Args:
        model: name or directory of the checkpoint.
        engine_kwargs: settings of the engine.
        engine_factory: makes the engine; None: the real one.
    """

    def __init__(
        self,
        model: str,
        engine_kwargs: Mapping[str, Any] | None = None,
        *,
        engine_factory: Callable[..., Any] | None = None,
    ) -> None:
        self.model = model
        self.engine_kwargs = dict(engine_kwargs or {})
        self.engine_factory = engine_factory
        self.commands = InprocCommands()
        self.events = InprocEvents()
        #: Why the engine ended, where it was not asked to.
        self.error: BaseException | None = None
        self._worker: SyncBackendWorker | None = None
        self._task: asyncio.Task[None] | None = None
        self._info: asyncio.Future[dict[str, Any]] | None = None

    @property
    def model_id(self) -> str:
        """The name clients see."""
        return str(self.engine_kwargs.get("model_name") or self.model)

    @property
    def engine(self) -> Any:
        """The engine, while it serves."""
        return None if self._worker is None else self._worker.engine

    @property
    def status(self) -> StepStatus:
        """Steps and numbers of the engine."""
        return StepStatus() if self._worker is None else self._worker.status

    @property
    def is_running(self) -> bool:
        """Whether commands are taken."""
        return self._task is not None and not self._task.done()

    async def open(self) -> dict[str, Any]:
        """Builds the engine and starts serving; what the engine says of itself. Once is enough.

        Raises:
            Exception: whatever the construction raised.
        """
        if not self.is_running:
            self.begin()
        assert self._info is not None
        return await asyncio.shield(self._info)

    def begin(self) -> asyncio.Task[None]:
        """Begins to build the engine, which must not run; the task that serves it."""
        self.error = None
        self.commands.open()
        self.events.open()
        self._worker = SyncBackendWorker(
            self.model,
            self.engine_kwargs,
            self.commands,
            self.events,
            self.engine_factory,
            ready_queue=_Ready(self._ready),
        )
        self._info = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(), name="diffulex-engine-loop")
        return self._task

    async def join(self, timeout_s: float | None = None) -> None:
        """Waits until the engine has ended; at most `timeout_s`."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)

    async def call_engine(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of a call on the engine's thread, between two ticks."""
        if not self.is_running:
            raise RuntimeError(_NOT_RUNNING) from self.error
        return await asyncio.wrap_future(self.commands.call(partial(function, *args, **kwargs)))

    async def _serve(self) -> None:
        worker, info = self._worker, self._info
        assert worker is not None
        assert info is not None
        executor = ThreadPoolExecutor(1, thread_name_prefix="diffulex-engine")
        try:
            await asyncio.get_running_loop().run_in_executor(executor, worker.run_forever)
        except Exception as error:
            self.error = error
            if info.done():
                logger.exception("the engine failed")
            else:
                info.set_exception(error)
        finally:
            worker.shutdown_requested = True
            info.cancel()  # without effect unless it is still loading
            executor.shutdown(wait=False)
            self.commands.close()

    def _ready(self, report: Mapping[str, Any]) -> None:
        """From the engine's thread."""
        assert self._info is not None
        info = self._info
        with suppress(RuntimeError):  # the event loop is closed
            info.get_loop().call_soon_threadsafe(_resolve, info, dict(report["info"]))


@dataclass(frozen=True, slots=True)
class _Ready:
    put: Callable[[dict[str, Any]], None]


def _resolve(info: asyncio.Future[dict[str, Any]], value: dict[str, Any]) -> None:
    if not info.done():
        info.set_result(value)
