# SPDX-License-Identifier: Apache-2.0
"""diffusion_gemma: canvases of random tokens, denoised as a whole, then encoded into the cache.

Request, scheduler and page bookkeeping are those of multi_bd over the core's own state machine;
the runner feeds self-conditioning signals to the model. Models: `diffusion_gemma`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.strategies.multi_bd import make_kv_cache_manager, make_request, make_scheduler
from diffulex.strategies.rules import StrategyRules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.config.types import ConfigTree, PartialConfig

__all__ = ["RULES", "make_kv_cache_manager", "make_request", "make_scheduler"]

_DEFAULT_CANVAS = 256
# The schedule of the canvas decides.
_UNREAD_PARAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "accept_threshold",
    "add_block_threshold",
    "semi_complete_threshold",
)


def _resolve(partial: PartialConfig) -> None:
    spec = partial.facts.spec
    canvas = getattr(spec, "canvas_length", None) or spec.block_size or _DEFAULT_CANVAS
    partial.change("block_size", canvas, "canvas length of the checkpoint")
    partial.change("buffer_size", 1, "one canvas is denoised at a time")
    low, high = partial["diffusion_gemma_t_min"], partial["diffusion_gemma_t_max"]
    if not high > low:
        raise ConfigError(
            f"diffusion_gemma_t_max: expected a temperature above diffusion_gemma_t_min {low},"
            f" got {high}"
        )


def _core_fields(config: ConfigTree) -> Mapping[str, Any]:
    decoding = config.decoding
    return {
        "max_denoising_steps": decoding.diffusion_gemma_max_denoising_steps,
        "stability_threshold": decoding.diffusion_gemma_stability_threshold,
        "t_min": decoding.diffusion_gemma_t_min,
        "t_max": decoding.diffusion_gemma_t_max,
    }


RULES = StrategyRules(
    keys=("diffusion_gemma_",),
    unread_params=_UNREAD_PARAMS,
    draws_at_zero=True,
    resolve=_resolve,
    core_fields=_core_fields,
)
