# SPDX-License-Identifier: Apache-2.0
"""What the HTTP process and the engine process say to each other.

Commands go to the backend, events come back. Each is a dataclass and, on the wire, a map with a
`type` and the fields of the class. Fields beyond the base protocol travel only when they are set,
so that a peer of the base protocol reads what it knows and nothing is lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from diffulex.sampling_params import DECODING_FIELDS, SamplingParams
from diffulex.server.protocol_types import (
    DECODE_NUMBERS,
    STREAM_MODES,
    ChatInput,
    PromptInput,
    ServingAbort,
    ServingAck,
    ServingBatch,
    ServingBufferSnapshot,
    ServingCommand,
    ServingDelta,
    ServingError,
    ServingEvent,
    ServingFlushCache,
    ServingGenerate,
    ServingHeartbeat,
    ServingInput,
    ServingMessage,
    ServingProfileStart,
    ServingProfileStop,
    ServingReply,
    ServingShutdown,
    StreamMode,
    openai_finish_reason,
)

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

#: Version of the maps; a map without `v` is of version 1.
PROTOCOL_VERSION = 1


class ProtocolVersionError(ValueError):
    """A map says that it is of a newer version than this side reads."""


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
            *DECODE_NUMBERS,
            "finished",
        ),
    ),
    "delta": (
        ServingDelta,
        ("rid", "token_offset", "text", "token_ids", "nfe", "finished", *DECODE_NUMBERS),
    ),
    "buffer_snapshot": (
        ServingBufferSnapshot,
        (
            *("rid", "token_offset", "absolute_start", "absolute_end", "text", "token_ids"),
            *("nfe", "finished"),
            *DECODE_NUMBERS,
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


class _Shape:
    """How one class travels: computed once, since every step encodes and decodes."""

    def __init__(self, name: str, cls: type[Any], base: tuple[str, ...]) -> None:
        self.name = name
        self.cls = cls
        self.base = base
        fields = dataclasses.fields(cls)
        self.names = tuple(item.name for item in fields)
        self.extra = tuple((item.name, _default(item)) for item in fields if item.name not in base)
        self.required = tuple(item.name for item in fields if _default(item) is dataclasses.MISSING)


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


_SHAPES = {name: _Shape(name, cls, base) for name, (cls, base) in _BASE_FIELDS.items()}
_BY_CLASS = {shape.cls: shape for shape in _SHAPES.values()}


def _to_dict(value: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
    shape = _BY_CLASS.get(type(value))
    if shape is None or shape.name not in names:
        raise TypeError(f"{where}: expected one of {', '.join(names)}, got {type(value).__name__}")
    data: dict[str, Any] = {"type": shape.name}
    for name in shape.base:
        data[name] = getattr(value, name)
    for name, default in shape.extra:
        item = getattr(value, name)
        if item != default:
            data[name] = item
    return data


def _shape_of(data: Any, names: tuple[str, ...], where: str) -> _Shape:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected a map, got {type(data).__name__}")
    version = data.get("v", 1)
    if not isinstance(version, int) or version > PROTOCOL_VERSION:
        raise ProtocolVersionError(
            f"{where}: expected protocol version <= {PROTOCOL_VERSION}, got {version!r}"
        )
    name = data.get("type")
    if not isinstance(name, str) or name not in names:
        raise ValueError(f"{where}: expected a type of {', '.join(names)}, got {name!r}")
    return _SHAPES[name]


def _arguments(data: Mapping[str, Any], shape: _Shape, where: str) -> dict[str, Any]:
    """Keyword arguments of the class; what it does not know is ignored."""
    for name in shape.required:
        if name not in data:
            raise ValueError(f"{where}: expected a {name} in {shape.name}, got none")
    return {name: data[name] for name in shape.names if name in data}


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
    return _to_dict(value, _INPUTS, "serving_input")


def serving_input_from_dict(data: Mapping[str, Any]) -> ServingInput:
    """The input of a map.

    Raises:
        ValueError: its type is unknown, or its content is of another kind.
    """
    shape = _shape_of(data, _INPUTS, "serving_input")
    arguments = _arguments(data, shape, "serving_input")
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
    data = _to_dict(command, _COMMANDS, "serving_command")
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
    shape = _shape_of(data, _COMMANDS, "serving_command")
    arguments = _arguments(data, shape, "serving_command")
    _check_types(arguments)
    if shape.cls is ServingGenerate:
        arguments["input"] = serving_input_from_dict(arguments["input"])
        arguments["sampling_params"] = sampling_params_from_dict(arguments["sampling_params"])
    command: ServingCommand = shape.cls(**arguments)
    return command


def serving_event_to_dict(event: ServingMessage) -> dict[str, Any]:
    """The map of an event, batch, heartbeat or ack; TypeError for anything else."""
    data = _to_dict(event, _MESSAGES, "serving_event")
    if isinstance(event, ServingBatch):
        data["events"] = [_to_dict(item, _EVENTS, "serving_event") for item in event.events]
    return data


def serving_event_from_dict(data: Mapping[str, Any]) -> ServingMessage:
    """The event, batch, heartbeat or ack of a map.

    Raises:
        ProtocolVersionError: it is of a newer protocol.
        ValueError: its type is unknown or missing, or a required key is.
    """
    shape = _shape_of(data, _MESSAGES, "serving_event")
    arguments = _arguments(data, shape, "serving_event")
    if shape.cls is ServingBatch:
        arguments["events"] = [_event(item) for item in arguments["events"]]
    message: ServingMessage = shape.cls(**arguments)
    return message


def _event(data: Any) -> ServingEvent:
    shape = _shape_of(data, _EVENTS, "serving_event")
    event: ServingEvent = shape.cls(**_arguments(data, shape, "serving_event"))
    return event
