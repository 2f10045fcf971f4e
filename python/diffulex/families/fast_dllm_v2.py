# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM v2: the Qwen2 template with block-diffusion attention, logits shifted by one."""

from __future__ import annotations

from diffulex.families.base import Decoding, Family
from diffulex.families.spec.decoder import FamilyTokens, decoder_reader

__all__ = ["FAMILY"]

_TOKENS = FamilyTokens(
    mask_id=151665,
    turn_end_texts=("<|im_end|>", "<|endoftext|>"),
    turn_end_ids=(151645, 151643),
)

FAMILY = Family(
    "fast_dllm_v2",
    decoder_reader(
        "fast_dllm_v2", _TOKENS, block_size=32, qkv_bias=True, qk_norm=False, shift=True
    ),
    sampler="diffulex.samplers.fast_dllm_v2:FastDllmV2Sampler",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_types=("Fast_dLLM_Qwen",),
    decodings=(
        Decoding("multi_bd", sampler="diffulex.samplers.fast_dllm_v2:FastDllmV2MultiBdSampler"),
        Decoding("fast_dllm_v2"),
    ),
)
