# SPDX-License-Identifier: Apache-2.0
"""A record of every step, in a ring: what it did and where its time went.

Records are packed into preallocated memory by the one thread that steps; readers copy them and drop
those that were overwritten meanwhile, so that no thread waits for a lock.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffulex.env import get_text
from diffulex.errors import ConfigError
from diffulex.log import get_logger

__all__ = ["STEP_DTYPE", "StepRing", "StepTimes", "read_step_trace"]

logger = get_logger(__name__)

#: Fields of a record. Times are those of the host; the five stages tile the step.
STEP_DTYPE = np.dtype(
    [
        ("step", "<i8"),  # since the engine exists, from 0
        ("t_start_ns", "<i8"),  # of the clock of time.perf_counter
        ("schedule_us", "<f4"),
        ("prepare_us", "<f4"),  # upload of the plan; 0 where the device plans its steps
        ("forward_us", "<f4"),  # for such steps, until their output is there
        ("sample_us", "<f4"),  # head and sampler, until their output is there
        ("postprocess_us", "<f4"),  # completion, books
        ("n_prefill", "<i4"),  # requests
        ("n_decode", "<i4"),  # requests
        ("query_rows", "<i4"),
        ("kv_pages_used", "<i4"),  # after the step
        ("graph_bucket", "<i4"),  # requests of the graph that was replayed, or -1
        ("decided", "<i4"),  # tokens
        ("committed_blocks", "<i4"),
        ("preempted", "<i4"),  # requests
    ]
)
assert STEP_DTYPE.names is not None
_NAMES: tuple[str, ...] = STEP_DTYPE.names
_STAGES, _COUNTS = _NAMES[2:7], _NAMES[7:]
#: Borders between the stages, in seconds.
_MARKS = ("started", "scheduled", "forward", "sample", "collected", "ended")
# A record as it is kept: stages are worked out for those who read it.
_KEPT = np.dtype(
    [("step", "<i8"), *((name, "<f8") for name in _MARKS), *((name, "<i4") for name in _COUNTS)]
)
_RECORD = struct.Struct("<q6d8i")
_FLUSH_BYTES = 1 << 16
_FLUSH_NS = 1_000_000_000


class StepTimes:
    """When the stages of the step under way began, by `time.perf_counter`; 0.0: not told."""

    __slots__ = ("collected", "forward", "graph_bucket", "sample", "scheduled", "started")

    def __init__(self) -> None:
        self.started = self.scheduled = self.forward = self.sample = self.collected = 0.0
        self.graph_bucket = -1

    def start(self, now: float) -> None:
        """A step begins."""
        self.started, self.forward, self.sample, self.graph_bucket = now, 0.0, 0.0, -1


class StepRing:
    """The last records.

    Args:
        capacity: records that are kept, at least 1.
        stream: file that receives every record as a line of JSON; empty: none.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, capacity: int, stream: str = "") -> None:
        self._capacity = capacity
        # One more than are kept: the next record is written while readers copy the others.
        self._memory = np.zeros(capacity + 1, _KEPT)
        self._buffer = memoryview(self._memory.view(np.uint8).data)
        self._count = 0
        self._file = -1
        self._lines: list[bytes] = []
        self._num_bytes = self._flushed_ns = 0
        if stream:
            try:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                self._file = os.open(Path(stream).expanduser(), flags, 0o644)
            except OSError as error:
                raise ConfigError(
                    f"DIFFULEX_STEP_TRACE: expected a file that can be written, got {stream!r}"
                    f" ({error.strerror})"
                ) from error

    @classmethod
    def of(cls, capacity: int) -> StepRing | None:
        """The ring of an engine that keeps `capacity` records; None: neither kept nor streamed.

        Raises:
            ConfigError: the file that DIFFULEX_STEP_TRACE names cannot be opened.
        """
        stream = get_text("DIFFULEX_STEP_TRACE")
        return cls(max(capacity, 1), stream) if capacity > 0 or stream else None

    def add(
        self,
        times: StepTimes,
        ended: float,
        num_prefill_reqs: int,
        num_decode_reqs: int,
        num_rows: int,
        num_pages: int,
        decided: int,
        committed: int,
        preempted: int,
    ) -> None:
        """Appends the record of a step; see STEP_DTYPE."""
        count = self._count
        _RECORD.pack_into(
            self._buffer,
            count % (self._capacity + 1) * _RECORD.size,
            count,
            times.started,
            times.scheduled,
            times.forward or times.scheduled,
            times.sample or times.collected,
            times.collected,
            ended,
            num_prefill_reqs,
            num_decode_reqs,
            num_rows,
            num_pages,
            times.graph_bucket,
            decided,
            committed,
            preempted,
        )
        self._count = count + 1
        if self._file >= 0:
            self._write(self.last(1)[0].item())

    def last(self, count: int | None = None) -> np.ndarray[Any, np.dtype[np.void]]:
        """The last `count` records (None: all that are kept), the oldest first. From any thread.

        Raises:
            ValueError: a negative count.
        """
        if count is not None and count < 0:
            raise ValueError(f"step_stats: expected last_n >= 0, got {count}")
        end = self._count
        kept = min(end, self._capacity)
        first = end - (kept if count is None else min(count, kept))
        copy = self._memory[np.arange(first, end) % (self._capacity + 1)]
        # Steps may have gone on meanwhile, and have replaced the oldest.
        return _records(copy[max(self._count - self._capacity - first, 0) :])

    def _write(self, record: tuple[Any, ...]) -> None:
        pairs = zip(_NAMES, record, strict=True)
        values = ((k, round(v, 3) if isinstance(v, float) else v) for k, v in pairs)
        line = json.dumps({"pid": os.getpid(), **dict(values)}).encode() + b"\n"
        self._lines.append(line)
        self._num_bytes += len(line)
        now = record[1]
        if self._num_bytes >= _FLUSH_BYTES or now - self._flushed_ns >= _FLUSH_NS:
            self._flushed_ns = now
            self.flush()

    def flush(self) -> None:
        """Writes what is waiting to the file, whole lines in one call: engines may share a file.

        A file that cannot be written, such as one on a full disk, is given up with a warning: that is
        no reason for a step to fail.
        """
        if not self._lines:
            return
        waiting = b"".join(self._lines)
        self._lines.clear()
        self._num_bytes = 0
        try:
            while waiting:
                waiting = waiting[os.write(self._file, waiting) :]
        except OSError as error:
            logger.warning(
                "DIFFULEX_STEP_TRACE: no more records are written: %s", error.strerror or error
            )
            self._release()

    def close(self) -> None:
        """Completes and closes the file; the records stay. Idempotent."""
        if self._file >= 0:
            self.flush()
            self._release()

    def _release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            with contextlib.suppress(OSError):
                os.close(file)


def _records(kept: np.ndarray[Any, np.dtype[np.void]]) -> np.ndarray[Any, np.dtype[np.void]]:
    """Records with the fields of STEP_DTYPE."""
    records = np.empty(kept.size, STEP_DTYPE)
    for name in ("step", *_COUNTS):
        records[name] = kept[name]
    records["t_start_ns"] = kept["started"] * 1e9
    for stage, begin, end in zip(_STAGES, _MARKS[:-1], _MARKS[1:], strict=True):
        records[stage] = (kept[end] - kept[begin]) * 1e6
    return records


def read_step_trace(lines: Iterable[str]) -> list[Mapping[str, Any]]:
    """Records of a file that DIFFULEX_STEP_TRACE named.

    Raises:
        ValueError: a line is none.
    """
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            is_record = isinstance(record, dict) and record.keys() >= set(_NAMES)
        except ValueError:
            is_record = False
        if not is_record:
            raise ValueError(f"step trace: expected a record in line {number}, got {line[:40]!r}")
        records.append(record)
    return records
