# SPDX-License-Identifier: Apache-2.0
"""The loop of examples/rl raises the demo's accuracy on problems in words it has never seen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "rl"
sys.path.append(str(EXAMPLE))

from diffulex.bench.word_problems import is_correct  # noqa: E402
from diffulex.checkpoint.resolve import demo_dir  # noqa: E402
from shifted_problems import draw_problems  # noqa: E402


def test_problems_are_right_and_repeat() -> None:
    problems = draw_problems("a", 50)
    assert problems == draw_problems("a", 50) != draw_problems("b", 50)
    assert len({problem.question for problem in problems}) == 50
    for problem in problems:
        value, amount = map(int, re.findall(r"\d+", problem.question))
        assert problem.answer == value - amount > 0
        assert is_correct(problem, problem.solution)


@pytest.mark.slow
@pytest.mark.skipif(
    not (demo_dir() / "model.safetensors").is_file(), reason="the bundled model is not in this tree"
)
def test_a_few_rounds_raise_the_accuracy(tmp_path: Path) -> None:
    table = tmp_path / "rl.md"
    command = [sys.executable, str(EXAMPLE / "grpo.py"), "--rounds", "2", "--eval", "60"]
    command += ["--table", str(table)]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = [
        [float(cell) for cell in re.findall(r"[\d.]+", line)]
        for line in table.read_text(encoding="utf-8").splitlines()[2:]
    ]
    assert [row[0] for row in rows] == [0, 2]
    (_, _, before), (_, _, after) = rows
    assert before < 60
    assert after >= before + 15
