# SPDX-License-Identifier: Apache-2.0
"""SDAR: logits of a position predict that position; dynamic rule with one token per step.

The published sampler draws at temperature 1 by default while its benchmarks are greedy; the
family default here is greedy, so that a forgotten parameter never means random answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from diffulex.samplers.base import FilterOrder, MaskFillSampler

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SdarSampler"]


class SdarSampler(MaskFillSampler):
    """Mask filling with the settings of the SDAR family."""

    filter_order = FilterOrder.TOP_K_FIRST
    #: Configuration keys this family sets; explicit values and the checkpoint's go before them.
    family_defaults: ClassVar[Mapping[str, Any]] = {
        "accept_threshold": 0.95,
        "acceptance_rule": "dynamic",
        "buffer_size": 1,
        "confidence_space": "processed",
        "temperature": 0.0,
    }
