# SPDX-License-Identifier: Apache-2.0
"""Messages are sent in order, all of them, and nobody waits for the reader but the thread of the outbox."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from diffulex.distributed import outbox as module
from diffulex.distributed.outbox import Outbox
from fixtures.gate import Gate

_TIMEOUT_S = 120.0


#: Processes have sockets; whatever else can be sent to takes a message whole.
KINDS = pytest.mark.parametrize("is_socket", [True, False], ids=["socket", "pipe"])


@KINDS
def test_everything_arrives_in_order_and_before_the_end(is_socket: bool) -> None:
    reader, writer = multiprocessing.Pipe(duplex=is_socket)
    outbox = Outbox(writer, lambda: None)
    messages = [(number, "x" * 4096) for number in range(500)]  # more than a pipe holds
    for message in messages:
        outbox.put(message)
    assert [reader.recv() for _ in messages] == messages
    outbox.put(("last",))
    outbox.close()
    outbox.close()
    assert reader.recv() == ("last",)
    writer.close()
    with pytest.raises(EOFError):
        reader.recv()


def test_whoever_puts_a_small_message_sends_it() -> None:
    """It is there at once, and does not wait in the outbox."""
    reader, writer = multiprocessing.Pipe()
    outbox = Outbox(writer, lambda: None, max_bytes=1)
    for number in range(20):
        outbox.put(("message", number))
        assert reader.poll(0)
        assert not outbox.is_full
        assert reader.recv() == ("message", number)
    outbox.put("x" * (1 << 20))  # for the thread
    assert outbox.is_full
    outbox.put("after it")
    assert len(reader.recv()) == 1 << 20
    assert reader.recv() == "after it"
    outbox.close()
    assert not outbox.is_full


def test_messages_that_the_pipe_has_room_for_in_part() -> None:
    """Of all lengths, and from several threads; the reader is slow at first and fast later."""
    reader, writer = multiprocessing.Pipe()
    with socket.socket(fileno=socket.dup(writer.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    outbox = Outbox(writer, lambda: None)
    lengths = [1, 100, 5000, 20_000, 65_000, 65_529, 65_536, 70_000, 300_000]
    count, threads = 20, 3

    def put(which: int) -> None:
        for number in range(count):
            length = lengths[(which + number) % len(lengths)]
            outbox.put((which, number, bytes([number]) * length))

    with ThreadPoolExecutor(threads) as pool:
        done = [pool.submit(put, which) for which in range(threads)]
        for each in done:
            each.result(_TIMEOUT_S)  # though nobody has read
    seen: dict[int, list[int]] = {which: [] for which in range(threads)}
    for _ in range(threads * count):
        which, number, content = reader.recv()
        assert content == bytes([number]) * lengths[(which + number) % len(lengths)]
        seen[which].append(number)
    assert all(numbers == list(range(count)) for numbers in seen.values())
    outbox.close()
    assert not reader.poll(0)


@pytest.fixture(params=[0.0, 30.0])
def default_timeout_s(request: pytest.FixtureRequest) -> Iterator[float]:
    """That of new sockets of this process, which a program may set for connections of its own."""
    socket.setdefaulttimeout(request.param)
    yield request.param
    socket.setdefaulttimeout(None)


@pytest.mark.usefixtures("default_timeout_s")
def test_a_default_timeout_of_sockets_is_none_of_the_pipe() -> None:
    reader, writer = multiprocessing.Pipe()
    outbox = Outbox(writer, lambda: None)
    messages = [(number, "x" * 50_000) for number in range(20)]  # more than a pipe holds
    messages.append((20, "x" * 1_000_000))
    begin = time.monotonic()
    for message in messages:
        outbox.put(message)
        assert os.get_blocking(writer.fileno())
    assert time.monotonic() - begin < 20  # nobody reads
    assert [reader.recv() for _ in messages] == messages
    outbox.close()
    assert os.get_blocking(writer.fileno())


def test_the_rest_of_a_message_goes_to_no_other_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which has the handle of the connection as soon as that is closed."""
    reader, writer = multiprocessing.Pipe()
    handle, taken = writer.fileno(), threading.Event()

    def write(to: int, content: bytes) -> int:
        """Sends a part, as where a signal interrupts it. Then the connection's handle is another file's."""
        count = os.write(to, content[:100])
        if not taken.is_set():
            writer.close()
            other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
            if other != handle:
                os.dup2(other, handle)
                os.close(other)
            taken.set()
        return count

    monkeypatch.setattr(module, "os", SimpleNamespace(write=write, fstat=os.fstat))
    with socket.socket(fileno=socket.dup(handle)) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    outbox = Outbox(writer, lambda: None)
    outbox.put("x" * 60_000)  # for most of which there is no room
    received = os.read(reader.fileno(), 1 << 16)
    outbox.close()
    assert taken.is_set()
    while more := os.read(reader.fileno(), 1 << 16):
        received += more
    assert 100 < len(received) < 60_000
    assert os.fstat(handle).st_size == 0
    os.close(handle)


@KINDS
@pytest.mark.parametrize("end", [Outbox.close, Outbox.drop])
def test_nothing_is_sent_after_the_end(is_socket: bool, end: Callable[[Outbox], None]) -> None:
    reader, writer = multiprocessing.Pipe(duplex=is_socket)
    outbox = Outbox(writer, lambda: None)
    outbox.put("before")
    assert reader.recv() == "before"
    end(outbox)
    outbox.put("after")
    outbox.close()
    assert not reader.poll(0)
    assert not outbox._waiting


def test_full_until_half_of_it_is_read() -> None:
    gate, has_room = Gate(), threading.Event()
    size = len(pickle.dumps(("message", 0)))
    outbox = Outbox(gate, has_room.set, max_bytes=4 * size)
    for number in range(3):
        outbox.put(("message", number))
    assert not outbox.is_full
    outbox.put(("message", 3))
    outbox.put(("message", 4))  # taken all the same
    assert outbox.is_full
    for number in range(2):
        gate.let_through(1)
        assert gate.next() == ("message", number)
    assert outbox.is_full
    assert not has_room.is_set()
    gate.let_through(1)
    assert has_room.wait(_TIMEOUT_S)
    assert not outbox.is_full
    gate.let_through(2)
    outbox.close()
    assert [gate.next()[1] for _ in range(3)] == [2, 3, 4]


@KINDS
def test_a_reader_that_is_gone_is_not_waited_for(is_socket: bool) -> None:
    reader, writer = multiprocessing.Pipe(duplex=is_socket)
    has_room = threading.Event()
    outbox = Outbox(writer, has_room.set, max_bytes=1)
    reader.close()
    outbox.put("x" * (1 << 20))
    assert has_room.wait(_TIMEOUT_S)
    outbox.put(("lost too",))
    outbox.close()
    assert not outbox.is_full
    writer.close()
    outbox.put(("after the end",))


def test_what_does_not_pickle_is_the_error_of_whoever_sends_it() -> None:
    gate = Gate()
    outbox = Outbox(gate, lambda: None)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        outbox.put(threading.Lock())
    gate.let_through(1)
    outbox.put("next")
    outbox.close()
    assert gate.next() == "next"
