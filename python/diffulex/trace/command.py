# SPDX-License-Identifier: Apache-2.0
"""``diffulex trace FILE``: what a file of trajectories says, as numbers, pictures and pages."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.config.flags import integer
from diffulex.errors import ConfigError
from diffulex.trace.files import read_traces
from diffulex.trace.legacy import legacy_record
from diffulex.trace.pictures import write_gif, write_plot
from diffulex.trace.recording import recording_of
from diffulex.trace.statistics import order_statistics, statistics_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex.trace.trajectory import Trajectory

__all__ = ["add_trace_flags", "run_trace"]


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``trace``."""
    parser.add_argument(
        "file", metavar="FILE", help="trajectories, .jsonl or .jsonl.zst, or what a server answered"
    )
    parser.add_argument(
        "--request", type=integer, metavar="I",
        help="the request on line I + 1 alone [statistics, plot and older form: all; else 0]",
    )  # fmt: skip
    parser.add_argument("--html", metavar="OUT", help="write a page that plays it")
    parser.add_argument("--gif", metavar="OUT", help="write an animation (needs Pillow)")
    parser.add_argument(
        "--plot", metavar="OUT", help="write plots, .png, .svg or .pdf (needs matplotlib)"
    )
    parser.add_argument("--legacy", metavar="OUT", help="write the JSON of older programs")
    parser.add_argument("--json", action="store_true", help="print the statistics as JSON")
    parser.set_defaults(command=run_trace)


def run_trace(options: argparse.Namespace) -> int:
    """Writes what was asked for, and prints the statistics unless something was written.

    Raises:
        ConfigError: the file cannot be read, or does not hold what is asked for.
    """
    chosen = _chosen(Path(options.file), options.request)
    record, trajectory = chosen[0]
    trajectories = [item for _, item in chosen]
    if options.html is not None:
        from diffulex.server.ui.replay import replay_html  # noqa: PLC0415 (not for numbers)

        _write(options.html, "--html", replay_html(recording_of(record, trajectory)))
    if options.gif is not None:
        write_gif(trajectory, Path(options.gif))
    if options.plot is not None:
        write_plot(trajectories, Path(options.plot))
    if options.legacy is not None:
        requests = [legacy_record(*item) for item in chosen]
        _write(options.legacy, "--legacy", json.dumps(requests, ensure_ascii=False) + "\n")
    outputs = (options.html, options.gif, options.plot, options.legacy)
    if options.json or all(path is None for path in outputs):
        _print_statistics(chosen, options.json)
    return 0


def _chosen(path: Path, request: int | None) -> list[tuple[dict[str, Any], Trajectory]]:
    traces = list(read_traces(path))
    if not traces:
        raise ConfigError(
            f"trace: expected a line per request in {path}, or answers to requests with"
            " return_trajectory, got none"
        )
    if request is None:
        return traces
    if not 0 <= request < len(traces):
        raise ConfigError(f"--request: expected 0 to {len(traces) - 1}, got {request}")
    return [traces[request]]


def _print_statistics(
    chosen: Sequence[tuple[Mapping[str, Any], Trajectory]], is_json: bool
) -> None:
    rows = [order_statistics(trajectory) for _, trajectory in chosen]
    if is_json:
        ids = [record["req_id"] for record, _ in chosen]
        print(json.dumps([{"req_id": i, **row} for i, row in zip(ids, rows, strict=True)]))
    else:
        print(statistics_text(rows))


def _write(path: str, flag: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag}: cannot write {path}: {error.strerror}") from error
