# SPDX-License-Identifier: Apache-2.0
"""SDAR (Qwen3 template): reads ``config.json`` into a ModelSpec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.model.config.reader import ConfigReader, read_optional_json
from diffulex.model.config.spec import ModelSpec
from diffulex.model.config.token_ids import (
    read_tokenizer_files,
    resolve_mask_token_id,
    resolve_stop_token_ids,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MASK_TOKEN_ID = 151669
_BLOCK_SIZE = 4
_TURN_END_TEXTS = ("<|im_end|>", "<|endoftext|>")
_TURN_END_IDS = (151645, 151643)
_ROPE_THETA = 1e6
_RMS_NORM_EPS = 1e-6
_MAX_POSITIONS = 32768

#: Keys that change the math when active, with the values under which they do not.
_REQUIRED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False),
    "use_mrope": (None, False),
    "mlp_bias": (None, False),
    "use_regular_causal": (None, False),
    "block_causal_prompt": (None, True),
    "use_qk_norm": (None, True),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}


def read_sdar_spec(
    config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
) -> ModelSpec:
    """Builds the description of an SDAR checkpoint.

    Args:
        config: parsed ``config.json``.
        model_dir: directory with the tokenizer files and ``generation_config.json``, if any.
        mask_token_id: explicit override of the mask id.

    Raises:
        CheckpointError: a value is missing, malformed, contradictory or not supported.
    """
    reader = ConfigReader(config)
    for key, allowed in _REQUIRED.items():
        reader.require(key, allowed)
    vocab_size = reader.integer("vocab_size")
    hidden_size = reader.integer("hidden_size")
    num_q_heads = reader.integer("num_attention_heads")
    head_dim = reader.head_dim(hidden_size, num_q_heads)
    files = read_tokenizer_files(model_dir)
    generation_config = read_optional_json(model_dir / "generation_config.json")
    return ModelSpec(
        family="sdar",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=reader.num_kv_heads(num_q_heads),
        head_dim=head_dim,
        max_positions=reader.integer("max_position_embeddings", _MAX_POSITIONS),
        rms_norm_eps=reader.number("rms_norm_eps", _RMS_NORM_EPS),
        rope_theta=reader.rope_theta(_ROPE_THETA),
        rotary_dim=reader.rotary_dim(head_dim),
        attention_bias=reader.flag("attention_bias", False),
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        dtype=reader.dtype(),
        block_size=reader.block_size() or _BLOCK_SIZE,
        mask_token_id=resolve_mask_token_id(
            config,
            files,
            vocab_size=vocab_size,
            override=mask_token_id,
            family_default=_MASK_TOKEN_ID,
        ),
        stop_token_ids=resolve_stop_token_ids(
            config,
            generation_config,
            files,
            vocab_size=vocab_size,
            turn_end_texts=_TURN_END_TEXTS,
            turn_end_ids=_TURN_END_IDS,
        ),
    )
