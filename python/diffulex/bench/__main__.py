# SPDX-License-Identifier: Apache-2.0
"""``python -m diffulex.bench``: ``diffulex bench``, where flags alone mean ``eval``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from diffulex.interruption import ending_at_once


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0].startswith("--") and arguments[0] != "--help":
        arguments.insert(0, "eval")
    with ending_at_once():
        from diffulex.tools.cli import main as run_command  # noqa: PLC0415 (Ctrl-C meanwhile)
    return run_command(["bench", *(arguments or ["--help"])])


if __name__ == "__main__":
    sys.exit(main())
