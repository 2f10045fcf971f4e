# SPDX-License-Identifier: Apache-2.0
"""What several families share: latents to pictures as the pipelines do it, sizes, shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["decode_scaled", "like_projection", "spatial_multiple", "tensor_plan"]


def spatial_multiple(pipeline: Any) -> int:
    """Latent cells are packed two by two."""
    return int(pipeline.vae_scale_factor) * 2


def decode_scaled(pipeline: Any, latents: Any) -> Any:
    """[B, C, h, w] of a VAE with one scale and one shift."""
    vae = pipeline.vae
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
    return vae.decode(scaled, return_dict=False)[0]


def like_projection(transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Shape of an output that is a projection of every image token."""
    batch, tokens, _ = arguments["hidden_states"].shape
    return batch, tokens, int(transformer.proj_out.out_features)


def tensor_plan(transformer: Any) -> dict[str, Any]:
    """What diffusers says of its own layers."""
    return dict(transformer._tp_plan)
