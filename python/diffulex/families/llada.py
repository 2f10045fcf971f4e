# SPDX-License-Identifier: Apache-2.0
"""LLaDA, LLaDA-1.5 and their D2F variants: Llama's math under OLMo's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.errors import CheckpointError
from diffulex.families.base import D2F_DEFAULTS, Family, Layout
from diffulex.families.spec.decoder import (
    FamilyTokens,
    read_decoder_spec,
    require_all,
    resolve_token_ids,
)
from diffulex.families.spec.model_spec import ModelSpec
from diffulex.families.spec.names import TensorNames
from diffulex.families.spec.reader import ConfigReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["FAMILY"]

_TOKENS = FamilyTokens(
    mask_id=126336,
    turn_end_texts=("<|eot_id|>", "<|endoftext|>"),
    turn_end_ids=(126081, 126348),
)
_BLOCK_SIZE = 32

LLADA_NAMES = TensorNames(
    embedding="model.transformer.wte.weight",
    final_norm="model.transformer.ln_f.weight",
    head="model.transformer.ff_out.weight",
    layer="model.transformer.blocks.{}.",
    input_norm="attn_norm.weight",
    post_norm="ff_norm.weight",
    q="q_proj",
    k="k_proj",
    v="v_proj",
    o="attn_out",
    # The activated branch is the one that is called ff_proj.
    gate="ff_proj",
    up="up_proj",
    down="ff_out",
)

#: Values of the only implemented variant. The defaults of this family's configuration class are
#: other ones for most keys, so that an absent key means something else unless None is listed.
_REQUIRED: Mapping[str, tuple[object, ...]] = {
    "activation_type": ("silu",),
    "block_type": ("llama",),
    "layer_norm_type": ("rms",),
    "rope": (True,),
    "block_group_size": (None, 1),
    "layer_norm_with_affine": (None, True),
    "bias_for_layer_norm": (None, False),
    "attention_layer_norm": (None, False),
    "input_emb_norm": (None, False),
    "scale_logits": (None, False),
}


def read_llada_spec(
    config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
) -> ModelSpec:
    """Description of a LLaDA checkpoint in its own or in the Llama layout.

    The base model attends to everything; 32 is the block length its D2F variants decode with.

    Raises:
        CheckpointError: a value is missing, malformed, contradictory or not supported.
    """
    reader = ConfigReader(config)
    if "d_model" not in config and "hidden_size" in config:
        return _read_llama_layout(reader, model_dir, mask_token_id)
    require_all(reader, _REQUIRED)
    vocab_size = reader.integer("vocab_size")
    embedding_size = reader.integer("embedding_size", vocab_size, minimum=vocab_size)
    hidden_size = reader.integer("d_model")
    num_q_heads = reader.integer("n_heads")
    if hidden_size % num_q_heads:
        raise reader.fail("d_model", f"a multiple of {num_q_heads} heads", hidden_size)
    head_dim = hidden_size // num_q_heads
    mask, stops = resolve_token_ids(
        config, model_dir, _TOKENS, vocab_size=vocab_size, mask_token_id=mask_token_id
    )
    return ModelSpec(
        family="llada",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(reader, hidden_size),
        num_layers=reader.count("n_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=_num_kv_heads(reader, num_q_heads),
        head_dim=head_dim,
        max_positions=_max_positions(reader),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-5),
        rope_theta=reader.rope_theta(),
        rotary_dim=reader.rotary_dim(head_dim),
        qkv_bias=reader.flag("include_qkv_bias", False),
        o_bias=reader.flag("include_bias", False),
        qk_norm=False,
        tie_word_embeddings=reader.flag("weight_tying", True),
        dtype=reader.dtype(),
        block_size=reader.block_size() or _BLOCK_SIZE,
        mask_token_id=mask,
        stop_token_ids=stops,
        embedding_size=None if embedding_size == vocab_size else embedding_size,
        names=LLADA_NAMES,
    )


def _read_llama_layout(
    reader: ConfigReader, model_dir: Path, mask_token_id: int | None
) -> ModelSpec:
    has_bias = reader.flag("attention_bias", False)
    return read_decoder_spec(
        reader,
        model_dir,
        family="llada",
        tokens=_TOKENS,
        mask_token_id=mask_token_id,
        block_size=_BLOCK_SIZE,
        rms_norm_eps=1e-5,
        max_positions=4096,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=False,
    )


def _intermediate_size(reader: ConfigReader, hidden_size: int) -> int:
    if reader.config.get("mlp_hidden_size") is not None:
        return reader.integer("mlp_hidden_size")
    ratio = reader.number("mlp_ratio", 4)
    size = int(ratio * hidden_size)
    if size != ratio * hidden_size:
        raise reader.fail("mlp_ratio", f"a whole multiple of 1 / {hidden_size}", ratio)
    return size


def _num_kv_heads(reader: ConfigReader, num_q_heads: int) -> int:
    is_multi_query = reader.flag("multi_query_attention", False)
    if is_multi_query:
        heads = reader.integer("n_kv_heads", 1)
        if heads != 1:
            raise reader.fail("n_kv_heads", "1 with multi_query_attention", heads)
        return heads
    return reader.num_kv_heads(num_q_heads, "n_kv_heads")


def _max_positions(reader: ConfigReader) -> int:
    if reader.config.get("max_position_embeddings") is not None:
        return reader.integer("max_position_embeddings")
    return reader.integer("max_sequence_length", 1024)


_EXPERT_KEYS = ("expert_intermediate_size", "num_experts", "n_routed_experts", "num_local_experts")


def _is_dense(config: Mapping[str, Any]) -> bool:
    if any(config.get(key) for key in _EXPERT_KEYS):
        raise CheckpointError(
            "config.json: model_type 'llada': expected the dense LLaDA layout, "
            "got a mixture of experts (LLaDA-MoE), which is not supported"
        )
    return True


FAMILY = Family(
    "llada",
    read_llada_spec,
    defaults=D2F_DEFAULTS,
    is_own=_is_dense,
    is_bidirectional=True,
    layout=Layout(".transformer.blocks.", rank=5),
    architectures=("LLaDAModelLM",),
    model_types=("llada",),
)
