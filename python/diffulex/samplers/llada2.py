# SPDX-License-Identifier: Apache-2.0
"""LLaDA2 without editing: dynamic rule with one token per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from diffulex.samplers.base import FilterOrder, MaskFillSampler

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Llada2Sampler"]


class Llada2Sampler(MaskFillSampler):
    """Mask filling with the settings of the LLaDA2 family."""

    filter_order = FilterOrder.TOP_K_FIRST
    family_defaults: ClassVar[Mapping[str, Any]] = {
        "accept_threshold": 0.95,
        "acceptance_rule": "dynamic",
        "block_size": 32,
        "buffer_size": 1,
        "confidence_space": "processed",
        "temperature": 0.0,
    }
