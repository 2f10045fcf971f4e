# SPDX-License-Identifier: Apache-2.0
"""Makes the shared modules importable, and leaves the environment as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, Path(__file__).parent.parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(autouse=True)
def _settings_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server sets them for the processes it starts; here they would outlive it."""
    for key in ("DIFFULEX_LOG_LEVEL", "DIFFULEX_LOG_FORMAT"):
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)
