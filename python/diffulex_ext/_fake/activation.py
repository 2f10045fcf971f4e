# SPDX-License-Identifier: Apache-2.0
"""Fake kernel of the gated activation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex_ext._fake.arguments import FakeArguments
from diffulex_ext._fake.registry import FLOATS, register

if TYPE_CHECKING:
    from torch import Tensor


@register("act_and_mul")
def _act_and_mul(x: Tensor, out: Tensor, *, act: int) -> None:
    arguments = FakeArguments("act_and_mul", x)
    arguments.require("x", x.dim() >= 1, "at least 1 dimension", x.dim())
    arguments.tensor("x", x, FLOATS, x.shape)
    width = x.shape[-1]
    arguments.require("x", width % 2 == 0, "an even last dimension", width)
    arguments.tensor("out", out, (x.dtype,), (*x.shape[:-1], width // 2))
    arguments.choice("act", act, 2)
