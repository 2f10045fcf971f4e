# SPDX-License-Identifier: Apache-2.0
"""A real backend process behind real sockets, with a fake engine and no HTTP."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import msgpack
import pytest

import slow_engine
from diffulex import SamplingParams
from diffulex.server import launch
from diffulex.server.args import parse_args
from diffulex.serving import backend_process, heartbeat, supervisor
from diffulex.serving import frontend as frontend_module
from diffulex.serving.backend_process import BackendProcess, ReadyQueue, describe_exit
from diffulex.serving.backend_worker import ENGINE_DEAD_STATUS
from diffulex.serving.frontend import FrontendManager, OperationFailed, RequestFailed, ServerState
from diffulex.serving.zmq_queue import ZmqPullQueue
from diffulex.wire.protocol import (
    PromptInput,
    ServingBufferSnapshot,
    ServingDelta,
    ServingGenerate,
    ServingHeartbeat,
    ServingReply,
    serving_event_from_dict,
)

#: Generous: a process that starts may take twenty seconds on a busy host. Nothing is measured.
TIMEOUT_S = 120.0


class Service:
    """Frontend and supervisor of one test, and the log of the fake engine."""

    def __init__(self, directory: Path, factory, log: Path, **options) -> None:
        self.log = log
        self.addrs = (f"ipc://{directory}/c.ipc", f"ipc://{directory}/e.ipc")
        self.frontend = FrontendManager.from_zmq(
            model_id="m", command_addr=self.addrs[0], event_addr=self.addrs[1]
        )
        self.frontend.backend_starting()
        self.fatal: list[str] = []
        self.supervisor = supervisor.Supervisor(
            self.frontend,
            lambda: BackendProcess("m", {}, *self.addrs, factory),
            startup_timeout_s=TIMEOUT_S,
            on_fatal=self.fatal.append,
            **options,
        )

    async def start(self) -> None:
        await self.frontend.start()
        self.supervisor.start_backend()
        self.supervisor.watch()
        await self.until(lambda: self.frontend.state is ServerState.READY)

    async def stop(self) -> None:
        await self.supervisor.stop()
        await self.frontend.stop()
        await asyncio.to_thread(self.supervisor.stop_backend, 10.0)

    async def until(self, condition) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < end, "expected the condition to hold in time"
            await asyncio.sleep(0.01)

    @property
    def pid(self) -> int:
        return self.supervisor.backend.process.pid

    def logged(self, word: str) -> list[str]:
        if not self.log.exists():
            return []
        return [line for line in self.log.read_text().splitlines() if line.startswith(word)]

    def command(self, rid, prompt="hi", stream_mode="block_append", **params):
        fields = {"max_tokens": 8, "ignore_eos": True, **params}
        return ServingGenerate(
            rid, PromptInput(prompt), SamplingParams(**fields), True, stream_mode
        )

    async def events(self, command):
        return [event async for event in self.frontend.generate_stream(command)]


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Runs a scenario with a service around it."""
    log = tmp_path / "log"
    monkeypatch.setenv("DIFFULEX_TEST_LOG", str(log))
    monkeypatch.setattr(supervisor, "_FLUSH_S", 0.05)  # no client has to read anything

    def run(scenario, factory=slow_engine.make_slow, **options):
        async def main():
            service = Service(tmp_path, factory, log, **options)
            try:
                await service.start()
                await asyncio.wait_for(scenario(service), 2 * TIMEOUT_S)
            finally:
                await service.stop()
            assert service.supervisor.backend.process.exitcode is not None

        asyncio.run(main())

    return run


def test_serves(serve):
    async def scenario(service):
        commands = [
            service.command(f"r{i}", stream_mode=mode, max_tokens=12)
            for i, mode in enumerate(["block_append", "denoise", "both"] * 4)
        ]
        for events in await asyncio.gather(*map(service.events, commands)):
            assert isinstance(events[-1], ServingReply)
            assert events[-1].text == "ABCDEFGHIJKL"
            kinds = {type(event) for event in events[:-1]}
            assert kinds <= {ServingDelta, ServingBufferSnapshot}
        frontend = service.frontend
        assert frontend.info["max_num_reqs"] == 8
        await service.until(lambda: frontend.stats.get("gauges") is not None)
        assert frontend.heartbeat_age_s < TIMEOUT_S
        assert await frontend.flush_cache() == {"num_dropped_units": 0}
        with pytest.raises(OperationFailed, match="profiling is off"):
            await frontend.start_profile()

    serve(scenario)


