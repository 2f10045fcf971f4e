# SPDX-License-Identifier: Apache-2.0
"""Stable-DiffCoder: the Llama template with block-diffusion attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.families.base import Family, Layout
from diffulex.families.spec.decoder import FamilyTokens, decoder_reader

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILY"]

_TOKENS = FamilyTokens(
    mask_id=5,
    turn_end_texts=("<[end\u2581of\u2581sentence]>",),
    turn_end_ids=(2,),
)


_MARKS = ("stable_diffcoder", "seed_diffcoder", "stablediffcoder", "seeddiffcoder")


def _is_diffcoder(config: Mapping[str, Any]) -> bool:
    """Whether a class named in a configuration of the Llama template is the family's."""
    auto_map, names = config.get("auto_map"), config.get("architectures")
    values = list(auto_map.values()) if isinstance(auto_map, dict) else []
    texts = [*(names if isinstance(names, list) else []), *values]
    return any(mark in str(text).lower() for text in texts for mark in _MARKS)


FAMILY = Family(
    "stable_diffcoder",
    decoder_reader(
        "stable_diffcoder",
        _TOKENS,
        block_size=4,
        max_positions=8192,
        reads_bias=True,
        qk_norm=False,
    ),
    defaults={
        "accept_threshold": 0.95,
        "acceptance_rule": "static",
        "block_size": 4,
        "buffer_size": 1,
        "confidence_space": "raw",
        "temperature": 0.0,
    },
    rule_with_threshold="threshold_non_strict",
    is_own=_is_diffcoder,
    template="llama",
    layout=Layout(".self_attn.q_proj.weight", rank=0),
    architectures=("StableDiffcoderForCausalLM", "SeedDiffcoderForCausalLM"),
    model_types=("llama",),
)
