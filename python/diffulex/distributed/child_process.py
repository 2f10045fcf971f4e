# SPDX-License-Identifier: Apache-2.0
"""Processes that belong to this one: started by a command, told by a pipe, never left behind.

A child is `python -c` and not a `spawn` of multiprocessing, which imports the program of the user again
and so fails in notebooks, from standard input and without `if __name__ == "__main__"`. It ends with its
parent, however that ends: it reads its pipe from the first moment on and asks who its parent is.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from multiprocessing.connection import wait
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from diffulex import errors
from diffulex.errors import DiffulexError
from diffulex.log import is_json_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

__all__ = [
    "ChildProcess",
    "Process",
    "describe_exit",
    "error_parts",
    "read_forever",
    "start_error",
    "stop_all",
    "title_process",
    "with_hint",
]

#: Standard library only, until the path is that of the parent. Ctrl-C is for the parent to handle; the
#: signal is blocked until this says so.
_BOOT = """\
import importlib, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
from multiprocessing.connection import Connection
os.set_inheritable(int(sys.argv[1]), False)  # what this process starts must not hold the pipe open
connection = Connection(int(sys.argv[1]))
sys.path[:], variables, target, parent, title = connection.recv()
for key, value in variables.items():
    os.environ[key] = value
if title:
    from diffulex.distributed.child_process import title_process
    title_process(title)
module, _, name = target.partition(":")
getattr(importlib.import_module(module), name)(connection, parent)
"""
_LAST_LINES = 20
_DRAIN_BYTES = 1 << 16
_STOP_S = 5.0
#: For the last lines of a child that has ended; what it has started itself may hold that pipe longer.
_LINES_S = 1.0
_STOP_POLL_S = 0.02
_POLL_S = 0.5


#: Settings that name what user code registers.
_REGISTERED = ("model_name", "decoding_strategy", "AutoSampler", "AutoModel")


def title_process(title: str) -> None:
    """What `ps` and `top` show of this process, if the package setproctitle is installed."""
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle  # noqa: PLC0415 (optional)

        setproctitle(title)


def error_parts(error: BaseException) -> tuple[str, str, str]:
    """Name of its type, text in one line, traceback."""
    return type(error).__name__, " ".join(str(error).split()), traceback.format_exc()


def start_error(who: str, kind: str, text: str) -> DiffulexError | None:
    """What a child raised while it started, by its type; None for types that are not this package's."""
    known = getattr(errors, kind, None)
    if known is None or not issubclass(known, DiffulexError):
        return None
    error = known(f"{who}: {with_hint(text)}")
    assert isinstance(error, DiffulexError)
    return error


def with_hint(text: str) -> str:
    """What a child raised while it started, and what to do where it may know less than its parent."""
    is_unknown = "worker_imports)" not in text and any(name in text for name in _REGISTERED)
    return text + " (registered in this process? add its module to worker_imports)" * is_unknown


def describe_exit(exitcode: int | None) -> str:
    """How a process ended, in words."""
    if exitcode is None:
        return "is still running"
    if exitcode < 0:
        try:
            return f"was killed by {signal.Signals(-exitcode).name}"
        except ValueError:
            return f"was killed by signal {-exitcode}"
    return f"ended with exit code {exitcode}"


class Process(Protocol):
    """What is asked of a process; those of `subprocess.Popen` explain each."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class ChildProcess:
    """A process that runs `target(connection, parent_pid)`.

    Args:
        target: `module:function` of what the child imports.
        label: stands before each line that it writes to its standard error, but for log lines in JSON,
            which have their own.
        environment: variables in which it differs from this process.
        title: of the process, as for `title_process`; empty: its command.
    """

    def __init__(
        self, target: str, label: str, environment: Mapping[str, str], title: str = ""
    ) -> None:
        self.connection: Connection[Any, Any]
        self.connection, child_end = multiprocessing.Pipe()
        self.process: Process
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._label = label
        handle = child_end.fileno()
        try:
            with _interrupt_blocked():
                process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, str(handle)],
                    pass_fds=(handle,),
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )
        except BaseException:
            self.connection.close()
            raise
        finally:
            # With this end open here, the child's death would not close the pipe.
            child_end.close()
        self.process = process
        self._reader = threading.Thread(
            target=self._read_lines, args=(process.stderr,), name=label, daemon=True
        )
        self._reader.start()
        with contextlib.suppress(OSError):  # gone already, which whoever reads will find
            self.connection.send((sys.path, dict(environment), target, os.getpid(), title))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def _read_lines(self, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                self.last_lines.append(text)
                # Whatever has become of this process's own: an end of the pipe would end the child.
                with contextlib.suppress(Exception):
                    named = text if is_json_line(text) else f"{self._label}: {text}"
                    print(named, file=sys.stderr, flush=True)

    @property
    def has_ended(self) -> bool:
        """It is gone and nothing that it has sent is left, also where others hold its pipe open."""
        if self.process.poll() is None:
            return False
        with contextlib.suppress(OSError):
            return not self.connection.poll()
        return True

    def describe_end(self) -> str:
        """How it ended; waits a moment for that."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)
        self._reader.join(_LINES_S)
        text = describe_exit(self.process.returncode)
        return f"{text}, possibly out of memory" if text.endswith("SIGKILL") else text

    def stop(self, grace_s: float = _STOP_S) -> None:
        """Ends it: waits, then SIGTERM, then SIGKILL. Idempotent."""
        stop_all([self], grace_s)

    def release(self) -> None:
        """Gives back what is kept for it here, once it has ended. Idempotent."""
        self.connection.close()


def stop_all(children: Sequence[ChildProcess], grace_s: float = _STOP_S) -> None:
    """Ends all of them together: waits, then SIGTERM, then SIGKILL. Idempotent.

    What they still send is thrown away, so that none of them waits for a reader.
    """
    graces = (grace_s, _STOP_S, _STOP_S)
    for signalled, seconds in zip((None, signal.SIGTERM, signal.SIGKILL), graces, strict=True):
        running = [child for child in children if child.process.poll() is None]
        if signalled is not None:
            for child in running:
                child.process.send_signal(signalled)
        _drain_until_ended(running, time.monotonic() + seconds)
    for child in children:
        child.release()


def _drain_until_ended(children: Sequence[ChildProcess], end: float) -> None:
    pipes = {child.connection.fileno() for child in children if not child.connection.closed}
    while any(child.process.poll() is None for child in children) and time.monotonic() < end:
        for pipe in wait(pipes, _STOP_POLL_S):
            handle = cast("int", pipe)
            try:
                # Never more than there is: the process may have stopped within a message.
                is_open = bool(os.read(handle, _DRAIN_BYTES))
            except OSError:
                is_open = False
            if not is_open:
                pipes.discard(handle)


@contextlib.contextmanager
def _interrupt_blocked() -> Iterator[None]:
    """Children inherit what is blocked in the thread that starts them, whichever that is."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def read_forever(
    connection: Connection[Any, Any], parent_pid: int, on_message: Callable[[Any], None]
) -> None:
    """Passes on what the parent sends, in a daemon thread; ends this process when the parent is gone.

    The pipe says so, unless another process holds its other end as well, such as a fork of the parent:
    therefore the parent's id is looked at too. This process ends as well, with a traceback, when a
    message cannot be read or passed on.
    """

    def read() -> None:
        try:
            while os.getppid() == parent_pid:
                if connection.poll(_POLL_S):
                    on_message(connection.recv())
        except (EOFError, OSError):
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    threading.Thread(target=read, name="diffulex-parent", daemon=True).start()
