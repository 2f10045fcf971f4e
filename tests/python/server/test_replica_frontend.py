# SPDX-License-Identifier: Apache-2.0
"""The frontend over several replicas with scripted backends: what it retries, refuses and reports."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from diffulex.config.sampling_params import SamplingParams
from diffulex.serving.frontend import ClientDisconnected, FrontendManager, OperationFailed
from diffulex.serving.frontend_state import FrontendLimits, ServerState
from diffulex.serving.replicas.frontend import ReplicaFrontend
from diffulex.wire.protocol import (
    PromptInput,
    ServingAck,
    ServingDelta,
    ServingError,
    ServingFlushCache,
    ServingGenerate,
    ServingReply,
)
from scripted_backend import TIMEOUT_S, FakeBackend, until

DEVICES = ["cuda:2", "cuda:3"]
INFO = {
    "num_pages": 10,
    "page_size": 32,
    "max_model_len": 100,
    "max_num_reqs": 2,
    "devices": DEVICES,
}


def command(rid: str, prompt: list[int] | None = None) -> ServingGenerate:
    params = SamplingParams(max_tokens=8, seed=5)
    return ServingGenerate(rid, PromptInput(prompt or [1, 2]), params, stream=True)


def reply(rid: str) -> ServingReply:
    return ServingReply(rid, "done", [1], 1)


def run(scenario, *answers, **options):
    """Runs `scenario(frontend, backends)` over one backend for each answer function."""

    async def main():
        backends = [FakeBackend(answer) for answer in answers]
        managers = [
            FrontendManager(
                model_id="m", send_backend=backend, recv_backend=backend,
                request_state_wait_timeout_s=0.02, info=INFO,
            )
            for backend in backends
        ]  # fmt: skip
        frontend = ReplicaFrontend(managers, **options)
        try:
            return await asyncio.wait_for(scenario(frontend, backends), TIMEOUT_S)
        finally:
            assert frontend.num_inflight == 0
            counts = [frontend.router.num_inflight(i) for i in range(len(managers))]
            assert counts == [0] * len(managers)
            await frontend.stop()

    return asyncio.run(main())


async def events(frontend, rid, **fields):
    return [event async for event in frontend.generate_stream(command(rid, **fields))]


def serve(sent):
    return [reply(sent.rid)] if isinstance(sent, ServingGenerate) else []


def stay_silent(sent):
    return []


def begin(sent):
    return [ServingDelta(sent.rid, 0, "a", [7], 1)] if isinstance(sent, ServingGenerate) else []


def die(sent):
    return [ServingError(sent.rid, "step failed", "engine_dead")] * isinstance(
        sent, ServingGenerate
    )


def test_requests_are_spread_and_a_prefix_stays():
    async def scenario(frontend, backends):
        prompts = [[i] * 640 for i in range(2)]
        for turn in range(6):
            await events(frontend, f"{turn}", prompt=prompts[turn % 2])
        held = [[sent.input.prompt[0] for sent in backend.commands] for backend in backends]
        assert sorted(held) == [[0, 0, 0], [1, 1, 1]]
        assert frontend.router.num_hit_tokens(0) == 2 * 320  # the pages of a replica hold so many

    run(scenario, serve, serve)


def test_a_request_of_a_lost_replica_starts_again_with_its_seed():
    async def scenario(frontend, backends):
        first = asyncio.ensure_future(events(frontend, "r"))
        await until(lambda: backends[0].commands or backends[1].commands)
        silent = 0 if backends[0].commands else 1
        assert silent == 0
        frontend.managers[silent].backend_died("killed")
        (end,) = await first
        assert end.text == "done"
        seeds = [backend.commands[0].sampling_params.seed for backend in backends]
        assert seeds == [5, 5]
        assert (frontend.num_retried, frontend.num_lost) == (1, 0)
        assert frontend.state is ServerState.READY
        assert frontend.degraded == [0]
        assert [row["state"] for row in frontend.rows()] == ["dead", "ready"]
        assert frontend.rows()[1]["devices"] == DEVICES

    run(scenario, stay_silent, serve)


def test_what_was_delivered_is_not_decoded_again():
    async def scenario(frontend, backends):
        stream = frontend.generate_stream(command("r"))
        assert (await anext(stream)).text == "a"
        frontend.managers[0].backend_died("killed")
        error = await anext(stream)
        assert (error.code, error.http_status, error.retryable) == ("replica_lost", 503, True)
        assert "part of the answer was delivered" in error.message
        assert [event async for event in stream] == []
        assert backends[1].commands == []
        assert (frontend.num_retried, frontend.num_lost) == (0, 1)

    run(scenario, begin, serve)


@pytest.mark.parametrize(("num_retries", "num_tries"), [(0, 1), (1, 2), (2, 3)])
def test_retries_have_an_end(num_retries, num_tries):
    async def scenario(frontend, backends):
        (error,) = await events(frontend, "r")
        assert error.code == "replica_lost"
        assert sum(len(backend.commands) for backend in backends) == num_tries
        assert (frontend.num_retried, frontend.num_lost) == (num_tries - 1, 1)

    run(scenario, die, die, die, num_retries=num_retries)


@pytest.mark.parametrize(
    ("how", "code"), [("abort", "aborted"), ("deadline", "request_timeout"), ("client", None)]
)
def test_a_request_that_waits_for_a_replica_can_end(how, code):
    """It is not lost then: its replica was, and another may yet come."""
    has_left = False

    async def is_disconnected():
        return has_left

    async def scenario(frontend, backends):
        nonlocal has_left
        aborts = []
        frontend.on_abort = lambda *abort: aborts.append(abort)
        stream = frontend.generate_stream(
            command("r"),
            is_disconnected=is_disconnected,
            timeout_s=1.0 if how == "deadline" else None,
        )
        waiting = asyncio.ensure_future(anext(stream))
        await until(lambda: backends[0].commands)
        frontend.managers[0].backend_died("killed")
        await until(lambda: frontend.router.num_inflight(0) == 0)
        if how == "abort":
            assert await frontend.abort_request("r")
        has_left = how == "client"
        if code is None:
            with pytest.raises(ClientDisconnected):
                await waiting
        else:
            assert (await waiting).code == code
        await stream.aclose()
        assert (frontend.num_retried, frontend.num_lost) == (0, 0)
        reason = {"abort": "api", "deadline": "timeout", "client": "disconnect"}[how]
        assert aborts == [("r", reason)]

    run(scenario, stay_silent)


def test_a_request_that_was_never_sent_is_not_lost():
    def refuse(sent):
        return [ServingError(sent.rid, "loading", "starting", 503)]

    async def scenario(frontend, backends):
        for manager in frontend.managers:
            manager.generate_stream = partial(refused, refuse)
        (error,) = await events(frontend, "r")
        assert (error.code, error.http_status, error.retryable) == ("starting", 503, True)
        assert (frontend.num_retried, frontend.num_lost) == (0, 0)

    run(scenario, serve, serve)


async def refused(refuse, sent, **options):
    for event in refuse(sent):
        yield event


def test_a_stuck_replica_serves_while_the_others_are_held():
    async def scenario(frontend, backends):
        frontend.held.add(0)
        frontend.managers[1].__class__ = Stuck
        assert (await events(frontend, "r"))[0].text == "done"
        assert backends[0].commands == []

    run(scenario, serve, serve)


class Stuck(FrontendManager):
    state = ServerState.STUCK


def test_limits_hold_for_all_replicas():
    async def scenario(frontend, backends):
        waiting = [asyncio.ensure_future(events(frontend, str(i))) for i in range(5)]
        await until(lambda: sum(len(backend.commands) for backend in backends) == 5)
        (refused,) = await events(frontend, "one too many")
        assert refused.code == "queue_full"
        assert refused.message == "expected at most 5 requests in flight"
        frontend.limits = FrontendLimits()
        with pytest.raises(ValueError, match="expected a new one"):
            await events(frontend, "0")
        assert await frontend.abort_request("0")
        assert not await frontend.abort_request("0")
        assert not await frontend.abort_request("unknown")
        assert (await waiting[0])[0].code == "aborted"
        for backend in backends:
            for sent in backend.commands[:]:
                if isinstance(sent, ServingGenerate):
                    backend.events.put_nowait(reply(sent.rid))
        assert [(await one)[0].text for one in waiting[1:]] == ["done"] * 4

    run(scenario, stay_silent, stay_silent, limits=FrontendLimits(max_queue_size=1))


def test_states():
    async def scenario(frontend, backends):
        frontend.held.add(0)
        assert frontend.state is ServerState.READY
        await events(frontend, "a")
        assert backends[0].commands == []
        frontend.managers[1].backend_starting()
        assert frontend.state is ServerState.STARTING
        (refused,) = await events(frontend, "b")
        assert (refused.code, refused.http_status) == ("starting", 503)
        frontend.managers[1].backend_died("gone")
        assert frontend.state is ServerState.DRAINING
        frontend.held.clear()
        assert frontend.is_healthy
        frontend.managers[0].backend_died("gone")
        assert frontend.state is ServerState.DEAD
        assert frontend.retry_after_s >= 1

    run(scenario, serve, serve)


def test_drain_lets_requests_end():
    async def scenario(frontend, backends):
        waiting = asyncio.ensure_future(events(frontend, "a"))
        await until(lambda: backends[0].commands)
        drain = frontend.begin_drain(TIMEOUT_S)
        assert (await events(frontend, "b"))[0].code == "draining"
        backends[0].events.put_nowait(reply("a"))
        assert (await waiting)[0].text == "done"
        await drain
        assert frontend.is_draining

    run(scenario, stay_silent, stay_silent)


def test_operations():
    """One is done by all; every other one, also one that is yet to come, needs one replica."""

    def flush(sent):
        return [ServingAck(sent.op_id, True, "", {"num_dropped_units": 3})] * isinstance(
            sent, ServingFlushCache
        )

    async def scenario(frontend, backends):
        await frontend.start()
        assert await frontend.flush_cache() == {"num_dropped_units": 6}
        for name in ("start_profile", "stop_profile", "control", "operate"):
            with pytest.raises(OperationFailed) as caught:
                await getattr(frontend, name)("pause")
            assert str(caught.value) == f"{name}: expected data_parallel_size 1, got 2"
        with pytest.raises(AttributeError, match="expected a known attribute, got 'nonsense'"):
            frontend.nonsense  # noqa: B018

    run(scenario, flush, flush)


def test_numbers_carry_the_replica():
    async def scenario(frontend, backends):
        for index, manager in enumerate(frontend.managers):
            manager.stats = {
                "gauges": {"requests_waiting": index},
                "counters": {"forward_steps_total": [{"labels": {"phase": "decode"}, "value": 4}]},
                "last_gen_throughput": 2.0,
            }
        stats = frontend.stats
        assert stats["gauges"]["requests_waiting"] == [
            {"labels": {"replica": "0"}, "value": 0}, {"labels": {"replica": "1"}, "value": 1},
        ]  # fmt: skip
        assert stats["counters"]["forward_steps_total"][1]["labels"] == {
            "phase": "decode", "replica": "1",
        }  # fmt: skip
        assert stats["last_gen_throughput"] == 4.0
        assert frontend.info["max_num_reqs"] == 4
        assert frontend.info["num_pages"] == 10
        assert frontend.info["world_size"] == 2

    run(scenario, serve, serve)
