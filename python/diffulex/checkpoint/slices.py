# SPDX-License-Identifier: Apache-2.0
"""The part of a stored tensor that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

__all__ = ["WeightSlice"]


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Rows and columns of a stored tensor.

    Attributes:
        shape: of the stored tensor.
        rows: ranges of its first dimension, which follow one another in memory; empty: the rank has
            nothing of it.
        columns: range of its second dimension, or several that follow one another in memory; of a
            vector or a scalar, None.
        depth: range of its third dimension; None: all of it.
    """

    shape: tuple[int, ...]
    rows: tuple[slice, ...]
    columns: slice | tuple[slice, ...] | None = None
    depth: slice | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All of a tensor; a scalar is one row."""
        rows = slice(0, shape[0] if shape else 1)
        return cls(tuple(shape), (rows,), slice(0, shape[1]) if len(shape) > 1 else None)

    @property
    def has_whole_rows(self) -> bool:
        """Whether it has all that comes after the first dimension."""
        everything = [(columns, self.shape[1]) for columns in self.column_ranges]
        if self.depth is not None:
            everything.append((self.depth, self.shape[2]))
        return all(part == slice(0, size) for part, size in everything)

    @property
    def row_ranges(self) -> tuple[slice, ...]:
        """`rows`, those that follow one another in the stored tensor as one."""
        return _joined(self.rows)

    @property
    def column_ranges(self) -> tuple[slice, ...]:
        """Those of the second dimension, joined like the rows; none of a vector or a scalar."""
        if self.columns is None:
            return ()
        return _joined(self.columns) if isinstance(self.columns, tuple) else (self.columns,)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        if not self.shape:
            return ()
        sizes = [_length(self.rows), *self.shape[1:]]
        if self.columns is not None:
            sizes[1] = _length(self.column_ranges)
        if self.depth is not None:
            sizes[2] = _length((self.depth,))
        return tuple(sizes)

    @property
    def is_within(self) -> bool:
        """Whether every range is one of the stored tensor."""
        limits = [(rows, self.shape[0] if self.shape else 1) for rows in self.rows]
        limits += [(columns, self.shape[1]) for columns in self.column_ranges]
        if self.depth is not None:
            limits.append((self.depth, self.shape[2]))
        return all(0 <= part.start <= part.stop <= size for part, size in limits)

    def cut(self, values: torch.Tensor) -> torch.Tensor:
        """The columns of some whole rows of the tensor that belong to the part."""
        kept = values
        if self.columns is not None:
            parts = [kept[:, columns] for columns in self.column_ranges]
            kept = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return kept if self.depth is None else kept[..., self.depth]


def _joined(parts: Sequence[slice]) -> tuple[slice, ...]:
    joined: list[slice] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return tuple(joined)


def _length(parts: Sequence[slice]) -> int:
    return sum(part.stop - part.start for part in parts)
