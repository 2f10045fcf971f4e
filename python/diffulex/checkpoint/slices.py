# SPDX-License-Identifier: Apache-2.0
"""The part of a stored tensor that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

__all__ = ["WeightSlice"]


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Rows and columns of a stored tensor.

    Attributes:
        shape: of the stored tensor.
        rows: ranges of its first dimension, which follow one another in memory.
        columns: range of its second dimension; of a vector or a scalar, None.
    """

    shape: tuple[int, ...]
    rows: tuple[slice, ...]
    columns: slice | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All of a tensor; a scalar is one row."""
        rows = slice(0, shape[0] if shape else 1)
        return cls(tuple(shape), (rows,), slice(0, shape[1]) if len(shape) > 1 else None)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        if not self.shape:
            return ()
        num_rows = sum(rows.stop - rows.start for rows in self.rows)
        if self.columns is None:
            return num_rows, *self.shape[1:]
        return num_rows, self.columns.stop - self.columns.start, *self.shape[2:]

    @property
    def is_within(self) -> bool:
        """Whether every range is one of the stored tensor."""
        limits = [(rows, self.shape[0] if self.shape else 1) for rows in self.rows]
        if self.columns is not None:
            limits.append((self.columns, self.shape[1]))
        return all(0 <= part.start <= part.stop <= size for part, size in limits)
