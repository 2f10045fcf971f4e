# SPDX-License-Identifier: Apache-2.0
"""diffusion_gemma: canvases of random tokens, denoised as a whole, then encoded into the cache.

The runner feeds self-conditioning signals to the model. Models: `diffusion_gemma`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.strategies.base import Strategy
from diffulex.strategies.traits import StrategyTraits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.config.types import ConfigTree, PartialConfig

__all__ = ["STRATEGY"]

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


def _settings_text(config: ConfigTree) -> str:
    decoding = config.decoding
    return (
        f"at most {decoding.diffusion_gemma_max_denoising_steps} steps, entropy bound"
        f" {decoding.diffusion_gemma_entropy_bound}, temperature {decoding.diffusion_gemma_t_max}"
        f" to {decoding.diffusion_gemma_t_min}"
    )


STRATEGY = Strategy(
    "diffusion_gemma",
    traits=StrategyTraits(has_canvas=True, feeds_back=True, draws_at_zero=True),
    keys=("diffusion_gemma_",),
    unread_params=_UNREAD_PARAMS,
    unread_keys=("block_size", "buffer_size"),
    resolve=_resolve,
    core_fields=_core_fields,
    # It leaves out the rows of encoded canvases.
    has_other_host_shapes=lambda config: True,
    settings_text=_settings_text,
)
