# SPDX-License-Identifier: Apache-2.0
"""The log of continuous integration: what it says of stages, and that it names a failure once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
#: How .ci/run begins.
HEAD = """set -euo pipefail
. scripts/lib.sh
. scripts/stages.sh
trap 'report_failure "$?"' EXIT
"""
#: Failures that are answers: conditions, subshells and substitutions as in scripts/lib.sh.
ANSWERS = """stage "packages" 60
no() { return 1; }
if no; then exit 9; fi
case "$(no)" in "") ;; esac
{ no && no; } || [ -e /dev/null ]
text="$(no || echo yes)"
if [ "$(no; echo 1)" = 2 ]; then exit 9; fi
echo '#include <nowhere.h>' | grep -q somewhere || echo no
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", HEAD + script]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )


def test_ci_uses_what_is_tested_here() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert ". scripts/stages.sh" in text
    assert re.findall(r"^\s*trap .*$", text, re.MULTILINE) == [
        """trap 'report_failure "$?"; rm -rf "$work"' EXIT"""
    ]


def test_a_failure_that_is_an_answer_is_none() -> None:
    result = run(ANSWERS)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("false", ""),
        ('text="$(false)"', ""),
        ("(\n  false\n)", ""),
        ("die words", r"\[diffulex\] error: words\n"),
    ],
)
def test_a_failure_is_named_once(failure: str, message: str) -> None:
    result = run(f'{ANSWERS}stage "build" 60\n{failure}\necho unreached\n')
    assert result.returncode == 1
    assert "unreached" not in result.stdout
    line = r"==== FAILED in stage: build \(after \d+ s\)\n"
    assert re.fullmatch(message + line, result.stderr), result.stderr


def test_the_table_has_every_stage() -> None:
    result = run('stage "one" 60\nstage "two" 60\nstage_table\n')
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(" ")]
    assert [row[1:] for row in rows] == [
        ["budget", "stage"],
        ["60", "one"],
        ["60", "two"],
        ["all", "so", "far"],
    ]


def test_the_last_stage_ends_the_table_above_the_closing_line(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    pytest_of_ci = f"{sys.executable} -m pytest -p fixtures.stage_table -q {tmp_path}"
    environment = f"PYTHONPATH={ROOT / 'tests/python'}"
    result = run(f'stage "one" 60\nstage_table\n{environment} {pytest_of_ci}\n')
    assert result.returncode == 0, result.stdout + result.stderr
    *_, head, first, last, total, closing = result.stdout.splitlines()
    assert head.split() == ["seconds", "budget", "stage"]
    assert first.split()[1:] == ["60", "one"]
    assert last.split()[1:] == ["Python", "tests"]
    assert total.split()[1:] == ["all"]
    assert closing.startswith("1 passed in ")


def test_what_runs_beside_a_stage_is_shown_and_fails_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f"""stage "two" 60
both() {{ until [ -e {tmp_path}/there ]; do sleep 0.05; done; echo told; false; echo unreached; }}
beside {log} both
touch {tmp_path}/there  # while the other waits for it
beside_end
echo unreached
"""
    result = run(script)
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "told"
    assert "FAILED in stage: two" in result.stderr
    result = run(script.replace("false; ", ""))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-3:] == ["told", "unreached", "unreached"]


def test_a_stage_over_its_budget_fails() -> None:
    result = run('stage "one" 60\nstage "two" -1\nstage_table\n')
    assert result.returncode == 1
    assert "error: stages over their budget: two\n" in result.stderr


def test_a_long_build_says_how_far_it_is(tmp_path: Path) -> None:
    """The command ends once it was told of, however long that takes; what it returns is kept."""
    log = tmp_path / "log"
    script = f"""
    build_dir() {{ echo {tmp_path}; }}
    build() {{
      touch -d '+1 minute' {tmp_path}/a.o
      until grep -q '1 sources compiled, [0-9]* minutes so far' {log}; do sleep 0.05; done
      return 3
    }}
    PROGRESS_SECONDS=0.05 with_progress build > {log} || exit "$?"
    """
    result = run(script)
    assert result.returncode == 3, result.stderr
    quickstart = (ROOT / "scripts" / "quickstart.sh").read_text(encoding="utf-8")
    assert quickstart.count("with_progress pip install") == 2
