# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while a command starts: what is half imported is good for nothing, and knows no interrupt."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["INTERRUPTED", "ending_at_once", "import_at_once"]

#: Exit code of a command that was interrupted.
INTERRUPTED = 130
_ERRORS = 2
#: Also takes what stands in the last line of a terminal.
_CLEAR = "\r\x1b[K"


@contextmanager
def ending_at_once() -> Iterator[None]:
    """A block in which SIGINT ends the process with one line and the exit code 130.

    Nothing is cleaned up: this is for imports, and for what leaves nothing behind. Packages in C lose
    a KeyboardInterrupt and go on with half a module, which fails later as something else. Does nothing
    outside the main thread, or when the program has its own handler.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def import_at_once(name: str) -> None:
    """Imports a module, so that what uses it later finds it whole."""
    with ending_at_once():
        importlib.import_module(name)


def _end(number: int, frame: FrameType | None) -> None:
    start = _CLEAR if os.isatty(_ERRORS) else ""
    os.write(_ERRORS, f"{start}interrupted\n".encode())
    os._exit(INTERRUPTED)
