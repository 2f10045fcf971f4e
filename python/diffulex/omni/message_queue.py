# SPDX-License-Identifier: Apache-2.0
"""One writer, several readers, and the way back: ZMQ for messages, shared memory for large broadcasts.

The engine binds a ROUTER socket in a directory that only this user can enter; every worker connects a
DEALER socket whose identity is its rank. A message is

    header  magic, version, kind, sequence number, length of the body, number of buffers
    body    msgpack map: the value, and for each buffer null or its block of shared memory
    buffer  data of one array, for each null

A broadcast buffer of at least `shm_threshold` bytes is written once into a block of shared memory, where
there is room for it. Its writer removes the block when all readers have copied it, when a reader is gone, and at the latest when
the queue is closed or its process ends, however it ends.
"""

from __future__ import annotations

import itertools
import os
import queue
import secrets
import shutil
import struct
import sys
import tempfile
import weakref
from contextlib import suppress
from enum import IntEnum
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.errors import ConfigError
from diffulex.log import get_logger
from diffulex.omni.message_codec import Buffer, decode, encode
from diffulex.serving.zmq_queue import MessageDecodeError, pack_message, unpack_message

if TYPE_CHECKING:
    import zmq

__all__ = ["Kind", "Message", "MessageQueue", "QueueHandle"]

_MAGIC = b"DXOM"
_VERSION = 1
_HEADER = struct.Struct("<4sHHQQI")
_SOCKET = "queue.sock"
#: Bytes of a body that no limit of its readers concerns.
_LIKELY_READ = 1 << 20

logger = get_logger(__name__)


def _import_zmq() -> Any:
    """The module, which an installation without the extra lacks: help and errors need none."""
    try:
        import zmq  # noqa: PLC0415 (optional)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "omni: expected the package pyzmq (pip install '.[omni]' in the source directory), got none"
        ) from error
    return zmq


class Kind(IntEnum):
    """What a message is; the first five come from workers."""

    HELLO = 1  #: a reader is connected; handled by the queue
    ACK = 2  #: a reader has copied the shared memory of a message; handled by the queue
    READY = 3  #: the worker can take requests, or why not
    DONE = 4  #: the worker has done what was asked, or why not; rank 0 carries the result
    PROGRESS = 5  #: a step is done; the leader waits for an answer
    RPC = 6  #: call of a method
    ANSWER = 7  #: to PROGRESS: go on, stop or show a preview
    ABORT = 8  #: stop at the next step
    SHUTDOWN = 9
    HEARTBEAT = 10  #: from a thread of a busy worker


class Message(NamedTuple):
    """What is received. `rank` is the sender's; 0 in messages of the engine."""

    kind: Kind
    seq: int
    value: Any
    rank: int = 0


class QueueHandle(NamedTuple):
    """What a reader needs to connect."""

    directory: str
    num_readers: int


class _Ticket(NamedTuple):
    """A broadcast whose shared memory is still being read."""

    blocks: list[SharedMemory]
    waiting: set[int]


