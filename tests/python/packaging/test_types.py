# SPDX-License-Identifier: Apache-2.0
"""The hand-written stub of the compiled module matches it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_stub_matches_the_module(tmp_path: Path) -> None:
    pytest.importorskip("mypy.stubtest", reason="mypy is not installed")
    allowlist = Path(__file__).with_name("stubtest_allowlist.txt")
    command = [sys.executable, "-m", "mypy.stubtest", "diffulex_ext._core"]
    command += ["--allowlist", str(allowlist)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
