# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image: guidance by a second branch, rescaled per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffulex.omni.models.decoding import (
    like_projection,
    packed_latents,
    spatial_multiple,
    tensor_plan,
)
from diffulex.omni.registry import CfgBranches, Guidance, PipelineSpec, TeaCacheSpec

__all__ = ["SPEC"]


def _decode(pipeline: Any, latents: Any, height: int, width: int) -> Any:
    import torch  # noqa: PLC0415 (slow, and loaded already when this runs)

    vae = pipeline.vae
    latents = pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor)
    latents = latents.to(vae.dtype)
    shape = (1, vae.config.z_dim, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean).view(shape).to(latents)
    # As the pipeline does it: the quotient by the reciprocal has its own rounding.
    scale = 1.0 / torch.tensor(vae.config.latents_std).view(shape).to(latents)
    return vae.decode(latents / scale + mean, return_dict=False)[0][:, :, 0]


def _prompt_tokens(pipeline: Any, prompt: str, values: dict[str, Any]) -> tuple[int, int]:
    text = pipeline.prompt_template_encode.format(prompt)
    count = len(pipeline.tokenizer(text).input_ids) - pipeline.prompt_template_encode_start_idx
    return count, min(values["max_sequence_length"], pipeline.tokenizer_max_length)


#: Published without a measurement that others have repeated.
_COEFFICIENTS = (-4.5e2, 2.8e2, -4.5e1, 3.2, -2e-2)


def _indicator(block: Any, arguments: Mapping[str, Any]) -> Any:
    """The image tokens as the first block modulates them."""
    modulation, _ = block.img_mod(arguments["temb"]).chunk(2, dim=-1)
    normed = block.img_norm1(arguments["hidden_states"])
    return block._modulate(normed, modulation, arguments.get("modulate_index"))[0]


SPEC = PipelineSpec(
    name="QwenImagePipeline",
    media="image",
    size_multiple=spatial_multiple,
    defaults={
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 50,
        "true_cfg_scale": 4.0,
        "max_sequence_length": 512,
    },
    guidance=Guidance("true_cfg_scale", negative_prompt=" "),
    prompt_tokens=_prompt_tokens,
    has_sequence_plan=True,
    tensor_plan=tensor_plan,
    cfg=CfgBranches(output_like=like_projection),
    block_lists=("transformer_blocks",),
    tea_cache=TeaCacheSpec(_indicator, lambda _: _COEFFICIENTS, threshold=0.2),
    latents_shape=packed_latents,
    decode=_decode,
)
