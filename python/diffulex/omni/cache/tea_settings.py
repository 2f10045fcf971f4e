# SPDX-License-Identifier: Apache-2.0
"""What TeaCache works with for a model: the caller's numbers, else the model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.omni.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from diffulex.omni.config_table import DiffusionCacheConfig
    from diffulex.omni.registry import PipelineSpec, TeaCacheSpec

__all__ = ["TeaSettings", "tea_settings"]

_DEFAULT_THRESHOLD = 0.2


class TeaSettings(NamedTuple):
    """Everything that is known without the weights."""

    spec: TeaCacheSpec
    coefficients: tuple[float, ...]
    threshold: float


def tea_settings(
    config: DiffusionCacheConfig,
    spec: PipelineSpec,
    transformer: Mapping[str, Any],
    *,
    is_alone: bool,
) -> TeaSettings:
    """The settings of one transformer.

    Args:
        config: what the caller says.
        spec: of the pipeline.
        transformer: its configuration.
        is_alone: whether the pipeline has no second one; nobody has published coefficients for two.

    Raises:
        UnsupportedFeatureError: there is no indicator, or there are no coefficients.
    """
    tea = spec.tea_cache
    if tea is None:
        raise UnsupportedFeatureError(
            f"cache_backend: expected none or cache_dit for {spec.name}, got 'tea_cache'"
        )
    known = tea.coefficients(transformer) if is_alone else None
    coefficients = config.coefficients or known
    if coefficients is None:
        raise UnsupportedFeatureError(
            f"coefficients: expected 5 numbers for tea_cache, as none are known for this {spec.name},"
            " got none"
        )
    threshold = config.rel_l1_thresh or tea.threshold or _DEFAULT_THRESHOLD
    return TeaSettings(tea, coefficients, threshold)
