# SPDX-License-Identifier: Apache-2.0
"""The maps of the wire: lossless, tolerant of what they do not know, the same bytes as ever."""

from __future__ import annotations

import contextlib
import dataclasses

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from diffulex import SamplingParams
from diffulex.config.sampling_params import DECODING_FIELDS, decoding_arguments
from diffulex.server.openai.request_params import request_options
from diffulex.server.openai.request_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    option_fields,
)
from diffulex.server.openai.responses_schema import ResponsesRequest
from diffulex.serving.zmq_queue import MessageDecodeError, pack_message, unpack_message
from diffulex.wire import protocol
from diffulex.wire.protocol import (
    ChatInput,
    PromptInput,
    ProtocolVersionError,
    RequestOptions,
    ServingAbort,
    ServingAck,
    ServingBatch,
    ServingBufferSnapshot,
    ServingControl,
    ServingDelta,
    ServingError,
    ServingFlushCache,
    ServingGenerate,
    ServingHeartbeat,
    ServingProfileStart,
    ServingProfileStop,
    ServingReply,
    ServingShutdown,
    openai_finish_reason,
    sampling_params_from_dict,
    sampling_params_to_dict,
    serving_command_from_dict,
    serving_command_to_dict,
    serving_event_from_dict,
    serving_event_to_dict,
    serving_input_from_dict,
    serving_input_to_dict,
)

PARAMS = SamplingParams(
    temperature=0.5,
    max_tokens=7,
    max_nfe=9,
    max_repetition_run=3,
    ignore_eos=True,
    seed=2**63 - 1,
    stop=["\n", "é"],
    stop_token_ids=[1, 2],
    include_stop_str_in_output=True,
    min_tokens=2,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    skip_special_tokens=True,
    logprobs=3,
    accept_threshold=0.8,
    return_trajectory="full",
)
COMMANDS = [
    ServingGenerate("r", PromptInput("hé"), PARAMS),
    ServingGenerate(
        *("r", PromptInput([1, 2], False), PARAMS, True, "both", "u", 1.5),
        strict_max_tokens=True,
        queue_timeout_s=2.0,
        denoise_detail=True,
    ),
    ServingGenerate("r", ChatInput([{"role": "user", "content": "x"}]), SamplingParams()),
    ServingAbort("r"),
    ServingShutdown(),
    ServingShutdown("drain", 3.0),
    ServingProfileStart(),
    ServingProfileStart("p", "1"),
    ServingProfileStop(),
    ServingProfileStop("2"),
    ServingFlushCache("3"),
    ServingControl("pause", "4"),
    ServingControl("update_weights", "5", "/weights"),
]
LOGPROB = {"token_id": 1, "token": "a", "bytes": [97], "logprob": -0.5, "top": []}
EVENTS = [
    ServingReply("r", "t", [1], 2),
    ServingReply("r", "t", [1], 2, "stop", "tt", [1, 2], 0.5, 3, 6.0, True, "stop", "x", 1, 0),
    dataclasses.replace(ServingReply("r", "t", [1], 2), logprobs=[LOGPROB], seed=5, num_masked=0),
    ServingDelta("r", 0, "t", [1], 2),
    ServingDelta("r", 3, "t", [1], 2, True, 0.5, 3, 6.0, [LOGPROB]),
    ServingBufferSnapshot("r", 0, 5, 6, None, [1], 2),
    ServingBufferSnapshot(
        "r", 0, 5, 6, "t", [1], 2, True, 0.5, 3, 6.0, 4, 9, [{"id": 0, "start": 5}], [0.5]
    ),
    ServingError("r", "m"),
    ServingError("r", "m", "queue_full", 429, True, "prompt"),
    dataclasses.replace(ServingReply("r", "t", [1], 2), trajectory={"steps": [{"changes": []}]}),
]
MESSAGES = [
    ServingBatch(EVENTS),
    ServingHeartbeat(1.5, 3, 0.25, {"gauges": {"x": 1}}),
    ServingAck("1", True, "", {"a": 1}),
    ServingAck("1", False, "no"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda item: type(item).__name__)
def test_commands_round_trip(command):
    packed = pack_message(serving_command_to_dict(command))
    assert serving_command_from_dict(unpack_message(packed)) == command


@pytest.mark.parametrize("event", EVENTS + MESSAGES, ids=lambda item: type(item).__name__)
def test_events_round_trip(event):
    packed = pack_message(serving_event_to_dict(event))
    assert serving_event_from_dict(unpack_message(packed)) == event


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.text() | st.lists(st.integers(0, 2**31 - 1)),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=4),
    seed=st.none() | st.integers(0, 2**64 - 1),
    decoding=st.fixed_dictionaries(
        {},
        optional={
            name: st.integers(0, 99) if item.kind is int else st.floats(0, 1)
            for name, item in DECODING_FIELDS.items()
        },
    ),
    created=st.none() | st.floats(allow_nan=False),
)
def test_any_request_round_trips(prompt, stop, seed, decoding, created):
    if isinstance(prompt, str):
        prompt = prompt.encode(errors="replace").decode()
    stop = [text.encode(errors="replace").decode() for text in stop]
    params = SamplingParams(stop=stop, seed=seed, **decoding_arguments(decoding))
    command = ServingGenerate("r", PromptInput(prompt), params, created_time=created)
    packed = pack_message(serving_command_to_dict(command))
    assert serving_command_from_dict(unpack_message(packed)) == command


