# SPDX-License-Identifier: Apache-2.0
"""Matrices that a checkpoint stores as codes with scales, and what they are worth.

The tensors of such a matrix stand together for the one that an unquantised checkpoint would have,
under its name. Read as any other it gives float32 values; a layer in low precision takes the codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.checkpoint.slices import WeightSlice
from diffulex.checkpoint.tensor_files import CodedTensor, StoredTensor
from diffulex.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from diffulex.checkpoint.tensor_reader import TensorReader
    from diffulex.quantization.stored import StoredQuantization, StoredRule

__all__ = ["Codes", "StoredMatrix", "join_matrices"]

_BLOCK = 128
#: Values of which a piece consists at most: float32 of them are 32 MiB.
_PIECE_VALUES = 8 << 20
_FLOATS = ("F32", "BF16", "F16")
_WEIGHT_CODES = {"fp8": "F8_E4M3", "fp8_block": "F8_E4M3", "int8": "I8"}
#: Scales of activations and of the KV cache, which are made anew for every row here.
_STRAY = (
    *("*.input_scale", "*.output_scale", "*.kv_scale"),
    *(f"*.{name}_scale" for name in ("k", "v", "q", "prob")),
)
#: Column of eight that a nibble of an AWQ word holds.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: Last names of what belongs to codes.
_PARTS = (
    *("weight_scale", "weight_scale_inv", "scales", "qzeros", "g_idx"),
    *("weight_shape", "weight_zero_point", "weight_g_idx"),
)
#: A row of GPTQ without groups has one group of at most this.
_LONGEST_GROUP = 16_384


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


@dataclass(frozen=True, slots=True)
class StoredMatrix(CodedTensor):
    """A matrix [N, K], or a stack [E, N, K], as codes; `dtype` is the name of that of the codes.

    Attributes:
        module: whose weight it is.
        parts: its tensors by their last names.
        scales: which of them are the scales.
        group: columns that share a scale of int4.
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
        return max(_BLOCK, rows // _BLOCK * _BLOCK) if is_block else rows

    def check_part(self, part: WeightSlice) -> None:
        """Asks whether codes can be cut so that every scale stays with whole rows and groups of them.

        Raises:
            CheckpointError: they cannot.
        """
        if len(self.shape) == 3:
            all_rows, all_columns = (slice(0, size) for size in self.shape[1:])
            if part.column_ranges != (all_rows,) or part.depth not in (None, all_columns):
                raise CheckpointError(
                    f"checkpoint: {self._name('weight')}: expected whole experts on each rank, as they are"
                    " stored in low precision together (moe_parallel_mode expert), got parts of them"
                )
            return
        depth = self.shape[1]
        (columns,) = part.column_ranges
        unit = {"fp8_block": _BLOCK, "int4": math.lcm(self.group or depth, 2)}.get(self.scheme, 1)
        self._check_cuts("columns", [columns], depth, unit)
        self._check_cuts(
            "rows", part.row_ranges, self.shape[0], _BLOCK if self.scheme == "fp8_block" else 1
        )

    def _check_cuts(self, what: str, parts: Sequence[slice], size: int, unit: int) -> None:
        for part in parts:
            is_last = part.stop == size and part is parts[-1]
            if part.start % unit or (part.stop % unit and not is_last):
                raise CheckpointError(
                    f"checkpoint: {self._name('weight')}: expected a multiple of {unit} {what} on each of"
                    f" several ranks, for whole groups with one scale, got {part.start}:{part.stop}"
                )

    def columns_of(self, codes: Codes, columns: slice) -> Codes:
        """The codes of some columns, which `check_part` has looked at.

        Raises:
            CheckpointError: the columns are in another order, in which no two ranks can share them.
        """
        if columns == slice(0, self.shape[1]):
            return codes
        if codes.order is not None:
            raise CheckpointError(
                f"checkpoint: {self._name('g_idx')}: expected columns in order, which several ranks can"
                " share, got another one"
            )
        start, stop = columns.start, columns.stop
        if self.scheme == "int4":
            groups = slice(start // self.group, stop // self.group)
            zeros = None if codes.zeros is None else codes.zeros[groups]
            return Codes(codes.codes[:, start // 2 : stop // 2], codes.scale[groups], zeros)
        scale = codes.scale
        if self.scheme == "fp8_block":
            scale = scale[:, start // _BLOCK : -(-stop // _BLOCK)]
        return Codes(codes.codes[:, columns], scale)

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
        start = wanted.start // _BLOCK * _BLOCK if is_block else wanted.start
        scale, zeros = self._scale(reader), self._packed_zeros(reader)
        name = "weight_packed" if self.rule.layout == "packed" else "weight"
        span = slice(start, wanted.stop)
        for rows, piece in reader.pieces(self.parts[name], self.rows_per_piece, span):
            codes = piece
            if is_block:
                of_rows = scale[rows.start // _BLOCK : -(-rows.stop // _BLOCK)]
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
        wide = scale.repeat_interleave(_BLOCK, 0)[:rows]
        return wide.repeat_interleave(_BLOCK, 1)[:, :depth]
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


def join_matrices(
    stored: Mapping[str, StoredTensor], quantization: StoredQuantization | None
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, those of every matrix in low precision as one.

    Only the headers are looked at, and the shapes that some matrices have as a tensor.

    Raises:
        CheckpointError: a matrix without its scales, or parts that do not fit each other.
    """
    if quantization is None:
        return dict(stored)
    joined: dict[str, StoredTensor] = {}
    rest = {
        name: tensor
        for name, tensor in stored.items()
        if not any(fnmatch(name, pattern) for pattern in _STRAY)
    }
    for name in list(rest):
        if name not in rest:
            continue  # a part of a matrix before it
        key, module = _matrix_of(name, rest[name])
        if key is None:
            continue
        rule = quantization.rule_of(module)
        if rule is None:
            raise CheckpointError(
                f"checkpoint: {name}: expected a dtype of values, as {quantization.where} says, got"
                f" {rest[name].dtype}"
            )
        matrix, used = _Joiner(rest, module, rule).join(name)
        joined[key] = matrix
        for other in used:
            rest.pop(other, None)
    for name in rest:
        _check_lonely(name, rest, quantization)
    if not joined:
        raise CheckpointError(
            f"checkpoint: expected matrices in {quantization.scheme}, as {quantization.where} says,"
            " got none"
        )
    return {**rest, **joined}


def _matrix_of(name: str, tensor: StoredTensor) -> tuple[str | None, str]:
    """Name of the matrix whose codes a tensor has, and of its module."""
    module, _, last = name.rpartition(".")
    if last in ("weight_packed", "qweight"):
        return f"{module}.weight", module
    if tensor.dtype in ("F8_E4M3", "F8_E5M2", "I8"):
        return name, module if last == "weight" else name
    return None, ""


def _check_lonely(
    name: str, rest: Mapping[str, StoredTensor], quantization: StoredQuantization
) -> None:
    """Refuses scales and other parts without codes."""
    module, _, last = name.rpartition(".")
    if last not in _PARTS:
        return
    rule = quantization.rule_of(module) or quantization.rules[0]
    codes = {"weight": "weight", "packed": "weight_packed"}.get(rule.layout, "qweight")
    beside = rest.get(f"{module}.{codes}") or rest.get(f"{module}.weight")
    raise CheckpointError(
        f"checkpoint: {module}.{codes}: expected {_WEIGHT_CODES.get(rule.scheme, 'I32')} beside"
        f" {last}, got {'none' if beside is None else beside.dtype}"
    )


class _Joiner:
    """Collects the tensors of one matrix and checks what their headers say."""

    def __init__(self, stored: Mapping[str, StoredTensor], module: str, rule: StoredRule) -> None:
        self._stored, self._module, self._rule = stored, module, rule
        self._used: list[str] = []

    def join(self, name: str) -> tuple[StoredMatrix, list[str]]:
        """The matrix whose codes have this name, and the names of all that belongs to it."""
        layout = "weight"
        if name.endswith((".qweight", ".weight_packed")):
            layout = "packed" if name.endswith("packed") else "gptq"
        rule, codes = self._rule, self._stored[name]
        expected = {"awq": "gptq"}.get(rule.layout, rule.layout)
        if layout != expected:
            last = {"weight": "weight", "packed": "weight_packed"}.get(rule.layout, "qweight")
            raise CheckpointError(
                f"checkpoint: {name}: expected {last} of {rule.scheme}, got {codes.dtype}"
            )
        legal = _WEIGHT_CODES.get(rule.scheme, "I32")
        if codes.dtype != legal:
            raise CheckpointError(
                f"checkpoint: {name}: expected {legal} of {rule.scheme}, got {codes.dtype}"
            )
        self._used.append(name)
        make = {"weight": self._weight, "packed": self._packed}.get(rule.layout, self._words)
        return make(name, codes), self._used

    def _part(self, last: str) -> StoredTensor | None:
        name = f"{self._module}.{last}"
        found = self._stored.get(name)
        if found is not None:
            self._used.append(name)
        return found

    def _needed(self, last: str, dtypes: tuple[str, ...], shapes: list[list[int]]) -> StoredTensor:
        found = self._part(last)
        name = f"{self._module}.{last}"
        if found is None:
            raise CheckpointError(f"checkpoint: {name}: expected {dtypes[0]}, got none")
        self._check(name, found, dtypes, shapes)
        return found

    @staticmethod
    def _check(
        name: str, found: StoredTensor, dtypes: tuple[str, ...], shapes: list[list[int]]
    ) -> None:
        if found.dtype not in dtypes:
            legal = ", ".join(dtypes)
            text = f"one of {legal}" if len(dtypes) > 1 else legal
            raise CheckpointError(f"checkpoint: {name}: expected {text}, got {found.dtype}")
        if list(found.shape) not in shapes:
            *others, last = [str(shape) for shape in shapes[:3]]  # not each form of a scalar
            text = f"{', '.join(others)} or {last}" if others else last
            raise CheckpointError(
                f"checkpoint: {name}: expected shape {text}, got {list(found.shape)}"
            )

    def _scales(
        self, owner: str, codes: StoredTensor, shapes: list[list[int]]
    ) -> tuple[str, StoredTensor]:
        """The tensor of scales under one of its names."""
        is_stack = len(codes.shape) == 3
        named = {last: f"{self._module}.{last}" for last in self._rule.scales}
        if is_stack:
            named = {"scale": f"{self._module}_scale", **named}
        for last, name in named.items():
            if name in self._stored:
                self._used.append(name)
                self._check(name, self._stored[name], _FLOATS, shapes)
                return last, self._stored[name]
        wanted = f"{self._module.rpartition('.')[2]}_scale" if is_stack else next(iter(named))
        raise CheckpointError(
            f"checkpoint: {owner}: expected {wanted} beside an {codes.dtype} weight, got none"
        )

    def _weight(self, name: str, codes: StoredTensor) -> StoredMatrix:
        shape, scheme = codes.shape, self._rule.scheme
        if len(shape) != 2 and not (len(shape) == 3 and scheme == "fp8_block"):
            raise CheckpointError(f"checkpoint: {name}: expected a matrix, got {list(shape)}")
        rows, depth = shape[-2:]
        blocks = [-(-rows // _BLOCK), -(-depth // _BLOCK)]
        shapes = [[rows, 1], [rows], [1], [1, 1], []]
        if scheme == "fp8_block":
            shapes = [[*shape[:-2], *blocks]]
        last, scale = self._scales(name, codes, shapes)
        parts = {"weight": codes, last: scale}
        return self._matrix(shape, codes, parts, last, 0)

    def _packed(self, name: str, codes: StoredTensor) -> StoredMatrix:
        from diffulex.checkpoint.tensor_reader import TensorReader  # noqa: PLC0415 (reads these)

        if len(codes.shape) != 2:
            raise CheckpointError(f"checkpoint: {name}: expected a matrix, got {list(codes.shape)}")
        rows, words = codes.shape
        depth = 8 * words
        shape_tensor = self._part("weight_shape")
        if shape_tensor is not None:
            self._check(f"{self._module}.weight_shape", shape_tensor, ("I64", "I32"), [[2]])
            ((_, values),) = TensorReader("cpu").pieces(shape_tensor)
            said, depth = values.tolist(), int(values[1])
            if said[0] != rows or -(-depth // 8) != words:
                raise CheckpointError(
                    f"checkpoint: {self._module}.weight_shape: expected the shape of {rows} rows of"
                    f" {words} words, got {said}"
                )
        group, parts = self._group(name, depth), {"weight_packed": codes}
        num_groups = depth // group
        last, parts_scale = self._scales(name, codes, [[rows, num_groups]])
        parts[last] = parts_scale
        if self._rule.has_zeros:
            shape = [-(-rows // 8), num_groups]
            parts["weight_zero_point"] = self._needed("weight_zero_point", ("I32",), [shape])
        order = self._part("weight_g_idx")
        if order is not None:
            self._check(f"{self._module}.weight_g_idx", order, ("I32", "I64"), [[depth]])
            values = torch.cat([piece.clone() for _, piece in TensorReader("cpu").pieces(order)])
            if not torch.equal(values.long(), torch.arange(depth) // group):
                raise CheckpointError(
                    f"checkpoint: {self._module}.weight_g_idx: expected groups of {group} columns in"
                    " order, got others (actorder group)"
                )
        return self._matrix((rows, depth), codes, parts, last, group)

    def _words(self, name: str, codes: StoredTensor) -> StoredMatrix:
        if len(codes.shape) != 2:
            raise CheckpointError(f"checkpoint: {name}: expected a matrix, got {list(codes.shape)}")
        is_awq = self._rule.layout == "awq"
        depth, rows = codes.shape
        if is_awq:
            rows *= 8
        else:
            depth *= 8
        group = self._group(name, depth)
        if not self._rule.group and depth > _LONGEST_GROUP:
            raise CheckpointError(
                f"checkpoint: {name}: expected at most {_LONGEST_GROUP} columns with group_size -1,"
                f" got {depth}"
            )
        num_groups = depth // group
        last, scale = self._scales(name, codes, [[num_groups, rows]])
        parts = {"qweight": codes, last: scale}
        parts["qzeros"] = self._needed("qzeros", ("I32",), [[num_groups, -(-rows // 8)]])
        order = self._part("g_idx")
        if order is not None and not is_awq:
            self._check(f"{self._module}.g_idx", order, ("I32", "I64"), [[depth]])
            parts["g_idx"] = order
        return self._matrix((rows, depth), codes, parts, last, group)

    def _matrix(
        self,
        shape: tuple[int, ...],
        codes: StoredTensor,
        parts: Mapping[str, StoredTensor],
        scales: str,
        group: int,
    ) -> StoredMatrix:
        self._check_size(self._module, shape)
        size = sum(part.num_bytes for part in parts.values())
        where = codes.file, shape, codes.dtype, codes.offset, size
        return StoredMatrix(*where, self._module, self._rule, parts, scales, group)

    @staticmethod
    def _check_size(name: str, shape: tuple[int, ...]) -> None:
        if not all(shape):
            raise CheckpointError(f"checkpoint: {name}: expected a matrix, got {list(shape)}")

    def _group(self, name: str, depth: int) -> int:
        group = self._rule.group or depth
        if not group or depth % group:
            raise CheckpointError(
                f"checkpoint: {name}: expected groups of {group} that divide its columns, got {depth}"
            )
        return group
