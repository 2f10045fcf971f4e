# SPDX-License-Identifier: Apache-2.0
"""Documents that say where things are name files and folders that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ROOTS = ("cmake", "csrc", "docs", "include", "python", "scripts", "tests")


@pytest.mark.parametrize("name", ["AGENTS.md", "docs/a_step.md", "docs/architecture.md"])
def test_paths_exist(name: str) -> None:
    spans = re.findall(r"`([^`\s]+)`", (ROOT / name).read_text(encoding="utf-8"))
    paths = [span for span in spans if span.split("/")[0] in ROOTS and "<" not in span]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_architecture_names_every_package() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    package = ROOT / "python" / "diffulex"
    names = {path.parent.name for path in package.glob("*/__init__.py")}
    # These only pass on what is elsewhere, or hold no code.
    names -= {"layers", "model", "sampler", "assets"}
    assert {name for name in names if f"`{name}`" not in text} == set()
