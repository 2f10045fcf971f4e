# SPDX-License-Identifier: Apache-2.0
"""Engines on CUDA whose cache holds e4m3 codes: how a key came into the cache changes no token."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from diffulex import SamplingParams
from tiny_engine import TinyModel

pytestmark = pytest.mark.cuda

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
ROWS = pytest.mark.parametrize("rows", ["tiny_cuda", "tiny_cuda_bf16"])


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(77) for _ in range(21)]
    return [shared + [rng.randrange(77) for _ in range(length)] for length in (1, 5, 12, 20, 3, 8)]


def decode(
    model: TinyModel, seed: int, byte: int | None = 0xFF, **settings: Any
) -> tuple[list[tuple[int, ...]], Any, Any]:
    """Token ids, outputs and statistics of an engine whose pages hold `byte` everywhere."""
    with model.engine(**{**SETTINGS, **settings}) as engine:
        cache = engine._executor.runner.kv_cache
        for layer in range(engine.config.model.spec.num_layers):
            parts = cache.layer(layer)
            assert [p.dtype for p in parts] == [torch.float8_e4m3fn] * 2 + [torch.uint8] * 2
            for part in parts:
                if byte is not None:
                    part.view(torch.uint8).fill_(byte)
        outputs = engine.generate(prompts(seed), PARAMS, summary=False)
        assert all(output.error is None for output in outputs)
        return [output.token_ids for output in outputs], outputs, engine.stats()


@ROWS
def test_unwritten_pages_do_not_matter(request: pytest.FixtureRequest, rows: str) -> None:
    model = request.getfixturevalue(rows)
    assert decode(model, 1)[0] == decode(model, 1, None)[0]


@ROWS
@pytest.mark.parametrize("run_ahead", ["on", "off"])
def test_graphs_and_steps_that_run_ahead(
    request: pytest.FixtureRequest, rows: str, run_ahead: str
) -> None:
    model = request.getfixturevalue(rows)
    eager = decode(model, 3, enforce_eager=True, run_ahead="off")[0]
    assert decode(model, 3, run_ahead=run_ahead)[0] == eager


@pytest.mark.parametrize("seed", range(3))
def test_chunked_and_whole_prefill(tiny_cuda: TinyModel, seed: int) -> None:
    whole = decode(tiny_cuda, seed)[0]
    chunked, outputs, _ = decode(
        tiny_cuda, seed, enable_chunked_prefill=True, max_num_batched_tokens=8 + 4 * seed
    )
    assert any(output.metrics.prefill_steps > 1 for output in outputs)
    assert chunked == whole


def test_preempted_and_not(tiny_cuda: TinyModel) -> None:
    calm, _, stats = decode(tiny_cuda, 2)
    assert stats.num_preemptions == 0
    tight, _, stats = decode(tiny_cuda, 2, num_pages=12, decode_headroom=False)
    assert stats.num_preemptions > 0
    assert tight == calm
