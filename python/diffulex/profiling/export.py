# SPDX-License-Identifier: Apache-2.0
"""Files of a recording: the trace, and its table as text, CSV and JSON."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.log import get_logger

if TYPE_CHECKING:
    from diffulex.profiling.config import ProfilerConfig

__all__ = ["SUFFIXES", "export_recording", "summary_rows"]

logger = get_logger(__name__)

#: How the names of the files end.
SUFFIXES = ("trace.json", "summary.txt", "summary.csv", "summary.json")
_ROWS_OF_TEXT = 200
_LARGE_TRACE_BYTES = 1 << 30
#: Columns about a device, which a recording of the CPU alone does not have.
_DEVICE_COLUMNS = ("self_cuda_us", "cuda_us", "self_cuda_memory_bytes")
_COLUMNS = {
    "name": "key",
    "count": "count",
    "self_cpu_us": "self_cpu_time_total",
    "cpu_us": "cpu_time_total",
    "self_cuda_us": "self_device_time_total",
    "cuda_us": "device_time_total",
    "self_cpu_memory_bytes": "self_cpu_memory_usage",
    "self_cuda_memory_bytes": "self_device_memory_usage",
    "input_shapes": "input_shapes",
}


def summary_rows(averages: Any, *, has_device: bool, has_shapes: bool) -> list[dict[str, Any]]:
    """One row per name (and shapes), the longest first: by device time, without a device by CPU time.

    Args:
        averages: `key_averages` of a stopped profiler.
        has_device: a device was recorded; otherwise its columns are None.
        has_shapes: input shapes were recorded; otherwise theirs is None.
    """
    rows = []
    for event in averages:
        row = {column: getattr(event, name) for column, name in _COLUMNS.items()}
        if not has_device:
            row.update(dict.fromkeys(_DEVICE_COLUMNS))
        row["input_shapes"] = str(row["input_shapes"]) if has_shapes else None
        rows.append(row)
    order = "self_cuda_us" if has_device else "self_cpu_us"
    return sorted(rows, key=lambda row: row[order], reverse=True)


def export_recording(profile: Any, stem: Path, config: ProfilerConfig) -> dict[str, Path]:
    """Writes the files of a stopped profiler; their paths by suffix.

    Args:
        profile: torch's profiler.
        stem: beginning of every path.
        config: of the recording.
    """
    files = {suffix: stem.with_name(f"{stem.name}.{suffix}") for suffix in SUFFIXES}
    averages = profile.key_averages(group_by_input_shape=config.record_shapes)
    has_device = any(event.self_device_time_total > 0 for event in averages)
    rows = summary_rows(averages, has_device=has_device, has_shapes=config.record_shapes)
    order = "self_device_time_total" if has_device else "self_cpu_time_total"
    text = averages.table(sort_by=order, row_limit=_ROWS_OF_TEXT)
    files["summary.txt"].write_text(text + "\n", encoding="utf-8")
    with files["summary.csv"].open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(_COLUMNS))
        writer.writeheader()
        writer.writerows(rows)
    files["summary.json"].write_text(json.dumps(rows, indent=1), encoding="utf-8")
    profile.export_chrome_trace(str(files["trace.json"]))
    num_bytes = files["trace.json"].stat().st_size
    logger.info("profile written: %s, %.1f MiB", files["trace.json"], num_bytes / 2**20)
    if num_bytes > _LARGE_TRACE_BYTES:
        logger.warning(
            "profile: expected a trace below 1 GiB, got %.1f GiB; set max_iterations",
            num_bytes / 2**30,
        )
    return files
