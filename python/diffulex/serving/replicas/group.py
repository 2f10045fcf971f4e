# SPDX-License-Identifier: Apache-2.0
"""Starts the backends of several replicas, restarts them one by one, and takes single ones out.

A replica that has served and ends is started again, at once the first time, then with growing pauses. The
server serves while one of them does.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from diffulex.log import get_logger, part_named
from diffulex.serving.frontend_state import ServerState
from diffulex.serving.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from diffulex.serving.backend_process import BackendProcess
    from diffulex.serving.frontend import FrontendManager
    from diffulex.serving.replicas.frontend import ReplicaFrontend

__all__ = ["GroupBusyError", "ReplicaGroup", "ReplicaSupervisor", "replica_label"]

logger = get_logger(__name__)

_POLL_S = 0.05
# Pauses before a backend is started again; one that has served so long is taken for sound.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
_STABLE_S = 60.0
# What a backend that is to be restarted gets to leave before it is killed: a step that hangs never returns.
_LEAVE_S = 10.0


def replica_label(index: int) -> str:
    """How a replica is named in log lines."""
    return f"replica {index}"


class GroupBusyError(RuntimeError):
    """Replicas are being restarted already, or the one that is meant is the last one in service."""


class ReplicaSupervisor(Supervisor):
    """A supervisor that does not give up a backend which has served, and restarts it when asked to.

    `num_restarts` counts all restarts.
    """

    num_restarts = 0
    _num_deaths = 0
    # The backend has ended, or is being ended, and the next one has not begun.
    _is_between = False

    def __init__(
        self, frontend: FrontendManager, *arguments: Any, label: str = "", **options: Any
    ) -> None:
        super().__init__(frontend, *arguments, **options)
        self._label = label
        #: A restart was asked for, and the backend that comes of it has not begun.
        self._asked = asyncio.Event()

    async def _watch(self) -> None:
        with part_named(self._label):
            await super()._watch()

    def stop_backend(self, grace_s: float) -> None:
        """Ends the backend, politely if the frontend has asked it to leave."""
        with part_named(self._label):
            super().stop_backend(grace_s)

    def restart(self) -> None:
        """Ends the backend and starts another one; its requests begin again elsewhere.

        Where another one is about to be started, it is started now.
        """
        if self._is_ending():
            return
        if self._task is None or self._task.done():  # given up
            self.num_restarts += 1
            self._begin()
            self.watch()
            return
        self._asked.set()
        if self._is_between:
            return
        self._end_requests()
        self._frontend.backend_starting()
        assert self.backend is not None
        self.backend.process.terminate()
        with part_named(self._label):
            asyncio.get_running_loop().call_later(_LEAVE_S, self._kill, self.backend)

    def _kill(self, backend: BackendProcess) -> None:
        is_over = self._is_stopping or self._is_between or backend is not self.backend
        if not is_over and backend.process.is_alive():
            logger.warning("the backend does not leave: SIGKILL")
            backend.process.kill()

    async def _goes_on(self, reason: str, backend: BackendProcess) -> bool:
        self._is_between = True
        if self._asked.is_set():
            self._end_requests()  # those that came while it was leaving
            await self._end(backend)
        else:
            self._frontend.backend_died(reason)
            await self._end(backend)
            if self._is_ending() or not (self._has_served or self._asked.is_set()):
                self._on_fatal(reason)  # the others may serve: the group decides
                return False
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._pause_s())
            logger.warning("starting a new backend")
        self.num_restarts += 1
        return not self._is_ending()

    def _begin(self) -> None:
        self._is_between = False
        self._asked.clear()
        super()._begin()

    def _became_ready(self, info: Mapping[str, Any]) -> None:
        if not self._asked.is_set():  # else it has been told to leave
            super()._became_ready(info)

    def _end_requests(self) -> None:
        if self._frontend.num_inflight or self._frontend.num_operations:
            self._frontend.backend_died("it is restarted")

    def _is_ending(self) -> bool:
        return self._is_stopping or self._frontend.is_draining

    def _pause_s(self) -> float:
        if self._ready_at is not None and time.monotonic() - self._ready_at > _STABLE_S:
            self._num_deaths = 0
        self._num_deaths += 1
        if self._num_deaths == 1:
            return 0.0
        return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (self._num_deaths - 2)))


class ReplicaGroup:
    """The supervisors of all replicas.

    Args:
        frontend: of all of them.
        make_process: the backend of a replica, by its number.
        startup_timeout_s: until a backend must be ready.
        min_ready: so many must be ready before the server is; 0: all.
        drain_timeout_s: what requests of a replica get to end before it is restarted.
        is_staying: serve errors rather than end when no backend can start.
        kills_stuck: kill a backend whose step takes too long, or that gives no sign of life.
        on_fatal: called when the server has to end.
        on_ready: called once, when enough replicas are ready for the first time.
    """

    def __init__(
        self,
        frontend: ReplicaFrontend,
        make_process: Callable[[int], BackendProcess],
        *,
        startup_timeout_s: float,
        min_ready: int = 0,
        drain_timeout_s: float = 30.0,
        is_staying: bool = False,
        kills_stuck: bool = False,
        on_fatal: Callable[[str], None] = lambda reason: None,
        on_ready: Callable[[Mapping[str, Any]], None] = lambda info: None,
    ) -> None:
        self._frontend = frontend
        self._startup_timeout_s = startup_timeout_s
        self._drain_timeout_s = drain_timeout_s
        self._min_ready = min_ready or len(frontend.managers)
        self._is_staying = is_staying
        self._on_fatal = on_fatal
        self._on_ready = on_ready
        self._ready: set[int] = set()
        self._failed: set[int] = set()
        # Those that an operator took out; `held` also has the one that is being restarted.
        self._taken_out: set[int] = set()
        self._has_served = False
        self._is_stopping = False
        self._rolling: asyncio.Task[None] | None = None
        self.supervisors = [
            self._supervisor(index, make_process, kills_stuck)
            for index in range(len(frontend.managers))
        ]
        frontend.group = self

    def _supervisor(
        self, index: int, make_process: Callable[[int], BackendProcess], kills_stuck: bool
    ) -> ReplicaSupervisor:
        return ReplicaSupervisor(
            self._frontend.managers[index],
            lambda: make_process(index),
            label=replica_label(index),
            startup_timeout_s=self._startup_timeout_s,
            kills_stuck=kills_stuck,
            on_fatal=lambda reason: self._given_up(index, reason),
            on_ready=lambda info: self._became_ready(index, info),
        )

    def _became_ready(self, index: int, info: Mapping[str, Any]) -> None:
        self._frontend.replica_ready(index, info)
        self._ready.add(index)
        self._failed.discard(index)
        logger.info("replica %d is ready", index)
        if not self._has_served and len(self._ready) >= self._min_ready:
            self._has_served = True
            self._on_ready(self._frontend.info)

    def _given_up(self, index: int, reason: str) -> None:
        """A replica that has never served."""
        logger.error("replica %d: %s", index, reason)
        self._failed.add(index)
        possible = len(self.supervisors) - len(self._failed)
        if not self._is_staying and not self._has_served and possible < self._min_ready:
            self._on_fatal(reason)

    # Life, as that of one supervisor.

    def start_backends(self) -> None:
        """Starts every backend; none is ready yet."""
        for manager, supervisor in zip(self._frontend.managers, self.supervisors, strict=True):
            manager.backend_starting()
            supervisor.start_backend()

    def wait_ready(self) -> None:
        """Waits, without an event loop, until enough replicas serve.

        Raises:
            RuntimeError: too many of them failed, or took too long.
        """
        end = time.monotonic() + self._startup_timeout_s
        pending = set(range(len(self.supervisors)))
        while not self._has_served:
            for index in sorted(pending):
                try:
                    is_ready = self.supervisors[index].poll_ready(_POLL_S)
                except RuntimeError as error:
                    is_ready = False
                    self._fail(index, error)
                if is_ready or index in self._failed:
                    pending.discard(index)
            if time.monotonic() > end:
                text = f"not ready within {self._startup_timeout_s:g} s"
                raise RuntimeError(f"backend failed to start: {text}")

    def _fail(self, index: int, error: RuntimeError) -> None:
        self._failed.add(index)
        if len(self.supervisors) - len(self._failed) < self._min_ready:
            raise RuntimeError(f"replica {index}: {error}") from error

    def watch(self) -> None:
        """Starts watching, in the running event loop; SIGHUP restarts all replicas in turn."""
        for supervisor in self.supervisors:
            supervisor.watch()
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_hangup(self) -> None:
        try:
            self.roll(range(len(self.supervisors)))
        except GroupBusyError as error:
            logger.warning("SIGHUP: %s", error)

    async def stop(self) -> None:
        """Ends watching; the backends are left alone."""
        self._is_stopping = True
        if self._rolling is not None:
            self._rolling.cancel()
            with suppress(asyncio.CancelledError):
                await self._rolling
        for supervisor in self.supervisors:
            await supervisor.stop()

    def stop_backends(self, grace_s: float) -> None:
        """Ends every backend, politely if its frontend has asked it to leave."""
        for supervisor in self.supervisors:
            supervisor.stop_backend(grace_s)

    # What operators ask for.

    def hold(self, index: int) -> None:
        """Sends a replica no more requests, also after a restart; those that it has go on. Idempotent."""
        self._taken_out.add(index)
        self._frontend.held.add(index)

    def release(self, index: int) -> None:
        """Sends a replica requests again."""
        if self._rolling is not None and not self._rolling.done():
            raise GroupBusyError("replicas: expected no restart under way, got one")
        self._taken_out.discard(index)
        self._frontend.held.discard(index)

    def roll(self, indices: range | list[int]) -> asyncio.Task[None]:
        """Restarts replicas one after the other: each is drained, restarted, and ready before the next.

        Raises:
            GroupBusyError: a restart is under way, or no other one serves meanwhile.
        """
        if self._rolling is not None and not self._rolling.done():
            raise GroupBusyError("replicas: expected no restart under way, got one")
        if len(indices) == 1:
            self._others(indices[0])
        self._rolling = asyncio.create_task(self._roll(list(indices)), name="diffulex-rolling")
        return self._rolling

    async def _roll(self, indices: list[int]) -> None:
        for index in indices:
            try:
                others = self._others(index)
            except GroupBusyError as error:
                logger.error("replica %d is not restarted: %s", index, error)
                continue
            if not await self._until(partial(self._all_serve, others)):
                logger.error("replica %d is not restarted: another one does not get ready", index)
                return
            if not await self._restart(index):
                logger.error("replica %d does not get ready: the others keep running", index)
                return

    def _others(self, index: int) -> list[int]:
        """Those that serve while one is restarted.

        Raises:
            GroupBusyError: there are none, but the server has others than this one, which serves.
        """
        every = range(len(self.supervisors))
        in_service = [i for i in every if i not in self._frontend.held and i not in self._failed]
        if in_service == [index] and len(every) > 1:
            raise GroupBusyError("replicas: expected another one in service, got none")
        return [i for i in in_service if i != index]

    async def _restart(self, index: int) -> bool:
        """Whether it serves again."""
        frontend, manager = self._frontend, self._frontend.managers[index]
        logger.info("replica %d: draining %d requests", index, manager.num_inflight)
        frontend.held.add(index)
        try:
            end = time.monotonic() + self._drain_timeout_s
            while manager.num_inflight and time.monotonic() < end:
                await asyncio.sleep(_POLL_S)
            self.supervisors[index].restart()
            return await self._until(lambda: manager.state is ServerState.READY)
        finally:
            if index not in self._taken_out:
                frontend.held.discard(index)

    def _all_serve(self, indices: list[int]) -> bool:
        return all(map(self._frontend.is_serving, indices))

    async def _until(self, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + self._startup_timeout_s
        while not condition():
            if time.monotonic() > end or self._is_stopping:
                return False
            await asyncio.sleep(_POLL_S)
        return True
