# SPDX-License-Identifier: Apache-2.0
"""``diffulex``, and ``python -m diffulex``."""

from __future__ import annotations

import sys

from diffulex.interruption import ending_at_once


def main() -> int:
    """Runs the command line of this process and returns its exit code."""
    with ending_at_once():
        from diffulex.tools.cli import main as run  # noqa: PLC0415 (Ctrl-C while it is imported)
    return run()


if __name__ == "__main__":
    sys.exit(main())
