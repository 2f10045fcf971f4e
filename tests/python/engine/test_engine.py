# SPDX-License-Identifier: Apache-2.0
"""The public engine: requests, steps, streams, limits, failures."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import signal
import threading
from typing import Any

import numpy as np
import pytest
import torch

from diffulex import (
    ConfigError,
    Diffulex,
    DiffulexError,
    OutOfPagesError,
    PromptError,
    SamplingParams,
    SamplingParamsError,
)
from diffulex.checkpoint import memory
from diffulex.engine.output import RequestOutput
from fixtures.checkpoints import MASK_ID
from tiny_engine import TinyModel

FREE = SamplingParams(max_tokens=20, ignore_eos=True)


def pages_are_free(engine: Diffulex) -> bool:
    stats = engine.stats()
    return stats.num_free_pages == stats.num_pages


def run_all(engine: Diffulex) -> dict[int, RequestOutput]:
    done: dict[int, RequestOutput] = {}
    while engine.has_unfinished():
        for step in engine.step():
            if step.output is not None:
                assert step.is_finished
                done[step.req_id] = step.output
    return done


def test_generate_from_a_directory(tiny: TinyModel) -> None:
    with Diffulex(str(tiny.directory), device="cpu", num_pages=64, max_model_len=128) as engine:
        assert engine.config.decoding.accept_threshold == 0.95
        outputs = engine.generate(["hello", "a longer prompt"], FREE)
        assert [len(output.token_ids) for output in outputs] == [20, 20]
        first = outputs[0]
        assert list(first.prompt_token_ids) == engine.tokenizer.encode("hello")
        assert first.text == engine.tokenizer.decode(list(first.token_ids))
        assert first.full_text.startswith("hello")
        alone = engine.generate("hello", FREE, summary=False)
        assert alone[0].token_ids == first.token_ids


def test_add_request_and_step(tiny: TinyModel) -> None:
    with tiny.engine(block_size=8, buffer_size=2) as engine:
        expected = engine.generate([[1, 2, 3], [4, 5, 6, 7]], FREE, summary=False)
        ids = [engine.add_request([1, 2, 3], FREE)]
        appended: dict[int, list[int]] = {}
        done: dict[int, RequestOutput] = {}
        for step_number in range(500):
            if step_number == 2:
                ids.append(engine.add_request(np.array([4, 5, 6, 7]), FREE))
            for step in engine.step():
                appended.setdefault(step.req_id, []).extend(step.token_ids)
                if step.output is not None:
                    done[step.req_id] = step.output
            if not engine.has_unfinished():
                break
        assert [done[i].token_ids for i in ids] == [o.token_ids for o in expected]
        assert all(tuple(appended[i]) == done[i].token_ids for i in ids)
        assert engine.step() == []
        assert pages_are_free(engine)


def test_other_requests_survive_a_generate_call(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        other = engine.add_request([9, 9, 9], SamplingParams(max_tokens=4, ignore_eos=True))
        engine.generate([[1, 2, 3]], FREE, summary=False)
        done = run_all(engine)
        assert len(done[other].token_ids) == 4


@pytest.mark.parametrize("block_size", [4, 8, 32])
@pytest.mark.parametrize("buffer_size", [1, 3])
def test_max_tokens_is_exact(tiny: TinyModel, block_size: int, buffer_size: int) -> None:
    with tiny.engine(block_size=block_size, buffer_size=buffer_size) as engine:
        lengths = [1, 2, 3, 5, 8, 13, 31]
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
        outputs = engine.generate([[7, 8, 9, 10, 11]] * len(lengths), params, summary=False)
        assert [len(output.token_ids) for output in outputs] == lengths
        assert {output.completion_reason for output in outputs} == {"max_new_tokens_reached"}
        assert all(MASK_ID not in output.token_ids for output in outputs)


def test_max_model_len(tiny: TinyModel) -> None:
    with tiny.engine(max_model_len=32) as engine:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        output = engine.generate([list(range(25))], params, summary=False)[0]
        assert output.completion_reason == "max_model_len_reached"
        assert output.finish_reason == "length"
        assert len(output.token_ids) == 32 - 25


def test_stop_ids_and_ignore_eos(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        free = engine.generate([[1, 2, 3]], FREE, summary=False)[0].token_ids
        stop = free[7]
        first = free.index(stop)
        params = SamplingParams(max_tokens=20, stop_token_ids=[stop])
        cut = engine.generate([[1, 2, 3]], params, summary=False)[0]
        assert cut.token_ids == free[:first]
        assert cut.completion_reason == "eos_token_generated"
        assert cut.finish_reason == "stop"
        params = SamplingParams(max_tokens=20, stop_token_ids=[stop], ignore_eos=True)
        assert engine.generate([[1, 2, 3]], params, summary=False)[0].token_ids == free
        # Stop ids inside the prompt do not count.
        with_stop = engine.generate([[1, stop, 3]], params, summary=False)[0]
        assert with_stop.completion_reason == "max_new_tokens_reached"


def test_max_nfe_and_repetition(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        params = SamplingParams(max_tokens=20, ignore_eos=True, max_nfe=6)
        output = engine.generate([[1, 2, 3, 4]], params, summary=False)[0]
        assert output.completion_reason == "max_nfe_reached"
        assert output.metrics.nfe == 6
        assert len(output.token_ids) < 20
        params = SamplingParams(max_tokens=20, ignore_eos=True, max_repetition_run=1)
        output = engine.generate([[1, 2, 3, 4]], params, summary=False)[0]
        assert output.completion_reason == "max_repetition_run_reached"
        assert output.finish_reason == "length"
        assert output.is_truncated
        assert len(output.token_ids) >= 1


def test_auto_max_nfe_is_flagged(tiny: TinyModel) -> None:
    settings = {"auto_max_nfe": True, "auto_max_nfe_warmup_steps": 2, "auto_max_nfe_tpf_floor": 4.0}
    with tiny.engine(**settings) as engine:
        output = engine.generate([[1, 2, 3, 4]], FREE, summary=False)[0]
        assert output.completion_reason == "max_nfe_reached"
        assert output.is_auto_max_nfe


def test_sampling_is_reproducible_and_independent_of_the_batch(tiny: TinyModel) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=3, ignore_eos=True)
    noise = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)
    with tiny.engine(seed=5) as engine:
        alone = engine.generate([[1, 2, 3]], params, summary=False)[0].token_ids
        crowd = engine.generate(
            [[5] * 9, [1, 2, 3], [6] * 4], [noise, params, noise], summary=False
        )
        assert crowd[1].token_ids == alone
        other = engine.generate([[1, 2, 3]], noise, summary=False)[0].token_ids
        assert other != alone
    with tiny.engine(seed=5) as engine:
        again = engine.generate([[1, 2, 3]] * 2, noise, summary=False)
        assert again[0].token_ids != again[1].token_ids


@pytest.mark.parametrize("buffer_size", [1, 3])
def test_stream_concatenates_to_the_text(tiny: TinyModel, buffer_size: int) -> None:
    with tiny.engine(block_size=8, buffer_size=buffer_size) as engine:
        for prompt in ("abc", "xy\u00e9 z"):
            expected = engine.generate(prompt, FREE, summary=False)[0]
            events = list(engine.stream(prompt, FREE))
            assert "".join(event.text for event in events) == expected.text
            assert events[-1].output is not None
            assert events[-1].output.token_ids == expected.token_ids
            assert [e.is_finished for e in events] == [False] * (len(events) - 1) + [True]
        pieces: dict[int, str] = {}
        outputs = engine.generate(
            ["one", "two"],
            FREE,
            summary=False,
            stream_callback=lambda e: pieces.update({e.req_id: pieces.get(e.req_id, "") + e.text}),
        )
        assert [pieces[output.req_id] for output in outputs] == [o.text for o in outputs]


def test_denoise_snapshots(tiny: TinyModel) -> None:
    with tiny.engine(block_size=8, buffer_size=3) as engine:
        expected = engine.generate([[1, 2, 3]], FREE, summary=False)[0]
        events = list(engine.stream([1, 2, 3], FREE, mode="denoise"))
        assert len(events) == expected.metrics.nfe
        written: dict[int, int] = {}
        for event in events:
            snapshot = event.snapshot
            assert snapshot is not None
            assert snapshot.mask_token_id == MASK_ID
            assert snapshot.prompt_len == 3
            assert snapshot.token_ids == expected.token_ids[: len(snapshot.token_ids)]
            for block in snapshot.blocks:
                assert block.start == block.block_id * 8
                assert block.status in ("ACTIVE", "TO_CACHE")
                assert len(block.token_ids) == len(block.confidences) == 8
                for offset in block.newly_written:
                    assert block.token_ids[offset] != MASK_ID
                    assert 0 < block.confidences[offset] <= 1
                    assert block.start + offset not in written
                    written[block.start + offset] = block.token_ids[offset]
        answer = [written[position] for position in range(3, 23)]
        assert tuple(answer) == expected.token_ids
        assert len(written) == expected.metrics.decided_tokens


def test_closing_a_stream_aborts(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        stream = engine.stream("abc", FREE)
        next(stream)
        stream.close()
        assert not engine.has_unfinished()
        assert pages_are_free(engine)
        # A stream that was never started adds nothing.
        engine.stream("abc", FREE)
        assert not engine.has_unfinished()


def test_abort_frees_pages_and_keeps_the_settled_output(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        full = engine.generate([[1, 2, 3]], FREE, summary=False)[0].token_ids
        kept = engine.add_request([4, 5, 6], FREE)
        doomed = engine.add_request([1, 2, 3], FREE)
        for _ in range(8):
            engine.step()
        assert engine.abort(doomed)
        assert engine.abort(doomed)
        done = run_all(engine)
        assert done[doomed].completion_reason == "aborted"
        assert done[doomed].finish_reason == "abort"
        cut = done[doomed].token_ids
        assert 0 < len(cut) < 20
        assert cut == full[: len(cut)]
        assert len(done[kept].token_ids) == 20
        assert not engine.abort(doomed)
        assert not engine.abort(10**6)
        assert pages_are_free(engine)


def test_abort_from_another_thread_while_waiting(tiny: TinyModel) -> None:
    with tiny.engine(max_num_reqs=1) as engine:
        engine.add_request([1, 2, 3], FREE)
        waiting = engine.add_request([1, 2, 3], FREE)
        engine.step()
        thread = threading.Thread(target=engine.abort, args=(waiting,))
        thread.start()
        thread.join()
        done = run_all(engine)
        assert done[waiting].completion_reason == "aborted"
        assert done[waiting].token_ids == ()
        assert done[waiting].metrics.nfe == 0


def test_requests_from_other_threads(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        expected = engine.generate([[i, i + 1] for i in range(12)], FREE, summary=False)
        ids: dict[int, int] = {}

        def add(start: int) -> None:
            for i in range(start, start + 4):
                ids[i] = engine.add_request([i, i + 1], FREE)

        threads = [threading.Thread(target=add, args=(start,)) for start in (0, 4, 8)]
        for thread in threads:
            thread.start()
        done: dict[int, RequestOutput] = {}
        while any(thread.is_alive() for thread in threads) or engine.has_unfinished():
            done.update({s.req_id: s.output for s in engine.step() if s.output is not None})
        assert [done[ids[i]].token_ids for i in range(12)] == [o.token_ids for o in expected]


def test_request_that_can_never_fit(tiny: TinyModel) -> None:
    with tiny.engine(num_pages=2, page_size=4) as engine:
        with pytest.raises(OutOfPagesError, match="lower max_tokens or raise num_pages") as caught:
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=40))
        assert isinstance(caught.value, DiffulexError)
        assert isinstance(caught.value, RuntimeError)
        assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4), summary=False)


def test_more_requests_than_memory(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero too many is an error that says what would fit, not the end of the process."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 30)
    with pytest.raises(
        ConfigError, match=r"^max_num_reqs: expected at most (\d+) .*1\.0 GiB"
    ) as caught:
        tiny.engine(max_num_reqs=10**7)
    fits = int(str(caught.value).split("at most ")[1].split()[0])
    assert 10_000 < fits < 10**6
    monkeypatch.setattr(memory, "available_bytes", lambda device: None)
    tiny.engine(max_num_reqs=256).close()


def test_more_pages_than_memory(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 30)
    text = r"^num_pages: expected at most (\d+) \((\d+) bytes each, 1\.0 GiB available on cpu\), got 10{7}$"
    with pytest.raises(ConfigError, match=text) as caught:
        tiny.engine(num_pages=10**7)
    fits, each = map(int, re.findall(r"most (\d+) \((\d+)", str(caught.value))[0])
    assert 0 <= (1 << 30) - fits * each < each


def test_sampling_parameters_as_keywords(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        expected = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4), summary=False)
        given = engine.generate([[1, 2, 3]], max_tokens=4, summary=False)
        assert given[0].token_ids == expected[0].token_ids
        events = list(engine.stream([1, 2, 3], max_tokens=4))
        assert events[-1].output.token_ids == expected[0].token_ids
        with pytest.raises(SamplingParamsError, match="nearest is 'temperature'"):
            engine.generate([[1, 2, 3]], temprature=1)
        with pytest.raises(SamplingParamsError, match="got both, max_tokens as keywords"):
            engine.generate([[1, 2, 3]], SamplingParams(), max_tokens=4)


def test_step_belongs_to_one_thread_at_a_time(tiny: TinyModel) -> None:
    """A call during a step, here in a callback of it, names the rule instead of an internal check."""
    found: list[str] = []
    with tiny.engine() as engine:

        def meddle(num_forwards: int) -> None:
            try:
                engine.step()
            except RuntimeError as error:
                found.append(str(error))

        engine.observe_blocks(meddle)
        assert engine.generate([[1, 2, 3]], FREE, summary=False)
    assert found
    assert all("expected one thread at a time" in text for text in found), found


def test_close_belongs_to_one_thread_at_a_time(tiny: TinyModel) -> None:
    """A second thread cannot close the engine during a step; a stream callback can, between two."""
    found: list[str] = []
    engine = tiny.engine()

    def close() -> None:
        try:
            engine.close()
        except RuntimeError as error:
            found.append(str(error))

    def close_elsewhere(num_forwards: int) -> None:
        thread = threading.Thread(target=close)
        thread.start()
        thread.join()

    engine.observe_blocks(close_elsewhere)
    assert engine.generate([[1, 2, 3]], FREE, summary=False)
    assert found
    assert all("expected one thread at a time" in text for text in found), found
    engine.observe_blocks(lambda num_forwards: None)
    with pytest.raises(RuntimeError, match="got a closed one"):
        engine.generate(
            [[1, 2, 3]], FREE, summary=False, stream_callback=lambda event: engine.close()
        )
    engine.close()


def test_engine_without_tokenizer(tiny: TinyModel) -> None:
    with tiny.engine(has_tokenizer=False) as engine:
        output = engine.generate([[1, 2, 3]], FREE, summary=False)[0]
        assert (output.text, output.full_text) == ("", "")
        with pytest.raises(PromptError, match="the engine has no tokenizer"):
            engine.generate("text")
        with pytest.raises(RuntimeError, match="expected a tokenizer"):
            _ = engine.tokenizer


def test_chat_uses_the_template(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        messages = [{"role": "user", "content": "hi"}]
        output = engine.chat(messages, FREE, summary=False)
        ids = engine.tokenizer.apply_chat_template(messages)
        assert list(output.prompt_token_ids) == ids
        same = engine.generate("hi", FREE, use_chat_template=True, summary=False)[0]
        assert same.token_ids == output.token_ids
        assert list(same.prompt_token_ids) == ids
        events = list(engine.stream(messages, FREE))
        assert events[-1].output is not None
        assert events[-1].output.token_ids == output.token_ids


class Failing(torch.nn.Module):
    """A model whose forward raises when told to."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model
        self.fail_at: set[int] = set()
        self.num_calls = 0

    def forward(self, *args: Any) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls in self.fail_at:
            raise RuntimeError("injected")
        result: torch.Tensor = self.inner(*args)
        return result

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner.compute_logits(rows)
        return logits


