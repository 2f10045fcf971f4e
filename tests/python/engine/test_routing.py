# SPDX-License-Identifier: Apache-2.0
"""Streams, `generate` calls and `step` that run one engine in turn lose nothing."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.engine.output import RequestOutput, StepOutput, StreamEvent
from diffulex.engine.routing import StepQueue, StepRouter, take_all
from tiny_engine import TinyModel

FREE = SamplingParams(max_tokens=20, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
PROMPTS = ([1, 2, 3], [4] * 9, [7, 8])


def ids_and_text(events: list[StreamEvent]) -> tuple[tuple[int, ...], str]:
    assert [event.is_finished for event in events] == [False] * (len(events) - 1) + [True]
    token_ids = tuple(token for event in events for token in event.token_ids)
    output = events[-1].output
    assert output is not None
    assert output.token_ids == token_ids
    text = "".join(event.text for event in events)
    assert output.text == text
    return token_ids, text


def alone(engine: Diffulex, *work: tuple[list[int], SamplingParams]) -> list[Any]:
    outputs = [engine.generate([prompt], params, summary=False)[0] for prompt, params in work]
    return [(output.token_ids, output.text) for output in outputs]


def run_into(engine: Diffulex, steps: list[StepOutput]) -> None:
    while engine.has_unfinished():
        steps += engine.step()


def pages_are_free(engine: Diffulex) -> bool:
    stats = engine.stats()
    return stats.num_free_pages == stats.num_pages


def test_router_delivers_in_order_to_the_owner() -> None:
    router, queue = StepRouter(), StepQueue()
    router.claim(1, queue)
    router.claim(2, queue)
    router.push([StepOutput(1, (10,)), StepOutput(3, (30,)), StepOutput(2, (20,))])
    router.push([StepOutput(1, (11,), is_finished=True)])
    assert [step.token_ids for step in take_all(queue)] == [(10,), (20,), (11,)]
    assert take_all(queue) == []
    assert [step.token_ids for step in take_all(router.unclaimed)] == [(30,)]
    router.abandon([2])
    router.push([StepOutput(2, (21,)), StepOutput(2, is_finished=True)])
    assert not queue
    assert not router.unclaimed


@pytest.mark.parametrize("foreign", [FREE, SHORT], ids=["longer", "shorter"])
def test_generate_while_a_stream_is_open(tiny: TinyModel, foreign: SamplingParams) -> None:
    with tiny.engine(block_size=4, buffer_size=2) as engine:
        for own in (FREE, SHORT):
            expected = alone(engine, (PROMPTS[0], own), (PROMPTS[1], foreign))
            stream = engine.stream(PROMPTS[0], own)
            events = [next(stream)]
            other = engine.generate([PROMPTS[1]], foreign, summary=False)[0]
            events += list(stream)
            assert ids_and_text(events) == expected[0]
            assert (other.token_ids, other.text) == expected[1]
            assert not engine.has_unfinished()
            assert pages_are_free(engine)


def test_interleaved_streams(tiny: TinyModel) -> None:
    with tiny.engine(block_size=4, buffer_size=2) as engine:
        work = list(zip(PROMPTS, (FREE, SHORT, FREE), strict=True))
        expected = alone(engine, *work)
        streams = [engine.stream(prompt, params) for prompt, params in work]
        events: list[list[StreamEvent]] = [[] for _ in streams]
        is_open = [True] * len(streams)
        while any(is_open):
            for index, stream in enumerate(streams):
                if is_open[index]:
                    event = next(stream, None)
                    is_open[index] = event is not None
                    events[index] += [event] if event is not None else []
        assert [ids_and_text(items) for items in events] == expected
        # One runs to its end while the other waits.
        first, second = (engine.stream(prompt, params) for prompt, params in work[:2])
        head = [next(first)]
        assert ids_and_text(list(second)) == expected[1]
        assert ids_and_text(head + list(first)) == expected[0]
        assert pages_are_free(engine)


def test_streams_and_steps(tiny: TinyModel) -> None:
    with tiny.engine(block_size=4, buffer_size=2) as engine:
        expected = alone(engine, (PROMPTS[0], FREE), (PROMPTS[1], SHORT))
        req_id = engine.add_request(PROMPTS[1], SHORT)
        stream = engine.stream(PROMPTS[0], FREE)
        events = [next(stream)]
        done: dict[int, RequestOutput] = {}
        steps = 0
        while engine.has_unfinished():
            for step in engine.step():
                # Outputs of a stream never come out of step().
                assert step.req_id == req_id
                if step.output is not None:
                    done[req_id] = step.output
            steps += 1
            assert steps < 200
        assert (done[req_id].token_ids, done[req_id].text) == expected[1]
        assert ids_and_text(events + list(stream)) == expected[0]


def test_generate_inside_a_callback(tiny: TinyModel) -> None:
    with tiny.engine(block_size=4, buffer_size=2) as engine:
        expected = alone(engine, (PROMPTS[0], FREE), (PROMPTS[1], FREE), (PROMPTS[2], SHORT))
        pieces: dict[int, list[StreamEvent]] = {}
        inner: list[RequestOutput] = []

        def on_event(event: StreamEvent) -> None:
            pieces.setdefault(event.req_id, []).append(event)
            if not inner:
                inner.extend(engine.generate([PROMPTS[2]], SHORT, summary=False))

        outputs = engine.generate(
            [PROMPTS[0], PROMPTS[1]], FREE, summary=False, stream_callback=on_event
        )
        assert [ids_and_text(pieces[output.req_id]) for output in outputs] == expected[:2]
        assert (inner[0].token_ids, inner[0].text) == expected[2]


def test_a_closed_stream_leaves_others_alone(tiny: TinyModel) -> None:
    with tiny.engine(block_size=4, buffer_size=2) as engine:
        expected = alone(engine, (PROMPTS[0], FREE))
        kept, closed = engine.stream(PROMPTS[0], FREE), engine.stream(PROMPTS[1], FREE)
        events = [next(kept)]
        next(closed)
        closed.close()
        events += list(kept)
        assert ids_and_text(events) == expected[0]
        # What became of the closed stream is nobody's business.
        assert not engine.has_unfinished()
        assert engine.step() == []
        assert pages_are_free(engine)


def test_open_stream_of_a_closed_engine(tiny: TinyModel) -> None:
    engine = tiny.engine(block_size=4)
    running, waiting = engine.stream(PROMPTS[0], FREE), engine.stream(PROMPTS[1], FREE)
    next(running)
    engine.generate([PROMPTS[2]], SHORT, summary=False)
    engine.close()
    for stream in (running, waiting):
        with pytest.raises(RuntimeError, match="expected an open engine, got a closed one"):
            next(stream)
        assert next(stream, None) is None


def test_engine_closed_by_a_callback(tiny: TinyModel) -> None:
    engine = tiny.engine(block_size=4)
    with pytest.raises(RuntimeError, match="expected an open engine, got a closed one"):
        engine.generate([PROMPTS[0]], FREE, summary=False, stream_callback=lambda _: engine.close())


class Interrupting(torch.nn.Module):
    """Ctrl-C during the forwards named in `fail_at`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model
        self.num_calls = 0
        self.fail_at: set[int] = set()

    def forward(self, *args: Any) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls in self.fail_at:
            os.kill(os.getpid(), signal.SIGINT)
        result: torch.Tensor = self.inner(*args)
        return result

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner.compute_logits(rows)
        return logits


