# SPDX-License-Identifier: Apache-2.0
"""What is known about one HTTP request when it ends: its log line and its metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from diffulex.log import get_logger, log_prompt
from diffulex.server.openai.usage import num_prompt_tokens, usage_of
from diffulex.wire.protocol import ServingReply

if TYPE_CHECKING:
    from starlette.types import Scope

    from diffulex.server.openai.generation import Generation

__all__ = ["RequestRecord", "record_of", "route_path"]

logger = get_logger(__name__)
_KEY = "diffulex.record"


@dataclass(slots=True)
class RequestRecord:
    """Filled by the route, read by the middleware.

    Attributes:
        status: of the response, or of the failure in the middle of a stream.
        first_snapshot_s: time from arrival to the first snapshot that was sent.
        reason: how the client's request ended where no reply did.
        prompt: as the client sent it.
    """

    route: str
    started: float = field(default_factory=time.monotonic)
    status: int = 500
    rid: str | None = None
    generation: Generation | None = None
    replies: list[ServingReply] = field(default_factory=list)
    first_snapshot_s: float | None = None
    reason: str | None = None
    prompt: Any = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.started

    def log(self, detail: str) -> None:
        """Writes the line of a generating request; `full`: and its prompt, as far as that is allowed."""
        if self.rid is None or detail == "none":
            return
        fields = self._fields()
        line = " ".join(f"{key}={value}" for key, value in fields.items())
        logger.info("%s", line, extra=fields)
        if detail == "full":
            log_prompt(logger, f"rid={self.rid}", lambda: self.prompt)

    def _fields(self) -> dict[str, Any]:
        usage = _usage(self.replies, self.generation)
        details = usage.get("prompt_tokens_details", {})
        reply = self.replies[0] if self.replies else None
        return {
            "rid": self.rid,
            "route": self.route,
            "status": self.status,
            "prompt_tokens": usage.get("prompt_tokens", self._num_prompt_tokens()),
            "cached_tokens": details.get("cached_tokens", 0),
            "completion_tokens": usage.get("completion_tokens", 0),
            "nfe": usage.get("nfe", 0),
            "tpf": f"{usage.get('tpf') or 0:.2f}",
            "queue_ms": _milliseconds(usage.get("queue_time_s")),
            "ttft_ms": _milliseconds(usage.get("ttft_s")),
            "e2e_ms": _milliseconds(self.elapsed_s),
            "finish_reason": self.reason if reply is None else reply.finish_reason,
        }

    def _num_prompt_tokens(self) -> int:
        """Tokens of the prompts, also of a request without an answer."""
        inputs = () if self.generation is None else self.generation.inputs
        return sum(map(num_prompt_tokens, inputs))


def _usage(replies: Sequence[ServingReply], generation: Generation | None) -> dict[str, Any]:
    if not replies or generation is None:
        return {}
    prompts = generation.inputs if len(replies) >= len(generation.inputs) else ()
    return usage_of(replies, prompts, num_copies=generation.num_copies)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"


def record_of(scope: Scope) -> RequestRecord:
    """The record of a request; a new one where no middleware made it."""
    record = scope.get(_KEY)
    if record is None:
        record = scope[_KEY] = RequestRecord(scope.get("path", ""))
    assert isinstance(record, RequestRecord)
    return record


def route_path(scope: Scope) -> str:
    """The path of a request without the prefix that a proxy put in front of it."""
    path, prefix = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path
