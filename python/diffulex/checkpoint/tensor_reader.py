# SPDX-License-Identifier: Apache-2.0
"""Reads stored tensors piece by piece, so that a shard never lies in memory as a whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from diffulex.checkpoint.tensor_files import CodedTensor
from diffulex.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from diffulex.checkpoint.tensor_files import StoredTensor

__all__ = ["TENSOR_DTYPES", "TensorReader", "is_loadable"]

#: Name in a safetensors header -> dtype, for the types weights are loaded from.
TENSOR_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
#: And those of parts of matrices in low precision, which are no values by themselves.
_PART_DTYPES = {
    **TENSOR_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
#: Bytes of a piece, unless a single row is longer.
_PIECE_BYTES = 32 << 20


def is_loadable(stored: StoredTensor) -> bool:
    """Whether it has values that weights are loaded from."""
    return stored.dtype in TENSOR_DTYPES or isinstance(stored, CodedTensor)


class TensorReader:
    """Reads rows into one staging buffer, which is pinned when they go on to a CUDA device.

    Args:
        device: where they go.
        on_piece: called before each piece; ends the reading by what it raises.
    """

    def __init__(
        self, device: torch.device | str, on_piece: Callable[[], None] = lambda: None
    ) -> None:
        self._on_piece = on_piece
        self._is_pinned = torch.device(device).type == "cuda"
        self._staging = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def rows_per_piece(stored: StoredTensor) -> int:
        """Rows, that is entries of the first dimension, that are read at once."""
        if isinstance(stored, CodedTensor):
            return stored.rows_per_piece
        return max(1, _PIECE_BYTES // max(1, _row_bytes(stored)))

    def pieces(
        self, stored: StoredTensor, num_rows: int | None = None, wanted: slice | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Ranges of rows with their values, which are valid until the next piece.

        A scalar is one row. Only the rows `wanted` are read; None: all of them. The values are on the
        CPU; a copy to a device must be awaited.

        Raises:
            CheckpointError: the file ends early or cannot be read.
        """
        for piece in self._pieces(stored, num_rows, wanted):
            self._on_piece()
            yield piece

    def _pieces(
        self, stored: StoredTensor, num_rows: int | None, wanted: slice | None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        if isinstance(stored, CodedTensor):
            yield from stored.pieces(self, num_rows, wanted)
            return
        step = num_rows or self.rows_per_piece(stored)
        wanted = slice(0, stored.shape[0] if stored.shape else 1) if wanted is None else wanted
        row_bytes = _row_bytes(stored)
        dtype, row_shape = _PART_DTYPES[stored.dtype], stored.shape[1:]
        try:
            with stored.file.open("rb", buffering=0) as file:
                file.seek(stored.offset + wanted.start * row_bytes)
                for start in range(wanted.start, wanted.stop, step):
                    rows = slice(start, min(start + step, wanted.stop))
                    count = rows.stop - rows.start
                    staging = self._reserve(count * row_bytes)
                    view = staging.numpy().data
                    while view:
                        size = file.readinto(view)
                        if not size:
                            raise CheckpointError(f"checkpoint: {stored.file}: ends early")
                        view = view[size:]
                    shape = (count, *row_shape) if stored.shape else ()
                    yield rows, staging.view(dtype).view(shape)
        except OSError as error:
            raise CheckpointError(f"checkpoint: cannot read {stored.file}: {error}") from error

    def _reserve(self, num_bytes: int) -> torch.Tensor:
        if self._staging.numel() < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        return self._staging[:num_bytes]


def _row_bytes(stored: StoredTensor) -> int:
    return math.prod(stored.shape[1:]) * _PART_DTYPES[stored.dtype].itemsize
