# SPDX-License-Identifier: Apache-2.0
"""The queue of the image engine: values, order, shared memory, readers that are gone."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from pathlib import Path

import numpy as np
import pytest

zmq = pytest.importorskip("zmq", reason="pip install '.[omni]'")

from diffulex.errors import ConfigError  # noqa: E402
from diffulex.omni.message_codec import decode, encode  # noqa: E402
from diffulex.omni.message_queue import Kind, MessageQueue  # noqa: E402
from diffulex.serving import zmq_queue  # noqa: E402
from diffulex.serving.zmq_queue import MessageDecodeError  # noqa: E402

WAIT_S = 120


def blocks():
    """Names in shared memory that this process has made."""
    return [path.name for path in Path("/dev/shm").glob(f"dxom-{os.getpid()}-*")]


@pytest.fixture
def pair():
    """A queue with one reader in this process."""
    writer = MessageQueue(1)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.wait_connected(WAIT_S)
    yield writer, reader
    reader.close()
    writer.close()
    assert not Path(writer.handle.directory).exists()


def test_values_come_back_as_they_were():
    torch = pytest.importorskip("torch", reason="needs torch")
    value = {
        "plain": [None, True, 3, 2**62, 0.1, "é", b"\0"],
        "nested": ((1, (2,)), {"a": []}),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(0.5),
        "half": torch.tensor([[1.5, -2.0]]).to(torch.bfloat16),
        "zero": torch.tensor(7),
    }
    tree, buffers = encode(value)
    got = decode(tree, [bytes(buffer) for buffer in buffers])
    assert got["plain"] == value["plain"]
    assert got["nested"] == value["nested"]
    for name in ("array", "empty", "scalar"):
        assert got[name].dtype == value[name].dtype
        assert np.array_equal(got[name], value[name])
    for name in ("half", "zero"):
        assert got[name].dtype == value[name].dtype
        assert torch.equal(got[name], value[name])
    got["array"][0] = 0  # its own memory


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "message: expected numbers, texts, lists, maps or arrays, got a object"),
        ({1: 2}, "message: expected names as keys of a map, got [1]"),
        ({"$": 2}, "message: expected names as keys of a map, got ['$']"),
        (1 << 64, "message: expected integers of at most 64 bits, got 0x10000000000000000"),
        (np.array([print]), "message: expected an array of numbers, got object"),
    ],
)
def test_what_is_no_data_is_refused(value, message):
    with pytest.raises(TypeError) as raised:
        encode({"inner": [value]})
    assert str(raised.value) == message


def test_pictures_keep_their_pixels():
    pictures = pytest.importorskip("PIL.Image", reason="pip install '.[omni]'")
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    tree, buffers = encode((pictures.fromarray(pixels),))
    (got,) = decode(tree, buffers)
    assert np.array_equal(np.asarray(got), pixels)


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_pictures_keep_their_palette(mode):
    pictures = pytest.importorskip("PIL.Image", reason="pip install '.[omni]'")
    picture = pictures.new("P", (2, 1))
    picture.putpalette(bytes(range(10, 10 + 2 * len(mode))), mode)
    picture.putdata([0, 1])
    if mode == "RGB":
        picture.info["transparency"] = 1
    tree, buffers = encode(picture)
    got = decode(tree, buffers)
    assert got.mode == "P"
    expected = np.asarray(picture.convert("RGBA"))
    assert np.array_equal(np.asarray(got.convert("RGBA")), expected)
    assert expected[0, 0, 0] == 10


def test_three_readers_get_all_messages_in_order():
    writer, got = MessageQueue(3), {}

    def read(rank):
        reader = MessageQueue.create_from_handle(writer.export_handle(), rank)
        got[rank] = [reader.dequeue(WAIT_S).value for _ in range(10_000)]
        reader.enqueue(Kind.DONE, rank, seq=9)
        reader.close()

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    writer.wait_connected(WAIT_S)
    for number in range(10_000):
        writer.enqueue(Kind.RPC, number, seq=number)
    answers = [writer.dequeue(WAIT_S) for _ in range(3)]
    assert sorted((m.rank, m.value, m.seq, m.kind) for m in answers) == [
        (rank, rank, 9, Kind.DONE) for rank in range(3)
    ]
    for thread in threads:
        thread.join(WAIT_S)
    assert got == {rank: list(range(10_000)) for rank in range(3)}
    with pytest.raises(ConnectionError, match="expected a connected reader 0"):
        writer.enqueue(Kind.RPC)
    writer.close()
    writer.close()


def test_one_message_for_one_reader(pair):
    writer, reader = pair
    writer.enqueue(Kind.ABORT, "x", seq=4, ranks=(0,))
    assert reader.dequeue(WAIT_S)[:3] == (Kind.ABORT, 4, "x")
    with pytest.raises(queue.Empty):
        reader.dequeue(0)


def test_bytes_of_others_are_an_error_and_the_next_message_is_read(pair):
    writer, reader = pair
    for frames in ([b"x"], [b"", b"", b""], [b"DXOM" + bytes(24), b"\xc1"]):
        reader._socket.send_multipart(frames)
        with pytest.raises(MessageDecodeError):
            writer.dequeue(WAIT_S)
    reader.enqueue(Kind.DONE, 1)
    assert writer.dequeue(WAIT_S).value == 1


_READER = """
import sys, zlib
from diffulex.omni.message_queue import Kind, MessageQueue, QueueHandle
reader = MessageQueue.create_from_handle(QueueHandle(sys.argv[1], 2), int(sys.argv[2]))
while (message := reader.dequeue()).kind != Kind.SHUTDOWN:
    array, text = message.value
    reader.enqueue(Kind.DONE, [zlib.crc32(array), array.shape, text])
