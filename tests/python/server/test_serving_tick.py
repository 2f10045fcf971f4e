# SPDX-License-Identifier: Apache-2.0
"""One tick of a serving engine: what is final, what is draft, and what ends a request."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from block_engine import BLOCK, BlockEngine
from byte_tokenizer import EOS, HOLE, MASK, TURN_END, VOCAB_SIZE
from diffulex import SamplingParams
from diffulex.engine.prompt import PromptLimits
from diffulex.errors import PromptError
from diffulex.serving.admission import AdmissionError, AdmissionLimits
from diffulex.serving.tick import SUPPORTED_STREAM_MODES, EngineDeadError
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
    ServingShutdown,
)

MAX_TICKS = 2000


def generate(rid="a", prompt="hi", stream_mode="block_append", stream=True, **params):
    value = prompt if isinstance(prompt, ChatInput) else PromptInput(prompt)
    fields = {"max_tokens": 16, "temperature": 0.0, **params}
    return ServingGenerate(rid, value, SamplingParams(**fields), stream, stream_mode)


def run(engine, *commands):
    """All events, in order, until nothing is left to do."""
    events = list(engine.run_serving_tick(list(commands)))
    for _ in range(MAX_TICKS):
        if engine.is_finished():
            return events
        events.extend(engine.run_serving_tick([]))
    raise AssertionError("expected an end, got none")


def only(events, kind):
    return [event for event in events if isinstance(event, kind)]


def the_reply(events):
    (reply,) = only(events, ServingReply)
    assert events[-1] is reply
    return reply


def apply_snapshots(events):
    draft: list[int] = []
    for event in only(events, ServingBufferSnapshot):
        assert event.absolute_end - event.absolute_start == len(event.token_ids)
        assert event.token_offset == event.absolute_start - len(b"hi")
        assert event.token_offset <= len(draft)
        draft[event.token_offset :] = event.token_ids
    return draft


# Ids that end answers, stand for halves of characters, or are ordinary.
answer_ids = st.lists(
    st.sampled_from([65, 66, 67, 10, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, EOS, TURN_END]), max_size=40
)
stop_texts = st.lists(st.sampled_from(["A", "AB", "BA", "\n", "é", "ABA", "C\n"]), max_size=3)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    answer=answer_ids,
    max_tokens=st.integers(1, 33),
    max_nfe=st.none() | st.integers(1, 12),
    ignore_eos=st.booleans(),
    stop=stop_texts,
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
    skip=st.booleans(),
)
def test_invariants(seed, answer, max_tokens, max_nfe, ignore_eos, stop, include, min_tokens, skip):
    """Section 4.4, invariants 1 to 5, in every mode; the modes agree on the answer."""
    replies = []
    for mode in ("block_append", "denoise", "both"):
        engine = BlockEngine(seed, {0: answer})
        command = generate(
            stream_mode=mode,
            max_tokens=max_tokens,
            max_nfe=max_nfe,
            ignore_eos=ignore_eos,
            stop=stop,
            include_stop_str_in_output=include,
            min_tokens=min(min_tokens, max_tokens),
            skip_special_tokens=skip,
        )
        events = run(engine, command)
        reply = the_reply(events)
        replies.append((reply.text, reply.token_ids, reply.finish_reason, reply.matched_stop))
        deltas = only(events, ServingDelta)
        assert MASK not in reply.token_ids
        assert len(reply.token_ids) <= max_tokens
        assert reply.nfe >= 1
        if mode != "denoise":
            assert "".join(delta.text for delta in deltas) == reply.text
            assert [i for delta in deltas for i in delta.token_ids] == reply.token_ids
            assert all(delta.token_ids or delta.text for delta in deltas)
            ends = [delta.token_offset + len(delta.token_ids) for delta in deltas]
            assert [delta.token_offset for delta in deltas] == [0, *ends[:-1]] or not deltas
        else:
            assert not deltas
        if mode != "block_append":
            assert apply_snapshots(events)[: len(reply.token_ids)] == reply.token_ids
        else:
            assert not only(events, ServingBufferSnapshot)
        if reply.finish_reason == "max_nfe_reached":
            assert MASK not in reply.full_token_ids
            assert reply.full_token_ids[: len(reply.token_ids)] == reply.token_ids
        if not reply.matched_stop:
            whole = engine.tokenizer.decode(reply.token_ids, skip_special_tokens=skip)
            assert reply.text == whole
        elif not include:
            assert isinstance(reply.matched_stop, str)
            assert reply.finish_reason == "stop"
        assert not engine.init_serving_state().requests
        assert engine.is_finished()
    assert replies[0] == replies[1] == replies[2]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), stop=st.sampled_from(["AB", "BA", "\nA", "é", "ABAB", "B"]))
def test_stop_text_cuts_at_the_first_complete_match(seed, stop):
    engine = BlockEngine(seed)
    whole = the_reply(run(engine, generate(max_tokens=40, ignore_eos=True))).text
    # The same seed decides the same answer, however it is denoised.
    cut = the_reply(run(BlockEngine(seed), generate(max_tokens=40, ignore_eos=True, stop=[stop])))
    kept = the_reply(
        run(
            BlockEngine(seed),
            generate(max_tokens=40, ignore_eos=True, stop=[stop], include_stop_str_in_output=True),
        )
    )
    if stop in whole:
        assert cut.text == whole[: whole.index(stop)]
        assert kept.text == whole[: whole.index(stop) + len(stop)]
        assert cut.matched_stop == stop
        assert cut.finish_reason == "stop"
        # The shortest run of tokens that covers the text.
        shorter = engine.tokenizer.decode(cut.token_ids[:-1]).rstrip("\ufffd")
        assert not cut.token_ids or len(shorter) < len(cut.text)
    else:
        assert cut.text == kept.text == whole
        assert cut.matched_stop is None


class TestCommands:
    def test_nothing_to_do_steps_nothing(self):
        engine = BlockEngine()
        assert engine.run_serving_tick([]) == []
        assert engine.num_steps == 0

    def test_one_step_per_tick(self):
        engine = BlockEngine()
        engine.run_serving_tick([generate("a"), generate("b")])
        assert engine.num_steps == 1

    def test_order_of_events(self):
        """For one rid: deltas and snapshots, then the reply, then nothing."""
        engine = BlockEngine(3)
        commands = [generate(f"r{i}", stream_mode="both", max_tokens=8 + i) for i in range(5)]
        events = run(engine, *commands)
        for i in range(5):
            own = [event for event in events if event.rid == f"r{i}"]
            assert isinstance(own[-1], ServingReply)
            assert not only(own[:-1], (ServingReply, ServingError))

    def test_abort(self):
        engine = BlockEngine()
        engine.run_serving_tick([generate("a"), generate("b")])
        events = run(engine, ServingAbort("a"), ServingAbort("nobody"))
        assert engine.aborted == [0]
        assert {event.rid for event in events} == {"b"}

    def test_abort_in_the_same_batch(self):
        engine = BlockEngine()
        assert engine.run_serving_tick([generate("a"), ServingAbort("a")]) == []
        assert engine.is_finished()

    @pytest.mark.parametrize("command", [ServingShutdown(), "nonsense"])
    def test_foreign_commands(self, command):
        with pytest.raises(TypeError, match="run_serving_tick: expected a command of an engine"):
            BlockEngine().run_serving_tick([command])

    def test_bad_stream_mode(self):
        engine = BlockEngine()
        command = generate()
        command.stream_mode = "words"
        (error,) = engine.run_serving_tick([command])
        assert error.http_status == 400
        assert "stream_mode: expected one of block_append, denoise, both, got 'words'" in (
            error.message
        )
        assert {"block_append", "denoise", "both"} == SUPPORTED_STREAM_MODES

    def test_events_carry_the_generation_of_their_command(self):
        engine = BlockEngine()
        commands = [
            dataclasses.replace(generate("a", stream_mode="both"), generation=3),
            dataclasses.replace(generate("b", prompt=""), generation=4),
            dataclasses.replace(generate("c"), generation=5),
        ]
        events = engine.run_serving_tick(commands)
        events += engine.run_serving_tick([ServingAbort("c"), generate("c")])
        events += run(engine)
        assert {event.generation for event in events if event.rid == "a"} == {3}
        assert [event.generation for event in events if event.rid == "b"] == [4]
        assert {event.generation for event in events if event.rid == "c"} <= {0, 5}
        assert next(event for event in reversed(events) if event.rid == "c").generation == 0
        assert all("generation" not in event.to_dict() for event in events)

    def test_same_rid_twice(self):
        events = BlockEngine().run_serving_tick([generate("a"), generate("a")])
        (error,) = only(events, ServingError)
        assert "rid" in error.message

    def test_one_bad_request_leaves_the_others_alone(self):
        engine = BlockEngine()
        events = run(engine, generate("bad", prompt=[]), generate("good"))
        assert [event.rid for event in only(events, ServingError)] == ["bad"]
        assert the_reply(events).rid == "good"

    def test_operations_answer(self):
        acks = BlockEngine().run_serving_tick(
            [
                ServingProfileStart("p", op_id="1"),
                ServingProfileStop(op_id="2"),
                ServingFlushCache("3"),
                ServingProfileStart("p"),
            ]
        )
        assert acks == [
            ServingAck("1", False, "profiling is off"),
            ServingAck("2", True, "", {"trace": "here"}),
            ServingAck("3", True, "", {"num_dropped_units": 0}),
        ]

    def test_chat_without_a_template(self):
        engine = BlockEngine()
        messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
        engine.run_serving_tick([generate(prompt=ChatInput(messages))])
        assert bytes(engine.live[0].prompt).decode() == "system: be\nuser: hi\nassistant:"

    def test_failed_step(self):
        engine = BlockEngine()
        engine.run_serving_tick([generate("a", max_tokens=40), generate("b", max_tokens=40)])
        engine.failure = RuntimeError("device lost")
        with pytest.raises(EngineDeadError, match="engine step failed: device lost") as caught:
            engine.run_serving_tick([generate("c")])
        assert caught.value.rids == ["a", "b", "c"]

    def test_queue_timeout(self):
        engine = BlockEngine()
        command = generate("late")
        command.queue_timeout_s = -1.0
        (error,) = engine.run_serving_tick([command])
        assert (error.code, error.http_status, error.retryable) == ("queue_timeout", 503, True)
        assert engine.is_finished()

    def test_shutdown_of_live_requests(self):
        engine = BlockEngine()
        engine.run_serving_tick([generate("a", max_tokens=99)])
        (error,) = engine.fail_requests("bye", "server_shutdown", 503)
        assert (error.rid, error.code) == ("a", "server_shutdown")
        assert engine.is_finished()


class TestText:
    def test_split_character_is_held_back(self):
        engine = BlockEngine(1, {0: [65, 65, 65, 0xC3, 0xA9, 66, 66, 66]})
        events = run(engine, generate(max_tokens=8))
        deltas = only(events, ServingDelta)
        assert all("\ufffd" not in delta.text for delta in deltas)
        assert the_reply(events).text == "AAAéBBB"

    def test_half_a_character_at_the_end(self):
        reply = the_reply(run(BlockEngine(1, {0: [65, 0xC3, EOS, 0]}), generate(max_tokens=4)))
        assert reply.text == "A\ufffd"
        assert reply.token_ids == [65, 0xC3]

    def test_id_without_text(self):
        reply = the_reply(run(BlockEngine(1, {0: [65, HOLE, 66, EOS]}), generate(max_tokens=4)))
        assert (reply.text, reply.token_ids) == ("AB", [65, HOLE, 66])

    @pytest.mark.parametrize("skip", [True, False])
    def test_special_tokens(self, skip):
        engine = BlockEngine(1, {0: [65, TURN_END, 66, EOS]})
        reply = the_reply(run(engine, generate(max_tokens=4, skip_special_tokens=skip)))
        assert reply.text == ("AB" if skip else "A<turn_end>B")

    @pytest.mark.parametrize("skip", [True, False])
    @pytest.mark.parametrize("include", [True, False])
    def test_stop_text_that_is_a_special_token(self, skip, include):
        engine = BlockEngine(1, {0: [65, 66, TURN_END, 67, 67, 67, 67, 67]})
        reply = the_reply(
            run(
                engine,
                generate(
                    max_tokens=8,
                    stop=["<turn_end>"],
                    skip_special_tokens=skip,
                    include_stop_str_in_output=include,
                ),
            )
        )
        assert reply.text == ("AB<turn_end>" if include else "AB")
        assert reply.token_ids == ([65, 66, TURN_END] if include else [65, 66])
        assert (reply.matched_stop, reply.finish_reason) == ("<turn_end>", "stop")

    def test_stop_token_id(self):
        engine = BlockEngine(1, {0: [65, 66, 67, 65, 65, 65, 65, 65]})
        reply = the_reply(run(engine, generate(max_tokens=8, stop_token_ids=[67])))
        assert (reply.text, reply.matched_stop, reply.finish_reason) == ("AB", 67, "stop")

    def test_stop_text_across_steps_is_never_sent(self):
        answer = [65] * BLOCK + [66] * BLOCK + [67] * BLOCK
        for seed in range(20):
            engine = BlockEngine(seed, {0: answer})
            events = run(engine, generate(max_tokens=12, stop=["ABBBBC"]))
            sent = "".join(delta.text for delta in only(events, ServingDelta))
            assert sent == the_reply(events).text == "AAA"
            assert engine.aborted in ([0], [])

    def test_min_tokens_ignores_early_stop_texts(self):
        engine = BlockEngine(1, {0: list(b"ABABABAB")})
        reply = the_reply(run(engine, generate(max_tokens=8, stop=["B"], min_tokens=4)))
        assert reply.text == "ABABA"

    def test_a_text_that_cannot_be_made_ends_its_request_only(self):
        engine = BlockEngine(1, {0: [65] * 8, 1: [66] * 8})
        decode = engine.tokenizer.decode

        def broken(ids, *args, **kwargs):
            if 66 in ids:
                raise OverflowError("id too large")
            return decode(ids, *args, **kwargs)

        engine.tokenizer.decode = broken
        events = run(engine, generate("good", max_tokens=8), generate("bad", max_tokens=8))
        (error,) = only(events, ServingError)
        assert (error.rid, error.http_status) == ("bad", 500)
        assert error.message == "OverflowError: id too large"
        assert [(r.rid, r.text) for r in only(events, ServingReply)] == [("good", "A" * 8)]
        assert engine.is_finished()
        assert not engine.init_serving_state().requests

    def test_snapshot_renders_masks(self):
        events = run(BlockEngine(5), generate(stream_mode="denoise"))
        masked = [e for e in only(events, ServingBufferSnapshot) if MASK in e.token_ids]
        assert masked
        assert all("<mask>" in event.text for event in masked)

    def test_snapshots_without_text(self):
        engine = BlockEngine(5)
        engine.detokenize_snapshots = False
        events = run(engine, generate(stream_mode="denoise"))
        assert {event.text for event in only(events, ServingBufferSnapshot)} == {None}


class TestEnd:
    def test_max_nfe_with_holes(self):
        for seed in range(30):
            engine = BlockEngine(seed)
            command = generate(max_tokens=32, max_nfe=3, ignore_eos=True)
            first = engine.run_serving_tick([command])
            request = engine.live[0]
            reply = the_reply(first + run(engine))
            generated = request.token_ids[request.prefix_len :]
            is_open = [token == MASK for token in generated]
            assert reply.finish_reason == "max_nfe_reached"
            assert reply.token_ids == generated[: [*is_open, True].index(True)]
            assert reply.full_token_ids == [token for token in generated if token != MASK]
            assert reply.num_masked == sum(is_open)
            if reply.num_masked:
                return
        raise AssertionError("expected a request with holes, got none")

    def test_nothing_is_missing_behind_a_stop(self):
        """Other blocks are open when the end token is final."""
        num_open = 0
        for seed in range(30):
            engine = BlockEngine(seed, {0: [65, EOS]})
            first = engine.run_serving_tick([generate(max_tokens=64)])
            request = engine.live.get(0)
            reply = the_reply(first + run(engine))
            num_open += 0 if request is None else request.token_ids.count(MASK)
            assert (reply.finish_reason, reply.num_masked) == ("eos_token_generated", 0)
        assert num_open

    @pytest.mark.parametrize("stop", [(), ("B",)])
    def test_the_full_answer_of_a_last_block(self, stop):
        """A stop text in the step that ends the request anyway takes nothing from it."""
        engine = BlockEngine(0, {0: [65, 66, EOS, 67]})
        reply = the_reply(run(engine, generate(max_tokens=4, stop=stop)))
        assert reply.token_ids == ([65] if stop else [65, 66])
        assert reply.full_token_ids == [65, 66, EOS, 67]
        assert not engine.aborted

    def test_the_full_answer_of_a_request_that_is_cut(self):
        engine = BlockEngine(0, {0: [65, 66, 67, 68]})
        reply = the_reply(run(engine, generate(max_tokens=64, stop=("B",))))
        assert engine.aborted == [0]
        assert reply.full_token_ids[:4] == [65, 66, 67, 68]
        assert reply.num_masked == 0

    def test_reply_counts(self):
        reply = the_reply(run(BlockEngine(2), generate(max_tokens=12, ignore_eos=True)))
        assert reply.prompt_tokens == 2
        assert reply.decode_steps == reply.nfe
        assert reply.prefill_steps == 0
        assert reply.engine_decode_tokens > 0
        assert reply.engine_decode_tps == pytest.approx(
            reply.engine_decode_tokens / reply.engine_decode_time_s
        )
        assert reply.e2e_time_s >= reply.ttft_s >= 0

    @pytest.mark.parametrize(
        ("reason", "code"), [("error:nan_logits", "nan_logits"), ("aborted", "aborted")]
    )
    def test_failed_requests(self, reason, code):
        engine = BlockEngine()
        first = engine.run_serving_tick([generate("a", max_tokens=99), generate("b")])
        request = engine.live[0]
        request._check_end = lambda: (
            setattr(request, "completion_reason", reason),
            setattr(request, "is_finished", True),
        )
        events = first + run(engine)
        (error,) = only(events, ServingError)
        assert (error.rid, error.code, error.http_status) == ("a", code, 500)
        assert [reply.rid for reply in only(events, ServingReply)] == ["b"]


class TestAdmission:
    """Requests outside the limits are refused before they reach the scheduler."""

    limits = AdmissionLimits(
        max_model_len=32,
        vocab_size=VOCAB_SIZE,
        block_size=BLOCK,
        buffer_size=3,
        page_size=4,
        num_pages=6,
        max_num_batched_tokens=28,
        mask_token_id=MASK,
    )

    @pytest.mark.parametrize("prompt", [[], [VOCAB_SIZE], [-1], [65] * 32, [65] * 9])
    def test_the_engine_says_the_same(self, prompt):
        """One rule for both; serving adds what clients recognise a full context by."""
        limits = dataclasses.replace(self.limits, longest_whole_prompt=8)
        with pytest.raises(PromptError) as caught:
            PromptLimits(32, VOCAB_SIZE, 8).check(prompt)
        with pytest.raises(AdmissionError) as refused:
            limits.check(prompt, SamplingParams(max_tokens=1), is_strict=False)
        assert str(refused.value).startswith(str(caught.value))
        assert refused.value.code == caught.value.code
        assert ("maximum context length" in str(refused.value)) is (len(prompt) == 32)

    def refusal(self, command, **changes):
        engine = BlockEngine()
        limits = dataclasses.replace(self.limits, **changes)
        engine.serving_limits = lambda: limits
        events = engine.run_serving_tick([command])
        if engine.num_added:
            assert not only(events, ServingError)
            return None
        (error,) = events
        assert error.http_status == 400
        assert not error.retryable
        return error.code, error.param

    @pytest.mark.parametrize(
        ("prompt", "code"),
        [
            ([], "invalid_request"),
            ("", "invalid_request"),
            ([65] * 32, "context_length_exceeded"),
            ([VOCAB_SIZE], "token_out_of_range"),
            ([-1], "token_out_of_range"),
            ([65, MASK], "mask_token_in_prompt"),
        ],
    )
    def test_prompts(self, prompt, code):
        assert self.refusal(generate(prompt=prompt)) == (code, "prompt")

    def test_longest_prompt(self):
        roomy = {"num_pages": 8, "max_num_batched_tokens": 44}
        assert self.refusal(generate(prompt=[65] * 31), **roomy) is None
        assert self.refusal(generate(prompt=[65] * 32), **roomy) is not None

    def test_batch_budget(self):
        """ceil_to(P, B) + N * B <= T."""
        assert self.refusal(generate(prompt=[65] * 16, max_tokens=1)) is None
        assert self.refusal(generate(prompt=[65] * 17, max_tokens=1)) == (
            "context_length_exceeded",
            "prompt",
        )
        chunked = {"is_prefill_chunked": True}
        assert self.refusal(generate(prompt=[65] * 17, max_tokens=1), **chunked) is None

    def test_pages(self):
        assert self.refusal(generate(prompt=[65] * 8, max_tokens=16)) is None
        assert self.refusal(generate(prompt=[65] * 8, max_tokens=17)) == ("kv_capacity", "prompt")

    def test_max_tokens_is_cut_or_refused(self):
        roomy = {"num_pages": 8}
        command = generate(prompt=[65] * 8, max_tokens=99)
        assert self.refusal(command, **roomy) is None
        command.strict_max_tokens = True
        assert self.refusal(command, **roomy) == ("context_length_exceeded", "max_tokens")

    def test_drafts_end_at_the_length_of_the_model(self):
        """Blocks may reach behind it, what clients see may not."""
        engine = BlockEngine(5)
        limits = dataclasses.replace(self.limits, max_model_len=13, num_pages=99)
        engine.serving_limits = lambda: limits
        command = generate(prompt=[65] * 3, stream_mode="both", max_tokens=99, max_nfe=40)
        events = run(engine, command)
        ends = [event.absolute_end for event in only(events, ServingBufferSnapshot)]
        assert max(ends) == 13
        sent = [token for event in only(events, ServingDelta) for token in event.token_ids]
        assert len(sent) <= 10
        assert the_reply(events).token_ids == sent

    def test_the_answer_to_a_masked_prompt_is_its_template(self):
        engine = BlockEngine()
        limits = dataclasses.replace(self.limits, allows_mask_in_prompt=True)
        engine.serving_limits = lambda: limits
        command = generate(prompt=[65, 66, *[MASK] * 6], max_tokens=2)
        # What clients see of its drafts ends there.
        assert engine.admit(command).max_tokens == 6
        command.strict_max_tokens = True
        assert self.refusal(command, allows_mask_in_prompt=True) == (
            "invalid_request",
            "max_tokens",
        )

    @pytest.mark.parametrize(
        ("params", "field"),
        [
            ({"top_p": 0.0}, "top_p"),
            ({"top_p": 1.5}, "top_p"),
            ({"top_k": -2}, "top_k"),
            ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ],
    )
    def test_parameters(self, params, field):
        assert self.refusal(generate(**params)) == ("invalid_request", field)
