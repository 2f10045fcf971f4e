# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the RMSNorm family."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex_ext._fake.arguments import FakeArguments
from diffulex_ext._fake.registry import FLOATS, register

if TYPE_CHECKING:
    from torch import Tensor


def _check_norm(
    arguments: FakeArguments, x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float
) -> None:
    arguments.require("x", x.dim() >= 1, "at least 1 dimension", x.dim())
    arguments.tensor("x", x, FLOATS, x.shape)
    width = x.shape[-1]
    arguments.require("x", width >= 1, "a last dimension >= 1", width)
    arguments.optional("weight", weight, (x.dtype, torch.float32), (width,))
    arguments.optional("residual", residual, (x.dtype,), x.shape)
    arguments.at_least("eps", eps, 0)


@register("rms_norm")
def _rms_norm(
    x: Tensor, weight: Tensor | None, out: Tensor, *, eps: float, weight_offset: float = 0.0
) -> None:
    arguments = FakeArguments("rms_norm", x)
    _check_norm(arguments, x, weight, None, eps)
    arguments.tensor("out", out, (x.dtype,), x.shape)


@register("add_rms_norm")
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, *, eps: float, weight_offset: float = 0.0
) -> None:
    _check_norm(FakeArguments("add_rms_norm", x), x, weight, residual, eps)


@register("rms_norm_add")
def _rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    out_scale: Tensor | None,
    out: Tensor,
    *,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    arguments = FakeArguments("rms_norm_add", x)
    _check_norm(arguments, x, weight, residual, eps)
    arguments.optional("out_scale", out_scale, (x.dtype, torch.float32), (1,))
    arguments.tensor("out", out, (x.dtype,), x.shape)
