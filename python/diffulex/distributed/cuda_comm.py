# SPDX-License-Identifier: Apache-2.0
"""The exchange of ranks with a GPU each on one host.

What decode steps exchange is small, and goes through peer memory: kernels write to each other's buffers,
inside captured graphs too. The rest, and everything where the GPUs have no access to each other, goes
through NCCL, or for tests through gloo on the host. All ranks choose alike: the choice depends on shapes
and on what they have told each other at the start.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed

from diffulex.distributed.comm import Norm, gather_padded
from diffulex.distributed.gloo_comm import GlooComm
from diffulex.distributed.store import PeerError, join_store, meet, time_limit
from diffulex.env import set_meanwhile
from diffulex.errors import ConfigError
from diffulex.log import get_logger
from diffulex.ops.comm import (
    MAX_WIDTH,
    WIDTH_UNIT,
    CollectiveAlgorithm,
    PeerGroup,
    collective_plan,
)
from diffulex.ops.quantize import quantize_rows_into
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

__all__ = ["CudaComm"]

logger = get_logger(__name__)

#: Much of it is not declared.
dist: Any = distributed
_c10d: Any = torch._C._distributed_c10d
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_ALIGNMENT = 16
#: Longest wait for another rank in the test of the peer memory.
_TEST_S = 20.0
#: What lets the watch of a group end its exchanges, at once and not with this process.
_SURVIVES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
#: How often exchanges are looked at that may wait in vain, and how much later torch's own watch ends them.
_LOOK_S = 0.1
_SPARE_S = 10.0
#: More than this between two looks is a time in which the process did not run.
_PAUSE_S = 1.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Library(Protocol):
    """What sums and gathers tensors of any size."""

    def all_reduce_(self, x: Tensor) -> None: ...

    def gather_records(self, part: Tensor, out: Tensor) -> None: ...

    def send_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor: ...

    def check(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class _Nccl:
    """NCCL without a default group; made by the first exchange, which all ranks make together.

    The thread of the steps may be inside a call of CUDA that waits for an exchange, so another one keeps
    the time limit: it ends all exchanges once one has waited too long behind those before it.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._make = functools.partial(_nccl_group, store, rank, size, timeout_s)
        self._made: Any = None
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        #: Number and result of the exchanges that are not known to have ended.
        self._pending: deque[tuple[int, Any]] = deque()
        self._count = 0
        #: The exchange that has waited in vain.
        self._late: int | None = None
        #: The first one that waits, for how long the watch has seen it, and when it looked last.
        self._oldest: tuple[int | None, float, float] = (None, 0.0, 0.0)
        self._has_ended = threading.Event()

    @property
    def _group(self) -> Any:
        if self._made is None:
            self._made = self._make()
            if self._timeout_s > 0:
                watched = weakref.ref(self), self._has_ended
                threading.Thread(
                    target=_watch, args=watched, name="diffulex-exchanges", daemon=True
                ).start()
        return self._made

    def end_late(self) -> bool:
        """Ends all exchanges if one has waited too long, and returns whether; from the watch alone.

        Of a time in which the process did not run, only a second counts.
        """
        try:
            waiting = [number for number, result in self._pending if not result.done()]
        except RuntimeError:  # the steps have changed the list meanwhile
            return False
        now, (before, seconds, looked) = time.monotonic(), self._oldest
        oldest = waiting[0] if waiting else None
        seconds = seconds + min(now - looked, _PAUSE_S) if oldest == before else 0.0
        self._oldest = oldest, seconds, now
        if oldest is None or seconds < self._timeout_s:
            return False
        self._late = oldest  # before what waits for it goes on
        self.abort()
        return True

    def all_reduce_(self, x: Tensor) -> None:
        self._enqueue(lambda group: group.allreduce([x]))

    def gather_records(self, part: Tensor, out: Tensor) -> None:
        self._enqueue(lambda group: group._allgather_base(out.flatten(), part.flatten()))

    def send_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = rows.new_empty(sum(received), rows.size(1))
        splits, options = (list(received), list(sent)), dist.AllToAllOptions()
        part = rows.contiguous()
        self._enqueue(lambda group: group.alltoall_base(out, part, *splits, options))
        return out

    def _enqueue(self, begin: Callable[[Any], Any]) -> None:
        """Lets the stream wait for an exchange of the group, of whose end `check` asks."""
        self.check()  # those that have ended are not kept, whoever asks for them
        group, number, self._count = self._group, self._count, self._count + 1
        try:
            work = begin(group)
            self._pending.append((number, work.get_future_result()))
            work.wait()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # of this rank, not of another
        except RuntimeError as error:
            self.check()  # an earlier one has ended the group
            text = " ".join(str(error).split())
            raise PeerError(f"{self._lost('lost', number)}: {text}") from error

    def check(self) -> None:
        if self._late is not None:
            raise PeerError(self._lost(f"waited {self._timeout_s:g} s for", self._late))
        while self._pending and self._pending[0][1].done():
            number, result = self._pending.popleft()
            end = _c10d.WorkResult(result.value())
            if end != _c10d.WorkResult.SUCCESS:
                is_late = end == _c10d.WorkResult.TIMEOUT
                how = f"waited {self._timeout_s:g} s for" if is_late else "lost"
                raise PeerError(self._lost(how, number))

    def _lost(self, how: str, number: int) -> str:
        others = f"rank {1 - self._rank}" if self._size == 2 else "the other ranks"
        return f"rank {self._rank} {how} {others} in exchange {number} of NCCL"

    def abort(self) -> None:
        self._has_ended.set()
        made = self._made  # `close` of another thread may take it
        if made is not None:
            made.abort()

    def close(self) -> None:
        self._has_ended.set()
        group, self._made = self._made, None
        if group is not None:
            group.shutdown()


