# SPDX-License-Identifier: Apache-2.0
"""The benchmark programs run on tiny shapes and print what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[3] / "benchmarks" / "python"


def run(script: str, *arguments: object) -> str:
    result = subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, arguments)],
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def test_decode_step(tmp_path):
    output = tmp_path / "steps.jsonl"
    text = run(
        "bench_decode_step.py",
        *("--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--batch", "1,3"),
        *("--buffer-size", "1,2", "--block-size", 4, "--prompt-len", 16),
        *("--warmup", 2, "--steps", 6, "--output", output),
    )
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(x["batch"], x["buffer"], x["rows"]) for x in lines] == [
        (1, 1, 4),
        (3, 1, 12),
        (1, 2, 8),
        (3, 2, 24),
    ]
    for line in lines:
        assert line["steps"] == 6
        assert 0 < line["p10_ms"] <= line["step_ms"] <= line["p90_ms"]
        assert line["floor_ms"] > 0
        assert line["shape"] == "tiny"
        assert {"device", "torch", "date"} <= line.keys()
    assert [json.loads(x) for x in text.splitlines() if x.startswith("{")] == lines
    assert text.count("|") > 5 * len(lines)


def test_cpu_decode(tmp_path):
    """The program itself fails when the tokens of both decoders differ."""
    output = tmp_path / "cpu.json"
    text = run(
        "bench_cpu_decode.py",
        *("--model", "tiny", "--prompt-len", 18, "--block-size", 4, "--max-tokens", 11),
        *("--random-prompts", 3, "--threads", 1, "--buffer-size", "1,3", "--output", output),
    )
    content = json.loads(output.read_text())
    assert json.loads(text) == content
    assert [result["buffer_size"] for result in content["results"]] == [1, 3]
    for result in content["results"]:
        assert result["tokens"] == 3 * 11
        assert result["speedup"] > 0
    assert content["threads"] == 1
