# SPDX-License-Identifier: Apache-2.0
"""Time of one op: calls over rotated buffers in a CUDA graph, events around it."""

from __future__ import annotations

import functools
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "Clocks",
    "Timing",
    "elapsed_us",
    "num_rotations",
    "quantiles",
    "time_alone",
    "time_and_watch",
    "time_calls",
]

#: Bytes that the rotated buffers of one op should cover: three times an L2 of 60 MB.
ROTATED_BYTES = 180_000_000
#: Microseconds that a graph replay must last at least.
REPLAY_US = 200.0
#: Microseconds of all replays of one op after which no more are timed, and how many are at least.
TOTAL_US = 150_000.0
MIN_REPEATS = 10
#: Microseconds of replays in front of each reading of the clocks.
WATCH_US = 10_000.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call."""

    median: float
    p10: float
    p90: float

    def minus(self, microseconds: float) -> Timing:
        return Timing(self.median - microseconds, self.p10 - microseconds, self.p90 - microseconds)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Of the device while an op ran: megahertz of its processors, watts (a mean of the driver's)."""

    sm_mhz: float
    watts: float


def num_rotations(num_bytes: float, limit: int = 64) -> int:
    """Buffer sets to rotate when one call touches `num_bytes`, so that every call meets cold data.

    At most `limit`: small buffers stay in L2 all the same, and their rows are marked.
    """
    return max(1, min(limit, -(-ROTATED_BYTES // max(1, int(num_bytes)))))


def quantiles(samples: Sequence[float]) -> Timing:
    """Median, 10th and 90th percentile: each a sample that was measured."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(ordered[last // 2], ordered[last // 10], ordered[last - last // 10])


def elapsed_us(run: Callable[[], object]) -> float:
    """Microseconds between two events around `run`."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def _captured(calls: Sequence[Callable[[], object]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of the calls in turn that lasts long enough, and how many it holds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    copies = len(calls)
    graph = _graph(calls, copies)
    graph.replay()
    replay_us = elapsed_us(graph.replay)
    if replay_us < REPLAY_US:
        copies = math.ceil(copies * REPLAY_US / replay_us)
        graph = _graph(calls, copies)
    return graph, copies


def _graph(calls: Sequence[Callable[[], object]], copies: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            calls[index % len(calls)]()
    return graph


def _replayed(graph: torch.cuda.CUDAGraph, copies: int, repeats: int) -> Timing:
    graph.replay()
    replay_us = elapsed_us(graph.replay)
    # Long replays repeat less often: the whole table has to fit a few minutes.
    repeats = max(MIN_REPEATS, min(repeats, int(TOTAL_US / replay_us)))
    if replay_us < 20_000:
        for _ in range(10):
            graph.replay()
    return quantiles([elapsed_us(graph.replay) / copies for _ in range(repeats)])


def time_calls(calls: Sequence[Callable[[], object]], repeats: int = 50) -> Timing:
    """Of one call in a row of them; call i uses buffer set i.

    On CUDA the calls are captured into a graph and the graph is replayed: a kernel that is launched
    as a dependent one overlaps the end of the call in front, as it does in a decode step. On the CPU
    they are timed one by one.
    """
    if torch.cuda.is_available():
        return _replayed(*_captured(calls), repeats)
    samples = []
    for index in range(max(3, min(repeats, 5))):
        start = time.perf_counter()
        calls[index % len(calls)]()
        samples.append((time.perf_counter() - start) * 1e6)
    return quantiles(samples)


def time_alone(calls: Sequence[Callable[[], object]], repeats: int = 20) -> Timing | None:
    """Of one call that overlaps no other; None on the CPU, where none overlaps.

    In front of each call stands an ordinary kernel of one thread, which no earlier kernel lets
    start before it has ended and which lets none start before itself has; what a chain of these
    takes by itself is subtracted.
    """
    if not torch.cuda.is_available():
        return None
    flag = torch.zeros(1, device="cuda")

    def behind_a_barrier(call: Callable[[], object]) -> None:
        flag.add_(1)
        call()

    spaced = [functools.partial(behind_a_barrier, call) for call in calls]
    return _replayed(*_captured(spaced), repeats).minus(_barrier_us())


@functools.cache
def _barrier_us() -> float:
    """Microseconds of the kernel that keeps calls apart, in a chain of its own."""
    flag = torch.zeros(1, device="cuda")
    return time_calls([lambda: flag.add_(1)] * 100).median


def time_and_watch(calls: Sequence[Callable[[], object]]) -> tuple[Timing, Clocks | None]:
    """`time_calls`, and the device's clock and power meanwhile.

    No clocks on the CPU and where the driver's library cannot be asked.
    """
    if not torch.cuda.is_available():
        return time_calls(calls), None
    graph, copies = _captured(calls)
    timing = _replayed(graph, copies, 50)
    replays = max(1, int(WATCH_US / (timing.median * copies)))
    readings = []
    for _ in range(3):
        for _ in range(replays):
            graph.replay()
        try:
            readings.append((float(torch.cuda.clock_rate()), torch.cuda.power_draw() / 1e3))
        except Exception:  # whatever the driver's library raises
            break
    torch.cuda.synchronize()
    if not readings:
        return timing, None
    return timing, Clocks(*(statistics.median(column) for column in zip(*readings)))