def test_only_the_first_fields_of_a_command_have_places():
    """Later ones may be declared anywhere, so that a place would come to mean another field."""
    places = (PromptInput("x"), SamplingParams(), True, "both", "user", 1.5)
    command = ServingGenerate("a", *places)
    assert (command.user, command.created_time) == ("user", 1.5)
    with pytest.raises(TypeError):
        ServingGenerate("a", *places, True)


def test_request_id():
    for item in (COMMANDS[0], COMMANDS[3], *EVENTS):
        assert item.request_id == item.rid == "r"
        with pytest.raises(AttributeError):
            item.request_id = "other"
    assert not hasattr(ServingShutdown(), "rid")


def test_base_maps():
    """The documented keys, in their order, and no others while the extensions are unused."""
    generate = serving_command_to_dict(ServingGenerate("r", PromptInput("x"), SamplingParams()))
    assert list(generate) == [
        *("type", "rid", "input", "sampling_params", "stream", "stream_mode", "user"),
        "created_time",
    ]
    assert generate["input"] == {"type": "prompt", "prompt": "x"}
    assert list(generate["sampling_params"])[:5] == [
        *("temperature", "max_tokens", "max_nfe", "max_repetition_run", "ignore_eos")
    ]
    assert serving_command_to_dict(ServingAbort("r")) == {"type": "abort", "rid": "r"}
    assert serving_command_to_dict(ServingShutdown()) == {"type": "shutdown"}
    assert serving_command_to_dict(ServingProfileStart()) == {
        "type": "profile_start",
        "profile_prefix": None,
    }
    assert serving_command_to_dict(ServingProfileStop()) == {"type": "profile_stop"}
    decode = ["engine_decode_time_s", "engine_decode_tokens", "engine_decode_tps"]
    assert list(serving_event_to_dict(EVENTS[0])) == [
        *("type", "rid", "text", "token_ids", "nfe", "finish_reason", "full_text"),
        "full_token_ids",
        *decode,
        "finished",
    ]
    assert list(serving_event_to_dict(EVENTS[3])) == [
        *("type", "rid", "token_offset", "text", "token_ids", "nfe", "finished"),
        *decode,
    ]
    assert list(serving_event_to_dict(EVENTS[5])) == [
        *("type", "rid", "token_offset", "absolute_start", "absolute_end", "text", "token_ids"),
        *("nfe", "finished"),
        *decode,
    ]
    assert serving_event_to_dict(EVENTS[7]) == {"type": "error", "rid": "r", "message": "m"}


