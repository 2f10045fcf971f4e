# SPDX-License-Identifier: Apache-2.0
"""Pauses, new weights and adapters of a server: routes, commands, and what happens to requests."""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import diffulex
from block_engine import BlockEngine
from diffulex import SamplingParams
from diffulex.server.http.api_server import create_app
from diffulex.serving.backend_worker import SyncBackendWorker, default_engine_factory
from diffulex.serving.frontend import BackendUnavailable, OperationFailed
from diffulex.serving.job_tick import EngineDeadError
from diffulex.update import live_weights
from diffulex.wire.protocol import (
    PromptInput,
    ServingAck,
    ServingControl,
    ServingError,
    ServingGenerate,
    ServingReply,
    ServingShutdown,
)
from fake_frontend import FakeFrontend
from http_client import AppClient, check_error
from scripted_backend import run

DEMO = Path(diffulex.__file__).parent / "assets/demo"


def generate(rid: str, **fields: Any) -> ServingGenerate:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    return ServingGenerate(rid, PromptInput([5, 6, 7]), params, **fields)


def test_routes() -> None:
    frontend, calls = FakeFrontend(), []
    client = AppClient(create_app(frontend))

    async def control(action: str, path: str | None = None) -> dict[str, Any]:
        calls.append((action, path))
        if action == "load_lora":
            raise OperationFailed("adapter: expected factors, got an empty file")
        return {"num_tensors": 3} if path else {"paused": action == "pause"}

    frontend.control = control
    assert client.post("/pause").json() == {"status": "ok", "paused": True}
    assert client.post("/update_weights", {"path": "/w"}).json()["num_tensors"] == 3
    assert client.post("/unload_lora").status_code == 200
    assert client.post("/resume").json()["paused"] is False
    error = check_error(client.post("/load_lora", {"path": "/l"}), 409, "conflict", "conflict")
    assert error == "load_lora: adapter: expected factors, got an empty file"
    names = ["pause", "update_weights", "unload_lora", "resume", "load_lora"]
    assert calls == list(zip(names, [None, "/w", None, None, "/l"], strict=True))
    refusal = ("invalid_request_error", "invalid_request", "path")
    for path in ("/update_weights", "/load_lora"):
        for body in ({}, {"path": 3}, {"path": None}):
            check_error(client.post(path, body), 400, *refusal)
    assert len(calls) == 5


def test_an_engine_that_cannot_says_so() -> None:
    commands = [ServingControl("pause", "1"), ServingControl("load_lora", "2", "/x")]
    assert BlockEngine().run_serving_tick(commands) == [
        ServingAck("1", False, "pause: expected an engine that can, got one that cannot"),
        ServingAck("2", False, "load_lora: expected an engine that can, got one that cannot"),
    ]


class PausingEngine(BlockEngine):
    """With a switch."""

    is_paused = False

    def control(self, action: str, path: str | None) -> dict[str, Any]:
        self.is_paused = action == "pause"
        return {}


class Commands(deque[Any]):
    """A queue of commands; an empty one is a wait that ends without any."""

    num_waits = 0

    def get(self, timeout_s: float) -> Any:
        self.num_waits += not self
        return self.popleft() if self else ServingControl("pause", "again")

    def empty(self) -> bool:
        return not self

    def stop(self) -> None: ...


class Events(list[Any]):
    num_dropped = 0

    def put(self, item: Any) -> None:
        self.extend(getattr(item, "events", [item]))

    def stop(self, linger_s: float) -> None: ...


def worker_of(engine: Any, *commands: Any) -> tuple[SyncBackendWorker, Commands, Events]:
    queue, events = Commands(commands), Events()
    worker = SyncBackendWorker("m", None, queue, events, lambda model, **_: engine)
    worker.init_engine()
    return worker, queue, events


def test_a_paused_backend_waits_with_its_requests() -> None:
    engine = PausingEngine()
    worker, commands, events = worker_of(engine, generate("a"), ServingControl("pause", "1"))
    for _ in range(3):
        worker.normal_loop()
    assert engine.num_steps == 0
    assert commands.num_waits == 2  # it does not spin
    assert [event for event in events if not isinstance(event, ServingAck)] == []
    commands.extend([generate("b"), generate("late", queue_timeout_s=-1.0)])
    worker.normal_loop()
    (error,) = [event for event in events if isinstance(event, ServingError)]
    assert (error.rid, error.code) == ("late", "queue_timeout")
    commands.append(ServingControl("resume", "2"))
    while len([event for event in events if isinstance(event, ServingReply)]) < 2:
        worker.normal_loop()
    assert worker.engine is not None
    assert not [event for event in events if isinstance(event, ServingError) and event != error]


