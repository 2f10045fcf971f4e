# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/command_line.md run as they are printed, and its settings are flags."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from diffulex.checkpoint.resolve import demo_dir
from diffulex.tools.cli import build_parser

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
COMMANDS = "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).splitlines()


@pytest.mark.slow
@pytest.mark.skipif(
    not (demo_dir() / "model.safetensors").is_file(), reason="the bundled model is not in this tree"
)
def test_commands_run() -> None:
    """In one shell, which stops at the first failure."""
    result = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", "\n".join(COMMANDS)],
        cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("#### 5") + result.stdout.count('#### 5"') >= 3


def test_settings_are_flags(tmp_path: Path) -> None:
    (content,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    options = build_parser("generate").parse_with_file(["generate", "--config", str(path), "x"])
    assert options.stop == ["\n\n"]
    assert options.enforce_eager is True


def test_the_batch_file_is_one(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from diffulex.tools.run_batch import parse_line, read_lines

    (content,) = re.findall(r"```jsonl\n(.*?)```", TEXT, re.DOTALL)
    path = tmp_path / "requests.jsonl"
    path.write_text(content)
    (line,) = read_lines(str(path), "--input-file", parse_line)
    assert line.custom_id == "a"
