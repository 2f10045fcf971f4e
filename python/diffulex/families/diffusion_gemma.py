# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma: the Gemma-4 text decoder with routed experts, run as encoder or as decoder."""

from __future__ import annotations

from diffulex.families.base import Decoding, Family, Layout
from diffulex.families.spec.diffusion_gemma import read_gemma_spec

__all__ = ["FAMILY"]

FAMILY = Family(
    "diffusion_gemma",
    read_gemma_spec,
    sampler="diffulex.samplers.diffusion_gemma:DiffusionGemmaSampler",
    architectures=("DiffusionGemmaForBlockDiffusion",),
    model_types=("diffusion_gemma",),
    decoder="diffulex.nn.diffusion_gemma:DiffusionGemmaForDiffusionLM",
    layout=Layout(".layer_scalar", rank=4),
    is_exportable=False,
    decodings=(Decoding("diffusion_gemma"),),
    quantization_ignore={"int4": ("*.self_attn.*",)},
)
