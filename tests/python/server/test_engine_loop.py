# SPDX-License-Identifier: Apache-2.0
"""The in-process loop over a fake engine."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from block_engine import BlockEngine
from byte_tokenizer import EOS
from diffulex import SamplingParams
from diffulex.errors import PromptError
from diffulex.serving.engine_loop import EngineLoop, GenerateResult, QueuedCommand
from diffulex.serving.frontend import FrontendManager, RequestFailed
from diffulex.serving.inproc import InprocCommands
from diffulex.wire.protocol import (
    ChatInput,
    PromptInput,
    ServingAbort,
    ServingBufferSnapshot,
    ServingDelta,
    ServingError,
    ServingFlushCache,
    ServingGenerate,
    ServingProfileStart,
    ServingReply,
)

PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


class SlowEngine(BlockEngine):
    """Never finishes a request by itself; keeps the threads it was touched by."""

    def __init__(self, model, **kwargs):
        super().__init__()
        self.model, self.kwargs = model, kwargs
        self.threads = {threading.current_thread().name}
        self.is_endless = kwargs.get("is_endless", False)
        self.pause_s = kwargs.get("pause_s", 0.0)
        self.batches = []
        self.on_step = lambda: None

    def run_serving_tick(self, commands):
        self.threads.add(threading.current_thread().name)
        self.batches.append(list(commands))
        return super().run_serving_tick(commands)

    def step(self):
        if self.is_endless:
            time.sleep(0.002)
            return []
        time.sleep(self.pause_s)
        self.on_step()
        return super().step()

    def exit(self):
        self.threads.add(threading.current_thread().name)
        super().exit()


class Harness:
    """A started loop and its engine."""

    def __init__(self, **kwargs):
        self.engines = []
        self.loop = EngineLoop("m", kwargs, engine_factory=self.make)

    def make(self, model, **kwargs):
        self.engines.append(SlowEngine(model, **kwargs))
        return self.engines[-1]

    @property
    def engine(self):
        return self.engines[-1]

    async def __aenter__(self):
        await self.loop.start()
        return self

    async def __aexit__(self, *exc):
        await self.loop.stop()


async def until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "expected it in time"
        await asyncio.sleep(0.002)


def run(test, **kwargs):
    async def body():
        async with Harness(**kwargs) as harness:
            await asyncio.wait_for(test(harness), 30)

    asyncio.run(body())


def test_names():
    assert GenerateResult is ServingReply
    assert EngineLoop("dir/model").model_id == "dir/model"
    assert EngineLoop("m", {"model_name": "dream"}).model_id == "dream"
    assert QueuedCommand(ServingAbort("a")).command.rid == "a"


def test_generate_returns_the_reply():
    async def test(harness):
        reply = await harness.loop.generate("hi", PARAMS, rid="mine")
        assert reply.rid == "mine"
        assert len(reply.token_ids) == 16
        assert not harness.loop.has_waiters()
        assert (await harness.loop.generate(PromptInput([1, 2]), PARAMS)).prompt_tokens == 2

    run(test)


def test_start_twice_builds_one_engine_and_passes_its_settings():
    async def test(harness):
        await harness.loop.start()
        assert len(harness.engines) == 1
        assert (harness.engine.model, harness.engine.kwargs) == ("m", {"block_size": 8})
        assert harness.loop.is_running

    run(test, block_size=8)


def test_the_engine_is_touched_by_one_thread():
    async def test(harness):
        await asyncio.gather(*(harness.loop.generate("x", PARAMS) for _ in range(4)))
        assert await harness.loop.call_engine(lambda: threading.current_thread().name) in (
            harness.engine.threads
        )

    harnesses = []

    async def body():
        async with Harness() as harness:
            harnesses.append(harness)
            await test(harness)

    asyncio.run(body())
    (name,) = harnesses[0].engine.threads
    assert name.startswith("diffulex-engine")
    assert harnesses[0].engine.exited


def test_concurrent_requests_are_batched():
    async def test(harness):
        replies = await asyncio.gather(
            *(harness.loop.generate("x", PARAMS, rid=str(index)) for index in range(8))
        )
        assert [reply.rid for reply in replies] == [str(index) for index in range(8)]
        most = max(len(batch) for batch in harness.engine.batches)
        assert most >= 7, "all that waits is taken by one tick"
        alone = sum(reply.nfe for reply in replies)
        assert harness.engine.num_steps < alone

    run(test)


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("block_append", {ServingDelta}),
        ("denoise", {ServingBufferSnapshot}),
        ("both", {ServingDelta, ServingBufferSnapshot}),
    ],
)
def test_streams(mode, kinds):
    async def test(harness):
        stream = harness.loop.generate_stream("x", PARAMS, stream_mode=mode)
        events = [event async for event in stream]
        assert {type(event) for event in events[:-1]} == kinds
        assert isinstance(events[-1], ServingReply)
        if mode == "block_append":
            assert "".join(event.text for event in events[:-1]) == events[-1].text
        assert not harness.loop.has_waiters()

    run(test)


def test_chats_are_rendered_by_the_engine():
    async def test(harness):
        messages = [{"role": "user", "content": "hi"}]
        assert await harness.loop.render_chat_prompt(messages) == "user: hi\nassistant:"
        reply = await harness.loop.generate(ChatInput(messages), PARAMS)
        assert reply.prompt_tokens == len("user: hi\nassistant:")

    run(test)


def test_rejected_requests():
    async def test(harness):
        with pytest.raises(RequestFailed) as caught:
            await harness.loop.generate([], PARAMS)
        assert caught.value.error.http_status == 400
        events = [event async for event in harness.loop.generate_stream([], PARAMS)]
        assert [type(event) for event in events] == [ServingError]
        stream = harness.loop.generate_stream("x", PARAMS, rid="a")
        await stream.__anext__()
        with pytest.raises(ValueError, match="'a' again"):
            await harness.loop.generate("x", PARAMS, rid="a")
        await stream.aclose()

    run(test)


def test_operations_are_answered():
    async def test(harness):
        ack = await harness.loop.operate(ServingFlushCache("1"))
        assert (ack.ok, ack.data) == (True, {"num_dropped_units": 0})
        ack = await harness.loop.operate(ServingProfileStart(op_id="2"))
        assert not ack.ok
        with pytest.raises(ValueError, match="op_id"):
            await harness.loop.operate(ServingProfileStart())

    run(test)


async def until_held(harness):
    """The engine's thread waits for the gate."""
    gate, is_held = threading.Event(), threading.Event()

    def hold():
        is_held.set()
        gate.wait(30)

    held = asyncio.create_task(harness.loop.call_engine(hold))
    await until(is_held.is_set)
    return gate, held


