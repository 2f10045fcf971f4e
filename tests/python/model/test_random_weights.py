# SPDX-License-Identifier: Apache-2.0
"""`load_format="dummy"`: the shape of a checkpoint without its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.checkpoint.resolve import demo_dir
from diffulex.errors import CheckpointError


def test_no_weights_are_needed_or_read(tmp_path: Path) -> None:
    """Twice the same tokens, and not those of the trained weights."""
    for path in demo_dir().glob("*.json"):
        if not path.name.endswith("index.json"):
            shutil.copy(path, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def tokens(model: str, load_format: str) -> list[int]:
        with Diffulex(model, device="cpu", load_format=load_format) as engine:
            return list(engine.generate([[5, 6, 7]], params, summary=False)[0].token_ids)

    first = tokens(str(tmp_path), "dummy")
    assert len(first) == 12
    assert first == tokens(str(tmp_path), "dummy")
    assert first == tokens("demo", "dummy")
    assert first != tokens("demo", "auto")
    with pytest.raises(CheckpointError):
        tokens(str(tmp_path), "auto")


def test_weights_have_the_spread_of_an_initialised_model() -> None:
    with Diffulex("demo", device="cpu", load_format="dummy") as engine:
        weight = engine._executor.runner.model.embedding.weight
        assert weight.dtype == torch.float32
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
