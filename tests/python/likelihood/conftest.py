# SPDX-License-Identifier: Apache-2.0
"""Makes the brute-force scores importable, and builds tiny engines with their oracles."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
