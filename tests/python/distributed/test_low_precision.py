# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks over weights in low precision and with adapters decode what one rank does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import diffulex
from diffulex import Diffulex, SamplingParams
from diffulex.quantization.scheme import SCHEMES
from fixtures.adapters import QWEN_TARGETS, AdapterBuilder
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.families import family_builder
from fixtures.quantized import FORMATS
from fixtures.thread_ranks import answers, thread_engine

ZOO = Path(__file__).resolve().parents[3] / "examples" / "zoo"
DEMO = Path(diffulex.__file__).parent / "assets" / "demo"
QUESTIONS = [
    json.loads(line)["question"]
    for line in (ZOO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:12]
]
EXPERTS_ALONE = {"tensor_parallel_size": 1, "expert_parallel_size": 2, "quantization_ignore": ()}
LIMITS: dict[str, Any] = {"max_model_len": 128, "num_pages": 64, "max_num_reqs": 4}
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[random.Random(length).randrange(200) for _ in range(length)] for length in (33, 5, 18)]
CONFIG = tiny_config(
    hidden_size=256,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    num_hidden_layers=2,
)


def sharpen(tensors: Any) -> None:
    """Spreads the confidences of random weights over (0, 1)."""
    tensors["lm_head.weight"] *= 6.0


def check(directory: Path, **settings: Any) -> list[Any]:
    """Compares one rank with two, which look at each other's decisions; what both answer."""
    found = []
    for size in (1, 2):
        with thread_engine(directory, size, **LIMITS, **settings) as engine:
            found.append(answers(engine, PROMPTS, PARAMS))
    # A decision of random weights may hang on the last bits of a sum; most do not.
    assert sum(a == b for a, b in zip(*found, strict=True)) >= len(PROMPTS) - 1
    return found[0]


@pytest.mark.parametrize("name", ["ct_fp8_channel", "fp8_block", "ct_int8", "ct_int4", "awq"])
def test_stored_codes(tmp_path: Path, name: str) -> None:
    CheckpointBuilder(CONFIG, edit=sharpen).write(tmp_path)
    FORMATS[name].write(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize(
    ("model", "size", "settings"),
    [
        *((DEMO, 2, {"quantization": scheme}) for scheme in SCHEMES),
        (DEMO, 2, {"quantization": "fp8", "quantize_head": True, "kv_cache_dtype": "fp8_e4m3"}),
        (DEMO, 2, {"kv_cache_dtype": "fp8_e4m3"}),
        (ZOO / "d2f_llada", 3, {"quantization": "int4"}),
        *(
            (ZOO / "edit_llada2", 2, {"quantization": scheme, **EXPERTS_ALONE})
            for scheme in SCHEMES
        ),
    ],
)
def test_trained_models_in_low_precision(model: Path, size: int, settings: dict[str, Any]) -> None:
    """Widths of 640 are cut into two and three groups, a KV head is half a block, and groups of int4 are
    narrower than those of 8 bits."""
    found = []
    for count in (1, size):
        with thread_engine(model, count, max_model_len=256, **settings) as engine:
            outputs = engine.generate(
                QUESTIONS, SamplingParams(max_tokens=64), summary=False, use_chat_template=True
            )
        found.append([list(o.token_ids) for o in outputs])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "fp8_block", "int4"])
def test_processes_in_low_precision(scheme: str) -> None:
    """Each loads its part by itself: scales of rows, blocks of which it has a half, and groups."""
    settings: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "quantization": scheme}
    found = []
    for sizes in ({}, {"tensor_parallel_size": 2, "check_ranks": True}):
        with Diffulex("demo", **settings, **sizes) as engine:
            outputs = engine.generate(
                QUESTIONS, SamplingParams(max_tokens=64), summary=False, use_chat_template=True
            )
        found.append([list(o.token_ids) for o in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("is_merged", [True, False], ids=["merged", "beside"])
def test_adapters(tmp_path: Path, is_merged: bool) -> None:
    base = family_builder("sdar", edit=sharpen).write(tmp_path / "base")
    targets = (*QWEN_TARGETS, "gate_proj", "up_proj", "down_proj")
    AdapterBuilder(targets).write(tmp_path / "adapter", base)
    adapter = {"use_lora": True, "lora_path": str(tmp_path / "adapter")}
    plain = check(tmp_path / "base")
    assert check(tmp_path / "base", **adapter, pre_merge_lora=is_merged) != plain
