# SPDX-License-Identifier: Apache-2.0
"""docs/profiling.md says what is so: the example runs, every key and scope is named."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diffulex.env import ENV_VARIABLES
from diffulex.profiling import STEP_DTYPE, ProfilerConfig
from diffulex.profiling.memory import MemoryReport
from diffulex.profiling.stage_timer import COLUMNS

TEXT = (Path(__file__).resolve().parents[3] / "docs/profiling.md").read_text(encoding="utf-8")
CODE = "".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))


@pytest.mark.slow
def test_example_runs(tmp_path: Path) -> None:
    """All pieces in order, as a reader would paste them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    share = re.search(r"^step +[\d.]+ us +([\d.]+)% covered$", result.stdout, re.MULTILINE)
    assert share is not None, result.stdout
    # Less than for single steps (engine/test_profiling.py): other processes interrupt a program.
    assert 85 <= float(share[1]) <= 100
    assert (tmp_path / "steps.trace.json").is_file()


def test_every_key_is_named() -> None:
    keys = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert keys[: len(dataclasses.fields(ProfilerConfig))] == [
        item.name for item in dataclasses.fields(ProfilerConfig)
    ]


def test_every_field_of_a_record_is_named() -> None:
    for name in STEP_DTYPE.names or ():
        assert f"`{name}`" in TEXT, name


def test_every_part_of_the_memory_is_named() -> None:
    for item in dataclasses.fields(MemoryReport):
        assert f"`{item.name}`" in TEXT, item.name


def test_columns_and_variables_are_named() -> None:
    for name in COLUMNS:
        assert f"`{name}`" in TEXT, name
    for name in re.findall(r"\bDIFFULEX_\w+", TEXT):
        assert name in ENV_VARIABLES, name
    for name in ("STEP_TRACE", "NVTX", "CUDA_PROFILER_API", "CUDA_STAGE_TIMING_MAX_STEPS"):
        assert f"DIFFULEX_{name}" in TEXT, name
