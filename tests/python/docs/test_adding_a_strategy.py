# SPDX-License-Identifier: Apache-2.0
"""docs/adding_a_strategy.md does what it says, up to an engine that serves with the strategy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffulex import Diffulex, SamplingParams
from diffulex import registry as registry_module

ROOT = Path(__file__).parents[3]
STRATEGY_REGISTRIES = ("AutoReq", "AutoKVCacheManager", "AutoScheduler", "AutoModelRunner")
MODEL_REGISTRIES = ("AutoModelForDiffusionLM", "AutoSampler")


def python_blocks(name: str) -> list[str]:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    found: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The counting model of docs/extending.md."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "python"))
    from fixtures.checkpoints import write_tokenizer

    directory = tmp_path / "counting"
    directory.mkdir()
    config = {"architectures": ["CountingLM"], "vocab_size": 300, "mask_token_id": 259}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"scale": torch.tensor([9.0])}, directory / "model.safetensors")
    write_tokenizer(directory, "fast")
    return directory


def generate(checkpoint: Path, strategy: str) -> Any:
    with Diffulex(
        str(checkpoint), decoding_strategy=strategy, device="cpu", num_pages=32
    ) as engine:
        params = SamplingParams(max_tokens=20)
        return engine.generate([1, 2, 3, 4, 5], params, summary=False)[0]


def test_the_toy_strategy_runs_alone_and_in_the_engine(checkpoint: Path) -> None:
    blocks = python_blocks("adding_a_strategy.md")
    assert len(blocks) == 5
    namespace: dict[str, Any] = {"__name__": "adding_a_strategy"}
    try:
        for source in python_blocks("extending.md")[:2]:
            exec(source, {"__name__": "counting"})
        for source in blocks:
            exec(source, namespace)  # the blocks assert what the text claims
        plain = generate(checkpoint, "multi_bd")
        confirmed = generate(checkpoint, "confirming_bd")
        assert confirmed.token_ids == plain.token_ids == tuple(range(5, 25))
        assert confirmed.metrics.nfe > plain.metrics.nfe
    finally:
        for name in (*STRATEGY_REGISTRIES, *MODEL_REGISTRIES):
            registry = getattr(registry_module, name)
            for entry in ("confirming_bd", "counting"):
                if entry in registry.available():
                    registry.unregister(entry)
