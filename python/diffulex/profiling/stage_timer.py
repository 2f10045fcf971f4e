# SPDX-License-Identifier: Apache-2.0
"""Times of the stages of the first steps, on the host and on the device, as CSV.

Events of the device are read a few steps later, when they are over: nothing waits for it.
"""

from __future__ import annotations

import contextlib
import csv
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from diffulex.env import get_text
from diffulex.errors import ConfigError

if TYPE_CHECKING:
    from diffulex.profiling.scopes import Stage

__all__ = ["COLUMNS", "CudaStageTimer"]

COLUMNS = (*("scope", "rank", "pid", "step", "stage", "cpu_ms", "cuda_ms", "device", "exception"),)
#: Steps after which the events of one are read.
_LAG = 8


class _Row(NamedTuple):
    """A stage that is over."""

    step: int
    fields: tuple[Any, ...]
    events: tuple[Any, Any] | None


class CudaStageTimer:
    """Times every stage until enough steps are over, and appends a line for each to a file.

    The file of a rank is `<stem>.rank<rank><suffix>`. The whole step is the stage `total`.

    Args:
        path: of the file, before the rank is put into it.
        max_steps: steps that are timed.
        device: of the engine; without CUDA there is no time of a device.
        rank: of this process.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path, max_steps: int, device: str, rank: int = 0) -> None:
        self.path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        try:
            self._file = self.path.open("a", encoding="utf-8", newline="")
        except OSError as error:
            raise ConfigError(
                "DIFFULEX_CUDA_STAGE_TIMING_PATH: expected a file that can be written, got"
                f" {str(path)!r} ({error.strerror})"
            ) from error
        self._writer = csv.writer(self._file)
        if self._file.tell() == 0:
            self._writer.writerow(COLUMNS)
        self._max_steps, self._device, self._rank = max_steps, device, rank
        self._has_events = device.startswith("cuda")
        self._rows: deque[_Row] = deque()
        self._step = -1

    @classmethod
    def of_environment(cls, device: str, rank: int = 0) -> CudaStageTimer | None:
        """The timer that the environment asks for; None: it asks for none.

        Raises:
            ConfigError: a number of steps that is none, or a file that cannot be opened.
        """
        path = get_text("DIFFULEX_CUDA_STAGE_TIMING_PATH")
        count = get_text("DIFFULEX_CUDA_STAGE_TIMING_MAX_STEPS")
        if not path:
            return None
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError(
                f"DIFFULEX_CUDA_STAGE_TIMING_MAX_STEPS: expected an int >= 1, got {count!r}"
            )
        return cls(Path(path).expanduser(), int(count), device, rank)

    @property
    def is_over(self) -> bool:
        """Whether enough steps were timed."""
        return self._step >= self._max_steps

    def __call__(self, stage: Stage) -> AbstractContextManager[object]:
        if stage.scope == "diffulex.engine.step":
            self._step += 1
            self._write(self._step - _LAG)
            if self.is_over:
                self.close()
        # What comes before the first step belongs to none.
        is_timed = 0 <= self._step < self._max_steps
        return self._timed(stage) if is_timed else contextlib.nullcontext()

    @contextlib.contextmanager
    def _timed(self, stage: Stage) -> Iterator[None]:
        step, failure = self._step, ""
        begin = self._event()
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            milliseconds = (time.perf_counter() - start) * 1e3
            end = None if begin is None else self._event()
            name = "total" if stage.name == "step" else stage.name
            fields = (stage.area, self._rank, os.getpid(), step, name, f"{milliseconds:.4f}")
            events = None if begin is None or end is None else (begin, end)
            self._rows.append(_Row(step, (*fields, failure), events))

    def _event(self) -> Any:
        """An event at this place of the stream; None without a device, or while a graph is captured."""
        if not self._has_events:
            return None
        import torch  # noqa: PLC0415 (loaded already)

        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _write(self, last_step: int) -> None:
        """Writes the rows of the steps up to one."""
        while self._rows and self._rows[0].step <= last_step:
            _, (*fields, failure), events = self._rows.popleft()
            cuda_ms = ""
            if events is not None:
                begin, end = events
                end.synchronize()  # steps ago: it does not wait
                cuda_ms = f"{begin.elapsed_time(end):.4f}"
            self._writer.writerow((*fields, cuda_ms, self._device, failure))

    def close(self) -> None:
        """Writes what is left and closes the file. Idempotent."""
        if not self._file.closed:
            self._write(self._step)
            self._file.close()
