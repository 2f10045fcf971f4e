# SPDX-License-Identifier: Apache-2.0
"""What several families share: latents to pictures as the pipelines do it, sizes, shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "cell_latents",
    "decode_scaled",
    "like_projection",
    "packed_latents",
    "spatial_multiple",
    "tensor_plan",
]


def spatial_multiple(pipeline: Any) -> int:
    """Latent cells are packed two by two."""
    return int(pipeline.vae_scale_factor) * 2


def packed_latents(pipeline: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """[tokens, channels]: a token is two by two cells."""
    side = spatial_multiple(pipeline)
    tokens = (arguments["height"] // side) * (arguments["width"] // side)
    return tokens, int(pipeline.transformer.config.in_channels)


def cell_latents(pipeline: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """[channels, rows, columns] of cells."""
    factor = int(pipeline.vae_scale_factor)
    rows, columns = arguments["height"] // factor, arguments["width"] // factor
    return int(pipeline.transformer.config.in_channels), rows, columns


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
