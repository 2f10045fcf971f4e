# SPDX-License-Identifier: Apache-2.0
"""Weights that are drawn as if they were read, for tests and measurements without a checkpoint.

A value depends on the seed, the name of its tensor in checkpoints and its place there alone: ranks draw
their parts of one model, and what is quantised is never whole in its dtype.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffulex.checkpoint.loader import copy_values, slices_of, weight_table_of
from diffulex.checkpoint.tensor_files import CodedTensor
from diffulex.checkpoint.tensor_reader import TensorReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Final

    from diffulex.checkpoint.loader import WeightSink

__all__ = ["draw_weights"]

#: Values that are drawn at once, unless a row is longer.
_CHUNK_VALUES: Final = 8 << 20
#: Rows of a matrix that are drawn at once are a multiple of this, as blocks of low precision are.
_ROW_MULTIPLE: Final = 128
#: Around 1, where `std` is that of matrices and biases around 0.
_SCALE_STD: Final = 0.1


@dataclass(frozen=True, slots=True)
class _DrawnTensor(CodedTensor):
    """A tensor of a checkpoint that does not exist.

    Attributes:
        name: in the checkpoint.
        generator: on the device of the values.
        values: their dtype.
    """

    name: str
    generator: torch.Generator
    values: torch.dtype
    seed: int
    std: float

    @property
    def rows_per_piece(self) -> int:
        rows = _CHUNK_VALUES // max(1, math.prod(self.shape[1:]))
        unit = _ROW_MULTIPLE if len(self.shape) == 2 else 1
        return max(unit, rows // unit * unit)

    def pieces(
        self, reader: TensorReader, num_rows: int | None, wanted: slice | None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        wanted = slice(0, self._num_rows) if wanted is None else wanted
        step = num_rows or self.rows_per_piece
        for start in range(wanted.start, wanted.stop, step):
            rows = slice(start, min(start + step, wanted.stop))
            values = self._rows(rows)
            yield rows, values if self.shape else values.view(())

    @property
    def _num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def _rows(self, rows: slice) -> torch.Tensor:
        size = self.rows_per_piece
        chunks = [
            self._chunk(first)[max(0, rows.start - first) : rows.stop - first]
            for first in range(rows.start // size * size, rows.stop, size)
        ]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def _chunk(self, first: int) -> torch.Tensor:
        """The rows from `first` on that are drawn at once, whichever of them are wanted."""
        text = f"{self.seed} {self.name} {first}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        self.generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        count = min(self.rows_per_piece, self._num_rows - first)
        shape, device = (count, *self.shape[1:]), self.generator.device
        is_scale = len(self.shape) < 2 and not self.name.endswith("bias")
        mean, std = (1.0, _SCALE_STD) if is_scale else (0.0, self.std)
        values = torch.empty(shape, dtype=self.values, device=device)
        return values.normal_(mean, std, generator=self.generator)


def draw_weights(
    model: Any,
    seed: int,
    std: float = 0.02,
    sinks: Mapping[str, WeightSink] | None = None,
    on_piece: Callable[[], None] = lambda: None,
) -> None:
    """Fills a model, or the part of one that a rank has, as `loader.load_weights` does.

    Matrices and biases are N(0, std^2), norms and other scales 1 + N(0, 0.1^2), drawn in the dtype of
    the model. The head is tied when the description says so.

    Args:
        model: a `LoadableModel`.
        sinks: name -> what takes the values instead of the tensor in the weight table.
        on_piece: as for `TensorReader`.
    """
    sinks = sinks or {}
    if model.spec.tie_word_embeddings:
        model.tie_embeddings()
    table = weight_table_of(model, {})
    if model.spec.tie_word_embeddings:
        table.pop(model.spec.names.head, None)
    device = next(target.device for target in table.values() if not target.is_meta)
    generator, reader = torch.Generator(device=device), TensorReader("cpu", on_piece)
    for name, part in slices_of(model, table).items():
        target = table[name]
        drawn = _DrawnTensor(
            file=Path(),
            shape=part.shape,
            dtype="drawn",
            offset=0,
            num_bytes=0,
            name=name,
            generator=generator,
            values=target.dtype,
            seed=seed,
            std=std,
        )
        copy_values(name, drawn, reader, target, part, sinks.get(name))
    finish = getattr(model, "finish_loading", None)
    if finish is not None:
        finish()
