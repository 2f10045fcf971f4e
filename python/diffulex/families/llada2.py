# SPDX-License-Identifier: Apache-2.0
"""LLaDA2: the Bailing-MoE v2 template with block-diffusion attention.

LLaDA2.1 and DMax checkpoints have the same weights, configuration and math; they differ in how they
are decoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.families.base import MASK_FILLERS, Decoding, Family, FilterOrder, Layout
from diffulex.families.spec.decoder import FamilyTokens, read_decoder_spec
from diffulex.families.spec.moe import MoeSpec, read_moe_layers, read_num_experts
from diffulex.families.spec.names import TensorNames
from diffulex.families.spec.reader import ConfigReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex.families.spec import ModelSpec

__all__ = ["FAMILY"]

_TOKENS = FamilyTokens(
    mask_id=156895,
    turn_end_texts=("<|endoftext|>", "<|role_end|>"),
    turn_end_ids=(156892,),
)

LLADA2_NAMES = TensorNames(
    embedding="model.word_embeddings.weight",
    qkv="attention.query_key_value",
    o="attention.dense",
    q_norm="attention.query_layernorm.weight",
    k_norm="attention.key_layernorm.weight",
)

#: What the configuration class of the family has for absent keys; a stored null stays null.
_CLASS_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 30592,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 0,
    "first_k_dense_replace": 0,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "use_bias": True,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "max_position_embeddings": 16384,
}
_NUM_EXPERTS = 16
_REQUIRED: Mapping[str, tuple[object, ...]] = {
    "hidden_act": (None, "silu"),
    "use_sliding_window": (None, False),
    "use_rmsnorm": (None, True),
    "norm_head": (None, False),
    "norm_softmax": (None, False),
    "using_split_qkv_in_self_attention": (None, False),
    "score_function": (None, "sigmoid"),
    "router_dtype": (None, "fp32"),
    "num_nextn_predict_layers": (None, 0),
    # The multimodal sibling shares the architecture name.
    "image_token_offset": (None,),
}


def read_llada2_spec(
    config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
) -> ModelSpec:
    """Description of a LLaDA2 checkpoint; see `read_decoder_spec` for the errors."""
    values = {**_CLASS_DEFAULTS, **config}
    reader = ConfigReader(values)
    moe = _read_moe(reader)
    num_layers = reader.count("num_hidden_layers")
    if values.get("intermediate_size") is None and moe is not None:
        if len(moe.layers) < num_layers:
            raise reader.fail("intermediate_size", "a size, for the dense layers", None)
        values["intermediate_size"] = moe.intermediate_size
    names = LLADA2_NAMES
    if not reader.flag("moe_router_enable_expert_bias", True):
        names = names.ignoring(*(f"*.{name}" for name in names.expert_bias))
    return read_decoder_spec(
        reader,
        model_dir,
        family="llada2",
        tokens=_TOKENS,
        mask_token_id=mask_token_id,
        block_size=32,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        required=_REQUIRED,
        qkv_bias=reader.flag("use_qkv_bias", False),
        o_bias=reader.flag("use_bias", True),
        qk_norm=reader.flag("use_qk_norm", True),
        names=names,
        moe=moe,
    )


def _read_moe(reader: ConfigReader) -> MoeSpec | None:
    num_experts = read_num_experts(reader, _NUM_EXPERTS)
    layers = read_moe_layers(reader, reader.count("num_hidden_layers"))
    if num_experts == 0 or not layers:
        return None
    top_k = reader.integer("num_experts_per_tok")
    n_group, topk_group = _read_groups(reader, num_experts, top_k)
    width = reader.integer("moe_intermediate_size")
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        layers=layers,
        is_sigmoid=True,
        renormalize=reader.flag("norm_topk_prob", True),
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling=reader.number("routed_scaling_factor", 1.0),
        has_expert_bias=reader.flag("moe_router_enable_expert_bias", True),
        shared_size=_read_shared_size(reader, width),
    )


def _read_groups(reader: ConfigReader, num_experts: int, top_k: int) -> tuple[int, int]:
    """Groups and chosen groups; zeros when every group is chosen."""
    n_group = reader.integer("n_group", 0, minimum=0)
    topk_group = reader.integer("topk_group", 0, minimum=0)
    if n_group <= 1 or topk_group == 0 or topk_group >= n_group:
        if top_k > num_experts:
            raise reader.fail("num_experts_per_tok", f"at most {num_experts} experts", top_k)
        return 0, 0
    if num_experts % n_group:
        raise reader.fail("n_group", f"a divisor of {num_experts} experts", n_group)
    available = topk_group * (num_experts // n_group)
    if top_k > available:
        expected = f"at most the {available} experts of {topk_group} groups"
        raise reader.fail("num_experts_per_tok", expected, top_k)
    return n_group, topk_group


def _read_shared_size(reader: ConfigReader, width: int) -> int:
    keys = ("num_shared_experts", "n_shared_experts")
    counts = [reader.integer(key, 0, minimum=0) for key in keys]
    if reader.config.get("moe_shared_expert_intermediate_size") is not None and any(counts):
        return reader.integer("moe_shared_expert_intermediate_size")
    return max(counts) * width


_FILLING = f"{MASK_FILLERS}:llada2"
_EDITING = "diffulex.samplers.llada2_edit:Llada2EditSampler"
_DMAX = "diffulex.samplers.llada2_dmax:Llada2DmaxSampler"
_FILLED_NAMES = ("llada2", "llada2_moe", "llada2_mini", "llada2_mini_dmax")

FAMILY = Family(
    "llada2",
    read_llada2_spec,
    defaults={
        "accept_threshold": 0.95,
        "acceptance_rule": "dynamic",
        "block_size": 32,
        "buffer_size": 1,
        "confidence_space": "processed",
        "temperature": 0.0,
    },
    filter_order=FilterOrder.TOP_K_FIRST,
    layout=Layout(".attention.query_key_value.", rank=6),
    is_exportable=False,
    architectures=("LLaDA2MoeModelLM",),
    model_types=("llada2_moe", "llada2_moe_veomni"),
    aliases={
        "llada2_moe": _FILLING,
        "llada2_mini": _FILLING,
        "llada2dot1_mini": _EDITING,
        "llada2_mini_dmax": _DMAX,
    },
    # Checkpoints of LLaDA2.1 are always edited.
    decodings=(
        Decoding("multi_bd", "edit", _EDITING),
        Decoding("dmax", "edit", _DMAX),
        Decoding(sampler=_FILLING, model_names=_FILLED_NAMES),
    ),
    quantization_ignore={"int4": ("*.experts.*",)},
)
