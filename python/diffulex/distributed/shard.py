# SPDX-License-Identifier: Apache-2.0
"""Which part of a size each rank has: shards in units that keep products on their fast paths."""

from __future__ import annotations

import itertools
from typing import NamedTuple

__all__ = ["ALL_EXPERTS", "FAST_UNIT", "ONE_RANK", "ExpertShard", "Shard", "shard_range"]

#: Depths and column counts of kernels are multiples of this on the fast paths, of 16 on others.
FAST_UNIT = 64
_UNITS = (FAST_UNIT, 16)
#: Most that the largest shard may exceed an equal one by, for the larger unit.
_MAX_SKEW = 1.25


class ExpertShard(NamedTuple):
    """What one rank of several has of the routed experts.

    Attributes:
        mode: `width`, a part of every expert; `expert`, whole ones.
        unit: as in `Shard`.
    """

    rank: int = 0
    size: int = 1
    mode: str = "width"
    unit: int = FAST_UNIT

    def experts(self, num_experts: int, *, is_interleaved: bool) -> range:
        """Numbers of the experts that the rank has, or has a part of.

        Those of a router with groups are dealt in turn, so that a chosen group lies on all ranks; others
        are cut into ranges that differ by one expert at most.
        """
        if self.size == 1 or self.mode == "width":
            return range(num_experts)
        if is_interleaved:
            return range(self.rank, num_experts, self.size)
        first, last = (num_experts * rank // self.size for rank in (self.rank, self.rank + 1))
        return range(first, last)

    def width(self, size: int) -> slice:
        """The part of the width of each of these experts."""
        if self.size == 1 or self.mode == "expert":
            return slice(0, size)
        return shard_range(size, Shard(self.rank, self.size, unit=self.unit))


#: One rank that has all routed experts.
ALL_EXPERTS = ExpertShard()


class Shard(NamedTuple):
    """One rank of several that hold parts of the same weights.

    Attributes:
        experts: what the rank has of the routed experts; None: the description of the model decides.
        unit: widths are cut at multiples of this where there are enough for all ranks.
    """

    rank: int = 0
    size: int = 1
    experts: ExpertShard | None = None
    unit: int = FAST_UNIT


#: One rank that has everything.
ONE_RANK = Shard()


def shard_range(size: int, shard: Shard) -> slice:
    """The part of `size` rows or columns that a rank has: disjoint, covering, never empty.

    Raises:
        ValueError: there are more ranks than units of 16.
    """
    for unit in dict.fromkeys((shard.unit, *_UNITS)):
        num_units = -(-size // unit)
        if num_units < shard.size:
            continue
        ends = [min(size, unit * (num_units * i // shard.size)) for i in range(shard.size + 1)]
        most = max(b - a for a, b in itertools.pairwise(ends))
        if unit != FAST_UNIT or most * shard.size <= _MAX_SKEW * size:
            return slice(ends[shard.rank], ends[shard.rank + 1])
    raise ValueError(
        f"shard_range: expected at most {-(-size // _UNITS[-1])} shards of {size}, got {shard.size}"
    )
