# SPDX-License-Identifier: Apache-2.0
"""The backends of a server with several replicas, and the frontend over all of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from diffulex.distributed.layout import Sizes, replica_environment
from diffulex.distributed.start import executor_module, is_of_cluster
from diffulex.server.replicas.settings import num_replicas, settings_of_replicas
from diffulex.serving.backend_process import BackendProcess
from diffulex.serving.frontend import FrontendManager
from diffulex.serving.replicas.frontend import ReplicaFrontend
from diffulex.serving.replicas.group import ReplicaGroup, replica_label

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import ExitStack
    from pathlib import Path

    from diffulex.server.args import ServerArgs
    from diffulex.serving.frontend import FrontendLimits

__all__ = ["joined_cluster", "make_replica_frontend", "make_replica_group"]


def make_replica_frontend(
    args: ServerArgs,
    address: Callable[[str], str],
    stack: ExitStack,
    limits: FrontendLimits,
    **options: Any,
) -> ReplicaFrontend:
    """The frontend over one `FrontendManager` for each replica, with bound sockets.

    Args:
        args: the command line.
        address: of a socket by its name.
        stack: closes the sockets.
        limits: of all replicas together.
        options: of every `FrontendManager`.
    """
    # What is in flight and for how long is counted once, over all of them.
    own = dataclasses.replace(limits, max_queue_size=0, max_queued_tokens=0, request_timeout_s=0.0)
    managers = []
    for index in range(num_replicas(args)):
        manager = FrontendManager.from_zmq(
            command_addr=address(f"command-{index}"),
            event_addr=address(f"event-{index}"),
            limits=own,
            **options,
        )
        stack.callback(manager.send_backend.stop)
        stack.callback(manager.recv_backend.stop)
        managers.append(manager)
    settings = args.engine_kwargs()
    return ReplicaFrontend(
        managers,
        policy=settings.get("data_parallel_policy") or "prefix",
        limits=limits,
        num_retries=args.replica_retries,
    )


def joined_cluster(settings: Mapping[str, Any]) -> Any:
    """The module that starts the backends in a cluster, which this process has joined; None: they are
    processes of this host.

    Raises:
        ConfigError: there is no cluster, or what it needs is not installed.
    """
    if not is_of_cluster(settings):
        return None
    cluster = executor_module(settings["distributed_executor"], "backend")
    cluster.join_cluster(settings.get("ray_address") or "auto")
    return cluster


def make_replica_group(
    args: ServerArgs,
    frontend: ReplicaFrontend,
    settings: Mapping[str, Any],
    engine_factory: Callable[..., Any] | None,
    socket_directory: Path,
    on_ready: Callable[[Mapping[str, Any]], None],
    on_fatal: Callable[[str], None],
    cluster: Any = None,
) -> ReplicaGroup:
    """The supervisors of all backends.

    Args:
        settings: of the engine, for all replicas.
        engine_factory: replaces the real engine; importable by name.
        socket_directory: a backend removes it when this process dies without doing so.
        on_ready: called once, when the server serves.
        on_fatal: called when there is no backend any more.
        cluster: of `joined_cluster`.

    Raises:
        ConfigError: there are not enough devices.
    """
    if cluster is None:
        num_visible = None if engine_factory is not None else _num_visible(settings)
        each = settings_of_replicas(settings, num_visible)
        environment = replica_environment(Sizes.of(settings))

    def make_process(index: int) -> BackendProcess:
        manager: Any = frontend.managers[index]
        addresses = manager.send_backend.addr, manager.recv_backend.addr
        label = replica_label(index)
        if cluster is not None:
            backend: BackendProcess = cluster.ray_backend(
                *(args.model, settings, addresses, engine_factory, label, index)
            )
            return backend
        return BackendProcess(
            *(args.model, each[index], *addresses),
            engine_factory=engine_factory,
            socket_directory=socket_directory,
            environment=environment,
            label=label,
            replica=index,
        )

    return ReplicaGroup(
        frontend,
        make_process,
        startup_timeout_s=args.startup_timeout,
        min_ready=args.min_ready_replicas,
        drain_timeout_s=args.drain_timeout,
        is_staying=args.keep_alive_on_backend_death,
        kills_stuck=args.kill_stuck_backend,
        on_fatal=on_fatal,
        on_ready=on_ready,
    )


def _num_visible(settings: Mapping[str, Any]) -> int | None:
    """CUDA devices, unless the replicas run on the CPU."""
    if settings.get("device") == "cpu":
        return None
    import torch  # noqa: PLC0415 (slow to import, and not needed by other servers)

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
