# SPDX-License-Identifier: Apache-2.0
"""An engine and its event loop in one process, for tests and for programs that embed it.

    caller ── command ──> queue ──> tick on the engine's thread ──> events ──> future or stream

The engine is touched by one thread only, that of `call_engine`.
"""

from __future__ import annotations

import asyncio
import itertools
import reprlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from diffulex.config.sampling_params import SamplingParams
from diffulex.errors import PromptError
from diffulex.log import get_logger
from diffulex.serving.backend_worker import default_engine_factory
from diffulex.serving.frontend import RequestFailed
from diffulex.wire.protocol import (
    ChatInput,
    PromptInput,
    ServingAbort,
    ServingAck,
    ServingCommand,
    ServingError,
    ServingEvent,
    ServingFlushCache,
    ServingGenerate,
    ServingInput,
    ServingProfileStart,
    ServingProfileStop,
    ServingReply,
    StreamMode,
)

__all__ = ["EngineLoop", "GenerateResult", "QueuedCommand", "default_engine_factory"]

logger = get_logger(__name__)

T = TypeVar("T")
GenerateResult = ServingReply
Prompt = str | list[int] | ServingInput
Operation = ServingProfileStart | ServingProfileStop | ServingFlushCache

_DISCONNECT_POLL_S = 0.5
_STATS_INTERVAL_S = 0.5
_STOPPED = "EngineLoop stopped before request completion"


@dataclass(frozen=True, slots=True)
class QueuedCommand:
    """A command on its way to the engine."""

    command: ServingCommand


@dataclass(slots=True)
class _TickResult:
    """What one call on the engine's thread brought."""

    events: list[ServingEvent | ServingAck]
    is_finished: bool


def _prompt_input(prompt: object) -> PromptInput:
    """The input for a text or token ids; PromptError for everything else."""
    if isinstance(prompt, str):
        return PromptInput(prompt)
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray))
    if not is_list or not all(_is_id(item) for item in prompt):  # type: ignore[attr-defined]
        raise PromptError(f"prompt: expected a text or token ids, got {reprlib.repr(prompt)}")
    return PromptInput([int(item) for item in prompt])  # type: ignore[attr-defined]


