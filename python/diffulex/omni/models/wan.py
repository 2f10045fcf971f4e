# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1 and 2.2: text to video, with one transformer or two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffulex.omni.registry import CfgBranches, Guidance, PipelineSpec

__all__ = ["SPEC"]


def _size_multiple(pipeline: Any) -> int:
    transformer = (
        pipeline.transformer if pipeline.transformer is not None else pipeline.transformer_2
    )
    return int(pipeline.vae_scale_factor_spatial) * int(transformer.config.patch_size[1])


def _output_like(transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    batch, _, *cells = arguments["hidden_states"].shape
    return batch, int(transformer.config.out_channels), *cells


SPEC = PipelineSpec(
    name="WanPipeline",
    media="video",
    size_multiple=_size_multiple,
    defaults={
        "height": 720,
        "width": 1280,
        "num_frames": 81,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
        "guidance_scale_2": None,
        "max_sequence_length": None,
    },
    guidance=Guidance("guidance_scale"),
    transformers=("transformer", "transformer_2"),
    float32_components=("vae",),
    frame_multiple=4,
    has_sequence_plan=True,
    cfg=CfgBranches(output_like=_output_like),
)
