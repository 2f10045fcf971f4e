# SPDX-License-Identifier: Apache-2.0
"""The image engine behind an event loop: results, progress, aborts, the queue's end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

from diffulex.omni import (  # noqa: E402
    AsyncOmniDiffusion,
    OmniDiffusion,
    OmniRequestOutput,
    QueueFull,
    RequestAborted,
    RequestError,
    RequestTimeout,
    async_omni_diffusion,
)

SMALL = {"height": 64, "width": 64, "num_inference_steps": 3, "true_cfg_scale": 1.0}
WAIT_S = 120


def run(tiny, body, **keywords):
    """Runs `body(engine)` in a loop with an engine that is closed after it."""

    async def whole():
        engine = AsyncOmniDiffusion(model=str(tiny("qwen")), **keywords)
        try:
            return await asyncio.wait_for(body(engine), WAIT_S)
        finally:
            await engine.close()

    return asyncio.run(whole())


@pytest.mark.slow
def test_results_are_those_of_the_plain_engine(tiny):
    async def body(engine):
        assert engine.is_running
        both = await asyncio.gather(
            engine.generate("a cat", **SMALL, seed=1), engine.generate("b", **SMALL, seed=2)
        )
        assert engine.num_waiting == 0
        return both

    outputs = run(tiny, body)
    with OmniDiffusion(model=str(tiny("qwen"))) as engine:
        plain = [engine.generate("a cat", **SMALL, seed=1)[0]]
        plain += engine.generate("b", **SMALL, seed=2)
    for output, expected in zip(outputs, plain, strict=True):
        assert np.array_equal(np.asarray(output.images[0]), np.asarray(expected.images[0]))
        assert output.metrics["queue_s"] >= 0


def test_what_does_not_fit_the_model_waits_for_nothing(tiny):
    async def body(engine):
        long = asyncio.create_task(engine.generate("a", **{**SMALL, "num_inference_steps": 1000}))
        while engine._current is None:
            await asyncio.sleep(0.01)
        drawn = engine._current
        for make in (engine.generate, engine.start):
            with pytest.raises(RequestError, match="height: expected a multiple of 16, got 30"):
                await make("b", **{**SMALL, "height": 30})
        is_drawn_still = engine._current is drawn
        long.cancel()
        return is_drawn_still

    assert run(tiny, body)


def test_steps_and_previews_come_before_the_result(tiny):
    async def body(engine):
        return [
            event
            async for event in engine.generate_stream(
                "a", **SMALL, seed=1, num_outputs_per_prompt=2, preview_every=2
            )
        ]

    *steps, output = run(tiny, body)
    assert [(event.step, event.num_steps) for event in steps] == [(i, 6) for i in range(1, 7)]
    assert [len(event.previews) for event in steps] == [0, 1, 0, 0, 1, 0]
    assert steps[1].previews[0].size == (64, 64)
    assert isinstance(output, OmniRequestOutput)
    assert output.num_images == 2


def test_errors_reach_the_caller_and_the_next_request_works(tiny):
    async def body(engine):
        with pytest.raises(RequestError, match="height: expected a multiple of 16, got 65"):
            await engine.generate("a", **{**SMALL, "height": 65})
        with pytest.raises(RequestError, match="nearest is 'seed'"):
            await engine.generate("a", sed=1)
        return await engine.generate("a", **SMALL)

    assert run(tiny, body).num_images == 1


def test_requests_are_aborted_while_they_run_and_while_they_wait(tiny):
    async def body(engine):
        steps = []

        async def watch():
            async for event in engine.generate_stream(
                "a", **{**SMALL, "num_inference_steps": 900}, request_id="long"
            ):
                steps.append(event.step)  # noqa: PERF401 (the test looks at it meanwhile)

        running = asyncio.create_task(watch())
        waiting = asyncio.create_task(engine.generate("b", **SMALL, request_id="next"))
        while not steps:
            await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match="request_id: expected a new one, got 'long'"):
            await engine.generate("b", **SMALL, request_id="long")
        assert await engine.abort("next")
        assert await engine.abort("long")
        with pytest.raises(RequestAborted, match="stopped by its callback"):
            await running
        with pytest.raises(RequestAborted, match="next: aborted before it started"):
            await waiting
        assert len(steps) < 900
        assert not await engine.abort("long")

        # So does a task that is cancelled.
        steps.clear()
        running = asyncio.create_task(watch())
        while not steps:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return await engine.generate("a", **SMALL)

    assert run(tiny, body).num_images == 1


def test_the_queue_has_an_end_and_closing_ends_all(tiny):
    async def body(engine):
        long = {**SMALL, "num_inference_steps": 900}
        tasks = [asyncio.create_task(engine.generate("a", **long))]
        while engine.num_waiting or not engine._current:
            await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(engine.generate("b", **long)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as raised:
            await engine.generate("c", **SMALL)
        expected = "queue: expected at most 2 waiting requests (max_queue_size), got one more"
        assert str(raised.value) == expected
        await engine.close()
        for task in tasks:
            with pytest.raises(RequestAborted):
                await task
        assert not engine.is_running
        with pytest.raises(RuntimeError, match="expected an open engine, got a closed one"):
            await engine.generate("a")

    run(tiny, body, max_queue_size=2)


def test_a_loop_that_is_closed_while_it_is_told_something_ends_no_thread(tiny, monkeypatch):
    """The drawing thread goes on with the requests of other loops."""
    from diffulex.omni.async_omni_diffusion import _Job
    from diffulex.omni.request import make_request

    loop = asyncio.new_event_loop()
    loop.close()
    # What was true a moment ago.
    monkeypatch.setattr(loop, "is_closed", lambda: False)

    async def body(engine):
        job = _Job(make_request("a", SMALL), None, loop)
        engine._live[job.request.request_id] = job
        engine._jobs.put(job)
        output = await engine.generate("b", **SMALL)
        assert not engine._live
        return output

    assert run(tiny, body).num_images == 1


def test_a_request_that_takes_too_long_is_stopped(tiny):
    """Also one that waits in line, whose limit is told at once."""

    async def body():
        engine = AsyncOmniDiffusion(model=str(tiny("qwen")))
        try:
            first = engine.start("a", **{**SMALL, "num_inference_steps": 1000})
            await anext(first)
            expected = r"request: expected an end within 0.1 s \(timeout_s\), got none"
            with pytest.raises(RequestTimeout, match=expected):
                await engine.generate("b", **SMALL, timeout_s=0.1)
            assert engine.num_waiting == 0
            await first.aclose()
            with pytest.raises(RequestTimeout, match=expected):
                await engine.generate("c", **{**SMALL, "num_inference_steps": 1000}, timeout_s=0.1)
            (await engine.generate("d", **SMALL, timeout_s=WAIT_S)).images[0].load()
        finally:
            await engine.close()

    asyncio.run(body())


@pytest.mark.parametrize("restarts", [True, False])
def test_dead_workers_are_replaced_where_that_is_wanted(tiny, monkeypatch, restarts):
    monkeypatch.setattr(async_omni_diffusion, "_WATCH_S", 0.01)
    monkeypatch.setattr(async_omni_diffusion, "_RETRY_S", 0.01)

    async def body():
        engine, starts = AsyncOmniDiffusion(model=str(tiny("qwen")), restarts=restarts), []
        early = []
        health = {"state": "ready", "pids": [], "reason": "worker 0: gone"}

        def restart():
            starts.append(1)
            if len(starts) == 2:
                raise OSError("no memory")
            health["state"] = "ready"  # of processes that load
            early.append(engine.is_running)

        monkeypatch.setattr(engine.engine, "restart", restart)
        monkeypatch.setattr(engine.engine, "health", lambda: health)
        try:
            for num_starts in (1, 3):  # the second time one fails
                health["state"] = "dead"
                while restarts and not engine.is_running:
                    await asyncio.sleep(0.005)
                assert len(starts) == (num_starts if restarts else 0)
                (await engine.generate("a", **SMALL)).images[0].load()
            assert not any(early)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(body(), WAIT_S))


FORGETFUL = """
import asyncio, json, sys
from diffulex.omni import AsyncOmniDiffusion

