# SPDX-License-Identifier: Apache-2.0
"""Dispatch: which rows the experts of this rank compute, and where their results go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from diffulex import ops
    from diffulex.distributed.comm import Comm

__all__ = ["Dispatch", "LocalDispatch", "ReplicatedDispatch"]


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
