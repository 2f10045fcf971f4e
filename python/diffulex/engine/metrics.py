# SPDX-License-Identifier: Apache-2.0
"""Counts and times of requests and runs.

A step is one engine step, its duration the host wall time around it; the role of a request in a
step is prefill or decode as executed; decided tokens are positions that changed from mask to
token, completion tokens are the visible answer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex.checkpoint.detokenizer import Decode
    from diffulex.engine.answer_text import AnswerText
    from diffulex.trace.trajectory import TraceRecorder

__all__ = ["RequestMetrics", "RequestRecord", "RunStats", "ratio"]


def ratio(numerator: float, denominator: float) -> float | None:
    """The quotient, or None where the denominator is not positive."""
    return numerator / denominator if denominator > 0 else None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Counts and times of one request; rates are None where their denominator is zero.

    `cached_tokens` are the prompt tokens that the last admission found in the prefix cache. After a
    preemption the cache may hold decoded tokens as well; those do not count.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    decided_tokens: int = 0
    decode_tokens: int = 0
    visible_decode_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    num_preemptions: int = 0
    total_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float | None = None
    first_commit_s: float | None = None
    queue_s: float = 0.0
    new_tokens_per_step: tuple[int, ...] = ()
    is_decode_step: tuple[bool, ...] = ()

    @property
    def nfe(self) -> int:
        """Forwards the request took part in, prefill included."""
        return self.prefill_steps + self.decode_steps

    @property
    def tpf(self) -> float | None:
        """Completion tokens per forward."""
        return ratio(self.completion_tokens, self.nfe)

    @property
    def decode_tpf(self) -> float | None:
        """Decided tokens per decode step."""
        return ratio(self.decode_tokens, self.decode_steps)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per decided token after the first; None for at most one token."""
        if self.decided_tokens <= 1 or self.ttft_s is None:
            return None
        return (self.total_s - self.ttft_s) / (self.decided_tokens - 1)

    @property
    def e2e_tps(self) -> float | None:
        """Completion tokens per second of the request's own steps."""
        return ratio(self.completion_tokens, self.total_s)

    @property
    def decode_tps(self) -> float | None:
        """Decided tokens per second of the request's decode steps."""
        return ratio(self.decode_tokens, self.decode_s)


