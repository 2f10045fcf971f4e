# SPDX-License-Identifier: Apache-2.0
"""Dense products: with a weight that was packed once, on the CPU; of few rows, on Hopper GPUs.

torch's CPU product rearranges the whole weight on every call, which for the few rows of a decode
step costs more than the arithmetic. On CUDA dense products are cuBLAS through torch, except those of
a small decode step on Hopper: their kernel reads the weights while the one in front still runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.ops.fakes import FLOAT32, FakeArguments, fake

if TYPE_CHECKING:
    from torch import Tensor

#: Most rows of `linear_few_rows`, and what its columns and its depth are multiples of.
FEW_ROWS = 128
FEW_ROWS_COLUMNS = 16
FEW_ROWS_DEPTH = 64
#: Output columns per panel of a packed weight.
PANEL_COLUMNS = 32
# Rows up to which `linear_few_rows` is fast with a weight of any size.
_ANY_WEIGHT_ROWS = 64
# With more rows: fewest elements of the weight, and most columns, a tile for each of 132 processors.
_LARGE_WEIGHT = 1 << 24
_ONE_TILE_COLUMNS = 132 * 192
# Elements per look at whether a weight fits bfloat16; bounds the temporaries.
_CHECK_ELEMENTS = 1 << 22


def _fits_bfloat16(weight: Tensor) -> bool:
    """Whether every element keeps its value in bfloat16."""
    rows = max(1, _CHECK_ELEMENTS // max(1, weight.shape[1]))
    return all(
        torch.equal(part.to(torch.bfloat16).to(torch.float32), part)
        for part in torch.split(weight, rows)
    )


def is_few_rows(num_rows: int, num_columns: int, depth: int) -> bool:
    """Whether the product of num_rows with a weight [num_columns, depth] is `linear_few_rows`.

    A rule of shapes alone. On an H200 the kernel was as fast as cuBLAS or faster up to 64 rows at the
    products of SDAR-8B, and its launch overlaps the kernels around it. With more rows a decode step
    was faster with it where the weight is large and no processor has two tiles of it.
    """
    if num_columns % FEW_ROWS_COLUMNS or depth % FEW_ROWS_DEPTH or not 0 < num_rows <= FEW_ROWS:
        return False
    is_large = num_columns * depth >= _LARGE_WEIGHT and num_columns <= _ONE_TILE_COLUMNS
    return num_rows <= _ANY_WEIGHT_ROWS or is_large


@torch.no_grad()
def linear_few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    act: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x W^T + bias of at most `FEW_ROWS` rows x [M, K] (16-bit floats), in `out` [M, N] if given.

    With `act` (a value of `ops.Activation`) the rows of W are those of gate, then those of up, and
    the result is act(gate) * up [M, N / 2], rounded once. Inside `settled_weights` W is read while the
    launches in front still run: none of those may then write it.
    """
    if out is None:
        columns = weight.shape[0] if act is None else weight.shape[0] // 2
        out = x.new_empty(x.shape[0], columns)
    torch.ops.diffulex.linear_few_rows(x, weight, bias, out, act=-1 if act is None else act)
    return out


@torch.no_grad()
def pack_weight(weight: Tensor) -> Tensor:
    """Panels [ceil(N / 32), K, 32] of a float32 weight [N, K]; columns past N are 0.

    The panels are bfloat16, half the bytes to read, when that keeps every value, as for a
    checkpoint stored in bfloat16; results are the same bits either way. Otherwise float32.
    """
    if weight.dim() != 2 or weight.dtype != torch.float32:
        raise ValueError(
            "diffulex.ops.pack_weight: weight: expected a float32 tensor [N, K], "
            f"got {weight.dtype} {list(weight.shape)}"
        )
    out_features, in_features = weight.shape
    dtype = torch.bfloat16 if _fits_bfloat16(weight) else torch.float32
    num_whole, rest = divmod(out_features, PANEL_COLUMNS)
    packed = torch.empty(
        num_whole + (rest > 0), in_features, PANEL_COLUMNS, dtype=dtype, device=weight.device
    )
    whole = weight[: num_whole * PANEL_COLUMNS].view(num_whole, PANEL_COLUMNS, in_features)
    packed[:num_whole].copy_(whole.transpose(1, 2))
    if rest:
        packed[num_whole].zero_()
        packed[num_whole, :, :rest].copy_(weight[num_whole * PANEL_COLUMNS :].t())
    return packed


@torch.no_grad()
def unpack_weight(packed: Tensor, out_features: int) -> Tensor:
    """The float32 weight [N, K] that `pack_weight` was given."""
    num_panels, in_features, _ = packed.shape
    weight = torch.empty(
        num_panels, PANEL_COLUMNS, in_features, dtype=torch.float32, device=packed.device
    )
    weight.copy_(packed.transpose(1, 2))
    return weight.view(num_panels * PANEL_COLUMNS, in_features)[:out_features]


@torch.no_grad()
def linear_packed(
    x: Tensor, packed_weight: Tensor, out_features: int, *, out: Tensor | None = None
) -> Tensor:
    """x W^T [M, N] of x [M, K] float32 and the panels of a weight [N, K]. CPU tensors only.

    Every element is one sum over ascending k: the same bits for any number of rows and threads.
    """
    if out is None:
        out = torch.empty(x.shape[0], out_features, dtype=x.dtype, device=x.device)
    torch.ops.diffulex.linear_packed(x, packed_weight, out, out_features=out_features)
    return out


@fake("linear_packed")
def _linear_packed(arguments: FakeArguments, x: Tensor, out_features: int) -> None:
    arguments.check("x", FLOAT32, (None, None))
    num_rows, in_features = x.shape
    arguments.require("x", in_features >= 1, "a last dimension >= 1", in_features)
    arguments.at_least("out_features", 1)
    num_panels = (out_features + PANEL_COLUMNS - 1) // PANEL_COLUMNS
    shape = (num_panels, in_features, PANEL_COLUMNS)
    arguments.check("packed_weight", (torch.float32, torch.bfloat16), shape)
    arguments.check("out", FLOAT32, (num_rows, out_features))


@fake("linear_few_rows")
def _linear_few_rows(
    arguments: FakeArguments, x: Tensor, weight: Tensor, bias: Tensor | None, act: int
) -> None:
    arguments.check("x", (torch.bfloat16, torch.float16), (None, None))
    num_rows, depth = x.shape
    fits = num_rows <= FEW_ROWS and depth % FEW_ROWS_DEPTH == 0
    expected = f"at most {FEW_ROWS} rows of a multiple of {FEW_ROWS_DEPTH} elements"
    arguments.require("x", fits, expected, list(x.shape))
    arguments.check("weight", (x.dtype,), (None, depth))
    weight_rows = weight.shape[0]
    expected = f"a multiple of {FEW_ROWS_COLUMNS} rows"
    arguments.require("weight", weight_rows % FEW_ROWS_COLUMNS == 0, expected, weight_rows)
    names = "-1 (none), 0 (silu), 1 (gelu tanh) or 2 (gelu erf)"
    arguments.require("act", act in (-1, 0, 1, 2), names, act)
    arguments.check("bias", (x.dtype,), (weight_rows,))
    arguments.require("bias", act == -1 or bias is None, "none with an activation", "a tensor")
    columns = weight_rows if act == -1 else weight_rows // 2
    arguments.check("out", (x.dtype,), (num_rows, columns))
