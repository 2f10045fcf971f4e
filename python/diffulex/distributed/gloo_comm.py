# SPDX-License-Identifier: Apache-2.0
"""The exchange of ranks in processes of one host, through gloo: for CPUs, and for tests."""

from __future__ import annotations

import contextlib
import datetime
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from diffulex.distributed.comm import Norm
from diffulex.distributed.layout import LOOPBACK
from diffulex.errors import DiffulexError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["GlooComm", "PeerError", "make_store"]

#: Much of it is not declared.
dist: Any = distributed
#: Where waiting has no limit.
_NO_LIMIT_S = 10 * 365 * 86400


class PeerError(DiffulexError, RuntimeError):
    """Another rank did not take part in an exchange: it is gone, or stuck."""


def make_store(size: int, host: str = LOOPBACK) -> Any:
    """The place where ranks find each other, at a free port; it is there as long as the first rank."""
    return dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)


class GlooComm:
    """See `diffulex.distributed.comm.Comm`. Has a process group of its own: the default one of
    torch.distributed is neither made nor used.

    Args:
        rank: of this process.
        size: ranks there are.
        store: of `make_store`, or host and port of the first rank's.
        connect_s: longest time until all ranks are there.
        timeout_s: longest wait of an exchange for the other ranks; 0: without limit.
        host: the address of this process for the other ranks.

    Raises:
        RuntimeError: the others are not there in time.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        connect_s: float,
        timeout_s: float,
        host: str = LOOPBACK,
    ) -> None:
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        if isinstance(store, tuple):
            limit = datetime.timedelta(seconds=connect_s)
            store = dist.TCPStore(*store, size, is_master=False, timeout=limit)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = datetime.timedelta(seconds=timeout_s or _NO_LIMIT_S)
        self._store = store
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)

    def all_reduce_(self, x: Tensor) -> None:
        if x.numel() > 0:
            with self._waiting("all-reduce"):
                self._group.allreduce([x]).wait()

    def add_norm_(self, norm: Norm, x: Tensor, residual: Tensor) -> None:
        self.all_reduce_(x)
        norm.add_norm_(x, residual)

    def gather_records(self, part: Tensor, out: Tensor) -> None:
        if part.numel() > 0:
            with self._waiting("gather"):
                self._group.allgather([list(out.unbind(0))], [part.contiguous()]).wait()

    def gather_columns(self, part: Tensor, widths: tuple[int, ...]) -> Tensor:
        # Parts of one size are gathered; the columns past the end of a narrow one are not looked at.
        padded = part.new_zeros(part.size(0), max(widths))
        padded[:, : part.size(1)] = part
        every = part.new_empty(self.size, *padded.shape)
        self.gather_records(padded, every)
        parts = zip(every.unbind(0), widths, strict=True)
        return torch.cat([columns[:, :width] for columns, width in parts], dim=1)

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            others = f"rank {1 - self.rank}" if self.size == 2 else "the other ranks"
            text = " ".join(str(error).split())
            how = f"waited {self._timeout_s:g} s for" if "imed out" in text else "lost"
            raise PeerError(f"rank {self.rank} {how} {others} in {what}: {text}") from error

    def close(self) -> None:
        """Leaves the group."""
        self._group = self._store = None
