# SPDX-License-Identifier: Apache-2.0
"""Weight formats of low precision; see `diffulex.nn.weights` for what holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex import ops
from diffulex.errors import ConfigError
from diffulex.ops import WeightScheme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.nn.weights import WeightFormat

__all__ = ["QuantizedExperts", "QuantizedWeight"]


class _Part:
    """Consecutive rows of a weight, whose blocks begin with them."""

    __slots__ = ("codes", "depth", "group", "rows", "scale", "scheme")

    def __init__(
        self, rows: slice, depth: int, scheme: WeightScheme, group: int, device: torch.device
    ) -> None:
        self.rows, self.depth, self.scheme, self.group = rows, depth, scheme, group
        codes, scale = ops.weight_parts(rows.stop - rows.start, depth, scheme, group)
        self.codes = torch.empty(codes[0], dtype=codes[1], device=device)
        self.scale = torch.empty(scale[0], dtype=scale[1], device=device)

    def write(self, first: int, values: torch.Tensor) -> None:
        """Quantises rows [n, K] that begin at `first`; of blocks, whole ones or up to the end."""
        last = first + values.size(0)
        scale = self.scale[first:last]
        if self.scheme == WeightScheme.INT4:
            scale = self.scale[:, first:last]
        elif self.scheme == WeightScheme.FP8_BLOCK:
            size = ops.QUANT_GROUP
            if first % size or (last % size and last != self.codes.size(0)):
                raise ValueError(f"write: expected blocks of {size} rows, got {first}:{last}")
            scale = self.scale[first // size : -(-last // size)]
        ops.quantize_weight(
            values, self.scheme, group=self.group, out=self.codes[first:last], scale=scale
        )

    def pack(self) -> None:
        """Gives the codes the form of products."""
        if self.codes.dtype == torch.int8 and self.codes.device.type == "cpu":
            self.codes = ops.pack_int8(self.codes)

    def product(
        self,
        x: ops.QuantizedRows | torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        if isinstance(x, torch.Tensor):
            ops.linear_w4a16(x, self.codes, self.scale, bias=bias, group=self.group, out=out)
        else:
            ops.linear_scaled(x, self.codes, self.scale, bias, out=out)


class QuantizedWeight:
    """A matrix W [N, K] as codes with scales.

    Args:
        sizes: rows of the projections that W stacks; those of blocks have blocks of their own.
        depth: K.
        group: columns of a scale of int4.
    """

    __slots__ = ("_parts", "depth", "num_rows", "scheme")

    def __init__(
        self,
        sizes: Sequence[int],
        depth: int,
        scheme: WeightScheme,
        group: int,
        device: torch.device | str,
    ) -> None:
        self.scheme, self.depth, self.num_rows = scheme, depth, sum(sizes)
        is_whole = scheme != WeightScheme.FP8_BLOCK or not any(
            size % ops.QUANT_GROUP for size in sizes[:-1]
        )
        self._parts: list[_Part] = []
        start = 0
        for size in [self.num_rows] if is_whole else sizes:
            rows = slice(start, start + size)
            self._parts.append(_Part(rows, depth, scheme, group, torch.device(device)))
            start += size

    @property
    def nbytes(self) -> int:
        return sum(part.codes.nbytes + part.scale.nbytes for part in self._parts)

    @property
    def row_multiple(self) -> int:
        """Rows that are written at once are as many as this, or a multiple."""
        return ops.QUANT_GROUP if self.scheme == WeightScheme.FP8_BLOCK else 1

    def write(self, first: int, values: torch.Tensor) -> None:
        """Quantises the rows values [n, K] into the rows from `first` on."""
        if values.dtype == torch.float64:
            values = values.float()
        last = first + values.size(0)
        for part in self._parts:
            begin, end = max(first, part.rows.start), min(last, part.rows.stop)
            if begin < end:
                part.write(begin - part.rows.start, values[begin - first : end - first])

    def packed(self) -> WeightFormat:
        for part in self._parts:
            part.pack()
        return self

    def row_major(self) -> torch.Tensor:
        raise ConfigError(
            f"weights: expected quantization none to read or write them, got {self.scheme.name.lower()}"
        )

    def rows_of(self, x: torch.Tensor) -> ops.QuantizedRows | torch.Tensor:
        """Rows x [T, K] as `multiply` takes them."""
        if self.scheme == WeightScheme.INT4:
            return x
        is_int8 = self.scheme == WeightScheme.INT8
        return ops.quantize_rows(x, torch.int8 if is_int8 else torch.float8_e4m3fn)

    def multiply(
        self,
        x: ops.QuantizedRows | torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes x W^T + bias (float32) to `out` [T, N]."""
        self.packed()
        for part in self._parts:
            rows = part.rows
            part.product(x, None if bias is None else bias[rows], out[:, rows])
        return out

    def product(
        self, x: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if out is None:
            out = x.new_empty(x.size(0), self.num_rows)
        return self.multiply(self.rows_of(x), out, None if bias is None else bias.float())

    def gated_product(self, x: torch.Tensor, act: ops.Activation, out: torch.Tensor) -> bool:
        return False


class QuantizedExperts:
    """The matrices of L experts: gate and up [2 I, H], and down [H, I], of each."""

    __slots__ = ("w2", "w13")

    def __init__(self, w13: Sequence[QuantizedWeight], w2: Sequence[QuantizedWeight]) -> None:
        self.w13, self.w2 = list(w13), list(w2)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.w13, *self.w2))

    def new_workspace(self, like: torch.Tensor, top_k: int) -> torch.Tensor:
        del top_k
        return like.new_empty(0, dtype=torch.uint8)

    def product(
        self,
        x: torch.Tensor,
        routing: ops.Routing,
        *,
        out: torch.Tensor,
        workspace: torch.Tensor,
        addend: torch.Tensor | None = None,
        act: ops.Activation = ops.Activation.SILU,
    ) -> torch.Tensor:
        """`ops.fused_moe` with x quantised once a row, and the activation of each slot from float32."""
        del workspace
        top_k = routing.ids.size(1)
        rows = self.w13[0].rows_of(x)
        slot_out = x.new_zeros(x.size(0), top_k, out.size(1))
        by_slot = slot_out.view(-1, out.size(1))
        ids = routing.ids.flatten().long()
        order = ids.argsort(stable=True)
        # Slots of rows that carry no token have the expert -1.
        counts = torch.bincount(ids + 1, minlength=len(self.w13) + 1).tolist()
        start = counts[0]
        for expert, count in enumerate(counts[1:]):
            if count:
                slots = order[start : start + count]
                by_slot[slots] = self._slots(expert, rows, slots // top_k, act, x.dtype)
                start += count
        return ops.moe_combine(by_slot, *routing, addend=addend, out=out)

    def _slots(
        self,
        expert: int,
        x: ops.QuantizedRows | torch.Tensor,
        rows: torch.Tensor,
        act: ops.Activation,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """What one expert makes of some rows."""
        w13, w2 = self.w13[expert], self.w2[expert]
        if isinstance(x, torch.Tensor):
            chosen: ops.QuantizedRows | torch.Tensor = x[rows]
        else:
            # A row of float8 is taken as bytes: not every op of torch knows the type.
            codes = x.codes.view(torch.uint8)[rows].view(x.codes.dtype)
            chosen = ops.QuantizedRows(codes, x.scale[:, rows])
        gate_up = torch.empty(rows.numel(), w13.num_rows, dtype=torch.float32, device=rows.device)
        inner = ops.act_and_mul(w13.multiply(chosen, gate_up), act)
        result = torch.empty(rows.numel(), w2.num_rows, dtype=dtype, device=rows.device)
        return w2.multiply(w2.rows_of(inner), result)
