# SPDX-License-Identifier: Apache-2.0
"""What a thread hands to a task of an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

__all__ = ["Arrivals"]

_Item = TypeVar("_Item")


class Arrivals(Generic[_Item]):
    """What has come for a request and was not yet taken, on the event loop.

    An `asyncio.Queue` would do, but for programs that end while they wait: a future that its `get` no
    longer finds is printed, and CPython 3.11 crashes there once asyncio itself has been cleared.
    """

    def __init__(self) -> None:
        self._items: deque[_Item] = deque()
        self._has_some = asyncio.Event()

    def put(self, item: _Item) -> None:
        """Adds one; wakes who waits."""
        self._items.append(item)
        self._has_some.set()

    async def get(self) -> _Item:
        """The oldest, once there is one."""
        while not self._items:
            self._has_some.clear()
            await self._has_some.wait()
        return self._items.popleft()
