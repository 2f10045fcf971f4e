# SPDX-License-Identifier: Apache-2.0
"""A server in processes of its own, and what the system and its metrics say about it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ServerProcess", "num_threads", "open_files", "resident_mib", "running_server"]

_READY = re.compile(r"^READY url=(\S+)", re.MULTILINE)
_STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that is ready."""

    url: str
    #: The HTTP process; the backend is its child.
    pid: int

    @property
    def backend_pid(self) -> int:
        """The child with the engine: of all children, the one with the most memory."""
        text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        children = [int(pid) for pid in text.split()]
        if not children:
            raise RuntimeError(f"server {self.pid}: expected a backend process, got no children")
        return max(children, key=resident_mib)


def open_files(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def num_threads(pid: int) -> int:
    """Threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@contextlib.contextmanager
def running_server(*flags: str, start_s: float = 120.0) -> Iterator[ServerProcess]:
    """Starts a server on a free port of this machine and drains it at the end.

    Args:
        flags: of `diffulex serve`.
        start_s: until it must be ready.

    Raises:
        RuntimeError: it did not become ready, or did not end as it should; with the end of its log.
    """
    command = [sys.executable, "-m", "diffulex", "serve", "--host", "127.0.0.1", "--port", "0"]
    with tempfile.NamedTemporaryFile("w+b", suffix=".log") as log:
        path = Path(log.name)
        process = subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield ServerProcess(_wait_ready(process, path, start_s), process.pid)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode != 0:
            code = process.returncode
            raise RuntimeError(f"server: expected exit code 0, got {code}\n{_log_end(path)}")


def _wait_ready(process: subprocess.Popen[bytes], log: Path, start_s: float) -> str:
    deadline = time.monotonic() + start_s
    while True:
        match = _READY.search(log.read_text(encoding="utf-8", errors="replace"))
        if match:
            return match[1].rstrip("/")
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"server: expected READY, got\n{_log_end(log)}")
        time.sleep(0.05)


def _log_end(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-4000:]
