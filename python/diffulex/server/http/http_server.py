# SPDX-License-Identifier: Apache-2.0
"""Uvicorn with a drain: told to stop, it goes on serving until its requests are done."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Any

import uvicorn

from diffulex.log import get_logger

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from diffulex.server.args import ServerArgs
    from diffulex.serving.frontend import FrontendManager
    from diffulex.serving.replicas.frontend import ReplicaFrontend
    from diffulex.serving.replicas.group import ReplicaGroup
    from diffulex.serving.supervisor import Supervisor

__all__ = ["HttpServer"]

logger = get_logger(__name__)


class HttpServer:
    """Serves an application on a socket until it is told to stop.

    Args:
        app: the application.
        args: the command line.
        listener: bound already; closed by the caller.
        frontend: started before the first request and stopped after the last one.
    """

    def __init__(
        self,
        app: Any,
        args: ServerArgs,
        listener: socket.socket,
        frontend: FrontendManager | ReplicaFrontend,
    ) -> None:
        self.exit_code = 0
        self.supervisor: Supervisor | ReplicaGroup | None = None
        self._args = args
        self._listener = listener
        self._frontend = frontend
        self._num_signals = 0
        self._announcement: str | None = None
        self._config = uvicorn.Config(
            app, timeout_graceful_shutdown=int(args.drain_timeout) + 5, **args.uvicorn_options()
        )
        self._uvicorn = _Uvicorn(self._config, self)

    def run(self) -> int:
        """Serves until told to stop; returns the exit code."""
        # Uvicorn's choice, uvloop where it is installed: half the time per event.
        factory = self._config.get_loop_factory()
        if sys.version_info >= (3, 11):
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(self._run())
        else:
            asyncio.run(self._run())
        return self.exit_code

    async def _run(self) -> None:
        # Not left to the application: a failure here is one line for the user.
        await self._frontend.start()
        if self.supervisor is not None:
            self.supervisor.watch()
        try:
            await self._uvicorn.serve(sockets=[self._listener])
        finally:
            if self.supervisor is not None:
                await self.supervisor.stop()
            await self._frontend.stop()

    def announce(self, line: str) -> None:
        """Prints a line that says that requests are served; as soon as they are."""
        self._announcement = line
        if self._uvicorn.started:
            self.on_started()

    def on_started(self) -> None:
        """The socket is served."""
        if self._announcement is not None:
            print(self._announcement, file=sys.stderr, flush=True)
            self._announcement = None

    def fail(self, reason: str) -> None:
        """Ends the server because there is no engine any more."""
        print(f"diffulex serve: error: {reason}", file=sys.stderr, flush=True)
        self.exit_code = 1
        self._uvicorn.should_exit = True

    def on_signal(self, number: int) -> None:
        """The first one drains, the second one ends the server at once."""
        self._num_signals += 1
        if self._num_signals > 1:
            self.exit_code = 130 if number == signal.SIGINT else self.exit_code
            self._uvicorn.should_exit = self._uvicorn.force_exit = True
            return
        asyncio.get_running_loop().call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if not self._uvicorn.started:
            self._uvicorn.should_exit = True
            return
        logger.info("draining: %d requests in flight", self._frontend.num_inflight)
        drain = self._frontend.begin_drain(self._args.drain_timeout)
        drain.add_done_callback(self._drained)

    def _drained(self, task: asyncio.Task[None]) -> None:
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Tells its owner when it serves and which signals come."""

    def __init__(self, config: uvicorn.Config, owner: HttpServer) -> None:
        super().__init__(config)
        self._owner = owner

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._owner.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # Left out by the base class, so that the application would end by being cancelled.
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._owner.on_signal(sig)
