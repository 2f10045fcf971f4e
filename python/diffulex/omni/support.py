# SPDX-License-Identifier: Apache-2.0
"""Which pipelines can be shared in which way, before any process starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.omni.errors import UnsupportedFeatureError
from diffulex.omni.loader import read_json

if TYPE_CHECKING:
    from diffulex.omni.config_table import DiffusionParallelConfig
    from diffulex.omni.loader import FoundModel

__all__ = ["check_parallel"]


def check_parallel(parallel: DiffusionParallelConfig, found: FoundModel) -> None:
    """Compares the sizes with what the model's pipeline can do.

    Raises:
        UnsupportedFeatureError: it cannot do one of them.
    """
    spec = found.spec
    for name, can_do in (
        ("cfg_parallel_size", spec.cfg is not None),
        ("ulysses_degree", spec.has_sequence_plan),
        ("ring_degree", spec.has_sequence_plan),
        ("tensor_parallel_size", spec.tensor_plan is not None),
    ):
        size = getattr(parallel, name)
        if size > 1 and not can_do:
            raise UnsupportedFeatureError(f"{name}: expected 1 for {found.name}, got {size}")
    if parallel.tensor_parallel_size > 1:
        _check_heads(parallel.tensor_parallel_size, found)


def _check_heads(size: int, found: FoundModel) -> None:
    for name in found.spec.transformers:
        heads = read_json(found.directory / name / "config.json").get("num_attention_heads")
        if not isinstance(heads, int) or heads % size:
            raise UnsupportedFeatureError(
                f"tensor_parallel_size: expected a divisor of {heads} heads, got {size}"
            )