def _watch(watched: weakref.ref[_Nccl], has_ended: threading.Event) -> None:
    while not has_ended.wait(_LOOK_S):
        nccl = watched()
        if nccl is None or nccl.end_late():
            return
        del nccl


def _nccl_group(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = time_limit(timeout_s + _SPARE_S if timeout_s > 0 else 0.0)
    with set_meanwhile(_SURVIVES):
        return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)


class _Host:
    """gloo, through copies on the host."""

    def __init__(
        self, store: Any, rank: int, size: int, connect_s: float, timeout_s: float
    ) -> None:
        self._gloo = GlooComm(rank, size, store, connect_s, timeout_s)

    def all_reduce_(self, x: Tensor) -> None:
        copy = x.cpu()
        self._gloo.all_reduce_(copy)
        x.copy_(copy)

    def gather_records(self, part: Tensor, out: Tensor) -> None:
        copy = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.gather_records(part.cpu(), copy)
        out.copy_(copy)

    def send_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self._gloo.send_rows(rows.cpu(), sent, received).to(rows.device)

    def check(self) -> None:
        pass  # as `abort`

    def abort(self) -> None:
        pass  # a lost rank is an error of the exchange

    def close(self) -> None:
        self._gloo.close()


def _library(
    store: Any, rank: int, size: int, connect_s: float, timeout_s: float, backend: str
) -> _Library:
    """What large exchanges take, once all ranks are there; arguments as for `CudaComm`."""
    store.set_timeout(time_limit(connect_s))  # of whatever the ranks ask it while they connect
    if backend == "gloo":
        return _Host(store, rank, size, connect_s, timeout_s)
    meet(store, rank, size, connect_s)
    return _Nccl(store, rank, size, timeout_s)


