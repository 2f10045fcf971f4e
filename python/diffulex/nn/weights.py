# SPDX-License-Identifier: Apache-2.0
"""Weight formats: how a matrix is held in memory, and the products with it.

A layer holds a format and never asks which one. A new format is a class here and the loader's way to
fill it.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from diffulex import ops
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

__all__ = [
    "DenseExperts",
    "DenseWeight",
    "ExpertFormat",
    "InvariantWeight",
    "LowPrecisionFormat",
    "PackedWeight",
    "WeightFormat",
    "deferred_weights",
    "new_parameter",
    "weight_device",
]

_is_deferred: ContextVar[bool] = ContextVar("is_deferred", default=False)


@contextmanager
def deferred_weights() -> Iterator[None]:
    """Layers made in this block have their matrices on the meta device, to get another format."""
    token = _is_deferred.set(True)
    try:
        yield
    finally:
        _is_deferred.reset(token)


def new_parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """Memory of a weight, not filled."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


def weight_device(device: torch.device | str) -> torch.device | str:
    """Where a layer on `device` makes its matrix."""
    return "meta" if _is_deferred.get() else device


class WeightFormat(Protocol):
    """A weight matrix W [N, K] in one format."""

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""

    def packed(self) -> WeightFormat:
        """The same matrix in the format that products want, once it has its values; perhaps self."""

    def row_major(self) -> torch.Tensor:
        """W [N, K]: the matrix itself where it is held so, else a new one."""

    def new_rows(self, x: torch.Tensor) -> ops.QuantizedRows | None:
        """Memory for the codes of x [T, K] that products take in its place; None: they take x."""

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None,
        bias: torch.Tensor | None,
        rows: ops.QuantizedRows | None = None,
    ) -> torch.Tensor:
        """x W^T + bias of x [T, K], in `out` [T, N] if given.

        `rows`: those of `new_rows` with the codes of x; None: they are made here.
        """

    def gated_product(
        self,
        x: torch.Tensor,
        act: ops.Activation,
        out: torch.Tensor,
        rows: ops.QuantizedRows | None = None,
    ) -> bool:
        """Writes ``act(gate) * up`` of x [T, K] to `out` [T, N / 2] where one kernel computes both.

        W holds the rows of gate, then those of up. False, with nothing written, where it takes two
        kernels.
        """


class LowPrecisionFormat(WeightFormat, Protocol):
    """A weight matrix as codes, whose products may take other kernels for many rows."""

    #: A row of a product may depend on no other row, nor on how many there are.
    is_batch_invariant: bool


class _PlainRows:
    """Of the formats whose products take the rows as they are."""

    __slots__ = ()

    def new_rows(self, x: torch.Tensor) -> None:
        del x


class DenseWeight(_PlainRows):
    """The row-major matrix as it was loaded."""

    __slots__ = ("_has_few_rows", "_is_packable", "matrix")

    def __init__(self, matrix: torch.Tensor) -> None:
        self.matrix = matrix
        is_half = matrix.dtype in (torch.bfloat16, torch.float16)
        self._has_few_rows = is_half and ops.has_hopper_kernels(matrix.device)
        self._is_packable = matrix.dtype == torch.float32 and matrix.device.type == "cpu"

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def packed(self) -> WeightFormat:
        return PackedWeight.of(self.matrix) if self._is_packable else self

    def row_major(self) -> torch.Tensor:
        return self.matrix

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None,
        bias: torch.Tensor | None,
        rows: ops.QuantizedRows | None = None,
    ) -> torch.Tensor:
        matrix = self.matrix
        if self._takes_few_rows(x):
            return ops.linear_few_rows(x, matrix, bias, out=out)
        if bias is None:
            return torch.mm(x, matrix.t(), out=out)
        return torch.addmm(bias, x, matrix.t(), out=out)

    def gated_product(
        self,
        x: torch.Tensor,
        act: ops.Activation,
        out: torch.Tensor,
        rows: ops.QuantizedRows | None = None,
    ) -> bool:
        can = self._takes_few_rows(x)
        if can:
            ops.linear_few_rows(x, self.matrix, act=act, out=out)
        return can

    def _takes_few_rows(self, x: torch.Tensor) -> bool:
        """Whether `ops.linear_few_rows` is the faster product for x [T, K]."""
        return self._has_few_rows and ops.is_few_rows(x.size(0), self.matrix.size(0), x.size(1))


