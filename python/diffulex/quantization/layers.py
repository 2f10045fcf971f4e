# SPDX-License-Identifier: Apache-2.0
"""Gives the layers of a model formats of low precision, and the loader what fills them.

The model is built with its large matrices on the meta device. Those that the plan takes get a format
in low precision, the others their memory; a matrix never exists in both.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diffulex.errors import ConfigError
from diffulex.log import get_logger
from diffulex.nn.embedding import OutputHead
from diffulex.nn.linear import MatrixProduct
from diffulex.nn.weights import DenseExperts, deferred_weights
from diffulex.ops import WeightScheme
from diffulex.quantization.weights import QuantizedExperts, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from diffulex.quantization.scheme import QuantizationPlan

__all__ = ["ModelQuantizer", "Sink"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sink:
    """Takes the rows of a stored tensor [N, K], or the matrices of one [E, N, K], and quantises them."""

    weights: tuple[QuantizedWeight, ...]
    first_row: int = 0

    @property
    def row_multiple(self) -> int:
        """Rows that are written at once are as many as this, a multiple, or the last ones."""
        return self.weights[0].row_multiple

    def write(self, rows: slice, values: torch.Tensor) -> None:
        """Writes values [n, K] at rows of the tensor, or [n, N, K] at its matrices."""
        if values.dim() == 2:
            self.weights[0].write(self.first_row + rows.start, values)
            return
        for weight, matrix in zip(self.weights[rows], values, strict=True):
            weight.write(self.first_row, matrix)


@dataclass(frozen=True, slots=True)
class _Place:
    """A stored tensor that fills rows of a matrix, or of several experts' matrices."""

    name: str
    #: Of the first matrix, and how many there are.
    first_matrix: int
    num_matrices: int
    rows: slice
    depth: int

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @classmethod
    def of(cls, name: str, target: torch.Tensor, matrix_rows: int) -> _Place:
        """From a view of a matrix [N, K] or of a stack [E, N, K] of `matrix_rows` rows each."""
        depth = target.size(-1)
        start = target.storage_offset() // depth
        count = target.size(0) if target.dim() == 3 else 1
        first = start % matrix_rows
        return cls(name, start // matrix_rows, count, slice(first, first + target.size(-2)), depth)


class ModelQuantizer:
    """Applies a plan to models."""

    def __init__(self, plan: QuantizationPlan) -> None:
        self.plan = plan
        self._scheme = WeightScheme[plan.scheme.upper()]

    @property
    def scheme(self) -> str:
        """Its name in the configuration."""
        return self.plan.scheme

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model that `make` returns, its large matrices without memory."""
        with deferred_weights():
            return make()

    def saved_bytes(
        self, model: nn.Module, table: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> int:
        """What the plan saves of a model, which may be on the meta device."""
        saved = 0
        for owner, matrix, places in self._chosen(model, table):
            count = matrix.size(0) if matrix.dim() == 3 else 1
            held = self._new_weight(owner, matrix, places, "meta").nbytes
            saved += matrix.numel() * dtype.itemsize - count * held
        return saved

    def apply(
        self, model: nn.Module, table: Mapping[str, torch.Tensor], device: torch.device | str
    ) -> dict[str, Sink]:
        """Gives every matrix on the meta device its memory.

        Returns:
            Name in the checkpoint -> what fills a matrix in low precision.

        Raises:
            ConfigError: `quantization_ignore` names a part of a matrix, one of the two matrices of
                experts, or nothing, or the plan takes no matrix.
        """
        sinks: dict[str, Sink] = {}
        taken: dict[int, list[tuple[QuantizedWeight, ...]]] = {}
        for owner, matrix, places in self._chosen(model, table):
            count = matrix.size(0) if matrix.dim() == 3 else 1
            weights = tuple(self._new_weight(owner, matrix, places, device) for _ in range(count))
            taken.setdefault(id(owner), []).append(weights)
            for place in places:
                chosen = weights[place.first_matrix : place.first_matrix + place.num_matrices]
                sinks[place.name] = Sink(chosen, place.rows.start)
        for module in model.modules():
            _give_memory(module, taken.get(id(module)), device)
        return sinks

    def quantize(self, model: nn.Module, table: Mapping[str, torch.Tensor]) -> None:
        """Quantises a model that has its values."""
        values = dict(table)
        device = next(iter(values.values())).device
        for name, sink in self.apply(model, values, device).items():
            target = values[name]
            sink.write(slice(0, target.size(0)), target)

    def _chosen(
        self, model: nn.Module, table: Mapping[str, torch.Tensor]
    ) -> list[tuple[nn.Module, torch.Tensor, list[_Place]]]:
        """The matrices that the plan takes."""
        found = list(self._matrices(model, table))
        self._check_ignored([name.removesuffix(".weight") for name in table])
        chosen = [entry for entry in found if self._takes(*entry)]
        if not chosen:
            raise ConfigError(
                f"quantization: expected a model with matrices to quantise, got none for"
                f" {self.plan.scheme}"
            )
        num_taken = Counter(id(owner) for owner, _, _ in chosen)
        for owner, _, places in found:
            if num_taken[id(owner)] not in (0, len(_large(owner))):
                raise ConfigError(
                    f"quantization_ignore: expected all or none of the matrices of the experts of"
                    f" {places[0].module}, got some"
                )
        return chosen

    def _check_ignored(self, modules: list[str]) -> None:
        for pattern in self.plan.ignore:
            if not any(fnmatch(module, pattern) for module in modules):
                raise ConfigError(
                    f"quantization_ignore: expected patterns of the checkpoint's modules, as in"
                    f" {modules[-1]!r}, got {pattern!r}, which matches none"
                )

    def _matrices(
        self, model: nn.Module, table: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[nn.Module, torch.Tensor, list[_Place]]]:
        """Large matrices, their modules and the stored tensors that fill them."""
        views: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, target in table.items():
            base = target if target._base is None else target._base
            views.setdefault(id(base), []).append((name, target))
        for module in model.modules():
            for matrix in _large(module):
                found = views.get(id(matrix), [])
                places = [_Place.of(name, view, matrix.size(-2)) for name, view in found]
                if places:
                    yield module, matrix, places

    def _takes(self, owner: nn.Module, matrix: torch.Tensor, places: list[_Place]) -> bool:
        plan = self.plan
        if isinstance(owner, OutputHead) and (not plan.quantize_head or owner.is_shared):
            return False
        parts = list(itertools.pairwise(_boundaries(owner, matrix, places)))
        taken = {
            all(
                plan.takes(place.module, stop - start, place.depth)
                for start, stop in parts
                if place.rows.start <= start < place.rows.stop
            )
            for place in places
        }
        if len(taken) > 1:
            names = ", ".join(place.module for place in places[:4])
            raise ConfigError(
                f"quantization_ignore: expected all or none of {names}, which are one matrix, got some"
            )
        return taken == {True}

    def _new_weight(
        self,
        owner: nn.Module,
        matrix: torch.Tensor,
        places: list[_Place],
        device: torch.device | str,
    ) -> QuantizedWeight:
        """For one matrix, or for one of a stack."""
        depth, scheme = matrix.size(-1), self._scheme_of(owner)
        bounds = _boundaries(owner, matrix, places)
        sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
        group = self.plan.group_of(depth) if scheme == WeightScheme.INT4 else 0
        return QuantizedWeight(sizes, depth, scheme, group, device)

    def _scheme_of(self, owner: nn.Module) -> WeightScheme:
        """An output head does not bear 4 bits."""
        is_int4 = self._scheme == WeightScheme.INT4
        return WeightScheme.INT8 if is_int4 and isinstance(owner, OutputHead) else self._scheme


def _boundaries(owner: nn.Module, matrix: torch.Tensor, places: list[_Place]) -> list[int]:
    """Where the projections of a matrix begin, and the end of the last."""
    rows = matrix.size(-2)
    bounds = {place.rows.start for place in places} | {rows}
    if matrix is getattr(owner, "w13", None):
        bounds.add(rows // 2)  # gate and up of experts may be one stored tensor
    return sorted(bounds)


def _large(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """The matrices of a module that may be on the meta device."""
    if isinstance(module, MatrixProduct):
        return () if module.weight is None else (module.weight,)
    if isinstance(getattr(module, "matrices", None), DenseExperts):
        experts: Any = module
        return (experts.w13, experts.w2)
    return ()


def _give_memory(
    module: Any, weights: list[tuple[QuantizedWeight, ...]] | None, device: torch.device | str
) -> None:
    """Formats in low precision where there are any, memory for matrices that have none yet."""
    if isinstance(module, MatrixProduct):
        if weights is not None:
            module.quantize(weights[0][0])
        elif module.weight is not None and module.weight.is_meta:
            module.fill(torch.empty_like(module.weight, device=device))
    elif isinstance(getattr(module, "matrices", None), DenseExperts):
        if weights is not None:
            w13, w2 = weights
            module.w13, module.w2 = _stand_in(module.w13), _stand_in(module.w2)
            module.matrices = QuantizedExperts(w13, w2)
        elif module.w13.is_meta:
            for name in ("w13", "w2"):
                matrix = torch.empty_like(getattr(module, name), device=device)
                setattr(module, name, nn.Parameter(matrix, requires_grad=False))
            module.matrices = DenseExperts(module.w13, module.w2)


def _stand_in(matrix: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(matrix.to("meta"), requires_grad=False)
