# SPDX-License-Identifier: Apache-2.0
"""The command of every preset, with a tiny checkpoint of its family in place of the published one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diffulex.bench.__main__ import main
from diffulex.bench.config import read_settings
from diffulex.bench.presets import preset_path, presets
from fixtures.adapters import LLADA_TARGETS, QWEN_TARGETS, AdapterBuilder
from fixtures.checkpoints import CheckpointBuilder, write_tokenizer
from fixtures.families import family_builder
from fixtures.gemma import GemmaOracle
from fixtures.moe_families import moe_builder

#: Family of a preset's `model_name` whose checkpoint stands for the published one.
FAMILIES = {
    "llada2_mini": "llada2",
    "llada2dot1_mini": "llada2",
    "llada2_mini_dmax": "llada2",
    "diffucoder": "dream",
}
MASK_ID = 259


def _write_model(family: str, directory: Path) -> dict[str, Any]:
    """A tiny checkpoint with a tokenizer; its tensors."""
    if family == "diffusion_gemma":
        tensors = GemmaOracle(vocab_size=300, max_position_embeddings=512).write(directory)
        write_tokenizer(directory, "fast")
        return tensors
    if family == "sdar":
        builder = CheckpointBuilder()
    elif family in ("sdar_moe", "llada2"):
        builder = moe_builder(family)
    else:
        builder = family_builder(family)
    return builder.write(directory)


def _items(folder: Path) -> Path:
    """Items that tasks of mathematics and of programs understand."""
    items = [
        {
            "question": f"{n} + 1?", "answer": f"so\n#### {n + 1}", "prompt": f"Write {n}.",
            "code": "", "prefix": "", "test_method": "function", "test_list": ["assert True"],
            "test_imports": [],
        }
        for n in range(3)
    ]  # fmt: skip
    path = folder / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("preset", [name for name in presets() if name != "example"])
def test_every_preset_runs(preset: str, tmp_path: Path) -> None:
    settings = read_settings(preset_path(preset))
    engine = settings["engine"]
    family = FAMILIES.get(engine["model_name"], engine["model_name"])
    tensors = _write_model(family, tmp_path / "model")
    arguments = [
        "--preset", preset, "--model-path", str(tmp_path / "model"), "--dataset-limit", "2",
        "--dataset-data-files", str(_items(tmp_path)), "--max-tokens", "12", "--max-nfe", "16",
        "--warmup-requests", "0", "--output-dir", str(tmp_path / "out"), "--progress", "none",
        "--engine-arg", "device=cpu", "--max-num-batched-tokens", str(engine["max_model_len"]),
        "--engine-arg", "num_pages=64",
    ]  # fmt: skip
    if family != "diffusion_gemma":
        arguments += ["--mask-token-id", str(MASK_ID)]
    if engine.get("use_lora"):
        targets = LLADA_TARGETS if family == "llada" else QWEN_TARGETS
        AdapterBuilder(targets).write(tmp_path / "adapter", tensors)
        arguments += ["--lora-path", str(tmp_path / "adapter")]
    if "tensor_parallel_size" in engine:
        arguments += ["--tensor-parallel-size", "1"]  # one CPU in place of four GPUs
    assert main(arguments) == 0
    (run,) = (tmp_path / "out").iterdir()
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["status"] == "done"
    assert manifest["engine"]["strategy"] == engine["decoding_strategy"]
    assert manifest["engine"]["buffer_size"] == engine["buffer_size"]
    assert manifest["origins"]["engine.decoding_strategy"] == "file"
    assert manifest["origins"]["engine.model_path"] == "flag"
    (task,) = manifest["tasks"]
    assert task == settings["eval"]["dataset_name"]
    stats = json.loads((run / "diffulex_stats.json").read_text())
    assert stats["total_samples"] == 2
    assert stats["total_nfe"] > 0


@pytest.mark.parametrize("preset", [name for name in presets() if name.startswith("mbd_")])
def test_rows_of_several_blocks_have_their_thresholds(preset: str) -> None:
    kind = preset.rpartition("_")[2]
    settings = read_settings(preset_path(preset))
    engine = settings["engine"]
    thresholds = engine["decoding_thresholds"]
    is_small = engine["block_size"] == 4
    is_dmax = engine["decoding_strategy"] == "dmax"
    assert engine["buffer_size"] == (4 if "sdar" in preset else 2)
    assert (
        thresholds["add_block_threshold"] == {"math": 0.1, "code": 0.75 if is_small else 0.9}[kind]
    )
    semi = {"math": 0.25, "code": 0.75}[kind] if is_small else 0.9
    assert thresholds["semi_complete_threshold"] == semi
    assert thresholds["accept_threshold"] == (
        {"math": 0.5, "code": 0.65}[kind] if is_dmax else 0.95
    )
    assert thresholds.get("token_stability_threshold") == (0.5 if is_dmax else None)
    assert settings["eval"]["max_tokens"] == engine["max_model_len"] == 4096
    assert settings["eval"]["max_nfe"] == 1024


def test_the_example_runs_as_it_is(tmp_path: Path) -> None:
    assert main(["--preset", "example", "--output-dir", str(tmp_path), "--progress", "none"]) == 0
