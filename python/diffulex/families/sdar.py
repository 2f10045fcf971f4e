# SPDX-License-Identifier: Apache-2.0
"""SDAR: the Qwen3 template with block-diffusion attention."""

from __future__ import annotations

from diffulex.families.base import Family, FilterOrder, Layout
from diffulex.families.spec.decoder import DENSE_KEYS, FamilyTokens, decoder_reader

__all__ = ["FAMILY", "SDAR_KEYS", "SDAR_TOKENS"]

SDAR_TOKENS = FamilyTokens(
    mask_id=151669,
    turn_end_texts=("<|im_end|>", "<|endoftext|>"),
    turn_end_ids=(151645, 151643),
)
#: Switches of a fork: attention that is causal inside the block, or over the prompt.
SDAR_KEYS = {
    "use_regular_causal": (None, False),
    "block_causal_prompt": (None, True),
    "use_qk_norm": (None, True),
}

FAMILY = Family(
    "sdar",
    decoder_reader(
        "sdar",
        SDAR_TOKENS,
        block_size=4,
        reads_bias=True,
        required={**DENSE_KEYS, **SDAR_KEYS},
    ),
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
