# SPDX-License-Identifier: Apache-2.0
"""Dream and its D2F variants: the Qwen2 template, logits shifted by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.families.base import Family, Layout
from diffulex.families.spec.decoder import FamilyTokens, read_decoder_spec
from diffulex.families.spec.reader import ConfigReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex.families.spec import ModelSpec

__all__ = ["FAMILY", "read_dream_spec"]

_TOKENS = FamilyTokens(
    mask_id=151666,
    turn_end_texts=("<|im_end|>", "<|endoftext|>"),
    turn_end_ids=(151645, 151643),
)


def read_dream_spec(
    config: Mapping[str, Any],
    model_dir: Path,
    *,
    mask_token_id: int | None = None,
    family: str = "dream",
) -> ModelSpec:
    """Description of a Dream checkpoint; see `read_decoder_spec` for the errors.

    The base model attends to everything; 32 is the block length its D2F variants decode with.
    """
    return read_decoder_spec(
        ConfigReader(config),
        model_dir,
        family=family,
        tokens=_TOKENS,
        mask_token_id=mask_token_id,
        block_size=32,
        qkv_bias=True,
        qk_norm=False,
        shift=True,
    )


FAMILY = Family(
    "dream",
    read_dream_spec,
    defaults={
        "accept_threshold": 0.9,
        "acceptance_rule": "threshold",
        "block_size": 32,
        "buffer_size": 4,
        "confidence_space": "processed",
        "decoding_strategy": "d2f",
        "semi_complete_threshold": 0.95,
        "temperature": 0.0,
    },
    template="qwen2",
    is_bidirectional=True,
    layout=Layout(".self_attn.q_proj.bias", rank=1),
    architectures=("DreamModel",),
    model_types=("Dream",),
)
