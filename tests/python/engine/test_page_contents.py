# SPDX-License-Identifier: Apache-2.0
"""Results do not depend on what the pages held before, NaN included."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from tiny_engine import TinyModel

POISON = 77
DEVICES = ["tiny", pytest.param("tiny_cuda", marks=pytest.mark.cuda)]
SETTINGS: dict[str, Any] = {
    "block_size": 8,
    "buffer_size": 2,
    "page_size": 8,
    "num_pages": 24,
    "max_model_len": 64,
    "max_num_reqs": 3,
}
PARAMS = SamplingParams(max_tokens=14, ignore_eos=True)


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(POISON) for _ in range(19)]
    lengths = (1, 7, 8, 13, 30)
    own = [[rng.randrange(POISON) for _ in range(length)] for length in lengths]
    return [*own, shared + own[0], shared + own[1]]


def answers(engine: Diffulex, seed: int) -> list[tuple[int, ...]]:
    outputs = engine.generate(prompts(seed), PARAMS, summary=False)
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


@pytest.fixture(params=DEVICES)
def model(request: pytest.FixtureRequest) -> TinyModel:
    tiny: TinyModel = request.getfixturevalue(request.param)
    return tiny


@pytest.mark.parametrize("layout", ["unified", "distinct"])
def test_nan_in_pages_that_were_never_written(model: TinyModel, layout: str) -> None:
    with model.engine(**SETTINGS, kv_cache_layout=layout) as engine:
        clean = answers(engine, 1)
    with model.engine(**SETTINGS, kv_cache_layout=layout) as engine:
        for layer in range(engine.config.model.spec.num_layers):
            for cache in engine._executor.runner.kv_cache.layer(layer):
                cache.fill_(float("nan"))
        assert answers(engine, 1) == clean


STRATEGIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "d2f": ("dream", {"decoding_strategy": "d2f"}, {"shift": True}),
    "edit": ("llada2", {"sampling_mode": "edit"}, {}),
    "dmax": ("llada2", {"decoding_strategy": "dmax"}, {}),
    "fast_dllm_v2": ("fast_dllm_v2", {"decoding_strategy": "fast_dllm_v2"}, {"shift": True}),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", STRATEGIES)
def test_nan_in_pages_under_every_strategy(model: TinyModel, name: str) -> None:
    """fast_dllm_v2 reads rows of a block that it stored provisionally, and no others."""
    model_name, settings, spec = STRATEGIES[name]
    family = model.under(model_name, **spec)
    with family.engine(**SETTINGS, **settings) as engine:
        clean = answers(engine, 3)
    with family.engine(**SETTINGS, **settings) as engine:
        for layer in range(engine.config.model.spec.num_layers):
            for cache in engine._executor.runner.kv_cache.layer(layer):
                cache.fill_(float("nan"))
        assert answers(engine, 3) == clean


class Poisoned(torch.nn.Module):
    """Rows with the poison id have an embedding of NaN, and so have their K, V and logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    def forward(self, input_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        embeds = self.inner.embedding(input_ids)
        is_poison = (input_ids == POISON)[:, None]
        embeds = torch.where(is_poison, torch.full_like(embeds, float("nan")), embeds)
        hidden: torch.Tensor = self.inner(input_ids, *args, embeds)
        return hidden

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner.compute_logits(rows)
        return logits


@pytest.mark.parametrize("layout", ["unified", "distinct"])
def test_pages_of_failed_requests_are_reused(model: TinyModel, layout: str) -> None:
    config = model.config(**SETTINGS, kv_cache_layout=layout)
    with Diffulex.from_components(config, Poisoned(model.model), None) as engine:
        clean = answers(engine, 2)
    with Diffulex.from_components(config, Poisoned(model.model), None) as engine:
        bad = [[POISON, *range(40 + i)] for i in range(3)]
        failed = engine.generate(bad, PARAMS, summary=False)
        assert [output.completion_reason for output in failed] == ["error"] * 3
        pages = [
            cache.isnan().flatten(1).any(1) if layout == "unified" else cache.isnan().any(3)
            for cache in engine._executor.runner.kv_cache.layer(0)
        ]
        assert all(page.any() for page in pages)
        assert answers(engine, 2) == clean
        # And next to a failing request.
        outputs = engine.generate([*bad, *prompts(2)], PARAMS, summary=False)
        assert [output.error is None for output in outputs] == [False] * 3 + [True] * len(clean)
        assert [output.token_ids for output in outputs[3:]] == clean
