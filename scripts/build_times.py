#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print the slowest steps of a build and fail if one exceeds its budget.

usage: build_times.py BUILD_DIR [--limit SECONDS] [--top COUNT]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def read_ninja_log(path: Path) -> dict[str, float]:
    """Seconds of the last run of each output in a `.ninja_log`."""
    lines = path.read_text().splitlines()
    if not lines or not lines[0].startswith("# ninja log"):
        raise ValueError(f"{path}: expected a ninja log, got {lines[:1]}")
    seconds: dict[str, float] = {}
    for line in lines[1:]:
        fields = line.split("\t")
        if len(fields) < 4:
            raise ValueError(f"{path}: expected start, end, time and output, got {line!r}")
        start, end, _, output = fields[:4]
        seconds[output] = (int(end) - int(start)) / 1000
    return seconds


def main() -> int:
    """Report; the exit status is 1 if a step took longer than the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build_dir", type=Path)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds a step may take")
    parser.add_argument("--top", type=int, default=10, help="number of steps to print")
    arguments = parser.parse_args()

    seconds = read_ninja_log(arguments.build_dir / ".ninja_log")
    slowest = sorted(seconds.items(), key=lambda item: -item[1])
    for output, duration in slowest[: arguments.top]:
        print(f"{duration:8.1f} s  {output}")
    too_slow = [output for output, duration in slowest if duration > arguments.limit]
    if too_slow:
        print(
            f"expected at most {arguments.limit:.0f} s a step, got more for: {', '.join(too_slow)}"
        )
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
