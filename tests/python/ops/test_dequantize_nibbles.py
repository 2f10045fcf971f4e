# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 bits as bfloat16."""

from __future__ import annotations

import pytest
import torch

from diffulex import ops
from fixtures.nibbles import Parts, inside, is_untouched

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("rows", "depth", "group"),
    [(1, 1, 1), (3, 7, 7), (5, 24, 12), (16, 128, 32), (33, 256, 8), (64, 640, 128), (7, 4096, 64)],
)
def test_rows(rows: int, depth: int, group: int, has_zeros: bool, device: str) -> None:
    """Every bit as the definition has it, with NaN around."""
    parts = Parts(rows, depth, group, has_zeros)
    zeros = None if parts.zeros is None else parts.zeros.to(device)
    out = inside(rows, depth, device)
    scales = parts.scales.to(device)
    ops.dequantize_nibbles(parts.codes.to(device), scales, zeros, group=group, out=out)
    assert torch.equal(out.cpu().view(torch.int16), parts.values.view(torch.int16))
    assert is_untouched(out)


@pytest.mark.cuda
def test_rows_that_begin_anywhere() -> None:
    parts = Parts(9, 64, 32, has_zeros=True)
    codes = torch.zeros(9, 35, dtype=torch.uint8, device="cuda")[:, 1:33]
    codes.copy_(parts.codes)
    out = torch.empty(9, 67, dtype=torch.bfloat16, device="cuda")[:, 3:]
    assert parts.zeros is not None
    zeros = parts.zeros.cuda()
    ops.dequantize_nibbles(codes, parts.scales.cuda(), zeros, group=32, out=out)
    assert torch.equal(out.cpu(), parts.values)


@pytest.mark.cuda
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("rows", "depth"), [(16, 128), (48, 384), (4096, 1536)])
def test_tiles(rows: int, depth: int, group: int, has_zeros: bool) -> None:
    parts = Parts(rows, depth, group, has_zeros)
    zeros = None if parts.zeros is None else parts.zeros.cuda().bfloat16()
    tiles = ops.to_nibble_tiles(parts.codes.cuda())
    out = inside(rows, depth, "cuda")
    ops.dequantize_nibbles(tiles, parts.scales.cuda(), zeros, group=group, out=out)
    assert torch.equal(out.cpu().view(torch.int16), parts.values.view(torch.int16))
    assert is_untouched(out)


def test_the_cpu_takes_no_tiles() -> None:
    tiles = torch.zeros(2, 2, 32, 8, dtype=torch.uint8)
    scales, out = torch.ones(2, 16).bfloat16(), torch.empty(16, 128).bfloat16()
    with pytest.raises(RuntimeError, match="weight: expected row-major codes on the CPU"):
        ops.dequantize_nibbles(tiles, scales, group=64, out=out)
