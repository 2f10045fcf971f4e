# SPDX-License-Identifier: Apache-2.0
"""SDAR: the Qwen3 template with block-diffusion attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.families.base import Family, FilterOrder, Layout
from diffulex.families.spec.decoder import FamilyTokens, read_decoder_spec
from diffulex.families.spec.reader import ConfigReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex.families.spec import ModelSpec

__all__ = ["FAMILY"]

_TOKENS = FamilyTokens(
    mask_id=151669,
    turn_end_texts=("<|im_end|>", "<|endoftext|>"),
    turn_end_ids=(151645, 151643),
)


def read_sdar_spec(
    config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
) -> ModelSpec:
    """Description of an SDAR checkpoint; see `read_decoder_spec` for the errors."""
    reader = ConfigReader(config)
    # Switches of a fork: attention that is causal inside the block, or over the prompt.
    reader.require("use_regular_causal", (None, False))
    reader.require("block_causal_prompt", (None, True))
    reader.require("use_qk_norm", (None, True))
    has_bias = reader.flag("attention_bias", False)
    return read_decoder_spec(
        reader,
        model_dir,
        family="sdar",
        tokens=_TOKENS,
        mask_token_id=mask_token_id,
        block_size=4,
        qkv_bias=has_bias,
        o_bias=has_bias,
    )


FAMILY = Family(
    "sdar",
    read_sdar_spec,
    defaults={
        "accept_threshold": 0.95,
        "acceptance_rule": "dynamic",
        "buffer_size": 1,
        "confidence_space": "processed",
        "temperature": 0.0,
    },
    filter_order=FilterOrder.TOP_K_FIRST,
    template="qwen3",
    layout=Layout(".self_attn.q_norm.", rank=2),
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
)
