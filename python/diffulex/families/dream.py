# SPDX-License-Identifier: Apache-2.0
"""Dream and its D2F variants: the Qwen2 template, logits shifted by one."""

from __future__ import annotations

from typing import Any

from diffulex.families.base import D2F_DEFAULTS, Family, Layout
from diffulex.families.spec.decoder import FamilyTokens, decoder_reader

__all__ = ["DREAM_SETTINGS", "DREAM_TOKENS", "FAMILY"]

#: The base model attends to everything; 32 is the block length its D2F variants decode with.
DREAM_SETTINGS: dict[str, Any] = {
    "block_size": 32,
    "qkv_bias": True,
    "qk_norm": False,
    "shift": True,
}
DREAM_TOKENS = FamilyTokens(
    mask_id=151666,
    turn_end_texts=("<|im_end|>", "<|endoftext|>"),
    turn_end_ids=(151645, 151643),
)

FAMILY = Family(
    "dream",
    decoder_reader("dream", DREAM_TOKENS, **DREAM_SETTINGS),
    defaults=D2F_DEFAULTS,
    template="qwen2",
    is_bidirectional=True,
    layout=Layout(".self_attn.q_proj.bias", rank=1),
    architectures=("DreamModel",),
    model_types=("Dream",),
)
