# SPDX-License-Identifier: Apache-2.0
"""Results of requests and of runs."""

from __future__ import annotations

import html
import reprlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from diffulex.checkpoint.detokenizer import robust_decode
from diffulex.engine.metrics import RequestMetrics, RunStats, ratio
from diffulex.log import format_duration, get_logger
from diffulex.wire.finish_reasons import openai_finish_reason

if TYPE_CHECKING:
    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.distributed.executor import TokenLogprob
    from diffulex.trace.trajectory import Trajectory

__all__ = [
    "BlockSnapshot",
    "DenoiseSnapshot",
    "GenerationOutputs",
    "RequestOutput",
    "StepOutput",
    "StreamEvent",
    "decode_token_ids_robust",
]

logger = get_logger(__name__)

# Shorter runs are timer noise (the run-level throughput divides by at least this).
_MIN_RUN_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    `text` and `token_ids` are the answer; `full_text` and `full_token_ids` have the prompt before
    it. `completion_reason` is the detailed reason, `error` the message of a failed request.

    Attributes:
        matched_stop: the stop text or stop id of the request that ended it.
        generated_ids: every position of its blocks, also after the end; mask ids where open.
        logprobs: one record per token of the answer, where they were asked for.
        trajectory: in which order it was written, where that was asked for.
    """

    req_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    full_text: str
    completion_reason: str
    metrics: RequestMetrics
    is_auto_max_nfe: bool = False
    error: str | None = None
    matched_stop: str | int | None = None
    generated_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    trajectory: Trajectory | None = None

    def _repr_html_(self) -> str:
        """What a notebook shows: the answer, and how it came about."""
        metrics = self.metrics
        facts = (
            f"{metrics.completion_tokens} tokens, {metrics.nfe} forwards,"
            f" {metrics.tpf or 0:.2f} tokens per forward, {self.completion_reason}"
        )
        return f"<pre>{html.escape(self.text)}</pre><small>{html.escape(facts)}</small>"

    @property
    def full_token_ids(self) -> tuple[int, ...]:
        """Prompt, then answer."""
        return self.prompt_token_ids + self.token_ids

    @property
    def finish_reason(self) -> str:
        """Reason in the vocabulary of the OpenAI API."""
        return openai_finish_reason(self.completion_reason)

    @property
    def is_truncated(self) -> bool:
        """A limit ended the answer."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """One valid block of the buffer after a step."""

    block_id: int
    start: int
    status: str
    token_ids: tuple[int, ...]
    newly_written: tuple[int, ...]  # block-relative positions decided in the last step
    confidences: tuple[float, ...]  # of the write; 0 at masks and prompt positions


@dataclass(frozen=True, slots=True)
class DenoiseSnapshot:
    """The buffer of a request after a step; mask ids stand at undecided positions."""

    req_id: int
    mask_token_id: int
    prompt_len: int
    token_ids: tuple[int, ...]  # answer so far that can no longer change
    blocks: tuple[BlockSnapshot, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one engine step did to one request."""

    req_id: int
    token_ids: tuple[int, ...] = ()  # appended, final
    new_tokens: int = 0
    is_finished: bool = False
    output: RequestOutput | None = None
    snapshot: DenoiseSnapshot | None = None
    text: str | None = None  # of token_ids, where the engine searches for stop texts; else None
    logprobs: tuple[TokenLogprob, ...] = ()  # of token_ids, where they were asked for


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One item of a stream: appended text, or a snapshot; the last one has `output`."""

    req_id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    snapshot: DenoiseSnapshot | None = None
    output: RequestOutput | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def is_finished(self) -> bool:
        """No event follows."""
        return self.output is not None


def _mean(values: Iterable[float | None]) -> float:
    """Arithmetic mean of the defined, non-zero values; 0 if there are none."""
    defined = [value for value in values if value]
    return statistics.fmean(defined) if defined else 0.0


def _percentile(values: Iterable[float | None], percent: float) -> float:
    """Linear interpolation between closest ranks of the defined values; 0 if there are none."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return 0.0
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


