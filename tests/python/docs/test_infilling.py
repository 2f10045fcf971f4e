# SPDX-License-Identifier: Apache-2.0
"""docs/infilling.md says what is so: its command prints what it shows, its sample runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diffulex.checkpoint.resolve import demo_dir

TEXT = (Path(__file__).resolve().parents[3] / "docs/infilling.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    (content,) = re.findall(rf"```{kind}\n(.*?)```", TEXT, re.DOTALL)
    return str(content)


@pytest.mark.slow
@pytest.mark.skipif(
    not (demo_dir() / "model.safetensors").is_file(), reason="the bundled model is not in this tree"
)
def test_samples_run(tmp_path: Path) -> None:
    for command in (
        ["bash", "-eo", "pipefail", "-c", block("sh")],
        [sys.executable, "-c", block("python")],
    ):
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        if command[0] == "bash":
            assert result.stdout == block("text")


def test_the_body_is_one() -> None:
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    from diffulex.server.openai.request_schema import GenerateRequest

    body = json.loads(block("json"))
    assert GenerateRequest(**body).template_token_ids == body["template_token_ids"]
