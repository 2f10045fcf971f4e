# SPDX-License-Identifier: Apache-2.0
"""Fake kernel of the packed linear layer."""

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
