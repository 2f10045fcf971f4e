# SPDX-License-Identifier: Apache-2.0
"""The frontend of a server that is one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from diffulex.serving.frontend import FrontendManager

if TYPE_CHECKING:
    from diffulex.serving.inproc import InprocBackend

__all__ = ["InprocFrontend"]

_HEARTBEAT_S = 1.0


class InprocFrontend(FrontendManager):
    """A frontend that starts and stops its backend itself.

    Args:
        backend: started and stopped with the frontend.
        on_ready: called with the engine's report when it serves.
        on_dead: called with the reason when the engine failed.
        options: as for `FrontendManager`.
    """

    def __init__(
        self,
        backend: InprocBackend,
        *,
        model_id: str | None = None,
        on_ready: Callable[[Mapping[str, Any]], None] = lambda info: None,
        on_dead: Callable[[str], None] = lambda reason: None,
        **options: Any,
    ) -> None:
        super().__init__(
            model_id=model_id or backend.model_id,
            send_backend=backend.commands,
            recv_backend=backend.events,
            **options,
        )
        self._backend = backend
        self._on_ready = on_ready
        self._on_dead = on_dead
        self._beat_task: asyncio.Task[None] | None = None
        self.backend_starting()

    async def start(self) -> None:
        """Builds the engine and starts serving, once."""
        if self._beat_task is None and not self._backend.is_running:
            self.backend_ready(await self._backend.open())
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
        await self._backend.join()

    async def _beat(self) -> None:
        while self._backend.is_running:
            self._receive(self._backend.status.heartbeat())
            await self._backend.join(_HEARTBEAT_S)
        reason = "the engine loop ended"
        self.backend_died(reason)
        self._on_dead(reason)
