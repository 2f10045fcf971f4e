# SPDX-License-Identifier: Apache-2.0
"""Where new weights come from: tensors of the caller, or the files of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from diffulex.checkpoint.loader import are_equal, check_finite, find_stored
from diffulex.checkpoint.tensor_files import CodedTensor, is_ignored
from diffulex.checkpoint.tensor_reader import TENSOR_DTYPES, TensorReader, is_loadable
from diffulex.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["FileSource", "TensorSource", "WeightSource"]


class WeightSource(Protocol):
    """Named values, read in pieces."""

    #: Whether it must have a value for every weight of the model.
    is_complete: bool
    #: Shapes by the names of the model's weight table.
    shapes: dict[str, tuple[int, ...]]

    def check(self, name: str, dtype: torch.dtype) -> None:
        """Raises CheckpointError for a type that is no weight's, and for values not finite as `dtype`."""

    def is_coded(self, name: str) -> bool:
        """Whether it is in low precision already."""

    def pieces(
        self, name: str, rows: slice, multiple: int = 1
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Ranges of `rows` with their values, valid until the next piece; a scalar is one row.

        All but the last range have a multiple of `multiple` rows.
        """

    def has_equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same values."""


class TensorSource:
    """Tensors of the caller, on any device.

    Args:
        model: names them.
        tensors: by their names in checkpoints of the model; those that loading ignores are left out.
    """

    is_complete = False

    def __init__(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        canonical_name = getattr(model, "canonical_name", str)
        ignored = model.spec.names.ignored
        self._tensors: dict[str, torch.Tensor] = {}
        for given, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(
                    f"update_weights: {given}: expected a tensor, got {type(tensor).__name__}"
                )
            if is_ignored(given, ignored):
                continue
            name = canonical_name(given)
            # A state dict may have a shared tensor under each of its names.
            if name in self._tensors and not torch.equal(tensor, self._tensors[name]):
                raise CheckpointError(
                    f"update_weights: {name}: expected one tensor, got another one named {given}"
                )
            self._tensors[name] = tensor.detach()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def check(self, name: str, dtype: torch.dtype) -> None:
        tensor = self._tensors[name]
        if tensor.dtype not in TENSOR_DTYPES.values():
            legal = ", ".join(str(dtype) for dtype in TENSOR_DTYPES.values())
            raise CheckpointError(
                f"update_weights: {name}: expected one of {legal}, got {tensor.dtype}"
            )
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"update_weights: {name}: expected finite values, got NaN or infinite ones"
            )
        _check_range(tensor, name, dtype)

    def is_coded(self, name: str) -> bool:
        return False

    def pieces(
        self, name: str, rows: slice, multiple: int = 1
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        tensor = self._tensors[name]
        yield rows, tensor[rows] if tensor.dim() else tensor

    def has_equal(self, first: str, second: str) -> bool:
        one, other = self._tensors[first], self._tensors[second]
        return torch.equal(one, other.to(one.device, one.dtype))


class FileSource:
    """The safetensors files of a directory.

    Args:
        model: names the tensors.
        directory: with all weights of the model.
        device: where the values go.

    Raises:
        CheckpointError: there are no such files, or they are damaged.
    """

    is_complete = True

    def __init__(self, model: Any, directory: Path, device: torch.device) -> None:
        ignored = model.spec.names.ignored
        self._stored = {
            name: stored
            for name, stored in find_stored(model, directory).items()
            if not is_ignored(name, ignored)
        }
        self._reader = TensorReader(device)
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}

    def check(self, name: str, dtype: torch.dtype) -> None:
        stored = self._stored[name]
        if not is_loadable(stored):
            raise CheckpointError(
                f"update_weights: {name}: expected one of {', '.join(TENSOR_DTYPES)}, got"
                f" {stored.dtype}"
            )
        for _, values in self._reader.pieces(stored):
            check_finite(values, name, stored)
            _check_range(values, name, dtype)

    def is_coded(self, name: str) -> bool:
        return isinstance(self._stored[name], CodedTensor)

    def pieces(
        self, name: str, rows: slice, multiple: int = 1
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        stored = self._stored[name]
        step = max(1, self._reader.rows_per_piece(stored) // multiple) * multiple
        return self._reader.pieces(stored, step, wanted=rows)

    def has_equal(self, first: str, second: str) -> bool:
        return are_equal(self._stored[first], self._stored[second])


def _check_range(values: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    """Refuses finite values that are infinite after they are rounded to the engine's type."""
    if values.dtype == dtype or not values.numel():
        return
    ends = torch.stack(torch.aminmax(values))  # rounding keeps the order
    if not ends.to(dtype).isfinite().all():
        largest = ends.abs().max().item()
        raise CheckpointError(
            f"update_weights: {name}: expected values that {dtype} can hold, got one of {largest:g}"
        )
