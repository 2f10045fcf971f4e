# SPDX-License-Identifier: Apache-2.0
"""Weight formats of low precision; see `diffulex.nn.weights` for what holds them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from diffulex import ops
from diffulex.checkpoint.low_precision import Codes
from diffulex.errors import ConfigError
from diffulex.ops import WeightScheme
from diffulex.quantization import vendor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffulex.nn.weights import WeightFormat

__all__ = ["QuantizedWeight", "Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """How consecutive rows of a weight are held.

    Attributes:
        group: columns of a scale of int4.
        has_exact_scale: scales of int4 are float32, which stored ones of float16 need.
        has_zeros: int4 has zero points.
        has_order: columns may be in another order than in rows that are multiplied.
    """

    rows: int
    group: int = 0
    has_exact_scale: bool = False
    has_zeros: bool = False
    has_order: bool = False


class _Part:
    """Consecutive rows of a weight, whose blocks begin with them."""

    __slots__ = (
        "before_write",
        "codes",
        "depth",
        "has_tiles",
        "is_tileable",
        "order",
        "rows",
        "scale",
        "scheme",
        "shape",
        "zeros",
    )

    def __init__(
        self,
        start: int,
        shape: Shape,
        depth: int,
        scheme: WeightScheme,
        device: torch.device,
        dtype: torch.dtype | None,
        memory: torch.device,
    ) -> None:
        self.rows, self.depth, self.scheme = slice(start, start + shape.rows), depth, scheme
        self.shape = shape
        codes, scale = ops.weight_parts(shape.rows, depth, scheme, shape.group)
        is_tileable = scheme == WeightScheme.INT4 and dtype == torch.bfloat16
        #: Whether compute capability 9.0 would multiply tiles.
        self.is_tileable = is_tileable and ops.is_tileable(shape.rows, depth, shape.group)
        #: Whether products take tiles.
        self.has_tiles = self.is_tileable and ops.has_hopper_kernels(device)
        # Beside tiles are scales of bfloat16 alone, or of float32 with zero points of bfloat16.
        is_paired = self.has_tiles and (shape.has_exact_scale or shape.has_zeros)
        of_scale = torch.float32 if shape.has_exact_scale or is_paired else scale[1]
        of_zeros = torch.bfloat16 if is_paired else torch.uint8
        self.codes = torch.empty(codes[0], dtype=codes[1], device=memory)
        self.scale = torch.empty(scale[0], dtype=of_scale, device=memory)
        self.zeros: torch.Tensor | None = None
        if shape.has_zeros or is_paired:
            self.zeros = torch.full(scale[0], ops.INT4_ZERO, dtype=of_zeros, device=memory)
        #: Of the columns; None: as they are.
        self.order: torch.Tensor | None = None
        #: Called before rows are written, where a stack has its memory.
        self.before_write: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        held = (self.codes, self.scale, self.zeros, self.order)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def write(self, first: int, values: torch.Tensor) -> None:
        """Quantises rows [n, K] that begin at `first`; of blocks, whole ones or up to the end."""
        last = first + values.size(0)
        self._unpack()
        ops.quantize_weight(
            values.to(self.codes.device),
            self.scheme,
            group=self.shape.group,
            out=self.codes[first:last],
            scale=self._of_rows(self.scale, first, last),
        )

    def write_codes(self, first: int, stored: Codes) -> None:
        """Takes codes of rows [n, K] that begin at `first`, as `write` has it."""
        last = first + stored.codes.size(0)
        self._unpack()
        self.codes[first:last] = stored.codes
        self._of_rows(self.scale, first, last).copy_(stored.scale)
        if self.zeros is not None and stored.zeros is not None:
            self._of_rows(self.zeros, first, last).copy_(stored.zeros)
        if stored.order is not None:
            self.order = stored.order.to(self.codes.device)

    def place_in(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        has_tiles: bool,
        before_write: Callable[[], None],
    ) -> None:
        """Takes memory of a stack for what will be written, in rows; it was made without tiles."""
        self.codes, self.scale, self.has_tiles = codes, scale, has_tiles
        self.before_write = before_write

    def _of_rows(self, scale: torch.Tensor, first: int, last: int) -> torch.Tensor:
        if self.scheme == WeightScheme.INT4:
            return scale[:, first:last]
        if self.scheme != WeightScheme.FP8_BLOCK:
            return scale[first:last]
        size = ops.QUANT_GROUP
        if first % size or (last % size and last != self.shape.rows):
            raise ValueError(f"write: expected blocks of {size} rows, got {first}:{last}")
        return scale[first // size : -(-last // size)]

    @property
    def group(self) -> int:
        return self.shape.group

    @property
    def is_foreign(self) -> bool:
        """Whether only a checkpoint has this form."""
        shape = self.shape
        return shape.has_exact_scale or shape.has_zeros or shape.has_order

    def row_major(self) -> torch.Tensor:
        """The codes by row, whatever form they have."""
        if self.codes.dim() == 2:
            return self.codes
        if self.has_tiles:
            return ops.from_nibble_tiles(self.codes.clone())
        num_rows = self.shape.rows
        shape, dtype = ops.weight_parts(num_rows, self.depth, self.scheme, self.group)[0]
        return ops.unpack_panels(self.codes, num_rows, shape[1], dtype)

    def _unpack(self) -> None:
        """Gives the codes the form of rows once more, after products; tiles keep their memory, which
        captured graphs read."""
        is_tiled = self.has_tiles and self.codes.dim() == 4
        if self.before_write is not None:
            self.before_write()
        self.codes = ops.from_nibble_tiles(self.codes) if is_tiled else self.row_major()

    @property
    def can_gate(self) -> bool:
        """Whether one kernel multiplies gate and up, which are halves of the rows."""
        if self.scheme == WeightScheme.INT4:
            return self.has_tiles and self.codes.dim() == 4 and self.order is None
        if self.codes.device.type == "cpu":
            return False
        half = self.shape.rows // 2
        return self.scheme != WeightScheme.FP8_BLOCK or half % ops.QUANT_GROUP == 0

    def pack(self) -> None:
        """Gives the codes the form of products."""
        if self.codes.dim() > 2:
            return
        if self.has_tiles:
            self.codes = ops.to_nibble_tiles(self.codes)
        elif self.codes.device.type == "cpu":
            self.codes = ops.pack_panels(self.codes)
            return
        self._leave_out_zeros()

    def _leave_out_zeros(self) -> None:
        """Zero points that are all 8, unless scales of float32 have to have some beside them."""
        has_pair = self.has_tiles and self.shape.has_exact_scale
        if self.zeros is None or has_pair or bool((self.zeros != ops.INT4_ZERO).any()):
            return
        if self.has_tiles:  # the scales are bfloat16 again, in the memory of the zero points
            self.scale = self.zeros.copy_(self.scale)
        self.zeros = None

    def gated_product(
        self, x: ops.QuantizedRows | torch.Tensor, act: ops.Activation, out: torch.Tensor
    ) -> None:
        if isinstance(x, torch.Tensor):
            group, zeros = self.group, self.zeros
            ops.linear_w4a16(x, self.codes, self.scale, zeros, group=group, act=act, out=out)
        else:
            ops.linear_scaled(x, self.codes, self.scale, act=act, out=out)

    def product(
        self,
        x: ops.QuantizedRows | torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        if isinstance(x, torch.Tensor):
            rows, group, zeros = self._ordered(x), self._columns, self.zeros
            ops.linear_w4a16(rows, self.codes, self.scale, zeros, bias, group=group, out=out)
        else:
            ops.linear_scaled(x, self.codes, self.scale, bias, out=out)

    def dequantized_product(
        self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """The same of many bfloat16 rows and nibbles, by the vendor's library."""
        weight = x.new_empty(self.shape.rows, self.depth)
        group, zeros = self._columns, self.zeros
        ops.dequantize_nibbles(self.codes, self.scale, zeros, group=group, out=weight)
        vendor.multiply_plain(self._ordered(x), weight, bias, out)

    @property
    def _columns(self) -> int:
        """That share a scale."""
        return self.shape.group or self.depth

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.order is None else x.index_select(1, self.order)