def test_an_operation_is_waited_for_and_ends_with_the_loop():
    async def body():
        async with Harness() as harness:
            gate, held = await until_held(harness)
            operation = asyncio.create_task(harness.loop.operate(ServingFlushCache("1")))
            await asyncio.sleep(0)
            assert harness.loop.has_waiters()
            with pytest.raises(ValueError, match="expected a new one, got '1' again"):
                await harness.loop.operate(ServingFlushCache("1"))
            stopping = asyncio.create_task(harness.loop.stop())
            await until(lambda: not harness.loop.has_waiters())
            with pytest.raises(RuntimeError, match="stopped before request completion"):
                await asyncio.gather(harness.loop.operate(ServingFlushCache("2")), release(gate))
            await held
            await stopping
            with pytest.raises(RuntimeError, match="stopped before request completion"):
                await operation

    async def release(gate):
        gate.set()

    asyncio.run(asyncio.wait_for(body(), 10))


def test_an_operation_may_take_any_time(monkeypatch):
    """No HTTP client waits for it, and a profile may take minutes to write."""
    limits = []

    def make(operation_timeout_s=30.0, **options):
        limits.append(operation_timeout_s)
        return FrontendManager(operation_timeout_s=operation_timeout_s, **options)

    monkeypatch.setattr("diffulex.serving.engine_loop.FrontendManager", make)

    async def test(harness):
        assert (await harness.loop.operate(ServingFlushCache("1"))).ok

    run(test)
    assert limits == [None]


# Ends before the reply.


def test_a_cancelled_generate_is_aborted():
    async def test(harness):
        task = asyncio.create_task(harness.loop.generate("x", PARAMS))
        await until(lambda: harness.engine.live)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not harness.engine.live)
        assert harness.engine.aborted == [0]
        await asyncio.sleep(0.02)
        num_ticks = len(harness.engine.batches)
        await asyncio.sleep(0.05)
        assert len(harness.engine.batches) == num_ticks, "an idle loop must not spin"

    run(test, is_endless=True)


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_name_can_be_used_again_at_once(is_admitted):
    async def test(harness):
        gate = threading.Event()
        if is_admitted:
            gate.set()
        held = asyncio.create_task(harness.loop.call_engine(gate.wait))
        await asyncio.sleep(0)
        first = asyncio.create_task(harness.loop.generate("x", PARAMS, rid="a"))
        if is_admitted:
            await until(lambda: harness.engine.live)
        else:
            await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gate.set()
        await held
        reply = await harness.loop.generate("y", PARAMS, rid="a")
        assert reply.generation == 2
        assert harness.engine.aborted == ([0] if is_admitted else [])

    run(test, pause_s=0.02)


