# SPDX-License-Identifier: Apache-2.0
"""Bounds on the cached positions of a request that decode steps are launched for.

Attention divides the rows and keys of a request among CTAs by a bound that a CUDA graph bakes in. One
bound for all steps would be the longest request that the engine takes, and short contexts would pay for
its division. So there is a graph for every bound up to which the kernels divide alike on a device of 132
multiprocessors. Others may divide differently within these bounds, which costs time alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.ops.device import has_hopper_kernels
from diffulex.ops.workspace import attention_splits

if TYPE_CHECKING:
    from diffulex.config.config import Config

__all__ = ["ContextClasses"]

# Keys, the rows of the step included, up to which the first class may reach; further ones double it.
_FIRST_KEYS = 512


class ContextClasses:
    """Finds the bound of a decode step. A function of shapes, so that every loop finds the same."""

    def __init__(self, config: Config) -> None:
        self._limit = config.max_context_len
        self._shapes = config.local_spec.attention_shapes
        device = torch.device(config.model.device)
        # On the CPU, and where nothing may depend on the batch, there is no automatic division.
        self._is_dividing = device.type == "cuda" and not config.kernel.batch_invariant
        # Codes are read beside rows of bfloat16 alone.
        is_plain = config.cache.kv_cache_dtype == "auto"
        is_served = config.model.dtype in (("bfloat16", "float16") if is_plain else ("bfloat16",))
        self._is_hopper = self._is_dividing and is_served and has_hopper_kernels(device)
        self._bounds: dict[tuple[int, int], tuple[int, ...]] = {}

    def bounds(self, num_reqs: int, rows: int) -> tuple[int, ...]:
        """Ascending bounds of steps of `num_reqs` requests of `rows` rows; the last is the limit."""
        key = num_reqs, rows
        if key not in self._bounds:
            self._bounds[key] = self._find_bounds(num_reqs, rows)
        return self._bounds[key]

    def bound(self, num_reqs: int, rows: int, context_len: int) -> int:
        """Least bound that holds `context_len`, the longest context of a step."""
        bounds = self.bounds(num_reqs, rows)
        return next((bound for bound in bounds if context_len <= bound), self._limit)

    def _find_bounds(self, num_reqs: int, rows: int) -> tuple[int, ...]:
        if not self._is_dividing:
            return (self._limit,)
        candidates = []
        num_keys = _FIRST_KEYS
        while num_keys - rows < self._limit:
            if num_keys > rows:
                candidates.append(num_keys - rows)
            num_keys *= 2
        candidates.append(self._limit)
        choices = [
            [
                attention_splits(num_reqs, *shape, rows, bound, self._is_hopper)
                for shape in self._shapes
            ]
            for bound in candidates
        ]
        return tuple(
            bound
            for index, bound in enumerate(candidates)
            if index + 1 == len(candidates) or choices[index] != choices[index + 1]
        )
