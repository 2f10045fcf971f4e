# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM: awaited answers equal those of the engine, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from diffulex import AsyncLLM, ConfigError, Diffulex, PromptError, SamplingParams
from diffulex.errors import EngineDeadError
from tiny_engine import TinyModel

QUESTION = "Ben has 8 coins. He loses 3 coins. How many coins does Ben have now?"
PROMPTS = [list(range(10 + i, 22 + i)) for i in range(5)]
#: What no test takes on the slowest machine.
TIMEOUT_S = 120.0


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, TIMEOUT_S))


def tiny_llm(tiny: TinyModel, **settings: Any) -> AsyncLLM:
    return AsyncLLM(str(tiny.directory), device="cpu", max_model_len=128, num_pages=128, **settings)


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "diffulex_engine"]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Engines take no step until it is set."""
    gate, step = threading.Event(), Diffulex.step

    def held(engine: Diffulex) -> Any:
        assert gate.wait(TIMEOUT_S)
        return step(engine)

    monkeypatch.setattr(Diffulex, "step", held)
    return gate


def test_answers_are_those_of_the_engine(tiny: TinyModel) -> None:
    settings = {"device": "cpu", "max_model_len": 128, "num_pages": 128}
    with Diffulex(str(tiny.directory), **settings) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS, max_tokens=30, summary=False)]
        streamed = list(engine.stream(PROMPTS[0], max_tokens=30, mode="denoise"))

    async def main() -> None:
        async with tiny_llm(tiny) as llm:
            params = SamplingParams(max_tokens=30)
            outputs = await asyncio.gather(*(llm.generate(p, params) for p in PROMPTS))
            assert [output.token_ids for output in outputs] == expected
            events = [e async for e in llm.stream(PROMPTS[0], mode="denoise", max_tokens=30)]
            assert [e.token_ids for e in events] == [e.token_ids for e in streamed]
            assert [e.text for e in events] == [e.text for e in streamed]
            assert [e.snapshot is None for e in events] == [e.snapshot is None for e in streamed]
            assert events[-1].output is not None
            assert llm.num_requests == 0

    run(main())


def test_chat_with_the_bundled_model() -> None:
    async def main() -> None:
        async with AsyncLLM("demo", max_num_reqs=4) as llm:
            answer = await llm.chat([{"role": "user", "content": QUESTION}])
            assert answer.text.splitlines()[-1] == "#### 5"
            pieces = [e.text async for e in llm.stream(QUESTION, use_chat_template=True)]
            assert "".join(pieces) == answer.text
            assert llm.tokenizer.has_chat_template
            assert llm.config.scheduler.max_num_reqs == 4

    run(main())


def test_who_goes_away_aborts(tiny: TinyModel, gate: threading.Event) -> None:
    async def main() -> None:
        async with tiny_llm(tiny) as llm:
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            task = asyncio.create_task(llm.generate(PROMPTS[0], params))
            while llm.num_requests == 0:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert llm.num_requests == 0
            gate.set()
            stream = llm.stream(PROMPTS[1], params)
            assert (await anext(stream)).token_ids
            await stream.aclose()
            assert llm.num_requests == 0
            # An abort by id ends a stream with what there is.
            events = []
            async for event in llm.stream(PROMPTS[2], params):
                events.append(event)
                llm.abort(event.req_id)
            assert events[-1].output is not None
            assert events[-1].output.completion_reason in ("aborted", "max_new_tokens_reached")
            assert not llm.abort(events[-1].req_id)
            assert (await llm.generate(PROMPTS[3], max_tokens=4)).token_ids

    run(main())


def test_a_close_ends_what_is_open(tiny: TinyModel, gate: threading.Event) -> None:
    async def main() -> None:
        llm = tiny_llm(tiny)
        await llm.start()
        with pytest.raises(RuntimeError, match="expected a new engine"):
            await llm.start()
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        tasks = [asyncio.create_task(llm.generate(p, params)) for p in PROMPTS]
        while llm.num_requests == 0:
            await asyncio.sleep(0)
        closing = asyncio.create_task(llm.close())
        await asyncio.sleep(0)
        gate.set()
        await closing
        assert not engine_threads()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert "got a closed one" in str(result)
        await llm.close()
        with pytest.raises(RuntimeError, match="expected an open engine, got a closed one"):
            await llm.generate(PROMPTS[0])
        closed = tiny_llm(tiny)
        await closed.close()
        with pytest.raises(RuntimeError, match="expected a new engine, got one that was closed"):
            await closed.start()

    run(main())
    assert not engine_threads()


def test_a_start_that_is_cancelled_leaves_nothing(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes, may_make, closed = threading.Event(), threading.Event(), threading.Event()
    build, close = Diffulex._build, Diffulex.close

    def held(engine: Diffulex, *arguments: Any) -> None:
        makes.set()
        assert may_make.wait(TIMEOUT_S)
        build(engine, *arguments)

    def noted(engine: Diffulex) -> None:
        close(engine)
        closed.set()

    monkeypatch.setattr(Diffulex, "_build", held)
    monkeypatch.setattr(Diffulex, "close", noted)

    async def main() -> None:
        llm = tiny_llm(tiny)
        starting = asyncio.create_task(llm.start())
        assert await asyncio.to_thread(makes.wait, TIMEOUT_S)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        may_make.set()
        await llm.close()
        assert closed.is_set()

    run(main())
    assert not engine_threads()


def test_one_that_nobody_uses_ends(tiny: TinyModel) -> None:
    async def main() -> None:
        llm = tiny_llm(tiny)
        await llm.start()
        assert (await llm.generate(PROMPTS[0], max_tokens=4)).token_ids

    run(main())
    gc.collect()
    for thread in engine_threads():
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


FORGETFUL = """
import asyncio
from diffulex import AsyncLLM

