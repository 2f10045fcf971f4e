# SPDX-License-Identifier: Apache-2.0
"""One version everywhere, taken from the file VERSION."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import diffulex
import diffulex_ext

ROOT = Path(__file__).parents[3]


def test_all_versions_agree() -> None:
    version = (ROOT / "VERSION").read_text().strip()
    assert importlib.metadata.version("diffulex") == version
    assert diffulex.__version__ == version
    assert diffulex_ext.__version__ == version


def test_installed_header_has_the_version() -> None:
    header = Path(diffulex_ext.cmake_prefix_path) / "include" / "diffulex" / "version.h"
    match = re.search(r'DIFFULEX_VERSION_STRING "([^"]+)"', header.read_text())
    assert match is not None
    assert match.group(1) == diffulex_ext.__version__
