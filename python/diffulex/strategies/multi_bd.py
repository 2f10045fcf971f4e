# SPDX-License-Identifier: Apache-2.0
"""multi_bd: several blocks of one request in flight; buffer size 1 is single-block decoding.

With `sampling_mode="edit"` the sampler may rewrite tokens of open blocks (LLaDA2.1). The model
runner is the common one. Models: every masked family; editing for the LLaDA2 family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.registry import AutoKVCacheManager
from diffulex.strategies.core_options import core_options
from diffulex.strategies.rules import StrategyRules, notice_unread_params
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.config.sampling_params import SamplingParams
    from diffulex.config.types import ConfigTree

__all__ = ["RULES", "make_kv_cache_manager", "make_request", "make_scheduler"]

RULES = StrategyRules(sampling_modes=("naive", "edit"))


def make_request(
    token_ids: Sequence[int], sampling_params: SamplingParams, config: ConfigTree
) -> _core.Request:
    """A request for the scheduler of the same configuration."""
    notice_unread_params(sampling_params, config)
    params = sampling_params.with_defaults(config.sampler).to_core()
    return _core.Request(token_ids, params, core_options(config))


def make_kv_cache_manager(config: ConfigTree) -> _core.KVCacheManager:
    """Page bookkeeping of one engine."""
    return _core.KVCacheManager(core_options(config))


def make_scheduler(config: ConfigTree) -> _core.Scheduler:
    """The scheduler over the strategy's KV cache manager."""
    manager = AutoKVCacheManager.create(config.decoding.decoding_strategy, config)
    return _core.Scheduler(core_options(config), manager)
