# SPDX-License-Identifier: Apache-2.0
"""How the processes of replicas and ranks are started and connected: by this program, or by a cluster's.

Whoever starts them gives a `ChildProcess`, whose pipe may be a connection to another host. Replicas are
started by the program, ranks by the first rank of their replica, which may itself be such a process: it
is told at its beginning how it starts the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

from diffulex.distributed.child_process import ChildProcess
from diffulex.distributed.layout import (
    LOOPBACK,
    Sizes,
    rank_devices,
    replica_devices,
    replica_environment,
)
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "RankStarter",
    "ReplicaStarter",
    "executor_module",
    "is_of_cluster",
    "number_replica",
    "rank_starter",
    "replica_starter",
    "use_rank_starter",
]

#: Executors that start processes elsewhere: packages of this one, of the same name as what they need.
_EXECUTORS = ("ray",)


class RankStarter(Protocol):
    """Starts the processes of the ranks other than the first, which is this process."""

    #: The address of this process for the others.
    host: str
    #: They can map files that this process has open.
    shares_memory: bool

    def start(self, target: str, rank: int, environment: Mapping[str, str]) -> ChildProcess:
        """The process of a rank, which runs `target` as `ChildProcess` says."""


class _LocalRanks:
    host = LOOPBACK
    shares_memory = True

    #: Number of the replica that this process is the first rank of.
    replica = 0

    def start(self, target: str, rank: int, environment: Mapping[str, str]) -> ChildProcess:
        title = f"diffulex-worker-{self.replica}.{rank}"
        return ChildProcess(target, f"rank {rank}", environment, title)


_ranks: RankStarter = _LocalRanks()


def number_replica(index: int) -> None:
    """Says which of several replicas engines of this process are, for the titles of their other ranks."""
    _LocalRanks.replica = index


def rank_starter() -> RankStarter:
    """What starts the other ranks of an engine in this process."""
    return _ranks


def use_rank_starter(starter: RankStarter) -> None:
    """Has the ranks of engines of this process started in another way; before the first engine."""
    global _ranks  # noqa: PLW0603 (a fact about the process)
    _ranks = starter


class ReplicaStarter(Protocol):
    """Starts the processes of replicas."""

    def start(self, index: int, target: str) -> tuple[ChildProcess, Sequence[int]]:
        """The process of a replica and its CUDA devices; once for each."""

    def close(self) -> None:
        """Gives back what is kept for replicas that were not started. Idempotent."""


class _LocalReplicas:
    def __init__(self, sizes: Sizes, devices: Sequence[Sequence[int]]) -> None:
        self._devices = devices
        self._environment = replica_environment(sizes)

    def start(self, index: int, target: str) -> tuple[ChildProcess, Sequence[int]]:
        return ChildProcess(target, f"replica {index}", self._environment), self._devices[index]

    def close(self) -> None:
        pass


def is_of_cluster(settings: Mapping[str, Any]) -> bool:
    """Whether settings leave the start of processes to a cluster."""
    return settings.get("distributed_executor") in _EXECUTORS


def executor_module(name: str, part: str) -> Any:
    """A module of an executor that starts processes elsewhere.

    Raises:
        ConfigError: what it needs is not installed.
    """
    try:
        return importlib.import_module(f"diffulex.{name}.{part}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise ConfigError(
            f"distributed_executor: expected {name} to be installed (pip install"
            f" '.[{name}]' in the source directory), got ModuleNotFoundError"
        ) from error


def replica_starter(parallel: Any, device: str, given_device: str) -> ReplicaStarter:
    """What starts the replicas of an engine.

    Args:
        parallel: the section of that name.
        device: the resolved device of this process.
        given_device: the one that was asked for.

    Raises:
        ConfigError: what starts them is not installed, or has no place for them.
    """
    sizes = Sizes(Sizes.of_engine(parallel).world, parallel.data_parallel_size)
    name = parallel.distributed_executor
    if name in _EXECUTORS:
        starter: ReplicaStarter = executor_module(name, "executor").Replicas(
            sizes, given_device, parallel.ray_address, parallel.ray_placement_timeout
        )
        return starter
    devices: list[Sequence[int]] = [()] * sizes.data
    if device.startswith("cuda"):
        every = rank_devices(sizes, parallel.device_ids, parallel.device_start)
        devices = replica_devices(sizes, every)
    return _LocalReplicas(sizes, devices)
