# SPDX-License-Identifier: Apache-2.0
"""Published model shapes, as the keys of ``config.json`` that describe them.

They go through the same readers as a checkpoint's file. `tiny` gives a model of the same family and
layout small enough for a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffulex.checkpoint.auto_model import spec_reader
from diffulex.config.types import ModelFacts
from diffulex.families.detection import family_of_name
from diffulex_edge.presets import PRESETS

#: Stands where a checkpoint would be; nothing is read from it.
NO_DIRECTORY = Path("random")


@dataclass(frozen=True, slots=True)
class Shape:
    """One model without weights."""

    #: Selects sampler and strategy; several names may stand for one family.
    model_name: str
    config: Mapping[str, Any]
    #: Keys that shrink it.
    small: Mapping[str, Any] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """Name in the model registry."""
        return family_of_name(self.model_name) or self.model_name

    def facts(self) -> ModelFacts:
        """What a checkpoint of this shape would say."""
        spec = spec_reader(self.family)(self.config, NO_DIRECTORY)
        return ModelFacts(
            model_name=self.model_name, model_dir=NO_DIRECTORY, spec=spec, checkpoint_defaults={}
        )

    def with_keys(self, **keys: Any) -> Shape:
        """The same family with other values."""
        return Shape(self.model_name, {**self.config, **keys}, self.small)

    def named(self, model_name: str) -> Shape:
        """The same model under another name."""
        return Shape(model_name, self.config, self.small)

    def tiny(self) -> Shape:
        """The same family in a few kilobytes."""
        config = {**self.config, **self.small}
        text = {**self.config.get("text_config", {}), **self.small.get("text_config", {})}
        if text:
            config["text_config"] = text
        return Shape(self.model_name, config)


_TINY_DECODER: Mapping[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mask_token_id": 299,
    "eos_token_id": 298,
}
_TINY_EXPERTS: Mapping[str, Any] = {
    **_TINY_DECODER,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def _decoder(
    vocab: int, hidden: int, inner: int, layers: int, q_heads: int, kv_heads: int, **keys: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        **keys,
    }


def _sdar(hidden: int, inner: int, layers: int, q_heads: int) -> Shape:
    config = _decoder(151936, hidden, inner, layers, q_heads, 8, max_position_embeddings=32768)
    return Shape("sdar", {**config, "block_size": 4, "mask_token_id": 151669}, _TINY_DECODER)


_SDAR_8B = _sdar(4096, 12288, 36, 32)
_SDAR_30B = Shape(
    "sdar_moe",
    _decoder(
        *(151936, 2048, 6144, 48, 32, 4),
        max_position_embeddings=32768,
        block_size=4,
        mask_token_id=151669,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    _TINY_EXPERTS,
)


def _llada2(hidden: int, inner: int, layers: int, q_heads: int, expert_inner: int) -> Shape:
    config = _decoder(157184, hidden, inner, layers, q_heads, 4, max_position_embeddings=32768)
    experts: dict[str, Any] = {
        "rope_theta": 600000.0,
        "partial_rotary_factor": 0.5,
        "use_bias": False,
        "use_qkv_bias": False,
        "first_k_dense_replace": 1,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": expert_inner,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
    }
    return Shape("llada2", {**config, **experts}, {**_TINY_EXPERTS, "n_group": 4, "topk_group": 2})


_LLADA2_MINI = _llada2(2048, 5120, 20, 16, 512)
_DREAM_7B = Shape("dream", PRESETS["dream-7b"].config, _TINY_DECODER)
_LLADA_8B = Shape(
    "llada",
    PRESETS["llada-8b"].config,
    {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "mlp_hidden_size": 112,
        "vocab_size": 300,
        "embedding_size": 304,
        "mask_token_id": 299,
        "eos_token_id": 298,
    },
)
_GEMMA_26B = Shape(
    "diffusion_gemma",
    {
        "canvas_length": 256,
        "tie_word_embeddings": True,
        "eos_token_id": [1, 106],
        "text_config": {
            "vocab_size": 262144,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": 2,
            "sliding_window": 1024,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
        },
    },
    {
        "canvas_length": 16,
        "text_config": {
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "global_head_dim": 128,
            "num_global_key_value_heads": 1,
            "sliding_window": 24,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "max_position_embeddings": 512,
        },
    },
)

#: The shapes that a plain run of `bench_families.py` measures.
REFERENCE_SHAPES = (
    "llada2-mini",
    "sdar-8b",
    "sdar-30b-a3b",
    "llada-8b",
    "dream-7b",
    "fast-dllm-v2-7b",
    "diffusion-gemma-26b-a4b",
)

SHAPES: Mapping[str, Shape] = {
    "llada2-mini": _LLADA2_MINI,
    "sdar-8b": _SDAR_8B,
    "sdar-30b-a3b": _SDAR_30B,
    "llada-8b": _LLADA_8B,
    "dream-7b": _DREAM_7B,
    "fast-dllm-v2-7b": Shape("fast_dllm_v2", PRESETS["fast_dllm_v2-7b"].config, _TINY_DECODER),
    "diffusion-gemma-26b-a4b": _GEMMA_26B,
    # 103 billion parameters: on one GPU in 8 bits only.
    "llada2-flash": _llada2(4096, 9216, 32, 32, 1024),
    # The same models decoded otherwise, and the families that share a shape with one of them.
    "llada2.1-mini": _LLADA2_MINI.named("llada2dot1_mini"),
    "dmax-mini": _LLADA2_MINI.named("llada2_mini_dmax"),
    "sdar-8b-b32": _SDAR_8B.with_keys(block_size=32),
    "sdar-30b-a3b-b32": _SDAR_30B.with_keys(block_size=32),
    "diffucoder-7b": _DREAM_7B.named("diffucoder"),
    "dream-reasoner-8b": _SDAR_8B.named("dream_reasoner").with_keys(block_size=32),
    "stable-diffcoder-8b": Shape(
        "stable_diffcoder",
        _decoder(
            *(155136, 4096, 14336, 32, 32, 8),
            rope_theta=500000.0,
            max_position_embeddings=8192,
            mask_token_id=5,
        ),
        {**_TINY_DECODER, "mask_token_id": 5},
    ),
    "sdar-4b": _sdar(2560, 9728, 36, 32),
    "sdar-1.7b": _sdar(2048, 6144, 28, 16),
    # No release has this size; it is Qwen3-0.6B's.
    "sdar-0.6b": _sdar(1024, 3072, 28, 16),
    "tiny": _SDAR_8B.tiny(),
    "tiny-moe": _SDAR_30B.tiny(),
}

#: SDAR in all sizes, for the benchmarks of one strategy over sizes.
SDAR_SHAPES = tuple(sorted(name for name, shape in SHAPES.items() if shape.model_name == "sdar"))
