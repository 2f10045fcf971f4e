# SPDX-License-Identifier: Apache-2.0
"""The backend as its parent sees it: start, wait until ready, notice its end, stop."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from diffulex.distributed.child_process import describe_exit
from diffulex.distributed.start import number_replica
from diffulex.log import get_logger, name_process
from diffulex.serving.backend_worker import run_sync_backend_worker
from diffulex.wire.protocol import TEXT_CODEC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

    from diffulex.wire.codec import JobCodec

__all__ = ["BackendProcess", "ReadyQueue", "describe_exit", "report_info", "run_backend"]

logger = get_logger(__name__)

PROCESS_NAME = "diffulex-sync-backend"
#: How the only backend of a server is named in log lines.
LABEL = "backend"
_JOIN_S = 5.0
_POLL_S = 0.5


class ReadyQueue:
    """The child's end of the pipe for its one report."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection
        self._is_first = True
        #: The report says that there is no engine.
        self.has_failed = False

    def put(self, report: Any) -> None:
        """Sends the report."""
        self.has_failed |= self._is_first and "error" in report
        self._is_first = False
        with contextlib.suppress(OSError):  # the parent does not read any more
            self._connection.send(report)


def run_backend(
    ready_queue: ReadyQueue,
    environment: Mapping[str, str] = MappingProxyType({}),
    label: str = LABEL,
    replica: int = 0,
    **settings: Any,
) -> None:
    """Target of the child: a failure is told once, by the parent until the engine is ready."""
    name_process(label)
    number_replica(replica)
    for name, value in environment.items():
        os.environ[name] = value
    try:
        run_sync_backend_worker(ready_queue=ready_queue, **settings)
    except Exception:
        if not ready_queue.has_failed:
            logger.exception("the backend failed")
        sys.exit(1)


class BackendProcess:
    """One backend process. `start` belongs to the main thread: the child is tied to it.

    Args:
        model: as for the worker.
        engine_kwargs: as for the worker.
        command_addr: where the frontend pushes.
        event_addr: where the frontend pulls.
        engine_factory: replaces the real engine; importable by name.
        socket_directory: the child removes it when this process dies without doing so.
        codec: of the jobs' messages.
        environment: variables in which the child differs from this process.
        label: stands in every line that the child logs.
        replica: its number among several.
    """

    def __init__(
        self,
        model: str,
        engine_kwargs: Mapping[str, Any],
        command_addr: str,
        event_addr: str,
        engine_factory: Callable[..., Any] | None = None,
        socket_directory: Path | None = None,
        codec: JobCodec = TEXT_CODEC,
        environment: Mapping[str, str] = MappingProxyType({}),
        label: str = LABEL,
        replica: int = 0,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._reports, child_end = context.Pipe(duplex=False)
        self._child_end = child_end
        self.process = context.Process(
            target=run_backend,
            name=PROCESS_NAME,
            args=(ReadyQueue(child_end), dict(environment), label, replica),
            kwargs={
                "model": model,
                "engine_kwargs": dict(engine_kwargs),
                "command_addr": command_addr,
                "event_addr": event_addr,
                "engine_factory": engine_factory,
                "codec": codec,
                "socket_directory": None if socket_directory is None else str(socket_directory),
            },
            daemon=False,
        )

    def start(self) -> None:
        """Starts the child, which ignores Ctrl-C from its first instruction on."""
        with _interrupt_ignored():
            self.process.start()
        # With this end open here, the child's death would not close the pipe.
        self._child_end.close()

    def wait_ready(
        self, timeout_s: float, is_cancelled: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """What the child says of its engine.

        Raises:
            RuntimeError: it failed, died, or took longer than `timeout_s`.
        """
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
        """What the child says of its engine, if it does within this time.

        Raises:
            RuntimeError: it failed or died.
        """
        wait([self._reports, self.process.sentinel], wait_s)
        if self._reports.poll():
            try:
                return report_info(self._reports.recv())
            except EOFError:
                self.process.join(_JOIN_S)
        if not self.process.is_alive():
            text = describe_exit(self.process.exitcode)
            raise RuntimeError(f"backend failed to start: the process {text}")
        return None

    def stop(self, grace_s: float = _JOIN_S) -> None:
        """Ends the child: waits, then SIGTERM, then SIGKILL. Idempotent."""
        process = self.process
        if process.pid is None:
            return
        process.join(grace_s)
        if process.is_alive():
            logger.warning("the backend does not leave: SIGTERM")
            process.terminate()
            process.join(_JOIN_S)
        if process.is_alive():
            logger.warning("the backend does not leave: SIGKILL")
            process.kill()
            process.join(_JOIN_S)
        self._reports.close()


def report_info(report: Any) -> dict[str, Any]:
    """The info of a report, in its present form or that of older workers; RuntimeError for a failure."""
    if isinstance(report, str):
        return {}
    if report.get("error"):
        details = report.get("traceback")
        if details:
            logger.debug("backend: %s", details)
        raise RuntimeError(f"backend failed to start: {report['error']}")
    return dict(report.get("info") or {})


@contextlib.contextmanager
def _interrupt_ignored() -> Iterator[None]:
    """Children inherit what is ignored, also before they run any code of ours."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("BackendProcess.start: expected the main thread, got another one")
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
