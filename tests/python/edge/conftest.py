# SPDX-License-Identifier: Apache-2.0
"""Programs, exported once a session: an export takes 15 seconds and more."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fixtures.families import family_builder

#: Name -> (family of a random checkpoint of two layers or "demo", recipe).
PROGRAMS = {
    "demo": ("demo", "none"),
    "llada": ("llada", "none"),
    "fast_dllm_v2": ("fast_dllm_v2", "none"),
    "dream": ("dream", "none"),
    "sdar-8da8w": ("sdar", "8da8w"),
    "sdar-8da4w": ("sdar", "8da4w"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs everything here: imports and exports are paid once."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.edge)
            item.add_marker(pytest.mark.xdist_group("edge"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Directory of a random checkpoint of a family."""
    root = tmp_path_factory.mktemp("edge-checkpoints")

    def get(family: str) -> Path:
        path = root / family
        if not path.exists():
            family_builder(family).write(path)
        return path

    return get


@pytest.fixture(scope="session")
def bundle(tmp_path_factory, checkpoint):
    """Directory of an exported program by its name in PROGRAMS."""
    root = tmp_path_factory.mktemp("edge-bundles")

    def get(name: str) -> Path:
        from diffulex_edge.exporter import ExportConfig, export_model

        if importlib.util.find_spec("executorch") is None:
            pytest.skip("executorch not installed: pip install '.[edge]'")
        family, quant = PROGRAMS[name]
        path = root / name
        if not path.exists():
            model = "demo" if family == "demo" else str(checkpoint(family))
            rows = 256 if family == "demo" else 128
            export_model(ExportConfig(model, path, quant=quant, max_rows=rows))
        return path

    return get