@pytest.mark.parametrize("fail_at", [1, 2, 5, 9])
def test_failed_forward_leaves_a_usable_engine(tiny: TinyModel, fail_at: int) -> None:
    model = Failing(tiny.model)
    config = tiny.config(block_size=8, buffer_size=2)
    with Diffulex.from_components(config, model, tiny.facts.tokenizer) as engine:
        expected = engine.generate([[1, 2, 3], [4] * 9], FREE, summary=False)
        model.fail_at = {model.num_calls + fail_at}
        ids = [engine.add_request([1, 2, 3], FREE), engine.add_request([4] * 9, FREE)]
        with pytest.raises(RuntimeError, match="injected"):
            run_all(engine)
        engine._scheduler.check_integrity()
        # The requests wait again and end as if nothing had happened.
        done = run_all(engine)
        assert [done[i].token_ids for i in ids] == [o.token_ids for o in expected]
        # A generate call gives up its own requests.
        model.fail_at = {model.num_calls + fail_at}
        with pytest.raises(RuntimeError, match="injected"):
            engine.generate([[1, 2, 3]], FREE)
        assert not engine.has_unfinished()
        assert pages_are_free(engine)


class BadLogits(Failing):
    """Non-finite logits for rows whose token history contains a poison id."""

    poison = 77

    def forward(self, input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.inner(input_ids, *args)
        metadata = args[1]
        starts = metadata.cu_seqlens_q.tolist()
        for first, last in itertools.pairwise(starts):
            if (input_ids[first:last] == self.poison).any():
                hidden[first:last] = float("nan")
        return hidden


def test_bad_logits_end_one_request_with_an_error(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        expected = engine.generate([[1, 2, 3]], FREE, summary=False)[0]
    config = tiny.config()
    with Diffulex.from_components(config, BadLogits(tiny.model), tiny.facts.tokenizer) as engine:
        outputs = engine.generate([[1, 2, 3], [1, 77, 3]], FREE, summary=False)
        assert outputs[0].token_ids == expected.token_ids
        assert outputs[0].error is None
        assert outputs[1].completion_reason == "error"
        assert outputs[1].error is not None
        assert "expected finite logits for the block at position 0" in outputs[1].error
        assert pages_are_free(engine)


def test_interrupt_returns_partial_outputs(tiny: TinyModel) -> None:
    class Interrupting(Failing):
        def forward(self, *args: Any) -> torch.Tensor:
            self.num_calls += 1
            if self.num_calls in self.fail_at:
                os.kill(os.getpid(), signal.SIGINT)
            result: torch.Tensor = self.inner(*args)
            return result

    model = Interrupting(tiny.model)
    with Diffulex.from_components(tiny.config(), model, tiny.facts.tokenizer) as engine:
        full = engine.generate([[1, 2, 3]], FREE, summary=False)[0].token_ids
        model.fail_at = {model.num_calls + 8}
        outputs = engine.generate([[1, 2, 3]] * 2, FREE, on_interrupt="return", summary=False)
        assert {output.completion_reason for output in outputs} == {"aborted"}
        assert all(output.token_ids == full[: len(output.token_ids)] for output in outputs)
        assert any(output.token_ids for output in outputs)
        model.fail_at = {model.num_calls + 8}
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2, 3]] * 2, FREE)
        assert not engine.has_unfinished()
        assert pages_are_free(engine)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_closed_engine(tiny: TinyModel) -> None:
    engine = tiny.engine()
    engine.add_request([1, 2, 3], FREE)
    engine.close()
    engine.close()
    assert not engine.has_unfinished()
    for call in (engine.step, engine.stats, lambda: engine.generate("a"), lambda: engine.abort(0)):
        with pytest.raises(RuntimeError, match="expected an open engine"):
            call()


