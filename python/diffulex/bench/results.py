# SPDX-License-Identifier: Apache-2.0
"""From the records of a run to its numbers: accuracy per task, and speed over all of it."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from diffulex.bench.evaluate import wilson_interval
from diffulex.bench.manifest import utc_now
from diffulex.engine.metrics import RequestMetrics, RunStats, ratio
from diffulex.engine.output import GenerationOutputs, RequestOutput

__all__ = ["NOT_SCORABLE", "metrics_record", "run_stats", "task_results"]

#: How the reason of an answer begins whose score could not be computed.
NOT_SCORABLE = "cannot score"
#: Lists with an entry per step are not kept.
_NOT_KEPT = ("new_tokens_per_step", "is_decode_step")
#: Totals that have other names here.
_RENAMED = ("total_nfe", "num_requests")


def metrics_record(metrics: RequestMetrics) -> dict[str, Any]:
    """The counts and times of a request, for JSON, and the rates that follow from them."""
    counts = {
        item.name: getattr(metrics, item.name)
        for item in dataclasses.fields(metrics)
        if item.name not in _NOT_KEPT
    }
    rates = ("nfe", "tpf", "decode_tpf", "tpot_s", "e2e_tps", "decode_tps")
    return {**counts, **{name: getattr(metrics, name) for name in rates}}


def _output(record: Mapping[str, Any]) -> RequestOutput:
    """A request as far as its numbers go."""
    names = [item.name for item in dataclasses.fields(RequestMetrics)]
    counts = {name: record["metrics"][name] for name in names if name not in _NOT_KEPT}
    return RequestOutput(
        req_id=0,
        prompt_token_ids=(),
        token_ids=(),
        text=record["text"],
        full_text=record["text"],
        completion_reason=record["reason"],
        metrics=RequestMetrics(**counts),
    )


def _generation(
    records: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]]
) -> GenerationOutputs:
    total = RunStats()
    for segment in segments:
        total = total.merged(RunStats(**segment["stats"]))
    return GenerationOutputs((_output(record) for record in records if not record["error"]), total)


def run_stats(
    records: Sequence[Mapping[str, Any]],
    segments: Sequence[Mapping[str, Any]],
    last: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """``diffulex_stats.json``: totals over every call, means over every request.

    Args:
        records: the samples of the run.
        segments: totals of each call of the engine, as ``{"stats": {...}}``.
        last: the samples of the last call.
    """
    result = _generation(records, segments)
    numbers = {key: value for key, value in result.as_dict().items() if key not in _RENAMED}
    count = len(result)
    latest = result if last is None else _generation(last, ())
    return {
        "total_samples": count,
        "total_nfe": result.request_nfe,
        "engine_steps": result.stats.num_steps,
        "avg_tokens_per_sample": ratio(result.total_tokens, count) or 0.0,
        "avg_nfe_per_sample": ratio(result.request_nfe, count) or 0.0,
        "avg_time_per_sample": ratio(result.stats.wall_s, count) or 0.0,
        "last_batch_tpf": latest.decode_tpf_mean,
        "failed_requests": sum(bool(record["error"]) for record in records),
        **numbers,
        "timestamp": utc_now(),
    }


def _mean_score(records: Sequence[Mapping[str, Any]], metric: str) -> float:
    return statistics.fmean(record["scores"].get(metric, 0.0) for record in records)


def task_results(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracy of one task in the keys of lm-eval; a task without scores has its status alone.

    A failed request is an empty answer, and an answer that could not be scored counts as 0.
    The interval is Wilson's, of all answers; with several repeats of the run the mean and standard
    deviation over them are there too.
    """
    scored = [record for record in records if record["scores"] is not None]
    invalid = sum(record["score_reason"] == "invalid_item" for record in records)
    result: dict[str, Any] = {"samples": len(records), "scored": len(scored)}
    if invalid:
        result["invalid_items"] = invalid
    errors = sum((record["score_reason"] or "").startswith(NOT_SCORABLE) for record in records)
    if errors:
        result["score_errors"] = errors
    leaks = sum(bool(record.get("mask_leak")) for record in records)
    if leaks:
        result["mask_leaks"] = leaks
    if not scored:
        return {**result, "status": "not_scored"}
    runs = sorted({record["run"] for record in scored})
    metrics = dict.fromkeys(name for record in scored for name in record["scores"])
    for metric in metrics or ("exact_match",):
        mean = _mean_score(scored, metric)
        count = len(scored)
        spread = mean * (1 - mean) / (count - 1) if count > 1 else 0.0
        result[f"{metric},none"] = mean
        result[f"{metric}_stderr,none"] = math.sqrt(max(spread, 0.0))
        result[f"{metric}_wilson_95"] = list(wilson_interval(round(mean * count), count))
        if len(runs) > 1:
            means = [_mean_score([r for r in scored if r["run"] == run], metric) for run in runs]
            result[f"{metric}_repeats"] = {
                "values": means,
                "mean": statistics.fmean(means),
                "std": statistics.stdev(means),
            }
    return result
