# SPDX-License-Identifier: Apache-2.0
"""Time of one op with cold caches: calls over rotated buffers in a CUDA graph, events around it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Timing", "copy_bandwidth", "num_rotations", "time_calls"]

#: Bytes that the rotated buffers of one op must cover: three times an L2 of 60 MB.
ROTATED_BYTES = 180_000_000
#: Microseconds that a graph replay must last at least.
REPLAY_US = 200.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call."""

    median: float
    p10: float
    p90: float


def num_rotations(num_bytes: float, limit: int = 64) -> int:
    """Buffer sets to rotate when one call touches `num_bytes`, so that every call meets cold data."""
    return max(1, min(limit, -(-ROTATED_BYTES // max(1, int(num_bytes)))))


def _quantiles(samples: list[float]) -> Timing:
    samples.sort()
    last = len(samples) - 1
    return Timing(samples[last // 2], samples[last // 10], samples[last - last // 10])


def time_calls(calls: Sequence[Callable[[], object]], repeats: int = 50) -> Timing:
    """Median, 10th and 90th percentile of one call; call i uses buffer set i.

    On CUDA the calls are captured into a graph and the graph is replayed; on the CPU they are timed
    one by one.
    """
    if not torch.cuda.is_available():
        samples = []
        for index in range(max(3, min(repeats, 5))):
            start = time.perf_counter()
            calls[index % len(calls)]()
            samples.append((time.perf_counter() - start) * 1e6)
        return _quantiles(samples)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    estimate = _elapsed_us(lambda: [call() for call in calls]) / len(calls)
    copies = max(len(calls), int(REPLAY_US / max(estimate, 1.0)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            calls[index % len(calls)]()
    graph.replay()
    replay_us = _elapsed_us(graph.replay)
    # Long replays repeat less often: the whole table has to fit a few minutes.
    repeats = max(10, min(repeats, int(300_000 / replay_us)))
    for _ in range(10):
        if replay_us < 20_000:
            graph.replay()
    return _quantiles([_elapsed_us(graph.replay) / copies for _ in range(repeats)])


def _elapsed_us(run: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def copy_bandwidth(device: str) -> float:
    """Bytes read plus written per second by a large copy.

    Outside a graph: inside, the driver makes it a copy node, which moves a third less.
    """
    source = torch.randint(0, 255, (1 << (30 if device == "cuda" else 22),), dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    copies = 4  # so that the time of a launch does not count
    if device == "cpu":
        return 2 * source.numel() / (time_calls([lambda: target.copy_(source)]).median * 1e-6)

    def copy() -> None:
        for _ in range(copies):
            target.copy_(source)

    copy()
    seconds = _quantiles([_elapsed_us(copy) for _ in range(10)]).median * 1e-6
    return copies * 2 * source.numel() / seconds
