# SPDX-License-Identifier: Apache-2.0
"""Responses and stream frames of the two OpenAI routes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from diffulex.server.http.sse import DONE, sse
from diffulex.server.openai.generation import Generation
from diffulex.server.openai.logprob_format import chat_logprobs, completion_logprobs
from diffulex.server.openai.request_schema import ChatCompletionRequest
from diffulex.server.openai.usage import num_prompt_tokens, running_usage, usage_of
from diffulex.wire.finish_reasons import openai_finish_reason
from diffulex.wire.protocol import (
    PromptInput,
    ServingBufferSnapshot,
    ServingDelta,
    ServingError,
    ServingEvent,
    ServingReply,
    StreamMode,
)

__all__ = [
    "OpenAIFrames",
    "OpenAIRoute",
    "chat_delta_chunk",
    "chat_finish_chunk",
    "choice_details",
    "denoise_chat_event",
    "error_frame",
    "openai_response",
]

Json = dict[str, Any]

_PREFIX = {"chat": "chatcmpl-", "text": "cmpl-"}
_OBJECT = {"chat": "chat.completion", "text": "text_completion"}
_CHUNK = {"chat": "chat.completion.chunk", "text": "text_completion"}
_DENOISE = {
    "chat": "diffulex.chat.completion.denoise",
    "text": "diffulex.text_completion.denoise",
}


@dataclass(frozen=True, slots=True)
class OpenAIRoute:
    """What is the same in every part of one response.

    Attributes:
        num_top: alternatives per token that were asked for; None: no log-probabilities.
        echoes: text in front of each choice (`echo`), by choice; empty for none.
        has_dllm: usage tells what only a diffusion model has.
    """

    kind: Literal["chat", "text"]
    rid: str
    model: str
    created: int
    num_top: int | None = None
    echoes: Sequence[str] = ()
    has_dllm: bool = True

    def head(self, kind_object: str) -> Json:
        """The leading fields."""
        return {
            "id": _PREFIX[self.kind] + self.rid,
            "object": kind_object,
            "created": self.created,
            "model": self.model,
        }

    def echo(self, index: int) -> str:
        """Text in front of a choice."""
        return self.echoes[index] if self.echoes else ""

    def choice(self, index: int, reply: ServingReply) -> Json:
        """A finished choice of a response in one piece."""
        text = self.echo(index) + reply.text
        choice: Json = {"index": index}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = self.logprobs(reply.logprobs, len(self.echo(index)))
        choice["finish_reason"] = openai_finish_reason(_detail(reply))
        choice["diffulex"] = choice_details(reply)
        return choice

    def logprobs(self, records: Any, offset: int) -> Json | None:
        """`logprobs` of a choice, if they were asked for; `offset` is that of the first token."""
        if self.num_top is None:
            return None
        if self.kind == "chat":
            return chat_logprobs(records)
        return completion_logprobs(records, num_top=self.num_top, offset=offset)

    def delta(self, index: int, text: str, *, is_first: bool, logprobs: Any = None) -> Json:
        """A choice of a chunk with text."""
        choice: Json = {"index": index}
        if self.kind == "chat":
            choice["delta"] = _role(is_first) | {"content": text}
        else:
            choice["text"] = text
        if logprobs is not None or self.kind == "text":
            choice["logprobs"] = logprobs
        choice["finish_reason"] = None
        return choice

    def finish(self, index: int, reply: ServingReply, *, is_first: bool) -> Json:
        """The choice of the chunk that ends it."""
        choice: Json = {"index": index}
        if self.kind == "chat":
            choice["delta"] = _role(is_first)
        else:
            choice |= {"text": "", "logprobs": None}
        choice["finish_reason"] = openai_finish_reason(_detail(reply))
        choice["diffulex"] = choice_details(reply)
        return choice

    def denoise(self, event: ServingEvent, index: int | None = None) -> Json:
        """A frame with the event itself; without choices ordinary clients skip it."""
        frame = event.to_dict() | self.head(_DENOISE[self.kind]) | {"choices": []}
        if isinstance(event, ServingReply):
            frame["event"] = "final"
            frame.pop("trajectory", None)  # it is in the choice
        if index is not None:
            frame["index"] = index
        return frame


def _role(is_first: bool) -> Json:
    return {"role": "assistant"} if is_first else {}


def _detail(reply: ServingReply) -> str | None:
    return reply.finish_detail or reply.finish_reason


def choice_details(reply: ServingReply) -> Json:
    """What only a diffusion model has to say about an answer."""
    details: Json = {
        "finish_detail": _detail(reply),
        "nfe": reply.nfe,
        "num_masked": reply.num_masked or 0,
    }
    for name in ("matched_stop", "seed"):
        value = getattr(reply, name)
        if value is not None:
            details[name] = value
    if reply.trajectory is not None:
        details["trajectory"] = reply.trajectory
    return details


def openai_response(
    route: OpenAIRoute, generation: Generation, replies: Sequence[ServingReply], elapsed_s: float
) -> Json:
    """The body of a response in one piece."""
    choices = [
        route.choice(index, reply)
        for number, reply in enumerate(replies)
        for index in generation.choice_indices(number)
    ]
    usage = usage_of(
        replies,
        generation.inputs,
        num_copies=generation.num_copies,
        has_dllm=route.has_dllm,
        elapsed_s=elapsed_s,
    )
    return route.head(_OBJECT[route.kind]) | {"choices": choices, "usage": usage}


def error_frame(event: ServingError) -> Json:
    """The frame of a failure; a plain engine error keeps its number for older clients."""
    code: int | str = event.http_status
    if event.code not in ("engine_error", "service_unavailable"):
        code = event.code
    return {"error": {"message": event.message, "type": "server_error", "code": code}}


@dataclass(slots=True)
class _Sent:
    """What one choice has sent, and the records of tokens whose text is still to come."""

    num_chars: int = 0
    has_text: bool = False
    records: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class OpenAIFrames:
    """Turns the events of a generation into the frames of a stream.

    Args:
        mode: `block_append` and `both` send chunks of committed text and a finish chunk; `denoise`
            and `both` send the snapshots.
        has_usage: one more chunk with the usage at the end.
        has_running_usage: every chunk has the usage so far.
    """

    terminator: ClassVar[bytes] = DONE

    route: OpenAIRoute
    generation: Generation
    mode: StreamMode
    has_usage: bool = False
    has_running_usage: bool = False
    _replies: dict[int, ServingReply] = field(default_factory=dict)
    _num_tokens: int = 0
    _sent: dict[int, _Sent] = field(default_factory=dict)

    def frames(self, number: int, event: ServingEvent) -> bytes:
        """The frames for an event of command `number`; may be empty."""
        indices = self.generation.choice_indices(number)
        if isinstance(event, ServingError):
            return sse(error_frame(event))
        if isinstance(event, ServingDelta):
            self._num_tokens += len(event.token_ids) * len(indices)
            return b"".join(self._delta(index, event) for index in indices)
        if isinstance(event, ServingBufferSnapshot):
            shown = indices if self.generation.num_choices > 1 else (None,)
            return b"".join(sse(self.route.denoise(event, index)) for index in shown)
        self._replies[number] = event
        return b"".join(self._final(index, event) for index in indices)

    def end(self, elapsed_s: float) -> bytes:
        """The frames after the last reply."""
        # In `denoise` the usage is in the final frame.
        if not self.has_usage or self.mode == "denoise":
            return b""
        chunk = self.route.head(_CHUNK[self.route.kind])
        return sse(chunk | {"choices": [], "usage": self._usage(elapsed_s)})

    def _usage(self, elapsed_s: float | None = None) -> Json:
        return usage_of(
            [self._replies[number] for number in sorted(self._replies)],
            self.generation.inputs,
            num_copies=self.generation.num_copies,
            has_dllm=self.route.has_dllm,
            elapsed_s=elapsed_s,
        )

    def _chunk(self, choice: Json) -> bytes:
        chunk = self.route.head(_CHUNK[self.route.kind]) | {"choices": [choice]}
        if self.has_running_usage:
            prompt = sum(num_prompt_tokens(item) for item in self.generation.inputs)
            chunk["usage"] = running_usage(prompt, self._num_tokens)
        elif self.has_usage:
            chunk["usage"] = None
        return sse(chunk)

    def _delta(self, index: int, event: ServingDelta) -> bytes:
        if self.mode == "denoise":
            return b""
        # Special tokens have records but no text, and chunks without text are not sent.
        self._sent.setdefault(index, _Sent()).records.extend(event.logprobs or ())
        return self._text(index, event.text) if event.text else b""

    def _text(self, index: int, text: str) -> bytes:
        sent = self._sent.setdefault(index, _Sent())
        echo = "" if sent.has_text else self.route.echo(index)
        offset = sent.num_chars + len(echo)
        logprobs = self.route.logprobs(sent.records, offset)
        sent.records = []
        prefix = b"" if sent.has_text else self._role(index)
        choice = self.route.delta(index, echo + text, is_first=False, logprobs=logprobs)
        sent.has_text = True
        sent.num_chars = offset + len(text)
        return prefix + self._chunk(choice)

    def _role(self, index: int) -> bytes:
        """The chunk that clients expect first. It goes out with the first text, so that
        clients do not take it for a first token."""
        if self.route.kind != "chat":
            return b""
        choice = self.route.delta(index, "", is_first=True)
        if self.route.num_top is not None:
            choice["logprobs"] = None
        return self._chunk(choice)

    def _final(self, index: int, reply: ServingReply) -> bytes:
        if self.mode == "denoise":
            frame = self.route.denoise(reply)
            frame["choices"] = [self._final_choice(index, reply)]
            if len(self._replies) == len(self.generation.commands):
                frame["usage"] = self._usage()
            return sse(frame)
        sent = self._sent.setdefault(index, _Sent())
        prefix = b""
        if not sent.has_text and self.route.echo(index):
            prefix = self._text(index, "")
        elif not sent.has_text:
            prefix = self._role(index)
        choice = self.route.finish(index, reply, is_first=False)
        if sent.records:
            choice["logprobs"] = self.route.logprobs(sent.records, sent.num_chars)
        return prefix + self._chunk(choice)

    def _final_choice(self, index: int, reply: ServingReply) -> Json:
        echo = self.route.echo(index)
        logprobs = self.route.logprobs(reply.logprobs, len(echo))
        choice = self.route.delta(index, echo + reply.text, is_first=True, logprobs=logprobs)
        choice["finish_reason"] = openai_finish_reason(_detail(reply))
        choice["diffulex"] = choice_details(reply)
        return choice


# The frames of a single choice, for programs that make their own streams.


def _chat_route(event: ServingEvent, request: ChatCompletionRequest, model_id: str) -> OpenAIRoute:
    num_top = (request.top_logprobs or 0) if request.logprobs else None
    return OpenAIRoute(
        "chat", event.rid, request.model or model_id, int(time.time()), num_top=num_top
    )


def chat_delta_chunk(event: ServingDelta, request: ChatCompletionRequest, model_id: str) -> Json:
    """The chunk for newly committed text; the first of an answer has the role."""
    route = _chat_route(event, request, model_id)
    logprobs = route.logprobs(event.logprobs, 0)
    choice = route.delta(0, event.text, is_first=event.token_offset == 0, logprobs=logprobs)
    return route.head(_CHUNK["chat"]) | {"choices": [choice]}


def chat_finish_chunk(event: ServingReply, request: ChatCompletionRequest, model_id: str) -> Json:
    """The chunk that ends an answer."""
    route = _chat_route(event, request, model_id)
    choice = route.finish(0, event, is_first=not event.token_ids)
    return route.head(_CHUNK["chat"]) | {"choices": [choice]}


def denoise_chat_event(
    event: ServingDelta | ServingBufferSnapshot | ServingReply,
    request: ChatCompletionRequest,
    model_id: str,
) -> Json:
    """The frame of an event in a `denoise` stream; the last one has the whole text."""
    route = _chat_route(event, request, model_id)
    frame = route.denoise(event)
    if isinstance(event, ServingReply):
        logprobs = route.logprobs(event.logprobs, 0)
        choice = route.delta(0, event.text, is_first=True, logprobs=logprobs)
        choice["finish_reason"] = openai_finish_reason(_detail(event))
        frame["choices"] = [choice]
        frame["usage"] = usage_of([event], [PromptInput("")])
    return frame
