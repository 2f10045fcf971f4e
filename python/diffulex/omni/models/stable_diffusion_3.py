# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffulex.omni.models.decoding import cell_latents, decode_scaled
from diffulex.omni.registry import CfgBranches, Guidance, PipelineSpec, TeaCacheSpec

__all__ = ["SPEC"]


def _size_multiple(pipeline: Any) -> int:
    return int(pipeline.vae_scale_factor) * int(pipeline.patch_size)


def _decode(pipeline: Any, latents: Any, _height: int, _width: int) -> Any:
    return decode_scaled(pipeline, latents)


def _tensor_plan(_transformer: Any) -> dict[str, Any]:
    attention = "transformer_blocks.*.attn."
    columns = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
    plan = dict.fromkeys((attention + name for name in columns), "colwise")
    plan |= dict.fromkeys((attention + name for name in ("to_out.0", "to_add_out")), "rowwise")
    for name in ("ff", "ff_context"):
        plan[f"transformer_blocks.*.{name}.net.0.proj"] = "colwise"
        plan[f"transformer_blocks.*.{name}.net.2"] = "rowwise"
    return plan


def _indicator(block: Any, arguments: Mapping[str, Any]) -> Any:
    """The image tokens as the first block normalises them."""
    return block.norm1(arguments["hidden_states"], emb=arguments["temb"])[0]


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
    latents_shape=cell_latents,
    decode=_decode,
    tensor_plan=_tensor_plan,
    has_own_attention=True,
    has_own_heads=True,
    cfg=CfgBranches(
        batched=("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections")
    ),
    block_lists=("transformer_blocks",),
    tea_cache=TeaCacheSpec(_indicator, lambda _: None),
)
