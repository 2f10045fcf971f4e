# SPDX-License-Identifier: Apache-2.0
"""Weights and activations in low precision: quantisers and products."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.ops.fakes import FLOAT32, FLOATS, UINT8, FakeArguments, fake
from diffulex.ops.linear import PANEL_COLUMNS

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.ops.activation import Activation

#: Columns of a row that share a scale; rows and columns of a block of a weight.
QUANT_GROUP = 128
#: The stored nibble of a symmetric 4-bit weight whose value is 0.
INT4_ZERO = 8
_PANEL_DEPTH = 4
#: Of a weight of 4 bits: rows and columns of a tile, what a weight in tiles has multiples of, and the
#: columns that may share a scale.
_TILE_ROWS, _TILE_DEPTH = 8, 64
_TILED_ROWS, _TILED_DEPTH = 16, 128
_TILED_GROUPS = (32, 64, 128)
_TILE_LANES, _LANE_BYTES = 32, 8
#: Bytes of codes that change their form at a time, which takes seven times as many.
_PIECE_BYTES = 1 << 22
_CODES = (torch.float8_e4m3fn, torch.int8)


class WeightScheme(IntEnum):
    """How a weight is held in low precision."""

    FP8 = 0
    FP8_BLOCK = 1
    INT8 = 2
    INT4 = 3


class QuantizedRows(NamedTuple):
    """Rows as codes [T, K] and the float32 scales [ceil(K / group), T padded to 4] of their groups.

    `codes_only`: nothing else of the rows is read, so that an op that makes both may leave out the rows.
    """

    codes: Tensor
    scale: Tensor
    codes_only: bool = False


def _ceil(value: int, divisor: int) -> int:
    return (value + divisor - 1) // divisor


@torch.no_grad()
def quantize_rows(x: Tensor, dtype: torch.dtype, *, group: int = QUANT_GROUP) -> QuantizedRows:
    """Codes of `dtype` (float8_e4m3fn or int8) of rows x [T, K] with a scale for each `group` columns."""
    rows = new_quantized_rows(x.shape[0], x.shape[1], dtype, x.device, group=group)
    torch.ops.diffulex.quantize_rows(x, rows.codes, rows.scale, group=group)
    return rows


def new_quantized_rows(
    num_rows: int,
    depth: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    group: int = QUANT_GROUP,
) -> QuantizedRows:
    """Memory for the codes of rows [num_rows, depth], not filled."""
    codes = torch.empty(num_rows, depth, dtype=dtype, device=device)
    shape = _ceil(depth, group), _ceil(num_rows, 4) * 4
    return QuantizedRows(codes, torch.empty(shape, dtype=torch.float32, device=device))


@torch.no_grad()
def quantize_rows_into(x: Tensor, rows: tuple[Tensor, Tensor, bool]) -> None:
    """Fills `rows`, whose scales are of groups of 128 columns or, if there is one, of a row, from x [T, K]."""
    group = x.shape[1] if rows[1].shape[0] == 1 else QUANT_GROUP
    torch.ops.diffulex.quantize_rows(x, *rows[:2], group=group)


def weight_parts(
    rows: int, depth: int, scheme: WeightScheme, group: int = 0
) -> tuple[tuple[tuple[int, ...], torch.dtype], tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the codes and of the scales of a weight [rows, depth]."""
    if scheme == WeightScheme.INT4:
        num_groups = depth // (group or depth)
        return (((rows, _ceil(depth, 2)), torch.uint8), ((num_groups, rows), torch.bfloat16))
    codes = torch.int8 if scheme == WeightScheme.INT8 else torch.float8_e4m3fn
    scales: tuple[int, ...] = (rows,)
    if scheme == WeightScheme.FP8_BLOCK:
        scales = (_ceil(rows, QUANT_GROUP), _ceil(depth, QUANT_GROUP))
    return ((rows, depth), codes), (scales, torch.float32)


