# SPDX-License-Identifier: Apache-2.0
"""Request, page bookkeeping and scheduler of a configuration: the same for all built-in strategies.

What differs between them is in the core's state machine and in the strategy's record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.config.sampling_params import DECODING_FIELDS
from diffulex.log import get_logger, warn_once
from diffulex.registry import AutoKVCacheManager
from diffulex.strategies.core_options import core_options
from diffulex.strategies.listing import strategy_named
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.config.sampling_params import SamplingParams
    from diffulex.config.types import ConfigTree

__all__ = ["make_kv_cache_manager", "make_request", "make_scheduler"]

logger = get_logger(__name__)

# Nothing is overwritten, and no ratio of kept tokens falls below 1, while masks are filled only.
_REWRITING_PARAMS = (
    "edit_threshold",
    "max_post_edit_steps",
    "penalty_lambda",
    "token_stability_threshold",
)
# Whatever decodes.
_UNREAD_PARAMS = tuple(name for name, field in DECODING_FIELDS.items() if not field.is_read)


def make_request(
    token_ids: Sequence[int], sampling_params: SamplingParams, config: ConfigTree
) -> _core.Request:
    """A request for the scheduler of the same configuration."""
    _notice_unread_params(sampling_params, config)
    params = sampling_params.with_defaults(config.sampler).to_core()
    return _core.Request(token_ids, params, core_options(config))


def make_kv_cache_manager(config: ConfigTree) -> _core.KVCacheManager:
    """Page bookkeeping of one engine."""
    return _core.KVCacheManager(core_options(config))


def make_scheduler(config: ConfigTree) -> _core.Scheduler:
    """The scheduler over the strategy's KV cache manager."""
    manager = AutoKVCacheManager.create(config.decoding.decoding_strategy, config)
    return _core.Scheduler(core_options(config), manager)


def _notice_unread_params(sampling_params: SamplingParams, config: ConfigTree) -> None:
    """Warns, once each, of explicit fields that the strategy and the sampling mode do not read."""
    strategy, mode = config.decoding.decoding_strategy, config.decoding.sampling_mode
    unread = dict.fromkeys((*strategy_named(strategy).unread_params, *_UNREAD_PARAMS))
    if mode != "edit":
        unread.update(dict.fromkeys(_REWRITING_PARAMS))
    for name in unread:
        value = getattr(sampling_params, name)
        # Temperature 0 asks for an answer that is the same every time, which it gets.
        if value is not None and (name != "temperature" or value > 0):
            text = (
                "SamplingParams.%s: without effect under decoding_strategy %s with sampling_mode"
                " %s, got %r"
            )
            warn_once(logger, f"param {name} {strategy} {mode}", text, name, strategy, mode, value)
