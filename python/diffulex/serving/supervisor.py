# SPDX-License-Identifier: Apache-2.0
"""Watches the backend process from the event loop of the HTTP process.

start ──> ready ──> process ends ──> every request fails, /health is 503
             ^            │
             │            ├─ restart: a new process on the same sockets
             └────────────┘
                          └─ otherwise: the server ends, once clients have been told
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from diffulex.log import get_logger
from diffulex.serving.backend_process import BackendProcess, describe_exit
from diffulex.serving.frontend_state import ServerState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from diffulex.serving.frontend import FrontendManager

__all__ = ["Supervisor"]

logger = get_logger(__name__)

# Clients get so long to read the error before the server ends.
_FLUSH_S = 2.0
_CHECK_S = 1.0
# A backend that dies this often, soon after it was ready, will not get better.
_MAX_RESTARTS = 3
_STABLE_S = 60.0


class Supervisor:
    """Starts backends and reacts to their end.

    Args:
        frontend: is told what happens.
        make_process: a new backend process that is not started.
        startup_timeout_s: until a backend must be ready.
        is_restarting: start another one when it ends.
        is_staying: serve errors rather than end when there is no backend any more.
        kills_stuck: kill a backend whose step takes too long, or that gives no sign of life.
        on_fatal: called when the server has to end.
        on_ready: called with the backend's report, each time.
    """

    def __init__(
        self,
        frontend: FrontendManager,
        make_process: Callable[[], BackendProcess],
        *,
        startup_timeout_s: float,
        is_restarting: bool = False,
        is_staying: bool = False,
        kills_stuck: bool = False,
        on_fatal: Callable[[str], None] = lambda reason: None,
        on_ready: Callable[[Mapping[str, Any]], None] = lambda info: None,
    ) -> None:
        self._frontend = frontend
        self._make_process = make_process
        self._startup_timeout_s = startup_timeout_s
        self._is_restarting = is_restarting
        self._is_staying = is_staying
        self._kills_stuck = kills_stuck
        self._on_fatal = on_fatal
        self._on_ready = on_ready
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._num_restarts = 0
        self._has_served = False
        self._ready_at: float | None = None
        self.backend: BackendProcess | None = None
        #: When the backend was started (monotonic clock).
        self.started_at = time.monotonic()

    def start_backend(self) -> BackendProcess:
        """Starts a backend; it is not ready yet."""
        self.backend = self._make_process()
        self._ready_at = None
        self.started_at = time.monotonic()
        self.backend.start()
        return self.backend

    def wait_ready(self) -> None:
        """Waits, without an event loop, until the backend serves; RuntimeError when it fails."""
        assert self.backend is not None
        info = self.backend.wait_ready(self._startup_timeout_s, lambda: self._is_stopping)
        self._became_ready(info)

    def poll_ready(self, wait_s: float) -> bool:
        """Whether the backend serves, after waiting so long at most; RuntimeError when it fails."""
        assert self.backend is not None
        info = self.backend.poll_ready(wait_s)
        if info is not None:
            self._became_ready(info)
        return info is not None

    def _became_ready(self, info: Mapping[str, Any]) -> None:
        self._ready_at = time.monotonic()
        self._has_served = True
        self._frontend.backend_ready(info)
        self._on_ready(info)

    def watch(self) -> None:
        """Starts watching, in the running event loop."""
        self._task = asyncio.create_task(self._watch(), name="diffulex-supervisor")

    async def stop(self) -> None:
        """Ends watching; the backend is left alone."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def stop_backend(self, grace_s: float) -> None:
        """Ends the backend, politely if the frontend has asked it to leave."""
        self._is_stopping = True
        if self.backend is None:
            return
        # One that loads reads no commands.
        is_asked = self._ready_at is not None and self._frontend.state is ServerState.STOPPED
        if not is_asked and self.backend.process.pid is not None:
            self.backend.process.terminate()
        self.backend.stop(grace_s)

    async def _watch(self) -> None:
        while True:
            backend = self.backend
            assert backend is not None
            reason = None if self._ready_at is not None else await self._start_failure(backend)
            if reason is None:
                await self._wait_end(backend)
                backend.process.join()
                reason = f"the process {describe_exit(backend.process.exitcode)}"
            if self._is_stopping:
                return
            if not await self._goes_on(reason, backend):
                return
            self._begin()

    async def _goes_on(self, reason: str, backend: BackendProcess) -> bool:
        """Tells that the backend is gone; whether another one is to be started."""
        self._frontend.backend_died(reason)
        await self._end(backend)
        if not self._may_restart():
            await self._give_up(reason)
            return False
        logger.warning("starting a new backend")
        return True

    async def _end(self, backend: BackendProcess) -> None:
        backend.process.terminate()  # one that was not ready in time is still there
        await asyncio.get_running_loop().run_in_executor(None, backend.stop)

    def _begin(self) -> None:
        self._frontend.backend_starting()
        self.start_backend()

    async def _start_failure(self, backend: BackendProcess) -> str | None:
        """Why the backend does not serve; None when it does."""
        loop = asyncio.get_running_loop()
        try:
            info = await loop.run_in_executor(
                None, backend.wait_ready, self._startup_timeout_s, lambda: self._is_stopping
            )
        except RuntimeError as error:
            return str(error)
        self._became_ready(info)
        return None

    async def _wait_end(self, backend: BackendProcess) -> None:
        """Until the process has ended; meanwhile looks after one that stands still."""
        loop = asyncio.get_running_loop()
        has_ended = asyncio.Event()
        sentinel = backend.process.sentinel
        loop.add_reader(sentinel, has_ended.set)
        seen: object = None
        try:
            while not has_ended.is_set():
                asleep_at = time.monotonic()
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(has_ended.wait(), _CHECK_S)
                # This process was frozen itself: it has yet to read the heartbeats that came.
                if time.monotonic() - asleep_at > 3 * _CHECK_S:
                    continue
                # A report per step that is stuck, and per time without a sign of life.
                state = self._frontend.state
                is_stuck = state is ServerState.STUCK
                found = (state, self._frontend.step_seq if is_stuck else None)
                if found != seen:
                    seen = found
                    self._on_state(state, backend)
        finally:
            loop.remove_reader(sentinel)

    def _on_state(self, state: ServerState, backend: BackendProcess) -> None:
        frontend = self._frontend
        if state is ServerState.STUCK:
            text = "step %d of the backend takes longer than %g s"
            logger.warning(text, frontend.step_seq, frontend.step_timeout_s)
        elif state is ServerState.UNRESPONSIVE:
            text = "the backend gave no sign of life for %.1f s"
            logger.warning(text, frontend.heartbeat_age_s)
        else:
            return
        if self._kills_stuck:
            logger.warning("killing the backend (--kill-stuck-backend)")
            backend.process.kill()
        elif state is ServerState.UNRESPONSIVE:
            frontend.fail_unanswered()

    def _may_restart(self) -> bool:
        # What has never served would fail again.
        is_ending = self._is_stopping or self._frontend.is_draining
        if not self._is_restarting or is_ending or not self._has_served:
            return False
        if self._ready_at is not None and time.monotonic() - self._ready_at > _STABLE_S:
            self._num_restarts = 0
        self._num_restarts += 1
        if self._num_restarts > _MAX_RESTARTS:
            logger.error("the backend ended %d times in a row", self._num_restarts)
            return False
        return True

    async def _give_up(self, reason: str) -> None:
        if self._is_staying:
            return
        await asyncio.sleep(_FLUSH_S)
        self._on_fatal(reason)
