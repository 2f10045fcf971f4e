# SPDX-License-Identifier: Apache-2.0
"""Files of word problems: this package's and those in the format of GSM8K."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diffulex.bench.evaluate import read_problems
from diffulex.bench.problem_file import load_problems, save_problems
from diffulex.bench.word_problems import Problem, is_correct
from diffulex.errors import ConfigError

OWN = Problem(2, "1 + 1?", 2, "1+1=2\n#### 2")


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    save_problems([OWN, OWN], tmp_path / "own.jsonl")
    assert load_problems(tmp_path / "own.jsonl") == [OWN, OWN]


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (5, 5),
        ("5", 5),
        ("2+3=<<2+3=5>>5\n#### 5", 5),
        ("#### -1,234", -1234),
        ("a 7\n#### 42 ", 42),
    ],
)
def test_format_of_gsm8k(tmp_path: Path, answer: object, number: int) -> None:
    path = write(tmp_path / "gsm.jsonl", json.dumps({"question": "q", "answer": answer}), "")
    (problem,) = load_problems(path)
    assert (problem.level, problem.question, problem.answer) == (0, "q", number)
    assert is_correct(problem, f"#### {number}")


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", '{"question": "q"}', '{"question": "q", "answer": 1.5}',
     '{"question": "q", "answer": "about 5 apples"}', '{"question": 1, "answer": 1}',
     '{"question": "q", "answer": 1, "level": "easy"}'],
)  # fmt: skip
def test_malformed_lines_are_named_with_what_is_expected(tmp_path: Path, line: str) -> None:
    path = write(tmp_path / "bad.jsonl", '{"question": "q", "answer": 1}', line)
    with pytest.raises(ConfigError, match=r"^data: line 2 of .*bad\.jsonl: expected .*`question`"):
        load_problems(path)


def test_other_encodings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.jsonl"
    path.write_bytes(b"\xff\xfe")
    for read in (load_problems, read_problems):
        with pytest.raises(ConfigError, match=r"^data: [^:]*binary\.jsonl: .*, got byte 0"):
            read(path)
