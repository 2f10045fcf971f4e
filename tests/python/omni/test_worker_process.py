# SPDX-License-Identifier: Apache-2.0
"""A rank without its process: what it says when its results cannot be sent."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

from diffulex.omni.message_queue import Kind, MessageQueue  # noqa: E402
from diffulex.omni.worker import StepEvent  # noqa: E402
from diffulex.omni.worker_process import WorkerProc  # noqa: E402

WAIT_S = 120
GROUPS = SimpleNamespace(
    rank=0, is_leader=True, agree=lambda is_stopped: is_stopped, gather=lambda own, name: [own]
)


@pytest.fixture
def start(monkeypatch):
    """Runs a rank with a worker in a thread of its own; gives the engine's end of its queue."""
    monkeypatch.setattr(WorkerProc, "_beat", lambda self: None)
    writer = MessageQueue(1)
    threads = []

    def make(worker):
        def run():
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
            try:
                WorkerProc(worker, reader, GROUPS).run()
            finally:
                reader.close()

        threads.append(threading.Thread(target=run, daemon=True))
        threads[0].start()
        writer.wait_connected(WAIT_S)
        return writer

    yield make
    writer.enqueue(Kind.SHUTDOWN)
    threads[0].join(WAIT_S)
    assert not threads[0].is_alive()
    writer.close()


def ask(writer, method, **kwargs):
    body = {"method": method, "output_rank": 0, "exec_all_ranks": True, "args": []}
    writer.enqueue(Kind.RPC, {**body, "kwargs": kwargs}, seq=1)


def fail():
    raise OSError("no file \udcff")


@pytest.mark.parametrize(
    ("method", "kind", "message"),
    [
        (lambda: {"a": 1 << 70}, "TypeError", "expected integers of at most 64 bits, got 0x4"),
        (lambda: "\udcff", "UnicodeEncodeError", "surrogates not allowed"),
        (fail, "OSError", "no file ?"),
    ],
)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_be_sent_is_an_error_of_its_request(start, method, kind, message):
    writer = start(SimpleNamespace(memory_stats=method))
    for _ in range(2):  # it goes on
        ask(writer, "memory_stats")
        error = writer.dequeue(5.0).value["error"]
        assert error["kind"] == kind
        assert message in error["message"]


def test_a_preview_that_cannot_be_sent_is_an_error_of_the_preview(start):
    def run(_calls, on_step):
        event = StepEvent(("a",), 1, 1, 0, 1, _preview=lambda: [object()])
        return [["drawn" if on_step(event) else "stopped"]]

    writer = start(SimpleNamespace(run=run))
    ask(writer, "generate", calls=[], is_watched=True)
    assert writer.dequeue(5.0).value["event"]["step"] == 1
    writer.enqueue(Kind.ANSWER, "preview", seq=1)
    answer = writer.dequeue(5.0)
    assert answer.kind == Kind.PROGRESS
    assert "got a object" in answer.value["error"]["message"]
    writer.enqueue(Kind.ANSWER, "go", seq=1)
    assert writer.dequeue(5.0).value == {"result": [["drawn"]]}
