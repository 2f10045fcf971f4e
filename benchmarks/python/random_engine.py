# SPDX-License-Identifier: Apache-2.0
"""Engines over random weights in the shapes of published models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diffulex import Diffulex
from diffulex.config import Config, ModelFacts
from diffulex.model.config import ModelSpec
from diffulex.model.sdar import SdarForDiffusionLM


def _spec(hidden: int, inner: int, layers: int, q_heads: int, kv_heads: int) -> ModelSpec:
    return ModelSpec(
        family="sdar",
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        max_positions=32768,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rotary_dim=128,
        block_size=32,
        mask_token_id=151669,
    )


SHAPES = {
    "sdar-8b": _spec(4096, 12288, 36, 32, 8),
    "sdar-4b": _spec(2560, 9728, 36, 32, 8),
    "sdar-1.7b": _spec(2048, 6144, 28, 16, 8),
    "sdar-0.6b": _spec(1024, 3072, 28, 16, 8),
    "tiny": replace(
        _spec(64, 112, 2, 4, 2), vocab_size=300, head_dim=32, rotary_dim=32, mask_token_id=299
    ),
}


def build_model(
    spec: ModelSpec, dtype: torch.dtype, device: str, seed: int = 0
) -> SdarForDiffusionLM:
    """A model of this shape with random weights."""
    return SdarForDiffusionLM(spec, dtype, device).init_random(seed)


def build_engine(model: SdarForDiffusionLM, device: str, **settings: Any) -> Diffulex:
    """An engine over `model` that takes token ids; `settings` as for `Diffulex`."""
    facts = ModelFacts(
        model_name="sdar", model_dir=Path("random"), spec=model.spec, checkpoint_defaults={}
    )
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    config = Config.resolve("random", facts, {"device": device, "dtype": dtype, **settings})
    return Diffulex.from_components(config, model, None)


def random_prompts(spec: ModelSpec, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Prompts of distinct random ids without the mask token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, spec.vocab_size - 1, (count, length), generator=generator)
    mask = -1 if spec.mask_token_id is None else spec.mask_token_id
    return (ids + (ids >= mask)).tolist() if mask >= 0 else ids.tolist()
