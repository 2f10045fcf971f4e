# SPDX-License-Identifier: Apache-2.0
"""Stable-DiffCoder: the Llama template with block-diffusion attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.families.base import Family
from diffulex.families.spec.decoder import FamilyTokens, read_decoder_spec
from diffulex.families.spec.reader import ConfigReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from diffulex.families.spec import ModelSpec

__all__ = ["FAMILY"]

_TOKENS = FamilyTokens(
    mask_id=5,
    turn_end_texts=("<[end\u2581of\u2581sentence]>",),
    turn_end_ids=(2,),
)


def read_stable_diffcoder_spec(
    config: Mapping[str, Any], model_dir: Path, *, mask_token_id: int | None = None
) -> ModelSpec:
    """Description of a Stable-DiffCoder checkpoint; see `read_decoder_spec` for the errors."""
    reader = ConfigReader(config)
    has_bias = reader.flag("attention_bias", False)
    return read_decoder_spec(
        reader,
        model_dir,
        family="stable_diffcoder",
        tokens=_TOKENS,
        mask_token_id=mask_token_id,
        block_size=4,
        max_positions=8192,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm=False,
    )


FAMILY = Family(
    "stable_diffcoder",
    read_stable_diffcoder_spec,
    sampler="diffulex.samplers.stable_diffcoder:StableDiffcoderSampler",
    architectures=("StableDiffcoderForCausalLM", "SeedDiffcoderForCausalLM"),
    model_types=("llama",),
)
