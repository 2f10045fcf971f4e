# SPDX-License-Identifier: Apache-2.0
"""Makes the shared modules of this folder importable (pytest runs with import mode importlib)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import diffulex.ops  # noqa: F401 (registers the fakes)

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))  # the package `reference`

import op_calls


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """CUDA variants of ops that are CPU-only by design are no tests; one of its own asks for the
    error."""
    unwanted = [item for item in items if _is_cpu_only_on_cuda(item)]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        dropped = set(unwanted)
        items[:] = [item for item in items if item not in dropped]


def _is_cpu_only_on_cuda(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    if callspec is None or callspec.params.get("op") not in op_calls.CPU_ONLY:
        return False
    return item.get_closest_marker("cuda") is not None
