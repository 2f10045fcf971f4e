# SPDX-License-Identifier: Apache-2.0
"""docs/coming_from.md: its commands are ones, and what it says is there or refused is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import diffulex
from diffulex import SamplingParams
from diffulex.config.keywords import EngineKeywords
from diffulex.server.args import parse_args
from diffulex.tools.cli import build_parser

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")


def table(title: str) -> list[list[str]]:
    """Cells of the rows below a heading."""
    section = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows[2:]]


TASKS = table("Ten tasks on the command line")


def test_there_are_ten_tasks_with_a_command_each() -> None:
    assert len(TASKS) == 10
    assert all(re.match(r"`diffulex \w", cells[3]) for cells in TASKS)


@pytest.mark.parametrize("cells", TASKS, ids=[cells[0] for cells in TASKS])
def test_commands_are_accepted(cells: list[str], tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("temperature: 0.5\n", encoding="utf-8")
    line = re.findall(r"`(diffulex .*?)`", cells[3])[0]
    words = shlex.split(line.replace("MODEL", "demo").replace("SETTINGS", str(settings)))[1:]
    if words[0] == "serve":
        arguments = parse_args(words[1:])
        assert arguments is not None
    else:
        assert build_parser(words[0]).parse_with_file(words).name == words[0]


def test_every_line_is_answered() -> None:
    rows = table("What others have, line by line")
    assert {cells[1] for cells in rows} == {"yes", "partly", "no"}
    assert all(len(cells) == 3 and cells[2] for cells in rows)
    # A refusal names another way, or has its reason in the last table.
    reasons = " ".join(cells[0] + cells[1] for cells in table("What is left out, and why"))
    for word in ("environment variable", "GGUF", "penalties", "tool calls", "sleep", "LoRA"):
        assert word in reasons


def test_names_in_python_are_there() -> None:
    named = re.findall(r"`(\w+)`", TEXT.split("## Ten tasks")[0].split("What is new:")[1])
    known = {*EngineKeywords.__annotations__, *SamplingParams.__dataclass_fields__, "nfe", "tpf"}
    assert set(named) <= known
    for name in ("Diffulex", "LLM", "AsyncLLM", "SamplingParams"):
        assert hasattr(diffulex, name)
    fields = set(SamplingParams.__dataclass_fields__)
    assert {"stop", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "seed"} <= fields
    with pytest.raises(diffulex.SamplingParamsError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=1.1)  # type: ignore[call-arg]
