# SPDX-License-Identifier: Apache-2.0
"""examples/python/edge_program.py runs as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.extras import need_extra

need_extra("edge", "executorch", "torchao")

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_program_and_model_answer(checkpoint):
    command = [sys.executable, str(ROOT / "examples/python/edge_program.py"), "--quant", "none"]
    command += ["--model", str(checkpoint("shallow")), "abc"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"program: \d+\.\d\d MB, none", lines[0])
    assert lines[1] == "equal best ids: 100.0% on random tokens"
    assert [line.split(":")[0] for line in lines[2:]] == ["model", "program"]
    assert lines[2].removeprefix("model") == lines[3].removeprefix("program")
