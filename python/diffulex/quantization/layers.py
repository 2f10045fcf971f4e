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
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from diffulex.checkpoint.loader import find_stored, slices_of
from diffulex.checkpoint.low_precision import BLOCK, StoredMatrix
from diffulex.checkpoint.slices import WeightSlice
from diffulex.errors import CheckpointError, ConfigError
from diffulex.families.listing import kept_modules
from diffulex.log import get_logger
from diffulex.nn.embedding import OutputHead
from diffulex.nn.linear import MatrixProduct
from diffulex.nn.weights import DenseExperts, deferred_weights
from diffulex.ops import WeightScheme, has_hopper_kernels
from diffulex.quantization.experts import QuantizedExperts
from diffulex.quantization.weights import QuantizedWeight, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from diffulex.checkpoint.tensor_files import StoredTensor
    from diffulex.checkpoint.tensor_reader import TensorReader
    from diffulex.quantization.scheme import QuantizationPlan
    from diffulex.quantization.stored import StoredQuantization

__all__ = [
    "ModelQuantizer",
    "Projections",
    "Sink",
    "StoredQuantizer",
    "has_low_precision",
    "sinks_of",
]

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

    def write_part(self, part: WeightSlice, first: int, values: torch.Tensor, kept: slice) -> None:
        """Takes what a part has of whole rows [n, K], or matrices [n, N, K]; see `WeightSink`."""
        if values.dim() == 2:
            weight = self.weights[0]
            codes = weight.quantized(values)
            if not part.has_whole_rows:
                codes = codes.of_columns(part.column_ranges[0], weight.group)
            weight.write_codes(self.first_row + first, codes, kept)
            return
        for weight, matrix in zip(self.weights[first:][: len(values)], values, strict=True):
            place = self.first_row
            for rows in part.column_ranges:  # of one projection each, and whole blocks of it
                codes = weight.quantized(matrix[rows])
                if part.depth is not None:
                    codes = codes.of_columns(part.depth, weight.group)
                weight.write_codes(place, codes, slice(0, rows.stop - rows.start))
                place += rows.stop - rows.start

    def take(self, stored: StoredTensor, reader: TensorReader, part: WeightSlice) -> bool:
        """Takes a part of the tensor as it is stored, codes with scales; False, with nothing read, if it
        is not."""
        if not isinstance(stored, StoredMatrix):
            return False
        stored.check_part(part)
        if len(stored.shape) == 3:
            matrices = (found for rows in part.row_ranges for found in stored.stacked(reader, rows))
            for place, (_, codes) in enumerate(matrices):
                self.weights[place].write_codes(self.first_row, codes, slice(0, len(codes.codes)))
            return True
        first = self.first_row
        for kept, codes in stored.parts_of(reader, part):
            self.weights[0].write_codes(first, codes, kept)
            first += kept.stop - kept.start
        return True


