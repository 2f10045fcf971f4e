# SPDX-License-Identifier: Apache-2.0
"""From a configuration with Llama-style keys to a ModelSpec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffulex.families.spec.model_spec import ModelSpec
from diffulex.families.spec.reader import ConfigReader, read_optional_json
from diffulex.families.spec.token_ids import (
    read_tokenizer_files,
    resolve_mask_token_id,
    resolve_stop_token_ids,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = [
    "DENSE_KEYS",
    "FamilyTokens",
    "decoder_reader",
    "read_decoder_spec",
    "require_all",
    "resolve_token_ids",
]

#: Keys of other decoders that change the math, with the values under which they do not. No family
#: implements them.
_FOREIGN_KEYS: Mapping[str, tuple[object, ...]] = {
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None, 1),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "dual_chunk_attention_config": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "no_rope_layer_interval": (None, 0),
    "no_rope_layers": (None, []),
    "parallel_attn": (None, False),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "scale_emb": (None, 1),
    "scale_depth": (None,),
    "use_parallel_residual": (None, False),
}
#: Keys that change the math when active, with the values under which they do not.
DENSE_KEYS: Mapping[str, tuple[object, ...]] = {
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False),
    "use_mrope": (None, False),
    "mlp_bias": (None, False),
    "num_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "num_local_experts": (None, 0),
}


@dataclass(frozen=True, slots=True)
class FamilyTokens:
    """Token ids that a family uses where its checkpoints do not say."""

    mask_id: int | None
    #: Texts that end a turn, looked up in the tokenizer files.
    turn_end_texts: tuple[str, ...]
    #: Ids of the same, for checkpoints without tokenizer files.
    turn_end_ids: tuple[int, ...]


def require_all(reader: ConfigReader, keys: Mapping[str, tuple[object, ...]]) -> None:
    """Fails when a key holds a value that changes the math in a way that is not implemented.

    A table of ``layer_types`` must name full attention only.
    """
    for key, allowed in {**_FOREIGN_KEYS, **keys}.items():
        reader.require(key, allowed)
    types = reader.config.get("layer_types")
    if types is not None and (
        not isinstance(types, list) or any(item != "full_attention" for item in types)
    ):
        raise reader.fail("layer_types", "only 'full_attention'", types)


def resolve_token_ids(
    config: Mapping[str, Any],
    model_dir: Path,
    tokens: FamilyTokens,
    *,
    vocab_size: int,
    mask_token_id: int | None,
) -> tuple[int, tuple[int, ...]]:
    """Mask id and stop ids of a checkpoint; `mask_token_id` is an explicit override."""
    files = read_tokenizer_files(model_dir)
    mask = resolve_mask_token_id(
        config,
        files,
        vocab_size=vocab_size,
        override=mask_token_id,
        family_default=tokens.mask_id,
    )
    stops = resolve_stop_token_ids(
        config,
        read_optional_json(model_dir / "generation_config.json"),
        files,
        vocab_size=vocab_size,
        turn_end_texts=tokens.turn_end_texts,
        turn_end_ids=tokens.turn_end_ids,
    )
    return mask, stops


def read_decoder_spec(
    reader: ConfigReader,
    model_dir: Path,
    *,
    family: str,
    tokens: FamilyTokens,
    mask_token_id: int | None,
    block_size: int,
    rms_norm_eps: float = 1e-6,
    max_positions: int = 32768,
    partial_rotary_factor: float = 1.0,
    required: Mapping[str, tuple[object, ...]] = DENSE_KEYS,
    **fields: Any,
) -> ModelSpec:
    """Builds the description of a checkpoint whose keys are those of the Llama template.

    Shapes and the rotary base must be in the configuration; `rms_norm_eps`, `max_positions`,
    `partial_rotary_factor` and `block_size` stand in for keys that are absent.

    Args:
        reader: the parsed ``config.json``.
        model_dir: directory with the tokenizer files and ``generation_config.json``, if any.
        mask_token_id: explicit override of the mask id.
        required: keys whose other values are not implemented.
        fields: further fields of the description.

    Raises:
        CheckpointError: a value is missing, malformed, contradictory or not supported.
    """
    require_all(reader, required)
    vocab_size = reader.integer("vocab_size")
    hidden_size = reader.integer("hidden_size")
    num_q_heads = reader.integer("num_attention_heads")
    head_dim = reader.head_dim(hidden_size, num_q_heads)
    mask, stops = resolve_token_ids(
        reader.config, model_dir, tokens, vocab_size=vocab_size, mask_token_id=mask_token_id
    )
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("intermediate_size"),
        "num_layers": reader.count("num_hidden_layers"),
        "num_q_heads": num_q_heads,
        "num_kv_heads": reader.num_kv_heads(num_q_heads),
        "head_dim": head_dim,
        "max_positions": reader.integer("max_position_embeddings", max_positions),
        "rms_norm_eps": reader.number("rms_norm_eps", rms_norm_eps),
        "rope_theta": reader.rope_theta(),
        "rotary_dim": reader.rotary_dim(head_dim, partial_rotary_factor),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", False),
        "dtype": reader.dtype(),
        "block_size": reader.block_size() or block_size,
        "mask_token_id": mask,
        "stop_token_ids": stops,
    }
    return ModelSpec(**{**values, **fields})


def decoder_reader(
    family: str, tokens: FamilyTokens, *, reads_bias: bool = False, **settings: Any
) -> Callable[..., ModelSpec]:
    """The `read_spec` of a family whose checkpoints differ from the template in values alone.

    Args:
        family: name of the family.
        tokens: for checkpoints that do not name them.
        reads_bias: the key ``attention_bias`` says whether the products of attention have one.
        settings: of `read_decoder_spec`, whose errors it has.
    """

    def read_spec(
        config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
    ) -> ModelSpec:
        reader = ConfigReader(config)
        fields = dict(settings)
        if reads_bias:
            fields["qkv_bias"] = fields["o_bias"] = reader.flag("attention_bias", False)
        return read_decoder_spec(
            reader, model_dir, family=family, tokens=tokens, mask_token_id=mask_token_id, **fields
        )

    return read_spec
