# SPDX-License-Identifier: Apache-2.0
"""Tests that take processor time without the mark `slow` fail where a limit is set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.processor_time import VARIABLE

BURN = "import time; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
TESTS = f"""
import subprocess, sys, time
import pytest

BURN = {BURN!r}

def test_itself():
    exec(BURN)

def test_program():
    subprocess.run([sys.executable, "-S", "-c", BURN], check=True)

@pytest.mark.slow
def test_marked():
    exec(BURN)

def test_waiting():
    time.sleep(0.4)

@pytest.fixture
def prepared():
    exec(BURN)

def test_fixture(prepared):
    pass
"""


def run(folder: Path, limit: str) -> str:
    (folder / "test_it.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = slow: takes long\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "fixtures.processor_time", "-p"]
    result = subprocess.run(
        [*command, "no:cacheprovider", "test_it.py"],
        cwd=folder,
        env={
            **os.environ,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            VARIABLE: limit,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout + result.stderr


@pytest.mark.slow
def test_only_unmarked_processor_time_counts(tmp_path: Path) -> None:
    output = run(tmp_path, "0.25")
    assert "2 failed, 3 passed" in output, output
    for name in ("test_itself", "test_program"):
        assert f"FAILED test_it.py::{name} - Failed: {VARIABLE}" in output, output


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["", "9"])
def test_no_limit_and_a_wide_one(tmp_path: Path, limit: str) -> None:
    assert "5 passed" in run(tmp_path, limit)


def test_bad_limit(tmp_path: Path) -> None:
    assert f"{VARIABLE}: expected seconds, got 'some'" in run(tmp_path, "some")
