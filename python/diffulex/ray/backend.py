# SPDX-License-Identifier: Apache-2.0
"""Backends of a server in actors of a Ray cluster, or in processes that any thread may start."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from ray.util import get_node_ip_address

from diffulex.distributed.child_process import read_forever
from diffulex.distributed.layout import Sizes, replica_settings
from diffulex.errors import DiffulexError
from diffulex.log import get_logger
from diffulex.ray.cluster import join_cluster
from diffulex.ray.executor import Replicas
from diffulex.serving.backend_process import ReadyQueue, report_info, run_backend
from diffulex.serving.zmq_queue import CurveKeys, SecureAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from diffulex.distributed.child_process import ChildProcess

__all__ = [
    "TARGET",
    "ConnectedBackend",
    "join_cluster",
    "new_address",
    "ray_backend",
    "serve_backend",
]

logger = get_logger(__name__)

#: What the process of a backend runs.
TARGET = "diffulex.ray.backend:serve_backend"
_STOP_S = 5.0
_POLL_S = 0.5
#: How `Supervisor` is told of an end that is no exit.
_KILLED = -9


def new_address() -> SecureAddress:
    """Where a socket of this process may be bound so that the nodes of the cluster reach it."""
    return SecureAddress(f"tcp://{get_node_ip_address()}:*", CurveKeys.new())


def serve_backend(connection: Connection[Any, Any], parent_pid: int) -> None:
    """Target of the process: a backend of the settings that it is sent."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    read_forever(connection, parent_pid, inbox.put)
    run_backend(ReadyQueue(connection), **inbox.get())


class _Process:
    """What a supervisor asks of the process of a backend, which may not have begun."""

    def __init__(self, owner: ConnectedBackend) -> None:
        self._owner = owner
        #: Readable once it has ended.
        self.sentinel, self._open_end = os.pipe()
        self.has_ended = threading.Event()
        self.exitcode: int | None = None
        self.pid: int | None = None

    def end(self, exitcode: int) -> None:
        """It has ended."""
        self.exitcode = exitcode
        self.has_ended.set()
        os.close(self._open_end)

    def close(self) -> None:
        """Nobody waits for its end any more. Idempotent."""
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    def is_alive(self) -> bool:
        return not self.has_ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self.has_ended.wait(timeout)

    def terminate(self) -> None:
        self._owner.end()

    kill = terminate


class ConnectedBackend:
    """A backend over a `ChildProcess`, wherever that is; the interface of `BackendProcess`.

    Args:
        make_child: starts the process, in a thread: it may have to wait for its place. Gets the settings,
            which it may change.
        settings: of `diffulex.serving.backend_process.run_backend`.
        label: stands in log lines.
    """

    def __init__(
        self,
        make_child: Callable[[dict[str, Any]], ChildProcess],
        settings: Mapping[str, Any],
        label: str,
    ) -> None:
        self._make_child = make_child
        self._settings = {**settings, "label": label}
        self._label = label
        self._child: ChildProcess | None = None
        self._changed = threading.Condition()
        self._is_over = False
        self._reports: list[Any] = []
        self.process = _Process(self)
        self._thread = threading.Thread(target=self._run, name=label, daemon=True)

    def start(self) -> None:
        """Begins to start the process."""
        self._thread.start()

    def _run(self) -> None:
        code, child = _KILLED, None
        try:
            child = self._make_child(self._settings)
            with self._changed:
                self._child, self.process.pid = child, child.pid
            with contextlib.suppress(OSError):
                child.connection.send(self._settings)
            self._read(child)
            how = child.describe_end()
            returned = child.process.returncode
            code = _KILLED if returned is None else returned
            if not self._is_over and code != 0:
                logger.warning("%s: the process (pid %d) %s", self._label, child.pid, how)
        except DiffulexError as error:
            self._report({"error": str(error)})
        except Exception as error:
            logger.debug("%s", error, exc_info=True)
            self._report({"error": f"{type(error).__name__}: {error}"})
        finally:
            if child is not None:
                child.stop(0.0)
            with self._changed:
                self.process.end(code)
                self._changed.notify_all()

    def _read(self, child: ChildProcess) -> None:
        """Until the process is gone, or is to go."""
        with contextlib.suppress(EOFError, OSError):
            while not self._is_over and not child.has_ended:
                if child.connection.poll(_POLL_S):
                    self._report(child.connection.recv())

    def _report(self, report: Any) -> None:
        with self._changed:
            self._reports.append(report)
            self._changed.notify_all()

    def wait_ready(
        self, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """As `BackendProcess.wait_ready`."""
        end = time.monotonic() + timeout_s
        while not is_cancelled():
            left = end - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"backend failed to start: not ready within {timeout_s:g} s")
            info = self.poll_ready(min(left, _POLL_S))
            if info is not None:
                return info
        raise RuntimeError("backend failed to start: cancelled")

    def poll_ready(self, wait_s: float) -> dict[str, Any] | None:
        """As `BackendProcess.poll_ready`."""
        with self._changed:
            self._changed.wait_for(lambda: self._reports or not self.process.is_alive(), wait_s)
            if self._reports:
                return report_info(self._reports.pop(0))
        if not self.process.is_alive():
            raise RuntimeError("backend failed to start: the process is gone")
        return None

    def end(self) -> None:
        """Has the process ended, at once or as soon as it has begun."""
        self._is_over = True
        with self._changed:
            if self._child is not None:
                self._child.process.kill()

    def stop(self, grace_s: float = _STOP_S) -> None:
        """Ends the process: waits, then ends it. Idempotent."""
        if not self._thread.is_alive() and self.process.is_alive():
            return  # it was not started
        self.process.join(grace_s)
        if self.process.is_alive():
            self.end()
            self.process.join(_STOP_S)
        if not self.process.is_alive():
            self.process.close()


def ray_backend(
    model: str,
    settings: Mapping[str, Any],
    addresses: tuple[SecureAddress, SecureAddress],
    engine_factory: Callable[..., Any] | None,
    label: str,
    index: int = 0,
) -> ConnectedBackend:
    """A backend in an actor, on a node that has room for its ranks.

    Args:
        model: as for the worker.
        settings: of the engine and of its replicas.
        addresses: of the frontend's sockets: commands, events.
        engine_factory: replaces the real engine; importable by name on the nodes.
        label: stands in log lines.
        index: number of the replica.
    """
    sizes = Sizes(Sizes.of(settings)._replace(data=1).world)
    place = (
        settings.get("device") or "auto",
        settings.get("ray_address") or "auto",
        float(settings.get("ray_placement_timeout") or 120),
    )

    def make_child(given: dict[str, Any]) -> ChildProcess:
        replicas = Replicas(sizes, *place)
        try:
            child, devices = replicas.start(0, TARGET)
        finally:
            replicas.close()  # of what has not been started
        if devices:
            given["engine_kwargs"]["device_ids"] = list(devices)
        return child

    command, event = (address.of_peer() for address in addresses)
    given = {
        "model": model,
        "engine_kwargs": replica_settings(settings, (), index),
        "command_addr": command,
        "event_addr": event,
        "engine_factory": engine_factory,
    }
    return ConnectedBackend(make_child, given, label)