reader.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="lists blocks as Linux does")
def test_large_broadcasts_go_through_shared_memory_and_leave_nothing():
    import zlib

    writer, second = MessageQueue(2), MessageQueue(2)
    readers = [
        subprocess.Popen([sys.executable, "-c", _READER, writer.handle.directory, str(rank)])
        for rank in range(2)
    ]
    try:
        writer.wait_connected(WAIT_S)
        array = np.random.default_rng(0).integers(0, 255, (1 << 13, 1 << 13), np.uint8)
        writer.enqueue(Kind.RPC, (array, "large"))
        assert len(blocks()) == 1
        for _ in range(2):
            assert writer.dequeue(WAIT_S).value == [zlib.crc32(array), (1 << 13, 1 << 13), "large"]
        # Acknowledgements came before the answers.
        assert blocks() == []
        writer.enqueue(Kind.RPC, (array[:2], "small"))
        assert blocks() == []
        assert {writer.dequeue(WAIT_S).value[2] for _ in range(2)} == {"small"}

        # A reader dies before it has read.
        readers[1].kill()
        readers[1].wait()
        writer.enqueue(Kind.RPC, (array, "again"), ranks=(0,))
        assert blocks() == []  # one reader needs no sharing
        writer._tickets[99] = writer._tickets.pop(
            writer._share([memoryview(array).cast("B")], [True], (1,))[0]
        )
        assert len(blocks()) == 1
        writer.forget(1)
        assert blocks() == []

        # The queue ends while one of two readers has not read.
        writer._share([memoryview(array).cast("B")], [True], (0, 1))
        assert len(blocks()) == 1
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
        writer.close()
        second.close()
    assert blocks() == []
    assert not Path(writer.handle.directory).exists()


_NAME = """
import os
os.getpid = lambda: 7
from diffulex.omni.message_queue import MessageQueue
writer = MessageQueue(2)
writer._share([memoryview(bytes(8))], [True], (0, 1))
print(*[block.name for ticket in writer._tickets.values() for block in ticket.blocks])
"""


def test_blocks_of_processes_with_the_same_number_have_different_names():
    """As in two containers that share memory, or after a crash that left a block."""
    names = [subprocess.check_output([sys.executable, "-c", _NAME], text=True) for _ in range(2)]
    assert all(name.startswith("dxom-7-") for name in names)
    assert len(set(names)) == 2


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="reserves as Linux does")
def test_what_has_no_room_in_shared_memory_is_sent_with_the_message(monkeypatch, caplog):
    import errno

    real = os.posix_fallocate

    def reserve(file, offset, size):
        if size > 16:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    writer = MessageQueue(2, 8)
    readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
    try:
        writer.wait_connected(WAIT_S)
        for _ in range(2):
            data = [b"b" * 32, b"c" * 4]
            writer.enqueue(Kind.RPC, [np.frombuffer(part, np.uint8) for part in data])
            assert blocks() == []
            assert writer._tickets == {}
            for reader in readers:
                assert [bytes(array) for array in reader.dequeue(WAIT_S).value] == data
        parts = [memoryview(b"b" * 32), memoryview(b"a" * 16)]
        _, table = writer._share(parts, [True, True], (0, 1))
        assert table == [None, [*blocks(), 16]]
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "expected shared memory for 32 bytes, got: [Errno 28]" in caplog.text
    finally:
        for reader in readers:
            reader.close()
        writer.close()


