# SPDX-License-Identifier: Apache-2.0
"""What engines agree on before every forward that they make together.

Engines that share their experts enter every forward together, with rows or without. Before it each of
them tells the others how many rows it has. When none has any and none has a request, all of them sleep:
no engine enters an exchange until it has a request or is called. Whoever hands out a request calls all of
them with the number of the call; the engine that gets the request has it before that call. What was called
last is part of what they tell: a call that has come to all of them is dealt with, and one that has come to
some will come to the others, so that all of them wake for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from diffulex.distributed.comm import RowComm

__all__ = ["Lockstep"]


class Lockstep:
    """The part of one engine. All methods belong to the thread that makes its steps.

    Args:
        comm: with the others.
    """

    def __init__(self, comm: RowComm) -> None:
        self._comm = comm
        self._is_awake = False
        #: Number of the last call that has come here, and of the last one that has come to all.
        self._called = self._dealt = 0

    def call(self, number: int) -> None:
        """There is a request somewhere; numbers rise from 1 on, and the same ones come to all."""
        self._called = max(self._called, number)

    @property
    def is_called(self) -> bool:
        """Whether the others wait for this engine, or will."""
        return self._is_awake or self._called > self._dealt

    def agree(self, num_rows: int, *, has_more: bool) -> tuple[int, ...]:
        """Rows of each engine in the next forward, which all of them enter unless there are none.

        Args:
            num_rows: of this one.
            has_more: it has requests, also if none of them has rows now.

        Raises:
            PeerError: another engine is gone, or does not come.
        """
        own = torch.tensor([[num_rows, int(has_more), self._called]])
        every = own.new_empty(self._comm.size, *own.shape)
        self._comm.gather_rows(own, every)
        rows, requests, called = every[:, 0].T.tolist()
        self._is_awake = any(rows) or any(requests)
        self._dealt = min(called)
        return tuple(rows)
