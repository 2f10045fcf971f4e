# SPDX-License-Identifier: Apache-2.0
"""Figures of a whole run, as JSON and as a table. docs/bench_serve.md describes every key."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffulex.bench.evaluate import aligned
from diffulex.bench.serve.load import LoadRun
from diffulex.bench.serve.record import RequestRecord
from diffulex.errors import ConfigError

__all__ = [
    "GOODPUT_METRICS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "ReportSettings",
    "ServeReport",
    "pareto_table",
    "percentile",
    "summarize",
]

SCHEMA = "diffulex.bench.serve"
SCHEMA_VERSION = 1
#: Metrics a service level can be set for.
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
_METRICS = ("ttft", "tpot", "itl", "e2el", "first_snapshot")
#: With fewer chunks per token, times per token say nothing about what a reader sees.
_MIN_CHUNK_TOKEN_RATIO = 0.8
#: Counters of the server's usage object that are averaged over requests.
_SERVER_FIELDS = (
    "decode_tps",
    "e2e_tps",
    "queue_time_s",
    "ttft_s",
    "prefill_time_s",
    "decode_time_s",
    "e2e_time_s",
)


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """How to summarize.

    Attributes:
        goodput: most milliseconds by metric of `GOODPUT_METRICS`; empty reports no goodput.
        is_retokenized: a local tokenizer counted where the server did not.
    """

    percentiles: Sequence[float] = (50, 90, 95, 99)
    goodput: Mapping[str, float] | None = None
    max_concurrency: int | None = None
    is_retokenized: bool = False

    def __post_init__(self) -> None:
        for name in self.goodput or ():
            if name not in GOODPUT_METRICS:
                known = ", ".join(GOODPUT_METRICS)
                raise ConfigError(f"goodput: expected one of {known}, got {name!r}")
        for value in self.percentiles:
            if not 0 <= value <= 100:
                raise ConfigError(f"percentiles: expected values in [0, 100], got {value}")


def percentile(values: Sequence[float], percent: float) -> float:
    """Of a sorted, non-empty sequence, with linear interpolation between neighbours."""
    position = (len(values) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def _spread(values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Statistics in milliseconds by their names; None without values."""
    names = ["mean", "median", "std", *(f"p{value:g}" for value in percentiles)]
    if not values_s:
        return dict.fromkeys(names)
    ordered = sorted(value * 1000 for value in values_s)
    numbers = [statistics.fmean(ordered), statistics.median(ordered), statistics.pstdev(ordered)]
    numbers += [percentile(ordered, value) for value in percentiles]
    return dict(zip(names, numbers, strict=True))