class InvariantWeight(DenseWeight):
    """The matrix of an engine in which a row of a product depends on no other row.

    Neither may it depend on their number, by which torch chooses its product: all products are those of
    `ops.linear_few_rows`, part by part, or of packed panels on the CPU.

    Raises:
        ConfigError: no such product takes the matrix.
    """

    __slots__ = ()

    def __init__(self, matrix: torch.Tensor) -> None:
        super().__init__(matrix)
        num_rows, depth = matrix.shape
        if matrix.device.type == "cpu" or (
            self._has_few_rows
            and num_rows % ops.FEW_ROWS_COLUMNS == 0
            and depth % ops.FEW_ROWS_DEPTH == 0
        ):
            return
        raise ConfigError(
            "batch_invariant: expected the CPU, or bfloat16 or float16 weights on compute capability 9.0"
            f" of multiples of {ops.FEW_ROWS_COLUMNS} rows and {ops.FEW_ROWS_DEPTH} columns, got"
            f" {str(matrix.dtype).removeprefix('torch.')} {num_rows} x {depth} on {matrix.device}"
        )

    def packed(self) -> WeightFormat:
        return PackedWeight.of(self.matrix) if self.matrix.device.type == "cpu" else self

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None,
        bias: torch.Tensor | None,
        rows: ops.QuantizedRows | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = x.new_empty(x.size(0), self.matrix.size(0))
        for part in _few_rows_parts(x.size(0)):
            ops.linear_few_rows(x[part], self.matrix, bias, out=out[part])
        return out

    def gated_product(
        self,
        x: torch.Tensor,
        act: ops.Activation,
        out: torch.Tensor,
        rows: ops.QuantizedRows | None = None,
    ) -> bool:
        if self.matrix.device.type == "cpu":
            return False
        for part in _few_rows_parts(x.size(0)):
            ops.linear_few_rows(x[part], self.matrix, act=act, out=out[part])
        return True


def _few_rows_parts(num_rows: int) -> list[slice]:
    starts = range(0, num_rows, ops.FEW_ROWS)
    return [slice(start, start + ops.FEW_ROWS) for start in starts]


class PackedWeight(_PlainRows):
    """Panels of `ops.linear_packed`, for the CPU; sums are float32 in every dtype, rounded once."""

    __slots__ = ("_dtype", "_num_rows", "_panels")

    def __init__(self, panels: torch.Tensor, num_rows: int, dtype: torch.dtype) -> None:
        self._panels, self._num_rows, self._dtype = panels, num_rows, dtype

    @classmethod
    def of(cls, matrix: torch.Tensor) -> Self:
        """The panels of a row-major matrix [N, K]."""
        return cls(ops.pack_weight(matrix.float()), matrix.size(0), matrix.dtype)

    @property
    def nbytes(self) -> int:
        return self._panels.nbytes

    def packed(self) -> WeightFormat:
        return self

    def row_major(self) -> torch.Tensor:
        return ops.unpack_weight(self._panels, self._num_rows).to(self._dtype)

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None,
        bias: torch.Tensor | None,
        rows: ops.QuantizedRows | None = None,
    ) -> torch.Tensor:
        is_whole = self._dtype == torch.float32
        product = ops.linear_packed(
            x.float(), self._panels, self._num_rows, out=out if is_whole else None
        )
        if bias is not None:
            product.add_(bias)
        if is_whole:
            return product
        return product.to(self._dtype) if out is None else out.copy_(product)

    def gated_product(
        self,
        x: torch.Tensor,
        act: ops.Activation,
        out: torch.Tensor,
        rows: ops.QuantizedRows | None = None,
    ) -> bool:
        return False


class ExpertFormat(Protocol):
    """The matrices of L experts in one format."""

    @property
    def nbytes(self) -> int:
        """Bytes that products with all of them read."""

    def packed(self) -> ExpertFormat:
        """The same in the format that products want, once they have their values; perhaps self."""

    def new_workspace(self, like: torch.Tensor, top_k: int) -> torch.Tensor:
        """Scratch for `product` of as many rows as `like` [T, H] has."""

    def product(
        self,
        x: torch.Tensor,
        routing: ops.Routing,
        *,
        out: torch.Tensor,
        workspace: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
        act: ops.Activation = ops.Activation.SILU,
    ) -> torch.Tensor:
        """`ops.fused_moe` of rows x [T, H] with these experts."""


class DenseExperts:
    """Row-major w13 [L, 2 I, H], gate rows first, and w2 [L, H, I]."""

    __slots__ = ("w2", "w13")

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        self.w13, self.w2 = w13, w2

    @property
    def nbytes(self) -> int:
        return self.w13.nbytes + self.w2.nbytes

    def packed(self) -> ExpertFormat:
        return self

    def new_workspace(self, like: torch.Tensor, top_k: int) -> torch.Tensor:
        return ops.new_fused_moe_workspace(like, top_k, self.w13)

    def product(
        self,
        x: torch.Tensor,
        routing: ops.Routing,
        *,
        out: torch.Tensor,
        workspace: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        addend: torch.Tensor | None = None,
        act: ops.Activation = ops.Activation.SILU,
    ) -> torch.Tensor:
        return ops.fused_moe(
            x,
            self.w13,
            self.w2,
            *routing,
            expert_map=expert_map,
            addend=addend,
            act=act,
            out=out,
            workspace=workspace,
        )