class QuantizedWeight:
    """A matrix W [N, K] as codes with scales.

    Args:
        shapes: of the projections that W stacks; those of blocks have blocks of their own.
        depth: K.
        device: whose products take W, which tells the types of all parts.
        dtype: of the rows that are multiplied; None: any.
        memory: where W lies; None: on the device.
    """

    __slots__ = (
        "_is_ready",
        "_own_rows",
        "_parts",
        "depth",
        "is_batch_invariant",
        "num_rows",
        "scheme",
    )

    def __init__(
        self,
        shapes: Sequence[Shape],
        depth: int,
        scheme: WeightScheme,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        memory: torch.device | str | None = None,
    ) -> None:
        self.scheme, self.depth = scheme, depth
        self.num_rows = sum(shape.rows for shape in shapes)
        self._is_ready = False
        first = shapes[0]
        is_whole = not first.has_order and all(
            replace(shape, rows=first.rows) == first for shape in shapes
        )
        if scheme == WeightScheme.FP8_BLOCK:
            is_whole = not any(shape.rows % ops.QUANT_GROUP for shape in shapes[:-1])
        self._parts: list[_Part] = []
        start, device = 0, torch.device(device)
        memory = device if memory is None else torch.device(memory)
        for shape in [replace(first, rows=self.num_rows)] if is_whole else shapes:
            self._parts.append(_Part(start, shape, depth, scheme, device, dtype, memory))
            start += shape.rows
        self.is_batch_invariant = False
        self._own_rows: int | None = None
        if scheme == WeightScheme.INT4:
            has_tiles = all(part.has_tiles for part in self._parts)
            self._own_rows = vendor.own_nibble_rows(device, self.num_rows, depth, has_tiles)
        elif len(self._parts) == 1:
            self._own_rows = vendor.own_rows(scheme, self._parts[0].codes)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    @property
    def parts(self) -> Sequence[_Part]:
        """Rows of W that are held alike, in their order."""
        return self._parts

    @property
    def group(self) -> int:
        """Columns that share a scale of int4; 0: all of a row, or it is not int4."""
        return self._parts[0].group

    @property
    def suits_hopper(self) -> bool:
        """Whether products of compute capability 9.0 take all parts in their last form; they are for int4
        and e4m3."""
        if self.scheme == WeightScheme.INT4:
            return all(part.codes.dim() > 2 for part in self._parts)
        sizes = (self.depth, *(part.shape.rows for part in self._parts))
        return not any(size % 16 for size in sizes)

    @property
    def row_multiple(self) -> int:
        """Rows that are written at once are as many as this, or a multiple."""
        return ops.QUANT_GROUP if self.scheme == WeightScheme.FP8_BLOCK else 1

    @property
    def can_write(self) -> bool:
        """Whether quantising makes this form, zero points and other orders of columns left out."""
        return not any(part.is_foreign for part in self._parts)

    def write(self, first: int, values: torch.Tensor) -> None:
        """Quantises the rows values [n, K] into the rows from `first` on."""
        if values.dtype == torch.float64:
            values = values.float()
        self._is_ready = False
        last = first + values.size(0)
        for part in self._parts:
            begin, end = max(first, part.rows.start), min(last, part.rows.stop)
            if begin < end:
                part.write(begin - part.rows.start, values[begin - first : end - first])

    def quantized(self, values: torch.Tensor) -> Codes:
        """Rows values [n, K], or of more columns than W has, as codes."""
        device = self._parts[0].codes.device
        values = (values.float() if values.dtype == torch.float64 else values).to(device)
        return Codes(*ops.quantize_weight(values, self.scheme, group=self.group))

    def write_codes(self, first: int, stored: Codes, kept: slice) -> None:
        """Takes some rows of codes for the rows from `first` on."""
        self._is_ready = False
        last, shift = first + kept.stop - kept.start, kept.start - first
        for part in self._parts:
            begin, end = max(first, part.rows.start), min(last, part.rows.stop)
            if begin < end:
                of_part = stored.of_rows(slice(begin + shift, end + shift))
                part.write_codes(begin - part.rows.start, of_part)

    def packed(self) -> WeightFormat:
        if not self._is_ready:
            for part in self._parts:
                part.pack()
            self._is_ready = True
        return self

    def row_major(self) -> torch.Tensor:
        raise ConfigError(
            f"weights: expected quantization none to read or write them, got {self.scheme.name.lower()}"
        )

    def _takes_vendor(self, x: torch.Tensor) -> bool:
        """Whether the vendor's library multiplies the rows x [T, K]."""
        if self._own_rows is None or self.is_batch_invariant:
            return False
        return vendor.takes_rows(self.scheme, x, self._own_rows)

    def _order_of_sums(self) -> AbstractContextManager[None]:
        """Where the kernel of nibbles is told to keep it whatever the number of rows."""
        is_told = self.is_batch_invariant and self.scheme == WeightScheme.INT4
        return ops.batch_invariant() if is_told else nullcontext()

    def new_rows(self, x: torch.Tensor) -> ops.QuantizedRows | None:
        if self.scheme == WeightScheme.INT4:
            return None
        # Of a row, and of a row of W, the vendor's library takes one scale each.
        is_whole = self.scheme == WeightScheme.FP8 and self._takes_vendor(x)
        return ops.new_quantized_rows(
            x.size(0),
            self.depth,
            torch.int8 if self.scheme == WeightScheme.INT8 else torch.float8_e4m3fn,
            x.device,
            group=self.depth if is_whole else ops.QUANT_GROUP,
        )

    def rows_of(self, x: torch.Tensor) -> ops.QuantizedRows | torch.Tensor:
        """Rows x [T, K] as `multiply` takes them."""
        rows = self.new_rows(x)
        if rows is None:
            return x
        ops.quantize_rows_into(x, rows)
        return rows

    def multiply(
        self,
        x: ops.QuantizedRows | torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes x W^T + bias (float32) to `out` [T, N]."""
        self.packed()
        with self._order_of_sums():
            for part in self._parts:
                rows = part.rows
                part.product(x, None if bias is None else bias[rows], out[:, rows])
        return out

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None,
        bias: torch.Tensor | None,
        rows: ops.QuantizedRows | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = x.new_empty(x.size(0), self.num_rows)
        if self.scheme == WeightScheme.INT4 and self._takes_vendor(x):
            self.packed()
            for part in self._parts:
                of_part = None if bias is None else bias[part.rows]
                part.dequantized_product(x, of_part, out[:, part.rows])
            return out
        taken = self.rows_of(x) if rows is None else rows
        is_plain = bias is None or self.scheme == WeightScheme.FP8
        if is_plain and isinstance(taken, ops.QuantizedRows) and self._takes_vendor(x):
            part = self._parts[0]
            return vendor.multiply(taken, part.codes, part.scale, bias, out)
        return self.multiply(taken, out, None if bias is None else bias.float())

    def gated_product(
        self,
        x: torch.Tensor,
        act: ops.Activation,
        out: torch.Tensor,
        rows: ops.QuantizedRows | None = None,
    ) -> bool:
        self.packed()
        if len(self._parts) > 1 or not self._parts[0].can_gate or self._takes_vendor(x):
            return False
        with self._order_of_sums():
            self._parts[0].gated_product(self.rows_of(x) if rows is None else rows, act, out)
        return True
