# SPDX-License-Identifier: Apache-2.0
"""dmax: blocks are filled from the left, rewritten every step and fed back as mixed embeddings.

The runner mixes embeddings when the plan has merge arrays. Models: the LLaDA2 family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.strategies.base import Strategy
from diffulex.strategies.traits import StrategyTraits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.config.types import ConfigTree, PartialConfig

__all__ = ["STRATEGY"]


def _resolve(partial: PartialConfig) -> None:
    if partial["dmax_store_soft_embeddings"]:
        partial.change(
            "enable_prefix_caching",
            False,
            "cached keys and values depend on confidences (dmax_store_soft_embeddings)",
        )


def _core_fields(config: ConfigTree) -> Mapping[str, Any]:
    decoding = config.decoding
    return {
        "dmax_store_soft_embeddings": decoding.dmax_store_soft_embeddings,
        "token_merge_top_k": decoding.token_merge_top_k if decoding.token_merge_weight > 0 else 0,
    }


STRATEGY = Strategy(
    "dmax",
    traits=StrategyTraits(rewrites_tokens=True, merges_embeddings=True, feeds_back=True),
    sampling_modes=("edit",),
    keys=("dmax_", "token_merge_"),
    # Every decided token is refreshed, whatever its confidence.
    unread_params=("edit_threshold", "max_post_edit_steps", "penalty_lambda"),
    resolve=_resolve,
    core_fields=_core_fields,
)
