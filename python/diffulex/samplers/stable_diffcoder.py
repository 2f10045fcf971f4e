# SPDX-License-Identifier: Apache-2.0
"""Stable-DiffCoder: one token per step, or every position of at least `accept_threshold`.

Its published code decodes statically without a threshold and non-strictly with one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from diffulex.samplers.base import MaskFillSampler

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["StableDiffcoderSampler"]


class StableDiffcoderSampler(MaskFillSampler):
    """Mask filling with the settings of the Stable-DiffCoder family."""

    #: Acceptance rule once an accept_threshold is given.
    rule_with_threshold: ClassVar[str] = "threshold_non_strict"
    family_defaults: ClassVar[Mapping[str, Any]] = {
        "accept_threshold": 0.95,
        "acceptance_rule": "static",
        "block_size": 4,
        "buffer_size": 1,
        "confidence_space": "raw",
        "temperature": 0.0,
    }
