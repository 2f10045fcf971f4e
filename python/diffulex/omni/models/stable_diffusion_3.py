# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from typing import Any

from diffulex.omni.models.decoding import decode_scaled
from diffulex.omni.registry import Guidance, PipelineSpec

__all__ = ["SPEC"]


def _size_multiple(pipeline: Any) -> int:
    return int(pipeline.vae_scale_factor) * int(pipeline.patch_size)


def _decode(pipeline: Any, latents: Any, _height: int, _width: int) -> Any:
    return decode_scaled(pipeline, latents)


SPEC = PipelineSpec(
    name="StableDiffusion3Pipeline",
    media="image",
    size_multiple=_size_multiple,
    defaults={
        "height": 1024,
        "width": 1024,
        "num_inference_steps": 28,
        "guidance_scale": 7.0,
        "max_sequence_length": None,
    },
    guidance=Guidance("guidance_scale"),
    text_encoders=("text_encoder", "text_encoder_2", "text_encoder_3"),
    decode=_decode,
)
