# SPDX-License-Identifier: Apache-2.0
"""docs/tuning.md: its keys exist, its values are legal, its figures are those of the tables, its command runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from diffulex.config.parse import Options
from diffulex.config.table import CONFIG_TABLE

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
WORDS = re.findall(r"`([^`\n]+)`", TEXT)
KEYS = set(CONFIG_TABLE)
#: Words in the text that are no keys of the configuration, and where they come from.
OTHERS = {
    "diffulex eval": "a command",
    "fp8": "a value of quantization",
    "int8": "a value of quantization",
    "int4": "a value of quantization",
    "OMP_NUM_THREADS": "a variable of the environment",
    "diffulex_preemptions_total": "a metric",
    "--log-level info": "a flag",
}


def test_keys_exist_and_take_the_values() -> None:
    names = {word.partition("=")[0] for word in WORDS} - OTHERS.keys()
    assert len(names) > 12
    assert names <= KEYS
    assert OTHERS.keys() <= set(WORDS)
    for word in WORDS:
        name, has_value, value = word.partition("=")
        if has_value and name in KEYS:
            Options.parse("demo", {name: eval(value, {})})


@pytest.mark.parametrize(
    ("heading", "source"),
    [
        ("| SDAR-8B, prompt 256, bfloat16", "benchmarks/results/README.md"),
        ("| requests at once", "benchmarks/results/README.md"),
    ],
)
def test_tables_are_measured(heading: str, source: str) -> None:
    """The figures of a row stand in one row of the results."""
    found = (ROOT / source).read_text(encoding="utf-8").splitlines()
    cells = [{cell.strip() for cell in line.split("|")} for line in found if line.startswith("|")]
    rows = TEXT[TEXT.index(heading) :].split("\n\n")[0].splitlines()[2:]
    assert len(rows) >= 3
    for row in rows:
        figures = {cell.strip() for cell in row.strip("|").split("|")}
        figures = {cell for cell in figures if re.fullmatch(r"[\d,.]+", cell)}
        assert figures
        assert any(figures <= line for line in cells), row


@pytest.mark.parametrize(
    ("figures", "source"),
    [
        (("2.95", "4.27", "5.64", "8.02"), "benchmarks/results/README.md"),
        (("4.36", "2.94", "8.27", "5.42"), "benchmarks/results/README.md"),
        (("99.2", "3.37", "7.59", "96.1", "92.4"), "docs/zoo.md"),
    ],
)
def test_figures_in_the_text_are_measured(figures: tuple[str, ...], source: str) -> None:
    measured = (ROOT / source).read_text(encoding="utf-8")
    for figure in figures:
        assert figure in TEXT
        assert f" {figure} |" in measured


@pytest.mark.slow
def test_command_runs() -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    words = shlex.split(block)
    assert words[0] == "diffulex"
    run = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert "tokens per forward" in run.stdout