def test_early_close_aborts_once(serve):
    async def scenario(service):
        stream = service.frontend.generate_stream(service.command("a", max_tokens=4000))
        await stream.__anext__()
        await stream.aclose()
        await service.until(lambda: service.logged("abort"))
        assert (await service.events(service.command("b")))[-1].text == "ABCDEFGH"
        assert service.logged("abort") == ["abort 0"]

    serve(scenario)


def test_malformed_commands_change_nothing(serve):
    async def scenario(service):
        send = service.frontend.send_backend.socket
        for garbage in (
            b"",
            b"\xc1\xc1",
            msgpack.packb([1, 2]),
            msgpack.packb({"type": "dance", "rid": "x"}),
            msgpack.packb({"type": "shutdown", "mode": "never"}),
            msgpack.packb({"type": "generate", "rid": 5}),
            msgpack.packb({"type": "abort"}),
            msgpack.packb({"type": "generate", "rid": "y", "input": {}, "sampling_params": 1}),
        ):
            await send.send(garbage)
        state = service.frontend.add_request_state("z")
        await send.send(msgpack.packb({"type": "abort", "rid": "z", "v": 99}))
        await service.until(lambda: state.events)
        (error,) = state.events
        assert (error.code, error.http_status) == ("protocol_version", 400)
        service.frontend.discard_request_state("z")
        assert (await service.events(service.command("a")))[-1].text == "ABCDEFGH"
        assert len(service.logged("start")) == 1

    serve(scenario)


def test_killed_backend_fails_every_request(serve):
    async def scenario(service):
        waiting = [
            asyncio.ensure_future(service.events(service.command(f"r{i}", max_tokens=4000)))
            for i in range(4)
        ]
        await service.until(lambda: len(service.logged("add")) == 4)
        os.kill(service.pid, signal.SIGKILL)
        for events in await asyncio.gather(*waiting):
            assert (events[-1].code, events[-1].http_status) == ("engine_dead", 500)
            assert "was killed by SIGKILL" in events[-1].message
        assert service.frontend.state is ServerState.DEAD
        with pytest.raises(RequestFailed) as caught:
            await service.frontend.generate(service.command("later"))
        assert caught.value.error.http_status == 503
        await service.until(lambda: service.fatal)

    serve(scenario)


def test_restart(serve):
    async def scenario(service):
        for number in range(2):
            before = service.pid
            with pytest.raises(RequestFailed):
                await service.frontend.generate(service.command(f"bad{number}", prompt="crash"))
            await service.until(lambda: service.frontend.state is ServerState.READY)
            assert service.pid != before
            reply = await service.frontend.generate(service.command(f"good{number}"))
            assert reply.text == "ABCDEFGH"
        assert not service.fatal

    serve(scenario, is_restarting=True)


def test_restart_that_fails_is_tried_again(serve):
    async def scenario(service):
        os.kill(service.pid, signal.SIGKILL)
        await service.until(lambda: len(service.logged("start")) == 3)
        await service.until(lambda: service.frontend.state is ServerState.READY)
        assert (await service.events(service.command("a")))[-1].text == "ABCDEFGH"
        assert not service.fatal

    serve(scenario, slow_engine.make_second_broken, is_restarting=True)


def test_no_restart_while_draining(serve):
    async def scenario(service):
        waiting = asyncio.ensure_future(service.events(service.command("a", max_tokens=4000)))
        await service.until(lambda: service.logged("add"))
        drain = service.frontend.begin_drain(TIMEOUT_S)
        os.kill(service.pid, signal.SIGKILL)
        assert (await waiting)[-1].code == "engine_dead"
        await drain
        await service.until(lambda: service.fatal)
        assert len(service.logged("start")) == 1

    serve(scenario, is_restarting=True)


def test_restart_under_load(serve):
    """Requests of before and after do not meet, and nothing of the dead backend is left."""

    async def client(service, name):
        outcomes = []
        # The backend may get ready while a client that was refused waits.
        while len(outcomes) < 4 or outcomes[-1] in ("engine_dead", "starting"):
            rid = f"{name}-{len(outcomes)}"
            events = await service.events(service.command(rid, max_tokens=12))
            assert {event.rid for event in events} == {rid}
            last = events[-1]
            outcomes.append(last.text if isinstance(last, ServingReply) else last.code)
            await asyncio.sleep(0.02 if isinstance(last, ServingReply) else 0.2)
        return outcomes

    async def scenario(service):
        clients = [asyncio.ensure_future(client(service, f"c{i}")) for i in range(12)]
        await service.until(lambda: len(service.logged("add")) >= 12)
        os.kill(service.pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*clients)
        assert {x for own in outcomes for x in own} <= {"ABCDEFGHIJKL", "engine_dead", "starting"}
        assert any("engine_dead" in own for own in outcomes)
        assert all(own[-1] == "ABCDEFGHIJKL" for own in outcomes)
        assert service.frontend.num_inflight == 0
        assert len(service.logged("start")) == 2

    serve(scenario, is_restarting=True)


