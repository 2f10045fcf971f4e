# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM v2: the Qwen2 template with block-diffusion attention, logits shifted by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.families.base import Decoding, Family
from diffulex.families.spec.decoder import FamilyTokens, read_decoder_spec
from diffulex.families.spec.reader import ConfigReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex.families.spec import ModelSpec

__all__ = ["FAMILY"]

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


FAMILY = Family(
    "fast_dllm_v2",
    read_fast_dllm_v2_spec,
    sampler="diffulex.samplers.fast_dllm_v2:FastDllmV2Sampler",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_types=("Fast_dLLM_Qwen",),
    decodings=(
        Decoding("multi_bd", sampler="diffulex.samplers.fast_dllm_v2:FastDllmV2MultiBdSampler"),
        Decoding("fast_dllm_v2"),
    ),
)