_FULL = """
import os
from diffulex.omni.message_queue import _reserve
sizes = os.statvfs("/dev/shm")
try:
    _reserve(sizes.f_blocks * sizes.f_frsize + (1 << 20)).buf[-1] = 1
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or os.statvfs("/dev/shm").f_blocks == 0,
    reason="needs shared memory of a limited size",
)
def test_more_than_shared_memory_holds_is_an_error():
    result = subprocess.run(
        [sys.executable, "-c", _FULL], capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    assert result.stdout == "[Errno 28] No space left on device\n"


_CRASH = """
import os, signal
from diffulex.omni.message_queue import MessageQueue
writer = MessageQueue(2)
writer._share([memoryview(bytes(1 << 21))], [True], (0, 1))
print(os.getpid(), writer.handle.directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="lists blocks as Linux does")
def test_a_killed_writer_leaves_no_shared_memory():
    import time

    result = subprocess.run(
        [sys.executable, "-c", _CRASH], capture_output=True, text=True, check=False
    )
    pid, directory = result.stdout.split()
    # Readers remove it; this writer had none.
    shutil.rmtree(directory)
    end = time.monotonic() + WAIT_S
    # What is left is removed by a process that outlives the writer for a moment.
    while list(Path("/dev/shm").glob(f"dxom-{pid}-*")):
        assert time.monotonic() < end
        time.sleep(0.05)


_FORK = """
import os, subprocess, sys
from pathlib import Path
from diffulex.omni import message_queue, worker_pool
worker_pool._BOOT = "import sys; sys.stdin.read()"
pool = worker_pool.WorkerPool([{}], 1)
writer = message_queue.MessageQueue(2)
writer._share([memoryview(bytes(1 << 21))], [True], (0, 1))
(ticket,) = writer._tickets.values()
child = os.fork()
if child == 0:
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
assert pool.exited() == []
assert Path(writer.handle.directory).is_dir()
message_queue.SharedMemory(ticket.blocks[0].name).close()
writer.close()
pool.kill()
assert len(pool.exited()) == 1
"""


def test_the_end_of_a_fork_is_not_the_end_of_the_engine():
    result = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_socket_whose_name_is_too_long_is_an_error_and_leaves_nothing(monkeypatch):
    for length in (107, 108):
        # Not below pytest's directory, whose name may be long itself.
        base = Path("/tmp") / f"dxom{uuid.uuid4().hex}"
        rest = length - len(os.fsencode(base)) - len("/dxom-12345678/queue.sock")
        base = base.with_name(base.name + "x" * rest)
        base.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        if length == 107:
            MessageQueue(1).close()
        else:
            with pytest.raises(ConfigError, match=r"^TMPDIR: .* at most 107 bytes, got 108: /"):
                MessageQueue(1)
        base.rmdir()  # is empty


def test_what_no_reader_takes_is_an_error_of_its_writer(monkeypatch):
    monkeypatch.setattr(zmq_queue, "_MAX_TEXT_BYTES", 1 << 20)
    writer = MessageQueue(2)
    readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in range(2)]
    writer.wait_connected(WAIT_S)
    large = np.zeros(1 << 20, np.uint8)
    for text in ("x" * ((1 << 20) + 1), "\udcff"):
        with pytest.raises(ValueError, match=r"exceeds max_str_len|surrogates"):
            writer.enqueue(Kind.RPC, [large, text])
        assert blocks() == []
    writer.enqueue(Kind.RPC, "x" * (1 << 20))
    for reader in readers:
        assert len(reader.dequeue(WAIT_S).value) == 1 << 20
        reader.close()
    writer.close()
