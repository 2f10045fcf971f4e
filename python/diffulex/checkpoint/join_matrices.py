# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors of a checkpoint that are codes and scales of one matrix, and joins them."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING

import torch

from diffulex.checkpoint.low_precision import BLOCK, StoredMatrix
from diffulex.checkpoint.tensor_files import StoredTensor
from diffulex.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.quantization.stored import StoredQuantization, StoredRule

__all__ = ["join_matrices"]

_FLOATS = ("F32", "BF16", "F16")
_WEIGHT_CODES = {"fp8": "F8_E4M3", "fp8_block": "F8_E4M3", "int8": "I8"}
#: Scales of activations and of the KV cache, which are made anew for every row here.
_STRAY = (
    *("*.input_scale", "*.output_scale", "*.kv_scale"),
    *(f"*.{name}_scale" for name in ("k", "v", "q", "prob")),
)
#: Last names of what belongs to codes.
_PARTS = (
    *("weight_scale", "weight_scale_inv", "scales", "qzeros", "g_idx"),
    *("weight_shape", "weight_zero_point", "weight_g_idx"),
)
#: A row of GPTQ without groups has one group of at most this.
_LONGEST_GROUP = 16_384


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
        blocks = [-(-rows // BLOCK), -(-depth // BLOCK)]
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