def test_interrupted_step_keeps_its_outputs(tiny: TinyModel) -> None:
    model = Interrupting(tiny.model)
    with Diffulex.from_components(tiny.config(block_size=4), model, tiny.facts.tokenizer) as engine:
        expected = alone(engine, (PROMPTS[0], FREE))
        req_id = engine.add_request(PROMPTS[0], FREE)
        model.fail_at = {model.num_calls + 1, model.num_calls + 6}
        steps: list[StepOutput] = []
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run_into(engine, steps)
            engine._scheduler.check_integrity()
        run_into(engine, steps)
        output = steps[-1].output
        assert output is not None
        assert {step.req_id for step in steps} == {req_id}
        assert output.metrics.num_preemptions == 0
        assert tuple(token for step in steps for token in step.token_ids) == output.token_ids
        assert (output.token_ids, output.text) == expected[0]


def test_interrupted_stream_ends_its_request(tiny: TinyModel) -> None:
    model = Interrupting(tiny.model)
    with Diffulex.from_components(tiny.config(block_size=4), model, tiny.facts.tokenizer) as engine:
        stream = engine.stream(PROMPTS[0], FREE)
        next(stream)
        model.fail_at = {model.num_calls + 1}
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        assert not engine.has_unfinished()
        assert pages_are_free(engine)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_after_the_step_was_completed(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of the caller, not one about a plan that is no longer in flight."""
    with tiny.engine(block_size=4) as engine:
        expected = alone(engine, (PROMPTS[0], FREE))
        loop, inner = engine._loop, engine._scheduler

        class Late:
            def complete_step(self, *args: Any) -> Any:
                inner.complete_step(*args)
                raise KeyboardInterrupt

            def __getattr__(self, name: str) -> Any:
                return getattr(inner, name)

        engine.add_request(PROMPTS[1], SHORT)
        monkeypatch.setattr(loop, "_scheduler", Late())
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        monkeypatch.setattr(loop, "_scheduler", inner)
        inner.check_integrity()
        assert alone(engine, (PROMPTS[0], FREE)) == expected
