# SPDX-License-Identifier: Apache-2.0
"""Products with weight matrices, packed on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from diffulex import ops
from diffulex.checkpoint.projection import Projection
from diffulex.nn.low_rank import LowRankUpdates

if TYPE_CHECKING:
    from collections.abc import Sequence


class MatrixProduct(nn.Module):
    """Base of the layers that multiply rows by a weight matrix W [N, K].

    On the CPU in float32, `pack` replaces the row-major matrix by the panels of
    `ops.linear_packed`; `weight` is None from then on, unless another layer shares it. The first
    product packs if nobody did before. `row_major` undoes it, so a layer can be filled again at any
    time. Other dtypes and CUDA keep the row-major matrix and torch's product.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.num_rows = out_features
        matrix = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight: nn.Parameter | None = nn.Parameter(matrix, requires_grad=False)
        self._panels: torch.Tensor | None = None
        self.dtype, self.device = dtype, matrix.device
        self._is_packable = dtype == torch.float32 and matrix.device.type == "cpu"
        self._is_shared = False
        is_half = dtype in (torch.bfloat16, torch.float16)
        self._has_few_rows = is_half and ops.has_hopper_kernels(matrix.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix that a product reads."""
        matrix = self.weight if self._panels is None else self._panels
        return 0 if matrix is None else matrix.nbytes

    def pack(self) -> None:
        """Packs the matrix where that is useful; call it once the matrix has its values."""
        if not self._is_packable or self._panels is not None:
            return
        self._panels = ops.pack_weight(self.row_major())
        if not self._is_shared:
            self.weight = None

    def row_major(self) -> nn.Parameter:
        """The matrix [N, K], for reading and writing; drops the panels."""
        if self.weight is None:
            if self._panels is None:
                raise RuntimeError("diffulex: weight: expected a matrix or its panels, got none")
            matrix = ops.unpack_weight(self._panels, self.num_rows)
            self.weight = nn.Parameter(matrix, requires_grad=False)
        self._panels = None
        return self.weight

    def share(self, weight: nn.Parameter) -> None:
        """Uses the row-major matrix of another layer from now on; packing leaves it alone."""
        self.weight = weight
        self._panels = None
        self._is_shared = True

    def _takes_few_rows(self, x: torch.Tensor) -> bool:
        """Whether `ops.linear_few_rows` is the faster product for x [T, K]."""
        return self._has_few_rows and ops.is_few_rows(x.size(0), self.num_rows, x.size(1))

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W^T + bias of x [T, K], in `out` [T, N] if given."""
        if self._is_packable and self._panels is None:
            self.pack()
        if self._panels is not None:
            product = ops.linear_packed(x, self._panels, self.num_rows, out=out)
            return product if bias is None else product.add_(bias)
        weight = self.row_major()
        if self._takes_few_rows(x):
            return ops.linear_few_rows(x, weight, bias, out=out)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)


class Linear(MatrixProduct):
    """``y = x W^T + b`` where the rows of W stack one or several projections.

    Projections of one input (q, k, v or gate, up) are stored as one matrix, so that they cost one
    product; `part` gives the rows of one of them to the loader.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        rows = sum(out_features)
        super().__init__(in_features, rows, dtype=dtype, device=device)
        self.out_features = tuple(out_features)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(
                torch.empty(rows, dtype=dtype, device=device), requires_grad=False
            )
        self.updates: LowRankUpdates | None = None

    def rows_of(self, index: int) -> slice:
        """Rows of the weight that projection `index` has."""
        start = sum(self.out_features[:index])
        return slice(start, start + self.out_features[index])

    def part(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Views of the weight rows and bias entries of projection `index`; undoes packing."""
        rows = self.rows_of(index)
        return self.row_major()[rows], None if self.bias is None else self.bias[rows]

    def whole(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of all projections together; undoes packing."""
        return self.row_major(), self.bias

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the product of x [T, in] to `out` [T, sum of out_features] and returns it."""
        self.multiply(x, out, self.bias)
        if self.updates is not None:
            self.updates(x, out)
        return out

    def forward_gated(self, x: torch.Tensor, act: ops.Activation, out: torch.Tensor) -> bool:
        """Writes ``act(gate) * up`` of x [T, in] to `out` [T, I] where one kernel computes both.

        The layer holds gate, then up. False, with nothing written, where it takes two kernels.
        """
        can = self.bias is None and self.updates is None and self._takes_few_rows(x)
        if can:
            ops.linear_few_rows(x, self.row_major(), act=act, out=out)
        return can

    def add_update(self, rows: slice, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Lets the output columns `rows` gain ``scale * (x a^T) b^T``; the weight stays."""
        if self.updates is None:
            self.updates = LowRankUpdates()
        dtype, device = self.dtype, self.device
        self.updates.append(rows, a.to(device, dtype), b.to(device, dtype), scale)


def named_projections(linear: Linear, names: Sequence[str]) -> dict[str, Projection]:
    """The projections of a layer that are stored as one tensor each, under their module names."""
    sizes = linear.out_features
    return {
        name: Projection(linear, linear.rows_of(index), f"{name}.weight", slice(0, sizes[index]))
        for index, name in enumerate(names)
    }


def pack_weights(model: nn.Module) -> None:
    """Packs every product of a model whose weights are complete, one matrix at a time.

    Without it the first forward would do so, and take much longer than the next ones.
    """
    for module in model.modules():
        if isinstance(module, MatrixProduct):
            module.pack()
