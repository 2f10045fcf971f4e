# SPDX-License-Identifier: Apache-2.0
"""The projections of a model as checkpoints store and adapters change them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

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

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the projection."""
        return self.rows.stop - self.rows.start, self.linear.in_features
