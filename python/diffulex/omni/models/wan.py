# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1 and 2.2: text to video, with one transformer or two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffulex.omni.registry import CfgBranches, Guidance, PipelineSpec, TeaCacheSpec

__all__ = ["SPEC"]


def _size_multiple(pipeline: Any) -> int:
    transformer = (
        pipeline.transformer if pipeline.transformer is not None else pipeline.transformer_2
    )
    return int(pipeline.vae_scale_factor_spatial) * int(transformer.config.patch_size[1])


def _output_like(transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    batch, _, *cells = arguments["hidden_states"].shape
    return batch, int(transformer.config.out_channels), *cells


def _latents_shape(pipeline: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    side, step = pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal
    cells = (arguments["height"] // side, arguments["width"] // side)
    return int(pipeline.vae.config.z_dim), (arguments["num_frames"] - 1) // step + 1, *cells


#: Width of the transformer -> coefficients for text to video and the modulation of the blocks.
_COEFFICIENTS = {
    1536: (-5.21862437e4, 9.23041404e3, -5.28275948e2, 1.36987616e1, -4.99875664e-2),
    5120: (-3.03318725e5, 4.90537029e4, -2.65530556e3, 5.87365115e1, -3.15583525e-1),
}


def _coefficients(config: Mapping[str, Any]) -> tuple[float, ...] | None:
    return _COEFFICIENTS.get(config["num_attention_heads"] * config["attention_head_dim"])


def _indicator(_block: Any, arguments: Mapping[str, Any]) -> Any:
    """The modulation, which says nothing of the tokens."""
    return arguments["temb"]


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
    schedule_keys=("flow_shift", "boundary_ratio"),
    float32_components=("vae",),
    frame_multiple=4,
    latents_shape=_latents_shape,
    has_sequence_plan=True,
    cfg=CfgBranches(output_like=_output_like),
    block_lists=("blocks",),
    tea_cache=TeaCacheSpec(_indicator, _coefficients, first_steps=5),
)
