# SPDX-License-Identifier: Apache-2.0
"""What a decoding strategy demands of the configuration and tells the core.

Each strategy's file has one `RULES`. A strategy registered from outside wraps a state machine of
the core and follows the rules of `multi_bd`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from diffulex.log import get_logger, warn_once

if TYPE_CHECKING:
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.config.types import ConfigTree, PartialConfig

__all__ = ["STRATEGIES", "StrategyRules", "notice_unread_params", "rules_of"]

logger = get_logger(__name__)

# Nothing is overwritten, and no ratio of kept tokens falls below 1, while masks are filled only.
_REWRITING_PARAMS = ("edit_threshold", "token_stability_threshold")


def _nothing_to_resolve(partial: PartialConfig) -> None:
    """A strategy without demands."""


def _no_fields(config: ConfigTree) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class StrategyRules:
    """Configuration rules of one strategy.

    Attributes:
        sampling_modes: values of `sampling_mode` it has; the first is taken when none is given.
        has_prefix_full: prompts are bidirectional as a whole.
        keys: configuration keys, or beginnings of them, that this strategy alone reads.
        unread_params: fields of `SamplingParams` it has no use for, beside those that only a
            sampling mode that rewrites tokens reads.
        draws_at_zero: it draws tokens at temperature 0 as well, so that seeds matter there.
        resolve: forces and checks keys.
        core_fields: fields of the core's options beyond the common ones.
    """

    sampling_modes: tuple[str, ...] = ("naive",)
    has_prefix_full: bool = False
    keys: tuple[str, ...] = ()
    unread_params: tuple[str, ...] = ()
    draws_at_zero: bool = False
    resolve: Callable[[PartialConfig], None] = _nothing_to_resolve
    core_fields: Callable[[ConfigTree], Mapping[str, Any]] = _no_fields


#: Built-in strategies; a name is also the module that holds its rules and factories.
STRATEGIES = ("multi_bd", "d2f", "dmax", "fast_dllm_v2", "diffusion_gemma")
#: Names of multi_bd in older configuration files.
ALIASES = {
    "block_diffusion": "multi_bd",
    "fast_dllm": "multi_bd",
    "multi_block_diffusion": "multi_bd",
}


def _factories(factory: str) -> dict[str, str]:
    return {name: f"diffulex.strategies.{name}:{factory}" for name in STRATEGIES}


#: Rows of the registries of strategies.
REQUESTS = _factories("make_request")
SCHEDULERS = _factories("make_scheduler")
KV_CACHE_MANAGERS = _factories("make_kv_cache_manager")
MODEL_RUNNERS = dict.fromkeys(STRATEGIES, "diffulex.runner.model_runner:ModelRunner")


def rules_of(strategy: str) -> StrategyRules:
    """Rules of a strategy name."""
    module = strategy if strategy in STRATEGIES else "multi_bd"
    return cast("StrategyRules", importlib.import_module(f"diffulex.strategies.{module}").RULES)


def notice_unread_params(sampling_params: SamplingParams, config: ConfigTree) -> None:
    """Warns, once each, of explicit fields that the strategy and the sampling mode do not read."""
    strategy, mode = config.decoding.decoding_strategy, config.decoding.sampling_mode
    unread = dict.fromkeys(rules_of(strategy).unread_params)
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
