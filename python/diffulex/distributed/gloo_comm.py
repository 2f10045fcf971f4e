# SPDX-License-Identifier: Apache-2.0
"""The exchange of ranks in processes of one host, through gloo: for CPUs, and for tests."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import distributed

from diffulex.distributed.comm import Norm, gather_padded
from diffulex.distributed.layout import LOOPBACK
from diffulex.distributed.store import PeerError, join_store, meet, time_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

__all__ = ["GlooComm"]

#: Much of it is not declared.
dist: Any = distributed


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
        PeerError: another one is not there in time.
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
        store = join_store(store, size, connect_s)
        meet(store, rank, size, connect_s)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = time_limit(connect_s)
        self._store = store
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        self._group._set_default_timeout(time_limit(timeout_s))

    no_capture_reason = "the ranks exchange on the host"

    def all_reduce_(self, x: Tensor) -> None:
        if x.numel() > 0:
            with self._waiting("all-reduce"):
                self._group.allreduce([x]).wait()

    def add_norm_(
        self,
        norm: Norm,
        x: Tensor,
        residual: Tensor,
        rows: tuple[Tensor, Tensor, bool] | None = None,
    ) -> None:
        self.all_reduce_(x)
        norm.add_norm_(x, residual, rows)

    def gather_records(self, part: Tensor, out: Tensor) -> None:
        self.gather_rows(part, out)

    def gather_rows(self, part: Tensor, out: Tensor) -> None:
        """See `diffulex.distributed.comm.RowComm`."""
        if part.numel() > 0:
            with self._waiting("gather"):
                self._group.allgather([list(out.unbind(0))], [part.contiguous()]).wait()

    def send_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """See `diffulex.distributed.comm.RowComm`."""
        out = rows.new_empty(sum(received), rows.size(1))
        with self._waiting("all-to-all"):
            splits = list(received), list(sent)
            self._group.alltoall_base(
                out, rows.contiguous(), *splits, dist.AllToAllOptions()
            ).wait()
        return out

    def gather_columns(self, part: Tensor, widths: tuple[int, ...]) -> Tensor:
        return gather_padded(self, part, widths)

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
