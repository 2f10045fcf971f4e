# SPDX-License-Identifier: Apache-2.0
"""The response object of `/v1/responses` and the events of its stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from diffulex.server.http.sse import sse
from diffulex.server.openai.generation import Generation
from diffulex.server.openai.logprob_format import chat_logprobs
from diffulex.server.openai.openai_format import choice_details
from diffulex.server.openai.responses_schema import ResponsesRequest
from diffulex.server.openai.usage import usage_of
from diffulex.wire.protocol import (
    ServingBufferSnapshot,
    ServingDelta,
    ServingError,
    ServingEvent,
    ServingReply,
    StreamMode,
    openai_finish_reason,
)

__all__ = ["RESPONSE_PREFIX", "ResponseFrames", "ResponseObject"]

Json = dict[str, Any]

RESPONSE_PREFIX = "resp_"
# Places of the only part of the only item.
_ITEM: Json = {"output_index": 0}
_PART: Json = {"output_index": 0, "content_index": 0}


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """Makes the object of one response in each of its states.

    Attributes:
        created: Unix time in seconds.
        has_dllm: usage tells what only a diffusion model has.
    """

    request: ResponsesRequest
    generation: Generation
    model: str
    created: int
    has_dllm: bool = True

    @property
    def id(self) -> str:
        """Id that the client sees."""
        return RESPONSE_PREFIX + self.generation.rid

    @property
    def item_id(self) -> str:
        """Id of the message."""
        return "msg_" + self.generation.rid

    def started(self) -> Json:
        """The response before the first token."""
        return self._object("in_progress", [])

    def failed(self, error: ServingError) -> Json:
        """The response that an error ended."""
        # Of the API's own codes; the server's is more precise.
        failure = {"code": "server_error", "message": error.message, "type": error.code}
        return self._object("failed", []) | {"error": failure}

    def finished(self, reply: ServingReply, elapsed_s: float | None) -> Json:
        """The response with its answer."""
        status = _status(reply)
        body = self._object(status, [self.message(status, [self.part(reply.text, reply.logprobs)])])
        if status == "incomplete":
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        usage = usage_of(
            [reply], self.generation.inputs, has_dllm=self.has_dllm, elapsed_s=elapsed_s
        )
        return body | {"usage": _usage(usage), "diffulex": choice_details(reply)}

    def message(self, status: str, content: list[Json]) -> Json:
        """The item of the output."""
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def part(self, text: str, records: Any = None) -> Json:
        """The part of the message."""
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self.logprobs(records),
        }

    def logprobs(self, records: Any) -> list[Json]:
        """Log-probabilities of tokens; empty where none were asked for."""
        if self.request.logprobs is None or not records:
            return []
        content: list[Json] = (chat_logprobs(records) or {})["content"]
        return content

    def _object(self, status: str, output: list[Json]) -> Json:
        request = self.request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }


def _status(reply: ServingReply) -> str:
    reason = openai_finish_reason(reply.finish_detail or reply.finish_reason)
    return "completed" if reason == "stop" else "incomplete"


def _usage(usage: Mapping[str, Any]) -> Json:
    """The counts by the names of this API, and what a diffusion model adds."""
    renamed = ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")
    details = usage["prompt_tokens_details"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": details["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        **{key: value for key, value in usage.items() if key not in renamed},
    }


@dataclass(slots=True)
class ResponseFrames:
    """Turns the events of a generation into the events of the Responses API.

    Order: response.created, response.in_progress, response.output_item.added,
    response.content_part.added, response.output_text.delta (any number),
    response.output_text.done, response.content_part.done, response.output_item.done, and
    response.completed or response.incomplete; response.failed may take the place of everything
    after response.in_progress. Snapshots come in between as diffulex.response.denoise.

    Args:
        mode: `block_append` and `both` send the text as it is committed, `denoise` whole at the
            end; `denoise` and `both` send the snapshots.
    """

    response: ResponseObject
    mode: StreamMode
    #: Streams of this API end with their last event.
    terminator: ClassVar[bytes] = b""
    _num_sent: int = 0
    _num_chars: int = 0
    _is_open: bool = False
    _records: list[Any] = field(default_factory=list)
    _reply: ServingReply | None = None

    def frames(self, number: int, event: ServingEvent) -> bytes:
        """The frames for an event; may be empty."""
        frames = self._start() if self._num_sent == 0 else b""
        if isinstance(event, ServingError):
            return frames + self._event("response.failed", response=self.response.failed(event))
        if isinstance(event, ServingDelta):
            # Special tokens have records but no text, and deltas without text are not sent.
            self._records.extend(event.logprobs or ())
            return frames + (self._text(event.text) if event.text else b"")
        if isinstance(event, ServingBufferSnapshot):
            return frames + self._snapshot(event)
        self._reply = event
        return frames + self._finish(event)

    def end(self, elapsed_s: float) -> bytes:
        """The event that ends the response."""
        assert self._reply is not None
        response = self.response.finished(self._reply, elapsed_s)
        return self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_sent, **fields}
        self._num_sent += 1
        return sse(data, event=kind)

    def _start(self) -> bytes:
        response = self.response.started()
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def _open(self) -> bytes:
        """Opens item and part before the first text."""
        if self._is_open:
            return b""
        self._is_open = True
        response = self.response
        item = response.message("in_progress", [])
        return self._event("response.output_item.added", **_ITEM, item=item) + self._event(
            "response.content_part.added",
            item_id=response.item_id,
            **_PART,
            part=response.part(""),
        )

    def _text(self, text: str) -> bytes:
        logprobs, self._records = self.response.logprobs(self._records), []
        self._num_chars += len(text)
        return self._open() + self._event(
            "response.output_text.delta",
            item_id=self.response.item_id,
            **_PART,
            delta=text,
            logprobs=logprobs,
        )

    def _snapshot(self, event: ServingBufferSnapshot) -> bytes:
        kind, response = "diffulex.response.denoise", self.response
        fields = event.to_dict() | {"id": response.id, "item_id": response.item_id}
        return self._event(kind, **fields, **_PART)

    def _finish(self, reply: ServingReply) -> bytes:
        response = self.response
        frames = self._open()
        if rest := reply.text[self._num_chars :]:
            if self.mode == "denoise":
                self._records = list(reply.logprobs or ())
            frames += self._text(rest)
        part = response.part(reply.text, reply.logprobs)
        place = {"item_id": response.item_id, **_PART}
        done = {"text": reply.text, "logprobs": part["logprobs"]}
        frames += self._event("response.output_text.done", **place, **done)
        frames += self._event("response.content_part.done", **place, part=part)
        item = response.message(_status(reply), [part])
        return frames + self._event("response.output_item.done", **_ITEM, item=item)
