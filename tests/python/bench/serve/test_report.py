# SPDX-License-Identifier: Apache-2.0
"""Figures against values computed by hand from the definitions of docs/bench_serve.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from diffulex.bench.serve.command import ServeBenchmark
from diffulex.bench.serve.load import LoadRun
from diffulex.bench.serve.record import RequestRecord
from diffulex.bench.serve.report import (
    ReportSettings,
    ServeReport,
    pareto_table,
    percentile,
    summarize,
)
from diffulex.errors import ConfigError

_DOCS = Path(__file__).parents[4] / "docs" / "bench_serve.md"


def _record(
    request_id: int,
    times: list[float],
    chars: list[int],
    e2e: float,
    tokens: int | None,
    **fields: Any,
) -> RequestRecord:
    usage = None if tokens is None else {"prompt_tokens": 10, "completion_tokens": tokens}
    record = RequestRecord(request_id, chunk_times_s=times, chunk_chars=chars, e2e_s=e2e)
    record.prompt_tokens = None if tokens is None else 10
    record.completion_tokens = tokens
    record.usage = usage if usage is None else {**usage, **fields.pop("usage", {})}
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def _run() -> LoadRun:
    """Three answers (several chunks, counted chunks, one chunk), an empty one and two failures."""
    several = _record(0, [0.1, 0.3, 0.4], [10, 20, 10], 0.5, 40, finish_reason="stop")
    several.usage = {**(several.usage or {}), "nfe": 8, "dllm_decode_steps": 7, "decode_tps": 90.0}
    several.usage["dllm_decode_output_tokens"] = 42
    counted = _record(1, [0.2, 0.6], [1, 1], 0.8, 12, finish_reason="length")
    counted.chunk_tokens = [4, 8]
    counted.first_snapshot_s = 0.05
    counted.usage = {**(counted.usage or {}), "nfe": 5, "dllm_decode_steps": 4, "decode_tps": 30.0}
    counted.usage["dllm_decode_output_tokens"] = 13
    single = _record(2, [0.3], [5], 0.35, 5, finish_reason="stop")
    empty = _record(3, [], [], 0.15, 0, finish_reason="stop")
    rejected = RequestRecord(4, error_kind="http_429", error="full", num_rejected=3, num_retries=2)
    late = RequestRecord(5, error_kind="timeout", error="late", lag_s=0.004)
    return LoadRun([several, counted, single, empty, rejected, late], 2.0, 3)


def test_every_figure_follows_its_definition() -> None:
    goodput = {"ttft": 200.0, "tpot": 11.0}
    figures = summarize(_run(), ReportSettings(percentiles=(50,), goodput=goodput))
    assert (figures["completed"], figures["failed"]) == (4, 2)
    assert figures["errors"] == {"http_429": 1, "timeout": 1}
    assert (figures["rejections"], figures["retries"]) == (3, 2)
    assert figures["total_input_tokens"] == 40
    assert figures["total_output_tokens"] == 57
    assert figures["request_throughput"] == pytest.approx(4 / 2.0)
    assert figures["output_throughput"] == pytest.approx(57 / 2.0)
    assert figures["total_token_throughput"] == pytest.approx(97 / 2.0)
    assert figures["max_send_lag_ms"] == pytest.approx(4.0)
    assert figures["peak_concurrency"] == 3
    assert figures["token_semantics"] == "server_usage"
    assert figures["time_semantics"] == "client_wall"
    assert figures["finish_reasons"] == {"length": 1, "stop": 3}
    # TTFT 100, 200, 300; an empty answer has none.
    assert figures["mean_ttft_ms"] == pytest.approx(200.0)
    assert figures["std_ttft_ms"] == pytest.approx((20000 / 3) ** 0.5)
    # Gaps 200, 100 and 400.
    assert figures["mean_itl_ms"] == pytest.approx(700 / 3)
    assert figures["median_itl_ms"] == pytest.approx(200.0)
    # (500 - 100) / (40 - 10 tokens by characters) and (800 - 200) / (12 - 4 counted).
    assert figures["mean_tpot_ms"] == pytest.approx((400 / 30 + 600 / 8) / 2)
    assert figures["tpot_undefined"] == 2
    assert figures["mean_e2el_ms"] == pytest.approx((500 + 800 + 350 + 150) / 4)
    assert figures["p50_e2el_ms"] == pytest.approx(425.0)
    assert figures["mean_first_snapshot_ms"] == pytest.approx(50.0)
    assert figures["num_chunks"] == 6
    assert figures["chunks_per_request"] == pytest.approx(1.5)
    assert figures["tokens_per_chunk"] == pytest.approx(57 / 6)
    assert figures["chunk_token_ratio"] == pytest.approx(6 / 57)
    assert figures["chunk_token_semantics"] == "estimated_by_characters"
    assert (figures["single_chunk_answers"], figures["empty_answers"]) == (1, 1)
    assert figures["nfe"] == 13
    assert figures["nfe_per_request"] == pytest.approx(6.5)
    assert figures["tpf"] == pytest.approx((40 + 12) / 13)
    assert figures["decode_tpf"] == pytest.approx((42 + 13) / 11)
    assert figures["server_mean_decode_tps"] == pytest.approx(60.0)
    assert figures["server_mean_queue_time_s"] is None
    assert figures["tps_per_user"] == pytest.approx((57 / 4) / 0.45)


@pytest.mark.parametrize(
    ("limits", "num_good"),
    [
        ({"e2el": 1000.0}, 4),
        ({"e2el": 400.0}, 2),
        # The empty answer has no first token, so it misses any limit of it.
        ({"ttft": 200.0}, 2),
        # Times per token: 13.3, 75, and two answers that have none.
        ({"tpot": 20.0}, 3),
        ({"ttft": 1000.0, "tpot": 20.0, "e2el": 400.0}, 1),
    ],
)
def test_goodput_counts_answers_within_all_limits(limits: dict[str, float], num_good: int) -> None:
    figures = summarize(_run(), ReportSettings(goodput=limits))
    assert figures["request_goodput"] == pytest.approx(num_good / 2.0)


def test_without_usage_nothing_about_tokens_is_invented() -> None:
    run = LoadRun([_record(0, [0.1, 0.2], [3, 3], 0.3, None)], 1.0, 1)
    figures = summarize(run, ReportSettings())
    for key in ("total_output_tokens", "output_throughput", "tpf", "nfe", "token_semantics"):
        assert figures[key] is None
    assert figures["mean_tpot_ms"] is None
    assert figures["mean_itl_ms"] == pytest.approx(100.0)
    text = ServeReport({}, figures, (50, 90, 95, 99)).to_text()
    assert "the server reports no usage" in text


def test_tokens_counted_here_are_said_to_be() -> None:
    record = _record(0, [0.1], [3], 0.3, None)
    record.completion_tokens = 3
    figures = summarize(LoadRun([record], 1.0, 1), ReportSettings(is_retokenized=True))
    assert figures["token_semantics"] == "retokenized"
    other = _record(1, [0.1], [3], 0.3, 4)
    figures = summarize(LoadRun([record, other], 1.0, 1), ReportSettings(is_retokenized=True))
    assert figures["token_semantics"] == "mixed"


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0), (25, 1.75)]
)
def test_percentiles_interpolate(percent: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == pytest.approx(expected)


def test_blocks_replace_times_per_token_in_the_table() -> None:
    figures = summarize(_run(), ReportSettings())
    text = ServeReport({}, figures, (50, 90, 95, 99)).to_text()
    assert "block latency" in text
    assert "0.11 chunks per token" in text
    assert "TPOT" not in text
    single = _record(0, [0.1, 0.2, 0.3], [1, 1, 1], 0.4, 3)
    figures = summarize(LoadRun([single], 1.0, 1), ReportSettings())
    text = ServeReport({}, figures, (50, 90, 95, 99)).to_text()
    assert "TPOT" in text
    assert "block latency" not in text


def test_unknown_service_levels_and_percentiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="goodput: expected one of ttft, tpot, e2el, got 'itl'"):
        ReportSettings(goodput={"itl": 3.0})
    with pytest.raises(ConfigError, match=r"percentiles: expected values in \[0, 100\], got 101"):
        ReportSettings(percentiles=(101,))


def test_the_pareto_table_marks_what_no_other_run_beats() -> None:
    def report(concurrency: int, user: float, total: float) -> ServeReport:
        figures = {"tps_per_user": user, "output_throughput": total, "failed": 0}
        figures |= {"mean_ttft_ms": 1.0, "p99_e2el_ms": 2.0}
        return ServeReport({"max_concurrency": concurrency}, figures, (50, 99))

    lines = pareto_table(
        "max_concurrency", [report(1, 100, 100), report(4, 60, 240), report(8, 50, 200)]
    ).splitlines()
    assert "p99 end to end ms" in lines[0]
    assert [line.rstrip().endswith("*") for line in lines[1:]] == [True, True, False]


def test_the_document_lists_exactly_the_keys_of_a_result() -> None:
    figures = summarize(_run(), ReportSettings())
    report = ServeReport(ServeBenchmark().describe("m"), figures, (50, 90, 95, 99))
    documented: set[str] = set()
    statistics = ("mean", "median", "std", "p50", "p90", "p95", "p99")
    table = _DOCS.read_text("utf-8").partition("## Result")[2]
    for name in re.findall(r"^\| `([a-z0-9_<>]+)` \|", table, re.MULTILINE):
        if "<statistic>" in name:
            documented |= {name.replace("<statistic>", value) for value in statistics}
        else:
            documented.add(name)
    assert documented == set(report.as_dict())
