# SPDX-License-Identifier: Apache-2.0
"""What is known about one request when it has ended, and the times that follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RequestRecord"]


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds of a monotonic clock; those of the answer count from `sent_s`.

    Attributes:
        scheduled_s: when the arrival process wanted it, from the start of the run.
        sent_s: when its first byte was to be sent, from the start of the run.
        lag_s: how late the generator woke up for it; large values mean that the client is the
            bottleneck.
        chunk_times_s: arrival of each content chunk.
        chunk_chars: characters of each.
        chunk_tokens: tokens of each; None when nothing counted them.
        e2e_s: end of the answer, the terminator included.
        num_rejected: answers 429 and 503, whether or not they were retried.
    """

    request_id: int
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    lag_s: float = 0.0
    first_snapshot_s: float | None = None
    chunk_times_s: list[float] = field(default_factory=list)
    chunk_chars: list[int] = field(default_factory=list)
    chunk_tokens: list[int] | None = None
    e2e_s: float = 0.0
    status: int | None = None
    error_kind: str | None = None
    error: str | None = None
    num_rejected: int = 0
    num_retries: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    usage: Mapping[str, Any] | None = None

    @property
    def is_ok(self) -> bool:
        """It was answered to the end."""
        return self.error_kind is None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first content chunk; None for an empty answer."""
        return self.chunk_times_s[0] if self.chunk_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between content chunks."""
        times = self.chunk_times_s
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def first_chunk_tokens(self) -> float | None:
        """Tokens of the first chunk: counted, else its share of the characters."""
        if self.chunk_tokens:
            return self.chunk_tokens[0]
        num_chars = sum(self.chunk_chars)
        if self.completion_tokens is None or not num_chars:
            return None
        return self.completion_tokens * self.chunk_chars[0] / num_chars

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first chunk; None when everything came in one chunk."""
        first = self.first_chunk_tokens
        ttft = self.ttft_s
        if len(self.chunk_times_s) < 2 or first is None or ttft is None:
            return None
        rest = (self.completion_tokens or 0) - first
        return (self.e2e_s - ttft) / rest if rest > 0 else None

    def as_dict(self) -> dict[str, Any]:
        """A line of the records file."""
        return {
            "request_id": self.request_id,
            "ok": self.is_ok,
            "status": self.status,
            "error_kind": self.error_kind,
            "error": self.error,
            "num_rejected": self.num_rejected,
            "num_retries": self.num_retries,
            "scheduled_s": self.scheduled_s,
            "sent_s": self.sent_s,
            "lag_s": self.lag_s,
            "ttft_s": self.ttft_s,
            "first_snapshot_s": self.first_snapshot_s,
            "itl_s": self.gaps_s,
            "tpot_s": self.tpot_s,
            "e2e_s": self.e2e_s,
            "chunk_chars": self.chunk_chars,
            "chunk_tokens": self.chunk_tokens,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reason": self.finish_reason,
            "text": self.text,
            "usage": None if self.usage is None else dict(self.usage),
        }