# msgpack, by its specification: 8n = map of n, An = text of n bytes, 9n = list of n, C0 = nil,
# C2 = false, C3 = true, CB = float64, small integers are themselves.
@pytest.mark.parametrize(
    ("item", "golden"),
    [
        (ServingAbort("ab"), b"\x82\xa4type\xa5abort\xa3rid\xa2ab"),
        (ServingShutdown(), b"\x81\xa4type\xa8shutdown"),
        (ServingProfileStart(), b"\x82\xa4type\xadprofile_start\xaeprofile_prefix\xc0"),
        (ServingProfileStop(), b"\x81\xa4type\xacprofile_stop"),
        (ServingFlushCache("1"), b"\x82\xa4type\xabflush_cache\xa5op_id\xa11"),
        (
            ServingControl("pause", "1"),
            b"\x83\xa4type\xa7control\xa6action\xa5pause\xa5op_id\xa11",
        ),
        (ServingError("r", "é"), b"\x83\xa4type\xa5error\xa3rid\xa1r\xa7message\xa2\xc3\xa9"),
        (
            ServingDelta("r", 1, "t", [2], 3),
            b"\x8a\xa4type\xa5delta\xa3rid\xa1r\xactoken_offset\x01\xa4text\xa1t\xa9token_ids"
            b"\x91\x02\xa3nfe\x03\xa8finished\xc2\xb4engine_decode_time_s\xc0"
            b"\xb4engine_decode_tokens\xc0\xb1engine_decode_tps\xc0",
        ),
        (
            ServingReply("r", "t", [2], 3, engine_decode_tps=0.5),
            b"\x8c\xa4type\xa5reply\xa3rid\xa1r\xa4text\xa1t\xa9token_ids\x91\x02\xa3nfe\x03"
            b"\xadfinish_reason\xc0\xa9full_text\xc0\xaefull_token_ids\xc0"
            b"\xb4engine_decode_time_s\xc0\xb4engine_decode_tokens\xc0"
            b"\xb1engine_decode_tps\xcb\x3f\xe0\0\0\0\0\0\0\xa8finished\xc3",
        ),
        (
            ServingBufferSnapshot("r", 1, 2, 3, "t", [2], 3),
            b"\x8c\xa4type\xafbuffer_snapshot\xa3rid\xa1r\xactoken_offset\x01\xaeabsolute_start\x02"
            b"\xacabsolute_end\x03\xa4text\xa1t\xa9token_ids\x91\x02\xa3nfe\x03\xa8finished\xc2"
            b"\xb4engine_decode_time_s\xc0\xb4engine_decode_tokens\xc0\xb1engine_decode_tps\xc0",
        ),
    ],
    ids=lambda item: type(item).__name__,
)
def test_golden_bytes(item, golden):
    is_event = type(item).__name__ in ("ServingError", "ServingDelta", "ServingReply") or (
        isinstance(item, ServingBufferSnapshot)
    )
    encode = serving_event_to_dict if is_event else serving_command_to_dict
    decode = serving_event_from_dict if is_event else serving_command_from_dict
    assert pack_message(encode(item)) == golden
    assert decode(unpack_message(golden)) == item


def test_golden_generate():
    command = ServingGenerate("r", PromptInput([1]), SamplingParams(max_tokens=4, temperature=0.0))
    packed = pack_message(serving_command_to_dict(command))
    assert packed.startswith(
        b"\x88\xa4type\xa8generate\xa3rid\xa1r\xa5input\x82\xa4type\xa6prompt\xa6prompt\x91\x01"
        b"\xafsampling_params\x8f\xabtemperature\xcb\0\0\0\0\0\0\0\0\xaamax_tokens\x04\xa7max_nfe\xc0"
    )
    assert packed.endswith(
        b"\xa6stream\xc2\xabstream_mode\xa7denoise\xa4user\xc0\xaccreated_time\xc0"
    )


def test_msgspec_reads_and_writes_the_same():
    msgspec = pytest.importorskip("msgspec")
    for event in EVENTS:
        data = serving_event_to_dict(event)
        assert msgspec.msgpack.decode(pack_message(data)) == data
        assert serving_event_from_dict(unpack_message(msgspec.msgpack.encode(data))) == event


