# SPDX-License-Identifier: Apache-2.0
"""Z-Image: its guidance scale is one below that of the others, zero is off."""

from __future__ import annotations

from typing import Any

from diffulex.omni.models.decoding import cell_latents, decode_scaled, spatial_multiple
from diffulex.omni.registry import CfgBranches, Guidance, PipelineSpec

__all__ = ["SPEC"]


def _decode(pipeline: Any, latents: Any, _height: int, _width: int) -> Any:
    return decode_scaled(pipeline, latents)


SPEC = PipelineSpec(
    name="ZImagePipeline",
    media="image",
    size_multiple=spatial_multiple,
    defaults={
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
        "max_sequence_length": None,
    },
    guidance=Guidance("guidance_scale", off=0.0),
    latents_shape=cell_latents,
    lists_embeds=True,
    decode=_decode,
    cfg=CfgBranches(batched=("x", "t", "cap_feats")),
    block_lists=("layers",),
)
