# SPDX-License-Identifier: Apache-2.0
"""multi_bd: several blocks of one request in flight; buffer size 1 is single-block decoding.

With `sampling_mode="edit"` the sampler may rewrite tokens of open blocks (LLaDA2.1). Models: every
masked family; editing for the LLaDA2 family.
"""

from __future__ import annotations

from diffulex.strategies.base import Strategy
from diffulex.strategies.traits import StrategyTraits

__all__ = ["STRATEGY"]

STRATEGY = Strategy(
    "multi_bd",
    aliases=("block_diffusion", "fast_dllm", "multi_block_diffusion"),
    traits=StrategyTraits(fills_masks=True, is_exportable=True),
    sampling_modes=("naive", "edit"),
)
