# SPDX-License-Identifier: Apache-2.0
"""The stub of the compiled module matches it, and stubs are those that their programs write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_stub_matches_the_module(tmp_path: Path) -> None:
    pytest.importorskip("mypy.stubtest", reason="mypy is not installed")
    allowlist = Path(__file__).with_name("stubtest_allowlist.txt")
    command = [sys.executable, "-m", "mypy.stubtest", "diffulex_ext._core"]
    command += ["--allowlist", str(allowlist)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", ["arena_arrays", "core", "engine_options"])
def test_stubs_are_current(name: str) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, str(root / "scripts" / f"{name}_stub.py")]
    expected = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stub = root / "python" / "diffulex_ext" / f"_{name}.pyi"
    assert stub.read_text(encoding="utf-8") == expected
