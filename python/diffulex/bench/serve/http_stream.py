# SPDX-License-Identifier: Apache-2.0
"""A small HTTP/1.1 client that says when bytes arrived.

It exists because a load generator on the server's machine takes time from the server: asyncio
streams cost a fraction of a full client library. No redirects, no proxies, no compression.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from diffulex.bench.serve.errors import RequestError
from diffulex.errors import ConfigError

__all__ = ["BodyDecoder", "Endpoint", "HttpClient", "HttpResponse"]

_READ_BYTES = 1 << 16
_MAX_HEAD_BYTES = 1 << 16
#: Statuses below this are preliminary: another head follows.
_FIRST_FINAL_STATUS = 200
_LAST_LATIN_1 = 0xFF
#: What stands in a path unquoted, besides letters, digits and "_.-~"; quoted parts stay quoted.
_PATH_CHARS = "/%:@!$&'()*+,;="
#: Statuses without a body.
_EMPTY_STATUSES = (204, 304)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server is."""

    scheme: str
    host: str
    port: int
    #: Path in front of ``/v1`` and ``/generate``, without a slash at its end.
    prefix: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, base_url: str, api_key: str | None = None) -> Endpoint:
        """Reads ``http://host:port[/path][/v1]``.

        Raises:
            ConfigError: it is no such URL, or the key does not fit into a header.
        """
        try:
            parts = urlsplit(base_url)
            port = parts.port
            host = (parts.hostname or "").encode("idna").decode("ascii")
            path = quote(parts.path, safe=_PATH_CHARS)
        except ValueError as error:
            # An error of a codec, a ValueError too, wraps what is wrong with the host.
            raise ConfigError(
                f"base_url: expected http(s)://host[:port], got {base_url!r}:"
                f" {error.__cause__ or error}"
            ) from error
        if parts.scheme not in ("http", "https") or not host or parts.query:
            raise ConfigError(f"base_url: expected http(s)://host[:port], got {base_url!r}")
        default_port = 443 if parts.scheme == "https" else 80
        headers = {} if not api_key else {"Authorization": f"Bearer {_checked_key(api_key)}"}
        prefix = path.rstrip("/").removesuffix("/v1")
        return cls(parts.scheme, host, port or default_port, prefix, headers)

    @property
    def url(self) -> str:
        """The address without ``/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"

    def head(self, method: str, path: str, body: bytes | None) -> bytes:
        """Request line and headers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "User-Agent: diffulex-bench",
            "Accept: */*",
            "Accept-Encoding: identity",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _checked_key(api_key: str) -> str:
    """The key, if a header can carry it: printable Latin-1. A message shows one character of it."""
    for character in api_key:
        if ord(character) > _LAST_LATIN_1 or not character.isprintable():
            raise ConfigError(
                f"--api-key: expected printable Latin-1 characters, got U+{ord(character):04X}"
            )
    return api_key


class BodyDecoder:
    """Takes the bytes of a body as they come and gives its content; any split is fine."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        self._is_chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self._missing: int | None = None
        self._buffer = bytearray()
        self._is_in_trailer = False
        #: Nothing follows; a body that ends with the connection never gets there.
        self.is_complete = False
        if status in _EMPTY_STATUSES:
            self.is_complete = True
        elif not self._is_chunked and "content-length" in headers:
            self._missing = _length(headers["content-length"], 10)
            self.is_complete = self._missing == 0

    @property
    def ends_with_connection(self) -> bool:
        """Neither a length nor chunks say where the body ends."""
        return not self._is_chunked and self._missing is None and not self.is_complete

    def feed(self, data: bytes) -> bytes:
        """Content of the next bytes.

        Raises:
            RequestError: malformed chunks.
        """
        if self.is_complete:
            return b""
        if self._is_chunked:
            self._buffer += data
            return self._take_chunks()
        if self._missing is None:
            return data
        self._missing -= len(data)
        self.is_complete = self._missing <= 0
        return data if self._missing >= 0 else data[: self._missing]

    def _take_chunks(self) -> bytes:
        content = bytearray()
        while not self.is_complete:
            if self._missing:  # inside a chunk: its data and the line end after it
                part = self._buffer[: self._missing]
                del self._buffer[: len(part)]
                content += part[: max(0, self._missing - 2)]
                self._missing -= len(part)
                if self._missing:
                    break
            line_end = self._buffer.find(b"\r\n")
            if line_end < 0:
                break
            line = bytes(self._buffer[:line_end])
            del self._buffer[: line_end + 2]
            if self._is_in_trailer:
                self.is_complete = not line
                continue
            length = _length(line.split(b";")[0].decode("latin-1"), 16)
            self._is_in_trailer = length == 0
            self._missing = length + 2 if length else 0
        return bytes(content)


def _length(text: str, base: int) -> int:
    try:
        value = int(text.strip(), base)
    except ValueError:
        value = -1
    if value < 0:
        raise RequestError("protocol", f"response: expected a body length, got {text!r}")
    return value


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


@dataclass(slots=True)
class HttpResponse:
    """A response whose head has arrived. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    _connection: _Connection
    _decoder: BodyDecoder

    async def parts(self) -> AsyncIterator[bytes]:
        """Content as it arrives.

        Raises:
            RequestError: `truncated` when the connection ends first.
        """
        while not self._decoder.is_complete:
            try:
                data = await self._connection.reader.read(_READ_BYTES)
            except OSError as error:
                raise RequestError("truncated", f"response: {error}") from error
            if not data:
                if self._decoder.ends_with_connection:
                    return
                raise RequestError(
                    "truncated", "response: expected the rest of it, got a closed connection"
                )
            content = self._decoder.feed(data)
            if content:
                yield content

    async def read(self) -> bytes:
        """The whole content."""
        return b"".join([part async for part in self.parts()])

    @property
    def can_reuse(self) -> bool:
        """The connection is ready for another request."""
        keeps = "close" not in self.headers.get("connection", "").lower()
        return self._decoder.is_complete and keeps


