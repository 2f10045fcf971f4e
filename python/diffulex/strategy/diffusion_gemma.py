# SPDX-License-Identifier: Apache-2.0
"""diffusion_gemma: canvases of random tokens, denoised as a whole, then encoded into the cache.

Request, scheduler and page bookkeeping are those of multi_bd over the core's own state machine;
the runner feeds self-conditioning signals to the model. Models: `diffusion_gemma`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.logging import get_logger, warn_once
from diffulex.strategy import multi_bd
from diffulex.strategy.multi_bd import make_kv_cache_manager, make_scheduler
from diffulex.strategy.rules import StrategyRules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex.config import Config
    from diffulex.config_draft import Draft
    from diffulex.sampling_params import SamplingParams
    from diffulex_ext import _core

__all__ = ["RULES", "make_kv_cache_manager", "make_request", "make_scheduler"]

logger = get_logger(__name__)

_DEFAULT_CANVAS = 256
_UNUSED_PARAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "accept_threshold",
    "edit_threshold",
    "add_block_threshold",
    "semi_complete_threshold",
    "token_stability_threshold",
)


def make_request(
    token_ids: Sequence[int], sampling_params: SamplingParams, config: Config
) -> _core.Request:
    """A request of multi_bd; what the schedule of the canvas decides is noticed and not used."""
    for name in _UNUSED_PARAMS:
        value = getattr(sampling_params, name)
        if value is not None:
            text = (
                "SamplingParams.%s: without effect under decoding_strategy diffusion_gemma, got %r"
            )
            warn_once(logger, f"canvas {name}", text, name, value)
    return multi_bd.make_request(token_ids, sampling_params, config)


def _resolve(draft: Draft) -> None:
    spec = draft.facts.spec
    canvas = getattr(spec, "canvas_length", None) or spec.block_size or _DEFAULT_CANVAS
    draft.change("block_size", canvas, "canvas length of the checkpoint")
    draft.change("buffer_size", 1, "one canvas is denoised at a time")
    low, high = draft["diffusion_gemma_t_min"], draft["diffusion_gemma_t_max"]
    if not high > low:
        raise ConfigError(
            f"diffusion_gemma_t_max: expected a temperature above diffusion_gemma_t_min {low},"
            f" got {high}"
        )


def _core_fields(config: Config) -> Mapping[str, Any]:
    decoding = config.decoding
    return {
        "max_denoising_steps": decoding.diffusion_gemma_max_denoising_steps,
        "stability_threshold": decoding.diffusion_gemma_stability_threshold,
        "t_min": decoding.diffusion_gemma_t_min,
        "t_max": decoding.diffusion_gemma_t_max,
    }


RULES = StrategyRules(keys=("diffusion_gemma_",), resolve=_resolve, core_fields=_core_fields)
