# SPDX-License-Identifier: Apache-2.0
"""fast_dllm_v2: three forwards over a dual cache (whole block, one sub-block, commit).

`block_size` is the sub-block B, `buffer_size` their number N, D = B * N the block the checkpoint
was trained with. The runner has one set of CUDA graphs per number of rows. Models: `fast_dllm_v2`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.log import get_logger, warn_once
from diffulex.strategies.base import Strategy
from diffulex.strategies.traits import StrategyTraits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.config.types import ConfigTree, PartialConfig

__all__ = ["STRATEGY"]

logger = get_logger(__name__)

_TRAINED_BLOCK = 32


def _resolve(partial: PartialConfig) -> None:
    if partial["buffer_size"] < 2:
        raise ConfigError(
            "buffer_size: expected >= 2 under decoding_strategy fast_dllm_v2 (N sub-blocks),"
            f" got {partial['buffer_size']}"
        )
    trained = partial.facts.spec.block_size or _TRAINED_BLOCK
    rows = partial["block_size"] * partial["buffer_size"]
    if rows != trained:
        text = "block_size * buffer_size is %d, the checkpoint was trained with blocks of %d"
        warn_once(logger, f"fast_dllm_v2 block {rows} {trained}", text, rows, trained)


def _core_fields(config: ConfigTree) -> Mapping[str, Any]:
    return {
        "fdv2_use_block_cache": config.decoding.fdv2_use_block_cache,
        # A graph has one number of rows per request, and the modes differ in theirs. Eager steps
        # are shaped like those of graphs, for equal last bits. Steps of the device have all requests
        # and whole blocks: there is no mode to wait for.
        "group_decode_by_rows": config.model.device.startswith("cuda")
        and config.kernel.run_ahead != "on",
    }


def _has_other_host_shapes(config: ConfigTree) -> bool:
    decoding = config.decoding
    return decoding.fdv2_use_block_cache or decoding.fdv2_exact_graph_buckets


STRATEGY = Strategy(
    "fast_dllm_v2",
    traits=StrategyTraits(has_dual_cache=True, is_exportable=True),
    keys=("fdv2_",),
    # Sub-blocks follow one another: none waits for the progress of the one before.
    unread_params=("add_block_threshold", "semi_complete_threshold"),
    resolve=_resolve,
    core_fields=_core_fields,
    has_other_host_shapes=_has_other_host_shapes,
)
