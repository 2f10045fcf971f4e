# SPDX-License-Identifier: Apache-2.0
"""The keywords that editors and type checkers know are those of the engine."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from diffulex import SamplingParams
from diffulex.config import keywords
from diffulex.config.keywords_source import render
from diffulex.config.table import CONFIG_TABLE

ROOT = Path(__file__).resolve().parents[3]


def test_every_key_and_field_is_there() -> None:
    engine = keywords.EngineKeywords.__annotations__.keys()
    assert engine == {*CONFIG_TABLE, "decoding_thresholds"} - {"model"}
    fields = {item.name for item in dataclasses.fields(SamplingParams)}
    assert keywords.SamplingKeywords.__annotations__.keys() == fields


def test_the_file_is_current() -> None:
    assert Path(keywords.__file__).read_text(encoding="utf-8") == render(), (
        "run: python -m diffulex.config.keywords_source > python/diffulex/config/keywords.py"
    )


@pytest.mark.slow
def test_mypy_knows_them(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    code = tmp_path / "sample.py"
    code.write_text(
        "from diffulex import Diffulex\n"
        'engine = Diffulex("demo", block_size=8, revision="x")\n'
        'engine.generate("x", temperature=0.5, stop="a", n=2)\n'
        'Diffulex("demo", blok_size=8)\n'
        'Diffulex("demo", block_size="8")\n'
        'engine.generate("x", temprature=0.5)\n'
    )
    result = subprocess.run(
        [sys.executable, "-m", "mypy", str(code)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    wrong = {int(line.split(":")[1]) for line in result.stdout.splitlines() if ": error:" in line}
    assert wrong == {4, 5, 6}, result.stdout + result.stderr
