# SPDX-License-Identifier: Apache-2.0
"""Tiny pipelines, built once, and how they are drawn with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch with one thread: bits do not depend on the processors, and tiny matrices gain nothing from more."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def exact_previews(monkeypatch: pytest.MonkeyPatch) -> None:
    """Previews are decoded whatever that takes."""
    from diffulex.omni.previews import Previews

    draw = Previews.draw
    monkeypatch.setattr(Previews, "draw", lambda *args: draw(*args[:-1], math.inf))


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
