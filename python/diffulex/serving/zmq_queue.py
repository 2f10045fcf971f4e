# SPDX-License-Identifier: Apache-2.0
"""Queues between the two processes: msgpack maps over ZMQ PUSH and PULL sockets.

The frontend binds its two sockets, the backend connects its two. Threads never share a queue.
"""

from __future__ import annotations

import functools
import importlib
import queue
import time
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from diffulex.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CurveKeys",
    "MessageDecodeError",
    "SecureAddress",
    "ZmqAsyncPullQueue",
    "ZmqAsyncPushQueue",
    "ZmqPullQueue",
    "ZmqPushQueue",
    "pack_message",
    "unpack_message",
]

logger = get_logger(__name__)

Item = TypeVar("Item")

_DROP_LOG_INTERVAL_S = 10.0
# A prompt of 262,144 tokens takes 1.3 MB; what exceeds these limits is no message of ours.
_MAX_MESSAGE_BYTES = 256 << 20
_MAX_TEXT_BYTES = 64 << 20
_MAX_ITEMS = 4 << 20


class MessageDecodeError(ValueError):
    """A message is not a map this side reads. `data` is the map, where there is one."""

    def __init__(self, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.data = data


@functools.cache
def _require(package: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RuntimeError(
            f"zmq_queue: expected the package {package} (pip install '.[serve]' in the source"
            " directory), got none"
        ) from error


def pack_message(data: dict[str, Any]) -> bytes:
    """The bytes of a map."""
    packed: bytes = _require("msgpack", "msgpack").packb(data, use_bin_type=True)
    return packed


def unpack_message(packed: bytes) -> Any:
    """The value in the bytes.

    Raises:
        MessageDecodeError: they are not one msgpack value within the limits.
    """
    msgpack = _require("msgpack", "msgpack")
    if len(packed) > _MAX_MESSAGE_BYTES:
        raise MessageDecodeError(
            f"message: expected at most {_MAX_MESSAGE_BYTES} bytes, got {len(packed)}"
        )
    try:
        return msgpack.unpackb(
            packed,
            raw=False,
            max_str_len=_MAX_TEXT_BYTES,
            max_bin_len=_MAX_TEXT_BYTES,
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
        )
    except Exception as error:  # msgpack raises several unrelated types for bad bytes
        raise MessageDecodeError(
            f"message: expected one msgpack value, got {len(packed)} bytes ({error})"
        ) from error


class CurveKeys(NamedTuple):
    """What the two ends of a socket encrypt by. Who does not know `bound_public` cannot connect.

    Attributes:
        bound_secret: of the end that is bound, which alone has it.
        own_public: of the end that connects, like the secret.
    """

    bound_public: bytes
    bound_secret: bytes | None
    own_public: bytes
    own_secret: bytes

    @classmethod
    def new(cls) -> CurveKeys:
        """New keys, which no process has yet."""
        zmq = _require("pyzmq", "zmq")
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def use(self, socket: Any, *, is_bound: bool) -> None:
        """Encrypts what goes over a socket."""
        if is_bound:
            socket.curve_server = True
            socket.curve_secretkey, socket.curve_publickey = self.bound_secret, self.bound_public
        else:
            socket.curve_serverkey = self.bound_public
            socket.curve_secretkey, socket.curve_publickey = self.own_secret, self.own_public


class SecureAddress(str):
    """The address of a socket that other hosts reach, with the keys of both ends."""

    keys: CurveKeys

    def __new__(cls, address: str, keys: CurveKeys) -> SecureAddress:
        self = super().__new__(cls, address)
        self.keys = keys
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SecureAddress, (str(self), self.keys)

    def of_peer(self) -> SecureAddress:
        """What the end that connects is told."""
        return SecureAddress(self, self.keys._replace(bound_secret=None))


class _Queue(Generic[Item]):
    """A socket of one kind, and its context."""

    def __init__(self, addr: str, *, create: bool, kind: str, is_async: bool) -> None:
        zmq = _require("pyzmq", "zmq")
        _require("msgpack", "msgpack")
        factory = _require("pyzmq", "zmq.asyncio") if is_async else zmq
        self.addr = addr
        self._zmq = zmq
        self._context = factory.Context()
        #: For use in one `zmq.Poller` with others.
        self.socket: Any = self._context.socket(getattr(zmq, kind))
        self.socket.setsockopt(zmq.LINGER, 0)
        # A full queue would block the engine thread, so it never is: the memory is bounded by
        # coalescing in the frontend and by the backend's check for orphanhood.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        if isinstance(addr, SecureAddress):
            addr.keys.use(self.socket, is_bound=create)
        try:
            if create:
                self.socket.bind(addr)
                if addr.endswith(":*"):  # any free port
                    bound = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
                    self.addr = bound
                    if isinstance(addr, SecureAddress):
                        self.addr = SecureAddress(bound, addr.keys)
            else:
                self.socket.connect(addr)
        except zmq.ZMQError as error:
            self.stop()
            action = "bind" if create else "connect"
            raise RuntimeError(f"zmq_queue: cannot {action} {addr}: {error}") from error

    def stop(self, linger_s: float = 0.0) -> None:
        """Closes the socket; what is not sent by then gets `linger_s`. Idempotent."""
        if self.socket.closed:
            return
        self.socket.close(linger=int(linger_s * 1000))
        self._context.term()


class _Decoder(Generic[Item]):
    def __init__(self, decoder: Callable[[Any], Item]) -> None:
        self._decoder = decoder

    def __call__(self, packed: bytes) -> Item:
        data = unpack_message(packed)
        try:
            return self._decoder(data)
        except Exception as error:  # whatever a peer sends, the loop that reads must go on
            raise MessageDecodeError(str(error), data) from error


class ZmqPushQueue(_Queue[Item]):
    """Sends objects. `put` never blocks."""

    def __init__(
        self, addr: str, *, create: bool, encoder: Callable[[Item], dict[str, Any]]
    ) -> None:
        super().__init__(addr, create=create, kind="PUSH", is_async=False)
        self._encoder = encoder
        self.num_dropped = 0
        self._logged_at = -_DROP_LOG_INTERVAL_S

    def put(self, item: Item) -> None:
        """Sends the object; drops it, counted, when no peer is connected."""
        packed = pack_message(self._encoder(item))
        try:
            self.socket.send(packed, flags=self._zmq.NOBLOCK)
        except self._zmq.Again:
            self.num_dropped += 1
            now = time.monotonic()
            if now - self._logged_at >= _DROP_LOG_INTERVAL_S:
                self._logged_at = now
                logger.warning("%s: no peer receives: %d dropped", self.addr, self.num_dropped)


class ZmqPullQueue(_Queue[Item]):
    """Receives objects."""

    def __init__(self, addr: str, *, create: bool, decoder: Callable[[Any], Item]) -> None:
        super().__init__(addr, create=create, kind="PULL", is_async=False)
        self._decode = _Decoder(decoder)

    def get(self, timeout_s: float | None = None) -> Item:
        """The next object; waits for it.

        Raises:
            queue.Empty: none came within `timeout_s`.
            MessageDecodeError: the message cannot be read; the next call reads the next one.
        """
        if timeout_s is not None and not self.socket.poll(max(0, int(timeout_s * 1000))):
            raise queue.Empty
        return self._decode(self.socket.recv())

    def empty(self) -> bool:
        """Whether `get` would wait."""
        return not self.socket.poll(0)


class ZmqAsyncPushQueue(_Queue[Item]):
    """Sends objects from an event loop."""

    def __init__(
        self, addr: str, *, create: bool, encoder: Callable[[Item], dict[str, Any]]
    ) -> None:
        super().__init__(addr, create=create, kind="PUSH", is_async=True)
        self._encoder = encoder

    async def put(self, item: Item) -> None:
        """Sends the object; waits while no peer is connected."""
        await self.socket.send(pack_message(self._encoder(item)))


class ZmqAsyncPullQueue(_Queue[Item]):
    """Receives objects in an event loop."""

    def __init__(self, addr: str, *, create: bool, decoder: Callable[[Any], Item]) -> None:
        super().__init__(addr, create=create, kind="PULL", is_async=True)
        self._decode = _Decoder(decoder)

    async def get(self) -> Item:
        """The next object.

        Raises:
            MessageDecodeError: the message cannot be read; the next call reads the next one.
        """
        return self._decode(await self.socket.recv())
