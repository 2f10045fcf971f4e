# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation, alone and fused with the residual addition."""

from __future__ import annotations

import torch
from torch import nn

from diffulex import ops
from diffulex.nn.weights import new_parameter


class RMSNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * weight`` in float32, rounded once."""

    def __init__(
        self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = new_parameter(size, dtype=dtype, device=device)

    def forward(
        self, x: torch.Tensor, out: torch.Tensor, rows: ops.QuantizedRows | None = None
    ) -> torch.Tensor:
        """Writes the normalised rows of x to `out`, and their codes to `rows` if given."""
        return ops.rms_norm(x, self.weight, self.eps, out=out, rows=rows)

    def add_norm_(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor, bool] | None = None,
    ) -> None:
        """In place: residual becomes x + residual, x the norm of that sum, and `rows` its codes if given."""
        ops.add_rms_norm(x, residual, self.weight, self.eps, rows=rows)
