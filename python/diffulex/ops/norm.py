# SPDX-License-Identifier: Apache-2.0
"""The RMSNorm family. x is [..., H]; math in fp32, one rounding at the end.

Inside `settled_weights` CUDA kernels read `weight` while the launches in front of them still run: none
of those may then write it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.ops.fakes import FLOATS, FakeArguments, fake

if TYPE_CHECKING:
    from torch import Tensor


@torch.no_grad()
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (weight + weight_offset); `out` may be x."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.ops.diffulex.rms_norm(x, weight, out, eps=eps, weight_offset=weight_offset)
    return out


@torch.no_grad()
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0
) -> None:
    """In place: residual <- x + residual, x <- norm of the unrounded sum."""
    torch.ops.diffulex.add_rms_norm(x, residual, weight, eps=eps, weight_offset=weight_offset)


@torch.no_grad()
def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    out_scale: Tensor | None = None,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """(norm(x) + residual) * out_scale[0]."""
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    torch.ops.diffulex.rms_norm_add(
        x, residual, weight, out_scale, out, eps=eps, weight_offset=weight_offset
    )
    return out


def _check_norm(arguments: FakeArguments, x: Tensor) -> None:
    arguments.require("x", x.dim() >= 1, "at least 1 dimension", x.dim())
    arguments.check("x", FLOATS, x.shape)
    width = x.shape[-1]
    arguments.require("x", width >= 1, "a last dimension >= 1", width)
    arguments.check("weight", (x.dtype, torch.float32), (width,))
    arguments.at_least("eps", 0)


@fake("rms_norm")
def _rms_norm(arguments: FakeArguments, x: Tensor) -> None:
    _check_norm(arguments, x)
    arguments.check("out", (x.dtype,), x.shape)


@fake("add_rms_norm")
def _add_rms_norm(arguments: FakeArguments, x: Tensor) -> None:
    _check_norm(arguments, x)
    arguments.check("residual", (x.dtype,), x.shape)


@fake("rms_norm_add")
def _rms_norm_add(arguments: FakeArguments, x: Tensor) -> None:
    _check_norm(arguments, x)
    arguments.check("residual", (x.dtype,), x.shape)
    arguments.check("out_scale", (x.dtype, torch.float32), (1,))
    arguments.check("out", (x.dtype,), x.shape)
