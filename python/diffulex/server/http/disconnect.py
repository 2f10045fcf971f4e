# SPDX-License-Identifier: Apache-2.0
"""Notices that a client left, whatever its request is doing meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from starlette.types import Receive

__all__ = ["ClientLeftError", "DisconnectFlag", "run_while_connected", "watch_disconnect"]

T = TypeVar("T")


class ClientLeftError(Exception):
    """The client closed the connection; the answer has no reader."""


async def watch_disconnect(receive: Receive) -> None:
    """Returns when the client has left. The body of the request must have been read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def run_while_connected(
    receive: Receive,
    make_work: Callable[[Callable[[], Awaitable[bool]]], Coroutine[Any, Any, T]],
) -> T:
    """The result of the work, which is cancelled at once when the client leaves.

    Args:
        receive: the ASGI callable of the request.
        make_work: is given a function that tells whether the client has left.

    Raises:
        ClientLeftError: the client left first.
    """
    watcher = asyncio.ensure_future(watch_disconnect(receive))

    async def is_disconnected() -> bool:
        return watcher.done()

    work = asyncio.ensure_future(make_work(is_disconnected))
    try:
        await asyncio.wait({watcher, work}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientLeftError("the client closed the connection")
        return work.result()
    finally:
        watcher.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})


class DisconnectFlag:
    """Set once the client has left; in the form frontends ask for it."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """The client has left."""
        self._is_set = True

    async def is_set(self) -> bool:
        """Whether the client has left."""
        return self._is_set
