# SPDX-License-Identifier: Apache-2.0
"""What the ranks that share the weights of a model exchange within a step.

Every reduction gives all ranks the same bits, and every gather has the parts in rank order, so that each
rank decides by itself what the others decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["LOCAL", "Comm", "LocalComm", "Norm", "RowComm", "gather_padded"]


class Norm(Protocol):
    """A norm that adds to the residual stream first; see `diffulex.nn.norm.RMSNorm`."""

    @property
    def weight(self) -> Tensor:
        """The factors [H]."""

    @property
    def eps(self) -> float:
        """What is added to the mean square."""

    def add_norm_(
        self, x: Tensor, residual: Tensor, rows: tuple[Tensor, Tensor, bool] | None = None
    ) -> None:
        """In place: residual becomes x + residual, x the norm of that sum.

        `rows`, if given, get its codes and their scales; if nothing else is read, as their last item
        says, x may be left out.
        """


class Comm(Protocol):
    """The exchange of one rank with the others; every rank makes the same calls in the same order."""

    rank: int
    size: int

    @property
    def no_capture_reason(self) -> str | None:
        """Why the exchanges of a decode step cannot be part of a CUDA graph; None: they can."""

    def all_reduce_(self, x: Tensor) -> None:
        """x [.., H] becomes the sum of x over the ranks."""

    def add_norm_(
        self,
        norm: Norm,
        x: Tensor,
        residual: Tensor,
        rows: tuple[Tensor, Tensor, bool] | None = None,
    ) -> None:
        """`norm.add_norm_` of the sum of x [T, H] over the ranks; residual [T, H] is the same on all."""

    def gather_records(self, part: Tensor, out: Tensor) -> None:
        """`out` [P, R, W] int32 becomes the `part` [R, W] of every rank, in rank order."""

    def gather_columns(self, part: Tensor, widths: tuple[int, ...]) -> Tensor:
        """The columns [n, sum of widths] of all ranks, of which rank r has `part` [n, widths[r]]."""


class RowComm(Protocol):
    """The exchange of ranks that have different rows; every rank makes the same calls in the same order."""

    rank: int
    size: int

    def gather_rows(self, part: Tensor, out: Tensor) -> None:
        """`out` [P, C, W] becomes the `part` [C, W] of every rank, in rank order."""

    def send_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Sends `sent[q]` of the rows [sum of sent, W] to rank q, in their order.

        Returns:
            [sum of received, W]: `received[q]` rows of rank q, in rank order. Any number may be 0.
        """


class LocalComm:
    """One rank: there is nothing to exchange."""

    rank, size = 0, 1
    no_capture_reason = None

    def all_reduce_(self, x: Tensor) -> None:
        pass

    def add_norm_(
        self,
        norm: Norm,
        x: Tensor,
        residual: Tensor,
        rows: tuple[Tensor, Tensor, bool] | None = None,
    ) -> None:
        norm.add_norm_(x, residual, rows)

    def gather_records(self, part: Tensor, out: Tensor) -> None:
        out.copy_(part[None])

    def gather_columns(self, part: Tensor, widths: tuple[int, ...]) -> Tensor:
        del widths  # those of `part`
        return part


def gather_padded(comm: Comm, part: Tensor, widths: tuple[int, ...]) -> Tensor:
    """`Comm.gather_columns` by parts of one size: the columns past the end of a narrow one are not
    looked at."""
    padded = part.new_zeros(part.size(0), max(widths))
    padded[:, : part.size(1)] = part
    every = part.new_empty(comm.size, *padded.shape)
    comm.gather_records(padded, every)
    parts = zip(every.unbind(0), widths, strict=True)
    return torch.cat([columns[:, :width] for columns, width in parts], dim=1)


#: What a model that is not shared exchanges with.
LOCAL = LocalComm()