async def main():
    asyncio.create_task(engine.generate("a", num_inference_steps=1000, **more))
    while engine._current is None:
        await asyncio.sleep(0)

settings, more = map(json.loads, sys.argv[1:])
engine = AsyncOmniDiffusion(**settings)
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
"""

#: The loop stops after a step has been handed to the loop and before its task has seen it.
STOPS_BETWEEN = """
(job,) = engine._live.values()
put, has_put = job.events.put, []
job.events.put = lambda event: has_put.append(put(event))
while not has_put:
    loop.call_soon(loop.stop)
    loop.run_forever()
"""


#: Processes that neither go on nor take a signal but the last.
STOPS_WORKERS = """
import os, signal
pids = engine.engine.health()["pids"]
for pid in pids:
    os.kill(pid, signal.SIGSTOP)
print(*pids, engine.engine._worker.get_broadcast_handle()[0])
"""


@pytest.mark.slow
def test_stopped_workers_do_not_keep_the_interpreter(tiny):
    settings = {"model": str(tiny("qwen")), "data_parallel_size": 2, "shutdown_timeout_s": 1}
    command = [sys.executable, "-X", "dev", "-c", FORGETFUL + STOPS_WORKERS]
    command += [json.dumps(settings), json.dumps({"height": 64, "width": 64})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr
    *pids, directory = done.stdout.split()
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not Path(directory).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("and_then", "limit", "backend"),
    [("", {}, "inproc"), (STOPS_BETWEEN, {"timeout_s": 900}, "inproc"), (STOPS_BETWEEN, {}, "mp")],
    ids=["waits", "is_told", "is_told_by_a_process"],
)
def test_a_forgotten_close_does_not_keep_the_interpreter(tiny, and_then, limit, backend):
    settings = {"model": str(tiny("qwen")), "distributed_executor_backend": backend}
    more = {"height": 64, "width": 64, **limit}
    command = [sys.executable, "-X", "dev", "-c", FORGETFUL + and_then + 'print("end")']
    command += [json.dumps(settings), json.dumps(more)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.stdout == "end\n"
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr
