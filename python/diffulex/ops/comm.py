# SPDX-License-Identifier: Apache-2.0
"""Exchange between the GPUs of one host through each other's memory.

Symbols: P ranks, T rows of H elements, R records of W words. All ranks make the same calls in the same
order on one stream each; nothing is allocated, so that the calls may be captured.
"""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING, Any

import torch

from diffulex.ops.fakes import FLOATS, INT32, INT64, FakeArguments, fake
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

#: Widths that sums over ranks take: multiples of the first, up to the second.
WIDTH_UNIT, MAX_WIDTH = 8, 16384

_CONTROL_WORD, _TIMEOUT_WORD = 4, 5
_ABORT, _STATUS, _PEER, _EPOCH = range(4)


class CollectiveAlgorithm(enum.IntEnum):
    """How a sum over ranks is formed."""

    ONE_SHOT = 0  #: every rank sends its part to every other one, and each sums
    TWO_SHOT = 1  #: every row has an owner, who gets the parts and sends the sum
    LIBRARY = 2  #: not by the ops of this module


def collective_plan(world: int, num_bytes: int) -> CollectiveAlgorithm:
    """The algorithm for a tensor of `num_bytes` on each of `world` ranks."""
    return CollectiveAlgorithm(_core.collective_plan(world, num_bytes))


class PeerGroup:
    """What one rank needs for exchanges with the others: its buffer, theirs, and the state.

    Args:
        rank: of this process, or of this object where ranks share a process.
        device: its GPU.
        world: number of ranks, 2 to 8.
        timeout_s: longest wait of a kernel for another rank; 0: no limit.
        max_ctas: most CTAs of a sum; 0: what the device holds. Ranks that share a device need a limit,
            as they wait for each other.

    Raises:
        RuntimeError: no memory, or a build without CUDA.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        world: int,
        timeout_s: float = 60.0,
        max_ctas: int = 0,
    ) -> None:
        self.rank, self.device, self.world = rank, device, world
        self._max_ctas = max_ctas
        self.epoch_bytes = _core.collective_epoch_bytes(world)
        index = device.index or 0
        gather_bytes = _core.collective_gather_bytes(world)
        #: Address of the own buffer.
        self.address: int = torch.ops.diffulex_control.peer_alloc(
            index, self.epoch_bytes, gather_bytes
        )
        #: Of all ranks, in rank order; complete after `connect`.
        self.peers: list[int] = [0] * world
        self.peers[rank] = self.address
        self._opened: list[int] = []
        self._end = weakref.finalize(self, _release, index, self.address, self._opened)
        self._end.atexit = False  # the driver frees it, and may be gone by then
        self._control = torch.zeros(4, dtype=torch.int64, pin_memory=True)
        self.state = torch.zeros(_core.COLLECTIVE_STATE_WORDS, dtype=torch.int64, device=device)
        self.state[_CONTROL_WORD] = self._control.data_ptr()
        self.set_timeout(timeout_s)

    def set_timeout(self, seconds: float) -> None:
        """Changes the longest wait; nothing may be in flight."""
        self.state[_TIMEOUT_WORD] = int(seconds * 1e9)
        torch.cuda.synchronize(self.device)

    def export(self) -> bytes:
        """The handle by which another process opens this rank's buffer."""
        handle = torch.empty(64, dtype=torch.uint8)
        torch.ops.diffulex_control.peer_export(self.device.index or 0, self.address, handle)
        return bytes(handle.tolist())

    def open(self, rank: int, handle: bytes) -> None:
        """Takes the buffer of a rank of another process.

        Raises:
            RuntimeError: the devices have no access to each other.
        """
        bytes_of = torch.tensor(list(handle), dtype=torch.uint8)
        address: int = torch.ops.diffulex_control.peer_open(self.device.index or 0, bytes_of)
        self._opened.append(address)
        self.peers[rank] = address

    def all_reduce(self, x: Tensor, algorithm: CollectiveAlgorithm) -> None:
        """In place: x [.., H] becomes its sum over the ranks."""
        torch.ops.diffulex.all_reduce(
            x, self.state, **self._arguments, algorithm=int(algorithm), max_ctas=self._max_ctas
        )

    def all_reduce_add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        eps: float,
        algorithm: CollectiveAlgorithm,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        """In place: residual <- sum of x over the ranks + residual, x <- norm of the unrounded sum."""
        torch.ops.diffulex.all_reduce_add_rms_norm(
            x,
            residual,
            weight,
            self.state,
            **self._arguments,
            algorithm=int(algorithm),
            eps=eps,
            weight_offset=weight_offset,
            max_ctas=self._max_ctas,
        )

    def gather_records(self, part: Tensor, out: Tensor) -> None:
        """out [P, R, W] int32 becomes the part [R, W] of every rank, in rank order."""
        torch.ops.diffulex.gather_records(part, out, self.state, **self._arguments)

    @property
    def _arguments(self) -> dict[str, Any]:
        return {"peers": self.peers, "rank": self.rank, "epoch_bytes": self.epoch_bytes}

    def abort(self) -> None:
        """Lets kernels leave that wait for another rank; from any thread, for good."""
        self._control[_ABORT] = 1

    @property
    def timed_out(self) -> tuple[int, int] | None:
        """The rank that a kernel has waited for in vain, and in which exchange; None: none has."""
        status, peer, epoch = (int(self._control[word]) for word in (_STATUS, _PEER, _EPOCH))
        return (peer, epoch) if status else None

    def close(self) -> None:
        """Frees the buffer; nothing may be in flight on any rank. Idempotent."""
        self._end()


