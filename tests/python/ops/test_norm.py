# SPDX-License-Identifier: Apache-2.0
"""The RMSNorm family against fp64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffulex import ops
from reference import dense as oracles
from tolerance import assert_accurate, to_numpy

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
WIDTHS = pytest.mark.parametrize("width", [1, 7, 64, 130, 1024, 2816, 5120])
EPS = 1e-6


def make(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def plain(x: torch.Tensor, weight: torch.Tensor | None, offset: float) -> torch.Tensor:
    """The same math in the dtype of x."""
    out = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
    return out if weight is None else out * (weight.to(x.dtype) + offset)


@DTYPES
@WIDTHS
@pytest.mark.parametrize(
    ("weight_dtype", "offset"), [(None, 0.0), ("same", 0.0), ("same", 1.0), (torch.float32, 0.0)]
)
def test_rms_norm(
    device: str,
    dtype: torch.dtype,
    width: int,
    weight_dtype: torch.dtype | str | None,
    offset: float,
) -> None:
    x = make(5, width, dtype=dtype, device=device)
    weight = None
    if weight_dtype is not None:
        kind = dtype if isinstance(weight_dtype, str) else weight_dtype
        weight = make(width, dtype=kind, device=device)
    out = torch.full_like(x, torch.nan)
    ops.rms_norm(x, weight, EPS, weight_offset=offset, out=out)
    weight64 = None if weight is None else to_numpy(weight)
    expected = oracles.rms_norm(to_numpy(x), weight64, EPS, offset)
    assert_accurate(out, expected, plain(x, weight, offset))


@DTYPES
def test_rounds_once(device: str, dtype: torch.dtype) -> None:
    # fp32 math and one rounding: never more than half an ulp (plus fp32 noise) from the true value.
    x = make(64, 512, dtype=dtype, device=device)
    weight = make(512, dtype=dtype, device=device)
    expected = oracles.rms_norm(to_numpy(x), to_numpy(weight), EPS, 0.0)
    error = np.abs(to_numpy(ops.rms_norm(x, weight, EPS)) - expected)
    half_ulp = np.abs(expected) * torch.finfo(dtype).eps / 2
    noise = np.abs(expected) * 2e-6 + 1e-7
    assert (error <= half_ulp * (1 + 1e-3) + noise).all()


@DTYPES
def test_rms_norm_on_views_and_in_place(device: str, dtype: torch.dtype) -> None:
    packed = make(6, 4, 3 * 64, dtype=dtype, device=device)
    before = packed.clone()
    heads = packed[:, 1:3, 64:128]
    weight = make(64, dtype=dtype, device=device)
    expected = oracles.rms_norm(to_numpy(heads), to_numpy(weight), EPS, 0.0)
    base = plain(heads.clone(), weight, 0.0)
    ops.rms_norm(heads, weight, EPS, out=heads)
    assert_accurate(heads, expected, base)
    untouched = torch.ones_like(packed, dtype=torch.bool)
    untouched[:, 1:3, 64:128] = False
    assert torch.equal(packed[untouched], before[untouched])


@DTYPES
@WIDTHS
def test_add_rms_norm(device: str, dtype: torch.dtype, width: int) -> None:
    x, residual = (make(n, width, dtype=dtype, device=device)[:5] for n in (5, 6))
    weight = make(width, dtype=dtype, device=device)
    total = to_numpy(x) + to_numpy(residual)
    expected = oracles.rms_norm(total, to_numpy(weight), EPS, 0.5)
    base = plain(x + residual, weight, 0.5)
    wanted_residual = (x.float() + residual.float()).to(dtype)
    ops.add_rms_norm(x, residual, weight, EPS, weight_offset=0.5)
    assert torch.equal(residual, wanted_residual)
    assert_accurate(x, expected, base)


def test_add_rms_norm_uses_the_unrounded_sum(device: str) -> None:
    # 256 + 1 rounds to 256 in bf16; the norm has to see 257.
    x = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16, device=device)
    residual = torch.tensor([[256.0, 256.0]], dtype=torch.bfloat16, device=device)
    # Half an ulp above 1: the two results fall on different sides of a rounding boundary.
    weight = torch.full((2,), 1 + 2**-8, device=device)
    ops.add_rms_norm(x, residual, weight, 0.0)
    assert residual.tolist() == [[256.0, 256.0]]
    expected = torch.tensor([[257.0, 256.0]], dtype=torch.float64)
    expected = expected / expected.square().mean().sqrt() * (1 + 2**-8)
    assert torch.equal(x.cpu(), expected.to(torch.bfloat16))
    assert x[0, 0] != x[0, 1]


@DTYPES
@WIDTHS
@pytest.mark.parametrize("scale", [None, "same", torch.float32])
def test_rms_norm_add(
    device: str, dtype: torch.dtype, width: int, scale: torch.dtype | str | None
) -> None:
    x, residual = (make(n, width, dtype=dtype, device=device)[:5] for n in (5, 6))
    weight = make(width, dtype=dtype, device=device)
    out_scale = None
    if scale is not None:
        kind = dtype if isinstance(scale, str) else scale
        out_scale = torch.tensor([0.7], dtype=kind, device=device)
    factor = 1.0 if out_scale is None else float(out_scale)
    expected = oracles.rms_norm(to_numpy(x), to_numpy(weight), EPS, 0.0) + to_numpy(residual)
    base = (plain(x, weight, 0.0) + residual) * factor
    out = torch.full_like(x, torch.nan)
    ops.rms_norm_add(x, residual, weight, EPS, out_scale=out_scale, out=out)
    assert_accurate(out, expected * factor, base)


def test_zero_rows_stay_finite(device: str) -> None:
    x = torch.zeros(2, 64, device=device)
    assert torch.equal(ops.rms_norm(x, None, EPS), x)


def test_results_do_not_depend_on_the_number_of_rows(device: str) -> None:
    x = make(33, 2048, dtype=torch.bfloat16, device=device)
    whole = ops.rms_norm(x, None, EPS)
    for row in (0, 17, 32):
        assert torch.equal(ops.rms_norm(x[row : row + 1], None, EPS)[0], whole[row])
    for _ in range(20):
        assert torch.equal(ops.rms_norm(x, None, EPS), whole)
