# SPDX-License-Identifier: Apache-2.0
"""Process groups of one rank, and what is exchanged between whole calls of a pipeline."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from diffulex.omni.grid import AXES, Grid
from diffulex.omni.message_codec import decode, encode
from diffulex.serving.zmq_queue import pack_message, unpack_message

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RankGroups"]

#: Groups over which tensors of the device travel; the others carry control data of the host.
_DEVICE_GROUPS = (*AXES[:-1], "sp")
_HOST_GROUPS = ("mp", "dp")
#: Replicas wait for each other's whole images. Deaths are noticed by the engine.
_REPLICA_TIMEOUT = timedelta(days=1)


class RankGroups:
    """The groups that a rank belongs to; `world` of torch.distributed is gloo over all ranks.

    Args:
        grid: places of the ranks.
        rank: of this process.
        store: file through which the ranks find each other; new.
        device: of the pipeline.
        timeout_s: how long a collective waits for a rank.
    """

    def __init__(self, grid: Grid, rank: int, store: Path, device: str, timeout_s: float) -> None:
        self.grid = grid
        self.rank = rank
        self.coords = grid.coords(rank)
        world = grid.size("world")
        timeout = timedelta(seconds=timeout_s)
        # For the type checker it is no name of this module.
        file_store: Any = dist.__dict__["FileStore"](str(store), world)
        dist.init_process_group(
            "gloo", store=file_store, rank=rank, world_size=world, timeout=timeout
        )
        self._groups: dict[str, Any] = {}
        self._ranks: dict[str, list[int]] = {}
        device_backend = "nccl" if device.startswith("cuda") else "gloo"
        # Every rank makes every group, in the same order.
        for name in (*_DEVICE_GROUPS, *_HOST_GROUPS):
            backend = device_backend if name in _DEVICE_GROUPS else "gloo"
            for ranks in grid.group_ranks(name):
                if len(ranks) == 1:
                    continue
                limit = _REPLICA_TIMEOUT if name == "dp" else timeout
                group = dist.new_group(ranks, timeout=limit, backend=backend)
                if rank in ranks:
                    self._groups[name], self._ranks[name] = group, ranks

    @property
    def is_leader(self) -> bool:
        """Whether this rank decodes the images of its replica."""
        return self.grid.leader(self.rank) == self.rank

    def group(self, name: str) -> Any:
        """The process group of a name; None where this rank is alone."""
        return self._groups.get(name)

    def ranks(self, name: str) -> list[int]:
        """The ranks of the group of a name, in order."""
        return self._ranks.get(name, [self.rank])

    def agree(self, is_stopped: bool) -> bool:
        """Whether any rank that draws the same images says so."""
        group = self.group("mp")
        if group is None:
            return is_stopped
        flag = torch.tensor([int(is_stopped)], dtype=torch.int32)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        return bool(flag.item())

    def gather(self, value: Any, name: str) -> list[Any] | None:
        """Values of all ranks of `dp` or `mp`, in order, at the first one; others get None.

        The group `dp` is that of the leaders of all replicas.
        """
        group = self.group(name)
        if group is None:
            return [value]
        tree, buffers = encode(value)
        sizes = [buffer.nbytes for buffer in buffers]
        packed = b"".join([pack_message({"tree": tree, "sizes": sizes}), *buffers])
        heads = [torch.zeros(2, dtype=torch.int64) for _ in self.ranks(name)]
        head = torch.tensor([len(packed) - sum(sizes), len(packed)])
        dist.all_gather(heads, head, group=group)
        first, *others = self.ranks(name)
        if self.rank != first:
            dist.send(torch.frombuffer(bytearray(packed), dtype=torch.uint8), first, group)
            return None
        found = [value]
        for rank, (length, total) in zip(others, (h.tolist() for h in heads[1:])):
            data = torch.empty(total, dtype=torch.uint8)
            dist.recv(data, rank, group)
            found.append(_unpack(data, length))
        return found


def _unpack(data: torch.Tensor, length: int) -> Any:
    raw = memoryview(data.numpy().data)
    body = unpack_message(bytes(raw[:length]))
    buffers, start = [], length
    for size in body["sizes"]:
        buffers.append(raw[start : start + size])
        start += size
    return decode(body["tree"], buffers)