class GenerationOutputs(Sequence[RequestOutput]):
    """Finished requests in prompt order, with the metrics of the run."""

    def __init__(self, outputs: Iterable[RequestOutput], stats: RunStats) -> None:
        self._outputs = list(outputs)
        self.stats = stats

    @overload
    def __getitem__(self, index: int) -> RequestOutput: ...

    @overload
    def __getitem__(self, index: slice) -> list[RequestOutput]: ...

    def __getitem__(self, index: int | slice) -> RequestOutput | list[RequestOutput]:
        return self._outputs[index]

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return f"GenerationOutputs({reprlib.repr([output.text for output in self._outputs])})"

    def _repr_html_(self) -> str:
        """What a notebook shows: every answer."""
        return "<hr>".join(output._repr_html_() for output in self._outputs)

    @staticmethod
    def pooled(runs: Sequence[GenerationOutputs]) -> GenerationOutputs:
        """Several runs as one: totals are summed, means recomputed over all requests."""
        stats = RunStats()
        for run in runs:
            stats = stats.merged(run.stats)
        return GenerationOutputs((output for run in runs for output in run), stats)

    def request_metrics(self, index: int) -> RequestMetrics:
        """Metrics of one request."""
        return self._outputs[index].metrics

    def _metrics(self) -> list[RequestMetrics]:
        return [output.metrics for output in self._outputs]

    @property
    def total_tokens(self) -> int:
        """Completion tokens of all requests."""
        return sum(m.completion_tokens for m in self._metrics())

    @property
    def total_decided_tokens(self) -> int:
        """Decided tokens of all requests."""
        return sum(m.decided_tokens for m in self._metrics())

    @property
    def request_nfe(self) -> int:
        """Sum of the requests' forwards; exceeds the engine steps when batched."""
        return sum(m.nfe for m in self._metrics())

    @property
    def e2e_throughput_tok_s(self) -> float:
        """Completion tokens per second of engine time."""
        return self.total_tokens / max(self.stats.total_s, _MIN_RUN_SECONDS)

    @property
    def decode_throughput_tok_s(self) -> float:
        """Tokens decided in decode steps per second of decode steps."""
        decode_tokens = sum(m.decode_tokens for m in self._metrics())
        return ratio(decode_tokens, self.stats.decode_s) or 0.0

    @property
    def visible_decode_throughput_tok_s(self) -> float:
        """Visible tokens decided in decode steps per second of decode steps."""
        visible = sum(m.visible_decode_tokens for m in self._metrics())
        return ratio(visible, self.stats.decode_s) or 0.0

    @property
    def prefill_throughput_tok_s(self) -> float:
        """Rows of prefill steps per second of prefill steps."""
        return ratio(self.stats.prefill_tokens, self.stats.prefill_s) or 0.0

    @property
    def throughput(self) -> float:
        """Decided tokens per second of engine time."""
        return self.total_decided_tokens / max(self.stats.total_s, _MIN_RUN_SECONDS)

    @property
    def avg_e2e_tps(self) -> float:
        """Mean over requests of their end-to-end rate."""
        return _mean(m.e2e_tps for m in self._metrics())

    @property
    def avg_decode_tps(self) -> float:
        """Mean over requests of their decode rate."""
        return _mean(m.decode_tps for m in self._metrics())

    @property
    def tpf(self) -> float:
        """Completion tokens per request forward, prefill included, over all requests."""
        return ratio(self.total_tokens, self.request_nfe) or 0.0

    @property
    def decode_tpf_mean(self) -> float:
        """Mean over requests with decode steps of decided tokens per decode step."""
        defined = [m.decode_tpf for m in self._metrics() if m.decode_tpf is not None]
        return statistics.fmean(defined) if defined else 0.0

    @property
    def decode_tpf_aggregate(self) -> float:
        """Tokens decided in decode steps per decode step of all requests."""
        metrics = self._metrics()
        steps = sum(m.decode_steps for m in metrics)
        return ratio(sum(m.decode_tokens for m in metrics), steps) or 0.0

    @property
    def filler_ratio(self) -> float:
        """Share of decided tokens that no user sees."""
        decided = self.total_decided_tokens
        return 1 - self.total_tokens / decided if decided else 0.0

    @property
    def e2e_total_time_s(self) -> float:
        """Request-seconds: sum of the requests' own step times."""
        return sum(m.total_s for m in self._metrics())

    @property
    def ttft_s(self) -> float:
        """Mean time to the first decided token."""
        defined = [m.ttft_s for m in self._metrics() if m.ttft_s is not None]
        return statistics.fmean(defined) if defined else 0.0

    @property
    def tpot_s(self) -> float:
        """Mean time per further decided token."""
        defined = [m.tpot_s for m in self._metrics() if m.tpot_s is not None]
        return statistics.fmean(defined) if defined else 0.0

    @property
    def prefix_hit_ratio(self) -> float:
        """Cached prompt tokens over prompt tokens; at most 1, also after preemptions."""
        prompt = sum(m.prompt_tokens for m in self._metrics())
        return sum(m.cached_tokens for m in self._metrics()) / prompt if prompt else 0.0

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all requests."""
        return sum(m.num_preemptions for m in self._metrics())

    @property
    def completion_reasons(self) -> dict[str, int]:
        """How often each reason occurred."""
        counts: dict[str, int] = {}
        for output in self._outputs:
            counts[output.completion_reason] = counts.get(output.completion_reason, 0) + 1
        return counts

    def as_dict(self) -> dict[str, Any]:
        """Run-level numbers for JSON. `tpf` keeps its older meaning, the mean decode TPF."""
        metrics = self._metrics()
        numbers: dict[str, Any] = {
            "num_requests": len(self),
            "completion_reasons": self.completion_reasons,
            "total_tokens": self.total_tokens,
            "total_decided_tokens": self.total_decided_tokens,
            "total_nfe": self.stats.num_steps,
            "request_nfe": self.request_nfe,
            "total_time": self.stats.wall_s,
            "wall_time_s": self.stats.wall_s,
            "step_time_s": self.stats.total_s,
            "e2e_total_time_s": self.e2e_total_time_s,
            "prefill_time_s": self.stats.prefill_s,
            "decode_time_s": self.stats.decode_s,
            "mixed_time_s": 0.0,
            "tpf": self.decode_tpf_mean,
            "decode_tpf_mean": self.decode_tpf_mean,
            "decode_tpf_aggregate": self.decode_tpf_aggregate,
            "tpf_aggregate": self.tpf,
            "aggregate_tpf": self.tpf,
            "nfe_per_token": ratio(self.request_nfe, self.total_tokens) or 0.0,
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "e2e_throughput_tok_s": self.e2e_throughput_tok_s,
            "decode_throughput_tok_s": self.decode_throughput_tok_s,
            "visible_decode_throughput_tok_s": self.visible_decode_throughput_tok_s,
            "prefill_throughput_tok_s": self.prefill_throughput_tok_s,
            "throughput": self.throughput,
            "avg_e2e_tps": self.avg_e2e_tps,
            "avg_decode_tps": self.avg_decode_tps,
            "filler_ratio": self.filler_ratio,
            "prefix_hit_ratio": self.prefix_hit_ratio,
            "num_preemptions": self.num_preemptions,
            "peak_pages": self.stats.peak_pages,
            "num_graph_steps": self.stats.num_graph_steps,
            "num_graph_fallbacks": self.stats.num_graph_fallbacks,
            "num_graphs": self.stats.num_graphs,
            "time_semantics": "host_step_wall",
            "token_semantics": "engine_ids",
            "concurrency": self.stats.max_concurrency,
            "tp": 1,
            "dp": self.stats.num_replicas,
        }
        for percent in (50, 90, 99):
            numbers[f"ttft_s_p{percent}"] = _percentile((m.ttft_s for m in metrics), percent)
            numbers[f"tpot_s_p{percent}"] = _percentile((m.tpot_s for m in metrics), percent)
        return numbers

    def postfix(self) -> dict[str, str]:
        """Short numbers beside a progress bar."""
        return {
            "tpf": f"{self.tpf:.2f}",
            "dtps": f"{self.avg_decode_tps:.1f}",
            "e2eps": f"{self.avg_e2e_tps:.1f}",
        }

    def fast_postfix(self) -> dict[str, str]:
        """`postfix` from the run totals alone, without a pass over the requests."""
        total = max(self.stats.total_s, _MIN_RUN_SECONDS)
        return {"e2eps": f"{self.stats.committed_tokens / total:.1f}"}

    def to_benchmark_format(self) -> list[dict[str, Any]]:
        """One `{text, full_text, token_ids, nfe}` per request."""
        return [
            {
                "text": output.text,
                "full_text": output.full_text,
                "token_ids": list(output.token_ids),
                "nfe": output.metrics.nfe,
            }
            for output in self._outputs
        ]

    def convert_to_text(self, tokenizer: Tokenizer) -> list[str]:
        """Answers decoded with another tokenizer."""
        return [decode_token_ids_robust(tokenizer, output.token_ids) for output in self._outputs]

    def summary(self) -> str:
        """The block `log_summary` writes."""
        stats = self.stats
        reasons = ", ".join(f"{name} {n}" for name, n in sorted(self.completion_reasons.items()))
        lines = [
            f"Generation summary: {len(self)} requests ({reasons or 'none'})",
            f"  total tokens      {self.total_tokens} (decided {self.total_decided_tokens},"
            f" filler {self.filler_ratio:.1%})",
            f"  NFE               {stats.num_steps} engine steps, {self.request_nfe} request"
            " forwards",
            f"  TPF               {self.tpf:.2f} (decode: mean {self.decode_tpf_mean:.2f},"
            f" aggregate {self.decode_tpf_aggregate:.2f})",
            f"  total time        {stats.wall_s:.3f} s ({format_duration(stats.wall_s)}),"
            f" e2e {self.e2e_total_time_s:.3f} request-seconds",
            f"  TTFT / TPOT       {self.ttft_s * 1e3:.1f} ms / {self.tpot_s * 1e3:.2f} ms",
            f"  TPS               e2e {self.e2e_throughput_tok_s:.1f}, prefill"
            f" {self.prefill_throughput_tok_s:.1f}, decode {self.decode_throughput_tok_s:.1f}",
            f"  mean TPS          e2e {self.avg_e2e_tps:.1f}, decode {self.avg_decode_tps:.1f}",
            f"  KV pages          peak {stats.peak_pages} of {stats.num_pages}, prefix hits"
            f" {self.prefix_hit_ratio:.1%}, preemptions {self.num_preemptions}",
            f"  CUDA graphs       {stats.num_graphs}, {stats.num_graph_steps} steps with one,"
            f" {stats.num_graph_fallbacks} decode steps that none fitted",
        ]
        return "\n".join(lines)

    def log_summary(self) -> None:
        """Writes the summary block at INFO."""
        logger.info("%s", self.summary())


def decode_token_ids_robust(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Text of the ids; ids without a string count as empty."""
    return robust_decode(tokenizer)(token_ids)