async def main():
    await llm.start()
    print(len((await llm.generate("Ben has 8 coins.", max_tokens=4)).token_ids))
    asyncio.create_task(llm.generate("Ben has 8 coins.", max_tokens=400, ignore_eos=True))
    while llm.num_requests == 0:
        await asyncio.sleep(0)

llm = AsyncLLM("demo", device="cpu", max_num_reqs=4)
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
"""

#: The loop stops after an answer has been handed to the loop and before its task has seen it.
STOPS_BETWEEN = """
(arrivals,) = llm._worker.arrivals.values()
put, has_put = arrivals.put, []
arrivals.put = lambda item: has_put.append(put(item))
while not has_put:
    loop.call_soon(loop.stop)
    loop.run_forever()
"""


@pytest.mark.slow
@pytest.mark.parametrize("and_then", ["", STOPS_BETWEEN], ids=["waits", "is_told"])
def test_a_forgotten_close_does_not_keep_the_interpreter(and_then: str) -> None:
    command = [sys.executable, "-X", "dev", "-c", FORGETFUL + and_then + 'print("end")']
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.stdout.splitlines() == ["4", "end"]
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr


def test_errors_reach_who_asked(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm = tiny_llm(tiny)
        with pytest.raises(RuntimeError, match="one that was not started"):
            await llm.generate(PROMPTS[0])
        async with llm:
            with pytest.raises(PromptError, match="empty prompt"):
                await llm.generate([])
            with pytest.raises(ValueError, match="expected block_append or denoise"):
                await anext(llm.stream(PROMPTS[0], mode="both"))  # type: ignore[arg-type]
            step, is_failing = Diffulex.step, True

            def failing(engine: Diffulex) -> Any:
                # In this order: a request that is seen here is one of before the last failure, or
                # the flag is down already.
                if llm.num_requests == 0 or not is_failing:
                    return step(engine)
                raise OSError("planted")

            monkeypatch.setattr(Diffulex, "step", failing)
            results = await asyncio.gather(
                *(llm.generate(p, max_tokens=60) for p in PROMPTS), return_exceptions=True
            )
            assert {str(result) for result in results} == {"planted"}
            is_failing = False
            assert 1 <= len((await llm.generate(PROMPTS[0], max_tokens=9)).token_ids) <= 9
        with pytest.raises(ConfigError, match="no_such_key"):
            await AsyncLLM("demo", no_such_key=1).start()  # type: ignore[call-arg]

    run(main())


def test_the_death_of_the_last_replica_ends_it(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = 0

    def dead(engine: Diffulex) -> Any:
        nonlocal num_steps
        num_steps += 1
        raise EngineDeadError("planted")

    async def main() -> None:
        async with tiny_llm(tiny) as llm:
            monkeypatch.setattr(Diffulex, "step", dead)
            results = await asyncio.gather(
                *(llm.generate(p, max_tokens=60) for p in PROMPTS), return_exceptions=True
            )
            assert [type(result) for result in results] == [EngineDeadError] * len(PROMPTS)
            # Its loop has ended, rather than that it tries for ever.
            for thread in engine_threads():
                await asyncio.to_thread(thread.join, TIMEOUT_S)
                assert not thread.is_alive()
            with pytest.raises(EngineDeadError, match="planted"):
                await llm.generate(PROMPTS[0])
            with pytest.raises(EngineDeadError, match="planted"):
                llm.tokenizer  # noqa: B018
            assert num_steps == 1

    run(main())
