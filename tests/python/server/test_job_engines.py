# SPDX-License-Identifier: Apache-2.0
"""Serving knows jobs, not texts: an engine of pictures behind both kinds of queues."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from diffulex.serving.backend_process import BackendProcess
from diffulex.serving.backend_worker import SyncBackendWorker
from diffulex.serving.frontend import (
    FrontendLimits,
    FrontendManager,
    OperationFailed,
    RequestFailed,
    ServerState,
)
from diffulex.serving.inproc import InprocBackend, InprocCommands, InprocEvents
from diffulex.serving.inproc_frontend import InprocFrontend
from diffulex.serving.job_tick import EngineDeadError
from diffulex.serving.supervisor import Supervisor
from diffulex.wire.messages import ServingAbort
from job_engine import PICTURES, Lines, Paint, Painter, Picture

TIMEOUT_S = 60.0
LIMITS = FrontendLimits(max_queue_size=1, max_queued_tokens=2000)


@contextlib.asynccontextmanager
async def in_one_process(directory) -> AsyncIterator[FrontendManager]:
    backend = InprocBackend("m", engine_factory=Painter)
    frontend = InprocFrontend(backend, limits=LIMITS)
    await frontend.start()
    try:
        yield frontend
    finally:
        await frontend.stop()
    assert not backend.is_running


@contextlib.asynccontextmanager
async def in_two_processes(directory) -> AsyncIterator[FrontendManager]:
    addrs = f"ipc://{directory}/c.ipc", f"ipc://{directory}/e.ipc"
    frontend = FrontendManager.from_zmq(
        model_id="m", command_addr=addrs[0], event_addr=addrs[1], codec=PICTURES, limits=LIMITS
    )
    frontend.backend_starting()
    supervisor = Supervisor(
        frontend,
        lambda: BackendProcess("m", {}, *addrs, Painter, codec=PICTURES),
        startup_timeout_s=TIMEOUT_S,
    )
    await frontend.start()
    supervisor.start_backend()
    supervisor.watch()
    while frontend.state is not ServerState.READY:
        await asyncio.sleep(0.01)
    try:
        yield frontend
    finally:
        await supervisor.stop()
        await frontend.stop()
        await asyncio.to_thread(supervisor.stop_backend, 10.0)


async def use(frontend: FrontendManager) -> None:
    events = [event async for event in frontend.generate_stream(Paint("a", 7, 900))]
    assert {type(event) for event in events[:-1]} == {Lines}
    assert events[-1] == Picture("a", bytes([7]) * 900, events[-1].generation)
    assert [len(event.pixels) for event in events] == sorted({len(e.pixels) for e in events})

    pictures = await asyncio.gather(
        *(frontend.generate(Paint(str(grey), grey, 20 + grey)) for grey in range(3))
    )
    assert [picture.pixels for picture in pictures] == [bytes([n]) * (20 + n) for n in range(3)]

    with pytest.raises(RequestFailed, match="grey: expected 0 to 255, got 300") as caught:
        await frontend.generate(Paint("b", 300))
    assert (caught.value.error.code, caught.value.error.http_status) == ("invalid_request", 400)
    with pytest.raises(RequestFailed, match="at most 2000 tokens in flight, got 2001"):
        await frontend.generate(Paint("c", 1, 2001))
    with pytest.raises(OperationFailed, match="profiler: expected an engine that has one"):
        await frontend.start_profile()

    stream = frontend.generate_stream(Paint("d", 1, 2000))
    await stream.__anext__()
    await stream.aclose()
    assert (await frontend.generate(Paint("d", 2, 3))).pixels == bytes([2, 2, 2])
    assert frontend.num_inflight == 0


@pytest.mark.parametrize("serving", [in_one_process, in_two_processes])
def test_pictures(serving, tmp_path):
    async def body():
        async with serving(tmp_path) as frontend:
            await use(frontend)

    asyncio.run(asyncio.wait_for(body(), TIMEOUT_S))


def test_a_command_that_is_aborted_before_it_begins_is_taken_back():
    async def body():
        backend = InprocBackend("m", engine_factory=Painter)
        assert await backend.open() == {"max_num_reqs": 2}
        frontend = FrontendManager(
            model_id="m", send_backend=backend.commands, recv_backend=backend.events
        )
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()
        held = asyncio.create_task(
            backend.call_engine(
                lambda: asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()
            )
        )
        left = asyncio.create_task(frontend.generate(Paint("a", 1)))
        await asyncio.sleep(0.01)
        left.cancel()
        kept = asyncio.create_task(frontend.generate(Paint("b", 2)))
        await asyncio.sleep(0.01)
        gate.set()
        await held
        await kept
        assert backend.engine.num_added == 1
        engine = backend.engine
        await frontend.stop()
        await backend.join()
        assert engine.exited
        with pytest.raises(RuntimeError, match="expected it to run"):
            await backend.call_engine(int)

    asyncio.run(asyncio.wait_for(body(), TIMEOUT_S))


def test_a_command_taken_back_while_it_is_read_is_not_waited_for():
    """Its abort comes between the engine's look at the queue and its read."""

    async def body():
        loop = asyncio.get_running_loop()

        class LateAbort(InprocCommands):
            def empty(self):
                is_empty = super().empty()
                if not is_empty:
                    asyncio.run_coroutine_threadsafe(self.put(ServingAbort("a")), loop).result()
                return is_empty

        commands = LateAbort()
        commands.open()
        worker = SyncBackendWorker("m", None, commands, InprocEvents(), Painter)
        await commands.put(Paint("a", 1))
        received = loop.run_in_executor(None, worker.receive_commands, False)
        done, _ = await asyncio.wait({received}, timeout=5)
        commands.stop()  # lets a reader go that waits
        assert done, "the engine's thread waits for a command"
        assert received.result() == []

    asyncio.run(body())


def test_a_step_that_is_a_generator_may_fail_half_way():
    class Stumbler(Painter):
        def step(self):
            yield super().step()[0]
            raise ZeroDivisionError("brush")

    engine = Stumbler("m")
    with pytest.raises(EngineDeadError, match="engine step failed: brush") as caught:
        engine.run_serving_tick([Paint("a", 1), Paint("b", 2)])
    assert caught.value.rids == ["a", "b"]


@pytest.mark.parametrize("field", ["grey", "num_lines"])
def test_types_of_fields_follow_from_their_declaration(field):
    data = PICTURES.command_to_dict(Paint("a", 7, 9))
    assert PICTURES.command_from_dict(data) == Paint("a", 7, 9)
    with pytest.raises(ValueError, match=f"serving_command: expected a legal {field}, got 'x'"):
        PICTURES.command_from_dict(data | {field: "x"})
