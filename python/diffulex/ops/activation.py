# SPDX-License-Identifier: Apache-2.0
"""Gated activations."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

from diffulex.ops.fakes import FLOATS, FakeArguments, fake
from diffulex.ops.quantize import check_code_rows

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.ops.quantize import QuantizedRows


class Activation(IntEnum):
    """Nonlinearity of the gate."""

    SILU = 0
    GELU_TANH = 1
    GELU_ERF = 2


@torch.no_grad()
def act_and_mul(
    x: Tensor,
    act: int = Activation.SILU,
    *,
    out: Tensor | None = None,
    rows: QuantizedRows | None = None,
) -> Tensor:
    """act(gate) * up for x [..., 2 I] with the gate first; [..., I].

    `rows`, if given, get the codes of the result [T, I], those of `quantize_rows_into`; what `out` holds
    beside rows of codes only is not specified.
    """
    if out is None:
        out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
    codes, scale, codes_only = rows or (None, None, False)
    torch.ops.diffulex.act_and_mul(x, out, codes, scale, act=int(act), codes_only=codes_only)
    return out


@fake("act_and_mul")
def _act_and_mul(
    arguments: FakeArguments, x: Tensor, out: Tensor, codes: Tensor | None, scale: Tensor | None
) -> None:
    arguments.require("x", x.dim() >= 1, "at least 1 dimension", x.dim())
    arguments.check("x", FLOATS, x.shape)
    width = x.shape[-1]
    arguments.require("x", width % 2 == 0, "an even last dimension", width)
    arguments.check("out", (x.dtype,), (*x.shape[:-1], width // 2))
    arguments.choice("act", 2)
    check_code_rows(arguments, "out", out, codes, scale)
