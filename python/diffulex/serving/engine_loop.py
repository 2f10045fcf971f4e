# SPDX-License-Identifier: Apache-2.0
"""An engine and its frontend in one process, for tests and for programs that embed it."""

from __future__ import annotations

import asyncio
import reprlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, SupportsIndex

from diffulex.config.sampling_params import SamplingParams
from diffulex.errors import PromptError
from diffulex.serving.backend_worker import default_engine_factory
from diffulex.serving.frontend import FrontendManager
from diffulex.serving.frontend_errors import BackendUnavailable, ClientDisconnected, RequestFailed
from diffulex.serving.frontend_state import FrontendLimits
from diffulex.serving.inproc import InprocBackend, QueuedCommand
from diffulex.serving.operations import Operation
from diffulex.wire.protocol import (
    ChatInput,
    PromptInput,
    ServingAck,
    ServingEvent,
    ServingGenerate,
    ServingInput,
    ServingReply,
    StreamMode,
)

__all__ = ["EngineLoop", "GenerateResult", "QueuedCommand", "default_engine_factory"]

GenerateResult = ServingReply
Prompt = str | list[int] | ServingInput

_DISCONNECT_POLL_S = 0.5
_STOPPED = "EngineLoop stopped before request completion"
_END_CODES = ("server_shutdown", "engine_dead")


def _prompt_input(prompt: object) -> PromptInput:
    """The input for a text or token ids; PromptError for everything else."""
    if isinstance(prompt, str):
        return PromptInput(prompt)
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray))
    if not is_list or not all(_is_id(item) for item in prompt):  # type: ignore[attr-defined]
        raise PromptError(f"prompt: expected a text or token ids, got {reprlib.repr(prompt)}")
    return PromptInput([int(item) for item in prompt])  # type: ignore[attr-defined]


def _is_id(value: object) -> bool:
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


class EngineLoop(InprocBackend):
    """Runs an engine beside the caller's event loop. Belongs to one event loop.

    Args:
        model: name or directory of the checkpoint.
        engine_kwargs: settings of the engine.
        engine_factory: makes the engine; None: the real one.
        idle_sleep_s: accepted for programs that pass it; an idle engine waits without polling.
    """

    def __init__(
        self,
        model: str,
        engine_kwargs: Mapping[str, Any] | None = None,
        *,
        engine_factory: Callable[..., Any] | None = None,
        idle_sleep_s: float = 0.001,
    ) -> None:
        super().__init__(model, engine_kwargs, engine_factory=engine_factory)
        self.idle_sleep_s = idle_sleep_s
        self._frontend: FrontendManager | None = None
        self._opening = asyncio.Lock()

    @property
    def stats(self) -> dict[str, Any]:
        """Numbers of the engine; the shape is that of heartbeats."""
        return self.status.stats

    @property
    def step_seq(self) -> int:
        """Number of the engine's last step."""
        return self.status.step_seq

    @property
    def step_running_s(self) -> float:
        """How long the step in progress has taken so far; 0 when there is none."""
        return self.status.running_s()

    async def start(self) -> None:
        """Builds the engine and starts serving; returns when it is built. Once is enough.

        After a stop or a failed step it builds another one.

        Raises:
            Exception: whatever the construction raised.
        """
        async with self._opening:  # one of several calls builds, the others wait for it
            if not self.is_running:
                if self._frontend is not None:
                    await self._frontend.stop()  # the frontend of the failed engine
                self._frontend = self._begin_with_frontend()
            frontend = self._frontend
        assert frontend is not None
        frontend.info = await self.open()
        await frontend.start()

    def _begin_with_frontend(self) -> FrontendManager:
        """Begins to build an engine; its frontend, which is not started."""
        frontend = FrontendManager(
            model_id=self.model_id,
            send_backend=self.commands,
            recv_backend=self.events,
            request_state_wait_timeout_s=_DISCONNECT_POLL_S,
            limits=FrontendLimits(max_queue_size=0),
            operation_timeout_s=None,
        )
        task = self.begin()
        task.add_done_callback(lambda _: frontend.backend_died("the engine loop ended"))
        return frontend

    async def stop(self) -> None:
        """Ends every request and releases the engine. Idempotent."""
        if self._frontend is not None:
            await self._frontend.stop()
        await self.join()

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
        try:
            reply: ServingReply = await self._running().generate(command)
        except RequestFailed as failed:
            if failed.error.code not in _END_CODES:
                raise
            await self.join()
            raise RuntimeError(_STOPPED) from self.error
        return reply

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
        events = self._running().generate_stream(command, is_disconnected=is_disconnected)
        async with aclosing(events):
            try:
                async for event in events:
                    yield event
            except ClientDisconnected:
                return

    async def operate(self, command: Operation) -> ServingAck:
        """Runs an operation that generates nothing; the command must have an `op_id`.

        Raises:
            RuntimeError: the loop does not run, or stopped before the answer.
            ValueError: there is no `op_id`, or it is in use.
        """
        frontend = self._running()
        if command.op_id is None:
            raise ValueError("EngineLoop.operate: expected a command with an op_id, got none")
        try:
            return await frontend.operate(command)
        except BackendUnavailable:
            await self.join()
            raise RuntimeError(_STOPPED) from self.error

    async def render_chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text the model sees for a conversation."""
        self._running()
        render = self.engine.render_chat_prompt_for_serving
        text: str = await self.call_engine(render, messages)
        return text

    def has_waiters(self) -> bool:
        """Whether a request or an operation of this object is in flight."""
        frontend = self._frontend
        return frontend is not None and frontend.num_inflight + frontend.num_operations > 0

    def _running(self) -> FrontendManager:
        """The frontend; RuntimeError when no engine serves."""
        if self._frontend is None or not self.is_running or self.engine is None:
            message = "EngineLoop: expected it to run, got one that does not"
            raise RuntimeError(message) from self.error
        return self._frontend

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
