# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines, built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny pipeline by name."""
    from fixtures import omni_tiny

    directory = tmp_path_factory.mktemp("omni")
    built: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in built:
            built[name] = omni_tiny.build(name, directory)
        return built[name]

    return get
