# SPDX-License-Identifier: Apache-2.0
"""Reports of finished runs: tables, pages, and the functions of older programs."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from diffulex.bench.__main__ import main
from diffulex.bench.report import compare_results, generate_report

pytest.importorskip("matplotlib", reason="plots need matplotlib")

COLUMNS = [
    "model_path", "model_name", "decoding_strategy", "dataset", "num_samples", "total_tokens",
    "avg_tokens_per_sample", "avg_nfe", "e2e_total_time_s", "ttft_s", "tpot_s",
    "e2e_throughput_tok_s", "prefill_throughput_tok_s", "decode_throughput_tok_s", "accuracy",
    "timestamp",
]  # fmt: skip
PUBLISHED = [
    "Benchmark", "Engine/config", "Samples", "Visible tokens", "Server tokens", "Wall time (s)",
    "E2E time (s)", "Agg e2e TPS", "Avg e2e TPS", "Agg decode TPS", "Avg decode TPS",
    "Client wall e2e TPS", "Accuracy", "TPF", "decode TPF", "Concurrency", "TP",
]  # fmt: skip


def write_run(folder: Path, tpf: float, accuracy: float) -> Path:
    folder.mkdir()
    config = {
        "engine": {"model_path": "m<odel", "model_name": "sdar", "decoding_strategy": "multi_bd"},
        "eval": {"dataset_name": "gsm8k_sdar"},
    }
    stats = {
        "total_samples": 2, "total_tokens": 30, "tpf_aggregate": tpf, "e2e_throughput_tok_s": 99.5,
        "timestamp": "2026-01-01T00:00:00Z", "ttft_s": 0.25, "tp": 1, "concurrency": 2,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps({"config": config, "tasks": {}}))
    (folder / "diffulex_stats.json").write_text(json.dumps(stats))
    results = {"gsm8k_sdar": {"scored": 2, "exact_match,none": accuracy}}
    (folder / "results_1.json").write_text(json.dumps({"results": results}))
    samples: list[dict[str, Any]] = [
        {
            "id": str(n),
            "text": "x",
            "scores": None,
            "metrics": {"completion_tokens": 10 + n, "tpf": tpf},
        }
        for n in range(2)
    ]
    lines = "".join(json.dumps(sample) + "\n" for sample in samples)
    (folder / "samples.jsonl").write_text(lines)
    return folder


def test_a_page_needs_no_other_file(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name, tpf, 0.5)) for name, tpf in (("a", 3.0), ("b", 4.0))]
    page = tmp_path / "report.html"
    assert main(["report", *runs, "--output", str(page)]) == 0
    text = page.read_text()
    assert re.findall("<th>(.*?)</th>", text) == PUBLISHED
    assert text.count("<svg") == 4  # no times to the first token, and no times of answers
    assert "Accuracy against tokens per forward" in text
    assert not re.search(r'(src|href)="http', text)
    again = tmp_path / "again.html"
    assert main(["report", *runs, "--output", str(again)]) == 0
    assert again.read_text() == text


@pytest.mark.slow
def test_markdown_has_its_pictures_beside_it(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "a", 3.0, 0.5))
    path = tmp_path / "report.md"
    assert main(["report", run, "--output", str(path)]) == 0
    lines = path.read_text().splitlines()
    assert lines[2] == f"| {' | '.join(PUBLISHED)} |"
    assert lines[4].startswith("| gsm8k_sdar | a | 2 | 30 |  |")
    pictures = re.findall(r"!\[.*\]\((.*)\)", path.read_text())
    assert len(pictures) == 4
    assert all((tmp_path / name).read_text().startswith("<svg") for name in pictures)


def test_results_are_rows(tmp_path: Path) -> None:
    older = {
        "config": {"model_path": "m"},
        "metrics": {"num_samples": 7, "accuracy": 0.25},
        "timestamp": "t",
    }
    (tmp_path / "older.json").write_text(json.dumps(older))
    files = [write_run(tmp_path / "a", 3.0, 0.5), tmp_path / "older.json"]
    found = compare_results(files, tmp_path / "rows.csv")
    rows = found if isinstance(found, list) else found.to_dict("records")
    assert list(rows[0]) == COLUMNS
    assert (rows[0]["model_name"], rows[0]["accuracy"], rows[0]["num_samples"]) == ("sdar", 0.5, 2)
    assert (rows[1]["model_path"], rows[1]["accuracy"], rows[1]["num_samples"]) == ("m", 0.25, 7)
    with (tmp_path / "rows.csv").open() as file:
        assert [row["model_path"] for row in csv.DictReader(file)] == ["m<odel", "m"]


def test_a_report_of_one_run(tmp_path: Path) -> None:
    text = generate_report(write_run(tmp_path / "a", 3.0, 0.5), tmp_path / "report.txt")
    assert text == (tmp_path / "report.txt").read_text()
    assert text.startswith("Configuration\n")
    assert "decoding_strategy" in text.partition("Metrics")[0]
    assert "ttft_s" in text.partition("Metrics")[2]


def test_several_runs_fit_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each figure that a run has."""
    runs = [str(write_run(tmp_path / name, tpf, 0.5)) for name, tpf in (("a", 3.0), ("b", 4.0))]
    path = tmp_path / "report.txt"
    assert main(["report", *runs, "--output", str(path)]) == 0
    printed = capsys.readouterr().out
    assert path.read_text() == printed
    lines = [line.split() for line in printed.splitlines()]
    assert ["TPF", "3", "4"] in lines
    assert ["Engine/config", "a", "b"] in lines
    assert "Wall time" not in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_long_names_and_many_runs_fit_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is cut off, and nothing is wider than 80 columns."""
    names = [f"a_run_with_four_blocks_in_flight_and_threshold_0.{n}" for n in range(6)]
    runs = [str(write_run(tmp_path / name, 3.0, 0.5)) for name in names]
    for path in map(Path, runs):
        manifest = json.loads((path / "run.json").read_text())
        manifest["config"]["engine"]["model_path"] = "/models/" + "deep/" * 20 + "end"
        (path / "run.json").write_text(json.dumps(manifest))
    assert main(["report", *runs]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    tables = printed.split("\n\n")
    assert len(tables) > 1
    assert all("Engine/config" in table and "Samples" in table for table in tables)
    columns = [
        "".join(pieces)
        for table in tables
        for pieces in zip(*_cells_of("Engine/config", table), strict=True)
    ]
    assert columns == names
    assert main(["report", runs[0]]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    path = "".join(piece for (piece,) in _cells_of("model_path", printed.split("\n\n")[0]))
    assert path == "/models/" + "deep/" * 20 + "end"


def _cells_of(label: str, table: str) -> list[list[str]]:
    """The cells of a row: those of its line, and of the lines without a label that follow it."""
    lines = [line.split() for line in table.splitlines()]
    (begin,) = (place for place, line in enumerate(lines) if line[:1] == [label])
    width = len(lines[begin]) - 1
    found = [lines[begin][1:]]
    for line in lines[begin + 1 :]:
        if len(line) != width:
            break
        found.append(line)
    return found


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "a", 3.0, 0.5))
    assert main(["report", run, "--output", str(tmp_path / "a.pdf")]) == 2
    assert "output: expected a file that ends in .html, .md, .csv, .txt" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "nothing.json")]) == 2
