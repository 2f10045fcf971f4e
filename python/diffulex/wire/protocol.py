# SPDX-License-Identifier: Apache-2.0
"""What the HTTP process and the engine process say to each other about texts.

Commands go to the backend, events come back. Each is a dataclass and, on the wire, a map (see
`wire_maps`). What is the same for jobs of other kinds is in `messages`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from diffulex.config.sampling_params import DECODING_FIELDS, SamplingParams
from diffulex.wire.codec import JobCodec
from diffulex.wire.finish_reasons import openai_finish_reason
from diffulex.wire.messages import (
    JobCommand,
    JobEvent,
    ServingAbort,
    ServingAck,
    ServingBatch,
    ServingCommand,
    ServingControl,
    ServingError,
    ServingFlushCache,
    ServingHeartbeat,
    ServingMessage,
    ServingProfileStart,
    ServingProfileStop,
    ServingShutdown,
    public_map,
)
from diffulex.wire.wire_maps import PROTOCOL_VERSION, ProtocolVersionError, WireMaps

__all__ = [
    "PROTOCOL_VERSION",
    "STREAM_MODES",
    "TEXT_CODEC",
    "ChatInput",
    "JobCommand",
    "JobEvent",
    "PromptInput",
    "ProtocolVersionError",
    "RequestOptions",
    "ServingAbort",
    "ServingAck",
    "ServingBatch",
    "ServingBufferSnapshot",
    "ServingCommand",
    "ServingControl",
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


@dataclass(kw_only=True)
class RequestOptions:
    """Fields of a request that the engine side reads and nothing looks at on the way there.

    Bodies of HTTP requests have them and commands carry them because they are declared here: numbers,
    texts and flags with a default.

    Attributes:
        denoise_detail: snapshots carry `blocks` and `confidences`.
    """

    denoise_detail: bool = False


@dataclass
class ServingGenerate(RequestOptions, JobCommand):
    """Decode one prompt.

    Attributes:
        strict_max_tokens: reject a `max_tokens` that does not fit instead of clamping it.
    """

    rid: str
    input: ServingInput
    sampling_params: SamplingParams
    stream: bool = False
    stream_mode: StreamMode = "denoise"
    user: str | None = None
    created_time: float | None = None
    _: dataclasses.KW_ONLY
    strict_max_tokens: bool = False
    queue_timeout_s: float | None = None
    generation: int = 0

    @property
    def size(self) -> int:
        """Tokens of prompt and answer; a text that is not tokenised counts one per 4 characters."""
        value = self.input
        if isinstance(value, ChatInput):
            num_prompt = sum(len(item["content"]) for item in value.messages) // 4
        elif isinstance(value.prompt, str):
            num_prompt = len(value.prompt) // 4
        else:
            num_prompt = len(value.prompt)
        return num_prompt + self.sampling_params.max_tokens

    def sendable(self) -> ServingGenerate:
        """The command without lone surrogates, which UTF-8 cannot hold."""
        changes: dict[str, Any] = {}
        value = self.input
        if isinstance(value, PromptInput) and isinstance(value.prompt, str):
            changes["input"] = dataclasses.replace(value, prompt=_encodable(value.prompt))
        elif isinstance(value, ChatInput):
            messages = [{k: _encodable(v) for k, v in item.items()} for item in value.messages]
            changes["input"] = ChatInput(messages)
        stop = tuple(map(_encodable, self.sampling_params.stop))
        if stop != tuple(self.sampling_params.stop):
            changes["sampling_params"] = dataclasses.replace(self.sampling_params, stop=stop)
        if self.user is not None:
            changes["user"] = _encodable(self.user)
        return dataclasses.replace(self, **changes)

    def pack(self, data: dict[str, Any]) -> None:
        """Input and parameters travel as maps."""
        data["input"] = serving_input_to_dict(self.input)
        data["sampling_params"] = sampling_params_to_dict(self.sampling_params)

    @classmethod
    def unpack(cls, arguments: dict[str, Any]) -> None:
        """Undoes `pack`; ValueError for content of another kind."""
        arguments["input"] = serving_input_from_dict(arguments["input"])
        arguments["sampling_params"] = sampling_params_from_dict(arguments["sampling_params"])


def _encodable(text: str) -> str:
    """The text with lone surrogates replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text


# Events.


_DECODE_NUMBERS = ("engine_decode_time_s", "engine_decode_tokens", "engine_decode_tps")