def test_failed_step_ends_the_backend(serve, capfd):
    async def scenario(service):
        good = asyncio.ensure_future(service.events(service.command("a", max_tokens=4000)))
        await service.until(lambda: service.logged("add"))
        with pytest.raises(RequestFailed, match="device lost") as caught:
            await service.frontend.generate(service.command("b", prompt="fail"))
        assert caught.value.error.code == "engine_dead"
        assert (await good)[-1].code == "engine_dead"
        process = service.supervisor.backend.process
        await service.until(lambda: not process.is_alive())
        assert process.exitcode == ENGINE_DEAD_STATUS
        assert service.logged("exit")

    serve(scenario)
    logged = [line for line in capfd.readouterr().err.splitlines() if "device lost" in line]
    assert any(" ERROR   serving.backend_worker[backend] " in line for line in logged)


def test_stuck_step_is_reported_and_ended(serve, caplog):
    async def scenario(service):
        service.frontend.step_timeout_s = 0.5
        events = await service.events(service.command("a", prompt="hang"))
        assert events[-1].code == "engine_dead"

    serve(scenario, kills_stuck=True)
    assert "step 1 of the backend takes longer than 0.5 s" in caplog.text


async def frozen(service, monkeypatch):
    """A stopped backend with a request in flight, as soon as that is noticed."""
    waiting = asyncio.ensure_future(service.events(service.command("a", max_tokens=4000)))
    await service.until(lambda: service.logged("add"))
    os.kill(service.pid, signal.SIGSTOP)
    # Only now: one that runs may be late as well on a busy host.
    monkeypatch.setattr(frontend_module, "_HEARTBEAT_LIMIT_S", 2.0)
    await service.until(lambda: service.frontend.state is not ServerState.READY)
    return waiting


def be_patient(monkeypatch):
    """Nothing is frozen any more."""
    monkeypatch.setattr(frontend_module, "_HEARTBEAT_LIMIT_S", TIMEOUT_S)


def test_a_frozen_backend_is_killed_and_replaced(serve, caplog, monkeypatch):
    async def scenario(service):
        frozen_pid = service.pid
        waiting = await frozen(service, monkeypatch)
        assert (await waiting)[-1].code in ("engine_dead", "engine_unresponsive")
        await service.until(lambda: service.pid != frozen_pid)
        be_patient(monkeypatch)
        await service.until(lambda: service.frontend.state is ServerState.READY)
        reply = await service.frontend.generate(service.command("b", max_tokens=3))
        assert reply.text == "ABC"

    serve(scenario, kills_stuck=True, is_restarting=True)
    assert "the backend gave no sign of life for" in caplog.text
    assert "killing the backend (--kill-stuck-backend)" in caplog.text
    assert "backend: the process was killed by SIGKILL" in caplog.text
    assert "starting a new backend" in caplog.text


def test_a_frozen_backend_that_is_left_alone_refuses_and_may_come_back(serve, caplog, monkeypatch):
    async def scenario(service):
        waiting = await frozen(service, monkeypatch)
        assert service.frontend.state is ServerState.UNRESPONSIVE
        (refusal,) = await service.events(service.command("b"))
        assert (refusal.code, refusal.http_status) == ("engine_unresponsive", 503)
        last = (await waiting)[-1]
        assert (last.code, last.http_status) == ("engine_unresponsive", 500)
        os.kill(service.pid, signal.SIGCONT)
        await service.until(lambda: service.frontend.state is ServerState.READY)
        be_patient(monkeypatch)
        reply = await service.frontend.generate(service.command("c", max_tokens=3))
        assert reply.text == "ABC"
        await service.until(lambda: service.logged("abort"))
        assert len(service.logged("start")) == 1

    serve(scenario)
    assert "the backend gave no sign of life for" in caplog.text


