# SPDX-License-Identifier: Apache-2.0
"""The comparison of server and engine runs, on random weights, and counts the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks/python/bench_serving_overhead.py"


@pytest.mark.slow
def test_server_and_engine_decode_the_same_tokens(tmp_path: Path) -> None:
    output = tmp_path / "overhead.json"
    result = subprocess.run(
        [
            *(sys.executable, str(_SCRIPT), "--shape", "tiny", "--concurrency", "1,3"),
            *("--engine-arg", "dtype=float32", "--input-len", "20", "--output-len", "16"),
            # A model this small spends its time outside: the figure itself means nothing here.
            *("--waves", "2", "--min-requests", "2", "--repeat", "1", "--limit", "100000"),
            *("--output", str(output)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert output.exists(), result.stderr
    content = json.loads(output.read_text(encoding="utf-8"))
    assert [row["concurrency"] for row in content["rows"]] == [1, 3]
    assert [row["requests"] for row in content["rows"]] == [2, 6]
    for row in content["rows"]:
        assert row["tokens"] == row["engine_tokens"] == 16 * row["requests"]
        assert row["failed"] == 0
        assert row["engine_tok_s"] > 0
        assert row["server_tok_s"] > 0
    assert len(content["first_to_second_block_ms"]) == 2  # those of the row of concurrency 1
    assert "| concurrency |" in result.stdout
