# SPDX-License-Identifier: Apache-2.0
"""What the HTTP process and the engine process say to each other.

Commands go to the backend, events come back. Each is a dataclass and, on the wire, a map (see
`wire_maps`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from diffulex.config.sampling_params import DECODING_FIELDS, SamplingParams
from diffulex.wire.finish_reasons import openai_finish_reason
from diffulex.wire.wire_maps import PROTOCOL_VERSION, ProtocolVersionError, WireMaps

__all__ = [
    "PROTOCOL_VERSION",
    "STREAM_MODES",
    "ChatInput",
    "PromptInput",
    "ProtocolVersionError",
    "ServingAbort",
    "ServingAck",
    "ServingBatch",
    "ServingBufferSnapshot",
    "ServingCommand",
    "ServingDelta",
    "ServingError",
    "ServingEvent",
    "ServingFlushCache",
    "ServingGenerate",
    "ServingHeartbeat",
    "ServingInput",
    "ServingMessage",
    "ServingProfileStart",
    "ServingProfileStop",
    "ServingReply",
    "ServingShutdown",
    "StreamMode",
    "openai_finish_reason",
    "sampling_params_from_dict",
    "sampling_params_to_dict",
    "serving_command_from_dict",
    "serving_command_to_dict",
    "serving_event_from_dict",
    "serving_event_to_dict",
    "serving_input_from_dict",
    "serving_input_to_dict",
]

StreamMode = Literal["block_append", "denoise", "both"]
STREAM_MODES: tuple[str, ...] = get_args(StreamMode)


class _Tagged:
    """Classes with a `rid` also call it `request_id`."""

    rid: str

    @property
    def request_id(self) -> str:
        """The same as `rid`."""
        return self.rid


# Inputs.


@dataclass
class PromptInput:
    """A text, or token ids. `add_special_tokens` says how a text is tokenised."""

    prompt: str | list[int]
    add_special_tokens: bool = True


@dataclass
class ChatInput:
    """A conversation of `{role, content}` messages, rendered by the backend."""

    messages: list[dict[str, str]]


ServingInput: TypeAlias = PromptInput | ChatInput


# Commands.


@dataclass
class ServingGenerate(_Tagged):
    """Decode one prompt.

    Attributes:
        generation: of the sender, one per admission; its events carry it, so that those of an
            aborted request do not reach a later one of the same `rid`. 0: there is none.
        strict_max_tokens: reject a `max_tokens` that does not fit instead of clamping it.
        denoise_detail: snapshots carry `blocks` and `confidences`.
        queue_timeout_s: fail the request when it has not been run for so long; None: never.
    """

    rid: str
    input: ServingInput
    sampling_params: SamplingParams
    stream: bool = False
    stream_mode: StreamMode = "denoise"
    user: str | None = None
    created_time: float | None = None
    strict_max_tokens: bool = False
    denoise_detail: bool = False
    queue_timeout_s: float | None = None
    generation: int = 0


@dataclass
class ServingAbort(_Tagged):
    """End a request; nothing about it is sent any more. Unknown ids are ignored."""

    rid: str


@dataclass
class ServingShutdown:
    """End the backend: at once, or (`drain`) when its requests are done or the deadline passed."""

    mode: Literal["abort", "drain"] = "abort"
    deadline_s: float | None = None


@dataclass
class ServingProfileStart:
    """Start the profiler; answered by `ServingAck` when it has an `op_id`."""

    profile_prefix: str | None = None
    op_id: str | None = None


@dataclass
class ServingProfileStop:
    """Stop the profiler; answered by `ServingAck` when it has an `op_id`."""

    op_id: str | None = None


@dataclass
class ServingFlushCache:
    """Drop the pages of the prefix cache that no request uses; answered by `ServingAck`."""

    op_id: str


ServingCommand: TypeAlias = (
    ServingGenerate
    | ServingAbort
    | ServingShutdown
    | ServingProfileStart
    | ServingProfileStop
    | ServingFlushCache
)


# Events.


def _public(event: Any, name: str | None, base: tuple[str, ...]) -> dict[str, Any]:
    """The map `/generate` shows: `event`, `id`, the base fields, then what is set beyond them."""
    shown: dict[str, Any] = {} if name is None else {"event": name}
    shown["id"] = event.rid
    for key in base:
        shown[key] = getattr(event, key)
    for item in dataclasses.fields(event):
        value = getattr(event, item.name)
        if item.name not in ("rid", "finished", "generation", *base) and value is not None:
            shown[item.name] = value
    return shown


_DECODE_NUMBERS = ("engine_decode_time_s", "engine_decode_tokens", "engine_decode_tps")


@dataclass
class ServingReply(_Tagged):
    """The whole answer; nothing follows for its `rid`.

    Attributes:
        token_ids: the answer without end token, cut where its text is.
        full_token_ids: every generated token, also after the end of the answer.
        finish_reason: the engine's own reason, as in `finish_detail`; `openai_finish_reason` maps it.
        matched_stop: the stop string or stop token id that ended the answer.
        num_masked: positions that `max_nfe` left undecided.
        logprobs: one map per token: `token_id, token, bytes, logprob, step, confidence` and `top`,
            a list of `{token_id, token, bytes, logprob}`.
    """

    rid: str
    text: str
    token_ids: list[int]
    nfe: int
    finish_reason: str | None = None
    full_text: str | None = None
    full_token_ids: list[int] | None = None
    engine_decode_time_s: float | None = None
    engine_decode_tokens: int | None = None
    engine_decode_tps: float | None = None
    finished: bool = True
    finish_detail: str | None = None
    matched_stop: str | int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prefill_steps: int | None = None
    decode_steps: int | None = None
    prefill_output_tokens: int | None = None
    prefill_time_s: float | None = None
    queue_time_s: float | None = None
    ttft_s: float | None = None
    e2e_time_s: float | None = None
    num_masked: int | None = None
    num_preemptions: int | None = None
    seed: int | None = None
    logprobs: list[dict[str, Any]] | None = None
    generation: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The body of `/generate`."""
        shown = _public(
            self,
            None,
            (
                "text",
                "token_ids",
                "nfe",
                "finish_reason",
                "full_text",
                "full_token_ids",
                *_DECODE_NUMBERS,
            ),
        )
        if self.full_text is None:
            shown["full_text"] = self.text
        if self.full_token_ids is None:
            shown["full_token_ids"] = self.token_ids
        return shown


