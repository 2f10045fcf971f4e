# SPDX-License-Identifier: Apache-2.0
"""The projections of a model as checkpoints store and adapters change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from diffulex.checkpoint.slices import WeightSlice

__all__ = ["AdaptedLayer", "Projection"]


class AdaptedLayer(Protocol):
    """A linear layer whose output an adapter may add to."""

    in_features: int

    def add_update(self, rows: slice, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Adds ``scale * x a^T b^T`` to the output columns `rows`."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection as adapters and checkpoints see it: rows of a layer, rows of a tensor."""

    linear: AdaptedLayer
    #: Rows of the layer's weight.
    rows: slice
    #: Name of the stored tensor and the projection's rows in it.
    tensor: str
    tensor_rows: slice
    #: What the layer has of the projection [out, in]; None: all of it.
    part: WeightSlice | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the stored projection."""
        if self.part is not None:
            num_rows, num_columns = self.part.shape
            return num_rows, num_columns
        return self.rows.stop - self.rows.start, self.linear.in_features

    def add_update(self, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Lets the layer add its part of ``scale * x a^T b^T``, of factors [r, in] and [out, r].

        Ranks whose products are partial sums have some columns of a and all of b, so that their
        updates add up as their products do.
        """
        if self.part is not None:
            (columns,) = self.part.column_ranges
            a, b = a[:, columns], torch.cat([b[rows] for rows in self.part.rows])
        self.linear.add_update(self.rows, a, b, scale)
