# SPDX-License-Identifier: Apache-2.0
"""Dream-reasoner: the Qwen3 template; unlike Dream its logits are not shifted."""

from __future__ import annotations

from diffulex.families.base import Family, FilterOrder
from diffulex.families.spec.decoder import FamilyTokens, decoder_reader

__all__ = ["FAMILY"]

_TOKENS = FamilyTokens(
    mask_id=151669,
    turn_end_texts=("<|im_end|>", "<|endoftext|>"),
    turn_end_ids=(151645, 151643),
)

FAMILY = Family(
    "dream_reasoner",
    decoder_reader("dream_reasoner", _TOKENS, block_size=32, reads_bias=True),
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
