# SPDX-License-Identifier: Apache-2.0
"""docs/extending.md does what it says: in one process, and as an installed package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffulex import Diffulex, SamplingParams
from diffulex import registry as registry_module

TEXT = (Path(__file__).parents[3] / "docs" / "extending.md").read_text(encoding="utf-8")
STRATEGY_REGISTRIES = ("AutoReq", "AutoKVCacheManager", "AutoScheduler", "AutoModelRunner")

RUN = """
import sys
from diffulex import Diffulex, SamplingParams
from diffulex import registry
for name, entry in (("AutoReq", "bounded_bd"), ("AutoKVCacheManager", "bounded_bd"),
                    ("AutoScheduler", "bounded_bd"), ("AutoModelRunner", "bounded_bd"),
                    ("AutoModelForDiffusionLM", "counting"), ("AutoSampler", "counting")):
    assert entry in getattr(registry, name).available(), name
assert "counting_plugin" not in sys.modules, "listing must not import"
engine = Diffulex(sys.argv[1], decoding_strategy="bounded_bd", device="cpu", num_pages=32)
out = engine.generate([1, 2, 3, 4, 5], SamplingParams(max_tokens=50), summary=False)[0]
print(list(out.token_ids), out.completion_reason)
"""


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return found


def write_checkpoint(directory: Path) -> None:
    from fixtures.checkpoints import write_tokenizer

    directory.mkdir()
    config = {"architectures": ["CountingLM"], "vocab_size": 300, "mask_token_id": 259}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"scale": torch.tensor([9.0])}, directory / "model.safetensors")
    write_tokenizer(directory, "fast")


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    write_checkpoint(tmp_path / "counting")
    return tmp_path / "counting"


def test_blocks_register_one_entry_of_each_kind(checkpoint: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "counting_plugin"}
    try:
        for source in blocks("python"):
            exec(source, namespace)
        with Diffulex(
            str(checkpoint), decoding_strategy="bounded_bd", device="cpu", num_pages=32
        ) as engine:
            params = SamplingParams(max_tokens=50)
            output = engine.generate([1, 2, 3, 4, 5], params, summary=False)[0]
        assert output.token_ids == (5, 6, 7, 8, 9, 10, 11, 12)
        assert output.completion_reason == "max_new_tokens_reached"
        assert engine.config.decoding.buffer_size == 2
        assert namespace["CountingSampler"].num_calls > 0
        assert namespace["CountedModelRunner"].num_steps == output.metrics.nfe
    finally:
        for name in STRATEGY_REGISTRIES:
            registry = getattr(registry_module, name)
            if "bounded_bd" in registry.available():
                registry.unregister("bounded_bd")
        for name in ("AutoModelForDiffusionLM", "AutoSampler"):
            registry = getattr(registry_module, name)
            if "counting" in registry.available():
                registry.unregister("counting")


@pytest.mark.slow
def test_entry_points_of_an_installed_package(checkpoint: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "counting_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    source = re.sub(r"^@Auto.*\n", "", "\n".join(blocks("python")), flags=re.MULTILINE)
    (site / "counting_plugin.py").write_text(source)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting_plugin\nVersion: 1.0\n")
    lines = re.findall(r'^"(.*)" = "(.*)"$', blocks("toml")[0], re.MULTILINE)
    assert len(lines) == 8
    entries = "\n".join(f"{name} = {value}" for name, value in lines)
    (info / "entry_points.txt").write_text(f"[diffulex.plugins]\n{entries}\n")
    path = os.pathsep.join([str(site), *(p for p in sys.path if p)])
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(checkpoint)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[0] == ("[5, 6, 7, 8, 9, 10, 11, 12] max_new_tokens_reached")
