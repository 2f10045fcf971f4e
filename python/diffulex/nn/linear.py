# SPDX-License-Identifier: Apache-2.0
"""Products with weight matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from diffulex.checkpoint.projection import Projection
from diffulex.checkpoint.slices import WeightSlice
from diffulex.nn.experts import RoutedExperts
from diffulex.nn.low_rank import LowRankUpdates
from diffulex.nn.partition import WHOLE
from diffulex.nn.weights import DenseWeight, InvariantWeight, new_parameter, weight_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex import ops
    from diffulex.nn.partition import Partition
    from diffulex.nn.weights import LowPrecisionFormat, WeightFormat


class MatrixProduct(nn.Module):
    """Base of the layers that multiply rows by a weight matrix W [N, K].

    The layer holds a `WeightFormat`. `pack` changes it to the one that products want, for which
    float32 on the CPU needs another layout; `weight` is None from then on, unless another layer shares
    it. The first product packs if no caller of `pack` did before. `row_major` undoes it, so a layer can be filled
    again at any time.
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
        matrix = torch.empty(out_features, in_features, dtype=dtype, device=weight_device(device))
        #: The row-major matrix, where there is one.
        self.weight: nn.Parameter | None = nn.Parameter(matrix, requires_grad=False)
        self._dense: type[DenseWeight] = DenseWeight
        self.format: WeightFormat = DenseWeight(self.weight)
        self.dtype, self.device = dtype, torch.device(device)
        #: The matrix is that of another layer.
        self.is_shared = False
        self._stand_in: LowPrecisionFormat | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix that a product reads."""
        return self.format.nbytes

    def pack(self) -> None:
        """Gives the matrix the format of products; call it once the matrix has its values."""
        packed = self.format.packed()
        if packed is self.format:
            return
        self.format = packed
        if not self.is_shared:
            self.weight = None

    def fill(self, matrix: torch.Tensor) -> None:
        """Takes the row-major matrix [N, K] in place of any other format."""
        self.weight = nn.Parameter(matrix, requires_grad=False)
        self.format, self._stand_in = self._dense(self.weight), None

    def quantize(self, quantized: LowPrecisionFormat) -> None:
        """Takes a format that only its own writer fills; `weight` tells the shape and has no values."""
        assert self.weight is not None
        self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)
        self.format = self._stand_in = quantized
        quantized.is_batch_invariant = self._dense is InvariantWeight

    def row_major(self) -> nn.Parameter:
        """The matrix [N, K], for reading and writing; drops every other format of it.

        Of a layer in low precision, what has its shape.
        """
        if self._stand_in is not None and self.weight is not None:
            return self.weight
        if self.weight is None:
            self.weight = nn.Parameter(self.format.row_major(), requires_grad=False)
        self.format = self._dense(self.weight)
        return self.weight

    def share(self, weight: nn.Parameter) -> None:
        """Uses the row-major matrix of another layer from now on; packing leaves it alone."""
        self.weight = weight
        self.format = self._dense(weight)
        self.is_shared, self._stand_in = True, None

    def set_batch_invariant(self, is_invariant: bool) -> None:
        """Says whether a row of a product may depend on the other rows, as it may at first.

        Raises:
            ConfigError: every product with the matrix lets it.
        """
        dense = InvariantWeight if is_invariant else DenseWeight
        if dense is not self._dense:
            self._dense = dense
            self.row_major()
        if self._stand_in is not None:
            self._stand_in.is_batch_invariant = is_invariant

    def new_rows(self, x: torch.Tensor) -> ops.QuantizedRows | None:
        """Memory for the codes of x [T, K] that products take beside it; None: they take none."""
        return self.format.new_rows(x)

    def multiply(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        rows: ops.QuantizedRows | None = None,
    ) -> torch.Tensor:
        """x W^T + bias of x [T, K], in `out` [T, N] if given.

        `rows`: those of `new_rows` with the codes of x, where whoever made x has them.
        """
        self.pack()
        return self.format.product(x, out, bias, rows)


class Linear(MatrixProduct):
    """``y = x W^T + b`` where the rows of W stack one or several projections.

    Projections of one input (q, k, v or gate, up) are stored as one matrix, so that they cost one
    product; `part` gives the rows of one of them to the loader. Sizes are those of the whole weight, of
    which the layer has what its partition says.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
        partition: Partition = WHOLE,
    ) -> None:
        #: Columns and rows of each projection in the stored weights.
        self.stored_columns = partition.columns(in_features)
        self.stored_rows = tuple(partition.rows(size) for size in out_features)
        self._stored_sizes = in_features, tuple(out_features)
        self.out_features = tuple(part.stop - part.start for part in self.stored_rows)
        rows = sum(self.out_features)
        num_columns = self.stored_columns.stop - self.stored_columns.start
        super().__init__(num_columns, rows, dtype=dtype, device=device)
        self.partition = partition
        # Partial sums are added over the ranks, and a bias must be in one of them.
        self._adds_bias = not partition.has_partial_sums or partition.shard.rank == 0
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = new_parameter(rows, dtype=dtype, device=device)
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

    def stored_part(self, index: int | None = None) -> WeightSlice:
        """What the layer has of the stored weight of projection `index`; None: of all of them, one after
        another."""
        num_columns, sizes = self._stored_sizes
        rows, start = [], 0
        for number, size in enumerate(sizes):
            part = self.stored_rows[number]
            if index in (None, number):
                offset = start if index is None else 0
                rows.append(slice(part.start + offset, part.stop + offset))
            start += size
        total = sum(sizes) if index is None else sizes[index]
        return WeightSlice((total, num_columns), tuple(rows), self.stored_columns)

    def slices(self, name: str, index: int | None = None) -> dict[str, WeightSlice]:
        """What the layer has of the stored tensors ``name.weight`` and ``name.bias``.

        Args:
            name: of the module in the checkpoint.
            index: the projection it stores; None: all of them, one after another.
        """
        part = self.stored_part(index)
        table = {f"{name}.weight": part}
        if self.bias is not None:
            table[f"{name}.bias"] = WeightSlice(part.shape[:1], part.rows)
        return table

    def new_rows(self, x: torch.Tensor) -> ops.QuantizedRows | None:
        rows = super().new_rows(x)
        return rows if rows is None else rows._replace(codes_only=self.updates is None)

    def forward(
        self, x: torch.Tensor, out: torch.Tensor, rows: ops.QuantizedRows | None = None
    ) -> torch.Tensor:
        """Writes the product of x [T, in] to `out` [T, sum of out_features] and returns it; for `rows`
        see `multiply`."""
        self.multiply(x, out, self.bias if self._adds_bias else None, rows)
        if self.updates is not None:
            self.updates(x, out)
        return out

    def forward_gated(
        self,
        x: torch.Tensor,
        act: ops.Activation,
        out: torch.Tensor,
        rows: ops.QuantizedRows | None = None,
    ) -> bool:
        """Writes ``act(gate) * up`` of x [T, in] to `out` [T, I] where one kernel computes both.

        The layer holds gate, then up. False, with nothing written, where it takes two kernels; for
        `rows` see `multiply`.
        """
        if self.bias is not None or self.updates is not None:
            return False
        return self.format.gated_product(x, act, out, rows)

    def add_update(self, rows: slice, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Lets the output columns `rows` gain ``scale * (x a^T) b^T``; the weight stays."""
        if self.updates is None:
            self.updates = LowRankUpdates()
        dtype, device = self.dtype, self.device
        self.updates.append(rows, a.to(device, dtype), b.to(device, dtype), scale)


def named_projections(linear: Linear, names: Sequence[str]) -> dict[str, Projection]:
    """The projections of a layer that are stored as one tensor each, under their module names."""
    table = {}
    for index, name in enumerate(names):
        part = linear.stored_part(index)
        rows = slice(0, part.shape[0])
        table[name] = Projection(linear, linear.rows_of(index), f"{name}.weight", rows, part)
    return table


def set_batch_invariant(model: nn.Module, is_invariant: bool) -> None:
    """Says whether a row of the products of a model may depend on the other rows.

    Raises:
        ConfigError: every product with one of its matrices lets it.
    """
    for module in model.modules():
        if isinstance(module, MatrixProduct):
            module.set_batch_invariant(is_invariant)
        elif isinstance(module, RoutedExperts):
            module.is_batch_invariant = is_invariant


def pack_weights(model: nn.Module) -> None:
    """Packs every product of a model whose weights are complete, one matrix at a time.

    Without it the first forward would do so, and take much longer than the next ones.
    """
    for module in model.modules():
        if isinstance(module, MatrixProduct):
            module.pack()
        pack_experts = getattr(getattr(module, "matrices", None), "packed", None)
        if pack_experts is not None:
            pack_experts()