@dataclass(slots=True)
class RequestRecord:
    """What the engine accumulates about a running request; `metrics` closes it."""

    req_id: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    added_at: float
    token_ids: list[int] = field(default_factory=list)
    status: str = "WAITING"
    num_steps: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    decided_tokens: int = 0
    decode_tokens: int = 0
    last_new_tokens: int = 0
    total_s: float = 0.0
    decode_s: float = 0.0
    ttft_s: float | None = None
    first_commit_s: float | None = None
    queue_s: float | None = None
    steps: list[tuple[int, bool]] = field(default_factory=list)
    # Absolute positions decided in prefill steps: the few that visible decode tokens exclude.
    prefill_positions: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    special_stops: Mapping[int, str] = field(default_factory=dict)
    #: Text of ids, as the request wants it; None without a tokenizer.
    decode: Decode | None = None
    #: The text as far as it is final; None where only the whole answer's text is asked for.
    answer: AnswerText | None = None
    #: Course of the request; None where it is not asked for.
    trace: TraceRecorder | None = None
    #: Answer tokens in step outputs so far.
    num_delivered: int = 0
    #: Why the text cannot be made.
    error: str | None = None
    #: The request was ended although the scheduler would have gone on.
    is_cut: bool = False

    @property
    def is_over(self) -> bool:
        """A stop text, or a text that cannot be made, ended the answer before its tokens did."""
        is_matched = self.answer is not None and self.answer.matched_stop is not None
        return is_matched or self.error is not None

    @property
    def is_prefilling(self) -> bool:
        """Whether its last step was a prefill."""
        return bool(self.steps) and not self.steps[-1][1]

    @property
    def prefill_s(self) -> float:
        """Duration of its prefill steps."""
        return self.total_s - self.decode_s

    @property
    def prefill_tokens(self) -> int:
        """Tokens decided in them."""
        return self.decided_tokens - self.decode_tokens

    def start_step(self, now: float) -> None:
        """Ends the queueing time at the first step."""
        if self.queue_s is None:
            self.queue_s = now - self.added_at

    def add_step(
        self, seconds: float, is_decode: bool, new_tokens: int, appended: Sequence[int]
    ) -> None:
        """Counts one step of the request.

        Args:
            seconds: duration of the engine step.
            is_decode: role as executed.
            new_tokens: positions decided in this step.
            appended: tokens that became final.
        """
        self.num_steps += 1
        self.total_s += seconds
        self.decided_tokens += new_tokens
        self.last_new_tokens = new_tokens
        self.steps.append((new_tokens, is_decode))
        if is_decode:
            self.decode_steps += 1
            self.decode_tokens += new_tokens
            self.decode_s += seconds
        else:
            self.prefill_steps += 1
        if new_tokens > 0 and self.ttft_s is None:
            self.ttft_s = self.total_s
        if appended and self.first_commit_s is None:
            self.first_commit_s = self.total_s
        self.token_ids.extend(appended)

    def metrics(
        self, completion_tokens: int, cached_tokens: int, num_preemptions: int
    ) -> RequestMetrics:
        """The closed account of a finished request.

        Args:
            completion_tokens: length of the visible answer.
            cached_tokens: prefix hit of the last admission, possibly past the prompt.
            num_preemptions: how often the request lost its pages.
        """
        prompt = len(self.prompt_token_ids)
        end = prompt + completion_tokens
        in_prefill = sum(1 for position in self.prefill_positions if prompt <= position < end)
        return RequestMetrics(
            prompt_tokens=prompt,
            cached_tokens=min(cached_tokens, prompt),
            completion_tokens=completion_tokens,
            decided_tokens=self.decided_tokens,
            decode_tokens=self.decode_tokens,
            visible_decode_tokens=completion_tokens - in_prefill,
            prefill_steps=self.prefill_steps,
            decode_steps=self.decode_steps,
            num_preemptions=num_preemptions,
            total_s=self.total_s,
            decode_s=self.decode_s,
            ttft_s=self.ttft_s,
            first_commit_s=self.first_commit_s,
            queue_s=self.queue_s or 0.0,
            new_tokens_per_step=tuple(new for new, _ in self.steps),
            is_decode_step=tuple(is_decode for _, is_decode in self.steps),
        )


# Fields of RunStats that are levels, not totals.
_PEAKS = frozenset({"peak_pages", "num_pages", "num_graphs", "max_concurrency", "num_replicas"})


@dataclass(slots=True)
class RunStats:
    """Totals over distinct engine steps of one run.

    `num_graphs` CUDA graphs were captured by its end; `num_graph_steps` decode steps replayed one, and
    `num_graph_fallbacks` fitted none. `num_forwards` sums the requests of the steps.
    """

    num_steps: int = 0
    num_forwards: int = 0
    total_s: float = 0.0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decided_tokens: int = 0
    committed_tokens: int = 0
    peak_pages: int = 0
    num_pages: int = 0
    num_graph_steps: int = 0
    num_graph_fallbacks: int = 0
    num_graphs: int = 0
    max_concurrency: int = 0
    wall_s: float = 0.0
    num_replicas: int = 1

    def add_step(self, seconds: float, num_reqs: int, num_rows: int, num_prefill_rows: int) -> None:
        """Counts one engine step. Prompts and decoding requests that share one share its time by rows."""
        self.num_steps += 1
        self.num_forwards += num_reqs
        self.total_s += seconds
        self.max_concurrency = max(self.max_concurrency, num_reqs)
        prefill_s = seconds * num_prefill_rows / num_rows
        self.prefill_s += prefill_s
        self.decode_s += seconds - prefill_s
        self.prefill_tokens += num_prefill_rows

    def merged(self, other: RunStats) -> RunStats:
        """Totals of two runs together."""
        result = dataclasses.replace(self)
        result.add(other)
        return result

    def add(self, other: RunStats) -> None:
        """Counts another run as part of this one."""
        for name in RunStats.__dataclass_fields__:
            left, right = getattr(self, name), getattr(other, name)
            setattr(self, name, max(left, right) if name in _PEAKS else left + right)
