# SPDX-License-Identifier: Apache-2.0
"""Which families and strategies an edge program serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from diffulex.families.spec import ModelSpec

__all__ = ["EDGE_FAMILIES", "EDGE_STRATEGIES", "check_family", "check_strategy"]

#: Dense decoders of the generic description.
EDGE_FAMILIES = (
    "diffucoder",
    "dream",
    "dream_reasoner",
    "fast_dllm_v2",
    "llada",
    "sdar",
    "stable_diffcoder",
)
#: Strategies whose steps are tokens, positions and an interval of visible keys per row.
EDGE_STRATEGIES = ("multi_bd", "d2f", "fast_dllm_v2")


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
