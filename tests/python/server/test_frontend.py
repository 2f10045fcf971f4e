# SPDX-License-Identifier: Apache-2.0
"""The frontend over fake queues: who gets which event, and what ends a request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from diffulex import SamplingParams
from diffulex.serving.frontend import (
    BackendUnavailable,
    ClientDisconnected,
    FrontendLimits,
    FrontendManager,
    RequestFailed,
    ServerState,
)
from diffulex.serving.zmq_queue import MessageDecodeError
from diffulex.wire.protocol import (
    ChatInput,
    PromptInput,
    ServingAbort,
    ServingAck,
    ServingBatch,
    ServingBufferSnapshot,
    ServingDelta,
    ServingError,
    ServingGenerate,
    ServingHeartbeat,
    ServingReply,
    ServingShutdown,
)
from scripted_backend import TIMEOUT_S, FakeBackend, run, until


def generate(rid="a", prompt="hi", **changes):
    return ServingGenerate(rid, PromptInput(prompt), SamplingParams(max_tokens=8), True, **changes)


def delta(rid, offset, text):
    return ServingDelta(rid, offset, text, [ord(char) for char in text], 1)


def snapshot(offset, ids, text=None, rid="a", **fields):
    return ServingBufferSnapshot(
        rid, offset, 10 + offset, 10 + offset + len(ids), text, list(ids), 1, **fields
    )


def reply(rid="a", text="x"):
    return ServingReply(rid, text, [1], 1)


def answering(*events):
    return lambda command: events if isinstance(command, ServingGenerate) else ()


async def read(frontend, command, **options):
    return [event async for event in frontend.generate_stream(command, **options)]


def test_reply():
    async def scenario(frontend, backend):
        assert (await frontend.generate(generate())).text == "x"
        assert backend.commands == [generate(generation=1)]
        assert not backend.aborts()

    run(scenario, answering(reply()))


def test_events_go_to_their_requests():
    async def scenario(frontend, backend):
        a, b = await asyncio.gather(read(frontend, generate("a")), read(frontend, generate("b")))
        assert "".join(event.text for event in a[:-1]) == "12"
        assert "".join(event.text for event in b[:-1]) == "34"
        assert isinstance(a[-1], ServingReply)
        assert isinstance(b[-1], ServingReply)

    def answer(command):
        if getattr(command, "rid", None) == "b":
            events = [delta("b", 0, "3"), delta("a", 0, "1"), delta("nobody", 0, "?")]
            yield ServingBatch([*events, delta("b", 1, "4"), delta("a", 1, "2")])
            yield ServingBatch([reply("a"), reply("b")])

    run(scenario, answer)


def test_error():
    async def scenario(frontend, backend):
        with pytest.raises(RequestFailed, match="no") as caught:
            await frontend.generate(generate())
        assert caught.value.error.http_status == 400
        assert [type(e) for e in await read(frontend, generate())] == [ServingError]
        assert not backend.aborts()

    run(scenario, answering(ServingError("a", "no", "bad", 400)))


def test_duplicate_rid():
    async def scenario(frontend, backend):
        stream = frontend.generate_stream(generate())
        first = asyncio.ensure_future(stream.__anext__())
        await until(lambda: frontend.has_request("a"))
        with pytest.raises(ValueError, match="rid: expected a new one, got 'a' again"):
            await read(frontend, generate())
        await frontend.recv_backend.events.put(reply())
        assert isinstance(await first, ServingReply)
        await stream.aclose()

    run(scenario)


def test_events_of_an_aborted_request_do_not_reach_the_next_of_its_name():
    async def scenario(frontend, backend):
        stream = frontend.generate_stream(generate())
        first = asyncio.ensure_future(stream.__anext__())
        await until(lambda: backend.commands)
        await backend.events.put(delta("a", 0, "old"))
        await first
        await stream.aclose()
        second = asyncio.ensure_future(read(frontend, generate()))
        await until(lambda: len(backend.commands) == 3)
        old, abort, new = backend.commands
        assert isinstance(abort, ServingAbort)
        assert old.generation != new.generation
        # Under way when the first one was aborted.
        for event in (delta("a", 3, "old"), reply(text="old")):
            await backend.events.put(dataclasses.replace(event, generation=old.generation))
        for event in (delta("a", 0, "new"), reply(text="new")):
            await backend.events.put(dataclasses.replace(event, generation=new.generation))
        assert [event.text for event in await second] == ["new", "new"]

    run(scenario)


class TestEarlyEnd:
    """Exactly one abort each."""

    def test_consumer_closes(self):
        async def scenario(frontend, backend):
            stream = frontend.generate_stream(generate())
            assert (await stream.__anext__()).text == "1"
            await stream.aclose()
            await until(backend.aborts)
            assert backend.aborts() == ["a"]
            assert frontend.counters["aborts_sent"] == 1

        run(scenario, answering(delta("a", 0, "1")))

    def test_task_is_cancelled_again_and_again(self):
        """As a response task is, when its client leaves."""

        async def scenario(frontend, backend):
            task = asyncio.ensure_future(frontend.generate(generate()))
            await until(lambda: backend.commands)
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await until(backend.aborts)
            assert backend.aborts() == ["a"]

        run(scenario)

    def test_client_leaves_while_waiting(self):
        async def gone():
            return True

        async def scenario(frontend, backend):
            with pytest.raises(ClientDisconnected):
                await frontend.generate(generate(), is_disconnected=gone)
            await until(backend.aborts)
            assert backend.aborts() == ["a"]

        run(scenario)

    def test_client_leaves_a_stream_that_never_pauses(self):
        """Events that keep coming must not keep the frontend from asking."""
        calls = []

        async def gone():
            calls.append(1)
            return len(calls) > 1

        async def scenario(frontend, backend):
            async def flood():
                while True:
                    backend.events.put_nowait(delta("a", 0, "1"))
                    await asyncio.sleep(0.001)

            task = asyncio.ensure_future(flood())
            with pytest.raises(ClientDisconnected):
                await read(frontend, generate(), is_disconnected=gone)
            task.cancel()
            await until(backend.aborts)
            assert backend.aborts() == ["a"]

        run(scenario)

    def test_reply_wins_over_a_late_close(self):
        async def scenario(frontend, backend):
            stream = frontend.generate_stream(generate())
            assert isinstance(await stream.__anext__(), ServingReply)
            await stream.aclose()
            await asyncio.sleep(0.01)
            assert not backend.aborts()

        run(scenario, answering(reply()))

    def test_request_timeout(self):
        reasons = []

        async def scenario(frontend, backend):
            frontend.on_abort = lambda rid, reason: reasons.append((rid, reason))
            (error,) = await read(frontend, generate(), timeout_s=0.02)
            assert (error.code, error.http_status) == ("request_timeout", 504)
            await until(backend.aborts)
            assert backend.aborts() == ["a"]

        run(scenario, limits=FrontendLimits(request_timeout_s=100.0))
        assert reasons == [("a", "timeout")]

    def test_header_cannot_raise_the_timeout(self):
        async def scenario(frontend, backend):
            (error,) = await read(frontend, generate(), timeout_s=1000.0)
            assert error.code == "request_timeout"

        run(scenario, limits=FrontendLimits(request_timeout_s=0.02))

    def test_abort_by_name(self):
        async def scenario(frontend, backend):
            task = asyncio.ensure_future(read(frontend, generate()))
            await until(lambda: frontend.has_request("a"))
            assert await frontend.abort_request("a") is True
            assert await frontend.abort_request("b") is False
            (error,) = await task
            assert (error.code, error.http_status) == ("aborted", 499)
            await until(backend.aborts)
            assert backend.aborts() == ["a"]

        run(scenario)


class TestRefusals:
    def refusal(self, prepare, code, status, **options):
        async def scenario(frontend, backend):
            prepare(frontend)
            (error,) = await read(frontend, generate())
            assert (error.code, error.http_status, error.retryable) == (code, status, True)
            assert not backend.commands

        run(scenario, **options)

    def test_starting(self):
        self.refusal(lambda f: f.backend_starting(), "starting", 503)

    def test_dead(self):
        self.refusal(lambda f: f.backend_died("killed"), "engine_dead", 503)

    def test_draining(self):
        async def scenario(frontend, backend):
            await frontend.begin_drain(30.0)
            assert frontend.state is ServerState.DRAINING
            assert 1 <= frontend.retry_after_s <= 30
            (error,) = await read(frontend, generate())
            assert (error.code, error.http_status) == ("draining", 503)

        run(scenario)

    def test_queue_full(self):
        async def scenario(frontend, backend):
            tasks = [asyncio.ensure_future(read(frontend, generate(str(i)))) for i in range(5)]
            await until(lambda: frontend.num_inflight == 5)
            (error,) = await read(frontend, generate("more"))
            assert (error.code, error.http_status) == ("queue_full", 429)
            for i in range(5):
                backend.events.put_nowait(reply(str(i)))
            await asyncio.gather(*tasks)

        run(scenario, limits=FrontendLimits(max_queue_size=3), info={"max_num_reqs": 2})

    def test_queued_tokens(self):
        async def scenario(frontend, backend):
            task = asyncio.ensure_future(read(frontend, generate("a", [1, 2])))
            await until(lambda: frontend.num_inflight == 1)
            (error,) = await read(frontend, generate("b", [1, 2, 3]))
            assert error.code == "queue_full"
            backend.events.put_nowait(reply())
            await task
            assert frontend.num_inflight == 0

        run(scenario, limits=FrontendLimits(max_queued_tokens=20))


class TestCommands:
    def test_lone_surrogates_are_replaced(self):
        async def scenario(frontend, backend):
            command = generate(prompt="a\ud800b", user="\udfff")
            await frontend.generate(command)
            assert backend.commands[0].input == PromptInput("a?b")
            assert backend.commands[0].user == "?"
            chat = generate()
            chat.input = ChatInput([{"role": "user", "content": "\ud800"}])
            await frontend.generate(chat)
            assert backend.commands[1].input.messages == [{"role": "user", "content": "?"}]

        run(scenario, answering(reply()))

    def test_queue_timeout_travels(self):
        async def scenario(frontend, backend):
            await frontend.generate(generate())
            assert backend.commands[0].queue_timeout_s == 7.0

        run(scenario, answering(reply()), limits=FrontendLimits(queue_timeout_s=7.0))

    def test_command_that_cannot_be_sent(self):
        async def scenario(frontend, backend):
            (error,) = await read(frontend, generate())
            assert (error.code, error.http_status) == ("bad_command", 400)

        def answer(command):
            if isinstance(command, ServingGenerate):
                raise ValueError("cannot pack")
            return ()

        run(scenario, answer)

    def test_stop_says_goodbye(self):
        async def main():
            backend = FakeBackend()
            frontend = FrontendManager(model_id="m", send_backend=backend, recv_backend=backend)
            await frontend.start()
            await frontend.start()
            await frontend.stop()
            assert backend.commands == [ServingShutdown()]
            assert backend.num_stops == 2
            assert frontend.state is ServerState.STOPPED

        asyncio.run(main())


class TestListener:
    def test_survives_garbage(self):
        async def scenario(frontend, backend):
            await frontend.start()
            backend.events.put_nowait(MessageDecodeError("bad"))
            backend.events.put_nowait(object())
            assert (await frontend.generate(generate())).text == "x"
            assert frontend.counters["messages_undecodable"] == 1
            assert frontend.counters["events_unknown"] == 1
            for message in (
                ServingReply(["no", "rid"], "x", [], 1),
                ServingHeartbeat(0.0, 1, 0.0, None),
                ServingBatch(7),
                ServingAck({}, True),
            ):
                backend.events.put_nowait(message)
            assert (await frontend.generate(generate())).text == "x"
            assert frontend.counters["messages_undecodable"] == 5
            assert frontend.heartbeat_age_s is None
            assert frontend.state is ServerState.READY

        run(scenario, answering(reply()))

    def test_its_end_is_the_end(self):
        async def scenario(frontend, backend):
            task = asyncio.ensure_future(read(frontend, generate()))
            await until(lambda: frontend.has_request("a"))
            backend.events.put_nowait(OSError("socket closed"))
            (error,) = await task
            assert error.code == "engine_dead"
            assert frontend.state is ServerState.DEAD

        run(scenario)

    def test_heartbeats(self):
        async def scenario(frontend, backend):
            await frontend.start()
            assert frontend.heartbeat_age_s is None
            beat = ServingHeartbeat(0.0, 7, 2.5, {"gauges": {"requests_running": 1}})
            backend.events.put_nowait(beat)
            await until(lambda: frontend.heartbeat_age_s is not None)
            assert (frontend.step_seq, frontend.step_running_s) == (7, 2.5)
            assert frontend.stats == {"gauges": {"requests_running": 1}}
            assert frontend.is_healthy
            frontend.step_timeout_s = 2.0
            assert frontend.state is ServerState.STUCK
            frontend._heartbeat_at -= 11.0
            assert frontend.state is ServerState.UNRESPONSIVE
            backend.events.put_nowait(ServingHeartbeat(1.0))
            await until(lambda: frontend.is_healthy)

        run(scenario)


class TestBackendDeath:
    def test_everybody_is_told(self):
        async def scenario(frontend, backend):
            tasks = [asyncio.ensure_future(read(frontend, generate(str(i)))) for i in range(3)]
            await until(lambda: len(backend.commands) == 3)
            frontend.backend_died("was killed by SIGKILL")
            for events in await asyncio.gather(*tasks):
                assert (events[-1].code, events[-1].http_status) == ("engine_dead", 500)
                assert "SIGKILL" in events[-1].message
            assert not backend.aborts()
            assert not frontend.is_healthy

        run(scenario)

    def test_a_new_backend_serves(self):
        async def scenario(frontend, backend):
            frontend.backend_died("gone")
            frontend.backend_starting()
            assert frontend.state is ServerState.STARTING
            frontend.backend_ready({"max_num_reqs": 4})
            assert frontend.info == {"max_num_reqs": 4}
            assert (await frontend.generate(generate())).text == "x"

        run(scenario, answering(reply()))

    def test_commands_for_the_dead_are_not_for_its_successor(self):
        async def scenario(frontend, backend):
            blocked = asyncio.Event()

            async def put(command):
                blocked.set()
                await asyncio.sleep(TIMEOUT_S)

            original, backend.put = backend.put, put
            task = asyncio.ensure_future(read(frontend, generate("old")))
            await blocked.wait()
            frontend.backend_died("gone")
            await task
            backend.put = original
            frontend.backend_starting()
            frontend.backend_ready({})
            await read(frontend, generate("a"))
            assert [command.rid for command in backend.commands] == ["a"]

        run(scenario, answering(reply()))

    def test_operations_fail(self):
        async def scenario(frontend, backend):
            task = asyncio.ensure_future(frontend.flush_cache())
            await until(lambda: backend.commands)
            frontend.backend_died("gone")
            with pytest.raises(BackendUnavailable):
                await task
            with pytest.raises(BackendUnavailable, match="expected one that is ready, got dead"):
                await frontend.flush_cache()

        run(scenario)


class TestDrain:
    def test_waits_for_requests(self):
        async def scenario(frontend, backend):
            task = asyncio.ensure_future(read(frontend, generate()))
            await until(lambda: backend.commands)
            drain = frontend.begin_drain(TIMEOUT_S)
            assert frontend.begin_drain(0.0) is drain
            await asyncio.sleep(0.01)
            assert not drain.done()
            backend.events.put_nowait(reply())
            assert isinstance((await task)[-1], ServingReply)
            await drain

        run(scenario)

    def test_deadline(self):
        async def scenario(frontend, backend):
            task = asyncio.ensure_future(read(frontend, generate()))
            await until(lambda: backend.commands)
            await frontend.begin_drain(0.01)
            (error,) = await task
            assert (error.code, error.http_status) == ("server_shutdown", 503)
            await until(backend.aborts)

        run(scenario)


class TestSnapshots:
    def test_snapshot_interval(self):
        async def scenario(frontend, backend):
            await frontend.start()
            task = asyncio.ensure_future(read(frontend, generate()))
            await until(lambda: backend.commands)
            for i in range(50):
                backend.events.put_nowait(snapshot(0, [i]))
                await asyncio.sleep(0.001)
            backend.events.put_nowait(reply())
            events = await task
            assert len(events) < 10
            assert events[-2].token_ids == [49]
            assert frontend.counters["snapshots_coalesced"] > 30

        run(scenario, limits=FrontendLimits(denoise_min_interval_ms=10_000.0))

    def test_text_of_snapshots(self):
        class Tokenizer:
            def decode(self, token_ids, skip_special_tokens):
                assert not skip_special_tokens
                if 99 in token_ids:
                    raise TypeError("no token string")
                return "".join(map(str, token_ids))

        async def scenario(frontend, backend):
            events = await read(frontend, generate())
            assert events[0].text == "12"

        # Ids without a text are empty.
        run(scenario, answering(snapshot(0, [1, 99, 2]), reply()), tokenizer=Tokenizer())