class CudaRowComm:
    """The exchange of ranks that have different rows on their GPUs, through NCCL or on the host; see
    `diffulex.distributed.comm.RowComm`.

    Args:
        rank: of this process.
        size: ranks there are.
        store: of `diffulex.distributed.store.part_of_store`, for these ranks alone.
        connect_s: longest time until all ranks are there.
        timeout_s: longest wait of an exchange for the other ranks; 0: without limit.
        backend: auto or nccl, or gloo.

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
        *,
        backend: str = "auto",
    ) -> None:
        self.rank, self.size = rank, size
        self._library = _library(store, rank, size, connect_s, timeout_s, backend)

    def gather_rows(self, part: Tensor, out: Tensor) -> None:
        if part.numel() > 0:
            self._library.gather_records(part.contiguous(), out)

    def send_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return self._library.send_rows(rows, sent, received)

    def check(self) -> None:
        """As `CudaComm.check`."""
        self._library.check()

    def abort(self) -> None:
        """Lets exchanges end that wait for a rank that is gone; from any thread, for good."""
        _abort(self._library)

    def close(self) -> None:
        """Leaves the group; nothing may be in flight."""
        self._library.close()


def _abort(library: _Library) -> None:
    # It may wait for the device, or never return.
    threading.Thread(target=library.abort, name="diffulex-abort", daemon=True).start()


class CudaComm:
    """See `diffulex.distributed.comm.Comm`.

    Args:
        rank: of this process.
        size: ranks there are.
        store: of `make_store`, or host and port of the first rank's.
        device: of this rank.
        connect_s: longest time until all ranks are there.
        timeout_s: longest wait of an exchange for the other ranks; 0: without limit.
        backend: what large exchanges take: auto or nccl, or gloo.
        custom_all_reduce: small ones through peer memory: auto, on, which is an error without access to
            peers, or off.

    Raises:
        ConfigError: there is no access, and `custom_all_reduce` asks for it.
        RuntimeError: the others are not there in time.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Any,
        device: torch.device,
        connect_s: float,
        timeout_s: float,
        *,
        backend: str = "auto",
        custom_all_reduce: str = "auto",
    ) -> None:
        self.rank, self.size = rank, size
        self._device, self._timeout_s = device, timeout_s
        self._is_aborted = False
        self._store = store = join_store(store, size, connect_s)
        self._library = _library(store, rank, size, connect_s, timeout_s, backend)
        if backend == "gloo" and rank == 0:
            logger.warning(
                "distributed_backend gloo: large exchanges go through the host; for tests"
            )
        with torch.cuda.device(device):
            self._peers: PeerGroup | None = None
            reason = "custom_all_reduce is off" if custom_all_reduce == "off" else self._connect()
        if reason and custom_all_reduce == "on":
            raise ConfigError(f"custom_all_reduce: expected {reason}, got none")
        if reason and rank == 0:
            logger.warning(
                "ranks exchange through %s alone, without graphs: %s",
                "gloo" if backend == "gloo" else "NCCL",
                reason if custom_all_reduce == "off" else f"expected {reason}, got none",
            )

    def _tell(self, key: str, value: Any) -> list[Any]:
        """The values of all ranks."""
        self._store.set(f"peers/{key}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"peers/{key}/{r}")) for r in range(self.size)]

    def _agree(self, key: str, reason: str) -> str:
        """The first reason of a rank against peer memory; empty: there is none."""
        return next(filter(None, self._tell(key, reason)), "")

    def _connect(self) -> str:
        """Opens the buffers of the others; what is missing for that, the same on all ranks."""
        group, handle, reason = None, b"", ""
        try:
            group = PeerGroup(self.rank, self._device, self.size, _TEST_S)
            handle = group.export()
        except RuntimeError as error:
            reason = f"memory to share ({error})"
        host = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
        every = self._tell("buffers", (host, self._device.index, handle.hex(), reason))
        reason = self._agree("access", reason or self._missing_access(every))
        if not reason:
            assert group is not None
            reason = self._agree(
                "handles", _open_all(group, [bytes.fromhex(entry[2]) for entry in every])
            )
        if not reason:
            assert group is not None
            reason = self._agree("test", self._test(group))
        if reason:
            if group is not None:
                group.close()
            return reason
        assert group is not None
        group.set_timeout(self._timeout_s)
        self._peers = group
        return ""

    def _missing_access(self, every: list[tuple[str, int, str, str]]) -> str:
        own_host = every[self.rank][0]
        for rank, (host, index, _, _) in enumerate(every):
            if host != own_host:
                return f"all ranks on the host of rank {self.rank}"
            own = self._device.index
            is_other = rank != self.rank and index != own
            if is_other and not torch.cuda.can_device_access_peer(own, index):
                return f"peer access between cuda:{own} and cuda:{index}"
        return ""

    def _test(self, group: PeerGroup) -> str:
        """Writes 4 KB to every other rank, and reads what they have written; what is missing."""
        part = _pattern(self.rank, self._device)
        out = torch.zeros(self.size, *part.shape, dtype=part.dtype, device=self._device)
        sums = part.to(torch.float32)
        group.gather_records(part, out)
        group.all_reduce(sums, CollectiveAlgorithm.ONE_SHOT)
        torch.cuda.synchronize(self._device)
        total = torch.zeros_like(sums)
        for rank in range(self.size):
            want = _pattern(rank, self._device)
            total += want.to(torch.float32)
            if not torch.equal(out[rank], want):
                return f"what rank {rank} wrote to cuda:{self._device.index}"
        return "" if torch.equal(sums, total) else "a sum through peer memory"

    @property
    def no_capture_reason(self) -> str | None:
        """Why exchanges that peer memory is for cannot be captured; None: they can."""
        return None if self._peers is not None else "the ranks have no peer memory"

    def _algorithm(self, x: Tensor) -> CollectiveAlgorithm:
        width = x.size(-1)
        is_legal = (
            self._peers is not None
            and x.dtype in _FLOATS
            and x.is_contiguous()
            and x.data_ptr() % _ALIGNMENT == 0
            and WIDTH_UNIT <= width <= MAX_WIDTH
            and width % WIDTH_UNIT == 0
        )
        return collective_plan(self.size, x.nbytes) if is_legal else CollectiveAlgorithm.LIBRARY

    def all_reduce_(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        algorithm = self._algorithm(x)
        if algorithm == CollectiveAlgorithm.LIBRARY:
            self._library.all_reduce_(x)
            return
        assert self._peers is not None
        self._peers.all_reduce(x, algorithm)

    def add_norm_(
        self,
        norm: Norm,
        x: Tensor,
        residual: Tensor,
        rows: tuple[Tensor, Tensor, bool] | None = None,
    ) -> None:
        algorithm = self._algorithm(x)
        if algorithm == CollectiveAlgorithm.LIBRARY or not residual.is_contiguous():
            self.all_reduce_(x)
            norm.add_norm_(x, residual, rows)
            return
        assert self._peers is not None
        self._peers.all_reduce_add_rms_norm(x, residual, norm.weight, norm.eps, algorithm)
        if rows is not None:
            quantize_rows_into(x, rows)

    def gather_records(self, part: Tensor, out: Tensor) -> None:
        if part.numel() == 0:
            return
        if not part.is_cuda:
            on_device = torch.empty(out.shape, dtype=out.dtype, device=self._device)
            self.gather_records(part.to(self._device), on_device)
            out.copy_(on_device)
            return
        part = part.contiguous()
        if self._peers is None or part.nbytes > _core.MAX_RECORD_BYTES or part.dtype != torch.int32:
            self._library.gather_records(part, out)
        else:
            self._peers.gather_records(part.view(len(part), -1), out.view(self.size, len(part), -1))

    def gather_columns(self, part: Tensor, widths: tuple[int, ...]) -> Tensor:
        return gather_padded(self, part, widths)

    def check(self) -> None:
        """Raises what became of exchanges that have ended.

        Raises:
            PeerError: one has waited for another rank in vain, or lost it; what it returned is void.
        """
        self._library.check()
        lost = None if self._peers is None else self._peers.timed_out
        if lost is not None:
            peer, number = lost
            raise PeerError(
                f"rank {self.rank} waited {self._timeout_s:g} s for rank {peer} in exchange {number}"
            )

    def abort(self) -> None:
        """Lets exchanges end that wait for a rank that is gone; from any thread, for good."""
        self._is_aborted = True
        if self._peers is not None:
            self._peers.abort()
        _abort(self._library)

    def close(self) -> None:
        """Leaves the group; nothing may be in flight. Idempotent."""
        peers, self._peers = self._peers, None
        with contextlib.suppress(RuntimeError):  # a device that has failed frees nothing
            if peers is not None:
                peers.close()
        if not self._is_aborted:  # else another thread may hold it for good
            self._library.close()
        self._store = None


def _open_all(group: PeerGroup, handles: list[bytes]) -> str:
    """Opens the buffers of the other ranks; what is missing."""
    for rank, handle in enumerate(handles):
        if rank != group.rank:
            try:
                group.open(rank, handle)
            except RuntimeError as error:
                return f"the buffer of rank {rank} ({error})"
    return ""


def _pattern(rank: int, device: torch.device) -> Tensor:
    """4 KB by which a rank is known."""
    numbers = torch.arange(1024, dtype=torch.int32, device=device)
    return (numbers * 2 + 1 + rank * 4099).view(4, 256)
