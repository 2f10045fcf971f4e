# SPDX-License-Identifier: Apache-2.0
"""Samplers that only fill masks: one class under the name of each family, made of its record."""

from __future__ import annotations

from diffulex.families.listing import family_named
from diffulex.samplers.base import MaskFillSampler


def __getattr__(name: str) -> type[MaskFillSampler]:
    """The sampler class of a family, when it is first asked for."""
    family = family_named(name)
    if family is None or family.name != name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    fields = {
        "__doc__": f"Mask filling with the settings of the family {name}.",
        "__module__": __name__,
        "family_defaults": family.defaults,
        "filter_order": family.filter_order,
        "rule_with_threshold": family.rule_with_threshold,
    }
    sampler = type(name, (MaskFillSampler,), fields)
    globals()[name] = sampler
    return sampler