@dataclass
class ServingDelta(_Tagged):
    """Tokens and text that became final; `token_offset` counts from the first generated token."""

    rid: str
    token_offset: int
    text: str
    token_ids: list[int]
    nfe: int
    finished: bool = False
    engine_decode_time_s: float | None = None
    engine_decode_tokens: int | None = None
    engine_decode_tps: float | None = None
    logprobs: list[dict[str, Any]] | None = None
    generation: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A frame of `/generate`."""
        base = ("token_offset", "text", "token_ids", "nfe", "finished", *_DECODE_NUMBERS)
        return _public(self, "append", base)


@dataclass
class ServingBufferSnapshot(_Tagged):
    """The draft from `token_offset` on; it replaces what was known from there to the end.

    Attributes:
        absolute_start: position of the first token, prompt included.
        text: None when the frontend is to make it from the ids.
        committed: generated tokens, from the first on, that can never change again.
        mask_token_id: None for a canvas, which has no masks.
        blocks: `{id, start, end, state, masked}`, positions as `absolute_start`.
    """

    rid: str
    token_offset: int
    absolute_start: int
    absolute_end: int
    text: str | None
    token_ids: list[int]
    nfe: int
    finished: bool = False
    engine_decode_time_s: float | None = None
    engine_decode_tokens: int | None = None
    engine_decode_tps: float | None = None
    committed: int | None = None
    mask_token_id: int | None = None
    blocks: list[dict[str, Any]] | None = None
    confidences: list[float] | None = None
    generation: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A frame of `/generate`."""
        base = ("token_offset", "absolute_start", "absolute_end", "text", "token_ids", "nfe")
        return _public(self, "buffer_snapshot", (*base, "finished", *_DECODE_NUMBERS))


