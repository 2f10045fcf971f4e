# SPDX-License-Identifier: Apache-2.0
"""The worker processes as the engine sees them: start, notice an end, stop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ExitedWorker", "WorkerPool"]

logger = get_logger(__name__)

#: Settings come as the first line of the standard input; its end tells that the engine is gone.
#: Not multiprocessing: it would run the user's main module again.
_BOOT = (
    "import json, sys; settings = json.loads(sys.stdin.buffer.readline());"
    " sys.path[:] = settings['path'];"
    " from diffulex.omni.worker_process import main; main(settings)"
)
_TERMINATE_S = 5.0
_POLL_S = 0.02


class ExitedWorker(NamedTuple):
    """A worker that is no more. `exitcode` is negative for a signal."""

    rank: int
    exitcode: int


class WorkerPool:
    """One process per rank, all on this host.

    Args:
        settings: of each rank, ready for JSON.
        num_threads: of each process.
    """

    def __init__(self, settings: Sequence[Mapping[str, Any]], num_threads: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._finalizer = weakref.finalize(self, _kill, os.getpid(), self._processes)
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        # One host: the loopback device is there and needs no name service.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        try:
            for item in settings:
                # A session of its own: Ctrl-C in a terminal is the engine's to handle.
                process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT],
                    stdin=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                )
                self._processes.append(process)
                assert process.stdin is not None
                line = json.dumps({**item, "path": sys.path}).encode() + b"\n"
                # One that has ended already is noticed like any other.
                with suppress(BrokenPipeError):
                    process.stdin.write(line)
                    process.stdin.flush()
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """Process of each rank."""
        return [process.pid for process in self._processes]

    def exited(self) -> list[ExitedWorker]:
        """Workers that have ended, in the order of their ranks."""
        codes = [process.poll() for process in self._processes]
        return [ExitedWorker(rank, code) for rank, code in enumerate(codes) if code is not None]

    def stop(self, grace_s: float) -> None:
        """Ends workers that were asked to leave: waits, then SIGTERM, then SIGKILL."""
        if not self._join(grace_s):
            logger.warning("image workers do not leave: SIGTERM")
            for process in self._processes:
                process.terminate()
            self._join(_TERMINATE_S)
        self.kill()

    def kill(self) -> None:
        """Ends all of them at once. May be called again."""
        self._finalizer()

    def _join(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        while len(self.exited()) < len(self._processes):
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True


def _kill(owner: int, processes: list[subprocess.Popen[bytes]]) -> None:
    if os.getpid() != owner:  # a fork of the engine's process ends: the workers are not its own
        return
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
