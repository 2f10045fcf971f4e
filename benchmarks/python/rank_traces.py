# SPDX-License-Identifier: Apache-2.0
"""What the recordings of several ranks say of their exchanges: how many, how long, who came late.

A trace of torch's profiler has the exchanges of a rank as kernels of this package or of NCCL, or as what
gloo does on the host. Decode steps add up the same number of partial sums each, and those that sample end
with the exchange of their rows: so the first exchange of each step is known. Times of processes of one host
are of one clock. Those of work on GPUs are converted to it, for each process by its profiler; how well those of several
GPUs agree was not compared yet.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "RankTotals",
    "Steps",
    "Work",
    "busy_and_gaps",
    "device_work",
    "exchanges",
    "host_work",
    "rank_totals",
    "whole_steps",
]

_DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_EXCHANGE = re.compile(r"gloo:|one_shot_kernel|two_shot_kernel|gather_records_kernel|ncclDevKernel")
_GATHER = re.compile(r"gloo:all_?gather|gather_records_kernel|ncclDevKernel_AllGather")


class Work(NamedTuple):
    """One kernel, copy or exchange, in microseconds."""

    name: str
    begin: float
    end: float


class Steps(NamedTuple):
    """Steps of a rank, each from its first exchange to that of the next; in microseconds.

    Whatever comes before them is not counted: in the first step of a recording ranks wait for each other's
    profiler to begin.
    """

    count: int
    begin: float
    end: float

    def within(self, work: Iterable[Work]) -> list[Work]:
        """What begins in them."""
        return [item for item in work if self.begin <= item.begin < self.end]


class RankTotals(NamedTuple):
    """What one rank does in a step.

    Attributes:
        rank: its number.
        steps: that were looked at.
        step_ms: mean period of a step.
        exchanges: per step.
        exchange_us: of a step in which any was under way, its wait for the others included.
        exchange_percent: share of that.
        busy_percent: share in which the device did anything; None: on the host.
        late_us: median time after the first rank to begin the first exchange of a step.
    """

    rank: int
    steps: int
    step_ms: float
    exchanges: float
    exchange_us: float
    exchange_percent: float
    busy_percent: float | None
    late_us: float


def _events(trace: Path) -> list[dict[str, object]]:
    events: list[dict[str, object]] = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return events


def _work(events: Sequence[dict[str, object]]) -> list[Work]:
    """By begin."""
    work = [
        Work(
            str(event["name"]),
            float(str(event["ts"])),
            float(str(event["ts"])) + float(str(event["dur"])),
        )
        for event in events
    ]
    return sorted(work, key=lambda item: item.begin)


def device_work(trace: Path) -> list[Work]:
    """Everything the device did, by begin."""
    return _work([event for event in _events(trace) if event.get("cat") in _DEVICE_EVENTS])


def exchanges(trace: Path) -> list[Work]:
    """Those with other ranks, by begin."""
    kinds = ("kernel", "user_annotation")
    events = [event for event in _events(trace) if event.get("cat") in kinds]
    return _work([event for event in events if _EXCHANGE.search(str(event["name"]))])


def busy_and_gaps(work: Sequence[Work]) -> tuple[float, list[tuple[float, str, str]]]:
    """Microseconds in which anything ran, and the idle spans with what came before and after."""
    busy, gaps = 0.0, []
    end, before = work[0].begin, work[0].name
    for item in work:
        if item.begin > end:
            gaps.append((item.begin - end, before, item.name))
        busy += max(0.0, item.end - max(end, item.begin))
        if item.end > end:
            end, before = item.end, item.name
    return busy, gaps


def host_work(trace: Path) -> list[Work]:
    """Calls of ops and exchanges. Of an op that calls others the time of these is taken off its end."""
    found = exchanges(trace)
    by_thread: dict[object, list[dict[str, object]]] = {}
    for event in _events(trace):
        if event.get("cat") == "cpu_op":
            by_thread.setdefault(event["tid"], []).append(event)
    for events in by_thread.values():
        callers: list[tuple[float, int]] = []
        # Of those that begin together the longest one calls the others.
        for item in sorted(_work(events), key=lambda item: (item.begin, -item.end)):
            while callers and callers[-1][0] <= item.begin:
                callers.pop()
            if callers:
                caller = found[callers[-1][1]]
                found[callers[-1][1]] = caller._replace(end=caller.end - (item.end - item.begin))
            callers.append((item.end, len(found)))
            found.append(item)
    return found


def _firsts(work: Sequence[Work]) -> list[Work]:
    """The first exchange of each step from the second one on that sampled.

    Raises:
        ValueError: steps have other numbers of sums.
    """
    counts, sums = [0], []
    for item in work:
        if _GATHER.search(item.name):
            if counts[-1]:  # else one more of the same step
                counts.append(0)
        else:
            counts[-1] += 1
            sums.append(item)
    whole = counts[1:-1]
    if not whole:
        return []
    period = min(whole)
    if any(count % period for count in whole):
        raise ValueError(f"expected as many sums in every step, got {sorted(set(whole))}")
    return sums[counts[0] :: period]


def _aligned(own: Sequence[Work], other: Sequence[Work]) -> dict[int, Work]:
    """Those of another rank by the index of the same step in `own`. A recording may have one step more or
    less than another at its ends; an exchange ends on all ranks at about the same time."""

    def pairs(shift: int) -> dict[int, Work]:
        indices = range(max(0, -shift), min(len(own), len(other) - shift))
        return {index: other[index + shift] for index in indices}

    def distance(found: dict[int, Work]) -> float:
        differences = [abs(own[index].end - item.end) for index, item in found.items()]
        return statistics.median(differences) if differences else float("inf")

    return min(map(pairs, (0, -1, 1)), key=distance)


def whole_steps(trace: Path) -> Steps:
    """The steps that a trace has from their beginnings to their ends, the first and the last ones apart.

    Raises:
        ValueError: there are none.
    """
    first = _firsts(exchanges(trace))
    if len(first) < 2:
        raise ValueError(f"expected exchanges of at least 2 steps, got {len(first)}")
    return Steps(len(first) - 1, first[0].begin, first[-1].begin)


def rank_totals(traces: Sequence[Path]) -> tuple[list[RankTotals], float]:
    """The totals of each rank, and the median time from the first rank to the last that begins the first
    exchange of a step, in microseconds.

    Args:
        traces: of the ranks of one engine, in their order; decode steps alone.

    Raises:
        ValueError: a trace has not two steps, or the ranks have none in common.
    """
    firsts = [_firsts(exchanges(trace)) for trace in traces]
    begins = [_aligned(firsts[0], each) for each in firsts]
    common = [i for i in begins[0] if all(i in each for each in begins)]
    if not common:
        raise ValueError("expected steps that all ranks have recorded, got none")
    late = [[each[i].begin for each in begins] for i in common]
    totals = []
    for rank, trace in enumerate(traces):
        steps = whole_steps(trace)
        span = steps.end - steps.begin
        own, device = steps.within(exchanges(trace)), steps.within(device_work(trace))
        waited, _ = busy_and_gaps(own)
        busy = round(100 * busy_and_gaps(device)[0] / span, 2) if device else None
        totals.append(
            RankTotals(
                rank,
                steps.count,
                step_ms=round(span / steps.count / 1e3, 4),
                exchanges=round(len(own) / steps.count, 2),
                exchange_us=round(waited / steps.count, 1),
                exchange_percent=round(100 * waited / span, 2),
                busy_percent=busy,
                late_us=round(statistics.median(times[rank] - min(times) for times in late), 1),
            )
        )
    return totals, round(statistics.median(max(times) - min(times) for times in late), 1)
