# SPDX-License-Identifier: Apache-2.0
"""Requests of a frontend: which are refused, how they are sent, and which events wait for their readers."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from diffulex.wire.messages import JobCommand, JobEvent, ServingError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["FrontendLimits", "FrontendReqState", "ServerState", "prepared", "refusal_of"]

Job = TypeVar("Job", bound=JobCommand)

_MAX_QUEUED = 64


class ServerState(str, Enum):
    """What the server is doing; the value is what /health reports."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    UNRESPONSIVE = "unresponsive"
    STUCK = "stuck"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class FrontendLimits:
    """Backpressure; 0 switches a limit off.

    Attributes:
        max_queue_size: requests in flight beyond those the engine runs at a time.
        max_queued_tokens: prompt tokens and max_tokens of all requests in flight; for jobs of other
            kinds the sum of their sizes.
        queue_timeout_s: until a request is first scheduled.
        request_timeout_s: until it is complete.
        denoise_min_interval_ms: between drafts of one stream.
    """

    max_queue_size: int = 1024
    max_queued_tokens: int = 0
    queue_timeout_s: float = 0.0
    request_timeout_s: float = 0.0
    denoise_min_interval_ms: float = 0.0

    def max_inflight(self, info: Mapping[str, Any]) -> int | None:
        """Most requests at a time; None: any number.

        Args:
            info: what the backend said about itself.
        """
        if self.max_queue_size <= 0:
            return None
        return self.max_queue_size + int(info.get("max_num_reqs", 0))


@dataclass
class FrontendReqState:
    """A request in flight.

    Attributes:
        events: not yet read, in order.
        event: set while there are any.
        generation: that of its command; an earlier request of the same `rid` had another one.
        num_tokens: what it counts against `max_queued_tokens`.
        num_coalesced: drafts that were merged into others.
        last_draft_at: when the last draft was read.
    """

    rid: str
    events: deque[JobEvent] = field(default_factory=deque)
    event: asyncio.Event = field(default_factory=asyncio.Event)
    generation: int = 0
    created: float = field(default_factory=time.monotonic)
    num_tokens: int = 0
    num_coalesced: int = 0
    closed: bool = False
    last_draft_at: float = float("-inf")
    polled_at: float = field(default_factory=time.monotonic)

    def append(self, event: JobEvent) -> None:
        """Adds an event. A reader that is slow gets fewer and larger ones, never less."""
        if self.closed:
            return
        self.closed = event.ends_job
        last = self.events[-1] if self.events else None
        merged = last.merged(event) if last is not None and last.is_draft else None
        if merged is not None:
            self.num_coalesced += 1
            self.events[-1] = merged
        else:
            self.events.append(event)
        if len(self.events) > _MAX_QUEUED:
            self._compact()
        self.event.set()

    def _compact(self) -> None:
        """Results in one, drafts in as few as possible, and what ends the stream."""
        results: list[JobEvent] = []
        drafts: list[JobEvent] = []
        end = [event for event in self.events if event.ends_job]
        for event in self.events:
            if event.ends_job:
                continue
            kept = drafts if event.is_draft else results
            merged = kept[-1].merged(event) if kept else None
            if merged is None:
                kept.append(event)
                continue
            kept[-1] = merged
            self.num_coalesced += event.is_draft
        self.events = deque([*results, *drafts, *end])

    def pop(self) -> JobEvent:
        """The oldest event."""
        event = self.events.popleft()
        if not self.events:
            self.event.clear()
        return event


# Why a request is refused in a state: message and code.
_REFUSING = {
    ServerState.STARTING: ("the engine is loading", "starting"),
    ServerState.DRAINING: ("the server is shutting down", "draining"),
    ServerState.STOPPED: ("the server is shutting down", "server_shutdown"),
    ServerState.DEAD: ("the engine process is gone", "engine_dead"),
    ServerState.UNRESPONSIVE: ("the engine process gives no sign of life", "engine_unresponsive"),
}


def prepared(command: Job, limits: FrontendLimits, generation: int) -> Job:
    """The command of this generation, without what the wire cannot hold, with the server's limits."""
    command = copy.copy(command.sendable())  # the caller's may be sent again
    command.generation = generation
    if command.queue_timeout_s is None and limits.queue_timeout_s > 0:
        command.queue_timeout_s = limits.queue_timeout_s
    return command


def refusal_of(
    command: JobCommand,
    state: ServerState,
    limits: FrontendLimits,
    max_inflight: int | None,
    inflight: Collection[FrontendReqState],
) -> ServingError | None:
    """Why a request is not even sent.

    Args:
        max_inflight: requests at a time; None: any number.
        inflight: those there are.
    """
    rid = command.rid
    if state in _REFUSING:
        message, code = _REFUSING[state]
        return ServingError(rid, message, code, 503, retryable=True)
    if max_inflight is not None and len(inflight) >= max_inflight:
        text = f"expected at most {max_inflight} requests in flight"
        return ServingError(rid, text, "queue_full", 429, retryable=True)
    if limits.max_queued_tokens > 0:
        wanted = sum(item.num_tokens for item in inflight) + command.size
        if wanted > limits.max_queued_tokens:
            text = f"expected at most {limits.max_queued_tokens} tokens in flight, got {wanted}"
            return ServingError(rid, text, "queue_full", 429, retryable=True)
    return None
