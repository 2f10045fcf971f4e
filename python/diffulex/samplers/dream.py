# SPDX-License-Identifier: Apache-2.0
"""Dream: shifted logits, decoded in blocks as its D2F training does.

The published full-sequence sampler is not block-based; the rule here is that of D2F."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from diffulex.samplers.base import MaskFillSampler

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DreamSampler"]


class DreamSampler(MaskFillSampler):
    """Mask filling with the settings of D2F-Dream."""

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
