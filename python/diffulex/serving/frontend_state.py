# SPDX-License-Identifier: Apache-2.0
"""Events of one request that wait for its reader, and the limits on how many may wait."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from diffulex.wire.protocol import (
    ServingBufferSnapshot,
    ServingDelta,
    ServingError,
    ServingEvent,
    ServingReply,
)

__all__ = ["FrontendLimits", "FrontendReqState", "ServerState", "merge_snapshots"]

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
        max_queued_tokens: prompt tokens and max_tokens of all requests in flight.
        queue_timeout_s: until a request is first scheduled.
        request_timeout_s: until it is complete.
        denoise_min_interval_ms: between snapshots of one stream.
    """

    max_queue_size: int = 1024
    max_queued_tokens: int = 0
    queue_timeout_s: float = 0.0
    request_timeout_s: float = 0.0
    denoise_min_interval_ms: float = 0.0


def merge_snapshots(
    old: ServingBufferSnapshot, new: ServingBufferSnapshot
) -> ServingBufferSnapshot | None:
    """One snapshot that says what both say; None where their texts cannot be joined."""
    num_kept = new.token_offset - old.token_offset
    if num_kept <= 0:
        return new
    if old.text is not None or new.text is not None:
        return None  # texts have no token boundaries
    confidences = None
    if old.confidences is not None and new.confidences is not None:
        confidences = old.confidences[:num_kept] + new.confidences
    blocks = None
    if old.blocks is not None and new.blocks is not None:
        shown = {block["id"] for block in new.blocks}
        blocks = [block for block in old.blocks if block["id"] not in shown] + new.blocks
    return dataclasses.replace(
        new,
        token_offset=old.token_offset,
        absolute_start=old.absolute_start,
        token_ids=old.token_ids[:num_kept] + new.token_ids,
        confidences=confidences,
        blocks=blocks,
    )


def _merge_deltas(old: ServingDelta, new: ServingDelta) -> ServingDelta:
    logprobs = None
    if old.logprobs is not None and new.logprobs is not None:
        logprobs = old.logprobs + new.logprobs
    return dataclasses.replace(
        new,
        token_offset=old.token_offset,
        text=old.text + new.text,
        token_ids=old.token_ids + new.token_ids,
        logprobs=logprobs,
    )


@dataclass
class FrontendReqState:
    """A request in flight.

    Attributes:
        events: not yet read, in order.
        event: set while there are any.
        generation: that of its command; an earlier request of the same `rid` had another one.
        num_tokens: what it counts against `max_queued_tokens`.
        num_coalesced: snapshots that were merged into others.
    """

    rid: str
    events: deque[ServingEvent] = field(default_factory=deque)
    event: asyncio.Event = field(default_factory=asyncio.Event)
    generation: int = 0
    created: float = field(default_factory=time.monotonic)
    num_tokens: int = 0
    num_coalesced: int = 0
    closed: bool = False
    last_snapshot_at: float = float("-inf")
    polled_at: float = field(default_factory=time.monotonic)

    def append(self, event: ServingEvent) -> None:
        """Adds an event. A reader that is slow gets fewer and larger ones, never less."""
        if self.closed:
            return
        self.closed = isinstance(event, (ServingReply, ServingError))
        last = self.events[-1] if self.events else None
        merged: ServingEvent | None = None
        if isinstance(event, ServingBufferSnapshot) and isinstance(last, ServingBufferSnapshot):
            merged = merge_snapshots(last, event)
            self.num_coalesced += merged is not None
        if merged is not None:
            self.events[-1] = merged
        else:
            self.events.append(event)
        if len(self.events) > _MAX_QUEUED:
            self._compact()
        self.event.set()

    def _compact(self) -> None:
        """One delta, one snapshot and what ends the stream."""
        delta: ServingDelta | None = None
        drafts: list[ServingBufferSnapshot] = []
        rest: list[ServingEvent] = []
        for event in self.events:
            if isinstance(event, ServingDelta):
                delta = event if delta is None else _merge_deltas(delta, event)
            elif isinstance(event, ServingBufferSnapshot):
                merged = merge_snapshots(drafts[-1], event) if drafts else None
                if merged is None:
                    drafts.append(event)
                else:
                    drafts[-1] = merged
                    self.num_coalesced += 1
            else:
                rest.append(event)
        self.events = deque([*([delta] if delta is not None else []), *drafts, *rest])

    def pop(self) -> ServingEvent:
        """The oldest event."""
        event = self.events.popleft()
        if not self.events:
            self.event.clear()
        return event
