# SPDX-License-Identifier: Apache-2.0
"""Grading and reports of the evaluator."""

from __future__ import annotations

import dataclasses
import json

import pytest

from diffulex import CheckpointError, ConfigError, Diffulex, SamplingParams
from diffulex.bench.evaluate import (
    EvaluationReport,
    Score,
    Setting,
    grade,
    run_evaluation,
    run_problems,
    wilson_interval,
)
from diffulex.bench.word_problems import Problem
from diffulex.engine.output import GenerationOutputs, RequestMetrics, RequestOutput, RunStats


def output(req_id: int, text: str, tokens: int = 10, prefill: int = 1, decode: int = 4):
    metrics = RequestMetrics(
        completion_tokens=tokens,
        decided_tokens=tokens + 2,
        decode_tokens=tokens,
        prefill_steps=prefill,
        decode_steps=decode,
        total_s=0.5,
        decode_s=0.4,
    )
    return RequestOutput(req_id, (1, 2), (3,) * tokens, text, text, "eos_token_generated", metrics)


PROBLEMS = [
    Problem(1, "q0", 5, "#### 5"),
    Problem(2, "q1", -7, "#### -7"),
    Problem(1, "q2", 12, "#### 12"),
    Problem(2, "q3", 3, "#### 3"),
]
TEXTS = ["2+3=5\n#### 5", "#### -7\n", "#### 120", "the answer is 3"]
SETTING = {"buffer_size": 4, "accept_threshold": 0.95, "block_size": 8}


@pytest.fixture
def run():
    results = [output(i, text) for i, text in enumerate(TEXTS)]
    stats = RunStats(num_steps=9, total_s=2.0, decode_s=1.6, max_concurrency=4)
    return grade(SETTING, PROBLEMS, GenerationOutputs(results, stats))


def test_only_the_exact_integer_counts(run):
    assert run.total.num_correct == 2
    assert run.wrong_ids == (2, 3)
    assert [(s.group, s.num_problems, s.num_correct) for s in run.levels] == [
        ("1", 2, 1),
        ("2", 2, 1),
    ]


def test_metrics_follow_their_definitions(run):
    assert run.total.tpf == pytest.approx(40 / 20)
    assert run.metrics["total_tokens"] == 40
    assert (run.metrics["engine_steps"], run.metrics["request_nfe"]) == (9, 20)
    assert "total_nfe" not in run.metrics
    assert run.metrics["tpf_aggregate"] == pytest.approx(2.0)
    assert run.metrics["decode_tpf_aggregate"] == pytest.approx(40 / 16)
    assert run.metrics["e2e_throughput_tok_s"] == pytest.approx(20.0)
    assert run.metrics["decode_throughput_tok_s"] == pytest.approx(25.0)


def test_report_has_the_keys_of_every_run_level_metric(run):
    assert {
        "e2e_throughput_tok_s", "decode_throughput_tok_s", "prefill_throughput_tok_s",
        "throughput", "avg_e2e_tps", "avg_decode_tps", "tpf", "aggregate_tpf", "ttft_s", "tpot_s",
        "e2e_total_time_s", "total_time", "wall_time_s", "nfe_per_token", "decode_tpf_mean",
        "decode_tpf_aggregate", "tpf_aggregate", "visible_decode_throughput_tok_s",
        "filler_ratio",
    } <= run.metrics.keys()  # fmt: skip
    assert run.metrics["tpf"] == run.metrics["decode_tpf_mean"]


def test_outputs_must_match_the_problems(run):
    with pytest.raises(ValueError, match="zip"):
        grade(SETTING, PROBLEMS, GenerationOutputs([output(0, "")], RunStats()))


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    # Published values of the score interval (Newcombe 1998, table I, method 3).
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval(correct, total, low, high):
    interval = wilson_interval(correct, total)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


@pytest.mark.parametrize(("correct", "total"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_interval_rejects_nonsense(correct, total):
    with pytest.raises(ValueError, match="wilson_interval"):
        wilson_interval(correct, total)


def test_report_forms_agree(run, tmp_path):
    report = EvaluationReport({"command": "diffulex eval", "torch": "2"}, (run,))
    report.write(tmp_path / "r.json")
    report.write(tmp_path / "r.md")
    content = json.loads((tmp_path / "r.json").read_text())
    total = content["runs"][0]["total"]
    assert total["accuracy"] == 0.5
    assert total["wilson_95"] == pytest.approx(list(wilson_interval(2, 4)))
    document = (tmp_path / "r.md").read_text()
    assert "diffulex eval" in document
    assert (
        "| 4 | 0.95 | 50.0 % | 15.0-85.0 | 40 | 20 | 2.000 | 2.500 | 20.0 | 25.0 | 2.00 |"
        in document
    )
    assert "| 2 | 2 | 1 | 50.0 % |" in document
    shown = report.to_text().splitlines()
    assert shown[0].split() == [
        *("buffer", "accept", "accuracy", "95", "%", "TPF", "NFE", "tok/s", "decode", "seconds")
    ]
    assert shown[1].split() == [
        *("4", "0.95", "50.0", "%", "15.0-85.0", "2.000", "20", "20.0", "25.0", "2.00")
    ]
    assert "buffer 4, accept threshold 0.95" in shown


def test_the_table_fits_a_terminal(run):
    """Also where every problem of a benchmark is right and an engine is fast."""
    level = dataclasses.replace(run.total, num_problems=1319, num_correct=1319)
    metrics = {
        **run.metrics, "tpf_aggregate": 12.345, "request_nfe": 123456, "engine_time_s": 12345.67,
        "e2e_throughput_tok_s": 12345.6, "decode_throughput_tok_s": 23456.7,
    }  # fmt: skip
    wide = dataclasses.replace(run, total=level, metrics=metrics)
    assert max(map(len, EvaluationReport({}, (run, wide)).to_text().splitlines())) <= 80


def test_no_report_file_is_left_by_a_check(tmp_path):
    with pytest.raises(ConfigError, match="accept_threshold"):
        run_evaluation(
            {"model": "demo"},
            settings=[Setting(1, 0.5), Setting(1, 1.5)],
            sampling_params=SamplingParams(),
            outputs=[str(tmp_path / "r.json")],
        )
    with pytest.raises(CheckpointError):
        run_evaluation(
            {"model": str(tmp_path / "none")},
            settings=[Setting()],
            sampling_params=SamplingParams(),
            outputs=[str(tmp_path / "r.json")],
        )
    assert list(tmp_path.iterdir()) == []


def test_score_without_forwards():
    assert Score("x", 1, 0, 0, 0).tpf == 0.0


def test_a_run_is_recorded_where_the_engine_has_a_profiler(tmp_path):
    config = {"torch_profiler_dir": str(tmp_path)}
    with Diffulex("demo", device="cpu", num_pages=64, profiler_config=config) as engine:
        run_problems(engine, PROBLEMS[:1], SamplingParams(max_tokens=4))
        assert not engine.is_profiling
    (trace,) = tmp_path.glob("eval.engine.trace.json")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