def test_a_drain_ends_a_pause() -> None:
    engine = PausingEngine()
    commands = (generate("a"), ServingControl("pause", "1"), ServingShutdown("drain"))
    worker, _, events = worker_of(engine, *commands)
    worker.run_forever()
    assert [event.rid for event in events if isinstance(event, ServingReply)] == ["a"]


def test_the_real_engine_pauses_and_takes_weights(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "other")
    tensors = load_file(DEMO / "model.safetensors")
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "other/model.safetensors")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = default_engine_factory("demo", max_num_reqs=4, num_pages=64)
    try:

        def answer() -> list[int]:
            events = list(engine.run_serving_tick([generate("a")]))
            while not engine.is_finished():
                events += engine.run_serving_tick([])
            (reply,) = [event for event in events if isinstance(event, ServingReply)]
            return list(reply.token_ids)

        def control(action: Any, path: Path | None = None) -> ServingAck:
            command = ServingControl(action, "1", None if path is None else str(path))
            (ack,) = engine.run_serving_tick([command])
            assert isinstance(ack, ServingAck)
            return ack

        before = answer()
        assert control("pause").data == {"paused": True}
        engine.run_serving_tick([generate("b")])
        assert engine.run_serving_tick([]) == []
        assert control("update_weights", tmp_path / "other").data == {"num_tensors": len(tensors)}
        assert control("update_weights").message == "update_weights: expected a path, got none"
        assert "expected a directory" in control("load_lora", tmp_path / "none").message
        assert "expected an adapter of load_lora" in control("unload_lora").message
        assert engine.is_paused
        assert not engine.is_finished()
        (ack, *_) = engine.run_serving_tick([ServingControl("resume", "1")])
        assert isinstance(ack, ServingAck)
        assert ack.data == {"paused": False}
        while not engine.is_finished():
            engine.run_serving_tick([])
        assert answer() != before
        assert control("update_weights", DEMO).ok
        assert answer() == before
    finally:
        engine.exit()
        torch.set_num_threads(threads)


def test_a_backend_with_a_mixture_of_weights_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise OSError("a disk went away")

    engine = default_engine_factory("demo", max_num_reqs=4, num_pages=64)
    control = ServingControl("update_weights", "1", str(DEMO))
    worker, commands, events = worker_of(engine, ServingControl("pause", "0"), control)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(live_weights, "_write", broken)
            worker.normal_loop()
        assert [event.ok for event in events] == [True, False]
        assert "a disk went away" in events[-1].message
        # While it is paused, the weights can be mended.
        commands.append(control)
        worker.normal_loop()
        assert events[-1].ok
        commands.append(ServingControl("resume", "2"))
        worker.normal_loop()
        monkeypatch.setattr(live_weights, "_write", broken)
        commands.append(control)
        with pytest.raises(
            EngineDeadError, match=r"some old and some new \(update_weights: a disk"
        ):
            worker.normal_loop()
    finally:
        worker.shutdown()


def test_reading_weights_is_no_step_that_hangs() -> None:
    seen: list[tuple[str, bool]] = []

    class Watched(PausingEngine):
        def control(self, action: str, path: str | None) -> dict[str, Any]:
            seen.append((action, worker.status.step_started is not None))
            return {}

        def step(self) -> Any:
            seen.append(("step", worker.status.step_started is not None))
            return super().step()

    actions: tuple[Any, ...] = ("update_weights", "load_lora", "unload_lora")
    commands = [ServingControl(action, action, "/w") for action in actions]
    worker, _, _ = worker_of(Watched(), generate("a"), *commands)
    worker.normal_loop()
    counted = [("unload_lora", True), ("step", True)]
    assert seen == [("update_weights", False), ("load_lora", False), *counted]
    assert worker.status.step_started is None


@pytest.mark.parametrize("action", ["update_weights", "load_lora"])
def test_weights_may_take_longer_than_other_operations(action: Any) -> None:
    async def scenario(frontend: Any, backend: Any) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(frontend.control(action, "/w"), 0.1)
        for other in ("pause", "resume", "unload_lora"):
            with pytest.raises(BackendUnavailable, match="no answer to an operation"):
                await frontend.control(other)
        assert backend.commands[0].path == "/w"

    run(scenario, operation_timeout_s=0.02)
