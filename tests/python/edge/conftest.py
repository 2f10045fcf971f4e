# SPDX-License-Identifier: Apache-2.0
"""Programs, exported once a run: an export takes 15 seconds and more."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from collections.abc import Callable
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
    here = f"{Path(__file__).parent}{os.sep}"  # compared as text: there are thousands of tests
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.edge)
            # Whichever test asks first exports, or waits for the process that does: up to a minute of one
            # core, which may be shared by ten.
            item.add_marker(pytest.mark.timeout(1800))


def built_once(path: Path, build: Callable[[Path], object]) -> Path:
    """What `build` makes at `path`, by the first process that asks for it; others wait."""
    with (path.parent / f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            # One that failed halfway is not taken for a whole one.
            part = path.parent / f"{path.name}.{os.getpid()}" / path.name
            part.parent.mkdir(exist_ok=True)
            build(part)
            part.rename(path)
    return path


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory by its name, the same one in all workers of a run."""
    base = tmp_path_factory.getbasetemp()

    def get(name: str) -> Path:
        path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
        path.mkdir(exist_ok=True)
        return path

    return get


@pytest.fixture(scope="session")
def checkpoint(shared):
    """Directory of a random checkpoint of a family; `shallow` is an SDAR model of one layer."""
    root = shared("edge-checkpoints")

    def get(family: str) -> Path:
        if family == "shallow":
            config = {**family_config("sdar"), "num_hidden_layers": 1}
            return built_once(root / family, family_builder("sdar", config=config).write)
        return built_once(root / family, family_builder(family).write)

    return get


@pytest.fixture(scope="session")
def bundle(shared, checkpoint):
    """Directory of an exported program by its name in PROGRAMS."""
    root = shared("edge-bundles")

    def get(name: str) -> Path:
        from diffulex_edge.exporter import ExportConfig, export_model

        if importlib.util.find_spec("executorch") is None:
            pytest.skip("executorch not installed: pip install '.[edge]'")
        family, quant = PROGRAMS[name]
        model = "demo" if family == "demo" else str(checkpoint(family))
        rows = 256 if family == "demo" else 128
        calibration = PROBLEMS if quant == "static_int8" else None

        def export(path: Path) -> None:
            export_model(
                ExportConfig(model, path, quant=quant, max_rows=rows, calibration=calibration)
            )

        return built_once(root / name, export)

    return get
