# SPDX-License-Identifier: Apache-2.0
"""d2f: multi_bd with a prompt that sees all of itself, and therefore no prefix cache.

Request, scheduler, page bookkeeping and runner are those of multi_bd. Models: `dream`,
`diffucoder`, `llada`; any other masked family runs as well, though not as it was trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.errors import ConfigError
from diffulex.strategy.multi_bd import make_kv_cache_manager, make_request, make_scheduler
from diffulex.strategy.rules import StrategyRules

if TYPE_CHECKING:
    from diffulex.config_draft import Draft

__all__ = ["RULES", "make_kv_cache_manager", "make_request", "make_scheduler"]


def _resolve(draft: Draft) -> None:
    # K and V of a prefix depend on all of the prompt.
    draft.change("enable_prefix_caching", False, "d2f prompts see all of themselves")
    if draft["enable_chunked_prefill"]:
        raise ConfigError(
            "enable_chunked_prefill: expected False under decoding_strategy d2f (a prompt sees all"
            " of itself), got True"
        )


RULES = StrategyRules(has_prefix_full=True, resolve=_resolve)
