# SPDX-License-Identifier: Apache-2.0
"""Messages that a thread sends, so that a reader who is slow or stops keeps nobody else waiting."""

from __future__ import annotations

import threading
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

__all__ = ["Outbox"]

_MAX_BYTES = 16 << 20


class Outbox:
    """The sending end of a pipe. Never refuses a message: whoever makes them looks at `is_full`.

    Args:
        connection: to the reader; no other thread may send there.
        on_room: called by the thread that sends, when the outbox was full and half of it is free again.
        max_bytes: pickled ones that may wait before it counts as full.
    """

    def __init__(
        self,
        connection: Connection[Any, Any],
        on_room: Callable[[], object],
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._connection = connection
        self._on_room = on_room
        self._max_bytes = max_bytes
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_full = self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._send, name="diffulex-outbox", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Sends it as soon as those before it are read. Raises whatever its pickling does."""
        content = bytes(ForkingPickler.dumps(message))
        with self._changed:
            self._waiting.append(content)
            self._num_bytes += len(content)
            self._is_full = self._is_full or self._num_bytes >= self._max_bytes
            self._changed.notify()

    @property
    def is_full(self) -> bool:
        """Whether to make no further messages until `on_room` is called."""
        return self._is_full

    def close(self) -> None:
        """Waits until everything is sent, or the reader is gone. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def drop(self) -> None:
        """Ends without waiting; what is not sent yet is lost."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify()

    def _send(self) -> None:
        while (content := self._next()) is not None:
            try:
                self._connection.send_bytes(content)
            except (
                OSError,
                TypeError,
            ):  # gone or, within a message, closed: its reader learns it too
                is_gone = True
            else:
                is_gone = False
            if self._is_sent(len(content), is_gone):
                self._on_room()

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return self._waiting.popleft() if self._waiting else None

    def _is_sent(self, num_bytes: int, is_gone: bool) -> bool:
        """Books a message; whether there is room again."""
        with self._changed:
            self._num_bytes -= num_bytes
            if is_gone:
                self._waiting.clear()
                self._num_bytes = 0
            has_room = self._is_full and self._num_bytes <= self._max_bytes // 2
            self._is_full = self._is_full and not has_room
            return has_room
