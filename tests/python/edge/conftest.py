# SPDX-License-Identifier: Apache-2.0
"""Programs, exported once a session: an export takes 15 seconds and more."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fixtures.families import family_builder, family_config

#: Name -> (family of a random checkpoint of two layers or "demo", recipe).
PROGRAMS = {
    "demo": ("demo", "none"),
    "llada": ("llada", "none"),
    "fast_dllm_v2": ("fast_dllm_v2", "none"),
    "dream": ("dream", "none"),
    "sdar-8da8w": ("sdar", "8da8w"),
    "sdar-8da4w": ("sdar", "8da4w"),
    "shallow-fp16": ("shallow", "fp16"),
    "shallow-pt2e_dyn8": ("shallow", "pt2e_dyn8"),
    "shallow-static_int8": ("shallow", "static_int8"),
    "shallow-emb=4": ("shallow", "8da8w,emb=4,hqq"),
}
PROBLEMS = Path(__file__).resolve().parents[3] / "examples/zoo/heldout.jsonl"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs everything here: imports and exports are paid once."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.edge)
            item.add_marker(pytest.mark.xdist_group("edge"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Directory of a random checkpoint of a family; `shallow` is an SDAR model of one layer."""
    root = tmp_path_factory.mktemp("edge-checkpoints")

    def get(family: str) -> Path:
        path = root / family
        if not path.exists() and family == "shallow":
            config = {**family_config("sdar"), "num_hidden_layers": 1}
            family_builder("sdar", config=config).write(path)
        elif not path.exists():
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
            calibration = PROBLEMS if quant == "static_int8" else None
            export_model(
                ExportConfig(model, path, quant=quant, max_rows=rows, calibration=calibration)
            )
        return path

    return get
