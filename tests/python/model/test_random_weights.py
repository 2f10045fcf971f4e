# SPDX-License-Identifier: Apache-2.0
"""`load_format="dummy"`: the shape of a checkpoint without its weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.checkpoint import random_weights
from diffulex.checkpoint.auto_model import detect, random_model
from diffulex.checkpoint.resolve import demo_dir
from diffulex.distributed.shard import Shard
from diffulex.errors import CheckpointError
from fixtures.checkpoints import CheckpointBuilder, tiny_config


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


def test_ranks_draw_what_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a matrix is that of the whole one, and rows that no one has are not drawn."""
    monkeypatch.setattr(random_weights, "_CHUNK_VALUES", 1)  # 128 rows at once
    CheckpointBuilder(tiny_config(intermediate_size=704, num_hidden_layers=1)).write(tmp_path)
    name, spec, _ = detect(tmp_path)
    whole: Any = random_model(name, spec, torch.float32, "cpu")
    key = "model.layers.0.mlp.up_proj.weight"
    numbers: list[int] = []
    chunk = random_weights._DrawnTensor._chunk

    def watched(self: Any, first: int) -> torch.Tensor:
        if self.name == key:
            numbers.append(first)
        return chunk(self, first)

    monkeypatch.setattr(random_weights._DrawnTensor, "_chunk", watched)
    part: Any = random_model(name, spec, torch.float32, "cpu", shard=Shard(1, 2))
    (rows,) = part.weight_slices()[key].rows
    assert torch.equal(part.weight_table()[key], whole.weight_table()[key][rows])
    assert min(numbers) == rows.start // 128 * 128
    assert min(numbers) > 0


def test_values_depend_on_seed_name_and_place(tmp_path: Path) -> None:
    CheckpointBuilder(tiny_config(num_hidden_layers=2)).write(tmp_path)
    name, spec, _ = detect(tmp_path)
    models: list[Any] = [
        random_model(name, spec, torch.float32, "cpu", seed=seed) for seed in (4, 4, 5)
    ]
    tables = [model.weight_table() for model in models]
    key, other = (f"model.layers.{index}.mlp.up_proj.weight" for index in range(2))
    assert torch.equal(tables[0][key], tables[1][key])
    assert not torch.equal(tables[0][key], tables[2][key])
    assert not torch.equal(tables[0][key], tables[0][other])
    norm = tables[0]["model.norm.weight"]
    assert norm.mean().item() == pytest.approx(1, abs=0.1)
    assert 0.05 < norm.std().item() < 0.2
