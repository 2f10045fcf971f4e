# SPDX-License-Identifier: Apache-2.0
"""docs/conformance.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ROWS = [
    line.strip("| \n").split("|")
    for line in (ROOT / "docs/conformance.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| \d+ \|", line)
]


def _sources(folder: str, suffix: str) -> str:
    files = sorted((ROOT / "tests" / folder).rglob(f"*{suffix}"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def test_every_point_is_listed():
    assert [int(row[0]) for row in ROWS] == list(range(1, 11))


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip() for row in ROWS])
def test_named_tests_exist(row):
    cpp = re.findall(r"`(\w+)`", row[2])
    python = re.findall(r"`(test_\w+)`", row[3])
    assert cpp or python
    cpp_sources, python_sources = _sources("cpp", "_test.cpp"), _sources("python", ".py")
    for name in cpp:
        assert re.search(rf"TEST(_P|_F)?\(\w+, {name}\)", cpp_sources), name
    for name in python:
        is_file = any((ROOT / "tests/python").rglob(f"{name}.py"))
        assert is_file or f"def {name}(" in python_sources, name
