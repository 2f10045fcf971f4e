# SPDX-License-Identifier: Apache-2.0
"""Gated activations of the feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from diffulex import ops

if TYPE_CHECKING:
    import torch


class SiluAndMul(nn.Module):
    """``silu(gate) * up`` of rows that hold gate and up side by side."""

    def forward(self, gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 I] to `out` [T, I]."""
        return ops.act_and_mul(gate_up, ops.Activation.SILU, out=out)


class GeluTanhAndMul(nn.Module):
    """``gelu(gate) * up`` with the tanh form of GELU, of rows that hold gate and up side by side."""

    def forward(self, gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 I] to `out` [T, I]."""
        return ops.act_and_mul(gate_up, ops.Activation.GELU_TANH, out=out)
