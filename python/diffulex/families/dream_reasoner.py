# SPDX-License-Identifier: Apache-2.0
"""Dream-reasoner: the Qwen3 template; unlike Dream its logits are not shifted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.families.base import Family, FilterOrder
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


def read_dream_reasoner_spec(
    config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
) -> ModelSpec:
    """Description of a Dream-reasoner checkpoint; see `read_decoder_spec` for the errors."""
    reader = ConfigReader(config)
    has_bias = reader.flag("attention_bias", False)
    return read_decoder_spec(
        reader,
        model_dir,
        family="dream_reasoner",
        tokens=_TOKENS,
        mask_token_id=mask_token_id,
        block_size=32,
        qkv_bias=has_bias,
        o_bias=has_bias,
    )


FAMILY = Family(
    "dream_reasoner",
    read_dream_reasoner_spec,
    defaults={
        "accept_threshold": 0.9,
        "acceptance_rule": "dynamic",
        "block_size": 32,
        "buffer_size": 1,
        "confidence_space": "processed",
        "force_accept_last_step": True,
        "temperature": 0.0,
    },
    filter_order=FilterOrder.TOP_K_FIRST,
    architectures=("DreamForCausalLM",),
)
