# SPDX-License-Identifier: Apache-2.0
"""Which weights are held in low precision, and in which form. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

__all__ = ["GROUP_SIZES", "SCHEMES", "QuantizationPlan"]

#: Of weights: e4m3 with a scale per row or per block, int8 with a scale per row, 4 bits in groups.
SCHEMES = ("fp8", "fp8_block", "int8", "int4")
GROUP_SIZES = (32, 64, 128)
#: Columns of rows that are multiplied that share a scale in 8 bits.
_ROW_GROUP = 128
#: The smallest matrix worth it.
_LEAST_SIZE = 32
#: Layers of the generic form that keep their dtype, as published checkpoints in low precision do.
_KEPT = ("*.self_conditioning.*",)


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """What the configuration asks for.

    Attributes:
        scheme: one of `SCHEMES`.
        group_size: columns that share a scale of int4.
        ignore: patterns of module names in the checkpoint that keep the compute dtype.
        quantize_head: the output head as well, unless it is tied to the embedding.
    """

    scheme: str
    group_size: int = 128
    ignore: tuple[str, ...] = ()
    quantize_head: bool = False

    @classmethod
    def of(cls, model: Any) -> QuantizationPlan | None:
        """What the section `model` of a configuration asks for; None: nothing."""
        if model.quantization not in SCHEMES:
            return None
        return cls(
            model.quantization,
            model.quantization_group_size,
            model.quantization_ignore,
            model.quantize_head,
        )

    @property
    def unit(self) -> int:
        """At multiples of this ranks cut the widths of a model, to have whole groups of columns."""
        return max(64, self.group_size) if self.scheme == "int4" else _ROW_GROUP

    @property
    def expert_unit(self) -> int:
        """The same for routed experts, whose products take this many columns at a time."""
        return _ROW_GROUP

    def shared_columns(self, depth: int) -> int:
        """Columns that share a scale, of a matrix with rows of `depth` or of what it multiplies."""
        return self.group_of(depth) if self.scheme == "int4" else _ROW_GROUP

    def takes(self, module: str, rows: int, depth: int) -> bool:
        """Whether the projection [rows, depth] of this name in the checkpoint is quantised by itself."""
        return self.is_large(rows, depth) and not self.names(module)

    @staticmethod
    def is_large(rows: int, depth: int) -> bool:
        """Whether a projection is worth it."""
        return min(rows, depth) >= _LEAST_SIZE

    def names(self, module: str) -> bool:
        """Whether the module of this name in the checkpoint keeps its dtype."""
        return any(fnmatch(module, pattern) for pattern in (*_KEPT, *self.ignore))

    def group_of(self, depth: int) -> int:
        """Columns that share a scale of int4: the largest legal size that divides the row, else the row."""
        fitting = (size for size in GROUP_SIZES[::-1] if size <= self.group_size)
        return next((size for size in fitting if depth % size == 0), depth)