class HttpClient:
    """Requests to one endpoint over kept-alive connections, as many as there are requests.

    Use it from one event loop.

    Args:
        endpoint: where to.
        verify_tls: refuse a certificate that cannot be traced to an authority.
    """

    def __init__(self, endpoint: Endpoint, *, verify_tls: bool = True) -> None:
        self.endpoint = endpoint
        self._idle: list[_Connection] = []
        self._ssl = ssl.create_default_context() if endpoint.scheme == "https" else None
        if self._ssl is not None and not verify_tls:
            self._ssl.check_hostname = False
            self._ssl.verify_mode = ssl.CERT_NONE

    async def close(self) -> None:
        """Closes idle connections."""
        while self._idle:
            await _close(self._idle.pop())

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes | None = None
    ) -> AsyncIterator[HttpResponse]:
        """One request; the connection is kept if the body was read to its end.

        Raises:
            RequestError: no connection, or no HTTP response.
        """
        message = self.endpoint.head(method, path, body) + (body or b"")
        connection, status, headers = await self._exchange(message)
        response: HttpResponse | None = None
        try:
            response = HttpResponse(status, headers, connection, BodyDecoder(status, headers))
            yield response
        finally:
            if response is not None and response.can_reuse:
                self._idle.append(connection)
            else:
                connection.writer.close()

    async def _exchange(self, message: bytes) -> tuple[_Connection, int, Mapping[str, str]]:
        """Sends it and waits for the head of the response."""
        while self._idle:
            # A server may close an idle connection at any time: then nothing was served, and a
            # new connection takes the request.
            connection = self._idle.pop()
            try:
                return (connection, *await _send(connection, message))
            except _ConnectionLostError:
                connection.writer.close()
            except BaseException:
                connection.writer.close()
                raise
        connection = await self._connect()
        try:
            return (connection, *await _send(connection, message))
        except _ConnectionLostError as error:
            connection.writer.close()
            raise RequestError("connect", f"{self.endpoint.url}: {error}") from error
        except BaseException:
            connection.writer.close()
            raise

    async def _connect(self) -> _Connection:
        endpoint = self.endpoint
        try:
            reader, writer = await asyncio.open_connection(
                endpoint.host, endpoint.port, ssl=self._ssl, limit=_MAX_HEAD_BYTES
            )
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise RequestError(
                "connect", f"{endpoint.url}: expected a server, got: {reason}"
            ) from error
        return _Connection(reader, writer)


class _ConnectionLostError(Exception):
    """The connection ended before the first byte of a response."""


async def _close(connection: _Connection) -> None:
    connection.writer.close()
    with contextlib.suppress(OSError):
        await connection.writer.wait_closed()


async def _send(connection: _Connection, message: bytes) -> tuple[int, Mapping[str, str]]:
    try:
        connection.writer.write(message)
        await connection.writer.drain()
        while True:
            head = await connection.reader.readuntil(b"\r\n\r\n")
            status, headers = _parse_head(head)
            if status >= _FIRST_FINAL_STATUS:
                return status, headers
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise _ConnectionLostError("connection closed without a response") from error
        raise RequestError("protocol", "response: expected HTTP headers, got a part") from error
    except asyncio.LimitOverrunError as error:
        raise RequestError("protocol", "response: expected HTTP headers, got too many") from error
    except OSError as error:
        raise _ConnectionLostError(str(error)) from error


def _parse_head(head: bytes) -> tuple[int, Mapping[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise RequestError("protocol", f"response: expected HTTP/1.1, got {first[:80]!r}")
    pairs = (line.partition(":") for line in lines if line)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}
