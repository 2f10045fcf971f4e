# SPDX-License-Identifier: Apache-2.0
"""Shapes of published models by name, so that memory can be planned without a download.

Each is the keys of a ``config.json`` and goes through the reader of its family. Those named
``edge_doc-*`` are round numbers for toys, and no published model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.checkpoint.auto_model import spec_reader
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from diffulex.families.spec import ModelSpec

__all__ = ["PRESETS", "Preset", "preset_spec"]


class Preset(NamedTuple):
    """A family and the keys of its config.json."""

    family: str
    config: Mapping[str, Any]


def _decoder(
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    mask: int,
    **keys: Any,
) -> dict[str, Any]:
    """The layout of Qwen2 and Qwen3; `heads` are those of queries and of keys."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "mask_token_id": mask,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        **keys,
    }


def _llada(
    vocab: int, hidden: int, inner: int, layers: int, heads: tuple[int, int], mask: int
) -> dict[str, Any]:
    return {
        "d_model": hidden,
        "n_layers": layers,
        "n_heads": heads[0],
        "n_kv_heads": heads[1],
        "mlp_hidden_size": inner,
        "vocab_size": vocab,
        "embedding_size": vocab,
        "max_sequence_length": 4096,
        "rope": True,
        "rope_theta": 500000.0,
        "layer_norm_type": "rms",
        "rms_norm_eps": 1e-5,
        "activation_type": "silu",
        "block_type": "llama",
        "block_group_size": 1,
        "include_bias": False,
        "include_qkv_bias": False,
        "weight_tying": False,
        "mask_token_id": mask,
    }


_FAST, _SDAR = {"bd_size": 32}, {"block_size": 4}
#: Name -> shape. SDAR is counted with a head of its own, which some releases share.
PRESETS: Mapping[str, Preset] = {
    "fast_dllm_v2-1.5b": Preset(
        "fast_dllm_v2",
        _decoder(151936, 1536, 8960, 28, (12, 2), 151665, **_FAST, tie_word_embeddings=True),
    ),
    "fast_dllm_v2-7b": Preset(
        "fast_dllm_v2", _decoder(152064, 3584, 18944, 28, (28, 4), 151665, **_FAST)
    ),
    "dream-7b": Preset("dream", _decoder(152064, 3584, 18944, 28, (28, 4), 151666)),
    "llada-8b": Preset("llada", _llada(126464, 4096, 12288, 32, (32, 32), 126336)),
    "sdar-1.7b": Preset("sdar", _decoder(151936, 2048, 6144, 28, (16, 8), 151669, **_SDAR)),
    "sdar-4b": Preset("sdar", _decoder(151936, 2560, 9728, 36, (32, 8), 151669, **_SDAR)),
    "sdar-8b": Preset("sdar", _decoder(151936, 4096, 12288, 36, (32, 8), 151669, **_SDAR)),
    "edge_doc-fast_dllm_v2": Preset(
        "fast_dllm_v2", _decoder(126_000, 2048, 5504, 22, (16, 4), 125_999, **_FAST)
    ),
    "edge_doc-dream": Preset(
        "dream", _decoder(100_000, 2048, 5504, 24, (32, 8), 99_999, head_dim=64)
    ),
    "edge_doc-llada": Preset("llada", _llada(100_000, 2048, 5504, 26, (32, 8), 99_999)),
    "edge_doc-sdar": Preset("sdar", _decoder(152_000, 2048, 6144, 28, (16, 8), 151_999, **_SDAR)),
}


def preset_spec(name: str) -> ModelSpec:
    """What a checkpoint of this shape would say about itself.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    preset = PRESETS[name]
    # Nothing is read from the directory.
    spec: ModelSpec = spec_reader(preset.family)(preset.config, Path(name))
    return spec
