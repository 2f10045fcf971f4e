# SPDX-License-Identifier: Apache-2.0
"""The built-in families and the tables of the registries, derived from their records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.families import (
    diffucoder,
    diffusion_gemma,
    dream,
    dream_reasoner,
    fast_dllm_v2,
    llada,
    llada2,
    sdar,
    sdar_moe,
    stable_diffcoder,
)

if TYPE_CHECKING:
    from diffulex.families.base import Family

__all__ = ["FAMILIES", "MODELS", "MODEL_ALIASES", "SAMPLERS", "family_named"]

#: Every family with a published checkpoint, in the order in which detection asks them.
FAMILIES = (
    dream.FAMILY,
    diffucoder.FAMILY,
    dream_reasoner.FAMILY,
    stable_diffcoder.FAMILY,
    llada.FAMILY,
    fast_dllm_v2.FAMILY,
    sdar.FAMILY,
    sdar_moe.FAMILY,
    llada2.FAMILY,
    diffusion_gemma.FAMILY,
)
#: Rows of `AutoModelForDiffusionLM`, and its aliases.
MODELS = {family.name: family.decoder for family in FAMILIES}
MODEL_ALIASES = {name: family.name for family in FAMILIES for name in family.architectures}
#: Rows of `AutoSampler`.
SAMPLERS = {
    name: sampler
    for family in FAMILIES
    for name, sampler in {family.name: family.sampler, **family.aliases}.items()
}

_BY_NAME = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}


def family_named(model_name: str) -> Family | None:
    """The family that a `model_name` option stands for; None: no built-in one has the name."""
    return _BY_NAME.get(model_name)
