# SPDX-License-Identifier: Apache-2.0
"""The bundled model behind the serving interface, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.serving.backend_worker import default_engine_factory
from diffulex.wire.protocol import (
    ChatInput,
    PromptInput,
    ServingAbort,
    ServingAck,
    ServingBufferSnapshot,
    ServingDelta,
    ServingError,
    ServingFlushCache,
    ServingGenerate,
    ServingProfileStart,
    ServingProfileStop,
    ServingReply,
)

QUESTION = ChatInput([{"role": "user", "content": "Tom has 3 apples and buys 4. How many?"}])


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    traces = tmp_path_factory.mktemp("traces")
    config = {"torch_profiler_dir": str(traces), "max_iterations": 2}
    engine = default_engine_factory("demo", max_num_reqs=4, num_pages=64, profiler_config=config)
    yield engine
    engine.exit()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_is_left(engine):
    yield
    for _ in range(3):
        engine.run_serving_tick([])
    engine.run_serving_tick([ServingFlushCache("x")])
    stats = engine.serving_stats()["gauges"]
    assert engine.is_finished()
    assert stats["requests_running"] == stats["requests_waiting"] == 0
    assert stats["requests_known"] == stats["sampler_states"] == stats["request_slots_used"] == 0
    assert stats["active_blocks"] == 0
    assert stats["kv_pages_free"] == stats["kv_pages"]
    assert engine.engine.stats().num_cached_units == 0


def generate(rid="a", value=QUESTION, mode="block_append", detail=False, **params):
    fields = {"max_tokens": 48, "temperature": 0.0, **params}
    return ServingGenerate(
        rid, value, SamplingParams(**fields), mode is not None, mode or "block_append",
        denoise_detail=detail,
    )  # fmt: skip


def run(engine, *commands):
    events = list(engine.run_serving_tick(list(commands)))
    while not engine.is_finished():
        events.extend(engine.run_serving_tick([]))
    return events


def reply_of(events, rid="a"):
    (reply,) = [e for e in events if isinstance(e, ServingReply) and e.rid == rid]
    return reply


def test_every_mode_gives_the_same_answer(engine):
    modes = (None, "block_append", "denoise", "both")
    events = run(engine, *(generate(str(mode), mode=mode) for mode in modes))
    replies = [reply_of(events, str(mode)) for mode in modes]
    assert {(reply.text, tuple(reply.token_ids)) for reply in replies} == {
        (replies[0].text, tuple(replies[0].token_ids))
    }
    assert "#### " in replies[0].text
    for mode in ("block_append", "both"):
        deltas = [e for e in events if e.rid == mode and isinstance(e, ServingDelta)]
        assert len(deltas) > 1
        assert "".join(delta.text for delta in deltas) == replies[0].text
        assert [i for delta in deltas for i in delta.token_ids] == replies[0].token_ids
    for mode in ("denoise", "both"):
        draft: list[int] = []
        masked = 0
        for event in events:
            if event.rid == mode and isinstance(event, ServingBufferSnapshot):
                assert event.token_offset == event.absolute_start - replies[0].prompt_tokens
                draft[event.token_offset :] = event.token_ids
                masked += event.token_ids.count(event.mask_token_id)
                assert event.committed <= len(draft)
        assert draft[: len(replies[0].token_ids)] == replies[0].token_ids
        assert masked > 0


def test_the_same_answer_as_offline(engine):
    with Diffulex("demo") as offline:
        params = SamplingParams(max_tokens=48, temperature=0.0, skip_special_tokens=False)
        expected = offline.chat(QUESTION.messages, params, summary=False)
    reply = reply_of(run(engine, generate()))
    assert (reply.text, reply.token_ids) == (expected.text, list(expected.token_ids))
    assert reply.nfe == expected.metrics.nfe
    assert reply.prompt_tokens == expected.metrics.prompt_tokens
    assert reply.full_token_ids[: len(reply.token_ids)] == reply.token_ids
    assert reply.finish_reason == "eos_token_generated"


def test_the_full_answer_does_not_depend_on_a_stop_text_at_its_end(engine):
    """One that matches in the step that ends the request anyway."""
    whole = reply_of(run(engine, generate(mode=None)))
    stopped = reply_of(run(engine, generate(mode=None, stop=(whole.text[-1:],))))
    assert stopped.matched_stop == whole.text[-1:]
    assert whole.text.startswith(stopped.text)
    assert len(whole.full_token_ids) > len(whole.token_ids)
    assert (stopped.full_token_ids, stopped.full_text) == (whole.full_token_ids, whole.full_text)


def test_seeds(engine):
    """Whatever runs beside it; another seed gives another answer."""
    params = {"temperature": 8.0, "ignore_eos": True, "max_tokens": 24}
    alone = reply_of(run(engine, generate(seed=7, **params)))
    others = [generate(f"o{i}", seed=i, **params) for i in range(3)]
    crowded = reply_of(run(engine, *others, generate(seed=7, **params)))
    other = reply_of(run(engine, generate(seed=8, **params)))
    assert alone.token_ids == crowded.token_ids
    assert alone.token_ids != other.token_ids
    assert alone.seed == 7
    assert len(alone.token_ids) == 24


def test_detail_of_snapshots(engine):
    events = run(engine, generate(mode="denoise", detail=True))
    for event in events[:-1]:
        assert len(event.confidences) == len(event.token_ids)
        assert all(0 <= value <= 1 for value in event.confidences)
        for block in event.blocks:
            assert set(block) == {"id", "start", "end", "state", "masked"}
            assert event.absolute_start <= block["start"] < block["end"] <= event.absolute_end
            span = event.token_ids[block["start"] - event.absolute_start :]
            span = span[: block["end"] - block["start"]]
            assert block["masked"] == span.count(event.mask_token_id)
            assert block["state"] in ("active", "to_cache", "in_cache", "dummy")


def test_stop_text(engine):
    whole = reply_of(run(engine, generate())).text
    reply = reply_of(run(engine, generate(stop=["\n####"])))
    assert reply.text == whole[: whole.index("\n####")]
    assert (reply.finish_reason, reply.matched_stop) == ("stop", "\n####")
    assert reply.nfe <= reply_of(run(engine, generate())).nfe


def test_special_token_as_stop_text(engine):
    reply = reply_of(run(engine, generate(stop=["<|im_end|>"], skip_special_tokens=True)))
    assert (reply.finish_reason, reply.matched_stop) == ("stop", "<|im_end|>")


def test_logprobs_on_the_wire(engine):
    events = run(engine, generate(logprobs=2))
    reply = reply_of(events)
    assert [item["token_id"] for item in reply.logprobs] == reply.token_ids
    for item in reply.logprobs:
        assert item["logprob"] <= 0
        assert bytes(item["bytes"]).decode() == item["token"]
        assert len(item["top"]) == 2
        assert item["top"][0]["logprob"] >= item["top"][1]["logprob"]
        assert 1 <= item["step"] <= reply.nfe
    streamed = [x for e in events if isinstance(e, ServingDelta) for x in e.logprobs]
    assert streamed == reply.logprobs


@pytest.mark.parametrize("skip", [True, False])
def test_logprobs_lie_where_the_text_is(engine, skip):
    """Behind the end of an answer special tokens follow, and characters of several tokens."""
    params = {"max_tokens": 24, "ignore_eos": True, "temperature": 3.0, "seed": 1, "logprobs": 0}
    command = generate(value=PromptInput("👩‍👩‍👧 مرحبا"), skip_special_tokens=skip, **params)
    reply = reply_of(run(engine, command))
    pieces = [bytes(item["bytes"]).decode() for item in reply.logprobs]
    assert len(pieces) == 24
    assert "".join(pieces) == reply.text
    begins = [len("".join(pieces[:index])) for index in range(24)]
    assert [item["text_offset"] for item in reply.logprobs] == begins
    special = set(engine.tokenizer.backend.all_special_ids)
    is_special = [item["token_id"] in special for item in reply.logprobs]
    assert any(is_special)
    if skip:
        assert not any(piece for piece, is_left_out in zip(pieces, is_special) if is_left_out)


def test_abort_in_every_phase(engine):
    long = {"max_tokens": 200, "ignore_eos": True}
    names = [f"r{i}" for i in range(8)]  # twice the slots: half of them wait
    engine.run_serving_tick([generate(name, **long) for name in names])
    engine.run_serving_tick([])
    assert run(engine, *(ServingAbort(name) for name in names)) == []
    # Together with the command that adds it.
    assert run(engine, generate("x"), ServingAbort("x")) == []


def test_text_with_the_name_of_the_mask(engine):
    text = PromptInput("a <|MASK|> b <|MASK|>")
    mask = engine.serving_info()["mask_token_id"]
    assert mask not in engine.encode_input(text)
    assert engine.tokenizer.decode(engine.encode_input(text), False) == text.prompt
    events = run(engine, generate("ids", PromptInput([5, mask])), generate("a", text))
    assert events[0].code == "mask_token_in_prompt"
    assert reply_of(events).prompt_tokens == len(engine.encode_input(text))


@pytest.mark.parametrize(
    ("value", "params", "code"),
    [
        (PromptInput(""), {}, "invalid_request"),
        (PromptInput([5] * 512), {}, "context_length_exceeded"),
        (PromptInput([640]), {}, "token_out_of_range"),
        (ChatInput([]), {}, "invalid_request"),
        (PromptInput("x"), {"stop_token_ids": [640]}, "invalid_request"),
    ],
)
def test_refusals(engine, value, params, code):
    (error,) = run(engine, generate(value=value, **params))
    assert isinstance(error, ServingError)
    assert (error.code, error.http_status) == (code, 400)


def test_profile(engine):
    (started,) = engine.run_serving_tick([ServingProfileStart("run", op_id="1")])
    assert started.ok
    (again,) = engine.run_serving_tick([ServingProfileStart("run", op_id="2")])
    assert again == ServingAck("2", False, "profiler: expected no recording under way, got one")
    run(engine, generate())
    (stopped,) = engine.run_serving_tick([ServingProfileStop(op_id="3")])
    assert stopped.ok
    assert stopped.data["steps"] == 2  # then it ended by itself
    assert Path(stopped.data["trace"]).parent == Path(started.data["directory"])
    assert Path(stopped.data["trace"]).stat().st_size > 0
    (again,) = engine.run_serving_tick([ServingProfileStop(op_id="4")])
    assert again == ServingAck("4", False, "profiler: expected a recording under way, got none")


def test_failed_request_leaves_the_others_alone(engine, monkeypatch):
    """A row without a finite logit ends its own request."""
    compute = engine.engine._executor.runner.model.compute_logits

    def broken(rows):
        logits = compute(rows)
        logits[0] = float("nan")
        return logits

    engine.run_serving_tick([generate("bad", max_tokens=200, ignore_eos=True)])
    monkeypatch.setattr(engine.engine._executor.runner.model, "compute_logits", broken)
    (error,) = [e for e in engine.run_serving_tick([]) if isinstance(e, ServingError)]
    monkeypatch.undo()
    assert (error.rid, error.code, error.http_status) == ("bad", "engine_error", 500)
    assert "finite logits" in error.message
    assert reply_of(run(engine, generate("good")), "good").text


def test_info(engine):
    info = engine.serving_info()
    for key in (
        *("model", "model_name", "decoding_strategy", "sampling_mode", "max_model_len"),
        *("max_num_reqs", "max_num_batched_tokens", "block_size", "buffer_size", "page_size"),
        *("num_pages", "vocab_size", "mask_token_id", "eos_token_ids", "device", "dtype"),
        *("world_size", "extension_version", "load_time_s", "warmup_time_s"),
    ):
        assert info[key] is not None, key
    assert info["load_time_s"] > 0
    assert info["warmup_time_s"] > 0


def test_flush_of_the_prefix_cache(engine):
    value = PromptInput([5] * 70)
    run(engine, generate(value=value, max_tokens=4))
    assert reply_of(run(engine, generate(value=value, max_tokens=4))).cached_tokens == 64
    (ack,) = engine.run_serving_tick([ServingFlushCache("1")])
    assert ack.ok
    assert ack.data["num_dropped_units"] >= 2
    assert reply_of(run(engine, generate(value=value, max_tokens=4))).cached_tokens == 0
    # Pages in use are not taken away.
    engine.run_serving_tick([generate("long", value, max_tokens=60, ignore_eos=True)])
    engine.run_serving_tick([ServingFlushCache("2")])
    assert len(reply_of(run(engine), "long").token_ids) == 60


def test_counters(engine):
    before = engine.serving_stats()
    run(engine, generate(max_tokens=40, ignore_eos=True))
    after = engine.serving_stats()

    def total(stats, name):
        return sum(sum(item["counts"]) for item in stats["histograms"][name])

    for name in ("step_time_seconds", "batch_size", "block_denoise_steps"):
        assert total(after, name) > total(before, name), name
    steps = {x["labels"]["phase"]: x["value"] for x in after["counters"]["forward_steps_total"]}
    assert steps["prefill"] > 0
    assert steps["decode"] > 0


def test_steps_of_prompts_beside_decoding_requests_are_a_kind():
    engine = default_engine_factory("demo", max_num_reqs=2, num_pages=64, mixed_step_rows=128)
    try:
        engine.run_serving_tick([generate("first")])
        engine.run_serving_tick([generate("second", PromptInput([5] * 20))])
        run(engine)
        stats = engine.serving_stats()
    finally:
        engine.exit()
    steps = {x["labels"]["phase"]: x["value"] for x in stats["counters"]["forward_steps_total"]}
    assert (steps["prefill"], steps["mixed"]) == (1, 1)
    assert steps["decode"] > 0
    times = stats["histograms"]["step_time_seconds"]
    assert {x["labels"]["phase"]: sum(x["counts"]) for x in times} == steps


def test_a_request_is_counted_once(engine):
    engine.run_serving_tick([generate(), generate("b")])
    gauges = engine.serving_stats()["gauges"]
    assert gauges["requests_known"] == 2
    assert gauges["active_blocks"] > 0
    engine.run_serving_tick([ServingAbort("a"), ServingAbort("b")])
