# SPDX-License-Identifier: Apache-2.0
"""``python -m diffulex``."""

from __future__ import annotations

import sys

from diffulex.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
