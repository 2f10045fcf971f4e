# SPDX-License-Identifier: Apache-2.0
"""Products of e4m3 codes by others, beside `ops.linear_scaled`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex import ops
from diffulex.ops import WeightScheme
from diffulex.quantization import vendor
from kernel_bench.cutlass_peer import block_product

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Call = Callable[[], object]

__all__ = ["FP8_PEERS", "VENDOR", "VENDOR_BLOCKS", "Operands", "fp8_peers"]

#: What the layers take in place of `linear_scaled` for some products of many rows of codes.
VENDOR = "vendor's library"
#: The same with scales of 128 columns of a row, and of blocks of W.
VENDOR_BLOCKS = "vendor's library, blocks"
#: Rows from which on others are peers.
_LEAST_ROWS = 32
#: Largest relative difference from the product of bfloat16: both operands are codes.
_TOLERANCE = 0.08


class Operands(NamedTuple):
    """What a peer multiplies, whatever codes and scales it takes; the codes of x may be made beforehand."""

    #: [T, K] bfloat16.
    x: torch.Tensor
    #: [N, K] bfloat16: sets in turn.
    plain: list[torch.Tensor]
    #: Their e4m3 codes, with a float32 scale a row.
    weights: list[tuple[torch.Tensor, torch.Tensor]]
    #: [T, N] bfloat16, which each call writes.
    out: torch.Tensor


def _vendor(operands: Operands) -> list[Call] | str:
    x, _, weights, out = operands
    if vendor.own_rows(WeightScheme.FP8, weights[0][0]) is None:
        return "not taken: needs sm_90, and sizes that are multiples of 16"
    rows = ops.quantize_rows(x, torch.float8_e4m3fn, group=x.size(1))
    return [lambda w=w: vendor.multiply(rows, *w, None, out) for w in weights]


def _vendor_blocks(operands: Operands) -> list[Call] | str:
    x, plain, weights, out = operands
    can_take = vendor.own_rows(WeightScheme.FP8_BLOCK, weights[0][0]) is not None
    if not (can_take and vendor.takes_rows(WeightScheme.FP8_BLOCK, x, 0)):
        return "not taken: needs sm_90, CUDA 12.9, and sizes that are multiples of its blocks"
    rows = ops.quantize_rows(x, torch.float8_e4m3fn)
    blocks = [ops.quantize_weight(w, WeightScheme.FP8_BLOCK) for w in plain]
    return [lambda w=w: vendor.multiply(rows, *w, None, out) for w in blocks]


def _cutlass(operands: Operands, tile_rows: int) -> list[Call] | str:
    return block_product(tile_rows, operands.x, operands.plain, operands.out)


#: Name -> calls over the sets of W, or why there are none.
FP8_PEERS: Mapping[str, Callable[[Operands], list[Call] | str]] = {
    VENDOR: _vendor,
    VENDOR_BLOCKS: _vendor_blocks,
    "CUTLASS, blocks, 128 x 128": functools.partial(_cutlass, tile_rows=128),
    "CUTLASS, blocks, 64 x 128": functools.partial(_cutlass, tile_rows=64),
}


def fp8_peers(operands: Operands) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """Those that give the product, and why others are not timed."""
    found: dict[str, list[Call]] = {}
    absent: dict[str, str] = {}
    x, plain, _, out = operands
    if x.size(0) < _LEAST_ROWS or x.dtype != torch.bfloat16:
        return found, absent
    exact = x.float() @ plain[0].float().t()
    for name, make in FP8_PEERS.items():
        try:
            calls = make(operands)
            if isinstance(calls, str):
                absent[name] = calls
                continue
            out.fill_(torch.nan)
            calls[0]()
            difference = float((out.float() - exact).norm() / exact.norm())
        except Exception as error:  # a peer may not support a shape
            absent[name] = f"{type(error).__name__}: {error}"[:120]
            continue
        if difference <= _TOLERANCE:
            found[name] = calls
        else:
            absent[name] = f"not timed: its product is off by {difference:.1e}"
    return found, absent
