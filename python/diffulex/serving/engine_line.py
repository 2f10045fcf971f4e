# SPDX-License-Identifier: Apache-2.0
"""What a serving engine says about itself: a line every ten seconds while it is busy, also within one
step, and a last one."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from diffulex.engine.metrics import ratio
from diffulex.log import format_duration, get_logger

if TYPE_CHECKING:
    from diffulex.engine.engine import Diffulex
    from diffulex.engine.metrics import RunStats
    from diffulex_ext import _core

__all__ = ["EngineLine"]

logger = get_logger("diffulex.engine")

_INTERVAL_S = 10.0
_WATCH_S = 1.0


class _Totals(NamedTuple):
    """Counters at one moment."""

    at: float
    run: RunStats
    prefix_hits: int
    prefix_queries: int
    decode_steps: int

    @classmethod
    def of(cls, now: float, run: RunStats, stats: _core.SchedulerStats) -> _Totals:
        """The counters now; `run` goes on being written."""
        return cls(
            now,
            dataclasses.replace(run),
            stats.num_prefix_hit_tokens,
            stats.num_prefix_query_tokens,
            stats.num_decode_steps,
        )


class EngineLine:
    """Logs what the steps of one engine come to.

    Args:
        engine: is asked when a line is due, and not in between.
        interval_s: seconds between two lines.
        clock: tells the time.
    """

    def __init__(
        self,
        engine: Diffulex,
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._interval_s, self._clock = engine, interval_s, clock
        self._begin: _Totals | None = None
        self._last_step = self._due = self._said = 0.0
        #: When the running step began, and with how many requests.
        self._running: tuple[float, int] | None = None
        self._watch: threading.Thread | None = None
        self._stop = threading.Event()

    def before_step(self, now: float, num_requests: int) -> None:
        """A step begins at this time of the clock; another thread says so if it takes long."""
        # In this order: the other thread may look in between.
        self._said = now
        self._running = now, num_requests
        if self._watch is None:
            self._watch = threading.Thread(
                target=self._watch_steps, name="diffulex-engine-line", daemon=True
            )
            self._watch.start()

    def end_step(self) -> None:
        """No step runs; where one failed, nothing else is said of it."""
        self._running = None

    def after_step(self, now: float) -> None:
        """A step ended at this time of the clock: writes a line if one is due."""
        began = now if self._running is None else self._running[0]
        self._running = None
        if now >= self._due:
            self._write(now, began)
        self._last_step = now

    def while_running(self, now: float) -> None:
        """Writes a line if the running step has been silent for long; from any thread.

        It says nothing that only the thread of the engine may ask for.
        """
        running = self._running
        if running is None or now - self._said < self._interval_s:
            return
        self._said = now
        step = self._engine.run_stats.num_steps + 1
        text = "step %d has taken %s so far, %d requests open"
        logger.info(text, step, format_duration(now - running[0]), running[1])

    def _watch_steps(self) -> None:
        while not self._stop.wait(_WATCH_S):
            self.while_running(self._clock())

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._watch is not None:
            self._watch.join()

    def _write(self, now: float, began: float) -> None:
        stats = self._engine.stats()
        totals = _Totals.of(now, self._engine.run_stats, stats)
        # The first step, or one after a pause: nothing is said of the time without steps.
        is_busy = self._begin is not None and began - self._last_step < self._interval_s
        if is_busy and self._begin is not None and logger.isEnabledFor(logging.INFO):
            used = stats.num_pages - stats.num_free_pages
            kv = _percent(used, stats.num_pages)
            running = f"running {stats.num_running}, waiting {stats.num_waiting}, KV {kv}"
            logger.info("%s, %s", running, _rates(self._begin, totals))
        self._begin, self._due = totals, now + self._interval_s

    def final(self) -> None:
        """The last line, over the life of the engine; nothing if no step ran."""
        run, stats = self._engine.run_stats, self._engine.stats()
        if run.num_steps == 0:
            return
        logger.info(
            "served %d requests in %d steps and %s of steps: %d tokens committed, %.1f tok/s,"
            " TPF %s, prefix hits %s, preemptions %d, peak KV %s, graph fallbacks %d",
            stats.num_finished,
            run.num_steps,
            format_duration(run.total_s),
            run.committed_tokens,
            ratio(run.committed_tokens, run.total_s) or 0.0,
            _number(ratio(run.committed_tokens, run.num_forwards)),
            _percent(stats.num_prefix_hit_tokens, stats.num_prefix_query_tokens),
            stats.num_preemptions,
            _percent(run.peak_pages, run.num_pages),
            run.num_graph_fallbacks,
        )


def _rates(begin: _Totals, end: _Totals) -> str:
    """What happened between two moments."""
    seconds = max(end.at - begin.at, 1e-9)

    def change(name: str) -> int:
        return int(getattr(end.run, name) - getattr(begin.run, name))

    hits = _percent(end.prefix_hits - begin.prefix_hits, end.prefix_queries - begin.prefix_queries)
    graphs = _percent(change("num_graph_steps"), end.decode_steps - begin.decode_steps)
    committed = change("committed_tokens")
    return (
        f"prefix hits {hits}, {change('num_steps') / seconds:.1f} steps/s,"
        f" prefill {change('prefill_tokens') / seconds:.1f} tok/s,"
        f" decided {change('decided_tokens') / seconds:.1f} tok/s,"
        f" committed {committed / seconds:.1f} tok/s,"
        f" TPF {_number(ratio(committed, change('num_forwards')))}, graphs {graphs}"
    )


def _percent(part: float, whole: float) -> str:
    share = ratio(part, whole)
    return "-" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
