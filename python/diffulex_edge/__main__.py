# SPDX-License-Identifier: Apache-2.0
"""``python -m diffulex_edge`` is ``diffulex edge``, and without arguments ``diffulex chat``."""

from __future__ import annotations

import sys

from diffulex.tools.cli import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(main(["edge", *arguments] if arguments else ["chat"]))
