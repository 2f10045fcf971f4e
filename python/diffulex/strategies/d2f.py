# SPDX-License-Identifier: Apache-2.0
"""d2f: multi_bd with a prompt that sees all of itself, and therefore no prefix cache.

Blocks start where the prompt ends, which is cached as a whole; with `d2f_block_grid` at multiples of
`block_size`, and the end of the prompt is decoded along with the block that it begins.

Models: `dream`, `diffucoder`, `llada`; any other masked family runs as well, though not as it was
trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.strategies.base import Strategy
from diffulex.strategies.traits import StrategyTraits

if TYPE_CHECKING:
    from diffulex.config.types import ConfigTree, PartialConfig

__all__ = ["STRATEGY"]


def _resolve(partial: PartialConfig) -> None:
    # K and V of a prefix depend on all of the prompt.
    partial.change("enable_prefix_caching", False, "d2f prompts see all of themselves")
    if partial["enable_chunked_prefill"]:
        raise ConfigError(
            "enable_chunked_prefill: expected False under decoding_strategy d2f (a prompt sees all"
            " of itself), got True"
        )


def _core_fields(config: ConfigTree) -> Mapping[str, Any]:
    return {"d2f_block_grid": config.decoding.d2f_block_grid}


STRATEGY = Strategy(
    "d2f",
    traits=StrategyTraits(fills_masks=True, has_prefix_full=True, is_exportable=True),
    keys=("d2f_",),
    unread_keys=("enable_prefix_caching",),
    resolve=_resolve,
    core_fields=_core_fields,
)
