# SPDX-License-Identifier: Apache-2.0
"""SDAR-MoE: the Qwen3-MoE template with block-diffusion attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.families.base import Family, FilterOrder, Layout
from diffulex.families.sdar import FAMILY as SDAR
from diffulex.families.sdar import SDAR_KEYS, SDAR_TOKENS
from diffulex.families.spec.decoder import DENSE_KEYS, read_decoder_spec
from diffulex.families.spec.moe import MoeSpec, read_moe_layers, read_num_experts
from diffulex.families.spec.reader import ConfigReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex.families.spec import ModelSpec

__all__ = ["FAMILY"]

_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
_REQUIRED: Mapping[str, tuple[object, ...]] = {
    **{key: allowed for key, allowed in DENSE_KEYS.items() if key not in _EXPERT_KEYS},
    **SDAR_KEYS,
    "num_shared_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
}


def read_sdar_moe_spec(
    config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
) -> ModelSpec:
    """Description of an SDAR-MoE checkpoint; see `read_decoder_spec` for the errors."""
    reader = ConfigReader(config)
    moe = _read_moe(reader)
    if config.get("intermediate_size") is None and moe is not None:
        # No layer is dense, or the tensors will say that a size is missing.
        reader = ConfigReader({**config, "intermediate_size": moe.intermediate_size})
    has_bias = reader.flag("attention_bias", False)
    return read_decoder_spec(
        reader,
        model_dir,
        family="sdar_moe",
        tokens=SDAR_TOKENS,
        mask_token_id=mask_token_id,
        block_size=4,
        required=_REQUIRED,
        qkv_bias=has_bias,
        o_bias=has_bias,
        moe=moe,
    )


def _read_moe(reader: ConfigReader) -> MoeSpec | None:
    num_experts = read_num_experts(reader)
    layers = read_moe_layers(reader, reader.count("num_hidden_layers"))
    if num_experts == 0 or not layers:
        return None
    top_k = reader.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise reader.fail("num_experts_per_tok", f"at most {num_experts} experts", top_k)
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=reader.integer("moe_intermediate_size"),
        layers=layers,
        renormalize=reader.flag("norm_topk_prob", True),
    )


FAMILY = Family(
    "sdar_moe",
    read_sdar_moe_spec,
    defaults=SDAR.defaults,
    filter_order=FilterOrder.TOP_K_FIRST,
    template="qwen3moe",
    layout=Layout(".mlp.experts.", rank=3),
    is_exportable=False,
    architectures=("SDARMoeForCausalLM",),
    model_types=("sdar_moe",),
)
