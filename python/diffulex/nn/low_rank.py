# SPDX-License-Identifier: Apache-2.0
"""Low-rank products that are added to a linear layer's output."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["LowRankUpdates"]


class LowRankUpdates(nn.Module):
    """Adds ``scale * (x A^T) B^T`` to ranges of output columns.

    The first factors of all ranges are one matrix, so that x is read once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.columns: list[slice] = []
        self.scales: list[float] = []
        self._ranks: list[slice] = []
        self.down: torch.Tensor
        self.register_buffer("down", torch.empty(0), persistent=False)

    def append(self, columns: slice, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Adds the product of a [r, in] and b [columns, r] in their own dtype and device."""
        start = 0 if not self._ranks else self._ranks[-1].stop
        self.down = a.clone() if start == 0 else torch.cat((self.down, a))
        self.register_buffer(f"up_{len(self.columns)}", b.clone(), persistent=False)
        self.columns.append(columns)
        self.scales.append(scale)
        self._ranks.append(slice(start, start + a.size(0)))

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Updates out [T, N] for x [T, K]."""
        inner = torch.mm(x, self.down.t())
        for index, columns in enumerate(self.columns):
            up: torch.Tensor = getattr(self, f"up_{index}")
            rank = self._ranks[index]
            out[:, columns].addmm_(inner[:, rank], up.t(), alpha=self.scales[index])
