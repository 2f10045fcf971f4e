# SPDX-License-Identifier: Apache-2.0
"""Server-sent events: frames, and the response that sends them.

A frame is `data: ` + JSON + an empty line. `data: [DONE]` ends every stream, also one that failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from diffulex.server.http.disconnect import watch_disconnect
from diffulex.server.http.json_response import encode_json

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "PING", "EventStream", "sse"]

DONE = b"data: [DONE]\n\n"
#: A comment, which every client skips; it keeps idle connections open.
PING = b": ping\n\n"

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


def sse(data: Any, *, event: str | None = None) -> bytes:
    """One frame; a text is sent as it is, anything else as JSON.

    Args:
        event: type of the event, for streams whose clients go by it.
    """
    body = data.encode("utf-8", "replace") if isinstance(data, str) else encode_json(data)
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + body + b"\n\n"


class EventStream(Response):
    """Sends frames as they come and stops when the client leaves.

    The frames are closed in every case: when they end, when the client leaves and when the server
    cancels the response.

    Args:
        frames: the frames; ends after the terminator.
        on_end: called once with whether everything was sent.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        *,
        headers: Mapping[str, str],
        on_end: Callable[[bool], None] | None = None,
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        # The length of a stream is not known.
        del self.headers["content-length"]
        self._frames = frames
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the response."""
        is_sent = False
        watcher = asyncio.ensure_future(watch_disconnect(receive))
        sender = asyncio.ensure_future(self._send_all(send))
        try:
            await asyncio.wait({watcher, sender}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                is_sent = sender.exception() is None
                # A client that left while a frame was written is no error of the server.
                error = sender.exception()
                if error is not None and not isinstance(error, OSError):
                    raise error
        finally:
            watcher.cancel()
            if not sender.done():
                sender.cancel()
                await _settled(sender)
            if self._on_end is not None:
                self._on_end(is_sent)

    async def _send_all(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _settled(task: asyncio.Future[Any]) -> None:
    """Waits for a cancelled task; the frames are closed by it, not by the garbage collector."""
    await asyncio.wait({task})
