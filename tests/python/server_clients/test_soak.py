# SPDX-License-Identifier: Apache-2.0
"""The soak, shortened; the whole one is `python benchmarks/python/soak_server.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fixtures.live_server import LiveServer

_SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "python" / "soak_server.py"


def test_nothing_is_held_after_requests_that_leave_abort_and_are_wrong(
    server: LiveServer, tmp_path: Path
) -> None:
    output = tmp_path / "soak.json"
    result = subprocess.run(
        [
            *(sys.executable, str(_SCRIPT), "--base-url", server.url, "--pid", str(server.pid)),
            *("--requests", "150", "--seed", "1", "--output", str(output)),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert output.exists(), result.stderr
    content = json.loads(output.read_text(encoding="utf-8"))
    assert content["failures"] == []
    assert content["missing"] == []
    assert content["changed"] == {}
    assert 0 < content["aborted"] <= content["kinds"]["abort by id"]
    assert content["aborted"] == content["aborts_counted_by_server"]
    assert result.returncode == 0
    assert sum(content["kinds"].values()) == 150
