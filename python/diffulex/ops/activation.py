# SPDX-License-Identifier: Apache-2.0
"""Gated activations."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


class Activation(IntEnum):
    """Nonlinearity of the gate."""

    SILU = 0
    GELU_TANH = 1
    GELU_ERF = 2


@torch.no_grad()
def act_and_mul(x: Tensor, act: int = Activation.SILU, *, out: Tensor | None = None) -> Tensor:
    """act(gate) * up for x [..., 2 I] with the gate first; [..., I]."""
    if out is None:
        out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    torch.ops.diffulex.act_and_mul(x, out, act=int(act))
    return out


@torch.no_grad()
def act_and_mul_reference(x: Tensor, act: int = Activation.SILU) -> Tensor:
    """Pure torch twin of `act_and_mul`."""
    gate, up = x.float().chunk(2, -1)
    if act == Activation.SILU:
        gate = functional.silu(gate)
    else:
        gate = functional.gelu(gate, approximate="tanh" if act == Activation.GELU_TANH else "none")
    return (gate * up).to(x.dtype)