class TestTolerance:
    def test_unknown_keys_at_every_level(self):
        data = serving_command_to_dict(COMMANDS[0])
        data["new"] = 1
        data["input"]["new"] = 1
        data["sampling_params"]["new"] = 1
        data["sampling_params"]["decoding"]["new"] = 1
        assert serving_command_from_dict(data) == COMMANDS[0]
        event = serving_event_to_dict(EVENTS[0]) | {"new": 1}
        assert serving_event_from_dict(event) == EVENTS[0]

    def test_missing_optional_keys(self):
        data = {
            "type": "generate",
            "rid": "r",
            "input": {"type": "prompt", "prompt": "x"},
            "sampling_params": {},
        }
        command = serving_command_from_dict(data)
        assert command == ServingGenerate("r", PromptInput("x"), SamplingParams())
        assert (command.stream, command.stream_mode) == (False, "denoise")
        reply = {"type": "reply", "rid": "r", "text": "", "token_ids": [], "nfe": 0}
        assert serving_event_from_dict(reply).finished is True
        delta = {"type": "delta", "rid": "r", "token_offset": 0, "text": "", "token_ids": []}
        assert serving_event_from_dict(delta | {"nfe": 0}).finished is False

    @pytest.mark.parametrize("data", [{}, {"type": None}, {"type": "dance"}, {"type": 3}, [], None])
    def test_unknown_types(self, data):
        for decode in (serving_command_from_dict, serving_event_from_dict, serving_input_from_dict):
            with pytest.raises(ValueError, match=r"serving_\w+: expected a (type|map)"):
                decode(data)

    def test_unknown_type_is_named(self):
        with pytest.raises(ValueError, match="got 'dance'"):
            serving_command_from_dict({"type": "dance"})

    @pytest.mark.parametrize("missing", ["rid", "input", "sampling_params"])
    def test_missing_required_keys(self, missing):
        data = serving_command_to_dict(COMMANDS[0])
        del data[missing]
        with pytest.raises(ValueError, match=f"expected a {missing} in generate, got none"):
            serving_command_from_dict(data)

    def test_objects_of_other_kinds(self):
        with pytest.raises(TypeError, match="serving_command: expected one of generate"):
            serving_command_to_dict(EVENTS[0])
        with pytest.raises(TypeError, match="serving_event: expected one of reply"):
            serving_event_to_dict(COMMANDS[0])
        with pytest.raises(TypeError):
            serving_event_to_dict(ServingBatch([COMMANDS[0]]))
        with pytest.raises(TypeError):
            serving_input_to_dict("x")

    def test_newer_protocol(self):
        data = serving_command_to_dict(ServingAbort("r"))
        assert serving_command_from_dict(data | {"v": 1}) == ServingAbort("r")
        with pytest.raises(ProtocolVersionError, match="expected protocol version <= 1, got 2"):
            serving_command_from_dict(data | {"v": 2})

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(("rid", 3), ("stream", 1), ("stream_mode", ["both"]), ("user", 2)),
            *(("created_time", "now"), ("queue_timeout_s", "x"), ("denoise_detail", None)),
        ],
    )
    def test_bad_fields(self, field, value):
        with pytest.raises(ValueError, match=f"serving_command: expected a legal {field}"):
            serving_command_from_dict(serving_command_to_dict(COMMANDS[1]) | {field: value})

    @pytest.mark.parametrize("change", [{"mode": "later"}, {"deadline_s": "x"}])
    def test_bad_shutdowns(self, change):
        with pytest.raises(ValueError, match="serving_command: expected a legal"):
            serving_command_from_dict({"type": "shutdown", **change})

    @pytest.mark.parametrize("prompt", [3, [1, "x"], [True], None, [1.5]])
    def test_bad_prompts(self, prompt):
        with pytest.raises(ValueError, match="expected a text or token ids"):
            serving_input_from_dict({"type": "prompt", "prompt": prompt})

    @pytest.mark.parametrize("messages", ["x", [1], [{"role": "user"}], [{"content": "x"}]])
    def test_bad_messages(self, messages):
        with pytest.raises(ValueError, match="expected messages with role and content"):
            serving_input_from_dict({"type": "chat", "messages": messages})


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    base=st.sampled_from([serving_command_to_dict(command) for command in COMMANDS]),
    changes=st.dictionaries(
        st.sampled_from(["type", "rid", "input", "sampling_params", "v", "stream", "mode"]), values
    ),
)
def test_malformed_commands_raise_value_errors(base, changes):
    """Whatever arrives, the decoder returns a command or raises an error the loop survives."""
    try:
        command = serving_command_from_dict({**base, **changes})
    except (ValueError, TypeError):
        return
    assert isinstance(command, tuple(type(item) for item in COMMANDS))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_a_value_or_an_error(packed):
    with contextlib.suppress(MessageDecodeError):
        unpack_message(packed)


