# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM v2: the Qwen2 template with block-diffusion attention, logits shifted by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.families.spec.decoder import FamilyTokens, read_decoder_spec
from diffulex.families.spec.reader import ConfigReader
from diffulex.nn.decoder import DecoderForDiffusionLM

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex.families.spec import ModelSpec

__all__ = ["FastDllmV2ForDiffusionLM"]

_TOKENS = FamilyTokens(
    mask_id=151665,
    turn_end_texts=("<|im_end|>", "<|endoftext|>"),
    turn_end_ids=(151645, 151643),
)


def read_fast_dllm_v2_spec(
    config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
) -> ModelSpec:
    """Description of a Fast-dLLM v2 checkpoint; see `read_decoder_spec` for the errors."""
    return read_decoder_spec(
        ConfigReader(config),
        model_dir,
        family="fast_dllm_v2",
        tokens=_TOKENS,
        mask_token_id=mask_token_id,
        block_size=32,
        qkv_bias=True,
        qk_norm=False,
        shift=True,
    )


class FastDllmV2ForDiffusionLM(DecoderForDiffusionLM):
    """A position's logits predict the next position of its block."""

    read_spec = staticmethod(read_fast_dllm_v2_spec)