class MessageQueue:
    """The engine's end; `create_from_handle` makes a reader's. Belongs to one thread.

    Args:
        num_readers: ranks 0 to num_readers - 1 will connect.
        shm_threshold: bytes from which on a broadcast buffer goes through shared memory.

    Raises:
        ConfigError: without pyzmq, or in a temporary directory whose name is too long for a socket.
    """

    def __init__(self, num_readers: int, shm_threshold: int = 1 << 20) -> None:
        directory = tempfile.mkdtemp(prefix="dxom-")
        try:
            self._open(QueueHandle(directory, num_readers), None)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._threshold = shm_threshold
        self._is_full = False
        self._connected: set[int] = set()
        self._tickets: dict[int, _Ticket] = {}
        self._ticket_numbers = itertools.count(1)
        self._cleanup = weakref.finalize(self, _remove, os.getpid(), self._tickets, directory)

    @classmethod
    def create_from_handle(
        cls, handle: QueueHandle, rank: int, *, is_second: bool = False
    ) -> MessageQueue:
        """A reader, connected; `is_second`: a further socket of the rank, which receives nothing."""
        reader = cls.__new__(cls)
        reader._open(handle, f"{rank}b" if is_second else str(rank))
        if not is_second:
            reader.enqueue(Kind.HELLO)
        return reader

    def export_handle(self) -> QueueHandle:
        """What readers connect with; plain data."""
        return self.handle

    def _open(self, handle: QueueHandle, identity: str | None) -> None:
        self.handle = handle
        self._is_reader = identity is not None
        package = _import_zmq()
        path = Path(handle.directory) / _SOCKET
        size, most = len(os.fsencode(path)), package.IPC_PATH_MAX_LEN
        if size > most:
            text = f"expected a socket in it to have a path of at most {most} bytes, got {size}"
            raise ConfigError(f"TMPDIR: {text}: {path}")
        self._refusal: type[zmq.ZMQError] = package.ZMQError
        self._context: zmq.Context[zmq.Socket[bytes]] = package.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(
            package.DEALER if self._is_reader else package.ROUTER
        )
        for option in (package.LINGER, package.SNDHWM, package.RCVHWM):
            self._socket.setsockopt(option, 0)
        address = f"ipc://{path}"
        if identity is None:
            self._socket.setsockopt(package.ROUTER_MANDATORY, 1)
            self._socket.bind(address)
        else:
            self._socket.setsockopt(package.IDENTITY, identity.encode())
            self._socket.connect(address)

    def enqueue(
        self, kind: Kind, value: Any = None, *, seq: int = 0, ranks: tuple[int, ...] | None = None
    ) -> None:
        """Sends to the engine, or from it to some ranks, to all by default. Never waits.

        Raises:
            TypeError: the value is not data.
            ValueError: it is more than the other end reads.
            ConnectionError: a reader is not connected.
        """
        tree, buffers = encode(value)
        if self._is_reader:
            self._socket.send_multipart(_frames(kind, seq, tree, buffers), copy=False)
            return
        targets = tuple(range(self.handle.num_readers)) if ranks is None else ranks
        large = [len(targets) > 1 and b.nbytes >= self._threshold for b in buffers]
        ticket, table = self._share(buffers, large, targets) if any(large) else (0, None)
        try:
            frames = _frames(kind, seq, tree, buffers, table, ticket)
        except ValueError:
            if ticket:
                _unlink(self._tickets.pop(ticket))
            raise
        for rank in targets:
            self._send(rank, frames)

    def _send(self, rank: int, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart([str(rank).encode(), *frames])
        except self._refusal as error:
            self.forget(rank)
            raise ConnectionError(
                f"message queue: expected a connected reader {rank}, got {error}"
            ) from error

    def _share(
        self, buffers: list[memoryview], large: list[bool], ranks: tuple[int, ...]
    ) -> tuple[int, list[list[Any] | None]]:
        """Number of the ticket, and for each buffer its block or None: it is sent with the message."""
        number = next(self._ticket_numbers)
        blocks: list[SharedMemory] = []
        table: list[list[Any] | None] = []
        self._tickets[number] = _Ticket(blocks, set(ranks))
        for data, is_large in zip(buffers, large):
            block = self._make_block(data.nbytes) if is_large else None
            table.append(None if block is None else [block.name, data.nbytes])
            if block is not None:
                blocks.append(block)
                view = block.buf
                assert view is not None
                view[: data.nbytes] = data
        if not blocks:
            del self._tickets[number]
            number = 0
        return number, table

    def _make_block(self, num_bytes: int) -> SharedMemory | None:
        try:
            return _reserve(num_bytes)
        except OSError as error:
            if not self._is_full:
                self._is_full = True
                logger.warning(
                    "image workers: expected shared memory for %d bytes, got: %s; they are sent to"
                    " each worker instead",
                    num_bytes,
                    error,
                )
            return None

    def dequeue(self, timeout_s: float | None = None) -> Message:
        """The next message; waits for it.

        Raises:
            queue.Empty: none came within `timeout_s`.
            MessageDecodeError: a message cannot be read; the next call reads the next one.
        """
        while True:
            timeout = None if timeout_s is None else max(0, int(timeout_s * 1000))
            if not self._socket.poll(timeout):
                raise queue.Empty
            frames: list[Any] = self._socket.recv_multipart(copy=False)
            rank = 0
            if not self._is_reader:
                rank = int(frames.pop(0).bytes.rstrip(b"b"))
            message = self._read(frames, rank)
            if message.kind == Kind.HELLO:
                self._connected.add(rank)
            elif message.kind == Kind.ACK:
                self._release(message.seq, rank)
            else:
                return message

    def _read(self, frames: list[Any], rank: int) -> Message:
        try:
            magic, version, kind, seq, length, count = _HEADER.unpack(frames[0].bytes)
            if (magic, version) != (_MAGIC, _VERSION) or length != len(frames[1]):
                raise ValueError(
                    f"message: expected {_MAGIC!r} {_VERSION}, got {magic!r} {version}"
                )
            body = unpack_message(frames[1].bytes)
            inline = iter(frame.buffer for frame in frames[2:])
            table = body["table"] or [None] * count
            buffers: list[Buffer] = [_copy(*e) if e is not None else next(inline) for e in table]
            if body["ticket"]:
                self.enqueue(Kind.ACK, seq=body["ticket"])
            return Message(Kind(kind), seq, decode(body["value"], buffers), rank)
        except Exception as error:  # whatever a peer sends, the loop that reads must go on
            raise MessageDecodeError(f"message of rank {rank}: {error}") from error

    def wait_connected(self, timeout_s: float) -> None:
        """Waits for the first word of every reader; for readers that say nothing else.

        Raises:
            queue.Empty: not all of them came within `timeout_s`.
        """
        while len(self._connected) < self.handle.num_readers:
            if not self._socket.poll(int(timeout_s * 1000)):
                raise queue.Empty
            with suppress(queue.Empty):
                self.dequeue(0)

    def forget(self, rank: int) -> None:
        """A reader is gone: what only it had not read is removed."""
        for number in tuple(self._tickets):
            self._release(number, rank)

    def _release(self, number: int, rank: int) -> None:
        ticket = self._tickets.get(number)
        if ticket is None:
            return
        ticket.waiting.discard(rank)
        if not ticket.waiting:
            _unlink(self._tickets.pop(number))

    def close(self) -> None:
        """Removes what the queue has made. May be called again."""
        if self._socket.closed:
            return
        # A reader's last words, the reason of a failed start, still have to leave.
        self._socket.close(linger=1000 if self._is_reader else 0)
        self._context.term()
        if not self._is_reader:
            self._cleanup()


def _frames(
    kind: Kind,
    seq: int,
    tree: Any,
    buffers: list[memoryview],
    table: list[Any] | None = None,
    ticket: int = 0,
) -> list[Any]:
    body = pack_message({"value": tree, "table": table, "ticket": ticket})
    if len(body) > _LIKELY_READ:
        unpack_message(body)  # a reader that fails at it would end
    header = _HEADER.pack(_MAGIC, _VERSION, kind, seq, len(body), len(buffers))
    inline = [b for index, b in enumerate(buffers) if table is None or table[index] is None]
    return [header, body, *inline]


def _reserve(num_bytes: int) -> SharedMemory:
    """A new block whose memory is there: writing to memory that is not would end the process.

    Raises:
        OSError: there is not that much.
    """
    # Processes of two containers may share memory and have the same number.
    name = f"dxom-{os.getpid()}-{secrets.token_hex(8)}"
    block = SharedMemory(name, create=True, size=num_bytes)
    if sys.platform == "linux":  # elsewhere creating a block reserves its memory
        try:
            file = os.open(f"/dev/shm/{name}", os.O_RDWR)
            try:
                os.posix_fallocate(file, 0, num_bytes)
            finally:
                os.close(file)
        except OSError:
            block.close()
            block.unlink()
            raise
    return block


def _copy(name: str, num_bytes: int) -> bytes:
    """The data of a block of the writer."""
    if sys.version_info >= (3, 13):
        block = SharedMemory(name, track=False)
    else:  # attaching registers too, and the end of the first reader would remove the block
        block = SharedMemory(name)
        resource_tracker.unregister("/" + name.lstrip("/"), "shared_memory")
    try:
        view = block.buf
        assert view is not None
        return bytes(view[:num_bytes])
    finally:
        block.close()


def _unlink(ticket: _Ticket) -> None:
    for block in ticket.blocks:
        block.close()
        with suppress(FileNotFoundError):
            block.unlink()


def _remove(owner: int, tickets: dict[int, _Ticket], directory: str) -> None:
    if os.getpid() != owner:  # a fork of the engine's process ends: nothing of this is its own
        return
    while tickets:
        _unlink(tickets.popitem()[1])
    shutil.rmtree(directory, ignore_errors=True)
