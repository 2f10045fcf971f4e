# SPDX-License-Identifier: Apache-2.0
"""Ranks of one engine: their places, groups, devices and threads; pure functions of settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from diffulex.distributed.shard import Shard
from diffulex.env import get_text
from diffulex.errors import ConfigError

__all__ = [
    "LOOPBACK",
    "MAX_PORT",
    "Layout",
    "Sizes",
    "check_device_name",
    "check_port",
    "describe_ranks",
    "layout_of",
    "rank_devices",
    "replica_devices",
    "replica_environment",
    "replica_settings",
    "with_own_port",
]


#: The address of this host for itself.
LOOPBACK = "127.0.0.1"
MAX_PORT = 65535
#: Settings that a replica does not have: how many there are, and where.
_OF_ALL_REPLICAS = (
    *("data_parallel_size", "data_parallel_policy", "device_ids", "device_start"),
    *("distributed_executor", "ray_address", "ray_placement_timeout"),
)


class Layout(Enum):
    """What the ranks have in common."""

    #: Replicas, each of which shares its weights over its tensor-parallel ranks.
    BASE = "base"
    #: As BASE; each rank of a replica has whole experts.
    EP_PER_DP_SHARD = "ep_per_dp_shard"
    #: Every rank has all of the model but the experts, of which it has a part.
    PURE_EP = "pure_ep"
    #: The experts are spread over all ranks, whose forwards are in step.
    GLOBAL_EP = "global_ep"


class Sizes(NamedTuple):
    """Ranks that share weights, replicas, and ranks that share experts.

    Rank r is number r % tensor of replica r // tensor.
    """

    tensor: int = 1
    data: int = 1
    expert: int = 1

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Sizes:
        """Those that settings name."""
        return cls(*(int(settings.get(f"{name}_parallel_size") or 1) for name in cls._fields))

    @classmethod
    def of_engine(cls, parallel: Any) -> Sizes:
        """Those of the ranks of one engine, from the section `parallel` of its configuration."""
        return cls.of_weights(parallel).each

    @classmethod
    def of_weights(cls, parallel: Any) -> Sizes:
        """Those of all ranks among which one model is spread: of an engine, or of coupled replicas."""
        sizes = cls(
            parallel.tensor_parallel_size,
            parallel.data_parallel_size,
            parallel.expert_parallel_size,
        )
        return sizes if sizes.is_coupled else sizes._replace(data=1)

    @property
    def each(self) -> Sizes:
        """Those of the ranks of one replica."""
        return Sizes(self.tensor) if self.is_coupled else self._replace(data=1)

    @property
    def is_coupled(self) -> bool:
        """Whether replicas share the routed experts, so that their steps are in step."""
        return self.data > 1 and self.expert == self.tensor * self.data

    @property
    def limiting_key(self) -> str:
        """The setting by which an engine has several ranks."""
        return f"{'expert' if self.tensor == 1 < self.expert else 'tensor'}_parallel_size"

    def __str__(self) -> str:
        names = ("tensor", "data") if self.tensor * self.data > 1 else ("expert",)
        sizes = [(name, getattr(self, name)) for name in names]
        return " and ".join(f"{name}_parallel_size {size}" for name, size in sizes if size > 1)

    @property
    def world(self) -> int:
        """Ranks there are."""
        return self.expert if self.tensor * self.data == 1 else self.tensor * self.data

    def shard(self, rank: int) -> Shard:
        """Which part of the weights of a replica a rank has."""
        return Shard(rank % self.tensor, self.tensor)

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """Ranks that share the weights of one replica with `rank`."""
        if self.tensor * self.data == 1:
            return (rank,)
        first = rank // self.tensor * self.tensor
        return tuple(range(first, first + self.tensor))

    def data_group(self, rank: int) -> tuple[int, ...]:
        """Ranks that have the same part of the weights, one of each replica."""
        if self.tensor * self.data == 1:
            return (rank,)
        return tuple(range(rank % self.tensor, self.world, self.tensor))

    def expert_group(self, rank: int) -> tuple[int, ...]:
        """Ranks that share the routed experts with `rank`, which is alone where nothing is shared so."""
        match layout_of(self):
            case Layout.BASE:
                return (rank,)
            case Layout.EP_PER_DP_SHARD:
                return self.tensor_group(rank)
            case _:
                return tuple(range(self.world))


def layout_of(sizes: Sizes) -> Layout:
    """The layout that sizes describe.

    Raises:
        ConfigError: none of them.
    """
    tensor, data, expert = sizes
    if expert == 1:
        return Layout.BASE
    if tensor * data == 1:
        return Layout.PURE_EP
    if expert == tensor:
        return Layout.EP_PER_DP_SHARD
    if expert == tensor * data:
        return Layout.GLOBAL_EP
    raise ConfigError(
        f"expert_parallel_size: expected 1, tensor_parallel_size ({tensor}) or tensor_parallel_size"
        f" * data_parallel_size ({tensor * data}), got {expert}"
    )


def check_device_name(device: str, sizes: Sizes) -> None:
    """ConfigError for a device of several ranks that has a number."""
    if ":" in device:
        raise ConfigError(
            f"device: expected cuda with {sizes} (device_ids chooses), got {device!r}"
        )


def check_port(port: int, sizes: Sizes) -> None:
    """ConfigError for a `master_port` from which not every replica that shares nothing can have its own."""
    if port and not sizes.is_coupled and port + sizes.data - 1 > MAX_PORT:
        most = MAX_PORT + 1 - sizes.data
        raise ConfigError(f"master_port: expected at most {most} for {sizes}, got {port}")


def rank_devices(
    sizes: Sizes,
    device_ids: Sequence[int] = (),
    device_start: int = 0,
    num_visible: int | None = None,
) -> tuple[int, ...]:
    """The CUDA device of each rank, as an index of the visible ones.

    Args:
        sizes: each of their ranks has one device.
        device_ids: theirs, in order, further ones are not used; empty: those from `device_start` on.
        device_start: the first one without `device_ids`.
        num_visible: devices there are; None: it is not known.

    Raises:
        ConfigError: they are not enough, not there, or named twice.
    """
    count, ids = sizes.world, list(device_ids)
    if len(set(ids)) < len(ids):
        raise ConfigError(f"device_ids: expected distinct devices, got {ids}")
    if ids and len(ids) < count:
        raise ConfigError(f"device_ids: expected {count} devices for {sizes}, got {ids}")
    if num_visible is not None and any(index >= num_visible for index in ids):
        raise ConfigError(
            f"device_ids: expected ids below {num_visible} (the number of visible devices),"
            f" got {ids}"
        )
    if ids:
        return tuple(ids[:count])
    if num_visible is not None and device_start + count > num_visible:
        found = max(0, num_visible - device_start)
        raise ConfigError(f"device_ids: expected {count} devices for {sizes}, got {found}")
    return tuple(range(device_start, device_start + count))


def describe_ranks(parallel: Any, device: str) -> dict[str, Any]:
    """What `Diffulex.parallel_info` answers.

    Args:
        parallel: the section of the configuration.
        device: of the model; of several CUDA ranks each has its own.
    """
    sizes = Sizes(
        parallel.tensor_parallel_size, parallel.data_parallel_size, parallel.expert_parallel_size
    )
    devices = [device] * sizes.world
    if sizes.world > 1 and device != "cpu":
        numbers = rank_devices(sizes, parallel.device_ids, parallel.device_start)
        devices = [f"cuda:{number}" for number in numbers]
    executor = parallel.distributed_executor
    if sizes.world == 1:
        executor = "local"
    elif executor == "auto":
        executor = "mp"
    return {
        **{f"{name}_parallel_size": size for name, size in sizes._asdict().items()},
        "layout": layout_of(sizes).value,
        "executor": executor,
        "ranks": [
            {
                "rank": rank,
                "replica": sizes.data_group(rank).index(rank),
                # Ray gives its own numbers to devices.
                "device": None if executor == "ray" and device != "cpu" else devices[rank],
                "tensor_group": list(sizes.tensor_group(rank)),
                "expert_group": list(sizes.expert_group(rank)),
            }
            for rank in range(sizes.world)
        ],
    }


def replica_devices(sizes: Sizes, devices: Sequence[int]) -> list[Sequence[int]]:
    """The devices of each replica, from those of all ranks."""
    return [devices[first : first + sizes.tensor] for first in range(0, sizes.world, sizes.tensor)]


def replica_settings(
    settings: Mapping[str, Any], devices: Sequence[int], index: int = 0
) -> dict[str, Any]:
    """Settings of the engine of one replica, from those of all of them.

    Args:
        settings: keys of the configuration.
        devices: its CUDA devices; empty: it has none.
        index: its number.
    """
    own = {name: value for name, value in settings.items() if name not in _OF_ALL_REPLICAS}
    if Sizes.of(settings).is_coupled:
        # It finds its place among all of them, devices included.
        shared = ("data_parallel_size", "device_ids", "device_start")
        own |= {name: settings[name] for name in shared if name in settings}
        own.pop("master_port", None)  # where all of them meet
        return own
    own = with_own_port(own, index)
    if devices:
        own["device_ids"] = tuple(devices)
    return own


def with_own_port(settings: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The settings with the `master_port` of replica `index` in place of the first one's."""
    port = settings.get("master_port")
    return {**settings, "master_port": port + index} if port else dict(settings)


def replica_environment(sizes: Sizes) -> dict[str, str]:
    """Variables in which the process of a rank differs from this one: its share of the cores.

    A number of threads that the user has set holds for every rank.
    """
    if get_text("OMP_NUM_THREADS"):
        return {}
    affinity = getattr(os, "sched_getaffinity", None)
    num_cores = (os.cpu_count() or 1) if affinity is None else len(affinity(0))
    return {"OMP_NUM_THREADS": str(max(1, num_cores // sizes.world))}
