# SPDX-License-Identifier: Apache-2.0
"""The guides of evaluation, reproduction, choosing and new weights: samples run, tables are complete.

Commands that need a download, a GPU or a server are parsed in test_code_blocks.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diffulex.bench.config import EvalConfig, read_settings
from diffulex.bench.presets import preset_path, presets
from diffulex.checkpoint.resolve import demo_dir
from fixtures.shell_blocks import code_blocks, shell_commands

ROOT = Path(__file__).resolve().parents[3]
EVALUATION, REPRODUCTION, CHOOSING, WEIGHTS = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("evaluation", "reproduction", "choosing_a_strategy", "rl")
)
needs_demo = pytest.mark.skipif(
    not (demo_dir() / "model.safetensors").is_file(), reason="the bundled model is not in this tree"
)


def run(command: list[str], folder: Path) -> str:
    """Standard output of a command in a folder."""
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def diffulex(words: list[str], folder: Path) -> str:
    return run([sys.executable, "-m", "diffulex", *words[1:]], folder)


def starting_with(text: str, *words: str) -> list[str]:
    """The one command that begins so."""
    (found,) = (item for item in shell_commands(text) if item[: len(words)] == [*words])
    return found


@pytest.mark.slow
@needs_demo
def test_runs_are_made_compared_and_reported(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    for _ in range(2):
        printed = diffulex(
            starting_with(EVALUATION, "diffulex", "eval", "--preset", "example"), tmp_path
        )
        assert "smoke_arith" in printed
    runs = [str(path) for path in sorted((tmp_path / "benchmark_results").iterdir())]
    named = set(re.findall(r"^\| `([\w.*]+)`", EVALUATION.split("## The folder of a run")[1], re.M))
    made = {path.name for path in Path(runs[0]).iterdir()}
    assert all(
        any(re.fullmatch(n.replace("*", ".*"), file) for file in made) for n in named - OTHER
    )
    places = dict(zip(("BASE", "CAND"), runs, strict=True))
    compare = starting_with(EVALUATION, "diffulex", "bench", "compare")
    # Two runs of a busy host differ in speed by more than the guide allows.
    words = [places.get(word, word) for word in compare if word not in ("--max-regression", "3%")]
    assert "paired answers" in diffulex(words, tmp_path)
    report = starting_with(EVALUATION, "diffulex", "bench", "report")
    places = dict(zip(("RUN", "[RUN...]"), runs, strict=True))
    assert "smoke_arith" in diffulex([places.get(word, word) for word in report], tmp_path)
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


#: Files of a run that this one does not have.
OTHER = {"errors.jsonl", "trace.jsonl"}


@pytest.mark.slow
@needs_demo
@pytest.mark.parametrize("text", [EVALUATION, WEIGHTS], ids=["evaluation", "rl"])
def test_python_runs(text: str, tmp_path: Path) -> None:
    (code,) = code_blocks(text, "python")
    run([sys.executable, "-c", code], tmp_path)


@pytest.mark.slow
@needs_demo
def test_settings_are_compared_as_the_guide_shows(tmp_path: Path) -> None:
    lines = (demo_dir() / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "problems.jsonl").write_text("\n".join(lines[:4]), encoding="utf-8")
    command = starting_with(CHOOSING, "diffulex", "eval")
    printed = diffulex([word.replace("MODEL", "demo") for word in command], tmp_path)
    summary = printed.split("\n\n")[0].splitlines()
    assert len(summary) == 1 + 3 * 3
    assert {"accuracy", "TPF", "tok/s"} <= set(summary[0].split())


def test_every_setting_of_eval_is_named() -> None:
    section = EVALUATION.split("| Key of `eval` |")[1].split("\n\n")[0]
    keys = {
        key for row in section.splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    fields = {field.name for field in dataclasses.fields(EvalConfig)}
    assert keys <= fields, keys - fields
    assert fields - keys == UNNAMED


#: Fields that are read from files of other programs and mean nothing here.
UNNAMED = {"dataset_split", "use_tqdm"}


def test_the_figures_of_the_bundled_model_are_those_of_the_report() -> None:
    report = json.loads((ROOT / "docs/evaluation.json").read_text(encoding="utf-8"))
    shown = {" ".join(line.split()) for line in EVALUATION.splitlines()}
    assert len(report["runs"]) == 2
    for item in report["runs"]:
        for level in (*item["levels"], item["total"]):
            start = f"{level['group']} {level['num_problems']} {level['num_correct']} "
            assert any(line.startswith(start) for line in shown), start


#: Words of the table for thresholds.
THRESHOLDS = {
    "add": "add_block_threshold",
    "semi": "semi_complete_threshold",
    "accept": "accept_threshold",
    "stability": "token_stability_threshold",
}
ROWS = re.findall(r"^\|.*`diffulex eval --preset (\w+)` \| (.*?) \| (.*?) \|$", REPRODUCTION, re.M)


def test_every_preset_has_a_row() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(set(presets()) - {"example"})


@pytest.mark.parametrize(("name", "decoding", "thresholds"), ROWS, ids=[row[0] for row in ROWS])
def test_rows_say_what_their_presets_hold(name: str, decoding: str, thresholds: str) -> None:
    engine = read_settings(preset_path(name))["engine"]
    strategy, sizes, *more = decoding.split(", ")
    words = strategy.split()
    assert words[0] == engine["decoding_strategy"]
    assert ("edits" in words) == (engine.get("sampling_mode") == "edit")
    assert sizes == f"{engine['block_size']} x {engine['buffer_size']}"
    assert any("LoRA" in word for word in more) == bool(engine.get("use_lora"))
    assert ("LoRA not merged" in more) == (engine.get("pre_merge_lora") is False)
    for item in thresholds.split(", "):
        word, value = item.split()
        if word in THRESHOLDS:
            assert engine["decoding_thresholds"][THRESHOLDS[word]] == float(value), item
        else:
            assert float(word if word.isdigit() else value) in _numbers(engine), item


def _numbers(settings: object) -> set[float]:
    """All numbers in nested settings."""
    if isinstance(settings, dict):
        return set[float]().union(*map(_numbers, settings.values()))
    return {float(settings)} if isinstance(settings, int | float) else set()
