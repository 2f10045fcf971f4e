# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex_ext._fake.arguments import FakeArguments
from diffulex_ext._fake.registry import FLOAT32, register

if TYPE_CHECKING:
    from torch import Tensor

_PANEL_COLUMNS = 32


@register("linear_packed")
def _linear_packed(x: Tensor, packed_weight: Tensor, out: Tensor, *, out_features: int) -> None:
    arguments = FakeArguments("linear_packed", x)
    arguments.tensor("x", x, FLOAT32, (None, None))
    num_rows, in_features = x.shape
    arguments.require("x", in_features >= 1, "a last dimension >= 1", in_features)
    arguments.at_least("out_features", out_features, 1)
    num_panels = (out_features + _PANEL_COLUMNS - 1) // _PANEL_COLUMNS
    shape = (num_panels, in_features, _PANEL_COLUMNS)
    arguments.tensor("packed_weight", packed_weight, (torch.float32, torch.bfloat16), shape)
    arguments.tensor("out", out, FLOAT32, (num_rows, out_features))


@register("linear_few_rows")
def _linear_few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, act: int = -1
) -> None:
    arguments = FakeArguments("linear_few_rows", x)
    arguments.tensor("x", x, (torch.bfloat16, torch.float16), (None, None))
    num_rows, depth = x.shape
    fits = num_rows <= 128 and depth % 64 == 0
    arguments.require("x", fits, "at most 128 rows of a multiple of 64 elements", list(x.shape))
    arguments.tensor("weight", weight, (x.dtype,), (None, depth))
    weight_rows = weight.shape[0]
    arguments.require("weight", weight_rows % 16 == 0, "a multiple of 16 rows", weight_rows)
    names = "-1 (none), 0 (silu), 1 (gelu tanh) or 2 (gelu erf)"
    arguments.require("act", act in (-1, 0, 1, 2), names, act)
    arguments.optional("bias", bias, (x.dtype,), (weight_rows,))
    arguments.require("bias", act == -1 or bias is None, "none with an activation", "a tensor")
    columns = weight_rows if act == -1 else weight_rows // 2
    arguments.tensor("out", out, (x.dtype,), (num_rows, columns))
