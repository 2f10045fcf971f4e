# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: pairs, the exact test, and the gate for CI."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diffulex.bench.__main__ import main
from diffulex.bench.compare import _SHOWN_IDS, compare_runs, mcnemar
from diffulex.bench.runs import read_run
from diffulex.errors import ConfigError


def write_run(
    folder: Path, right: str, stats: dict[str, Any] | None = None, data: str = "same"
) -> Path:
    """A run whose n-th answer is right where the n-th character is 1."""
    folder.mkdir()
    task = {"data_sha256": data, "first_prompt_sha256": "p"}
    (folder / "run.json").write_text(json.dumps({"tasks": {"t": task}, "config": {}}))
    (folder / "diffulex_stats.json").write_text(json.dumps(stats or {}))
    records = [
        {
            "key": ["t", place, 0, 0],
            "id": f"t/{place}/0/0",
            "text": f"answer {place}",
            "scores": {"exact_match": float(mark)},
            "score_reason": None,
            "mask_leak": False,
        }
        for place, mark in enumerate(right)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "samples.jsonl").write_text(lines)
    mean = right.count("1") / len(right)
    results = {"t": {"scored": len(right), "exact_match,none": mean}}
    (folder / "results_1.json").write_text(json.dumps({"results": results}))
    return folder


@pytest.mark.parametrize(
    ("regress", "improve", "expected"),
    # 2 * (1 + 10 + 45) / 2^10; 2 * 1 / 2^5; nothing changed; evenly changed
    [(2, 8, 0.109375), (5, 0, 0.0625), (0, 0, 1.0), (3, 3, 1.0)],
)
def test_mcnemar_is_exact(regress: int, improve: int, expected: float) -> None:
    assert mcnemar(regress, improve) == pytest.approx(expected)


def test_answers_are_paired(tmp_path: Path) -> None:
    base = read_run(write_run(tmp_path / "base", "110100"))
    candidate = read_run(write_run(tmp_path / "cand", "101101"))
    result = compare_runs(base, candidate)
    assert dict(result.groups) == {
        "both right": ("t/0/0/0", "t/3/0/0"),
        "regress": ("t/1/0/0",),
        "improve": ("t/2/0/0", "t/5/0/0"),
        "both wrong": ("t/4/0/0",),
    }
    assert result.accuracy_change == pytest.approx(100 / 6)
    assert result.p_value == 1.0
    assert "McNemar p = 1" in result.to_text()
    assert "answer 1" in result.examples(1, 900)


def test_many_answers_fit_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, candidate = (read_run(write_run(Path(name), "1" * 40)) for name in ("base", "cand"))
    text = compare_runs(base, candidate).to_text()
    assert max(map(len, text.splitlines())) <= 80
    ids = text.partition("both right")[2].partition("regress")[0].split()[1:]
    assert ids == [*(f"t/{n}/0/0," for n in range(_SHOWN_IDS)), "..."]


def test_the_gate_is_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = {"e2e_throughput_tok_s": 100.0, "tpot_s": 0.010}
    slow = {"e2e_throughput_tok_s": 96.0, "tpot_s": 0.010}
    late = {"e2e_throughput_tok_s": 100.0, "tpot_s": 0.0105}
    base = str(write_run(tmp_path / "base", "1111111111", fast))
    slower = str(write_run(tmp_path / "slower", "1111111111", slow))
    later = str(write_run(tmp_path / "later", "1111111110", late))
    assert main(["compare", base, slower]) == 0  # without a limit it only tells
    assert main(["compare", base, slower, "--max-regression", "5%"]) == 0
    assert main(["compare", base, slower, "--max-regression", "3%"]) == 1
    assert "e2e_throughput_tok_s: 4.0% worse, at most 3.0% is allowed" in capsys.readouterr().out
    assert main(["compare", slower, base, "--max-regression", "3"]) == 0  # faster is no regression
    capsys.readouterr()
    assert main(["compare", base, later, "--max-regression", "3%", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["failures"] == ["tpot_s: 5.0% worse, at most 3.0% is allowed"]
    assert shown["migration"]["regress"] == ["t/9/0/0"]
    assert main(["compare", base, later, "--max-accuracy-drop", "10"]) == 0
    assert main(["compare", base, later, "--max-accuracy-drop", "9.5"]) == 1


def test_other_questions_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(write_run(tmp_path / "base", "11"))
    other = str(write_run(tmp_path / "other", "11", data="other"))
    assert main(["compare", base, other]) == 2
    assert "t: the data_sha256 of the runs differ" in capsys.readouterr().err
    assert main(["compare", base, other, "--force"]) == 0
    assert "warning: t: the data_sha256" in capsys.readouterr().out


def test_files_of_numbers_can_be_compared(tmp_path: Path) -> None:
    for name, value in (("a.json", 10.0), ("b.json", 8.0)):
        (tmp_path / name).write_text(json.dumps({"steps_per_s": value}))
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main(["compare", *paths, "--max-regression", "3%"]) == 1
    result = compare_runs(*(read_run(Path(path)) for path in paths))
    assert result.performance == (("steps_per_s", 10.0, 8.0, pytest.approx(-0.2)),)
    with pytest.raises(ConfigError, match="expected scores in both runs, got none"):
        result.failures(None, 1.0)


def test_a_gate_without_figures_is_an_error(tmp_path: Path) -> None:
    base = read_run(write_run(tmp_path / "base", "11"))
    with pytest.raises(ConfigError, match="expected figures of speed in both runs, got none"):
        compare_runs(base, base).failures(0.03, None)
    with pytest.raises(ConfigError, match="got no finished run"):
        read_run(tmp_path)


def test_runs_of_programs(tmp_path: Path) -> None:
    """How they failed on each side, and what differs beside the answers; by the older name too."""
    sides = (
        ("base", "namespace", 3.0, ["syntax", "timeout", None, "timeout"]),
        ("cand", "rlimit", 1.0, ["timeout", "assertion", None, None]),
    )
    texts = ["```python\nx\n```", "no fence", "y" * 3001, "```\n<|mask|>"]
    for name, sandbox, scale, reasons in sides:
        folder = write_run(tmp_path / name, "".join("01"[reason is None] for reason in reasons))
        manifest = json.loads((folder / "run.json").read_text())
        manifest["sandbox"] = sandbox
        manifest["tasks"]["t"]["code_time_scale"] = scale
        (folder / "run.json").write_text(json.dumps(manifest))
        records = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        for record, text, reason in zip(records, texts, reasons, strict=True):
            record |= {"text": text, "score_reason": reason, "mask_leak": "mask" in text}
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "samples.jsonl").write_text(lines)
    command = [sys.executable, "-m", "diffulex.bench.compare_code_runs", "base", "cand"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "warning: the sandbox of programs differs: namespace and rlimit\n" in shown
    assert "warning: t: the code_time_scale of the runs differs: 3 and 1\n" in shown
    rows = {key: cells for key, *cells in (re.split(r"  +", x.strip()) for x in shown.splitlines())}
    table = {
        "median characters": ["13.5", "13.5"],
        "over 3000 characters": ["1", "1"],
        "syntax errors": ["1", "0"],
        "mask leaks": ["1", "1"],
        "without a fence": ["2", "2"],
        "reason assertion": ["0", "1"],
        "reason timeout": ["2", "1"],
    }
    assert {key: rows.get(key) for key in table} == table
    assert "McNemar p = 1" in shown
    assert "  improve        1  t/3/0/0" in shown
    command[-1] = "nothing"
    failed = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("error: run: cannot read nothing")