def test_automatic_page_pool_on_cpu(tiny: TinyModel) -> None:
    settings = {"num_pages": -1, "max_model_len": 64, "max_num_reqs": 3, "page_size": 16}
    with tiny.engine(**settings) as engine:
        assert engine.config.cache.num_pages == 3 * 4
    # A page of 16 tokens: 2 (K, V) * 2 layers * 16 * 2 heads * 32 * 4 bytes.
    page_bytes = 2 * 2 * 16 * 2 * 32 * 4
    with tiny.engine(**settings, cpu_kv_cache_bytes=5 * page_bytes + 1) as engine:
        assert engine.config.cache.num_pages == 5
        assert engine._executor.runner.kv_cache.nbytes == 5 * page_bytes
    with pytest.raises(ValueError, match="num_pages: expected memory for at least 4 pages"):
        tiny.engine(**settings, cpu_kv_cache_bytes=4 * page_bytes - 1)


def test_run_statistics_of_a_generate_call(tiny: TinyModel) -> None:
    with tiny.engine(page_size=4) as engine:
        run = engine.generate([[1, 2, 3, 4, 5]] * 3, FREE, summary=False)
        assert run.stats.num_steps < run.request_nfe == sum(o.metrics.nfe for o in run)
        assert run.stats.peak_pages > 0
        assert run.stats.max_concurrency == 3
        assert run.total_tokens == 60
        assert run.stats.wall_s >= run.stats.total_s > 0
        assert all(sum(o.metrics.new_tokens_per_step) == o.metrics.decided_tokens for o in run)
        first = run[0].metrics
        # Position 5..7 belong to the prompt's tail block, the first step decides one of them.
        assert first.visible_decode_tokens == first.completion_tokens - first.new_tokens_per_step[0]
        again = engine.generate([[1, 2, 3, 4, 5]], FREE, summary=False)
        assert again[0].metrics.cached_tokens >= 4
        assert engine.run_stats.num_steps == run.stats.num_steps + again.stats.num_steps