def _values(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Seconds of every metric, of the requests that have it."""
    return {
        "ttft": [value for record in records if (value := record.ttft_s) is not None],
        "tpot": [value for record in records if (value := record.tpot_s) is not None],
        "itl": [gap for record in records for gap in record.gaps_s],
        "e2el": [record.e2e_s for record in records],
        "first_snapshot": [
            value for record in records if (value := record.first_snapshot_s) is not None
        ],
    }


def _is_good(record: RequestRecord, goodput: Mapping[str, float]) -> bool:
    """A metric that an answer does not have cannot be missed, but an answer without text can."""
    times = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2el": record.e2e_s}
    if times["ttft"] is None and "ttft" in goodput:
        return False
    limits = ((times[name], limit) for name, limit in goodput.items())
    return all(value is None or value * 1000 <= limit for value, limit in limits)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rate(amount: float | None, duration_s: float) -> float | None:
    return None if amount is None or duration_s <= 0 else amount / duration_s


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _server_figures(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Tokens per forward and times that the server's usage object reports."""
    usages = [record.usage for record in records if record.usage is not None]

    def numbers(key: str) -> list[float]:
        return [usage[key] for usage in usages if isinstance(usage.get(key), int | float)]

    with_nfe = [usage for usage in usages if type(usage.get("nfe")) is int]
    nfe = sum(usage["nfe"] for usage in with_nfe)
    tokens = sum(usage.get("completion_tokens") or 0 for usage in with_nfe)
    decode_steps = sum(numbers("dllm_decode_steps"))
    means = {
        f"server_mean_{key}": statistics.fmean(values) if (values := numbers(key)) else None
        for key in _SERVER_FIELDS
    }
    return {
        "nfe": nfe if with_nfe else None,
        "nfe_per_request": _ratio(nfe, len(with_nfe)),
        "tpf": _ratio(tokens, nfe),
        "decode_tpf": _ratio(sum(numbers("dllm_decode_output_tokens")), decode_steps),
        **means,
    }


def _token_semantics(records: Sequence[RequestRecord], is_retokenized: bool) -> str | None:
    """Who counted: `server_usage`, `retokenized`, `mixed`, or None if neither did."""
    counted = [record for record in records if record.completion_tokens is not None]
    if not counted:
        return None
    num_by_server = sum(
        (record.usage or {}).get("completion_tokens") is not None for record in counted
    )
    if num_by_server == len(counted):
        return "server_usage"
    return "mixed" if num_by_server or not is_retokenized else "retokenized"


def _chunk_figures(records: Sequence[RequestRecord], num_tokens: int | None) -> dict[str, Any]:
    num_chunks = sum(len(record.chunk_times_s) for record in records)
    with_text = [record for record in records if record.chunk_times_s]
    is_counted = bool(with_text) and all(record.chunk_tokens is not None for record in with_text)
    return {
        "num_chunks": num_chunks,
        "chunks_per_request": _ratio(num_chunks, len(records)),
        "tokens_per_chunk": _ratio(num_tokens, num_chunks),
        "chunk_token_ratio": _ratio(num_chunks, num_tokens),
        "chunk_token_semantics": "server_usage" if is_counted else "estimated_by_characters",
        "single_chunk_answers": sum(len(record.chunk_times_s) == 1 for record in with_text),
        "empty_answers": len(records) - len(with_text),
        "tpot_undefined": sum(record.tpot_s is None for record in records),
    }


def summarize(run: LoadRun, settings: ReportSettings) -> dict[str, Any]:
    """All figures of a run. A figure that nothing was measured for is None."""
    done = [record for record in run.records if record.is_ok]
    failed = [record for record in run.records if not record.is_ok]
    output_tokens = _sum([record.completion_tokens for record in done])
    input_tokens = _sum([record.prompt_tokens for record in done])
    all_tokens = _sum([output_tokens, input_tokens])
    figures: dict[str, Any] = {
        "duration": run.duration_s,
        "completed": len(done),
        "failed": len(failed),
        "errors": dict(sorted(Counter(record.error_kind for record in failed).items())),
        "rejections": sum(record.num_rejected for record in run.records),
        "retries": sum(record.num_retries for record in run.records),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _rate(len(done), run.duration_s),
        "request_goodput": None,
        "output_throughput": _rate(output_tokens, run.duration_s),
        "total_token_throughput": _rate(all_tokens, run.duration_s),
        "max_concurrency": settings.max_concurrency,
        "peak_concurrency": run.peak_concurrency,
        "max_send_lag_ms": max((r.lag_s for r in run.records), default=0.0) * 1000,
        "time_semantics": "client_wall",
        "token_semantics": _token_semantics(done, settings.is_retokenized),
        "finish_reasons": dict(sorted(Counter(str(r.finish_reason) for r in done).items())),
    }
    if settings.goodput:
        num_good = sum(_is_good(record, settings.goodput) for record in done)
        figures["request_goodput"] = _rate(num_good, run.duration_s)
    for metric, values in _values(done).items():
        for name, number in _spread(values, settings.percentiles).items():
            figures[f"{name}_{metric}_ms"] = number
    figures.update(_chunk_figures(done, output_tokens))
    figures.update(_server_figures(done))
    mean_e2e_ms = figures["mean_e2el_ms"]
    mean_tokens = _ratio(output_tokens, len(done))
    figures["tps_per_user"] = _ratio(mean_tokens, mean_e2e_ms and mean_e2e_ms / 1000)
    return figures


@dataclass(frozen=True, slots=True)
class ServeReport:
    """One run."""

    #: What was asked for: endpoint, data set, load. Without secrets.
    settings: Mapping[str, Any]
    figures: Mapping[str, Any]
    percentiles: Sequence[float]

    def as_dict(self) -> dict[str, Any]:
        """The JSON result."""
        head = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
        return {**head, **self.settings, **self.figures}

    def to_text(self) -> str:
        """An aligned table for a terminal."""
        rows = [[name, _shown(self.figures[key]) + unit] for name, key, unit in _SUMMARY]
        for kind, count in self.figures["errors"].items():
            rows.append([f"  failed: {kind}", str(count)])
        width = max(len(row[0]) for row in rows)
        blocks = ["\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)]
        blocks.append(self._times())
        blocks += self._notes()
        return "\n\n".join(blocks)

    def _times(self) -> str:
        """Chunk-wise answers show times between blocks instead of times per token."""
        names = ["mean", "median", "std", *(f"p{value:g}" for value in self.percentiles)]
        titles = {"ttft": "TTFT", "e2el": "end to end"}
        if self.figures["mean_first_snapshot_ms"] is not None:
            titles["first_snapshot"] = "first snapshot"
        if self._is_chunked:
            titles["itl"] = "block latency"
        else:
            titles |= {"tpot": "TPOT", "itl": "ITL"}
        rows = [["ms", *names]]
        for metric, title in titles.items():
            rows.append([title, *(_shown(self.figures[f"{name}_{metric}_ms"]) for name in names)])
        return aligned(rows)

    @property
    def _is_chunked(self) -> bool:
        ratio = self.figures["chunk_token_ratio"]
        return ratio is not None and ratio < _MIN_CHUNK_TOKEN_RATIO

    def _notes(self) -> list[str]:
        figures = self.figures
        notes = []
        if self._is_chunked:
            notes.append(
                f"note: {figures['chunk_token_ratio']:.2f} chunks per token: text comes in blocks, so "
                "times per token mean nothing; block latency is the time between chunks"
            )
        if figures["token_semantics"] is None and figures["completed"]:
            notes.append("note: the server reports no usage; give --tokenizer to count tokens")
        if figures["token_semantics"] in ("retokenized", "mixed"):
            notes.append("note: tokens were counted with a local tokenizer where usage is missing")
        if figures["single_chunk_answers"]:
            count = figures["single_chunk_answers"]
            notes.append(f"note: {count} answers came in one chunk and have no block latency")
        return ["\n".join(notes)] if notes else []


_SUMMARY = (
    ("completed requests", "completed", ""),
    ("failed requests", "failed", ""),
    ("rejections (429, 503)", "rejections", ""),
    ("duration", "duration", " s"),
    ("peak concurrency", "peak_concurrency", ""),
    ("input tokens", "total_input_tokens", ""),
    ("output tokens", "total_output_tokens", ""),
    ("requests/s", "request_throughput", ""),
    ("good requests/s", "request_goodput", ""),
    ("output tokens/s", "output_throughput", ""),
    ("all tokens/s", "total_token_throughput", ""),
    ("output tokens/s per user", "tps_per_user", ""),
    ("chunks per answer", "chunks_per_request", ""),
    ("tokens per chunk", "tokens_per_chunk", ""),
    ("tokens per forward (TPF)", "tpf", ""),
    ("decode TPF", "decode_tpf", ""),
    ("forwards per answer", "nfe_per_request", ""),
    ("latest sending", "max_send_lag_ms", " ms"),
)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def pareto_table(swept: str, reports: Sequence[ServeReport]) -> str:
    """Speed of one user against speed of all; a star marks runs that no other run beats in both."""
    points = [
        (report.figures["tps_per_user"] or 0.0, report.figures["output_throughput"] or 0.0)
        for report in reports
    ]
    rows = [[swept, "tokens/s per user", "tokens/s", "TTFT ms", "p99 end to end ms", "failed", ""]]
    for report, point in zip(reports, points, strict=True):
        is_beaten = any(
            other != point and other[0] >= point[0] and other[1] >= point[1] for other in points
        )
        figures = report.figures
        last = f"p{max(report.percentiles):g}"
        rows[0][4] = f"{last} end to end ms"
        cells = [*point, figures["mean_ttft_ms"], figures[f"{last}_e2el_ms"], figures["failed"]]
        value = str(report.as_dict()[swept])
        rows.append([value, *(_shown(cell) for cell in cells), "" if is_beaten else "*"])
    return aligned(rows)
