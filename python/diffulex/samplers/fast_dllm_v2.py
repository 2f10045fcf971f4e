# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM v2: thresholds on probabilities before the filters, in its own strategy or multi_bd.

Under its own strategy positions are shifted inside a block, and the first token of a block comes
from the last row of the one before; the core addresses both, the sampler only reports the seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from diffulex.samplers.base import MaskFillSampler

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FastDllmV2MultiBdSampler", "FastDllmV2Sampler"]

_COMMON: Mapping[str, Any] = {
    "accept_threshold": 0.9,
    "acceptance_rule": "threshold",
    "confidence_space": "tempered",
    "temperature": 0.0,
    "top_p": 0.95,
}


class FastDllmV2Sampler(MaskFillSampler):
    """The family under `fast_dllm_v2`: four sub-blocks of eight; never gated."""

    family_defaults: ClassVar[Mapping[str, Any]] = {
        **_COMMON,
        "block_size": 8,
        "buffer_size": 4,
        "decoding_strategy": "fast_dllm_v2",
    }


class FastDllmV2MultiBdSampler(MaskFillSampler):
    """The family under `multi_bd`: a training-free variant, gated."""

    family_defaults: ClassVar[Mapping[str, Any]] = {**_COMMON, "block_size": 32, "buffer_size": 1}
