# SPDX-License-Identifier: Apache-2.0
"""Sockets between the processes: never full, never blocked, never fooled by garbage."""

from __future__ import annotations

import asyncio
import pickle
import queue
import subprocess
import sys
import threading

import msgpack
import pytest
import zmq

from diffulex.serving.zmq_queue import (
    CurveKeys,
    MessageDecodeError,
    SecureAddress,
    ZmqAsyncPullQueue,
    ZmqAsyncPushQueue,
    ZmqPullQueue,
    ZmqPushQueue,
    pack_message,
    unpack_message,
)
from diffulex.wire.protocol import (
    ServingAbort,
    serving_command_from_dict,
    serving_command_to_dict,
)

TIMEOUT_S = 20.0


@pytest.fixture
def addr(tmp_path):
    return f"ipc://{tmp_path}/q.ipc"


def pull(addr, create=True):
    return ZmqPullQueue(addr, create=create, decoder=serving_command_from_dict)


def push(addr, create=False):
    return ZmqPushQueue(addr, create=create, encoder=serving_command_to_dict)


def test_order_and_emptiness(addr):
    receiver, sender = pull(addr), push(addr)
    assert receiver.empty()
    for index in range(5):
        sender.put(ServingAbort(str(index)))
    assert receiver.get(TIMEOUT_S) == ServingAbort("0")
    assert not receiver.empty()
    assert [receiver.get(TIMEOUT_S).rid for _ in range(4)] == ["1", "2", "3", "4"]
    assert receiver.empty()
    sender.stop()
    receiver.stop()


def test_a_secure_address_needs_its_keys():
    """Any free port; the end that connects gets the keys but the secret of the other; others get nothing."""
    receiver = pull(SecureAddress("tcp://127.0.0.1:*", CurveKeys.new()))
    told = pickle.loads(pickle.dumps(receiver.addr.of_peer()))
    assert told == receiver.addr
    assert not told.endswith("*")
    assert told.keys.bound_secret is None
    strangers = [push(str(told)), push(SecureAddress(told, CurveKeys.new()))]
    for stranger in strangers:
        stranger.put(ServingAbort("stranger"))
    with pytest.raises(queue.Empty):
        receiver.get(0.5)
    sender = push(told)
    sender.put(ServingAbort("friend"))
    assert receiver.get(TIMEOUT_S) == ServingAbort("friend")
    for end in (sender, receiver, *strangers):
        end.stop()


def test_get_with_a_timeout(addr):
    receiver = pull(addr)
    with pytest.raises(queue.Empty):
        receiver.get(0.0)
    receiver.stop()


def test_far_more_than_the_default_high_water_mark(addr):
    """A connected PUSH with no live peer would block after 1000 messages."""
    sender = push(addr)
    for index in range(3000):
        sender.put(ServingAbort(str(index)))
    assert sender.num_dropped == 0
    receiver = pull(addr)
    assert [receiver.get(TIMEOUT_S).rid for _ in range(3000)] == [str(i) for i in range(3000)]
    sender.stop()
    receiver.stop()


def test_nobody_to_send_to(addr):
    """A bound PUSH without a peer drops rather than blocks the engine thread."""
    sender = push(addr, create=True)
    sender.put(ServingAbort("a"))
    sender.put(ServingAbort("b"))
    assert sender.num_dropped == 2
    sender.stop()


def test_stop_twice(addr):
    receiver = pull(addr)
    receiver.stop()
    receiver.stop()


def test_garbage_is_one_error_each(addr):
    receiver = pull(addr)
    context = zmq.Context()
    raw = context.socket(zmq.PUSH)
    raw.connect(addr)
    garbage = [b"", b"\xc1", b"\x81", msgpack.packb([1]), msgpack.packb({"type": "dance"})]
    for item in garbage:
        raw.send(item)
    raw.send(pack_message({"type": "abort", "rid": "a"}))
    for _ in garbage:
        with pytest.raises(MessageDecodeError):
            receiver.get(TIMEOUT_S)
    assert receiver.get(TIMEOUT_S) == ServingAbort("a")
    raw.send(msgpack.packb({"type": "dance"}))
    raw.send(pack_message({"type": "abort", "rid": "b"}))
    with pytest.raises(MessageDecodeError) as caught:
        receiver.get(TIMEOUT_S)
    assert caught.value.data == {"type": "dance"}
    assert receiver.get(TIMEOUT_S) == ServingAbort("b")
    raw.close(linger=0)
    context.term()
    receiver.stop()


def test_limits_of_a_message():
    with pytest.raises(MessageDecodeError):
        unpack_message(b"\xdd\x7f\xff\xff\xff")  # a list of two billion items


def test_both_sides_in_an_event_loop(addr):
    async def run():
        receiver = ZmqAsyncPullQueue(addr, create=True, decoder=serving_command_from_dict)
        sender = ZmqAsyncPushQueue(addr, create=False, encoder=serving_command_to_dict)
        await sender.put(ServingAbort("a"))
        item = await asyncio.wait_for(receiver.get(), TIMEOUT_S)
        sender.stop()
        sender.stop()
        receiver.stop()
        return item

    assert asyncio.run(run()) == ServingAbort("a")


def test_several_senders_fan_in(addr):
    receiver = pull(addr)

    def work(name):
        sender = push(addr)
        for _ in range(50):
            sender.put(ServingAbort(name))
        sender.stop(linger_s=TIMEOUT_S)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    got = [receiver.get(TIMEOUT_S).rid for _ in range(100)]
    assert sorted(got) == ["a"] * 50 + ["b"] * 50
    for thread in threads:
        thread.join()
    receiver.stop()


def test_bad_address():
    with pytest.raises(RuntimeError, match="zmq_queue: cannot bind ipc:///nowhere/at/all"):
        pull("ipc:///nowhere/at/all")


def test_light_imports():
    """These modules load neither torch nor the extension, and need no optional package yet."""
    code = (
        "import sys\n"
        "for name in ('zmq', 'msgpack'): sys.modules[name] = None\n"
        "from diffulex.serving import backend_worker, frontend, zmq_queue\n"
        "from diffulex.server import launch\n"
        "from diffulex.wire import protocol\n"
        "bad = {'torch', 'transformers', 'diffulex_ext'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "try:\n"
        "    zmq_queue.ZmqPushQueue('ipc://x', create=False, encoder=dict)\n"
        "except RuntimeError as error:\n"
        "    assert 'pyzmq' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('expected a RuntimeError')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
