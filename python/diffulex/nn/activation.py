# SPDX-License-Identifier: Apache-2.0
"""Gated activations of the feed-forward block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from diffulex import ops

if TYPE_CHECKING:
    import torch


class GatedActivation(nn.Module):
    """``act(gate) * up`` of rows that hold gate and up side by side; `kind` names the op's act."""

    kind: ops.Activation

    def forward(
        self, gate_up: torch.Tensor, out: torch.Tensor, rows: ops.QuantizedRows | None = None
    ) -> torch.Tensor:
        """gate_up [T, 2 I] to `out` [T, I], whose codes `rows` get if given."""
        return ops.act_and_mul(gate_up, self.kind, out=out, rows=rows)


class SiluAndMul(GatedActivation):
    """``silu(gate) * up``."""

    kind = ops.Activation.SILU


class GeluTanhAndMul(GatedActivation):
    """``gelu(gate) * up`` with the tanh form of GELU."""

    kind = ops.Activation.GELU_TANH
