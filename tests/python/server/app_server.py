# SPDX-License-Identifier: Apache-2.0
"""An application on a real socket, in a thread."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

import uvicorn

from diffulex.server.http.http_protocol import ConnectionLimits, bounded_protocol

#: Generous: the host may be busy.
_PATIENCE_S = 120.0


class AppServer:
    """Serves between entry and exit, as `diffulex serve` does; `url` says where."""

    def __init__(self, app: Any, limits: ConnectionLimits | None = None) -> None:
        config = uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            log_level="warning",
            timeout_graceful_shutdown=5,
            http=bounded_protocol(limits or ConnectionLimits()),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run)
        self.url = ""

    def _run(self) -> None:
        self._server.run()

    def __enter__(self) -> AppServer:
        self._thread.start()
        end = time.monotonic() + _PATIENCE_S
        while not self._server.started:
            assert time.monotonic() < end, "the server does not start"
            assert self._thread.is_alive(), "the server ended"
            time.sleep(0.005)
        (server,) = self._server.servers
        host, port = server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.should_exit = True
        self._thread.join(_PATIENCE_S)
        assert not self._thread.is_alive()
