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


@pytest.fixture(scope="session")
def wan22(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny Wan 2.2: two transformers, with a boundary of 0.875."""
    import torch

    from diffulex.omni._diffusers_compat import import_diffusers

    diffusers = import_diffusers()
    pipeline = diffusers.WanPipeline.from_pretrained(tiny("wan"))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        second = diffusers.WanTransformer3DModel.from_config(pipeline.transformer.config)
    pipeline.register_modules(transformer_2=second)
    pipeline.register_to_config(boundary_ratio=0.875)
    directory = tmp_path_factory.mktemp("experts") / "wan22"
    pipeline.save_pretrained(directory)
    return directory
