# SPDX-License-Identifier: Apache-2.0
"""Linear layer over one or several stacked projections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence


class Linear(nn.Module):
    """``y = x W^T + b`` where the rows of W stack one or several projections.

    Projections of one input (q, k, v or gate, up) are stored as one matrix, so that they cost one
    product; `part` gives the rows of one of them to the loader.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = tuple(out_features)
        rows = sum(self.out_features)
        weight = torch.empty(rows, in_features, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(
                torch.empty(rows, dtype=dtype, device=device), requires_grad=False
            )

    def part(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Views of the weight rows and bias entries of projection `index`."""
        start = sum(self.out_features[:index])
        rows = slice(start, start + self.out_features[index])
        return self.weight[rows], None if self.bias is None else self.bias[rows]

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the product of x [T, in] to `out` [T, sum of out_features] and returns it."""
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)
