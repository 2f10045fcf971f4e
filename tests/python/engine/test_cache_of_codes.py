# SPDX-License-Identifier: Apache-2.0
"""Engines whose cache holds e4m3 codes: how a key came into the cache changes no token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.errors import ConfigError
from diffulex.nn.kv_cache import KVCache
from tiny_engine import TinyModel

SETTINGS: dict[str, Any] = {
    "kv_cache_dtype": "fp8_e4m3",
    "block_size": 4,
    "buffer_size": 2,
    "page_size": 8,
    "num_pages": 64,
    "max_model_len": 64,
    "max_num_reqs": 6,
    "enable_prefix_caching": False,
}
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
STRATEGIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "multi_bd": ("sdar", {}, {}),
    "d2f": ("dream", {"decoding_strategy": "d2f"}, {"shift": True}),
    "edit": ("llada2", {"sampling_mode": "edit"}, {}),
    "fast_dllm_v2": ("fast_dllm_v2", {"decoding_strategy": "fast_dllm_v2"}, {"shift": True}),
}


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(77) for _ in range(21)]
    return [shared + [rng.randrange(77) for _ in range(length)] for length in (1, 5, 12, 20, 3, 8)]


def runner_of(engine: Diffulex) -> Any:
    return engine._executor.runner


def poison_pages(engine: Diffulex) -> None:
    """Codes that stand for NaN and scales beyond every finite one, everywhere."""
    for layer in range(engine.config.model.spec.num_layers):
        for part in runner_of(engine).kv_cache.layer(layer):
            part.view(torch.uint8).fill_(0xFF)


def answers(outputs: Any) -> list[tuple[int, ...]]:
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


def decode(model: TinyModel, seed: int, **settings: Any) -> tuple[list[tuple[int, ...]], Any, Any]:
    """Token ids, outputs and statistics of an engine whose pages are poisoned."""
    with model.engine(**{**SETTINGS, **settings}) as engine:
        assert [p.dtype for p in runner_of(engine).kv_cache.layer(0)] == [
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
            torch.uint8,
            torch.uint8,
        ]
        poison_pages(engine)
        outputs = engine.generate(prompts(seed), PARAMS, summary=False)
        return answers(outputs), outputs, engine.stats()


def of_strategy(tiny: TinyModel, name: str) -> tuple[TinyModel, dict[str, Any]]:
    family, settings, spec = STRATEGIES[name]
    return tiny.under(family, **spec), settings


@pytest.mark.parametrize("name", STRATEGIES)
def test_unwritten_pages_do_not_matter(tiny: TinyModel, name: str) -> None:
    model, settings = of_strategy(tiny, name)
    with model.engine(**SETTINGS, **settings) as engine:
        clean = answers(engine.generate(prompts(1), PARAMS, summary=False))
    assert decode(model, 1, **settings)[0] == clean


def test_codes_change_what_is_decoded(tiny: TinyModel) -> None:
    """Otherwise these tests would hold for a cache of plain values too."""
    with tiny.engine(**{**SETTINGS, "kv_cache_dtype": "auto"}) as engine:
        plain = answers(engine.generate(prompts(1), PARAMS, summary=False))
    assert decode(tiny, 1)[0] != plain


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", range(4))
def test_chunked_and_whole_prefill(tiny: TinyModel, seed: int) -> None:
    whole = decode(tiny, seed)[0]
    chunked, outputs, _ = decode(
        tiny, seed, enable_chunked_prefill=True, max_num_batched_tokens=8 + 4 * (seed % 3)
    )
    assert any(output.metrics.prefill_steps > 1 for output in outputs)
    assert chunked == whole


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", range(4))
def test_prefix_hits_and_misses(tiny: TinyModel, seed: int) -> None:
    missed = decode(tiny, seed)[0]
    with tiny.engine(**{**SETTINGS, "enable_prefix_caching": True}) as engine:
        poison_pages(engine)
        outputs = [engine.generate(p, PARAMS, summary=False)[0] for p in prompts(seed)]
    assert all(output.metrics.cached_tokens >= 16 for output in outputs[1:])
    assert answers(outputs) == missed


@pytest.mark.every(3)
@pytest.mark.parametrize("name", STRATEGIES)
def test_preempted_and_not(tiny: TinyModel, name: str) -> None:
    model, settings = of_strategy(tiny, name)
    calm, _, stats = decode(model, 2, **settings)
    assert stats.num_preemptions == 0
    tight, _, stats = decode(model, 2, **settings, num_pages=12, decode_headroom=False)
    assert stats.num_preemptions > 0
    assert tight == calm


@pytest.mark.parametrize("name", ["multi_bd", "d2f"])
def test_steps_that_run_ahead(tiny: TinyModel, name: str) -> None:
    model, settings = of_strategy(tiny, name)
    with model.engine(**SETTINGS, **settings, run_ahead="on", check_run_ahead=True) as engine:
        poison_pages(engine)
        ahead = answers(engine.generate(prompts(3), PARAMS, summary=False))
        assert runner_of(engine).num_ahead_steps > 0
    assert ahead == decode(model, 3, **settings, run_ahead="off")[0]


def test_pages_from_the_bytes_of_codes_and_scales(tiny: TinyModel) -> None:
    """A page of 8 tokens: 2 (K, V) * 2 layers * 8 * 2 heads * (32 + 1) bytes."""
    page_bytes = 2 * 2 * 8 * 2 * 33
    settings = {**SETTINGS, "num_pages": -1, "cpu_kv_cache_bytes": 9 * page_bytes + 1}
    with tiny.engine(**settings) as engine:
        assert engine.config.cache.num_pages == 9
        assert runner_of(engine).kv_cache.nbytes == 9 * page_bytes
    # SDAR-8B: 36 layers of 8 heads of 128.
    assert KVCache.page_bytes([(8, 128)] * 36, 1, torch.bfloat16) == 147_456
    assert KVCache.page_bytes([(8, 128)] * 36, 1, torch.float8_e4m3fn) == 74_304


def test_codes_have_one_layout(tiny: TinyModel) -> None:
    message = "^kv_cache_dtype: expected auto with kv_cache_layout distinct, got fp8_e4m3$"
    with pytest.raises(ConfigError, match=message):
        tiny.config(**SETTINGS, kv_cache_layout="distinct")
    with pytest.raises(ValueError, match=r"expected layout unified for torch\.float8_e4m3fn"):
        KVCache([(1, 16)], 1, 4, torch.float8_e4m3fn, "cpu", "distinct")