def test_a_restart_tells_when_to_come_back(serve):
    async def scenario(service):
        assert service.frontend.retry_after_s == 1
        service.frontend._load_s = 700.0
        os.kill(service.pid, signal.SIGKILL)
        await service.until(lambda: service.frontend.state is not ServerState.READY)
        assert 500 <= service.frontend.retry_after_s <= 700
        await service.until(lambda: service.frontend.state is ServerState.READY)
        # Measured with this start.
        assert service.frontend._load_s != 700.0
        assert service.frontend.retry_after_s == 1

    serve(scenario, is_restarting=True)


def test_sigterm_tells_requests(serve):
    async def scenario(service):
        waiting = asyncio.ensure_future(service.events(service.command("a", max_tokens=4000)))
        await service.until(lambda: service.logged("add"))
        os.kill(service.pid, signal.SIGINT)  # Ctrl-C is the frontend's business
        os.kill(service.pid, signal.SIGTERM)
        assert (await waiting)[-1].code == "server_shutdown"
        process = service.supervisor.backend.process
        await service.until(lambda: not process.is_alive())
        assert process.exitcode == 0

    serve(scenario)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (slow_engine.make_broken, "ValueError: checkpoint: expected weights, got none"),
        (slow_engine.make_killed, "the process was killed by SIGKILL"),
    ],
)
def test_failed_start(tmp_path, factory, message):
    addrs = (f"ipc://{tmp_path}/c.ipc", f"ipc://{tmp_path}/e.ipc")
    backend = BackendProcess("m", {}, *addrs, factory)
    backend.start()
    try:
        with pytest.raises(RuntimeError, match=f"backend failed to start: {message}"):
            backend.wait_ready(TIMEOUT_S)
    finally:
        backend.stop()
    assert backend.process.exitcode != 0


@pytest.mark.parametrize(("reports", "is_logged"), [((), True), (("ready",), True), ((), False)])
def test_failures_are_told_once(monkeypatch, caplog, reports, is_logged):
    """By the parent until the engine is ready, then by the log."""

    def fail(*, ready_queue):
        for report in reports:
            ready_queue.put({"status": report, "info": {}})
        if reports or not is_logged:
            ready_queue.put({"status": "error", "error": "no luck"})
        raise ValueError("no luck")

    monkeypatch.setattr(backend_process, "run_sync_backend_worker", fail)
    parent_end, child_end = multiprocessing.Pipe(duplex=False)
    with pytest.raises(SystemExit) as caught, parent_end, child_end:
        backend_process.run_backend(ready_queue=ReadyQueue(child_end))
    assert caught.value.code == 1
    assert ("no luck" in caplog.text) == is_logged


def test_start_timeout(tmp_path):
    addrs = (f"ipc://{tmp_path}/c.ipc", f"ipc://{tmp_path}/e.ipc")
    backend = BackendProcess("m", {}, *addrs, slow_engine.make_never)
    backend.start()
    try:
        with pytest.raises(RuntimeError, match=r"not ready within 0\.2 s"):
            backend.wait_ready(0.2)
    finally:
        backend.process.kill()
        backend.stop()


def test_a_backend_for_the_front_end_of_another_program(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFULEX_TEST_LOG", str(tmp_path / "log"))
    args = parse_args(["--model", "demo", "--startup-timeout", str(TIMEOUT_S)])
    addrs = f"ipc://{tmp_path}/c.ipc", f"ipc://{tmp_path}/e.ipc"
    process = launch.start_backend(args, *addrs, engine_factory=slow_engine.make_slow)
    try:
        assert process.is_alive()
    finally:
        process.kill()
        process.join()
    before = multiprocessing.active_children()
    with pytest.raises(
        RuntimeError, match="failed to start: ValueError: checkpoint: expected weights"
    ):
        launch.start_backend(args, *addrs, engine_factory=slow_engine.make_broken)
    assert multiprocessing.active_children() == before


def test_heartbeat_notices_another_parent(tmp_path, monkeypatch):
    """Where the kernel does not tell."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    pull = ZmqPullQueue(f"ipc://{tmp_path}/e.ipc", create=True, decoder=serving_event_from_dict)
    orphaned = threading.Event()
    beat = heartbeat.HeartbeatThread(pull.addr, heartbeat.StepStatus(), -1, orphaned.set)
    beat.start()
    try:
        assert isinstance(pull.get(TIMEOUT_S), ServingHeartbeat)
        assert orphaned.wait(TIMEOUT_S)
    finally:
        beat.stop()  # before its patience ends, and this process with it
        pull.stop()


def test_exit_descriptions():
    assert describe_exit(0) == "ended with exit code 0"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-99) == "was killed by signal 99"
    assert describe_exit(None) == "is still running"
