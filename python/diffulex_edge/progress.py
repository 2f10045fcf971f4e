# SPDX-License-Identifier: Apache-2.0
"""The stages of an export: one line that moves on a terminal, log lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from diffulex.log import get_logger

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["STAGES", "Stages"]

logger = get_logger(__name__)

STAGES = ("load", "quantise", "export", "lower", "finalise", "self-check")
_WIDTH = 24


class Stages:
    """Shows which stage runs; a context manager.

    Args:
        is_shown: draw on a terminal; elsewhere each stage is a log line.
    """

    def __init__(self, *, is_shown: bool = True) -> None:
        self._is_drawn = is_shown and sys.stderr is not None and sys.stderr.isatty()
        self._start = self._begin = time.perf_counter()
        self._name = ""
        #: Seconds of every finished stage.
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str) -> None:
        """Ends the stage before and begins `name`."""
        self._finish()
        self._name, self._begin = name, time.perf_counter()
        if self._is_drawn:
            done = (STAGES.index(name) + 1) * _WIDTH // len(STAGES)
            bar = "#" * done + "." * (_WIDTH - done)
            seconds = self._begin - self._start
            # Written while no other code has the descriptor: stages begin outside of `quiet`.
            print(f"\r\x1b[K[{bar}] {name} {seconds:.0f}s", end="", file=sys.stderr, flush=True)
        else:
            logger.info("edge export: %s", name)

    def _finish(self) -> None:
        if self._name:
            self.seconds[self._name] = time.perf_counter() - self._begin
            self._name = ""

    def __enter__(self) -> Stages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._finish()
        if self._is_drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