def test_prefix_hits_after_a_preemption_count_the_prompt_only(tiny: TinyModel) -> None:
    prompt = list(range(1, 10))
    with tiny.engine(block_size=4, page_size=4) as engine:
        req_id = engine.add_request(prompt, FREE)
        decoded = 0
        while decoded < 12:
            decoded += sum(len(step.token_ids) for step in engine.step())
        engine._scheduler.preempt(req_id)
        done = run_all(engine)
        assert engine.stats().num_preemptions == 1
        metrics = done[req_id].metrics
        assert metrics.num_preemptions == 1
        assert metrics.cached_tokens == metrics.prompt_tokens == len(prompt)


def test_several_answers_follow_each_other_and_differ_by_their_seeds(tiny: TinyModel) -> None:
    drawn = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=5)
    with tiny.engine() as engine:
        outputs = engine.generate([[1, 2, 3], [4, 5]], drawn, n=2, summary=False)
        assert [output.prompt_token_ids for output in outputs] == [(1, 2, 3)] * 2 + [(4, 5)] * 2
        assert outputs[0].token_ids != outputs[1].token_ids
        for choice, output in enumerate(outputs[:2]):
            own = dataclasses.replace(drawn, seed=5 + choice)
            alone = engine.generate([[1, 2, 3]], own, summary=False)[0]
            assert alone.token_ids == output.token_ids
        greedy = engine.generate([[1, 2, 3]], FREE, n=2, summary=False)
        assert greedy[0].token_ids == greedy[1].token_ids
        for n in (0, True, 1.5):
            with pytest.raises(SamplingParamsError, match="n: expected an integer of at least 1"):
                engine.generate([[1, 2, 3]], FREE, n=n)


def test_prompts_are_logged_only_where_the_environment_says_so(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = list(range(10, 22))
    with caplog.at_level("DEBUG", logger="diffulex"), tiny.engine() as engine:
        for allowed in ("", "0", "1"):
            monkeypatch.setenv("DIFFULEX_LOG_PROMPTS", allowed)
            caplog.clear()
            engine.generate([prompt], max_tokens=4)
            lines = [text for text in caplog.messages if "prompt=" in text]
            assert len(lines) == (allowed == "1")
        assert lines == [f"request 2: prompt={bytes(prompt).decode()!r}"]
        monkeypatch.setenv("DIFFULEX_LOG_PROMPTS", "perhaps")
        with pytest.raises(ConfigError, match="DIFFULEX_LOG_PROMPTS: expected"):
            engine.generate([prompt], max_tokens=4)
        assert not engine.has_unfinished()