@torch.no_grad()
def quantize_weight(
    w: Tensor,
    scheme: WeightScheme,
    *,
    group: int = 0,
    out: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of w [N, K] (floats), as `weight_parts` says, in `out` and `scale` if given.

    `group` counts the columns of a 4-bit scale, a divisor of K; 0: all of them.
    """
    rows, depth = w.shape
    for_codes, for_scale = weight_parts(rows, depth, scheme, group)
    if out is None:
        out = torch.empty(for_codes[0], dtype=for_codes[1], device=w.device)
    if scale is None:
        scale = torch.empty(for_scale[0], dtype=for_scale[1], device=w.device)
    torch.ops.diffulex.quantize_weight(w, out, scale, scheme=int(scheme), group=group)
    return out, scale


@torch.no_grad()
def pack_panels(codes: Tensor) -> Tensor:
    """Codes [N, C] in the form that products of the CPU take fastest.

    Panels [ceil(N / 32), C, 32, 1] uint8 of e4m3 codes or pairs of nibbles, padded with 0; of int8
    [ceil(N / 32), ceil(C / 4), 32, 4] of code + 128, padded with 128.
    """
    rows, width = codes.shape
    step = _PANEL_DEPTH if codes.dtype == torch.int8 else 1
    num_panels, num_steps = _ceil(rows, PANEL_COLUMNS), _ceil(width, step)
    padded = torch.zeros(
        num_panels * PANEL_COLUMNS, num_steps * step, dtype=torch.uint8, device=codes.device
    )
    padded[:rows, :width] = codes.view(torch.uint8)
    panels = padded.view(num_panels, PANEL_COLUMNS, num_steps, step).transpose(1, 2).contiguous()
    # Flipping the highest bit of two's complement adds 128.
    return panels.bitwise_xor_(0x80) if codes.dtype == torch.int8 else panels


@torch.no_grad()
def unpack_panels(panels: Tensor, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """The codes [N, C] of `dtype` that `pack_panels` was given."""
    codes = panels.transpose(1, 2).reshape(panels.shape[0] * PANEL_COLUMNS, -1)[:rows, :width]
    return (codes.bitwise_xor(0x80) if dtype == torch.int8 else codes.contiguous()).view(dtype)


def is_tileable(rows: int, depth: int, group: int) -> bool:
    """Whether nibbles of a weight [rows, depth] with a scale for `group` columns may be in tiles."""
    is_whole = rows % _TILED_ROWS == 0 and depth % _TILED_DEPTH == 0
    return is_whole and group in _TILED_GROUPS


def _row_pieces(codes: Tensor) -> range:
    """Where pieces of whole tiles of rows [N, C] begin; the step is their height."""
    height = max(1, _PIECE_BYTES // (_TILE_ROWS * codes.shape[1])) * _TILE_ROWS
    return range(0, codes.shape[0], height)


@torch.no_grad()
def to_nibble_tiles(codes: Tensor) -> Tensor:
    """Nibbles [..., N, K / 2] as the tiles [..., N / 8, K / 64, 32, 8] of products of compute capability 9.0.

    In place: the tiles take the memory of `codes`, which is contiguous.
    """
    rows = codes.view(-1, codes.shape[-1])
    depth = 2 * rows.shape[1] // _TILE_DEPTH
    pieces = _row_pieces(rows)
    for first in pieces:
        piece = rows[first : first + pieces.step]
        # Rows, tiles of columns, two words, two halves of a word, two pairs, four lanes.
        pairs = piece.view(-1, _TILE_ROWS, depth, 2, 2, 2, 4)
        both = torch.stack((pairs & 15, pairs >> 4), -1)
        low, high = both.unbind(5)
        tiled = (low | high << 4).permute(0, 2, 1, 5, 3, 6, 4)
        piece.copy_(tiled.reshape(piece.shape))
    return as_nibble_tiles(codes)


def as_nibble_tiles(codes: Tensor) -> Tensor:
    """The memory of nibbles [..., N, K / 2] whose order is that of tiles already, in the shape of tiles."""
    rows, width = codes.shape[-2:]
    lines = 2 * width // _TILE_DEPTH
    return codes.view(*codes.shape[:-2], rows // _TILE_ROWS, lines, _TILE_LANES, _LANE_BYTES)


def expert_rows(weight: Tensor) -> int:
    """N of experts [L, N, K], or of the tiles of those."""
    return weight.shape[1] * (_TILE_ROWS if weight.dim() == 5 else 1)


@torch.no_grad()
def from_nibble_tiles(tiles: Tensor) -> Tensor:
    """The nibbles [..., N, K / 2] that `to_nibble_tiles` was given, in the memory of the tiles."""
    height, depth = tiles.shape[-4] * _TILE_ROWS, tiles.shape[-3]
    codes = tiles.view(*tiles.shape[:-4], height, depth * _TILE_DEPTH // 2)
    rows = codes.view(-1, codes.shape[-1])
    pieces = _row_pieces(rows)
    for first in pieces:
        piece = rows[first : first + pieces.step]
        lanes = piece.view(-1, depth, _TILE_ROWS, 4, 2, 2, 2).permute(0, 2, 1, 4, 6, 3, 5)
        both = torch.stack((lanes & 15, lanes >> 4), 5)
        piece.copy_((both[..., 0] | both[..., 1] << 4).reshape(piece.shape))
    return codes


@torch.no_grad()
def linear_scaled(
    x: QuantizedRows,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    act: Activation | None = None,
    out: Tensor,
) -> Tensor:
    """out [T, N] = x W^T + bias (float32 [N]) of rows and a weight of 8 bits.

    `weight` [N, K] is row-major, with a scale a row [N] or, of e4m3, a block [ceil(N / 128),
    ceil(K / 128)]; or, on the CPU, what `pack_panels` makes of one, of which the result has the same bits.
    With `act` and no bias out [T, N / 2] = act(gate) * up, where W holds the rows of gate, then those of up,
    in whole blocks.
    """
    number = -1 if act is None else int(act)
    torch.ops.diffulex.linear_scaled(x.codes, x.scale, weight, weight_scale, bias, out, act=number)
    return out


@torch.no_grad()
def linear_w4a16(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    group: int,
    act: Activation | None = None,
    out: Tensor,
) -> Tensor:
    """out [T, N] = x W^T + bias (float32 [N]) of rows x [T, K] and nibbles [N, ceil(K / 2)], low first.

    On the CPU, the nibbles may be what `pack_panels` makes of them; on compute capability 9.0, where
    `is_tileable` and x and `out` are bfloat16, what `to_nibble_tiles` does.
    W = bf16((nibble - zero) * scale) with scales (bfloat16 or float32) and zeros (uint8; 8 without) of
    [K / group, N]; with tiles either scales of bfloat16 alone, or of float32 and zeros of bfloat16, and
    sums in an order that is the same up to 128 rows, and for more inside `batch_invariant`. With `act`
    (on CUDA: and tiles) and no bias out [T, N / 2] = act(gate) * up, where W holds the rows of gate, then
    those of up.
    """
    number = -1 if act is None else int(act)
    torch.ops.diffulex.linear_w4a16(x, weight, scales, zeros, bias, out, group=group, act=number)
    return out


@torch.no_grad()
def dequantize_nibbles(
    weight: Tensor, scales: Tensor, zeros: Tensor | None = None, *, group: int, out: Tensor
) -> Tensor:
    """out [N, K] bfloat16 = W of `linear_w4a16`, of nibbles by row or (CUDA) in tiles."""
    torch.ops.diffulex.dequantize_nibbles(weight, scales, zeros, out, group=group)
    return out


@fake("quantize_rows")
def _quantize_rows(arguments: FakeArguments, x: Tensor, scale: Tensor, group: int) -> None:
    arguments.check("x", FLOATS, (None, None))
    num_rows, depth = x.shape
    arguments.require("x", depth >= 1, "a last dimension >= 1", list(x.shape))
    arguments.at_least("group", 1)
    arguments.check("out", _CODES, (num_rows, depth))
    _check_row_scales(arguments, "scale", scale, _ceil(depth, group), num_rows)


@fake("quantize_weight")
def _quantize_weight(arguments: FakeArguments, w: Tensor, scheme: int, group: int) -> None:
    arguments.check("w", FLOATS, (None, None))
    rows, depth = w.shape
    arguments.require("w", depth >= 1, "a last dimension >= 1", list(w.shape))
    schemes = "0 (fp8), 1 (fp8_block), 2 (int8) or 3 (int4)"
    arguments.require("scheme", scheme in (0, 1, 2, 3), schemes, scheme)
    if scheme == WeightScheme.INT4:
        _check_group(arguments, group or depth, depth)
    codes, scales = weight_parts(rows, depth, WeightScheme(scheme), group)
    arguments.check("out", (codes[1],), codes[0])
    arguments.check("scale", (scales[1],), scales[0])


@fake("linear_scaled")
def _linear_scaled(
    arguments: FakeArguments,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out: Tensor,
    act: int,
) -> None:
    arguments.check("x", _CODES, (None, None))
    num_rows, depth = x.shape
    arguments.require("x", depth >= 1, "a last dimension >= 1", list(x.shape))
    num_blocks = _ceil(depth, QUANT_GROUP)
    _check_row_scales(arguments, "x_scale", x_scale, num_blocks, num_rows)
    if weight.dim() == 4:
        columns = out.shape[1] * (1 if act == -1 else 2) if out.dim() == 2 else 0
        _check_panels(arguments, columns, depth, _PANEL_DEPTH if x.dtype == torch.int8 else 1)
    else:
        arguments.check("weight", (x.dtype,), (None, depth))
        columns = weight.shape[0]
    if x.dtype != torch.int8 and weight_scale.dim() == 2:
        arguments.check("weight_scale", FLOAT32, (_ceil(columns, QUANT_GROUP), num_blocks))
    else:
        arguments.check("weight_scale", FLOAT32, (columns,))
    if act != -1:
        _check_gate(arguments, weight, bias, columns, act)
        shape = list(weight.shape)
        is_whole = weight_scale.dim() == 1 or columns % (2 * QUANT_GROUP) == 0
        arguments.require(
            "weight", is_whole, f"rows of gate and of up in whole blocks of {QUANT_GROUP}", shape
        )
        columns //= 2
    arguments.check("out", FLOATS, (num_rows, columns))
    arguments.check("bias", FLOAT32, (columns,))


@fake("linear_w4a16")
def _linear_w4a16(
    arguments: FakeArguments,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    group: int,
    act: int,
) -> None:
    arguments.check("x", FLOATS, (None, None))
    num_rows, depth = x.shape
    arguments.require("x", depth >= 1, "a last dimension >= 1", list(x.shape))
    _check_group(arguments, group, depth)
    columns = out.shape[1] * (1 if act == -1 else 2) if out.dim() == 2 else 0
    if _is_tiled(weight):
        _check_tiles(arguments, columns, depth, group)
        arguments.check("x", (torch.bfloat16,), (None, depth))
        arguments.check("out", (torch.bfloat16,), (None, None))
    elif weight.dim() == 4:
        _check_panels(arguments, columns, _ceil(depth, 2), 1)
    else:
        arguments.check("weight", UINT8, (None, _ceil(depth, 2)))
        columns = weight.shape[0]
    _check_nibble_scales(arguments, weight, depth // group, columns)
    if act != -1:
        _check_gate(arguments, weight, bias, columns, act)
        columns //= 2
    arguments.check("out", FLOATS, (num_rows, columns))
    arguments.check("bias", FLOAT32, (columns,))


@fake("dequantize_nibbles")
def _dequantize_nibbles(arguments: FakeArguments, weight: Tensor, out: Tensor, group: int) -> None:
    arguments.check("out", (torch.bfloat16,), (None, None))
    columns, depth = out.shape
    _check_group(arguments, group, depth)
    if _is_tiled(weight):
        _check_tiles(arguments, columns, depth, group)
    else:
        arguments.check("weight", UINT8, (columns, _ceil(depth, 2)))
    _check_nibble_scales(arguments, weight, depth // group, columns)


def check_code_rows(
    arguments: FakeArguments,
    name: str,
    rows: Tensor,
    codes: Tensor | None,
    scale: Tensor | None,
    scale_name: str = "scale",
) -> None:
    """What an op checks of the codes that it may write of its result `rows`, the argument `name`."""
    arguments.paired(scale_name, "codes", codes is not None)
    if scale is None:
        return
    arguments.require(name, rows.dim() == 2, "2 dimensions with codes", list(rows.shape))
    num_rows, depth = rows.shape
    arguments.check("codes", _CODES, (num_rows, depth))
    is_whole = scale.dim() == 2 and scale.shape[0] == 1
    num_groups = 1 if is_whole else _ceil(depth, QUANT_GROUP)
    _check_row_scales(arguments, scale_name, scale, num_groups, num_rows)


def _check_panels(arguments: FakeArguments, columns: int, width: int, step: int) -> None:
    shape = _ceil(columns, PANEL_COLUMNS), _ceil(width, step), PANEL_COLUMNS, step
    arguments.check("weight", UINT8, shape)


def _check_tiles(arguments: FakeArguments, columns: int, depth: int, group: int) -> None:
    is_whole = columns % _TILED_ROWS == 0 and depth % _TILED_DEPTH == 0
    wanted = f"tiles of a multiple of {_TILED_ROWS} rows and {_TILED_DEPTH} columns"
    arguments.require("weight", is_whole, wanted, f"{columns} x {depth}")
    arguments.require("group", group in _TILED_GROUPS, "32, 64 or 128 with tiles", group)
    shape = columns // _TILE_ROWS, depth // _TILE_DEPTH, _TILE_LANES, _LANE_BYTES
    arguments.check("weight", UINT8, shape)


def check_expert_tiles(
    arguments: FakeArguments, x: Tensor, w13: Tensor, w13_scale: Tensor, w2_scale: Tensor
) -> None:
    """What `fused_moe` checks of experts in tiles [L, N / 8, K / 64, 32, 8] and of their scales."""
    arguments.check("x", (torch.bfloat16,), (None, None))
    hidden = x.shape[1]
    lanes = _TILE_LANES, _LANE_BYTES
    arguments.check("w13", UINT8, (None, None, _ceil(hidden, _TILE_DEPTH), *lanes))
    num_experts, width = w13.shape[0], w13.shape[1] * _TILE_ROWS // 2
    is_whole = hidden % _TILED_DEPTH == 0 and width % _TILED_DEPTH == 0
    wanted = "tiles of multiples of 128 rows and columns"
    arguments.require("w13", is_whole, wanted, list(w13.shape))
    shape = num_experts, hidden // _TILE_ROWS, width // _TILE_DEPTH
    arguments.check("w2", UINT8, (*shape, *lanes))
    for name, scale, rows, depth in (
        ("w13_scale", w13_scale, 2 * width, hidden),
        ("w2_scale", w2_scale, hidden, width),
    ):
        arguments.check(name, (torch.bfloat16,), (num_experts, None, rows))
        groups = scale.shape[1]
        fits = groups > 0 and depth % groups == 0 and depth // groups in _TILED_GROUPS
        arguments.require(
            name, fits, "groups of 32, 64 or 128 columns with tiles", list(scale.shape)
        )


def _check_nibble_scales(
    arguments: FakeArguments, weight: Tensor, groups: int, columns: int
) -> None:
    arguments.check("scales", (torch.bfloat16, torch.float32), (groups, columns))
    is_tiled = _is_tiled(weight)
    has_zeros = arguments["zeros"] is not None
    is_paired = not is_tiled or has_zeros == (arguments["scales"].dtype == torch.float32)
    wanted = "zero points of tiles beside scales of float32 and only there"
    arguments.require("zeros", is_paired, wanted, "a tensor" if has_zeros else "none")
    arguments.check("zeros", (torch.bfloat16,) if is_tiled else UINT8, (groups, columns))


def _is_tiled(weight: Tensor) -> bool:
    return weight.dim() == 4 and weight.shape[3] == _LANE_BYTES


def _check_gate(
    arguments: FakeArguments, weight: Tensor, bias: Tensor | None, columns: int, act: int
) -> None:
    acts = "-1 (none), 0 (silu), 1 (gelu tanh) or 2 (gelu erf)"
    arguments.require("act", act in (0, 1, 2), acts, act)
    is_even = columns % 2 == 0
    arguments.require("weight", is_even, "rows of gate and as many of up", list(weight.shape))
    arguments.require("bias", bias is None, "none with an activation", "a tensor")


def _check_group(arguments: FakeArguments, group: int, depth: int) -> None:
    is_divisor = group >= 1 and depth % group == 0
    arguments.require("group", is_divisor, f"a divisor of {depth}", group)


def _check_row_scales(
    arguments: FakeArguments, name: str, scale: Tensor, num_groups: int, num_rows: int
) -> None:
    arguments.check(name, FLOAT32, (num_groups, None))
    columns = scale.shape[1]
    arguments.require(name, columns >= num_rows, f"at least {num_rows} columns", columns)
