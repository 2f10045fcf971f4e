# SPDX-License-Identifier: Apache-2.0
"""`scripts/build_times.py` reads a ninja log and enforces the budget of a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "build_times.py"


def run(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(directory), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_prints_slowest_first_and_keeps_the_last_run(tmp_path: Path) -> None:
    log = "# ninja log v5\n0\t99000\t1\told.o\tx\n0\t2500\t2\ta.o\tx\n0\t7000\t2\tb.o\tx\n"
    (tmp_path / ".ninja_log").write_text(log + "10\t1010\t3\told.o\tx\n")
    result = run(tmp_path)
    assert result.returncode == 0, result.stderr
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["7.0", "s", "b.o"],
        ["2.5", "s", "a.o"],
        ["1.0", "s", "old.o"],
    ]


def test_fails_above_the_limit(tmp_path: Path) -> None:
    (tmp_path / ".ninja_log").write_text("# ninja log v5\n0\t90001\t1\tslow.o\tx\n")
    result = run(tmp_path)
    assert result.returncode == 1
    assert "expected at most 90 s a step, got more for: slow.o" in result.stdout
    assert run(tmp_path, "--limit", "100").returncode == 0
