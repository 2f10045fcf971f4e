# SPDX-License-Identifier: Apache-2.0
"""Which families and strategies an edge program serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.errors import ConfigError
from diffulex.families.listing import FAMILIES
from diffulex.strategies.listing import STRATEGIES

if TYPE_CHECKING:
    from diffulex.families.spec import ModelSpec

__all__ = ["EDGE_FAMILIES", "EDGE_STRATEGIES", "check_family", "check_strategy"]

EDGE_FAMILIES = tuple(family.name for family in FAMILIES if family.is_exportable)
EDGE_STRATEGIES = tuple(
    name for name, strategy in STRATEGIES.items() if strategy.traits.is_exportable
)


def check_family(spec: ModelSpec) -> None:
    """Raises ConfigError unless a program can hold the model."""
    if spec.family not in EDGE_FAMILIES or spec.moe is not None:
        raise ConfigError(
            f"edge: expected a model of the families {', '.join(EDGE_FAMILIES)}, got {spec.family}"
        )


def check_strategy(strategy: str) -> None:
    """Raises ConfigError unless programs serve the decoding strategy."""
    if strategy not in EDGE_STRATEGIES:
        raise ConfigError(
            f"decoding_strategy: expected one of {', '.join(EDGE_STRATEGIES)} for an exported"
            f" program, got {strategy!r}"
        )
