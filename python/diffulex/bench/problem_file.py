# SPDX-License-Identifier: Apache-2.0
"""Word problems as a file of JSON lines, also in the format of GSM8K."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from diffulex.bench.word_problems import Problem
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["load_problems", "save_problems"]

_EXPECTED = (
    "an object with `question` (text) and `answer` (an integer, or a text that ends in `#### 5`),"
    " and perhaps `level` (an integer)"
)


def save_problems(problems: Sequence[Problem], path: Path) -> None:
    """Write problems as JSON lines with the fields id, level, question, answer, solution."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for index, problem in enumerate(problems):
            file.write(json.dumps({"id": index, **asdict(problem)}) + "\n")


def load_problems(path: Path) -> list[Problem]:
    """Reads one problem a line.

    `answer` is an integer, or a worked answer whose last line is `#### 5`, as in GSM8K. `level`
    groups the report; without it every problem has level 0.

    Raises:
        ConfigError: the file is not UTF-8, or a line is no problem.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"data: {path}: expected UTF-8 text, got byte {error.start}") from error
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problems.append(_problem(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            shown = line if len(line) <= 80 else line[:80] + "..."
            raise ConfigError(
                f"data: line {number} of {path}: expected {_EXPECTED}, got {shown}"
            ) from error
    return problems


def _problem(record: dict[str, Any]) -> Problem:
    question, answer, level = record["question"], record["answer"], record.get("level", 0)
    solution = record.get("solution", answer if isinstance(answer, str) else f"#### {answer}")
    if isinstance(answer, str):
        found = re.search(r"(?:^|####)\s*(-?[\d,]*\d)\s*$", answer)
        if found is None:
            raise ValueError(answer)
        answer = int(found[1].replace(",", ""))
    if not isinstance(question, str) or type(answer) is not int or type(level) is not int:
        raise TypeError(record)
    return Problem(level, question, answer, solution)
