# SPDX-License-Identifier: Apache-2.0
"""Products of many rows by the library of the vendor, through torch.

Its sums are in another order than those of our kernels, and may depend on the number of rows. Which
calls it takes is a function of shapes and of the device, so that a captured graph keeps the choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from diffulex import ops
from diffulex.ops import WeightScheme

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["multiply", "multiply_plain", "own_nibble_rows", "own_rows", "takes_rows"]

#: Rows up to which `ops.linear_scaled` is faster with nearly every weight.
_FEW_ROWS = {WeightScheme.FP8: 192, WeightScheme.FP8_BLOCK: 128}
#: Rows up to which `ops.linear_w4a16` of tiles is faster than making bfloat16 of the weight: of small weights, which
#: that takes few microseconds, and of larger ones.
_NIBBLE_ROWS = 128, 1024
#: Elements of the largest small weight.
_SMALL_ELEMENTS = 1 << 23
#: The same of a weight by row: on compute capability 9.0 where it has more rows than the next constant says, and
#: on other devices, where nothing was timed, with as many as make a step bound by arithmetic.
_PLAIN_NIBBLE_ROWS = 16, 128
_MANY_WEIGHT_ROWS = 15_000
#: Rows and columns of the library's tiles.
_TILE = 128
#: By scheme: what divides the number of rows, that of columns of the result, and the depth. Scales of
#: blocks are read in fours, along rows of x and along the depth of W.
_MULTIPLES = {
    WeightScheme.FP8: (1, 16, 16),
    WeightScheme.FP8_BLOCK: (4, ops.QUANT_GROUP, 4 * ops.QUANT_GROUP),
    WeightScheme.INT4: (1, 1, 1),
}
#: The first CUDA whose library has scales of blocks.
_CUDA_OF_BLOCKS = (12, 9)
_scaled_mm: Any = torch._scaled_mm


def own_rows(scheme: WeightScheme, weight: Tensor) -> int | None:
    """Rows up to which `ops.linear_scaled` of codes [N, K] is faster on their device; None: `multiply` does not
    take them.

    The library's tiles have the whole depth. While they fill half of the processors or less, the other
    half has a share of it here.
    """
    if scheme not in _FEW_ROWS or not ops.has_hopper_kernels(weight.device):
        return None
    if scheme == WeightScheme.FP8_BLOCK:
        version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        if version < _CUDA_OF_BLOCKS:
            return None
    _, columns, depth = _MULTIPLES[scheme]
    if weight.size(0) % columns or weight.size(1) % depth:
        return None
    properties = torch.cuda.get_device_properties(weight.device)
    return _own_rows(scheme, weight.size(0), properties.multi_processor_count)


def _own_rows(scheme: WeightScheme, num_columns: int, num_processors: int) -> int:
    row_tiles = num_processors // 2 // -(-num_columns // _TILE)
    return max(_FEW_ROWS[scheme], row_tiles * _TILE)


def own_nibble_rows(
    device: torch.device, num_columns: int, depth: int, has_tiles: bool
) -> int | None:
    """Rows up to which `ops.linear_w4a16` is faster with a weight [N, K] on a device; None: `multiply_plain` is not
    for that."""
    if device.type != "cuda":
        return None
    if has_tiles:
        return _NIBBLE_ROWS[num_columns * depth > _SMALL_ELEMENTS]
    few, many = _PLAIN_NIBBLE_ROWS
    if not ops.has_hopper_kernels(device):
        return many
    return few if num_columns > _MANY_WEIGHT_ROWS else 0


def takes_rows(scheme: WeightScheme, x: Tensor, limit: int) -> bool:
    """Whether `multiply` takes x [T, K] and a weight whose `own_rows` are `limit`, and is faster."""
    num_rows = x.size(0)
    is_many = num_rows > limit and num_rows % _MULTIPLES[scheme][0] == 0
    return is_many and x.dtype == torch.bfloat16


def multiply(
    rows: ops.QuantizedRows, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    """x W^T + bias of rows [T, K] and codes [N, K], in bfloat16.

    Scales are of a row, of rows and of W alike; or of 128 columns and of blocks, without a bias. The result
    is `out` [T, N], or copied to it where the library does not write such memory.
    """
    num_rows = rows.codes.size(0)
    is_blocks = scale.dim() == 2
    can_write = out.dtype == torch.bfloat16 and out.is_contiguous()
    result = out if can_write else out.new_empty(out.shape, dtype=torch.bfloat16)
    _scaled_mm(
        rows.codes,
        weight.t(),
        scale_a=rows.scale.t() if is_blocks else rows.scale[0, :num_rows, None],
        scale_b=scale.t() if is_blocks else scale[None],
        bias=None if bias is None else bias.to(torch.bfloat16),
        out_dtype=torch.bfloat16,
        out=result,
    )
    return out if can_write else out.copy_(result)


def multiply_plain(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """x W^T + bias of rows [T, K] and W [N, K], all bfloat16, into `out` [T, N] of any dtype and row stride."""
    can_write = out.dtype == torch.bfloat16
    result = out if can_write else out.new_empty(out.shape, dtype=torch.bfloat16)
    if bias is None:
        torch.mm(x, weight.t(), out=result)
    else:
        torch.addmm(bias.to(torch.bfloat16), x, weight.t(), out=result)
    return out if can_write else out.copy_(result)
