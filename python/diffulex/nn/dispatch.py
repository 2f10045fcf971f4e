# SPDX-License-Identifier: Apache-2.0
"""Dispatch: which rows the experts of this rank compute, and where their results go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from diffulex import ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.distributed.comm import Comm, RowComm

__all__ = [
    "CountedDispatch",
    "Dispatch",
    "GatheredDispatch",
    "LocalDispatch",
    "ReplicatedDispatch",
    "RowDispatch",
]


class Dispatch(Protocol):
    """Called before and after the products of the experts. May be graph-captured."""

    def send(
        self, x: torch.Tensor, routing: ops.Routing, addend: torch.Tensor | None
    ) -> tuple[torch.Tensor, ops.Routing, torch.Tensor | None]:
        """Rows [R, H], their routing [R, K] and addend [R, H] for the experts of this rank.

        Of the rows x [T, H], their routing and what is added to their sums. The id -1 marks a row that no
        expert computes.
        """

    def receive(self, product: torch.Tensor) -> torch.Tensor:
        """The sums [T, H] of the rows that `send` was given, of those [R, H] of its result."""


class LocalDispatch:
    """Rows stay where they are: every expert is on this rank, or whoever adds up the outputs of the ranks
    adds up those of the experts with them."""

    __slots__ = ()

    def send(
        self, x: torch.Tensor, routing: ops.Routing, addend: torch.Tensor | None
    ) -> tuple[torch.Tensor, ops.Routing, torch.Tensor | None]:
        return x, routing, addend

    def receive(self, product: torch.Tensor) -> torch.Tensor:
        return product


class ReplicatedDispatch:
    """Every rank has all rows and adds its experts' part of the sums; the first one has the addend.

    For ranks that share nothing but the experts.
    """

    __slots__ = ("_comm",)

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def send(
        self, x: torch.Tensor, routing: ops.Routing, addend: torch.Tensor | None
    ) -> tuple[torch.Tensor, ops.Routing, torch.Tensor | None]:
        return x, routing, addend if self._comm.rank == 0 else None

    def receive(self, product: torch.Tensor) -> torch.Tensor:
        self._comm.all_reduce_(product)
        return product


class RowDispatch:
    """Every rank has rows of its own, perhaps none, and some of the experts.

    The parts of a sum are added up in float32 and in the order of the ranks, then what is added to it; the
    result is rounded once.

    Args:
        comm: with the other ranks.
    """

    def __init__(self, comm: RowComm) -> None:
        self._comm = comm
        #: Rows of each rank in this forward; empty: all have as many, as in a measurement.
        self.counts: Sequence[int] = ()
        self._counts: Sequence[int] = ()
        self._addend: torch.Tensor | None = None

    def send(
        self, x: torch.Tensor, routing: ops.Routing, addend: torch.Tensor | None
    ) -> tuple[torch.Tensor, ops.Routing, torch.Tensor | None]:
        """See `Dispatch`."""
        self._addend = addend
        self._counts = self.counts or [x.size(0)] * self._comm.size
        fields = x, *routing
        rows = self._send(torch.cat([field.view(torch.uint8) for field in fields], 1), routing)
        widths = [field.view(torch.uint8).size(1) for field in fields]
        x, *parts = (
            part.contiguous().view(field.dtype)
            for part, field in zip(rows.split_with_sizes(widths, 1), fields, strict=True)
        )
        return x, ops.Routing(*parts), None

    def receive(self, product: torch.Tensor) -> torch.Tensor:
        """See `Dispatch`."""
        total = self._receive(product)
        if self._addend is not None:
            total += self._addend
            self._addend = None
        return total.to(product.dtype)

    def _send(self, rows: torch.Tensor, routing: ops.Routing) -> torch.Tensor:
        """Rows [R, bytes] for the experts here, of those [T, bytes] of this rank."""
        raise NotImplementedError

    def _receive(self, product: torch.Tensor) -> torch.Tensor:
        """Sums [T, H] float32 over the ranks, of the parts [R, H] made here."""
        raise NotImplementedError


class GatheredDispatch(RowDispatch):
    """Every rank gets the rows of all and returns its part of all sums.

    With several experts per row most ranks need most rows anyway.
    """

    def _send(self, rows: torch.Tensor, routing: ops.Routing) -> torch.Tensor:
        del routing  # all ranks get all rows
        padded = rows.new_zeros(max(self._counts), rows.size(1))
        padded[: rows.size(0)] = rows
        every = rows.new_empty(self._comm.size, *padded.shape)
        self._comm.gather_rows(padded, every)
        parts = zip(every.unbind(0), self._counts, strict=True)
        return torch.cat([part[:count] for part, count in parts])

    def _receive(self, product: torch.Tensor) -> torch.Tensor:
        size, count = self._comm.size, self._counts[self._comm.rank]
        parts = self._comm.send_rows(product, self._counts, [count] * size)
        return parts.view(size, count, product.size(1)).sum(0, dtype=torch.float32)


class CountedDispatch(RowDispatch):
    """A rank gets the rows that chose one of its experts, each of them once.

    The numbers of rows are exchanged in each layer. The reference for `GatheredDispatch`.

    Args:
        comm: with the other ranks.
        owners: [E] int64: the rank of each expert, -1 for those of none of these ranks.
    """

    def __init__(self, comm: RowComm, owners: torch.Tensor) -> None:
        super().__init__(comm)
        self._owners = owners
        self._index, self._sent, self._received = owners.new_empty(0), [0], [0]

    def _send(self, rows: torch.Tensor, routing: ops.Routing) -> torch.Tensor:
        comm, ids = self._comm, routing.ids
        owners = torch.where(ids >= 0, self._owners[ids.clamp(min=0).long()], -1)
        is_for = torch.stack([(owners == rank).any(1) for rank in range(comm.size)])
        #: Rows of this rank in the order in which they are sent: by rank, then as they are.
        self._index = is_for.nonzero()[:, 1]
        counts = is_for.sum(1)
        every = counts.new_empty(comm.size, 1, comm.size)
        comm.gather_rows(counts[None], every)
        self._sent, self._received = counts.tolist(), every[:, 0, comm.rank].tolist()
        return comm.send_rows(rows[self._index], self._sent, self._received)

    def _receive(self, product: torch.Tensor) -> torch.Tensor:
        parts = self._comm.send_rows(product, self._received, self._sent)
        total = parts.new_zeros(self._counts[self._comm.rank], product.size(1), dtype=torch.float32)
        return total.index_add_(0, self._index, parts.float())
