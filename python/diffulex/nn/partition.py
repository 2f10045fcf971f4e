# SPDX-License-Identifier: Apache-2.0
"""How the weight of a layer is cut over the ranks that share it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diffulex.distributed.shard import FAST_UNIT, ONE_RANK, Shard, shard_range

__all__ = ["WHOLE", "Cut", "Partition"]


class Cut(Enum):
    """Along what a weight [N, K] is cut."""

    #: Output rows, of each projection that the weight stacks.
    ROWS = "rows"
    #: Input columns: products are partial sums, and the first rank adds the bias.
    COLUMNS = "columns"
    #: Output rows in whole heads. A head is on several ranks where there are fewer heads than ranks.
    HEADS = "heads"
    #: Input columns in whole heads, as COLUMNS.
    HEAD_COLUMNS = "head columns"
    #: Rows by token id, of an embedding or an output head.
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True)
class Partition:
    """What a rank has of a weight.

    Attributes:
        cut: along what it is cut.
        shard: the rank and the number of ranks; one rank has everything.
        head_dim: rows or columns of a head, where heads are cut.
    """

    cut: Cut = Cut.ROWS
    shard: Shard = ONE_RANK
    head_dim: int = 0

    @property
    def has_partial_sums(self) -> bool:
        """Whether the ranks' outputs have to be added."""
        return self.shard.size > 1 and self.cut in (Cut.COLUMNS, Cut.HEAD_COLUMNS)

    def rows(self, size: int) -> slice:
        """This rank's part of `size` rows of the stored weight."""
        if self.cut in (Cut.COLUMNS, Cut.HEAD_COLUMNS):
            return slice(0, size)
        return self._part(size)

    def columns(self, size: int) -> slice:
        """This rank's part of `size` columns of the stored weight."""
        if self.cut not in (Cut.COLUMNS, Cut.HEAD_COLUMNS):
            return slice(0, size)
        return self._part(size)

    def _part(self, size: int) -> slice:
        rank, num_ranks = self.shard.rank, self.shard.size
        if num_ranks == 1:
            return slice(0, size)
        if self.cut is Cut.VOCABULARY:
            return shard_range(size, self.shard._replace(unit=FAST_UNIT))
        if self.head_dim == 0:
            return shard_range(size, self.shard)
        heads = size // self.head_dim
        if heads % num_ranks and num_ranks % heads:
            raise ValueError(
                f"Partition: expected a divisor or a multiple of {heads} heads as the number of"
                f" ranks, got {num_ranks}"
            )
        first = rank * heads // num_ranks
        return slice(first * self.head_dim, (first + max(1, heads // num_ranks)) * self.head_dim)


#: A weight that one rank has as a whole.
WHOLE = Partition()
