# SPDX-License-Identifier: Apache-2.0
"""Weights and caches in low precision, and adapters, on two GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from diffulex import Diffulex, SamplingParams
from diffulex.quantization.convert import convert
from diffulex.quantization.scheme import SCHEMES, QuantizationPlan
from fixtures.adapters import QWEN_TARGETS, AdapterBuilder
from fixtures.families import family_builder
from fixtures.moe_families import moe_builder, moe_config

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks" / "python"))

from published_shapes import SHAPES
from random_engine import build_shared_engine, random_prompts

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]

ZOO = Path(__file__).resolve().parents[3] / "examples" / "zoo"
DEMO = Path(__file__).resolve().parents[3] / "python" / "diffulex" / "assets" / "demo"
ALONE: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_model_len": 256,
    "num_pages": 128,
    "max_num_reqs": 4,
}
SHARED: dict[str, Any] = {**ALONE, "tensor_parallel_size": 2, "check_ranks": True}
_QUESTIONS = (ZOO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:16]
TEXTS = [json.loads(line)["question"] for line in _QUESTIONS]
GREEDY = SamplingParams(max_tokens=48)
RANDOM = [[7 * index % 200 + 1 for index in range(length)] for length in (33, 5, 18, 40)]


def tokens(model: Any, prompts: Any = TEXTS, params: Any = GREEDY, **settings: Any) -> Any:
    with Diffulex(str(model), **settings) as engine:
        is_chat = isinstance(prompts[0], str)
        outputs = engine.generate(prompts, params, summary=False, use_chat_template=is_chat)
        return [list(o.token_ids) for o in outputs]


def check_most(found: list[Any], expected: list[Any], share: float = 0.8) -> None:
    """Partial sums are rounded to bfloat16, which a trained model bears for most questions."""
    num_equal = sum(a == b for a, b in zip(found, expected, strict=True))
    print(f"{num_equal} of {len(expected)} equal")
    assert num_equal >= share * len(expected)


@pytest.mark.parametrize(
    "settings",
    [*({"quantization": scheme} for scheme in SCHEMES), {"kv_cache_dtype": "fp8_e4m3"}],
    ids=lambda settings: "-".join(settings.values()),
)
def test_two_gpus_decode_what_one_does(settings: dict[str, Any]) -> None:
    found = tokens("demo", **SHARED, **settings)
    check_most(found, tokens("demo", **ALONE, **settings))
    assert tokens("demo", **SHARED, **settings, enforce_eager=True, run_ahead="off") == found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_stored_codes_are_those_of_loading(tmp_path: Path, scheme: str) -> None:
    convert(DEMO, tmp_path / "stored", QuantizationPlan(scheme))
    found = tokens(tmp_path / "stored", **SHARED)
    assert found == tokens("demo", **SHARED, quantization=scheme)


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int8"])
def test_trained_experts(scheme: str) -> None:
    limits = {**ALONE, "quantization": scheme}
    expected = tokens(ZOO / "edit_llada2", **limits)
    found = tokens(ZOO / "edit_llada2", **limits, expert_parallel_size=2, check_ranks=True)
    check_most(found, expected)


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int8"])
@pytest.mark.parametrize(("family", "mode"), [("llada2", "width"), ("sdar_moe", "expert")])
def test_experts_that_ranks_have_parts_of(
    tmp_path: Path, family: str, mode: str, scheme: str
) -> None:
    """Random weights, so that only the ranks and the ways of running a step are compared."""
    sizes = {"intermediate_size": 256, "moe_intermediate_size": 256, "hidden_size": 128}
    config = moe_config(family, head_dim=64, rotary_dim=..., **sizes)
    moe_builder(family, config=config).write(tmp_path)
    settings = {**SHARED, "max_model_len": 128, "quantization": scheme, "moe_parallel_mode": mode}
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    found = tokens(tmp_path, RANDOM, params, **settings)
    assert tokens(tmp_path, RANDOM, params, **settings, enforce_eager=True) == found
    assert tokens(tmp_path, RANDOM, params, **settings, run_ahead="off") == found


@pytest.mark.parametrize("is_merged", [True, False], ids=["merged", "beside"])
def test_adapters(tmp_path: Path, is_merged: bool) -> None:
    def sharpen(weights: Any) -> None:
        weights["lm_head.weight"] *= 6.0  # spreads the confidences of random weights

    base = family_builder("sdar", edit=sharpen).write(tmp_path / "base")
    targets = (*QWEN_TARGETS, "gate_proj", "up_proj", "down_proj")
    AdapterBuilder(targets).write(tmp_path / "adapter", base)
    settings = {"dtype": "float32", "use_lora": True, "pre_merge_lora": is_merged}
    settings |= {"max_model_len": 128, "lora_path": str(tmp_path / "adapter")}
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    found = tokens(tmp_path / "base", RANDOM, params, **SHARED | settings)
    expected = tokens(tmp_path / "base", RANDOM, params, **ALONE | settings)
    check_most(found, expected, 0.75)  # a decision of random weights may hang on the last bits
    assert found != tokens(tmp_path / "base", RANDOM, params, **SHARED | {"max_model_len": 128})


def ways_to_run(name: str, prompts: Any, params: Any, **settings: Any) -> tuple[Any, list[int]]:
    """Tokens of two ranks in steps of the host, of the device, and without graphs; packed steps of each."""
    found, packed = [], []
    shape = SHAPES[name]
    for own in ({"run_ahead": "off"}, {}, {"enforce_eager": True, "run_ahead": "on"}):
        made = ALONE | settings | own | {"check_ranks": True}
        with build_shared_engine(shape, 2, made.pop("device"), **made) as engine:
            outputs = [engine.generate(prompts, each, summary=False) for each in params]
            found.append([list(output.token_ids) for group in outputs for output in group])
            loop = engine._executor.runner.loop
            packed.append(0 if loop is None else loop.num_packed_steps)
    return found, packed


PUBLISHED = [SamplingParams(max_tokens=128, ignore_eos=True)]
PUBLISHED += [SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.8, top_k=30, seed=5)]


@pytest.mark.alone  # 16 GB of weights on each device, and as much again where the host draws them
@pytest.mark.parametrize("num_prompts", [1, 4])
def test_ranks_pack_the_steps_of_the_device(num_prompts: int) -> None:
    """Four blocks, of which few are open: they decode what whole steps do, with and without graphs."""
    prompts = random_prompts(SHAPES["sdar-8b-b32"].facts().spec, num_prompts, 64)
    settings = {"dtype": "float32", "buffer_size": 4, "max_num_reqs": num_prompts}
    found, packed = ways_to_run("sdar-8b-b32", prompts, PUBLISHED, **settings)
    assert packed[0] == 0
    assert min(packed[1:]) > 10
    assert found[0] == found[1] == found[2]


@pytest.mark.alone
@pytest.mark.parametrize("name", ["sdar-8b-b32", "llada2-mini"])
def test_published_shapes_decode_the_same_however_they_run(name: str) -> None:
    prompts = random_prompts(SHAPES[name].facts().spec, 4, 64)
    found, _ = ways_to_run(name, prompts, PUBLISHED[:1])
    assert found[0] == found[1] == found[2]


@pytest.mark.alone
def test_a_model_that_no_single_gpu_holds() -> None:
    """103 billion parameters in bfloat16, whose ranks decide the same for fifty steps."""
    import torch

    memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(2))
    if memory < 120e9:
        pytest.skip(
            f"needs two GPUs with 120 GB each, for 103 GB of weights; has {memory / 1e9:.0f}"
        )
    shape = SHAPES["llada2-flash"]
    settings = {"dtype": "bfloat16", "check_ranks": True, "max_num_reqs": 2}
    with build_shared_engine(
        shape, 2, "cuda", max_model_len=512, num_pages=64, **settings
    ) as engine:
        spec = engine.config.model.spec
        for prompt in random_prompts(spec, 2, 64):
            engine.add_request(prompt, SamplingParams(max_tokens=256, ignore_eos=True))
        for _ in range(50):
            assert engine.has_unfinished()
            engine.step()
        assert engine._executor.counts.graph > 0
        taken = torch.cuda.memory_allocated()
        print(f"{spec.num_parameters / 1e9:.1f} billion parameters, {taken / 1e9:.1f} GB here")
        assert taken > spec.num_parameters
