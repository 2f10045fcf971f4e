# SPDX-License-Identifier: Apache-2.0
"""Messages that a thread sends: in order, all of them, and none waits for the reader but the thread."""

from __future__ import annotations

import multiprocessing
import pickle
import threading

import pytest

from diffulex.distributed.outbox import Outbox
from fixtures.gate import Gate

_TIMEOUT_S = 120.0


def test_everything_arrives_in_order_and_before_the_end() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
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


def test_a_reader_that_is_gone_is_not_waited_for() -> None:
    reader, writer = multiprocessing.Pipe()
    has_room = threading.Event()
    outbox = Outbox(writer, has_room.set, max_bytes=1)
    reader.close()
    outbox.put(("lost",))
    assert has_room.wait(_TIMEOUT_S)
    outbox.put(("lost too",))
    outbox.close()
    assert not outbox.is_full


def test_what_does_not_pickle_is_the_error_of_whoever_sends_it() -> None:
    gate = Gate()
    outbox = Outbox(gate, lambda: None)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        outbox.put(threading.Lock())
    gate.let_through(1)
    outbox.put("next")
    outbox.close()
    assert gate.next() == "next"
