# SPDX-License-Identifier: Apache-2.0
"""Matrices that a checkpoint stores as codes with scales, and what they are worth.

The tensors of such a matrix stand together for the one that an unquantised checkpoint would have,
under its name. Read as any other it gives float32 values; a layer in low precision takes the codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.checkpoint.slices import WeightSlice
from diffulex.checkpoint.tensor_files import CodedTensor, StoredTensor
from diffulex.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from diffulex.checkpoint.tensor_reader import TensorReader
    from diffulex.quantization.stored import StoredRule

__all__ = ["BLOCK", "Codes", "StoredMatrix"]

#: Rows and columns that share a scale of `fp8_block`.
BLOCK = 128
#: Values of which a piece consists at most: float32 of them are 32 MiB.
_PIECE_VALUES = 8 << 20
#: Column of eight that a nibble of an AWQ word holds.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Codes(NamedTuple):
    """Rows of a matrix [N, K] as `ops.weight_parts` describes them.

    Attributes:
        scale: of blocks, those that the rows are in.
        zeros: uint8 [K / group, n]; None: 8.
        order: columns in the order of the codes; None: as they are.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def _is_block(self) -> bool:
        return self.codes.dtype != torch.uint8 and self.scale.dim() == 2

    def of_rows(self, kept: slice) -> Codes:
        """Those of some of the rows, of which the first one begins a block."""
        codes, scale, zeros, order = self
        if codes.dtype == torch.uint8:
            zeros = None if zeros is None else zeros[:, kept]
            return Codes(codes[kept], scale[:, kept], zeros, order)
        if self._is_block:
            return Codes(codes[kept], scale[kept.start // BLOCK : -(-kept.stop // BLOCK)])
        return Codes(codes[kept], scale[kept])

    def of_columns(self, kept: slice, group: int) -> Codes:
        """Those of some columns: of blocks, or groups of int4, whole ones."""
        codes, scale, zeros, order = self
        if codes.dtype == torch.uint8:
            groups = slice(kept.start // group, kept.stop // group)
            zeros = None if zeros is None else zeros[groups]
            return Codes(
                codes[:, kept.start // 2 : -(-kept.stop // 2)], scale[groups], zeros, order
            )
        if self._is_block:
            scale = scale[:, kept.start // BLOCK : -(-kept.stop // BLOCK)]
        return Codes(codes[:, kept], scale)


@dataclass(frozen=True, slots=True)
class StoredMatrix(CodedTensor):
    """A matrix [N, K], or a stack [E, N, K], as codes; `dtype` is the name of that of the codes.

    Attributes:
        module: whose weight it is.
        parts: its tensors by their last names.
        scales: which of them are the scales.
        group: columns that share a scale of int4; 0: it is not int4.
    """

    module: str
    rule: StoredRule
    parts: Mapping[str, StoredTensor]
    scales: str
    group: int = 0

    @property
    def scheme(self) -> str:
        return self.rule.scheme

    @property
    def keeps_scale(self) -> bool:
        """Whether the scales of int4 are held as bfloat16, as they are stored."""
        return self.parts[self.scales].dtype == "BF16"

    @property
    def has_order(self) -> bool:
        """Whether the columns may be stored in another order."""
        return self.rule.layout == "gptq" and "g_idx" in self.parts

    @property
    def rows_per_piece(self) -> int:
        if self.rule.layout in ("gptq", "awq"):
            return self.shape[0]  # a word holds rows from all over the matrix
        values = math.prod(self.shape[1:])
        rows = max(1, _PIECE_VALUES // max(1, values))
        is_block = len(self.shape) == 2 and self.scheme == "fp8_block"
        return max(BLOCK, rows // BLOCK * BLOCK) if is_block else rows

    def check_part(self, part: WeightSlice) -> None:
        """Asks whether codes can be cut so that every scale of columns stays with whole groups of them.

        Raises:
            CheckpointError: they cannot.
        """
        if len(self.shape) == 3:
            if not part.has_whole_rows:
                raise CheckpointError(
                    f"checkpoint: {self._name('weight')}: expected whole experts on each rank, as they are"
                    " stored in low precision together (moe_parallel_mode expert), got parts of them"
                )
            return
        depth = self.shape[1]
        (columns,) = part.column_ranges
        unit = {"fp8_block": BLOCK, "int4": math.lcm(self.group or depth, 2)}.get(self.scheme, 1)
        if columns.start % unit or (columns.stop % unit and columns.stop != depth):
            raise CheckpointError(
                f"checkpoint: {self._name('weight')}: expected a multiple of {unit} columns on each of"
                f" several ranks, for whole groups with one scale, got {columns.start}:{columns.stop}"
            )

    def parts_of(self, reader: TensorReader, part: WeightSlice) -> Iterator[tuple[slice, Codes]]:
        """Codes with the columns of a part that `check_part` has looked at, and which of their rows it has.

        Raises:
            CheckpointError: the columns are in another order, in which no two ranks can share them; or
                as `coded`.
        """
        (columns,) = part.column_ranges
        for wanted in part.row_ranges:
            for rows, codes in self.coded(reader, wanted):
                found = codes
                if not part.has_whole_rows:
                    if codes.order is not None:
                        raise CheckpointError(
                            f"checkpoint: {self._name('g_idx')}: expected columns in order, which several"
                            " ranks can share, got another one"
                        )
                    found = codes.of_columns(columns, self.group)
                yield slice(max(0, wanted.start - rows.start), rows.stop - rows.start), found

    def pieces(
        self, reader: TensorReader, num_rows: int | None, wanted: slice | None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Ranges of rows with their values in float32."""
        wanted = slice(0, self.shape[0]) if wanted is None else wanted
        for rows, values in self._all_values(reader, wanted):
            step = num_rows or max(1, rows.stop - rows.start)
            for start in range(rows.start, rows.stop, step):
                stop = min(start + step, rows.stop)
                yield slice(start, stop), values[start - rows.start : stop - rows.start]

    def _all_values(
        self, reader: TensorReader, wanted: slice
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        depth = self.shape[-1]
        if len(self.shape) == 3:
            for index, found in self.stacked(reader, wanted):
                yield slice(index, index + 1), _values(found, self.group, depth)[None]
            return
        for rows, found in self.coded(reader, wanted):
            values = _values(found, self.group, depth)
            start = max(rows.start, wanted.start)
            yield slice(start, rows.stop), values[start - rows.start :]

    def stacked(self, reader: TensorReader, wanted: slice) -> Iterator[tuple[int, Codes]]:
        """Numbers of matrices of a stack, and their codes."""
        scale = self._read(reader, self.scales).float()
        _check_scale(scale.flatten(0, 1), self._name(self.scales))
        for rows, codes in reader.pieces(self.parts["weight"], 1, wanted):
            found = Codes(codes[0], scale[rows.start])
            self._check_codes(found, 0)
            yield rows.start, found

    def coded(
        self, reader: TensorReader, wanted: slice | None = None
    ) -> Iterator[tuple[slice, Codes]]:
        """Ranges of rows [n, K] with their codes; of blocks they begin at a multiple of 128.

        Raises:
            CheckpointError: scales or codes that are no numbers, or a file that cannot be read.
        """
        wanted = slice(0, self.shape[0]) if wanted is None else wanted
        if self.rule.layout in ("gptq", "awq"):
            found = self._words(reader)
            self._check_codes(found, 0)
            zeros = None if found.zeros is None else found.zeros[:, wanted]
            yield wanted, Codes(found.codes[wanted], found.scale[:, wanted], zeros, found.order)
            return
        is_block = self.scheme == "fp8_block"
        start = wanted.start // BLOCK * BLOCK if is_block else wanted.start
        scale, zeros = self._scale(reader), self._packed_zeros(reader)
        name = "weight_packed" if self.rule.layout == "packed" else "weight"
        span = slice(start, wanted.stop)
        for rows, piece in reader.pieces(self.parts[name], self.rows_per_piece, span):
            codes = piece
            if is_block:
                of_rows = scale[rows.start // BLOCK : -(-rows.stop // BLOCK)]
            elif name == "weight":
                of_rows = scale[rows]
            else:
                codes = piece.view(torch.uint8)[:, : -(-self.shape[1] // 2)]
                of_rows = scale[:, rows]
            found = Codes(codes, of_rows, None if zeros is None else zeros[:, rows])
            self._check_codes(found, rows.start)
            yield rows, found

    def _read(self, reader: TensorReader, name: str) -> torch.Tensor:
        """A whole tensor; it stays when the reader goes on."""
        stored = self.parts[name]
        values = torch.cat([piece.reshape(-1).clone() for _, piece in reader.pieces(stored)])
        return values.view(stored.shape)

    def _name(self, part: str) -> str:
        if len(self.shape) == 3:  # of a stack: the matrix itself has the name of the module
            return {"weight": self.module, "scale": f"{self.module}_scale"}.get(part, part)
        return f"{self.module}.{part}"

    def _scale(self, reader: TensorReader) -> torch.Tensor:
        """Scales as the ops take them: [N], [blocks], or [K / group, N] of int4."""
        scale = self._read(reader, self.scales)
        if self.scheme == "fp8_block":
            scale = scale.float()
            _check_scale(scale, self._name(self.scales))
            return scale
        if self.scheme == "int4":
            by_row = scale if self.rule.layout == "packed" else scale.T
            _check_scale(by_row.float(), self._name(self.scales))
            scale = by_row.T.contiguous()
            return scale if self.keeps_scale else scale.float()
        scale = scale.float().flatten().expand(self.shape[0])
        _check_scale(scale[:, None], self._name(self.scales))
        return scale

    def _packed_zeros(self, reader: TensorReader) -> torch.Tensor | None:
        if "weight_zero_point" not in self.parts:
            return None
        words = self._read(reader, "weight_zero_point")
        rows = _nibbles(words.T.contiguous())  # [K / group, 8 ceil(N / 8)]
        return rows[:, : self.shape[0]].contiguous()

    def _words(self, reader: TensorReader) -> Codes:
        """A matrix of GPTQ or AWQ."""
        words, zeros = self._read(reader, "qweight"), self._read(reader, "qzeros")
        scale = self._scale(reader)
        if self.rule.layout == "awq":
            codes, points = _awq_nibbles(words), _awq_nibbles(zeros)
        else:
            depth, columns = self.shape[1], words.size(1)
            codes = _nibbles(words.T.contiguous()).T.reshape(depth, columns)
            points = _nibbles(zeros)
        order = self._order(reader) if self.has_order else None
        if order is not None:
            codes = codes[order]
        packed = codes[0::2] | codes[1::2] << 4
        points = points.add(self.rule.zero_offset)
        return Codes(packed.T.contiguous(), scale, points.contiguous(), order)

    def _order(self, reader: TensorReader) -> torch.Tensor | None:
        """Columns by their groups; None where they are in order."""
        found = self._read(reader, "g_idx").long()
        sizes = torch.arange(found.numel()) // self.group
        order = found.argsort(stable=True)
        if not torch.equal(found[order], sizes):
            raise CheckpointError(
                f"checkpoint: {self.module}.g_idx: expected {self.group} columns of each of"
                f" {found.numel() // self.group} groups, got others"
            )
        return None if torch.equal(found, sizes) else order.int()

    def _check_codes(self, found: Codes, first: int) -> None:
        """Refuses codes that are NaN, and scales of zero beside codes that are not."""
        codes, scale = found.codes, found.scale
        if codes.dtype == torch.float8_e4m3fn:
            magnitude = codes.view(torch.uint8) & 0x7F
            if (magnitude == 0x7F).any():
                raise CheckpointError(
                    f"checkpoint: {self._name('weight')}: expected finite values, got NaN"
                )
        if not (scale == 0).any():
            return
        values = _values(found._replace(scale=torch.ones_like(scale)), self.group, self.shape[-1])
        wide = _spread(scale, values.shape, self.group, self.scheme)
        bad = ((wide == 0) & (values != 0)).any(1).nonzero()
        if bad.numel():
            raise CheckpointError(
                f"checkpoint: {self._name(self.scales)}: expected scales other than zero, got 0 at"
                f" row {first + int(bad[0])}"
            )


def _check_scale(by_row: torch.Tensor, name: str) -> None:
    """Refuses scales [rows, ...] that are not finite."""
    if by_row.sum().isfinite():
        return
    bad = (~by_row.flatten(1).isfinite()).any(1).nonzero()
    if bad.numel():
        row = int(bad[0])
        values = by_row[row].flatten()
        got = "nan" if values.isnan().any() else "inf"
        raise CheckpointError(f"checkpoint: {name}: expected finite scales, got {got} at row {row}")


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 8 m] of int32 words [n, m], low nibbles first."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def _awq_nibbles(words: torch.Tensor) -> torch.Tensor:
    found = _nibbles(words).view(words.size(0), -1, 8)
    back = [_AWQ_ORDER.index(column) for column in range(8)]
    return found[:, :, back].flatten(1)


def _spread(scale: torch.Tensor, shape: torch.Size, group: int, scheme: str) -> torch.Tensor:
    """Scales for every value [n, K]."""
    rows, depth = shape
    if scheme == "int4":
        return scale.float().T.repeat_interleave(group, 1)
    if scale.dim() == 2:
        wide = scale.repeat_interleave(BLOCK, 0)[:rows]
        return wide.repeat_interleave(BLOCK, 1)[:, :depth]
    return scale[:, None].expand(rows, depth)


def _values(found: Codes, group: int, depth: int) -> torch.Tensor:
    """What codes are worth, in float32; of int4 rounded to bfloat16, as products take it."""
    codes, scale = found.codes, found.scale
    if codes.dtype != torch.uint8:
        scheme = "fp8_block" if scale.dim() == 2 else "fp8"
        return codes.float() * _spread(scale, codes.shape, group, scheme)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, :depth].float()
    zeros = 8 if found.zeros is None else found.zeros.T.repeat_interleave(group, 1).float()
    values = (nibbles - zeros) * _spread(scale, nibbles.shape, group, "int4")
    values = values.bfloat16().float()
    if found.order is None:
        return values
    in_place = torch.empty_like(values)
    in_place[:, found.order.long()] = values
    return in_place
