# SPDX-License-Identifier: Apache-2.0
"""The RMSNorm family. x is [..., H]; math in fp32, one rounding at the end.

Inside `settled_weights` CUDA kernels read `weight` while the launches in front of them still run: none
of those may then write it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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


def _normalise(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (weight.float() + weight_offset)


@torch.no_grad()
def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0
) -> Tensor:
    """Pure torch twin of `rms_norm`."""
    return _normalise(x.float(), weight, eps, weight_offset).to(x.dtype)


@torch.no_grad()
def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0
) -> None:
    """Pure torch twin of `add_rms_norm`."""
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_normalise(total, weight, eps, weight_offset))


@torch.no_grad()
def rms_norm_add_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    out_scale: Tensor | None = None,
    weight_offset: float = 0.0,
) -> Tensor:
    """Pure torch twin of `rms_norm_add`."""
    out = _normalise(x.float(), weight, eps, weight_offset) + residual.float()
    return (out if out_scale is None else out * out_scale.float()).to(x.dtype)