@dataclass(frozen=True, slots=True)
class _Place:
    """A stored tensor that fills rows of a matrix, or of several experts' matrices."""

    name: str
    #: Of the first matrix, and how many there are.
    first_matrix: int
    num_matrices: int
    rows: slice
    #: What the layer has of the tensor.
    part: WeightSlice

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @classmethod
    def of(cls, name: str, target: torch.Tensor, matrix_rows: int, part: WeightSlice) -> _Place:
        """From a view of a matrix [N, K] or of a stack [E, N, K] of `matrix_rows` rows each."""
        start = target.storage_offset() // target.size(-1)
        count = target.size(0) if target.dim() == 3 else 1
        first = start % matrix_rows
        rows = slice(first, first + target.size(-2))
        return cls(name, start // matrix_rows, count, rows, part)


class Projections(NamedTuple):
    """How a stored tensor is quantised: the group of int4, and the rows of what it stacks."""

    scheme: WeightScheme
    group: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Matrix:
    """A large matrix [N, K], or a stack [E, N, K], its layer and the stored tensors that fill it."""

    owner: nn.Module
    values: torch.Tensor
    places: list[_Place]

    @property
    def count(self) -> int:
        return self.values.size(0) if self.values.dim() == 3 else 1

    @property
    def depth(self) -> int:
        """Columns of the whole matrix, of which the layer may have a part."""
        return self.places[0].part.shape[-1]

    def made_on(self, device: torch.device | str) -> torch.device | str:
        """Where its weights are made for a device: those of a stack there get their memory later."""
        is_stacked = self.values.dim() == 3 and QuantizedExperts.are_stacked(device)
        return "meta" if is_stacked else device

    @cached_property
    def places_of(self) -> list[list[_Place]]:
        """The places in each matrix of a stack, in the order of their rows."""
        found: list[list[_Place]] = [[] for _ in range(self.count)]
        for place in sorted(self.places, key=lambda place: place.rows.start):
            for index in range(place.first_matrix, place.first_matrix + place.num_matrices):
                found[index].append(place)
        return found

    def segments(
        self, index: int, bounds: Sequence[int], scheme: WeightScheme
    ) -> Iterator[tuple[_Place, int]]:
        """Rows of one matrix that are held alike, and the tensor that fills them: projections that end at
        `bounds` or with their tensor; and of blocks, what a rank has of one that begins on another."""
        for place in self.places_of[index]:
            rows = place.rows
            ends = [rows.start, *(b for b in bounds if rows.start < b < rows.stop), rows.stop]
            sizes = [stop - start for start, stop in itertools.pairwise(ends)]
            if scheme == WeightScheme.FP8_BLOCK and len(place.part.shape) == 2:
                sizes = []
                for part in place.part.row_ranges:
                    size = part.stop - part.start
                    rest = min(-part.start % BLOCK, size)
                    sizes += [rest, size - rest]
            yield from ((place, size) for size in sizes if size)


class _Quantizer:
    """What plans and stored weights have in common."""

    #: Its name in the configuration.
    scheme: str

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """The model that `make` returns, its large matrices without memory."""
        with deferred_weights():
            return make()

    def saved_bytes(
        self,
        model: nn.Module,
        table: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> int:
        """What low precision saves on a device of a model, which may be on the meta device."""
        saved = 0
        for matrix in self._chosen(model, table):
            where = matrix.made_on(device)
            weights = (self._new_weight(matrix, i, where, "meta") for i in range(matrix.count))
            held = sum(weight.nbytes for weight in weights)
            saved += matrix.values.numel() * dtype.itemsize - held
        return saved

    def apply(
        self, model: nn.Module, table: Mapping[str, torch.Tensor], device: torch.device | str
    ) -> dict[str, Sink]:
        """Gives every matrix on the meta device its memory.

        Returns:
            Name in the checkpoint -> what fills a matrix in low precision.

        Raises:
            ConfigError, CheckpointError: no matrix is in low precision, or a part of one.
        """
        sinks: dict[str, Sink] = {}
        taken: dict[int, list[tuple[QuantizedWeight, ...]]] = {}
        for matrix in self._noted(model, table):
            where = matrix.made_on(device)
            weights = tuple(self._new_weight(matrix, i, where) for i in range(matrix.count))
            taken.setdefault(id(matrix.owner), []).append(weights)
            for place in matrix.places:
                chosen = weights[place.first_matrix : place.first_matrix + place.num_matrices]
                sinks[place.name] = Sink(chosen, place.rows.start)
        for module in model.modules():
            _give_memory(module, taken.get(id(module)), device)
        return sinks

    def _chosen(self, model: nn.Module, table: Mapping[str, torch.Tensor]) -> list[_Matrix]:
        """The matrices in low precision."""
        raise NotImplementedError

    def _noted(self, model: Any, table: Mapping[str, torch.Tensor]) -> list[_Matrix]:
        """Them, with a warning where the family would keep the dtype of one."""
        chosen = self._chosen(model, table)
        modules = [place.module for matrix in chosen for place in matrix.places]
        for pattern in kept_modules(model.spec.family, self.scheme):
            if any(fnmatch(module, pattern) for module in modules):
                text = "quantization: %s of %s is not accepted for %s (docs/quantization.md)"
                logger.warning(text, self.scheme, pattern, model.spec.family)
        return chosen

    def _new_weight(
        self,
        matrix: _Matrix,
        index: int,
        device: torch.device | str,
        memory: torch.device | str | None = None,
    ) -> QuantizedWeight:
        """For a matrix, or for one of a stack; places as `QuantizedWeight` has them."""
        shapes, scheme = self._form(matrix, index, device)
        depth, dtype = matrix.values.size(-1), matrix.values.dtype
        return QuantizedWeight(shapes, depth, scheme, device, dtype, memory)

    def _form(
        self, matrix: _Matrix, index: int, device: torch.device | str
    ) -> tuple[list[Shape], WeightScheme]:
        """Rows of one matrix as they are held."""
        raise NotImplementedError


class ModelQuantizer(_Quantizer):
    """Applies a plan to models."""

    def __init__(self, plan: QuantizationPlan) -> None:
        self.plan = plan
        self.scheme = plan.scheme
        self._scheme = WeightScheme[plan.scheme.upper()]

    def stored_projections(
        self, model: nn.Module, table: Mapping[str, torch.Tensor]
    ) -> dict[str, Projections]:
        """What becomes of the stored tensors that the plan takes."""
        found = {}
        for matrix in self._noted(model, table):
            scheme, group = self._scheme_of(matrix), 0
            if scheme == WeightScheme.INT4:
                group = self.plan.group_of(matrix.depth)
            bounds = _boundaries(matrix)
            for place in matrix.places:
                inside = [b for b in bounds if place.rows.start <= b <= place.rows.stop]
                sizes = tuple(stop - start for start, stop in itertools.pairwise(inside))
                found[place.name] = Projections(scheme, group, sizes)
        return found

    def _chosen(self, model: Any, table: Mapping[str, torch.Tensor]) -> list[_Matrix]:
        found = list(_matrices(model, table))
        kept = kept_modules(model.spec.family, self.scheme)
        self._check_ignored([name.removesuffix(".weight") for name in table], kept)
        chosen = [matrix for matrix in found if self._takes(matrix)]
        if not chosen:
            raise ConfigError(
                f"quantization: expected a model with matrices to quantise, got none for"
                f" {self.plan.scheme}"
            )
        num_taken = Counter(id(matrix.owner) for matrix in chosen)
        for matrix in found:
            if num_taken[id(matrix.owner)] not in (0, len(_large(matrix.owner))):
                raise ConfigError(
                    f"quantization_ignore: expected all or none of the matrices of the experts of"
                    f" {matrix.places[0].module}, got some"
                )
        return chosen

    def _check_ignored(self, modules: list[str], kept: Sequence[str]) -> None:
        """Not every model of a family has what the family keeps."""
        for pattern in self.plan.ignore:
            if pattern not in kept and not any(fnmatch(module, pattern) for module in modules):
                raise ConfigError(
                    f"quantization_ignore: expected patterns of the checkpoint's modules, as in"
                    f" {modules[-1]!r}, got {pattern!r}, which matches none"
                )

    def _takes(self, matrix: _Matrix) -> bool:
        """Whether a matrix is quantised: no projection is too small, and no pattern names one."""
        plan, owner, places = self.plan, matrix.owner, matrix.places
        if isinstance(owner, OutputHead) and (not plan.quantize_head or owner.is_shared):
            return False
        named = {plan.names(place.module) for place in places}
        if len(named) > 1:
            names = ", ".join(place.module for place in places[:4])
            raise ConfigError(
                f"quantization_ignore: expected all or none of {names}, which are one matrix, got some"
            )
        bounds = _boundaries(matrix)[:-1]
        # Of whole projections, so that all ranks take the same.
        sizes = {
            place.part.shape[-2] // sum(place.rows.start <= b < place.rows.stop for b in bounds)
            for place in places
        }
        return named == {False} and all(plan.is_large(size, matrix.depth) for size in sizes)

    def _form(
        self, matrix: _Matrix, index: int, device: torch.device | str
    ) -> tuple[list[Shape], WeightScheme]:
        scheme = self._scheme_of(matrix, device)
        group = self.plan.group_of(matrix.depth) if scheme == WeightScheme.INT4 else 0
        segments = matrix.segments(index, _boundaries(matrix), scheme)
        return [Shape(rows, group) for _, rows in segments], scheme

    def _scheme_of(self, matrix: _Matrix, device: torch.device | str = "cpu") -> WeightScheme:
        """An output head does not bear 4 bits: it has those of 8 that the device multiplies fastest."""
        if self._scheme != WeightScheme.INT4 or not isinstance(matrix.owner, OutputHead):
            return self._scheme
        is_half = matrix.values.dtype == torch.bfloat16
        has_fp8 = is_half and has_hopper_kernels(torch.device(device))
        return WeightScheme.FP8 if has_fp8 else WeightScheme.INT8


class StoredQuantizer(_Quantizer):
    """Gives layers the weights that a checkpoint stores in low precision, as they are.

    Args:
        quantization: what the checkpoint says.
        model_dir: where its tensors are.
    """

    def __init__(self, quantization: StoredQuantization, model_dir: Path) -> None:
        self.scheme = quantization.scheme
        self._quantization, self._model_dir = quantization, model_dir
        self._stored: Mapping[str, StoredTensor] = {}

    def _chosen(self, model: Any, table: Mapping[str, torch.Tensor]) -> list[_Matrix]:
        self._stored = find_stored(model, self._model_dir)
        found = list(_matrices(model, table))
        chosen = [matrix for matrix in found if self._is_coded(matrix)]
        num_taken = Counter(id(matrix.owner) for matrix in chosen)
        for matrix in found:
            if num_taken[id(matrix.owner)] not in (0, len(_large(matrix.owner))):
                raise CheckpointError(
                    "checkpoint: expected all or none of the matrices of the experts of"
                    f" {matrix.places[0].module} in low precision, got some"
                )
        return chosen

    def _is_coded(self, matrix: _Matrix) -> bool:
        if isinstance(matrix.owner, OutputHead) and matrix.owner.is_shared:
            return False
        stored = [self._stored[place.name] for place in matrix.places]
        names = [item.scheme if isinstance(item, StoredMatrix) else item.dtype for item in stored]
        if len(set(names)) > 1 and any(isinstance(item, StoredMatrix) for item in stored):
            modules = [place.module for place in matrix.places]
            other = next(i for i, name in enumerate(names) if name != names[0])
            raise CheckpointError(
                f"checkpoint: {_common(modules)}: expected {_listed(modules)} in one format, got"
                f" {names[0]} and {names[other]}"
            )
        if isinstance(stored[0], StoredMatrix):
            return True
        for place, item in zip(matrix.places, stored, strict=True):
            rule = self._quantization.rule_of(place.module)
            if rule is not None and rule.is_strict:
                raise CheckpointError(
                    f"checkpoint: {place.name}: expected {rule.scheme}, as"
                    f" {self._quantization.where} says, got {item.dtype}"
                )
        return False

    def _form(
        self, matrix: _Matrix, index: int, device: torch.device | str
    ) -> tuple[list[Shape], WeightScheme]:
        first = self._stored[matrix.places_of[index][0].name]
        assert isinstance(first, StoredMatrix)
        scheme, shapes = WeightScheme[first.scheme.upper()], []
        for place, rows in matrix.segments(index, (), scheme):
            stored = self._stored[place.name]
            assert isinstance(stored, StoredMatrix)
            shapes.append(
                Shape(
                    rows,
                    stored.group,
                    has_exact_scale=scheme == WeightScheme.INT4 and not stored.keeps_scale,
                    has_zeros=stored.rule.has_zeros,
                    has_order=stored.has_order,
                )
            )
        return shapes, scheme


def _common(modules: Sequence[str]) -> str:
    """What the names of modules begin with."""
    parts = zip(*(module.split(".") for module in modules), strict=False)
    shared = itertools.takewhile(lambda names: len(set(names)) == 1, parts)
    return ".".join(names[0] for names in shared) or modules[0]


def _listed(modules: Sequence[str]) -> str:
    """Last names of the first few modules."""
    names = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def sinks_of(model: nn.Module, table: Mapping[str, torch.Tensor]) -> dict[str, Sink]:
    """What quantises new values for the weights in low precision of a model that is in use.

    Raises:
        ConfigError: a weight was stored in a form that quantising does not make.
    """
    held: list[tuple[torch.Tensor, tuple[QuantizedWeight, ...]]] = []
    for module in model.modules():
        if isinstance(module, MatrixProduct) and isinstance(module.format, QuantizedWeight):
            held.append((module.row_major(), (module.format,)))
        experts = getattr(module, "matrices", None)
        if isinstance(experts, QuantizedExperts):
            owner: Any = module
            held += [(owner.w13, tuple(experts.w13)), (owner.w2, tuple(experts.w2))]
    views = _views(table)
    sinks: dict[str, Sink] = {}
    for values, weights in held:
        for name, view in views.get(id(values), []):
            place = _Place.of(name, view, values.size(-2), WeightSlice.whole(view.shape))
            chosen = weights[place.first_matrix : place.first_matrix + place.num_matrices]
            if not all(weight.can_write for weight in chosen):
                raise ConfigError(
                    f"update_weights: expected weights that are quantised while loading, got"
                    f" {name} as int4 of a checkpoint"
                )
            sinks[name] = Sink(chosen, place.rows.start)
    return sinks


def has_low_precision(model: nn.Module) -> bool:
    """Whether a layer of a model holds weights in low precision."""
    held = (QuantizedWeight, QuantizedExperts)
    return any(
        isinstance(getattr(module, name, None), held)
        for module in model.modules()
        for name in ("format", "matrices")
    )


def _views(table: Mapping[str, torch.Tensor]) -> dict[int, list[tuple[str, torch.Tensor]]]:
    """Names and places in the table, by the matrix that they are in."""
    views: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, target in table.items():
        base = target if target._base is None else target._base
        views.setdefault(id(base), []).append((name, target))
    return views


def _matrices(model: Any, table: Mapping[str, torch.Tensor]) -> Iterator[_Matrix]:
    """Large matrices, with the stored tensors that fill them."""
    views, parts = _views(table), slices_of(model, table)
    for module in model.modules():
        for matrix in _large(module):
            found = views.get(id(matrix), [])
            places = [_Place.of(name, view, matrix.size(-2), parts[name]) for name, view in found]
            if places:
                yield _Matrix(module, matrix, places)


def _boundaries(matrix: _Matrix) -> list[int]:
    """Where the projections of a matrix begin, and the end of the last."""
    rows = matrix.values.size(-2)
    bounds = {place.rows.start for place in matrix.places} | {rows}
    if matrix.values is getattr(matrix.owner, "w13", None):
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
            module.matrices = QuantizedExperts(w13, w2, device)
        elif module.w13.is_meta:
            for name in ("w13", "w2"):
                matrix = torch.empty_like(getattr(module, name), device=device)
                setattr(module, name, nn.Parameter(matrix, requires_grad=False))
            module.matrices = DenseExperts(module.w13, module.w2)


def _stand_in(matrix: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(matrix.to("meta"), requires_grad=False)
