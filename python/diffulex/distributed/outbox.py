# SPDX-License-Identifier: Apache-2.0
"""Messages that keep nobody waiting, whatever their reader does: what does not fit the pipe a thread sends."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

__all__ = ["Outbox"]

_MAX_BYTES = 16 << 20
#: A larger message is not copied to stand behind its length.
_AT_ONCE_BYTES = 1 << 16
#: Before a message, as `multiprocessing.connection.Connection` has it.
_LENGTH = struct.Struct("!i")


class _Rest(bytes):
    """The end of a message whose beginning, with its length, is sent."""


def _is_socket(connection: Connection[Any, Any]) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(connection.fileno()).st_mode)
    except OSError:  # closed
        return False


def _send_without_waiting(handle: int, content: bytes) -> int:
    """Bytes that there was room for; BlockingIOError where there was none."""
    # The socket has the connection's handle and leaves it open. Sending does not look at the kind; where it
    # says that the handle does not block, `socket.setdefaulttimeout` does not make the handle so.
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, 0, handle)
    try:
        return end.send(content, socket.MSG_DONTWAIT)
    finally:
        end.detach()


def _send_all(connection: Connection[Any, Any], content: bytes) -> None:
    """OSError when the connection is closed meanwhile: its handle may be another file's then."""
    while content:
        content = content[os.write(connection.fileno(), content) :]


class Outbox:
    """The sending end of a pipe. Never refuses a message: whoever makes them looks at `is_full`.

    A small message that the pipe has room for is sent by whoever puts it, when none waits before it. It is in
    the pipe then, so that it neither counts as waiting nor is lost when this process ends.

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
        self._is_socket = _is_socket(connection)
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_full = self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._send, name="diffulex-outbox", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        """Sends it, at once or as soon as those before it are read; after the end it is lost.

        Raises whatever its pickling does.
        """
        content = bytes(ForkingPickler.dumps(message))
        with self._changed:
            if self._is_closed:
                return
            if self._num_bytes == 0 and self._is_socket and len(content) <= _AT_ONCE_BYTES:
                content = self._sent_at_once(content)
                if not content:
                    return
            self._waiting.append(content)
            self._num_bytes += len(content)
            self._is_full = self._is_full or self._num_bytes >= self._max_bytes
            self._changed.notify()

    def _sent_at_once(self, content: bytes) -> bytes:
        """What the thread has to send of a message that none waits before."""
        framed = _LENGTH.pack(len(content)) + content
        try:
            count = _send_without_waiting(self._connection.fileno(), framed)
        except BlockingIOError:
            return content
        except OSError:  # gone, or closed: its reader learns it too
            return b""
        return _Rest(framed[count:])

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
                if isinstance(content, _Rest):
                    _send_all(self._connection, content)
                else:
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
