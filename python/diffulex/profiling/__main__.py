# SPDX-License-Identifier: Apache-2.0
"""`python -m diffulex.profiling STEPS.jsonl TRACE.json`: a step trace becomes a file for Perfetto."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from diffulex.profiling.perfetto import write_perfetto
from diffulex.profiling.ring import read_step_trace


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts a file; the exit status."""
    parser = argparse.ArgumentParser("python -m diffulex.profiling", description=__doc__)
    parser.add_argument("steps", type=Path, help="file that DIFFULEX_STEP_TRACE named")
    parser.add_argument("trace", type=Path, help="file for https://ui.perfetto.dev")
    options = parser.parse_args(arguments)
    try:
        with options.steps.open(encoding="utf-8") as lines:
            records = read_step_trace(lines)
        write_perfetto(records, options.trace)
    except (OSError, ValueError) as error:
        print(f"profiling: {error}", file=sys.stderr)
        return 1
    print(f"{len(records)} steps in {options.trace}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
