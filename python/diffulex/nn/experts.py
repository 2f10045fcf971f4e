# SPDX-License-Identifier: Apache-2.0
"""The routed experts of a layer that a rank has: which, where checkpoints store them, their products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex import ops
from diffulex.checkpoint.slices import WeightSlice

if TYPE_CHECKING:
    from diffulex.distributed.shard import ExpertShard
    from diffulex.families.spec.moe import MoeSpec
    from diffulex.nn.dispatch import Dispatch
    from diffulex.nn.weights import ExpertFormat

__all__ = ["ExpertPart", "RoutedExperts"]

# Rows up to which the router's own kernel is the faster one (H200: 256 rows 5.5 us, cuBLAS 6.1; 8,192
# rows 69 and 16).
_ROUTER_ROWS = 512
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class ExpertPart:
    """Numbers and width of the experts of one rank.

    Attributes:
        numbers: of the experts, in the order in which the rank holds them.
        columns: the part of their width that it has.
    """

    def __init__(self, hidden_size: int, moe: MoeSpec, shard: ExpertShard) -> None:
        self._hidden, self._width = hidden_size, moe.intermediate_size
        self._num_experts = moe.num_experts
        self.numbers = shard.experts(moe.num_experts, is_interleaved=moe.n_group > 1)
        self.columns = shard.width(moe.intermediate_size)

    @property
    def width(self) -> int:
        """Columns that the rank has of each of its experts."""
        return int(self.columns.stop - self.columns.start)

    def map_on(self, device: torch.device | str) -> torch.Tensor | None:
        """[E] int32: the place of each expert of the model among those here, -1 for others; None: all are."""
        if len(self.numbers) == self._num_experts:
            return None
        places = torch.full((self._num_experts,), -1, dtype=torch.int32)
        places[list(self.numbers)] = torch.arange(len(self.numbers), dtype=torch.int32)
        return places.to(device)

    def table(self, prefix: str, w13: torch.Tensor, w2: torch.Tensor) -> dict[str, torch.Tensor]:
        """Checkpoint name -> part of w13 [L, 2 I, H] and w2 [L, H, I], one tensor for each projection.

        The experts of other ranks have empty parts, so that a checkpoint without them is found out.
        """
        width, table = w2.size(2), {}
        places = {number: place for place, number in enumerate(self.numbers)}
        nothing = w13.new_empty(0, w13.size(2)), w2.new_empty(0, w2.size(2))
        for number in range(self._num_experts):
            place = places.get(number)
            parts = (nothing[0], nothing[0], nothing[1])
            if place is not None:
                parts = (w13[place, :width], w13[place, width:], w2[place])
            for name, part in zip(_PROJECTIONS, parts, strict=True):
                table[f"{prefix}.{number}.{name}.weight"] = part
        return table

    def slices(self, prefix: str) -> dict[str, WeightSlice]:
        """What the rank has of the stored tensors, in every layout that they come in."""
        hidden, width, own = self._hidden, self._width, self.columns
        all_columns, up = slice(0, hidden), slice(own.start + width, own.stop + width)
        table: dict[str, WeightSlice] = {}
        for number in range(self._num_experts):
            is_here = number in self.numbers
            for name in _PROJECTIONS[:2]:
                rows = (own,) if is_here else ()
                table[f"{prefix}.{number}.{name}.weight"] = WeightSlice(
                    (width, hidden), rows, all_columns
                )
            rows = (all_columns,) if is_here else ()
            table[f"{prefix}.{number}.down_proj.weight"] = WeightSlice((hidden, width), rows, own)
        matrices = tuple(slice(number, number + 1) for number in self.numbers)
        count = self._num_experts
        table[f"{prefix}.gate_up_proj"] = WeightSlice(
            (count, 2 * width, hidden), matrices, (own, up)
        )
        for suffix in ("", ".weight"):
            for name in _PROJECTIONS[:2]:
                table[f"{prefix}.{name}{suffix}"] = WeightSlice(
                    (count, width, hidden), matrices, own
                )
            table[f"{prefix}.down_proj{suffix}"] = WeightSlice(
                (count, hidden, width), matrices, all_columns, own
            )
        return table


class RoutedExperts:
    """Base of the modules that have the experts of a layer.

    Attributes:
        dispatch: where rows are computed.
        matrices: of the experts here.
        top_k: experts of a row.
        act: between their products.
        is_batch_invariant: whether the logits of a row must not depend on the other rows.
    """

    dispatch: Dispatch
    matrices: ExpertFormat
    top_k: int
    act = ops.Activation.SILU
    is_batch_invariant = False
    _expert_map: torch.Tensor | None

    def router_logits(self, x: torch.Tensor, router: torch.Tensor, out: torch.Tensor) -> None:
        """Logits [T, E] float32 of rows x [T, H] with the router's matrix [E, H]."""
        is_half = x.dtype == router.dtype == torch.bfloat16
        if x.is_cuda and is_half and x.size(0) > _ROUTER_ROWS and not self.is_batch_invariant:
            torch.mm(x, router.t(), out_dtype=torch.float32, out=out)
        else:
            ops.router_gemm(x, router, out=out)

    def routed(
        self,
        x: torch.Tensor,
        routing: ops.Routing,
        addend: torch.Tensor | None,
        out: torch.Tensor,
        workspace: torch.Tensor,
    ) -> torch.Tensor:
        """Weighted sums [T, H] of the chosen experts of rows x [T, H], and what is added to them.

        Args:
            x: the rows.
            routing: [T, K].
            addend: [T, H].
            out: [T, H], where the result is unless other ranks have other rows.
            workspace: of `matrices` for so many rows.
        """
        rows, routing, addend = self.dispatch.send(x, routing, addend)
        if rows is not x:
            out, workspace = torch.empty_like(rows), self.matrices.new_workspace(rows, self.top_k)
        if rows.size(0) > 0:
            out = self.matrices.product(
                rows,
                routing,
                expert_map=self._expert_map,
                addend=addend,
                act=self.act,
                out=out,
                workspace=workspace,
            )
        return self.dispatch.receive(out)

    def take_part(self, nothing: torch.Tensor) -> None:
        """The part of a rank without rows in a forward that others have rows in; `nothing` [0, H] has the
        dtype of the model."""
        routing = ops.Routing(
            nothing.new_empty(0, self.top_k, dtype=torch.float32),
            nothing.new_empty(0, self.top_k, dtype=torch.int32),
        )
        self.routed(nothing, routing, None, nothing, nothing)
