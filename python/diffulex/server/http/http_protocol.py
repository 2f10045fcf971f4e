# SPDX-License-Identifier: Apache-2.0
"""Uvicorn's fast protocol, with bounds on what a connection may hold and how long it may wait.

Beyond the base class:

- 431 for a request head that is too large, 408 for one that is not complete in time;
- connections whose body does not go on are closed, and the longest waiting ones when there are too
  many, so that those who send nothing cannot lock others out;
- a client that leaves ends every request it has sent, also those that wait for another to end;
- a client that has sent everything and closes its sending side gets its answer;
- HTTP/1.0 clients get streams without chunks, HTTP/1.1 requests must name their host.
"""

from __future__ import annotations

import itertools
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from diffulex.log import get_logger
from diffulex.server.http.api_errors import error_body
from diffulex.server.http.json_response import encode_json

if TYPE_CHECKING:
    import asyncio

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["BoundedProtocol", "ConnectionLimits", "bounded_protocol"]

logger = get_logger(__name__)

# Open files that are no connections.
_OTHER_FILES = 128
# Checks per time a client may take.
_CHECKS = 4
# Between two probes of whether the client still reads; the second fails if it does not.
_PROBE_S = 0.1
# The order in which connections began to wait for a request: the loop's clock is coarse.
_NUMBERS = itertools.count()
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of a connection; 0 turns one off.

    Attributes:
        max_head_bytes: of the request line and the headers.
        read_timeout_s: for the head of a request, and between two pieces of its body.
        max_connections: at a time; above, the one that has waited longest for a request is closed.
    """

    max_head_bytes: int = 64 << 10
    read_timeout_s: float = 30.0
    max_connections: int = 0

    @classmethod
    def of(
        cls, max_head_bytes: int, read_timeout_s: float, max_connections: int
    ) -> ConnectionLimits:
        """The limits, the connections by default as many as the process may have open files."""
        if max_connections == 0:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            if most != resource.RLIM_INFINITY:
                max_connections = most - min(_OTHER_FILES, most // 2)
        return cls(max_head_bytes, read_timeout_s, max_connections)


def bounded_protocol(limits: ConnectionLimits) -> type[BoundedProtocol]:
    """A protocol class for `uvicorn.Config`."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    limits = ConnectionLimits()

    # Set for each connection by `connection_made`.
    _is_in_head = False
    _is_new_head = False
    _is_refused = False
    _head_bytes = 0
    _fed_bytes = 0
    _head_since: float | None = None
    _number = 0
    _body_at: float | None = None
    _running: Any = None
    _timer: asyncio.TimerHandle | None = None

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        self._head_since = self.loop.time()
        self._number = next(_NUMBERS)
        most = self.limits.max_connections
        if 0 < most < len(self.connections):
            self._make_room()
        if self.limits.read_timeout_s > 0:
            self._check_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        # The base class tells the newest request only.
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more: it has left, or it only waits for its answer."""
        cycle = self._running
        is_waiting = (
            cycle is not None
            and cycle is self.cycle
            and not (cycle.more_body or cycle.response_started)
            and cycle.scope["http_version"] == "1.1"
            and self.scheme == "http"
        )
        if not is_waiting:
            return None
        cycle.keep_alive = False
        self._probe(cycle)
        return True

    def _probe(self, cycle: Any) -> None:
        """Finds out whether the client still reads: an interim response, which clients skip."""
        if not cycle.response_started and not self.transport.is_closing():
            self.transport.write(_PROBE)
            self.loop.call_later(_PROBE_S, self._probe_again, cycle)

    def _probe_again(self, cycle: Any) -> None:
        if not cycle.response_started and not self.transport.is_closing():
            self.transport.write(_PROBE)

    def _make_room(self) -> None:
        """Closes the connection that has waited longest for a request, or else this one."""
        others = [
            item
            for item in self.connections
            if isinstance(item, BoundedProtocol)
            and item is not self
            and not item.transport.is_closing()
        ]
        begun = [item for item in others if item._head_since is not None]
        kept = [item for item in others if item.timeout_keep_alive_task is not None]
        logger.debug("more than %d connections: one is closed", self.limits.max_connections)
        if begun:
            min(begun, key=lambda item: item._number).transport.close()
        else:
            (kept or [self])[0].transport.close()

    # Time.

    def _check_later(self) -> None:
        pause_s = self.limits.read_timeout_s / _CHECKS
        self._timer = self.loop.call_later(pause_s, self._check_time)

    def _check_time(self) -> None:
        now, most = self.loop.time(), self.limits.read_timeout_s
        if self._body_at is not None and self.flow.read_paused:
            self._body_at = now  # it is the server that does not go on
        if self._head_since is not None and now - self._head_since >= most:
            # Who has sent nothing is no client of this protocol.
            if self._is_in_head:
                self._refuse(408, f"request: expected its head within {most:g} s, got a part of it")
            self.transport.close()
        elif self._body_at is not None and now - self._body_at >= most:
            logger.info("a body did not go on for %g s: connection closed", most)
            self.transport.close()
        else:
            self._check_later()

    # Requests.

    def data_received(self, data: bytes) -> None:
        """The client sent something."""
        super().data_received(data)
        if self._is_in_head:
            # What is not a whole header yet.
            self._fed_bytes += 0 if self._is_new_head else len(data)
            self._is_new_head = False
            if 0 < self.limits.max_head_bytes < self._fed_bytes:
                self._refuse_head()

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_head = self._is_new_head = True
        self._head_bytes = self._fed_bytes = 0
        if self._head_since is None:
            self._head_since = self.loop.time()
            self._number = next(_NUMBERS)

    def on_url(self, url: bytes) -> None:
        """A piece of the request line."""
        self._head_bytes += len(url)
        if self._has_small_head():
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._head_bytes += len(name) + len(value) + 4
        if self._has_small_head():
            super().on_header(name, value)

    def _has_small_head(self) -> bool:
        return not 0 < self.limits.max_head_bytes < self._head_bytes

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._is_in_head, self._head_since = False, None
        if self._is_refused:
            return
        if not self._has_small_head():
            self._refuse_head()
            return
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if self.parser.get_http_version() == "1.1" and num_hosts != 1:
            self._refuse(400, f"Host: expected it once, got it {num_hosts} times")
            return
        self._body_at = self.loop.time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        if not self._is_refused:
            self._body_at = self.loop.time()
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._body_at = None
        if not self._is_refused:
            super().on_message_complete()

    def _refuse_head(self) -> None:
        most = self.limits.max_head_bytes
        self._refuse(431, f"request: expected a head of at most {most} bytes, got more")

    def _refuse(self, status: int, message: str) -> None:
        """Answers in place of the application and closes the connection."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused, self._is_in_head, self._head_since = True, False, None
        logger.info("%d %s", status, message)
        # In the middle of another answer there is no place for this one.
        if self._running is None or self._running.response_complete:
            body = encode_json(error_body(status, message))
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + b"\r\n" + body)
        self.transport.close()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)


def _without_chunks(app: ASGIApp, cycle: Any) -> ASGIApp:
    """The application for a client that does not know chunks: the end of the connection ends an
    answer whose length is not known."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        is_open_ended = False

        async def send_plain(message: Message) -> None:
            nonlocal is_open_ended
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                is_open_ended = b"content-length" not in names
                if is_open_ended:
                    cycle.chunked_encoding = False
            elif is_open_ended:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return run