class TestPublicShape:
    def test_reply(self):
        shown = EVENTS[0].to_dict()
        assert list(shown) == [
            *("id", "text", "token_ids", "nfe", "finish_reason", "full_text", "full_token_ids"),
            *("engine_decode_time_s", "engine_decode_tokens", "engine_decode_tps"),
        ]
        assert (shown["id"], shown["full_text"], shown["full_token_ids"]) == ("r", "t", [1])
        shown = EVENTS[1].to_dict()
        assert (shown["full_text"], shown["full_token_ids"]) == ("tt", [1, 2])
        assert (shown["matched_stop"], shown["prompt_tokens"]) == ("x", 1)
        assert "finished" not in shown
        assert "seed" not in shown

    def test_stream_events(self):
        assert EVENTS[3].to_dict()["event"] == "append"
        assert EVENTS[5].to_dict()["event"] == "buffer_snapshot"
        assert EVENTS[7].to_dict() == {
            **{"event": "error", "id": "r", "message": "m"},
            **{"code": "engine_error", "http_status": 500, "retryable": False},
        }


def test_sampling_params_maps():
    assert sampling_params_from_dict(sampling_params_to_dict(PARAMS)) == PARAMS
    assert sampling_params_from_dict({}) == SamplingParams()
    assert sampling_params_to_dict(PARAMS)["decoding"] == {"accept_threshold": 0.8}
    with pytest.raises(ValueError, match="max_tokens"):
        sampling_params_from_dict({"max_tokens": 0})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": 5}, r"stop: expected .*got 5"),
        ({"stop": [""]}, "stop: expected texts of 1 to 256 characters, got ''"),
        ({"stop": ["x" * 257]}, "stop: expected texts of 1 to 256"),
        ({"stop": ["x"] * 17}, "stop: expected at most 16 texts, got 17"),
        ({"stop": [3]}, "stop: expected texts"),
        ({"min_tokens": -1}, "min_tokens: expected an integer"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens: expected an integer in \[0, 4\], got 5"),
        ({"logprobs": 21}, r"logprobs: expected an integer in \[0, 20\], got 21"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens: expected"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output: expected True or False"),
    ],
)
def test_illegal_sampling_params(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_decoding_arguments():
    assert decoding_arguments({"edit_threshold": 0.5}) == {"edit_threshold": 0.5}
    with pytest.raises(ValueError, match=r"expected keys of .*penalty_lambda, got 'penalty'"):
        decoding_arguments({"penalty": 1})
    with pytest.raises(ValueError, match="got 'tempo'"):
        decoding_arguments({"tempo": 1})


@pytest.mark.parametrize(
    ("detail", "reason"),
    [
        ("eos_token_generated", "stop"),
        ("stop", "stop"),
        ("max_new_tokens_reached", "length"),
        ("max_model_len_reached", "length"),
        ("max_nfe_reached", "length"),
        ("max_repetition_run_reached", "length"),
        ("completed_without_reason", "stop"),
        ("unknown_postprocess_deactivate", "stop"),
        (None, "stop"),
    ],
)
def test_openai_reasons(detail, reason):
    assert openai_finish_reason(detail) == reason


def test_everything_named_is_there():
    for name in protocol.__all__:
        assert hasattr(protocol, name)


def test_a_declared_option_reaches_bodies_and_commands():
    """One declaration of a request field: the schema, the check and the command follow from it."""
    for body in (GenerateRequest, CompletionRequest, ChatCompletionRequest, ResponsesRequest):
        declared = {item.name: item.default for item in dataclasses.fields(RequestOptions)}
        assert {name: body.model_fields[name].default for name in declared} == declared
    payload = GenerateRequest(prompt="x", denoise_detail=True)
    assert request_options(payload) == RequestOptions(denoise_detail=True)
    with pytest.raises(ValidationError, match="valid boolean"):
        GenerateRequest(prompt="x", denoise_detail="yes")


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [(bool, True, 1), (int, 5.0, 5.5), (float, 1, "1"), (str, "x", 1), (str | None, None, 2)],
)
def test_types_of_options(hint, good, bad):
    options = dataclasses.make_dataclass("Options", [("label", hint, None)], kw_only=True)
    body = pydantic.create_model("Body", **option_fields(options))
    assert body(label=good).label == good
    with pytest.raises(ValidationError):
        body(label=bad)
