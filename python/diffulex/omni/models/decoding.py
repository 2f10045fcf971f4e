# SPDX-License-Identifier: Apache-2.0
"""Latents to pictures, as the pipelines do it, for previews between steps."""

from __future__ import annotations

from typing import Any

__all__ = ["decode_scaled", "spatial_multiple"]


def spatial_multiple(pipeline: Any) -> int:
    """Latent cells are packed two by two."""
    return int(pipeline.vae_scale_factor) * 2


def decode_scaled(pipeline: Any, latents: Any) -> Any:
    """[B, C, h, w] of a VAE with one scale and one shift."""
    vae = pipeline.vae
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
    return vae.decode(scaled, return_dict=False)[0]
