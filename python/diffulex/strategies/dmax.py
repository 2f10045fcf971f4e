# SPDX-License-Identifier: Apache-2.0
"""dmax: blocks are filled from the left, rewritten every step and fed back as mixed embeddings.

Request, scheduler and page bookkeeping are those of multi_bd; the runner mixes embeddings when the
plan has merge arrays. Models: the LLaDA2 family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.strategies.multi_bd import make_kv_cache_manager, make_request, make_scheduler
from diffulex.strategies.rules import StrategyRules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.config.types import ConfigTree, PartialConfig

__all__ = ["RULES", "make_kv_cache_manager", "make_request", "make_scheduler"]


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


RULES = StrategyRules(
    sampling_modes=("edit",),
    keys=("dmax_", "token_merge_"),
    # Every decided token is refreshed, whatever its confidence.
    unread_params=("edit_threshold",),
    resolve=_resolve,
    core_fields=_core_fields,
)
