# SPDX-License-Identifier: Apache-2.0
"""Step records as a trace for https://ui.perfetto.dev."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["trace_of_steps", "write_perfetto"]

_STAGES = ("schedule", "prepare", "forward", "sample", "postprocess")
_COUNTERS = ("kv_pages_used", "query_rows", "decided")
_TIMES = tuple(f"{stage}_us" for stage in _STAGES)


def trace_of_steps(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Trace events: a slice per step with its stages inside, and counters.

    Args:
        records: fields of `STEP_DTYPE`, and perhaps `pid`; a process is a track.
    """
    events: list[dict[str, Any]] = []
    pids: dict[int, None] = {}
    for record in records:
        pid = int(record.get("pid", os.getpid()))
        pids[pid] = None
        start = record["t_start_ns"] / 1e3
        common = {"ph": "X", "pid": pid, "tid": 0}
        role = "prefill" if record["n_prefill"] else "decode"
        others = {k: v for k, v in record.items() if k not in (*_TIMES, "t_start_ns", "pid")}
        total = sum(record[name] for name in _TIMES)
        events.append({**common, "name": role, "ts": start, "dur": total, "args": others})
        at = start
        for stage, name in zip(_STAGES, _TIMES, strict=True):
            if record[name] > 0:
                events.append({**common, "name": stage, "ts": at, "dur": record[name]})
            at += record[name]
        for name in _COUNTERS:
            values = {name: record[name]}
            events.append({"ph": "C", "pid": pid, "name": name, "ts": start, "args": values})
    names = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"engine {pid}"}}
        for pid in pids
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def write_perfetto(
    records: np.ndarray[Any, np.dtype[np.void]] | Iterable[Mapping[str, Any]],
    path: str | os.PathLike[str],
) -> None:
    """Writes the records of `Diffulex.step_stats` or of a step trace as a file for Perfetto."""
    if isinstance(records, np.ndarray):
        names = records.dtype.names or ()
        records = [dict(zip(names, row, strict=True)) for row in records.tolist()]
    Path(path).write_text(json.dumps(trace_of_steps(records)), encoding="utf-8")
