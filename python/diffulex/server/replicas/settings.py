# SPDX-License-Identifier: Apache-2.0
"""Settings of a server with several replicas: what does not go together, and what each replica gets."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from diffulex.distributed.layout import (
    Sizes,
    check_device_name,
    check_port,
    rank_devices,
    replica_devices,
    replica_settings,
)
from diffulex.distributed.start import is_of_cluster
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.server.args import ServerArgs
    from diffulex.server.server_flags import HttpArgs

__all__ = ["check_replica_args", "has_replicas", "num_replicas", "settings_of_replicas"]

#: Settings of the one backend of a server.
_ONE_BACKEND = ("zmq_command_addr", "zmq_event_addr", "profiler")
#: What becomes of one replica alone.
_OF_ONE_REPLICA = ("min_ready_replicas", "replica_retries")


def num_replicas(args: ServerArgs) -> int:
    """Backends of a server; 1 without `--data-parallel-size`, and where replicas share their experts: the
    backend starts them all, since they run and end together."""
    sizes = Sizes.of(args.engine_kwargs())
    return 1 if sizes.is_coupled else sizes.data


def has_replicas(args: ServerArgs) -> bool:
    """Whether the backends of a server are replicas: those of a cluster are, also a single one."""
    return num_replicas(args) > 1 or is_of_cluster(args.engine_kwargs())


def check_replica_args(args: HttpArgs, settings: Mapping[str, Any]) -> None:
    """Checks what can be checked without the model and without the devices.

    Raises:
        ConfigError: a setting contradicts the number of replicas.
    """
    count = int(settings.get("data_parallel_size") or 1)
    if args.min_ready_replicas > count:
        raise ConfigError(
            f"--min-ready-replicas: expected at most data_parallel_size {count},"
            f" got {args.min_ready_replicas}"
        )
    is_elsewhere = is_of_cluster(settings)
    if count == 1 and not is_elsewhere:
        return
    if args.inproc and is_elsewhere:
        raise ConfigError("--inproc: expected one process, got --distributed-executor ray")
    many = f"expected data_parallel_size 1, got {count}"
    if count == 1:
        many = "expected a backend on this host, got --distributed-executor ray"
    sizes = Sizes.of(settings)
    for name in ("inproc", *_ONE_BACKEND):
        if getattr(args, name) and not (sizes.is_coupled and name.startswith("zmq")):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: {many}")
    if sizes.is_coupled:
        _check_coupled(args, sizes)
    check_port(int(settings.get("master_port") or 0), sizes)
    if is_elsewhere:
        _check_devices_elsewhere(settings)
        return
    device = settings.get("device") or "auto"
    check_device_name(device, sizes)
    if device != "cpu":
        rank_devices(sizes, settings.get("device_ids") or (), settings.get("device_start") or 0)


def _check_coupled(args: HttpArgs, sizes: Sizes) -> None:
    """Refuses what is about a replica alone, of those that run and end together."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name in _OF_ONE_REPLICA:
        value, default = getattr(args, name), defaults[name]
        if value != default:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag}: expected {default} with expert_parallel_size {sizes.expert}, whose replicas"
                f" run and end together, got {value}"
            )


def _check_devices_elsewhere(settings: Mapping[str, Any]) -> None:
    """Refuses devices by number, since the cluster chooses them."""
    given = "with --distributed-executor ray, which chooses the devices"
    for name in ("device_ids", "device_start"):
        if settings.get(name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: expected none {given}, got {settings[name]!r}")
    device = settings.get("device") or "auto"
    if ":" in device:
        raise ConfigError(f"--device: expected auto, cpu or cuda {given}, got {device!r}")


def settings_of_replicas(
    settings: Mapping[str, Any], num_visible: int | None
) -> list[dict[str, Any]]:
    """Engine settings of each replica.

    Args:
        settings: of all of them, as `ServerArgs.engine_kwargs` gives them.
        num_visible: CUDA devices there are; None: it is not known, or the replicas do not use them.

    Raises:
        ConfigError: there are not enough devices.
    """
    sizes = Sizes.of(settings)
    device = settings.get("device") or "auto"
    if device == "cpu" or (device == "auto" and not num_visible):
        return [replica_settings(settings, (), index) for index in range(sizes.data)]
    listed, start = settings.get("device_ids") or (), settings.get("device_start") or 0
    devices = rank_devices(sizes, listed, start, num_visible)
    each = enumerate(replica_devices(sizes, devices))
    return [replica_settings(settings, own, index) for index, own in each]