def _is_id(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


class EngineLoop:
    """Runs an engine beside the caller's event loop. Belongs to one event loop.

    Args:
        model: name or directory of the checkpoint.
        engine_kwargs: settings of the engine.
        engine_factory: makes the engine; None: the real one.
        idle_sleep_s: pause before requests that the engine lost are given up.
    """

    def __init__(
        self,
        model: str,
        engine_kwargs: Mapping[str, Any] | None = None,
        *,
        engine_factory: Callable[..., Any] | None = None,
        idle_sleep_s: float = 0.001,
    ) -> None:
        self.model = model
        self.engine_kwargs = dict(engine_kwargs or {})
        self.engine_factory = engine_factory or default_engine_factory
        self.idle_sleep_s = idle_sleep_s
        self.engine: Any = None
        #: Numbers of the engine as of the last step; the shape is that of heartbeats.
        self.stats: dict[str, Any] = {}
        self.step_seq = 0
        self._step_started: float | None = None
        self._stats_at = 0.0
        self._queue: asyncio.Queue[QueuedCommand] = asyncio.Queue()
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[None] | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._error: BaseException | None = None
        self._futures: dict[str, asyncio.Future[ServingReply]] = {}
        self._streams: dict[str, asyncio.Queue[ServingEvent | None]] = {}
        self._acks: dict[str, asyncio.Future[ServingAck]] = {}
        self._admitted: set[str] = set()
        #: Of the requests that somebody waits for, by rid: a rid may be used again.
        self._current: dict[str, int] = {}
        self._generations = itertools.count(1)

    # Life.

    @property
    def model_id(self) -> str:
        """The name clients see."""
        return str(self.engine_kwargs.get("model_name") or self.model)

    @property
    def is_running(self) -> bool:
        """Whether requests are served."""
        return self._task is not None and not self._task.done()

    @property
    def step_running_s(self) -> float:
        """How long the step in progress takes already; 0 when there is none."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    async def start(self) -> None:
        """Builds the engine and starts serving; returns when it is built. Once is enough.

        Raises:
            Exception: whatever the construction raised.
        """
        if self.is_running:
            assert self._started is not None
            await asyncio.shield(self._started)
            return
        self._queue, self._stop, self._error = asyncio.Queue(), asyncio.Event(), None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="diffulex-engine")
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self.serve(), name="diffulex-engine-loop")
        try:
            await asyncio.shield(self._started)
        except Exception:
            await self._join()
            raise

    async def stop(self) -> None:
        """Ends every request and releases the engine. Idempotent."""
        self._stop.set()
        await self._join()

    async def _join(self) -> None:
        task, executor = self._task, self._executor
        if task is not None:
            with suppress(Exception):
                await asyncio.shield(task)
        if executor is not None:
            executor.shutdown(wait=True)
            self._executor = None

    async def serve(self) -> None:
        """The task: engine, loop, end."""
        try:
            self.engine = await self.call_engine(
                self.engine_factory, self.model, **self.engine_kwargs
            )
        except BaseException as error:
            self._error = error
            self.mark_started(error)
            if not isinstance(error, Exception):
                raise
            return
        self.mark_started(None)
        try:
            await self.run_loop()
        except Exception as error:
            logger.exception("the engine failed")
            self._error = error
        finally:
            self.discard_queued_commands()
            failure = RuntimeError(_STOPPED)
            failure.__cause__ = self._error
            self.fail_pending(failure)
            engine, self.engine = self.engine, None
            await self.call_engine(engine.exit)

    def mark_started(self, error: BaseException | None) -> None:
        """Tells `start` that the engine exists, or why not."""
        assert self._started is not None
        if self._started.done():
            return
        if error is None:
            self._started.set_result(None)
        elif isinstance(error, Exception):
            self._started.set_exception(error)
        else:
            self._started.cancel()  # nobody may be left who would ask for it

    async def call_engine(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The result of a call on the engine's thread."""
        if self._executor is None:
            raise RuntimeError("EngineLoop: expected it to run, got one that does not")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(function, *args, **kwargs))

    # Requests.

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, *, rid: str | None = None
    ) -> ServingReply:
        """The whole answer. Cancelling the call aborts the request.

        Raises:
            PromptError: the prompt is neither a text nor token ids.
            RequestFailed: the request ended with an error.
            RuntimeError: the loop does not run, or stopped before the answer.
        """
        command = self._command(prompt, sampling_params, rid)
        self._check_running(command.rid)
        future: asyncio.Future[ServingReply] = asyncio.get_running_loop().create_future()
        self._futures[command.rid] = future
        try:
            self._begin(command)
            return await future
        finally:
            del self._futures[command.rid]
            self._leave(command.rid, is_complete=future.done() and not future.cancelled())

    async def generate_stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        stream_mode: StreamMode = "denoise",
        is_disconnected: Callable[[], Awaitable[bool]] | None = None,
        rid: str | None = None,
    ) -> AsyncGenerator[ServingEvent, None]:
        """The events of a request; the last one is its reply or an error.

        Closing the iterator early aborts the request; so does a client that left, which ends it.
        """
        command = self._command(prompt, sampling_params, rid)
        command.stream, command.stream_mode = True, stream_mode
        # Closed with this iterator, not by the garbage collector.
        events = self.stream_command(command, is_disconnected=is_disconnected)
        async with aclosing(events):
            async for event in events:
                yield event

    async def stream_command(
        self,
        command: ServingGenerate,
        *,
        is_disconnected: Callable[[], Awaitable[bool]] | None = None,
    ) -> AsyncGenerator[ServingEvent, None]:
        """`generate_stream` for a command that exists already."""
        self._check_running(command.rid)
        events: asyncio.Queue[ServingEvent | None] = asyncio.Queue()
        self._streams[command.rid] = events
        is_complete = False
        try:
            self._begin(command)
            while not is_complete:
                event = await self._next_event(events, is_disconnected)
                if event is None:
                    return
                is_complete = isinstance(event, (ServingReply, ServingError))
                yield event
        finally:
            del self._streams[command.rid]
            self._leave(command.rid, is_complete=is_complete)

    async def _next_event(
        self,
        events: asyncio.Queue[ServingEvent | None],
        is_disconnected: Callable[[], Awaitable[bool]] | None,
    ) -> ServingEvent | None:
        """None when the client has left."""
        if is_disconnected is None:
            return await events.get()
        while True:
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(events.get(), _DISCONNECT_POLL_S)
            if await is_disconnected():
                return None

    async def operate(self, command: Operation) -> ServingAck:
        """Runs an operation that generates nothing; the command must have an `op_id`."""
        self._check_running(None)
        if command.op_id is None:
            raise ValueError("EngineLoop.operate: expected a command with an op_id, got none")
        future: asyncio.Future[ServingAck] = asyncio.get_running_loop().create_future()
        self._acks[command.op_id] = future
        try:
            self._put(command)
            return await future
        finally:
            del self._acks[command.op_id]

    async def render_chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text the model sees for a conversation."""
        self._check_running(None)
        render = self.engine.render_chat_prompt_for_serving
        text: str = await self.call_engine(render, messages)
        return text

    def _command(
        self, prompt: Prompt, sampling_params: SamplingParams, rid: str | None
    ) -> ServingGenerate:
        value = prompt if isinstance(prompt, (PromptInput, ChatInput)) else _prompt_input(prompt)
        if not isinstance(sampling_params, SamplingParams):
            raise ValueError(f"sampling_params: expected SamplingParams, got {sampling_params!r}")
        return ServingGenerate(
            rid=rid or f"diffulex-{uuid.uuid4().hex}",
            input=value,
            sampling_params=sampling_params,
            created_time=time.time(),
        )

    def _check_running(self, rid: str | None) -> None:
        if not self.is_running or self._stop.is_set() or self.engine is None:
            message = "EngineLoop: expected it to run, got one that does not"
            raise RuntimeError(message) from self._error
        if rid is not None and (rid in self._futures or rid in self._streams):
            raise ValueError(f"rid: expected a new one, got {rid!r} again")

    def _put(self, command: ServingCommand) -> None:
        self._queue.put_nowait(QueuedCommand(command))

    def _begin(self, command: ServingGenerate) -> None:
        """Queues a request that somebody waits for from now on."""
        # A frontend numbers its commands itself.
        command.generation = command.generation or next(self._generations)
        self._current[command.rid] = command.generation
        self._put(command)

    def _leave(self, rid: str, *, is_complete: bool) -> None:
        """Forgets a request; the engine ends it if it has begun."""
        self._current.pop(rid, None)
        if rid in self._admitted:
            self._admitted.discard(rid)
            if not is_complete:
                self._put(ServingAbort(rid))

    # The loop.

    async def run_loop(self) -> None:
        """Ticks until stopped.

        Raises:
            Exception: what a tick raised.
        """
        is_finished = await self.call_engine(self.engine.is_finished)
        num_empty = 0
        while not self._stop.is_set():
            is_idle = is_finished and not self._admitted
            commands = await self.collect_ready_commands(wait_for_one=is_idle)
            if self._stop.is_set():
                return
            if not commands and is_idle:
                continue  # their waiters have left
            self._step_started = time.monotonic()
            result = await self.call_engine(self._tick, commands)
            self._step_started = None
            is_finished = result.is_finished
            self.resolve_events(result.events)
            is_lost = is_finished and not result.events and bool(self._admitted)
            num_empty = num_empty + 1 if is_lost and not commands else 0
            if num_empty:
                await self._give_up_lost(num_empty)

    def _tick(self, commands: list[ServingCommand]) -> _TickResult:
        """On the engine's thread."""
        self.step_seq += 1
        events = self.engine.run_serving_tick(commands)
        is_finished = bool(self.engine.is_finished())
        now = time.monotonic()
        report = getattr(self.engine, "serving_stats", None)
        # The last step before a pause counts in any case.
        if report is not None and (is_finished or now - self._stats_at >= _STATS_INTERVAL_S):
            self._stats_at, self.stats = now, report()
        return _TickResult(events, is_finished)

    async def _give_up_lost(self, num_empty: int) -> None:
        """The engine has no work, but requests wait: an event was lost."""
        if num_empty == 1:
            await asyncio.sleep(self.idle_sleep_s)
            return
        for rid in list(self._admitted):
            text = f"request {rid}: internal error, the engine lost it"
            self.resolve_events([ServingError(rid, text)])

    async def collect_ready_commands(self, wait_for_one: bool) -> list[ServingCommand]:
        """Everything queued; if asked to, waits for the first, or for the stop."""
        queued: list[QueuedCommand] = []
        if wait_for_one and self._queue.empty():
            first = await self._first_command()
            if first is None:
                return []
            queued.append(first)
        while not self._queue.empty():
            queued.append(self._queue.get_nowait())
        commands = [item.command for item in queued if self.should_admit(item.command)]
        self._admitted.update(
            command.rid for command in commands if isinstance(command, ServingGenerate)
        )
        return commands

    async def _first_command(self) -> QueuedCommand | None:
        get = asyncio.ensure_future(self._queue.get())
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({get, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if get.done():
            return get.result()
        get.cancel()
        return None

    def should_admit(self, command: ServingCommand) -> bool:
        """Whether somebody still waits for what a command starts."""
        if not isinstance(command, ServingGenerate):
            return True
        return self._current.get(command.rid) == command.generation

    def resolve_events(self, events: Sequence[ServingEvent | ServingAck]) -> None:
        """Hands events to whoever waits for them."""
        for event in events:
            if isinstance(event, ServingAck):
                ack = self._acks.get(event.op_id)
                if ack is not None and not ack.done():
                    ack.set_result(event)
                continue
            if event.generation not in (0, self._current.get(event.rid, 0)):
                continue  # of an aborted request
            if isinstance(event, (ServingReply, ServingError)):
                self._admitted.discard(event.rid)
            stream, future = self._streams.get(event.rid), self._futures.get(event.rid)
            if stream is not None:
                stream.put_nowait(event)
            elif future is not None and not future.done():
                if isinstance(event, ServingReply):
                    future.set_result(event)
                elif isinstance(event, ServingError):
                    future.set_exception(RequestFailed(event))

    def has_waiters(self) -> bool:
        """Whether anybody waits for an event."""
        return bool(self._futures or self._streams or self._acks)

    def discard_queued_commands(self) -> None:
        """Empties the queue."""
        while not self._queue.empty():
            self._queue.get_nowait()

    def fail_pending(self, exc: BaseException) -> None:
        """Ends every request: futures with the exception, streams with an error event."""
        self._admitted.clear()
        waiting: list[asyncio.Future[Any]] = [*self._futures.values(), *self._acks.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(exc)
        is_dead = exc.__cause__ is not None
        code, status = ("engine_dead", 500) if is_dead else ("server_shutdown", 503)
        message = f"{exc}: {exc.__cause__}" if is_dead else str(exc)
        for rid, events in self._streams.items():
            events.put_nowait(ServingError(rid, message, code, status))
