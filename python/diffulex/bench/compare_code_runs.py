# SPDX-License-Identifier: Apache-2.0
"""``python -m diffulex.bench.compare_code_runs BASE CAND``: the older name of ``diffulex bench compare``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from diffulex.bench.compare import Comparison, add_compare_flags, compare_runs, run_compare
from diffulex.config.flags import Parser
from diffulex.errors import ConfigError

__all__ = ["Comparison", "compare_runs", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; 2 where it cannot be used."""
    parser = Parser(prog="diffulex.bench.compare_code_runs")
    add_compare_flags(parser)
    try:
        return run_compare(parser.parse_args(arguments))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
