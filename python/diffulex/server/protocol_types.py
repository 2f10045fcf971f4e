# SPDX-License-Identifier: Apache-2.0
"""The commands and events that travel between the HTTP process and the engine process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from diffulex.sampling_params import SamplingParams

__all__ = [
    "DECODE_NUMBERS",
    "STREAM_MODES",
    "ChatInput",
    "PromptInput",
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
]

StreamMode = Literal["block_append", "denoise", "both"]
STREAM_MODES: tuple[str, ...] = get_args(StreamMode)

_OPENAI_REASONS = {
    "eos_token_generated": "stop",
    "stop": "stop",
    "completed_without_reason": "stop",
    "unknown_postprocess_deactivate": "stop",
    "max_new_tokens_reached": "length",
    "max_model_len_reached": "length",
    "max_nfe_reached": "length",
    "max_repetition_run_reached": "length",
}


def openai_finish_reason(finish_detail: str | None) -> str:
    """`stop` or `length` for the engine's reason; what is delivered knows no other."""
    return _OPENAI_REASONS.get(finish_detail or "", "stop")


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


DECODE_NUMBERS = ("engine_decode_time_s", "engine_decode_tokens", "engine_decode_tps")


@dataclass
class ServingReply(_Tagged):
    """The whole answer; nothing follows for its `rid`.

    Attributes:
        token_ids: the answer without end token, cut where its text is.
        full_token_ids: every generated token, also behind the end of the answer.
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
                *DECODE_NUMBERS,
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
        base = ("token_offset", "text", "token_ids", "nfe", "finished", *DECODE_NUMBERS)
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
        return _public(self, "buffer_snapshot", (*base, "finished", *DECODE_NUMBERS))


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
