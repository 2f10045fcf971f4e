# SPDX-License-Identifier: Apache-2.0
"""Quantisation of a decoder outside of an export, with what it saves and what it costs."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diffulex.errors import ConfigError
from diffulex_edge.measure import estimate
from diffulex_edge.model import EdgeProgram
from diffulex_edge.recipes import parse_recipe, quantise
from diffulex_edge.self_check import compare, eager_caller, run_trace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex_edge.model import EdgeDecoder
    from diffulex_edge.recipes import Recipe
    from diffulex_edge.self_check import Call

__all__ = ["QuantizationResult", "quantize_model", "quantize_with_report"]


@dataclass(frozen=True, slots=True)
class QuantizationResult:
    """A quantised decoder and what became of it.

    Attributes:
        metrics: `original_memory_mb`, `quantized_memory_mb` (weights as a program stores them, in 10^6
            bytes), `memory_reduction_pct`, `compression_ratio`, `converted_linear_layers`,
            `converted_embedding_layers`, `quantization_time_sec`, and with calls `max_abs_error` and
            `argmax_agreement` against the decoder before.
        warnings: layers that another recipe was taken for.
    """

    model: EdgeDecoder
    metrics: Mapping[str, float]
    warnings: tuple[str, ...] = ()
    success: bool = True


def quantize_model(
    model: EdgeDecoder, dtype: str, mode: str | None = None, *, inplace: bool = False
) -> EdgeDecoder:
    """A decoder with quantised weights.

    Args:
        model: in float32.
        dtype: a recipe, as for the export: ``int8``, ``int4``, ``fp16``, ``8da4w-g64``.
        mode: ``dynamic`` or ``weight_only``, which is computed dynamically; None: as the recipe says.
        inplace: change `model` itself instead of a copy.

    Raises:
        ConfigError: an unknown recipe or mode, or a recipe that changes the exported graph.
    """
    return quantize_with_report(model, dtype, mode, inplace=inplace).model


def quantize_with_report(
    model: EdgeDecoder,
    dtype: str,
    mode: str | None = None,
    *,
    calls: Sequence[Call] = (),
    inplace: bool = False,
) -> QuantizationResult:
    """As `quantize_model`, with what it saves, and what it costs in `calls`.

    Raises:
        ConfigError: see `quantize_model`.
    """
    recipe = _recipe_of(dtype, mode)
    began = time.perf_counter()
    reference = run_trace(eager_caller(EdgeProgram(model)), calls)
    quantised = model if inplace else copy.deepcopy(model)
    notices = quantise(quantised, recipe)
    seconds = time.perf_counter() - began
    before, after = (
        estimate(model.spec, item, model.max_seq_len).weights / 1e6
        for item in (parse_recipe("none"), recipe)
    )
    num_linear = sum(isinstance(module, torch.nn.Linear) for module in model.layers.modules())
    metrics = {
        "original_memory_mb": before,
        "quantized_memory_mb": after,
        "memory_reduction_pct": 100 * (1 - after / before),
        "compression_ratio": before / after,
        "converted_linear_layers": float(
            (recipe.layers != "none") * num_linear + (recipe.head != "none")
        ),
        "converted_embedding_layers": float(recipe.is_half or recipe.embedding_bits != 32),
        "quantization_time_sec": seconds,
    }
    if calls:
        found = compare(run_trace(eager_caller(EdgeProgram(quantised)), calls), reference)
        metrics |= {"max_abs_error": found.max_error, "argmax_agreement": found.argmax}
    return QuantizationResult(quantised, metrics, tuple(notices))


def _recipe_of(dtype: str, mode: str | None) -> Recipe:
    if mode not in (None, "dynamic", "weight_only"):
        raise ConfigError(f"mode: expected dynamic or weight_only, got {mode!r}")
    recipe = parse_recipe(dtype)
    if recipe.is_pt2e:
        raise ConfigError(f"quant: expected a recipe of weights, got {recipe}: it needs an export")
    return recipe