@dataclass
class ServingReply(JobEvent):
    """The whole answer; nothing follows for its `rid`.

    Attributes:
        token_ids: the answer without end token, cut where its text is.
        full_token_ids: every generated token, also after the end of the answer.
        finish_reason: the engine's own reason, as in `finish_detail`; `openai_finish_reason` maps it.
        matched_stop: the stop string or stop token id that ended the answer.
        num_masked: positions that `max_nfe` left undecided.
        logprobs: one map per token: `token_id, token, bytes, logprob, step, confidence` and `top`,
            a list of `{token_id, token, bytes, logprob}`.
        trajectory: a line of a file of trajectories; None: it was not asked for.
    """

    ends_job: ClassVar[bool] = True

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
    trajectory: dict[str, Any] | None = None
    generation: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The body of `/generate`."""
        shown = public_map(
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
class ServingDelta(JobEvent):
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
        return public_map(self, "append", base)

    def merged(self, newer: Any) -> ServingDelta | None:
        """Both deltas in one."""
        if not isinstance(newer, ServingDelta):
            return None
        logprobs = None
        if self.logprobs is not None and newer.logprobs is not None:
            logprobs = self.logprobs + newer.logprobs
        return dataclasses.replace(
            newer,
            token_offset=self.token_offset,
            text=self.text + newer.text,
            token_ids=self.token_ids + newer.token_ids,
            logprobs=logprobs,
        )


@dataclass
class ServingBufferSnapshot(JobEvent):
    """The draft from `token_offset` on; it replaces what was known from there to the end.

    Attributes:
        absolute_start: position of the first token, prompt included.
        text: None when the frontend is to make it from the ids.
        committed: generated tokens, from the first on, that can never change again.
        mask_token_id: None for a canvas, which has no masks.
        blocks: `{id, start, end, state, masked}`, positions as `absolute_start`.
    """

    is_draft: ClassVar[bool] = True

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
        return public_map(self, "buffer_snapshot", (*base, "finished", *_DECODE_NUMBERS))

    @property
    def is_urgent(self) -> bool:
        """The last one must not wait for a newer one."""
        return self.finished

    def merged(self, newer: Any) -> ServingBufferSnapshot | None:
        """One snapshot that says what both say; None where their texts cannot be joined."""
        if not isinstance(newer, ServingBufferSnapshot):
            return None
        num_kept = newer.token_offset - self.token_offset
        if num_kept <= 0:
            return newer
        if self.text is not None or newer.text is not None:
            return None  # texts have no token boundaries
        confidences = None
        if self.confidences is not None and newer.confidences is not None:
            confidences = self.confidences[:num_kept] + newer.confidences
        blocks = None
        if self.blocks is not None and newer.blocks is not None:
            shown = {block["id"] for block in newer.blocks}
            blocks = [block for block in self.blocks if block["id"] not in shown] + newer.blocks
        return dataclasses.replace(
            newer,
            token_offset=self.token_offset,
            absolute_start=self.absolute_start,
            token_ids=self.token_ids[:num_kept] + newer.token_ids,
            confidences=confidences,
            blocks=blocks,
        )

    def completed(self, decode: Callable[[Sequence[int]], str] | None) -> None:
        """Makes the text that the backend left out."""
        if self.text is None and decode is not None:
            self.text = decode(self.token_ids)


ServingEvent: TypeAlias = ServingReply | ServingDelta | ServingBufferSnapshot | ServingError


# Maps of the wire.

# By the type of the map: the class, and the fields of the base protocol, which always travel.
_GENERATE = ("rid", "input", "sampling_params", "stream", "stream_mode", "user", "created_time")
_REPLY = ("rid", "text", "token_ids", "nfe", "finish_reason", "full_text", "full_token_ids")
_DELTA = ("rid", "token_offset", "text", "token_ids", "nfe", "finished")
_SNAPSHOT = (
    *("rid", "token_offset", "absolute_start", "absolute_end", "text", "token_ids", "nfe"),
    "finished",
)

#: The codec of generation commands and their events.
TEXT_CODEC = JobCodec(
    commands={"generate": (ServingGenerate, _GENERATE)},
    events={
        "reply": (ServingReply, (*_REPLY, *_DECODE_NUMBERS, "finished")),
        "delta": (ServingDelta, (*_DELTA, *_DECODE_NUMBERS)),
        "buffer_snapshot": (ServingBufferSnapshot, (*_SNAPSHOT, *_DECODE_NUMBERS)),
    },
)
_INPUTS = WireMaps({"prompt": (PromptInput, ("prompt",)), "chat": (ChatInput, ("messages",))})


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
    if params.return_trajectory != "none":
        data["return_trajectory"] = params.return_trajectory
    if params.template_token_ids:
        data["template_token_ids"] = list(params.template_token_ids)
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
    return _INPUTS.to_dict(value, _INPUTS.names, "serving_input")


def serving_input_from_dict(data: Mapping[str, Any]) -> ServingInput:
    """The input of a map.

    Raises:
        ValueError: its type is unknown, or its content is of another kind.
    """
    shape = _INPUTS.shape_of(data, _INPUTS.names, "serving_input")
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


serving_command_to_dict = TEXT_CODEC.command_to_dict
serving_command_from_dict = TEXT_CODEC.command_from_dict
serving_event_to_dict = TEXT_CODEC.event_to_dict
serving_event_from_dict = TEXT_CODEC.event_from_dict
