# SPDX-License-Identifier: Apache-2.0
"""Routed experts in low precision; see `diffulex.nn.weights` for what holds them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from diffulex import ops
from diffulex.errors import ConfigError
from diffulex.ops import WeightScheme
from diffulex.quantization.weights import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.nn.weights import ExpertFormat

__all__ = ["QuantizedExperts", "check_stackable"]


class _Stack:
    """Codes [L, N, K], or nibbles, and scales of the matrices of L experts, which are views of them.

    Args:
        weights: the matrices, which have no memory, or no values yet.
        has_tiles: nibbles are multiplied in tiles, whose order they have while the matrices are packed.
    """

    __slots__ = ("codes", "has_tiles", "is_packed", "scale")

    def __init__(
        self, weights: Sequence[QuantizedWeight], device: torch.device | str, has_tiles: bool
    ) -> None:
        self.has_tiles, self.is_packed = has_tiles, False
        parts = weights[0].parts
        first, count = parts[0], len(weights)
        # Scales of int4 have groups of columns in front of rows.
        dim = 1 if first.scheme == WeightScheme.INT4 else 0
        rows = [part.scale.size(dim) for part in parts]
        shape = (count, weights[0].num_rows, first.codes.size(1))
        self.codes = first.codes.new_empty(shape, device=device)
        sizes = list(first.scale.shape)
        sizes[dim] = sum(rows)
        self.scale = first.scale.new_empty((count, *sizes), device=device)
        for weight, codes, scale in zip(weights, self.codes, self.scale, strict=True):
            for part, of_part in zip(weight.parts, scale.split(rows, dim), strict=True):
                part.place_in(codes[part.rows], of_part, has_tiles, self._await_packing)

    def _await_packing(self) -> None:
        self.is_packed = False

    @property
    def operand(self) -> torch.Tensor:
        """The codes as products take them."""
        return ops.as_nibble_tiles(self.codes) if self.has_tiles else self.codes


def _check_nibbles(weights: Sequence[QuantizedWeight]) -> None:
    """A stack of 4 bits has groups and scales of one kind, and nothing that only checkpoints have."""
    shapes = {replace(part.shape, rows=0) for weight in weights for part in weight.parts}
    found = {
        "zero points": any(shape.has_zeros for shape in shapes),
        "orders of columns": any(shape.has_order for shape in shapes),
        "several kinds of groups and scales": len(shapes) > 1,
    }
    got = " and ".join(name for name, is_there in found.items() if is_there)
    if got:
        raise ConfigError(
            f"quantization: expected routed experts of int4 on cuda without zero points, in groups and"
            f" scales of one kind, got {got} (quantization none takes the values)"
        )


def check_stackable(w13: Sequence[QuantizedWeight], w2: Sequence[QuantizedWeight]) -> None:
    """Refuses experts that the kernels of stacks cannot multiply."""
    schemes = {weight.scheme for weight in (*w13, *w2)}
    if len(schemes) > 1:
        names = ", ".join(sorted(scheme.name.lower() for scheme in schemes))
        raise ConfigError(
            f"quantization: expected routed experts in one scheme on cuda, got {names}"
        )
    if WeightScheme.INT4 in schemes:
        _check_nibbles(w13)
        _check_nibbles(w2)
        return
    # Blocks of gate and up that are stored as one matrix begin at its first row; the kernels begin
    # those of up at its own.
    parts = w13[0].parts
    if len(parts) > 2 or (len(parts) == 1 and not parts[0].can_gate):
        raise ConfigError(
            f"quantization: expected gate and up of stacked experts in whole blocks of"
            f" {ops.QUANT_GROUP} rows on cuda, got {w13[0].num_rows // 2} rows (quantization none"
            " takes the values)"
        )


class QuantizedExperts:
    """The matrices of L experts: gate and up [2 I, H], and down [H, I], of each.

    Args:
        w13, w2: matrices of the experts; those of stacks have their memory from here, and are made on
            the meta device.
        device: where they lie; where `are_stacked`, they are one stack for each of the two.
    """

    __slots__ = ("_stacks", "w2", "w13")

    def __init__(
        self,
        w13: Sequence[QuantizedWeight],
        w2: Sequence[QuantizedWeight],
        device: torch.device | str,
    ) -> None:
        self.w13, self.w2 = list(w13), list(w2)
        self._stacks: tuple[_Stack, _Stack] | None = None
        if self.are_stacked(device):
            check_stackable(self.w13, self.w2)
            has_tiles = self._have_tiles(device)
            self._stacks = (
                _Stack(self.w13, device, has_tiles),
                _Stack(self.w2, device, has_tiles),
            )

    @property
    def scheme(self) -> WeightScheme:
        return self.w13[0].scheme

    @property
    def suits_hopper(self) -> bool:
        """Whether products of compute capability 9.0 take the stacks; they are for int4 in tiles and e4m3."""
        if self.scheme != WeightScheme.INT4:
            return all(weight.suits_hopper for weight in (*self.w13, *self.w2))
        return self._stacks is not None and self._stacks[0].has_tiles

    @staticmethod
    def are_stacked(device: torch.device | str) -> bool:
        """Whether the kernels of a device take stacks."""
        return torch.device(device).type == "cuda"

    def _have_tiles(self, device: torch.device | str) -> bool:
        """Whether the kernels of a device take stacks of these in tiles."""
        parts = [part for weight in (*self.w13, *self.w2) for part in weight.parts]
        are_tileable = all(part.is_tileable and not part.shape.has_exact_scale for part in parts)
        return are_tileable and ops.has_hopper_kernels(torch.device(device))

    def packed(self) -> ExpertFormat:
        for weight in (*self.w13, *self.w2):
            weight.packed()
        for stack in self._stacks or ():
            stack.is_packed = True
        return self

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.w13, *self.w2))

    def new_workspace(self, like: torch.Tensor, top_k: int) -> torch.Tensor:
        if self._stacks is not None:
            return ops.new_fused_moe_workspace(like, top_k, self._stacks[0].operand)
        return like.new_empty(0, dtype=torch.uint8)

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
        """`ops.fused_moe` with x quantised once a row, and the activation of each slot from float32."""
        if expert_map is not None:
            here = expert_map.index_select(0, routing.ids.clamp(min=0).flatten())
            here = here.view_as(routing.ids).masked_fill_(routing.ids < 0, -1)
            routing = routing._replace(ids=here)
        if self._stacks is not None:
            w13, w2 = self._stacks
            if not (w13.is_packed and w2.is_packed):
                self.packed()
            return ops.fused_moe(
                x,
                w13.operand,
                w2.operand,
                *routing,
                w13_scale=w13.scale,
                w2_scale=w2.scale,
                addend=addend,
                act=act,
                out=out,
                workspace=workspace,
            )
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
