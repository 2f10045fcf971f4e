# SPDX-License-Identifier: Apache-2.0
"""The frontend of a server that is one process: its backend is an `EngineLoop`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from diffulex.log import get_logger
from diffulex.serving.engine_loop import EngineLoop, Operation
from diffulex.serving.frontend import FrontendManager
from diffulex.wire.protocol import (
    ServingAbort,
    ServingAck,
    ServingCommand,
    ServingError,
    ServingGenerate,
    ServingHeartbeat,
    ServingMessage,
    ServingReply,
    ServingShutdown,
)

__all__ = ["InprocFrontend"]

logger = get_logger(__name__)

_HEARTBEAT_S = 1.0


class _LoopChannel:
    """Both queues of a frontend, with an engine loop at the other end."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._events: asyncio.Queue[ServingMessage] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def put(self, command: ServingCommand) -> None:
        """Takes a command of the frontend."""
        if isinstance(command, ServingGenerate):
            self._start(command.rid, self._generate(command, self._tasks.get(command.rid)))
        elif isinstance(command, ServingAbort):
            task = self._tasks.get(command.rid)
            if task is not None:
                task.cancel()
        elif not isinstance(command, ServingShutdown) and command.op_id is not None:
            self._start(command.op_id, self._operate(command))

    async def get(self) -> ServingMessage:
        """The next event."""
        return await self._events.get()

    def send(self, message: ServingMessage) -> None:
        """Gives the frontend an event."""
        self._events.put_nowait(message)

    def stop(self) -> None:
        """Ends what is in progress. Idempotent."""
        for task in self._tasks.values():
            task.cancel()

    def _start(self, name: str, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._forget(name, task))

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        # A later request may have the name by now.
        if self._tasks.get(name) is task:
            del self._tasks[name]

    async def _generate(
        self, command: ServingGenerate, previous: asyncio.Task[None] | None
    ) -> None:
        """Runs a request after the aborted one that had the same name."""
        if previous is not None:
            await asyncio.wait({previous})
        is_complete = False
        try:
            async with aclosing(self._loop.stream_command(command)) as events:
                async for event in events:
                    is_complete = isinstance(event, (ServingReply, ServingError))
                    self.send(event)
        except (RuntimeError, ValueError) as error:
            if not is_complete:
                self.send(ServingError(command.rid, str(error), "engine_dead"))

    async def _operate(self, command: Operation) -> None:
        assert command.op_id is not None
        try:
            self.send(await self._loop.operate(command))
        except RuntimeError as error:
            self.send(ServingAck(command.op_id, False, str(error)))


class InprocFrontend(FrontendManager):
    """Limits, timeouts, drain and states are those of every frontend.

    Args:
        loop: started and stopped with the frontend.
        on_ready: called with the engine's report when it serves.
        on_dead: called with the reason when the engine failed.
        options: as for `FrontendManager`.
    """

    def __init__(
        self,
        loop: EngineLoop,
        *,
        model_id: str | None = None,
        on_ready: Callable[[Mapping[str, Any]], None] = lambda info: None,
        on_dead: Callable[[str], None] = lambda reason: None,
        **options: Any,
    ) -> None:
        self._channel = _LoopChannel(loop)
        super().__init__(
            model_id=model_id or loop.model_id,
            send_backend=self._channel,
            recv_backend=self._channel,
            **options,
        )
        self._loop = loop
        self._on_ready = on_ready
        self._on_dead = on_dead
        self._beat_task: asyncio.Task[None] | None = None
        self.backend_starting()

    async def start(self) -> None:
        """Builds the engine and starts serving, once."""
        if not self._loop.is_running and self._beat_task is None:
            await self._loop.start()
            engine = self._loop.engine
            if self.tokenizer is not None:
                engine.detokenize_snapshots = False  # this side makes their text
            describe = getattr(engine, "serving_info", dict)
            self.backend_ready(await self._loop.call_engine(describe))
            self._beat_task = asyncio.create_task(self._beat(), name="diffulex-heartbeat")
            self._on_ready(self.info)
        await super().start()

    async def stop(self) -> None:
        """Ends every request and releases the engine. Idempotent."""
        if self._beat_task is not None:
            self._beat_task.cancel()
            with suppress(asyncio.CancelledError):
                await self._beat_task
        await super().stop()
        await self._loop.stop()

    async def _beat(self) -> None:
        while self._loop.is_running:
            self._channel.send(
                ServingHeartbeat(
                    ts=time.time(),
                    step_seq=self._loop.step_seq,
                    step_running_s=self._loop.step_running_s,
                    stats=self._loop.stats,
                )
            )
            await asyncio.sleep(_HEARTBEAT_S)
        reason = "the engine loop ended"
        self.backend_died(reason)
        self._on_dead(reason)
