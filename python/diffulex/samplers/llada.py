# SPDX-License-Identifier: Apache-2.0
"""LLaDA: logits of a position predict that position; decoded as D2F-LLaDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from diffulex.samplers.base import MaskFillSampler

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LladaSampler"]


class LladaSampler(MaskFillSampler):
    """Mask filling with the settings of D2F-LLaDA."""

    #: Configuration keys this family sets; explicit values and the checkpoint go before them.
    family_defaults: ClassVar[Mapping[str, Any]] = {
        "accept_threshold": 0.9,
        "acceptance_rule": "threshold",
        "block_size": 32,
        "buffer_size": 4,
        "confidence_space": "processed",
        "decoding_strategy": "d2f",
        "semi_complete_threshold": 0.95,
        "temperature": 0.0,
    }