def _release(device: int, address: int, opened: Sequence[int]) -> None:
    for other in opened:
        torch.ops.diffulex_control.peer_close(device, other)
    torch.ops.diffulex_control.peer_free(device, address)


@torch.no_grad()
def sum_add_rms_norm(
    parts: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """What `all_reduce_add_rms_norm` of ranks with parts [P, T, H] writes to x; residual [T, H] as there."""
    if out is None:
        out = torch.empty_like(residual)
    torch.ops.diffulex.sum_add_rms_norm(
        parts, residual, weight, out, eps=eps, weight_offset=weight_offset
    )
    return out


def _check_rows(arguments: FakeArguments, name: str, x: Tensor) -> None:
    arguments.check(name, FLOATS, x.shape)
    width = x.shape[-1]
    is_legal = WIDTH_UNIT <= width <= MAX_WIDTH and width % WIDTH_UNIT == 0
    arguments.require(
        name, is_legal, "a last dimension that is a multiple of 8 up to 16384", list(x.shape)
    )


def _check_sum(arguments: FakeArguments, x: Tensor) -> None:
    _check_rows(arguments, "x", x)
    arguments.check("state", INT64, (_core.COLLECTIVE_STATE_WORDS,))
    arguments.choice("algorithm", 1)
    arguments.at_least("max_ctas", 0)


@fake("all_reduce")
def _all_reduce(arguments: FakeArguments, x: Tensor) -> None:
    _check_sum(arguments, x)


@fake("all_reduce_add_rms_norm")
def _all_reduce_add_rms_norm(arguments: FakeArguments, x: Tensor) -> None:
    _check_sum(arguments, x)
    arguments.check("residual", (x.dtype,), x.shape)
    arguments.check("weight", (x.dtype, torch.float32), (x.shape[-1],))
    arguments.at_least("eps", 0)


@fake("gather_records")
def _gather_records(arguments: FakeArguments, part: Tensor, peers: Sequence[int]) -> None:
    arguments.check("part", INT32, (None, None))
    arguments.check("out", INT32, (len(peers), *part.shape))
    arguments.check("state", INT64, (_core.COLLECTIVE_STATE_WORDS,))


@fake("sum_add_rms_norm")
def _sum_add_rms_norm(arguments: FakeArguments, parts: Tensor) -> None:
    arguments.check("parts", FLOATS, (None, None, None))
    _check_rows(arguments, "parts", parts)
    arguments.require(
        "parts", 1 <= parts.shape[0] <= _core.MAX_RANKS, "[1 to 8, T, H]", list(parts.shape)
    )
    arguments.check("residual", (parts.dtype,), parts.shape[1:])
    arguments.check("weight", (parts.dtype, torch.float32), (parts.shape[-1],))
    arguments.check("out", (parts.dtype,), parts.shape[1:])
    arguments.at_least("eps", 0)
