# SPDX-License-Identifier: Apache-2.0
"""Makes the shared modules of this folder importable (pytest runs with import mode importlib)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
