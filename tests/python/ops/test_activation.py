# SPDX-License-Identifier: Apache-2.0
"""act_and_mul against fp64."""

from __future__ import annotations

import pytest
import torch

from diffulex import ops
from reference import dense as oracles
from tolerance import assert_accurate, to_numpy

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def plain(x: torch.Tensor, act: int) -> torch.Tensor:
    """The same math in the dtype of x."""
    gate, up = x.chunk(2, -1)
    if act == 0:
        return gate * torch.sigmoid(gate) * up
    if act == 1:
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    return 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up


@DTYPES
@pytest.mark.parametrize("act", [0, 1, 2])
@pytest.mark.parametrize("shape", [(1, 2), (5, 14), (3, 4, 130), (7, 2048)])
def test_act_and_mul(device: str, dtype: torch.dtype, act: int, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(act)) * 2).to(dtype).to(device)
    out = torch.full((*shape[:-1], shape[-1] // 2), torch.nan, dtype=dtype, device=device)
    ops.act_and_mul(x, act, out=out)
    expected = oracles.act_and_mul(to_numpy(x), act)
    assert_accurate(out, expected, plain(x, act))


@DTYPES
def test_strided_rows(device: str, dtype: torch.dtype) -> None:
    wide = torch.randn(4, 96).to(dtype).to(device)
    x = wide[:, 16:80]
    assert torch.equal(ops.act_and_mul(x), ops.act_and_mul(x.contiguous()))


@pytest.mark.parametrize("act", [0, 1, 2])
@pytest.mark.parametrize("gate", [-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4])
def test_large_gates_stay_finite(device: str, act: int, gate: float) -> None:
    x = torch.tensor([[gate] * 8 + [1.0] * 8], device=device)
    out = ops.act_and_mul(x, act)
    assert torch.isfinite(out).all()
    expected = max(gate, 0.0) if abs(gate) >= 20 else oracles.act_and_mul(to_numpy(x), act)[0, 0]
    assert float(out[0, 0]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_results_repeat_bit_for_bit(device: str) -> None:
    x = torch.randn(9, 512, device=device)
    first = ops.act_and_mul(x)
    for _ in range(20):
        assert torch.equal(ops.act_and_mul(x), first)