def test_a_closed_stream_is_aborted():
    async def test(harness):
        stream = harness.loop.generate_stream("x", PARAMS)
        await stream.__anext__()
        await stream.aclose()
        assert not harness.loop.has_waiters(), "closing must not be left to the garbage collector"
        await until(lambda: harness.engine.aborted)

    run(test, pause_s=0.5)  # an answer that has ended needs no abort


def test_a_client_that_left_ends_its_stream(monkeypatch):
    monkeypatch.setattr("diffulex.serving.engine_loop._DISCONNECT_POLL_S", 0.02)

    async def test(harness):
        async def is_disconnected():
            return True

        stream = harness.loop.generate_stream("x", PARAMS, is_disconnected=is_disconnected)
        assert [event async for event in stream] == []
        await until(lambda: harness.engine.aborted == [0])

    run(test, is_endless=True)


def test_what_nobody_waits_for_is_not_admitted():
    async def test(harness):
        gate, blocked = await until_held(harness)  # or both commands are taken at once
        task = asyncio.create_task(harness.loop.generate("x", PARAMS))
        await asyncio.sleep(0)
        task.cancel()
        kept = asyncio.create_task(harness.loop.generate("y", PARAMS))
        gate.set()
        await blocked
        await kept
        assert harness.engine.num_added == 1
        assert not harness.engine.aborted

    run(test)


def test_stop_ends_what_is_pending():
    outcome = {}

    async def consume(harness):
        outcome["events"] = [e async for e in harness.loop.generate_stream("x", PARAMS)]

    async def body():
        async with Harness(is_endless=True) as harness:
            future = asyncio.create_task(harness.loop.generate("x", PARAMS))
            stream = asyncio.create_task(consume(harness))
            await until(lambda: len(harness.engine.live) == 2)
            await harness.loop.stop()
            with pytest.raises(RuntimeError, match="stopped before request completion"):
                await future
            await stream
            assert harness.engine.exited
            with pytest.raises(RuntimeError, match="expected it to run"):
                await harness.loop.generate("x", PARAMS)
            await harness.loop.stop()

    asyncio.run(asyncio.wait_for(body(), 30))
    assert isinstance(outcome["events"][-1], ServingError)
    assert outcome["events"][-1].code == "server_shutdown"


def test_not_started():
    loop = EngineLoop("m", engine_factory=SlowEngine)
    with pytest.raises(RuntimeError, match="expected it to run"):
        asyncio.run(loop.generate("x", PARAMS))


def test_steps_are_numbered():
    async def test(harness):
        assert (harness.loop.step_seq, harness.loop.step_running_s) == (0, 0.0)
        reply = await harness.loop.generate("x", PARAMS)
        assert harness.loop.step_seq >= reply.nfe
        gate = threading.Event()
        harness.engine.on_step = gate.wait
        generated = asyncio.create_task(harness.loop.generate("x", PARAMS))
        await until(lambda: harness.loop.step_running_s > 0)
        gate.set()
        await generated
        await until(lambda: harness.loop.step_running_s == 0)

    run(test)


def test_a_loop_that_ended_before_its_thread_was_woken():
    """The next event loop wakes the thread all the same."""
    commands = InprocCommands()
    old = asyncio.new_event_loop()
    old.call_soon(old.stop)
    left = old.create_task(commands.put(ServingAbort("a")))
    old.run_forever()
    assert left.done()
    old.close()

    async def body():
        commands.open()
        reader = asyncio.get_running_loop().run_in_executor(None, commands.get, 4.0)
        await asyncio.sleep(0.05)
        await commands.put(ServingAbort("b"))
        done, _ = await asyncio.wait({reader}, timeout=2.0)
        assert done
        assert reader.result() == ServingAbort("b")

    asyncio.run(body())


def test_a_constructor_that_fails():
    def make(model, **kwargs):
        raise ValueError("no such model")

    async def body():
        loop = EngineLoop("m", engine_factory=make)
        with pytest.raises(ValueError, match="no such model"):
            await loop.start()
        assert not loop.is_running

    asyncio.run(body())


def test_a_start_that_is_cancelled():
    """Nothing is left that the garbage collector would complain about."""
    gate, complaints = threading.Event(), []

    async def body():
        asyncio.get_running_loop().set_exception_handler(lambda _, found: complaints.append(found))
        loop = EngineLoop("m", engine_factory=lambda model: gate.wait(30))
        starting = asyncio.create_task(loop.start())
        await until(lambda: loop.is_running)
        starting.cancel()
        loop._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await until(lambda: not loop.is_running)

    try:
        asyncio.run(body())
    finally:
        gate.set()
    gc.collect()
    assert not complaints


