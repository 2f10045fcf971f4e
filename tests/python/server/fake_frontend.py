# SPDX-License-Identifier: Apache-2.0
"""A frontend that answers from a script, for tests of the HTTP side."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from diffulex.serving.frontend import FrontendLimits, OperationFailed, RequestFailed, ServerState
from diffulex.wire.protocol import (
    ServingBufferSnapshot,
    ServingDelta,
    ServingError,
    ServingEvent,
    ServingGenerate,
    ServingReply,
)

MASK = 9
Script = Callable[[ServingGenerate], Sequence[ServingEvent]]


class MinimalFake:
    """Only the mandatory members.

    Attributes:
        commands: everything that was asked.
        num_aborted: commands that were closed before their reply.
        script: makes the events of a command; `pieces` of text by default.
    """

    model_id = "fake"

    def __init__(self, pieces: Sequence[str] = ("Hel", "lo ", "wörld")) -> None:
        self.pieces = tuple(pieces)
        self.commands: list[ServingGenerate] = []
        self.num_aborted = 0
        self.delay_s = 0.0
        self.script: Script = self.answer
        self._ids = itertools.count()

    def new_request_id(self) -> str:
        return f"diffulex-{next(self._ids)}"

    def answer(self, command: ServingGenerate) -> list[ServingEvent]:
        """One token per piece."""
        rid, mode = command.rid, command.stream_mode
        events: list[ServingEvent] = []
        for offset, piece in enumerate(self.pieces):
            if mode in ("denoise", "both"):
                ids = [offset + 1] + [MASK] * (len(self.pieces) - offset - 1)
                start = 5 + offset
                events.append(
                    ServingBufferSnapshot(
                        rid, offset, start, start + len(ids), piece + "▨", ids, offset + 2,
                        committed=offset, mask_token_id=MASK,
                    )
                )  # fmt: skip
            if mode in ("block_append", "both"):
                events.append(ServingDelta(rid, offset, piece, [offset + 1], offset + 2))
        return [*events, self.reply(command)]

    def reply(self, command: ServingGenerate, **fields: Any) -> ServingReply:
        """The answer to a command."""
        num = len(self.pieces)
        return ServingReply(
            **{
                "rid": command.rid,
                "text": "".join(self.pieces),
                "token_ids": list(range(1, num + 1)),
                "nfe": 2 * num,
                "finish_reason": "max_new_tokens_reached",
                "prompt_tokens": 5,
                "cached_tokens": 4,
                "prefill_steps": 1,
                "decode_steps": 2 * num - 1,
                "prefill_output_tokens": 0,
                "engine_decode_tokens": num,
                "engine_decode_time_s": 0.5,
                "prefill_time_s": 0.25,
                "queue_time_s": 0.01,
                "ttft_s": 0.1,
                "e2e_time_s": 1.0,
                "seed": command.sampling_params.seed,
                **fields,
            }
        )

    async def generate(
        self, command: ServingGenerate, *, is_disconnected: Any = None
    ) -> ServingReply:
        async for event in self.generate_stream(command, is_disconnected=is_disconnected):
            if isinstance(event, ServingError):
                raise RequestFailed(event)
            if isinstance(event, ServingReply):
                return event
        raise RuntimeError("no reply")

    async def generate_stream(
        self, command: ServingGenerate, *, is_disconnected: Any = None
    ) -> AsyncIterator[ServingEvent]:
        self.commands.append(command)
        is_finished = False
        try:
            for event in self.script(command):
                await asyncio.sleep(self.delay_s)
                is_finished = isinstance(event, (ServingReply, ServingError))
                yield event
        finally:
            if not is_finished:
                self.num_aborted += 1


class FakeFrontend(MinimalFake):
    """Everything that the application asks of a frontend; tests replace what they are about."""

    def __init__(self, pieces: Sequence[str] = ("Hel", "lo ", "wörld")) -> None:
        super().__init__(pieces)
        self.tokenizer: Any = None
        self.info: dict[str, Any] = {}
        self.limits = FrontendLimits(max_queue_size=0)
        self.stats: dict[str, Any] = {}
        self.counters: dict[str, int] = {}
        self.on_abort: Callable[[str, str], None] | None = None
        self.state = ServerState.READY
        self.heartbeat_age_s: float | None = None
        self.num_inflight = 0
        self.degraded = ()
        self.retry_after_s = 1

    @property
    def is_healthy(self) -> bool:
        return self.state == ServerState.READY

    async def start(self) -> None:
        """Nothing is to be started."""

    async def stop(self) -> None:
        """Nothing is to be stopped."""

    def has_request(self, rid: str) -> bool:
        return False

    async def abort_request(self, rid: str) -> bool:
        return False

    async def start_profile(self, prefix: str | None = None) -> dict[str, Any]:
        raise OperationFailed("profiler: expected an engine that has one, got one without")

    async def stop_profile(self) -> dict[str, Any]:
        raise OperationFailed("profiler: expected an engine that has one, got one without")

    async def flush_cache(self) -> dict[str, Any]:
        return {"num_dropped_units": 0}

    async def control(self, action: str, path: str | None = None) -> dict[str, Any]:
        return {}
