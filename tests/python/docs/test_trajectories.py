# SPDX-License-Identifier: Apache-2.0
"""docs/trajectories.md says what is so: samples run, every field and number is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diffulex.trace.files import trace_record
from diffulex.trace.statistics import order_statistics
from diffulex.trace.trajectory import Change, TokenTrace, TraceBlock, TraceStep, Trajectory
from diffulex.trace.trajectory import TraceRecorder as Recorder

TEXT = (Path(__file__).resolve().parents[3] / "docs/trajectories.md").read_text(encoding="utf-8")
CODE = "".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
COMMANDS = "".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL))


@pytest.mark.slow
def test_samples_run(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    pytest.importorskip("PIL", reason="the animation needs Pillow")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for command in (["bash", "-eo", "pipefail", "-c", COMMANDS], [sys.executable, "-c", CODE]):
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "trace.jsonl", "replay.html", "order.svg", "steps.gif",
    }  # fmt: skip


@pytest.mark.parametrize("kind", [TraceStep, TraceBlock, Change, TokenTrace])
def test_every_field_is_named(kind: type) -> None:
    for name in kind._fields:
        assert f"`{name}`" in TEXT, name


def test_every_number_and_key_is_named() -> None:
    trajectory = Recorder("full", 3, 9).finish((), ())
    for name in (*Trajectory.__dataclass_fields__, *order_statistics(trajectory)):
        assert f"`{name}`" in TEXT, name
    for name in ("format", *_keys(trajectory)):
        assert f"`{name}`" in TEXT, name


def _keys(trajectory: Trajectory) -> list[str]:
    from types import SimpleNamespace

    metrics = SimpleNamespace(nfe=0, completion_tokens=0, ttft_s=None, decode_tps=None)
    output = SimpleNamespace(
        req_id=0,
        token_ids=(),
        text="",
        completion_reason="",
        metrics=metrics,
        trajectory=trajectory,
    )
    return list(trace_record(output))
