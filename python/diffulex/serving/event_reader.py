# SPDX-License-Identifier: Apache-2.0
"""Waits for the events of one request: for its client, for its deadline, for a newer draft."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffulex.serving.frontend_errors import ClientDisconnected

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from diffulex.serving.frontend_state import FrontendReqState
    from diffulex.wire.messages import JobEvent

__all__ = ["EventReader"]


@dataclass(frozen=True, slots=True)
class EventReader:
    """Reads the events of a request.

    Attributes:
        state: of the request.
        is_disconnected: whether the client went away; None: it is never asked.
        poll_s: how often a waiting request asks that.
        draft_interval_s: least time between two drafts.
        deadline: reading of time.monotonic; None: there is none.
    """

    state: FrontendReqState
    is_disconnected: Callable[[], Awaitable[bool]] | None
    poll_s: float
    draft_interval_s: float = 0.0
    deadline: float | None = None

    async def next(self) -> JobEvent:
        """The next event.

        Raises:
            asyncio.TimeoutError: none came before the deadline.
            ClientDisconnected: the client went away.
        """
        state, deadline = self.state, self.deadline
        while True:
            await self._poll()
            now = time.monotonic()
            pause = self._pause(now)
            if state.events and pause <= 0:
                event = state.pop()
                if event.is_draft:
                    state.last_draft_at = now
                return event
            if deadline is not None and now >= deadline and not state.closed:
                raise asyncio.TimeoutError
            wait_s = self.poll_s
            if deadline is not None:
                wait_s = max(0.0, min(wait_s, deadline - now))
            if state.events:
                await asyncio.sleep(min(wait_s, pause))
                continue
            # Not wait_for: a task per event costs more than everything else in here.
            timer = asyncio.get_running_loop().call_later(wait_s, state.event.set)
            try:
                await state.event.wait()
            finally:
                timer.cancel()
            if not state.events:
                state.event.clear()

    def _pause(self, now: float) -> float:
        """How long the only queued event, a draft, is to wait for a newer one."""
        state, interval = self.state, self.draft_interval_s
        if interval <= 0 or len(state.events) != 1:
            return 0.0
        return 0.0 if state.events[0].is_urgent else state.last_draft_at + interval - now

    async def _poll(self) -> None:
        """Asks whether the client is there, every so often, however fast events come."""
        state, now = self.state, time.monotonic()
        if self.is_disconnected is None or now - state.polled_at < self.poll_s:
            return
        state.polled_at = now
        if await self.is_disconnected():
            raise ClientDisconnected(f"request {state.rid}: the client went away")
