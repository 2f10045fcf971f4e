# SPDX-License-Identifier: Apache-2.0
"""The RMSNorm family. x is [..., H]; math in fp32, one rounding at the end.

Inside `settled_weights` CUDA kernels read `weight` while the launches in front of them still run: none
of those may then write it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.ops.fakes import FLOATS, FakeArguments, fake
from diffulex.ops.quantize import check_code_rows

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
    rows: tuple[Tensor, Tensor, bool] | None = None,
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (weight + weight_offset); `out` may be x.

    `rows`, if given, get the codes of the result [T, H], those of `quantize_rows_into`; what `out` holds
    beside rows of codes only is not specified.
    """
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    codes, scale, codes_only = rows or (None, None, False)
    options = {"eps": eps, "weight_offset": weight_offset, "codes_only": codes_only}
    torch.ops.diffulex.rms_norm(x, weight, out, codes, scale, **options)
    return out


@torch.no_grad()
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    rows: tuple[Tensor, Tensor, bool] | None = None,
) -> None:
    """In place: residual <- x + residual, x <- norm of the unrounded sum; for `rows` see `rms_norm`."""
    codes, scale, codes_only = rows or (None, None, False)
    options = {"eps": eps, "weight_offset": weight_offset, "codes_only": codes_only}
    torch.ops.diffulex.add_rms_norm(x, residual, weight, codes, scale, **options)


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
def _rms_norm(
    arguments: FakeArguments, x: Tensor, codes: Tensor | None, scale: Tensor | None
) -> None:
    _check_norm(arguments, x)
    arguments.check("out", (x.dtype,), x.shape)
    check_code_rows(arguments, "x", x, codes, scale)


@fake("add_rms_norm")
def _add_rms_norm(
    arguments: FakeArguments, x: Tensor, codes: Tensor | None, scale: Tensor | None
) -> None:
    _check_norm(arguments, x)
    arguments.check("residual", (x.dtype,), x.shape)
    check_code_rows(arguments, "x", x, codes, scale)


@fake("rms_norm_add")
def _rms_norm_add(arguments: FakeArguments, x: Tensor) -> None:
    _check_norm(arguments, x)
    arguments.check("residual", (x.dtype,), x.shape)
    arguments.check("out_scale", (x.dtype, torch.float32), (1,))
    arguments.check("out", (x.dtype,), x.shape)
