# SPDX-License-Identifier: Apache-2.0
"""The state of a run while it goes on: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import importlib
import sys
import time
from typing import TYPE_CHECKING, Any

from diffulex.log import get_logger

if TYPE_CHECKING:
    from diffulex.engine.output import RequestOutput
    from diffulex.likelihood.scorer import OneScore

__all__ = ["Live", "ScoreLive"]

logger = get_logger(__name__)

_LOG_SECONDS = 10.0


class Live:
    """Counts of one task, by running sums.

    Args:
        task: its name.
        num_total: requests, those of an earlier part of the run included.
        style: ``bar``, ``log``, ``none`` or ``auto``.
        num_done: requests that were done before.
        num_right: sum of their scores; None where answers are scored later.
    """

    def __init__(
        self,
        task: str,
        num_total: int,
        style: str,
        num_done: int = 0,
        num_right: float | None = 0.0,
    ) -> None:
        self._task, self._num_total = task, num_total
        self._num_done, self._num_right = num_done, num_right
        self._tokens = self._forwards = 0
        self._start = self._shown = time.monotonic()
        if style == "auto":
            style = "bar" if sys.stderr.isatty() else "log"
        self._style = style
        self._bar: Any = None
        if style == "bar":
            # By name: the package ships no types.
            tqdm = importlib.import_module("tqdm").tqdm
            self._bar = tqdm(total=num_total, initial=num_done, desc=task)

    def finished(self, output: RequestOutput, score: float | None) -> None:
        """Counts one request; `score` is from 0 to 1, None if it is not known yet."""
        self._num_done += 1
        self._tokens += output.metrics.completion_tokens
        self._forwards += output.metrics.nfe
        if score is None:
            self._num_right = None
        elif self._num_right is not None:
            self._num_right += score
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self.numbers(), refresh=False)
            self._bar.update()
        elif self._style == "log" and time.monotonic() - self._shown >= _LOG_SECONDS:
            self._shown = time.monotonic()
            logger.info("%s: %d/%d %s", self._task, self._num_done, self._num_total, self.numbers())

    def numbers(self) -> str:
        """Accuracy so far, completion tokens per forward, and completion tokens per second."""
        seconds = max(time.monotonic() - self._start, 1e-6)
        parts = []
        if self._num_right is not None and self._num_done:
            parts.append(f"accuracy {100 * self._num_right / self._num_done:.1f} %")
        parts.append(f"tpf {self._tokens / max(self._forwards, 1):.2f}")
        parts.append(f"{self._tokens / seconds:.1f} tokens/s")
        return ", ".join(parts)

    def close(self) -> None:
        """Takes the bar off, or writes the last line."""
        if self._bar is not None:
            self._bar.close()
        elif self._style == "log":
            logger.info("%s: %d/%d %s", self._task, self._num_done, self._num_total, self.numbers())


class ScoreLive(Live):
    """Counts of what is scored; the arguments of `Live`."""

    def scored(self, score: OneScore) -> None:
        """Counts one text."""
        self._num_done += 1
        self._forwards = score.forward_passes
        self._show()

    def numbers(self) -> str:
        """Forwards so far, and texts per second."""
        seconds = max(time.monotonic() - self._start, 1e-6)
        return f"{self._forwards} forwards, {self._num_done / seconds:.1f}/s"
