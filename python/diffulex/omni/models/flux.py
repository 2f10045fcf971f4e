# SPDX-License-Identifier: Apache-2.0
"""FLUX.1: an embedded guidance scale, and a second branch when `true_cfg_scale` is above one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffulex.omni.models.decoding import (
    decode_scaled,
    like_projection,
    packed_latents,
    spatial_multiple,
    tensor_plan,
)
from diffulex.omni.registry import CfgBranches, Guidance, PipelineSpec, TeaCacheSpec

__all__ = ["SPEC"]


def _decode(pipeline: Any, latents: Any, height: int, width: int) -> Any:
    unpacked = pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor)
    return decode_scaled(pipeline, unpacked)


_COEFFICIENTS = (4.98651651e2, -2.83781631e2, 5.58554382e1, -3.82021401, 2.64230861e-1)


def _indicator(block: Any, arguments: Mapping[str, Any]) -> Any:
    """The image tokens as the first block normalises them."""
    return block.norm1(arguments["hidden_states"], emb=arguments["temb"])[0]


SPEC = PipelineSpec(
    name="FluxPipeline",
    media="image",
    size_multiple=spatial_multiple,
    defaults={
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 28,
        "guidance_scale": 3.5,
        "true_cfg_scale": 1.0,
        "max_sequence_length": None,
    },
    guidance=Guidance("true_cfg_scale"),
    text_encoders=("text_encoder", "text_encoder_2"),
    latents_shape=packed_latents,
    decode=_decode,
    has_sequence_plan=True,
    tensor_plan=tensor_plan,
    cfg=CfgBranches(output_like=like_projection),
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    tea_cache=TeaCacheSpec(_indicator, lambda _: _COEFFICIENTS, threshold=0.25),
)
