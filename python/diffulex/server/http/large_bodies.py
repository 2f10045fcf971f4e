# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests that are too large to be parsed on the event loop.

    client ──> temporary file ──> process that parses and measures ──> document within its limits

The file and the process keep the memory of a body out of this process until it is known to be what
the server takes; a client that leaves ends the process. A body takes a place in the queue only once
it is complete, so that stalled senders lock no one out, and it must be complete within a time limit.
"""

from __future__ import annotations

import asyncio
import json
import marshal
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request

from diffulex.server.http import body_parser
from diffulex.server.http.api_errors import CLIENT_CLOSED, ApiError
from diffulex.server.http.request_bounds import check_queue, run_bounded, run_in_time

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from tempfile import SpooledTemporaryFile

    from starlette.responses import Response
    from starlette.types import Message, Receive

    from diffulex.server.http.app_options import AppContext

    _File = SpooledTemporaryFile[bytes]

__all__ = ["BodyRoute", "LargeBodies"]

#: Bodies up to so many bytes are parsed on the event loop, within a few milliseconds.
SMALL_BYTES = 128 << 10
# Processes that parse at a time; the other cores are for those who are answered.
_MAX_PROCESSES = max(1, min(4, (os.cpu_count() or 1) // 2))
# Bytes that are written at a time; a small body is never written.
_PIECE_BYTES = 1 << 20
# Bodies that wait on disk, in units of the largest one.
_MAX_HELD = 8
# A body comes at least at this rate, in bytes per second, after a start in seconds.
_READ_START_S, _READ_RATE = 30.0, 64 << 10

_KINDS = {
    "chars": "characters",
    "items": "entries",
    "ids": "token ids",
    "total": "token ids in all",
    "values": "values in all",
}


class LargeBodies:
    """Parses large bodies and counts those it holds."""

    def __init__(self) -> None:
        self._sizes: dict[_File, int] = {}
        self._slots: asyncio.Semaphore | None = None
        #: Bodies that are complete and are parsed or checked.
        self.num_open = 0

    @contextmanager
    def opened(self) -> Iterator[_File]:
        """A file for a body, on disk only when a large piece of it has come."""
        with tempfile.SpooledTemporaryFile(_PIECE_BYTES, prefix="diffulex-body-") as file:
            self._sizes[file] = 0
            try:
                yield file
            finally:
                del self._sizes[file]

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a complete body."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    async def write(self, file: _File, chunk: bytes, max_bytes: int) -> None:
        """Adds to a body, on another thread: a disk may be slow.

        Args:
            max_bytes: of one body.

        Raises:
            ApiError: 429, other bodies take the place there is.
        """
        if sum(self._sizes.values()) + len(chunk) > _MAX_HELD * max_bytes:
            message = f"body: expected at most {_MAX_HELD} of the largest at a time, got more"
            raise ApiError(429, message)
        self._sizes[file] += len(chunk)
        await asyncio.to_thread(file.write, chunk)

    async def parse(self, file: _File, limits: Mapping[str, Mapping[str, int]]) -> Any:
        """The document in a file.

        Raises:
            RequestValidationError: it is no JSON.
            ApiError: 400, it is longer than the limits, or cannot be parsed.
        """
        if self._slots is None:
            self._slots = asyncio.Semaphore(_MAX_PROCESSES)
        async with self._slots:
            output = await _run_parser(file, limits)
        if not output:
            raise ApiError(400, "body: expected fewer values, got more than the server takes")
        kind, *rest = marshal.loads(output)
        if kind == "document":
            return rest[0]
        if kind == "json":
            raise RequestValidationError([_json_error(*rest)])
        if kind == "size":
            raise _too_long(*rest)
        raise ApiError(400, f"body: {rest[0]}")


async def _run_parser(file: _File, limits: Mapping[str, Mapping[str, int]]) -> bytes:
    """The output of the parser's process, which is killed if the request that waits for it ends."""
    await asyncio.to_thread(_on_disk, file)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(Path(body_parser.__file__)), json.dumps(limits)),
        stdin=file,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return output


def _on_disk(file: _File) -> None:
    """Writes what is still in memory, and goes to the beginning."""
    file.rollover()
    file.flush()
    file.seek(0)


def _json_error(message: str, position: int) -> dict[str, Any]:
    """As FastAPI reports it."""
    return {
        "type": "json_invalid",
        "loc": ("body", position),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": message},
    }


def _too_long(field: str, kind: str, most: int, got: int) -> ApiError:
    what = "prompts" if (field, kind) == ("prompt", "items") else _KINDS[kind]
    code = "context_length_exceeded" if kind in ("chars", "ids") else None
    message = f"{field}: expected at most {most} {what}, got {got}"
    return ApiError(400, message, code=code, param=field)


class BodyRoute(APIRoute):
    """A route whose large bodies are parsed in another process and checked in another thread.

    The application's state has the `context` that tells the limits.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler: FastAPI's own for small bodies."""
        handle = super().get_route_handler()
        fields = self.dependant.body_params
        if not fields:
            return handle
        (field,) = fields

        async def handle_any(request: Request) -> Response:
            announced = request.headers.get("content-length", "")
            if announced.isdecimal() and int(announced) <= SMALL_BYTES:
                return await handle(request)
            context: AppContext = request.app.state.context
            if announced:
                check_queue(context)
            with context.bodies.opened() as file:
                head = await run_in_time(context, request, lambda: _read(request, file, context))
                if head is None:
                    check_queue(context)
                    with context.bodies.counted():
                        values = await run_bounded(context, request, lambda: take(context, file))
            if head is not None:
                return await handle(Request(request.scope, _replayed(head, request.receive)))
            if self.dependant.request_param_name is not None:
                values[self.dependant.request_param_name] = request
            response: Response = await self.endpoint(**values)
            return response

        async def take(context: AppContext, file: _File) -> dict[str, Any]:
            document = await context.bodies.parse(file, context.body_limits)
            value, errors = await asyncio.to_thread(field.validate, document, {}, loc=("body",))
            if errors:
                raise RequestValidationError(errors)
            return {field.name: value}

        return handle_any


async def _read(request: Request, file: _File, context: AppContext) -> bytes | None:
    """Reads a body into the file; returns it if it is small after all, else None.

    Raises:
        ApiError: 408, it comes too slowly.
    """
    max_bytes = context.max_body_bytes
    announced = request.headers.get("content-length", "")
    num_bytes = int(announced) if announced.isdecimal() else max_bytes
    most_s = _READ_START_S + num_bytes / _READ_RATE
    reading = _read_pieces(request, file, context.bodies, max_bytes)
    try:
        return await asyncio.wait_for(reading, most_s)
    except asyncio.TimeoutError:
        message = f"body: expected it within {most_s:.3g} s, got a part of it"
        raise ApiError(408, message) from None


async def _read_pieces(
    request: Request, file: _File, bodies: LargeBodies, max_bytes: int
) -> bytes | None:
    size, pending = 0, bytearray()
    try:
        async for chunk in request.stream():
            size += len(chunk)
            pending += chunk
            if len(pending) > _PIECE_BYTES:
                await bodies.write(file, bytes(pending), max_bytes)
                pending.clear()
    except ClientDisconnect as error:
        raise ApiError(CLIENT_CLOSED, "the client closed the connection") from error
    if size <= SMALL_BYTES:
        return bytes(pending)
    await bodies.write(file, bytes(pending), max_bytes)
    return None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Brings a body that was read already, then what comes."""
    is_first = True

    async def replay() -> Message:
        nonlocal is_first
        if is_first:
            is_first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay
