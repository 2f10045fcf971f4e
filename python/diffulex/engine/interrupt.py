# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at step boundaries."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["InterruptGuard", "deferred_interrupt", "uninterrupted"]


class InterruptGuard:
    """Turns the first SIGINT inside the block into a flag, so that the running step finishes.

    A second SIGINT raises KeyboardInterrupt at once. Does nothing outside the main thread, or when
    the program has its own handler.
    """

    def __init__(self) -> None:
        self.is_interrupted = False
        self._previous: Any = None
        self._is_installed = False

    def __enter__(self) -> InterruptGuard:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._is_installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, self._previous)
            self._is_installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt
        self.is_interrupted = True


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """A block that the first SIGINT cannot cut short: KeyboardInterrupt comes at its end."""
    guard = InterruptGuard()
    try:
        with guard:
            yield
    finally:
        if guard.is_interrupted:
            raise KeyboardInterrupt


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A short block at whose end the handler of SIGINT runs, whoever set it, and not within.

    From the third SIGINT on it runs at once: what the block waits for does not come.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 2:
            handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
