# SPDX-License-Identifier: Apache-2.0
"""Counters of the backend, in the shape heartbeats carry and /metrics exposes.

Plain numbers: counting a step costs a few microseconds on the engine thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffulex_ext import _core

__all__ = ["ServingStats"]

#: Steps of prompts alone, of prompts beside decoding requests, and without prompts.
_PHASES = ("prefill", "mixed", "decode")
_STEP_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_DENOISE_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_THROUGHPUT_WINDOW_S = 1.0


class _Histogram:
    """Counts per bucket, the last one without an upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def report(self, **labels: str) -> dict[str, Any]:
        return {
            "labels": labels,
            "bounds": list(self.bounds),
            "counts": list(self.counts),
            "sum": self.sum,
        }


class ServingStats:
    """What the steps of a serving engine add up to."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._times = {phase: _Histogram(_STEP_BOUNDS) for phase in _PHASES}
        self._batch = _Histogram(_BATCH_BOUNDS)
        self._denoise = _Histogram(_DENOISE_BOUNDS)
        self._window_start = time.perf_counter()
        self._window_tokens = 0
        self._throughput = 0.0

    def add_step(
        self, seconds: float, num_requests: int, num_tokens: int, *, num_prefilling: int
    ) -> None:
        """Counts one step of so many requests, those with prompts in it, and tokens that it decided."""
        self.num_steps += 1
        if num_requests == 0:
            return
        with_prompts = "prefill" if num_prefilling == num_requests else "mixed"
        self._times[with_prompts if num_prefilling else "decode"].add(seconds)
        self._batch.add(num_requests)
        self._window_tokens += num_tokens

    def add_block(self, num_steps: int) -> None:
        """Counts a block that needed so many forwards until it was cached."""
        self._denoise.add(num_steps)

    def report(
        self, stats: _core.SchedulerStats, page_size: int, gauges: Mapping[str, float]
    ) -> dict[str, Any]:
        """The numbers, by the names of the metrics without their prefix.

        Args:
            stats: of the scheduler.
            page_size: prefix lookups are reported in pages.
            gauges: further ones.
        """
        now = time.perf_counter()
        if now - self._window_start >= _THROUGHPUT_WINDOW_S:
            self._throughput = self._window_tokens / (now - self._window_start)
            self._window_start, self._window_tokens = now, 0
        used = stats.num_pages - stats.num_free_pages
        steps = {
            "prefill": stats.num_prefill_steps,
            "mixed": stats.num_mixed_steps,
            "decode": stats.num_decode_steps,
        }
        return {
            "gauges": {
                "requests_running": stats.num_running,
                "requests_waiting": stats.num_waiting,
                "kv_pages": stats.num_pages,
                "kv_pages_free": stats.num_free_pages,
                "kv_cache_usage_ratio": used / stats.num_pages if stats.num_pages else 0.0,
                "request_slots_used": stats.num_running,
                **gauges,
            },
            "counters": {
                "forward_steps_total": [
                    {"labels": {"phase": phase}, "value": count} for phase, count in steps.items()
                ],
                "preemptions_total": stats.num_preemptions,
                "prefix_cache_queries_total": stats.num_prefix_query_tokens // page_size,
                "prefix_cache_hits_total": stats.num_prefix_hit_tokens // page_size,
            },
            "histograms": {
                "step_time_seconds": [
                    histogram.report(phase=phase) for phase, histogram in self._times.items()
                ],
                "batch_size": [self._batch.report()],
                "block_denoise_steps": [self._denoise.report()],
            },
            "last_gen_throughput": self._throughput,
        }
