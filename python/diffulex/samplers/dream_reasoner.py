# SPDX-License-Identifier: Apache-2.0
"""Dream-reasoner: dynamic rule, one token per step; the last scheduled step fills the block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from diffulex.samplers.base import FilterOrder, MaskFillSampler

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DreamReasonerSampler"]


class DreamReasonerSampler(MaskFillSampler):
    """Mask filling with the settings of the Dream-reasoner family."""

    filter_order = FilterOrder.TOP_K_FIRST
    family_defaults: ClassVar[Mapping[str, Any]] = {
        "accept_threshold": 0.9,
        "acceptance_rule": "dynamic",
        "block_size": 32,
        "buffer_size": 1,
        "confidence_space": "processed",
        "force_accept_last_step": True,
        "temperature": 0.0,
    }