def test_a_step_that_fails_ends_everything():
    async def body():
        async with Harness() as harness:
            await harness.loop.generate("x", PARAMS)
            harness.engine.failure = ZeroDivisionError("kernel")
            with pytest.raises(RuntimeError, match="stopped before request completion") as caught:
                await harness.loop.generate("x", PARAMS)
            assert "kernel" in str(caught.value.__cause__)
            await until(lambda: harness.engine.exited)
            with pytest.raises(RuntimeError, match="expected it to run") as caught:
                await harness.loop.generate("x", PARAMS)
            assert "kernel" in str(caught.value.__cause__)
            await harness.loop.start()
            names = [task.get_name() for task in asyncio.all_tasks()]
            assert names.count("diffulex-listen") == 1, "those of before have ended"
            assert len((await harness.loop.generate("x", PARAMS)).token_ids) == 16
            assert len(harness.engines) == 2
            assert harness.loop.error is None

    asyncio.run(asyncio.wait_for(body(), 30))


def test_starts_at_once_build_one_engine():
    """After a failure too: none of them ends what another one builds."""

    async def body():
        async with Harness() as harness:
            harness.engine.failure = ZeroDivisionError("kernel")
            with pytest.raises(RuntimeError, match="stopped before request completion"):
                await harness.loop.generate("x", PARAMS)
            await until(lambda: not harness.loop.is_running)
            await asyncio.gather(*(harness.loop.start() for _ in range(3)))
            assert harness.loop.is_running
            assert len((await harness.loop.generate("x", PARAMS)).token_ids) == 16
            assert len(harness.engines) == 2

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_start_that_is_cancelled_leaves_the_others():
    """The engine goes on loading; who waits for it is served, and told when it ends."""

    async def body():
        gate, harness = threading.Event(), Harness()
        loop = EngineLoop("m", engine_factory=lambda *a: gate.wait(30) and harness.make(*a))
        first, second = (asyncio.create_task(loop.start()) for _ in range(2))
        await until(lambda: loop.is_running)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gate.set()
        await second
        assert len((await loop.generate("x", PARAMS)).token_ids) == 16
        stream = loop.generate_stream("x", PARAMS)
        await stream.__anext__()
        loop._task.cancel()
        events = [event async for event in stream]
        assert events[-1].code == "engine_dead"
        await loop.stop()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_lost_events_are_an_error_not_a_spin():
    class Forgetful(BlockEngine):
        num_ticks = 0

        def __init__(self, model, **kwargs):
            super().__init__()

        def run_serving_tick(self, commands):
            self.num_ticks += 1
            return []

    async def body():
        loop = EngineLoop("m", engine_factory=Forgetful)
        await loop.start()
        with pytest.raises(RequestFailed, match="lost"):
            await asyncio.wait_for(loop.generate("x", PARAMS), 5)
        assert loop.engine.num_ticks < 5
        await loop.stop()

    asyncio.run(body())


def test_restart_after_stop():
    async def body():
        harness = Harness()
        for _ in range(2):
            async with harness:
                await harness.loop.generate("x", PARAMS)
        assert len(harness.engines) == 2

    asyncio.run(body())


def test_end_tokens_still_end(monkeypatch):
    monkeypatch.setattr(SlowEngine, "add_request", _ending_at_once)

    async def test(harness):
        params = SamplingParams(max_tokens=16, temperature=0.0)
        command = ServingGenerate("a", PromptInput("x"), params, True, "block_append")
        events = [event async for event in harness.loop.stream_command(command)]
        assert events[-1].text == "A"
        assert events[-1].finish_reason == "eos_token_generated"

    run(test)


def _ending_at_once(self, prompt, sampling_params, **options):
    self.answers = {self.num_added: [65, EOS]}
    return BlockEngine.add_request(self, prompt, sampling_params, **options)


@pytest.mark.parametrize("prompt", [None, {"prompt": "x"}, b"x", 5, [1, "a"], [1.5], [True]])
def test_prompts_of_another_type_are_refused(prompt):
    async def ask():
        loop = EngineLoop("m", engine_factory=SlowEngine)
        await loop.start()
        try:
            with pytest.raises(PromptError, match="prompt: expected a text or token ids, got"):
                await loop.generate(prompt, PARAMS)
            with pytest.raises(ValueError, match="sampling_params: expected SamplingParams"):
                await loop.generate("x", {"max_tokens": 3})
            return await loop.generate((1, 2), PARAMS)
        finally:
            await loop.stop()

    assert len(asyncio.run(ask()).token_ids) == 16
