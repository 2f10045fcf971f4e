# SPDX-License-Identifier: Apache-2.0
"""``report.md`` and ``report.txt``: one run in a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffulex.bench.evaluate import aligned, markdown_table, percent
from diffulex.bench.report_command import compare_results, generate_report

__all__ = [
    "accuracy_rows",
    "bound_name",
    "compare_results",
    "generate_report",
    "report_markdown",
    "report_text",
]

_BOUND = " (bound)"

_ACCURACY_HEADER = ["task", "metric", "samples", "value", "95 %"]
_SHOWN = (
    ("samples", "total_samples"),
    ("completion tokens", "total_tokens"),
    ("mean tokens", "avg_tokens_per_sample"),
    ("mean forwards", "avg_nfe_per_sample"),
    ("wall time (s)", "total_time"),
    ("e2e time (request-s)", "e2e_total_time_s"),
    ("TTFT (s)", "ttft_s"),
    ("TPOT (s)", "tpot_s"),
    ("aggregate e2e tokens/s", "e2e_throughput_tok_s"),
    ("mean e2e tokens/s", "avg_e2e_tps"),
    ("aggregate decode tokens/s", "decode_throughput_tok_s"),
    ("mean decode tokens/s", "avg_decode_tps"),
    ("prefill tokens/s", "prefill_throughput_tok_s"),
    ("tpf", "tpf_aggregate"),
    ("decode tpf, mean", "decode_tpf_mean"),
    ("decode tpf, aggregate", "decode_tpf_aggregate"),
    ("filler", "filler_ratio"),
    ("concurrency", "concurrency"),
)


def bound_name(key: str) -> str:
    """``metric,filter`` of lm-eval as that of a metric whose value is a bound of it."""
    metric, comma, name = key.partition(",")
    if not comma:
        return key
    error = "_stderr" if metric.endswith("_stderr") else ""
    return f"{metric.removesuffix('_stderr')}{_BOUND}{error},{name}"


def accuracy_rows(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Header and one row per task and metric."""
    rows = [_ACCURACY_HEADER]
    for task, result in results.items():
        metrics = [key[: -len(",none")] for key in result if key.endswith(",none")]
        for metric in (name for name in metrics if not name.endswith("_stderr")):
            low, high = result.get(f"{metric}_wilson_95", (None, None))
            interval = "" if low is None else f"{100 * low:.1f}-{100 * high:.1f}"
            count = str(result.get("scored", result.get("samples", "")))
            value = result[f"{metric},none"]
            text = f"{value:.4g}" if metric.endswith(_BOUND) else percent(value)
            rows.append([task, metric, count, text, interval])
        if result.get("status") == "not_scored":
            rows.append([task, "not scored", str(result["samples"]), "", ""])
    return rows


def _number_rows(stats: Mapping[str, Any]) -> list[list[str]]:
    shown = [(label, stats[key]) for label, key in _SHOWN if stats.get(key) is not None]
    shown += [
        (f"likelihood: {key.replace('_', ' ')}", value)
        for key, value in stats.get("likelihood", {}).items()
    ]
    return [
        [label, f"{value:.4g}" if isinstance(value, float) else str(value)]
        for label, value in shown
    ]


def _setting_rows(manifest: Mapping[str, Any]) -> list[list[str]]:
    engine = manifest["config"]["engine"]
    facts = manifest.get("engine", {})
    return [
        ["model", str(facts.get("model_id") or engine["model_path"])],
        *([["endpoint", str(facts["endpoint"])]] if "endpoint" in facts else []),
        ["family", str(facts.get("family", engine["model_name"]))],
        ["strategy", str(facts.get("strategy", engine["decoding_strategy"]))],
        ["device", str(facts.get("device", ""))],
        ["tp, dp", f"{facts.get('tp', 1)}, {facts.get('dp', 1)}"],
        ["code sandbox", str(manifest.get("sandbox", "none"))],
        ["math backend", str(manifest.get("math_backend", ""))],
        ["version", str(manifest["version"])],
        ["ended", str(manifest["ended"])],
    ]


def _sections(
    manifest: Mapping[str, Any], stats: Mapping[str, Any], results: Mapping[str, Any]
) -> list[tuple[str, list[list[str]]]]:
    return [
        ("Configuration", [["setting", "value"], *_setting_rows(manifest)]),
        ("Accuracy", accuracy_rows(results)),
        ("Speed", [["quantity", "value"], *_number_rows(stats)]),
    ]


def report_markdown(
    manifest: Mapping[str, Any], stats: Mapping[str, Any], results: Mapping[str, Any]
) -> str:
    """The report with tables in Markdown."""
    lines = ["# Evaluation report", ""]
    for title, rows in _sections(manifest, stats, results):
        lines += [f"## {title}", "", *markdown_table(rows), ""]
    return "\n".join(lines)


def report_text(
    manifest: Mapping[str, Any], stats: Mapping[str, Any], results: Mapping[str, Any]
) -> str:
    """The report with aligned tables for a terminal."""
    parts = [f"{title}\n{aligned(rows)}" for title, rows in _sections(manifest, stats, results)]
    return "\n\n".join(parts) + "\n"
