# SPDX-License-Identifier: Apache-2.0
"""docs/python_api.md and docs/environment.md say what is so: samples run, every field is named."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import diffulex
from diffulex import DenoiseSnapshot, DiffulexError, RequestOutput, StepOutput, StreamEvent
from diffulex.config.env_docs import render_markdown
from diffulex.engine.output import BlockSnapshot
from diffulex.wire.finish_reasons import FINISH_REASONS

DOCS = Path(__file__).resolve().parents[3] / "docs"
TEXT = (DOCS / "python_api.md").read_text(encoding="utf-8")
CODE = "".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))


@pytest.mark.slow
def test_samples_run(tmp_path: Path) -> None:
    """All of them in order, as a reader would paste them."""
    result = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "blocks open" in result.stdout
    assert "TO_CACHE" in result.stdout


@pytest.mark.parametrize(
    "kind", [RequestOutput, StepOutput, StreamEvent, DenoiseSnapshot, BlockSnapshot]
)
def test_every_field_is_named(kind: type) -> None:
    for field in dataclasses.fields(kind):
        assert f"`{field.name}`" in TEXT, field.name


def test_every_error_is_named() -> None:
    for name in diffulex.__all__:
        value = getattr(diffulex, name)
        if isinstance(value, type) and issubclass(value, DiffulexError):
            assert f"`{name}`" in TEXT, name


def test_every_reason_of_this_engine_is_named() -> None:
    foreign = ("completed_without_reason", "unknown_postprocess_deactivate")
    for reason in FINISH_REASONS:
        assert (f"`{reason}`" in TEXT) is (reason not in foreign), reason


def test_environment_is_current() -> None:
    assert (DOCS / "environment.md").read_text(encoding="utf-8") == render_markdown(), (
        "run: python -m diffulex.config.env_docs > docs/environment.md"
    )