@dataclass
class ServingError(_Tagged):
    """A request failed; nothing follows for its `rid`.

    Attributes:
        param: the request field that caused it, where there is one.
    """

    rid: str
    message: str
    code: str = "engine_error"
    http_status: int = 500
    retryable: bool = False
    param: str | None = None
    generation: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A frame of `/generate`."""
        return _public(self, "error", ("message",))


ServingEvent: TypeAlias = ServingReply | ServingDelta | ServingBufferSnapshot | ServingError


@dataclass
class ServingBatch:
    """All events of one tick, in order."""

    events: list[ServingEvent]


@dataclass
class ServingHeartbeat:
    """Sent every second: that the backend lives, and its gauges.

    Attributes:
        ts: Unix time.
        step_seq: number of steps so far.
        step_running_s: how long the step in progress takes already; 0 when there is none.
        stats: gauges and counters by name, see docs/metrics.md.
    """

    ts: float
    step_seq: int = 0
    step_running_s: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass
class ServingAck:
    """The answer to an operation that generates nothing."""

    op_id: str
    ok: bool
    message: str = ""
    data: dict[str, Any] | None = None


#: Everything the backend may send.
ServingMessage: TypeAlias = ServingEvent | ServingBatch | ServingHeartbeat | ServingAck


# Maps of the wire.

# Fields of the base protocol that always travel; the others only when they are not the default.
_BASE_FIELDS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "generate": (
        ServingGenerate,
        ("rid", "input", "sampling_params", "stream", "stream_mode", "user", "created_time"),
    ),
    "abort": (ServingAbort, ("rid",)),
    "shutdown": (ServingShutdown, ()),
    "profile_start": (ServingProfileStart, ("profile_prefix",)),
    "profile_stop": (ServingProfileStop, ()),
    "flush_cache": (ServingFlushCache, ("op_id",)),
    "reply": (
        ServingReply,
        (
            *("rid", "text", "token_ids", "nfe", "finish_reason", "full_text", "full_token_ids"),
            *_DECODE_NUMBERS,
            "finished",
        ),
    ),
    "delta": (
        ServingDelta,
        ("rid", "token_offset", "text", "token_ids", "nfe", "finished", *_DECODE_NUMBERS),
    ),
    "buffer_snapshot": (
        ServingBufferSnapshot,
        (
            *("rid", "token_offset", "absolute_start", "absolute_end", "text", "token_ids"),
            *("nfe", "finished"),
            *_DECODE_NUMBERS,
        ),
    ),
    "error": (ServingError, ("rid", "message")),
    "batch": (ServingBatch, ("events",)),
    "heartbeat": (ServingHeartbeat, ("ts", "step_seq", "step_running_s", "stats")),
    "ack": (ServingAck, ("op_id", "ok", "message", "data")),
    "prompt": (PromptInput, ("prompt",)),
    "chat": (ChatInput, ("messages",)),
}
_COMMANDS = ("generate", "abort", "shutdown", "profile_start", "profile_stop", "flush_cache")
_EVENTS = ("reply", "delta", "buffer_snapshot", "error")
_MESSAGES = (*_EVENTS, "batch", "heartbeat", "ack")
_INPUTS = ("prompt", "chat")


_MAPS = WireMaps(_BASE_FIELDS)


def sampling_params_to_dict(params: SamplingParams) -> dict[str, Any]:
    """The flat map of the parameters; thresholds of the request are in `decoding`."""
    data: dict[str, Any] = {
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
        "max_nfe": params.max_nfe,
        "max_repetition_run": params.max_repetition_run,
        "ignore_eos": params.ignore_eos,
        "seed": params.seed,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "min_tokens": params.min_tokens,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "skip_special_tokens": params.skip_special_tokens,
        "logprobs": params.logprobs,
        "decoding": params.decoding,
    }
    if params.min_p is not None:
        data["min_p"] = params.min_p
    return data


_PARAM_NAMES = frozenset(item.name for item in dataclasses.fields(SamplingParams))


def sampling_params_from_dict(data: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a map; keys it does not know are ignored, missing ones are defaults.

    Raises:
        ValueError: a value is outside its range.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"sampling_params: expected a map, got {type(data).__name__}")
    arguments = {name: value for name, value in data.items() if name in _PARAM_NAMES}
    decoding = data.get("decoding") or {}
    if not isinstance(decoding, Mapping):
        raise ValueError(f"sampling_params: expected a map as decoding, got {decoding!r}")
    arguments.update({k: v for k, v in decoding.items() if k in DECODING_FIELDS})
    return SamplingParams(**arguments)


def serving_input_to_dict(value: ServingInput) -> dict[str, Any]:
    """The map of an input; TypeError for anything else."""
    return _MAPS.to_dict(value, _INPUTS, "serving_input")


def serving_input_from_dict(data: Mapping[str, Any]) -> ServingInput:
    """The input of a map.

    Raises:
        ValueError: its type is unknown, or its content is of another kind.
    """
    shape = _MAPS.shape_of(data, _INPUTS, "serving_input")
    arguments = shape.arguments(data, "serving_input")
    if shape.cls is PromptInput:
        prompt = arguments["prompt"]
        is_ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
        if not isinstance(prompt, str) and not is_ids:
            raise ValueError("serving_input: expected a text or token ids as prompt, got neither")
    elif not _is_messages(arguments["messages"]):
        raise ValueError("serving_input: expected messages with role and content, got none such")
    value: ServingInput = shape.cls(**arguments)
    return value


def _is_messages(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, Mapping)
        and isinstance(item.get("role"), str)
        and isinstance(item.get("content"), str)
        for item in value
    )


def serving_command_to_dict(command: ServingCommand) -> dict[str, Any]:
    """The map of a command; TypeError for anything else."""
    data = _MAPS.to_dict(command, _COMMANDS, "serving_command")
    if isinstance(command, ServingGenerate):
        data["input"] = serving_input_to_dict(command.input)
        data["sampling_params"] = sampling_params_to_dict(command.sampling_params)
    return data


# Fields of commands that the backend relies on. A command it cannot trust must not reach the tick.
_TEXT, _NUMBER, _FLAG = (str,), (int, float), (bool,)
_COMMAND_TYPES: dict[str, tuple[tuple[type, ...], bool]] = {  # by field: types, None allowed
    "rid": (_TEXT, False),
    "stream": (_FLAG, False),
    "stream_mode": (_TEXT, False),
    "user": (_TEXT, True),
    "created_time": (_NUMBER, True),
    "strict_max_tokens": (_FLAG, False),
    "denoise_detail": (_FLAG, False),
    "queue_timeout_s": (_NUMBER, True),
    "generation": ((int,), False),
    "mode": (_TEXT, False),
    "deadline_s": (_NUMBER, True),
    "profile_prefix": (_TEXT, True),
    "op_id": (_TEXT, True),
}


def _check_types(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name not in _COMMAND_TYPES:
            continue
        types, may_be_none = _COMMAND_TYPES[name]
        is_legal = type(value) in types or (value is None and may_be_none)
        if not is_legal or (name == "mode" and value not in ("abort", "drain")):
            raise ValueError(f"serving_command: expected a legal {name}, got {value!r}")


def serving_command_from_dict(data: Mapping[str, Any]) -> ServingCommand:
    """The command of a map.

    Raises:
        ProtocolVersionError: it is of a newer protocol.
        ValueError: its type is unknown or missing, or a required key is.
    """
    shape = _MAPS.shape_of(data, _COMMANDS, "serving_command")
    arguments = shape.arguments(data, "serving_command")
    _check_types(arguments)
    if shape.cls is ServingGenerate:
        arguments["input"] = serving_input_from_dict(arguments["input"])
        arguments["sampling_params"] = sampling_params_from_dict(arguments["sampling_params"])
    command: ServingCommand = shape.cls(**arguments)
    return command


def serving_event_to_dict(event: ServingMessage) -> dict[str, Any]:
    """The map of an event, batch, heartbeat or ack; TypeError for anything else."""
    data = _MAPS.to_dict(event, _MESSAGES, "serving_event")
    if isinstance(event, ServingBatch):
        data["events"] = [_MAPS.to_dict(item, _EVENTS, "serving_event") for item in event.events]
    return data


def serving_event_from_dict(data: Mapping[str, Any]) -> ServingMessage:
    """The event, batch, heartbeat or ack of a map.

    Raises:
        ProtocolVersionError: it is of a newer protocol.
        ValueError: its type is unknown or missing, or a required key is.
    """
    shape = _MAPS.shape_of(data, _MESSAGES, "serving_event")
    arguments = shape.arguments(data, "serving_event")
    if shape.cls is ServingBatch:
        arguments["events"] = [_event(item) for item in arguments["events"]]
    message: ServingMessage = shape.cls(**arguments)
    return message


def _event(data: Any) -> ServingEvent:
    shape = _MAPS.shape_of(data, _EVENTS, "serving_event")
    event: ServingEvent = shape.cls(**shape.arguments(data, "serving_event"))
    return event
