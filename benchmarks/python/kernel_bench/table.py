# SPDX-License-Identifier: Apache-2.0
"""How the results of the kernel benchmark are printed."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from kernel_bench.report import TARGET_GPU, TARGET_KINDS, verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kernel_bench.report import Result
    from kernel_bench.timing import Timing

__all__ = ["HEADER", "absences", "counts", "document", "row"]

_COLUMNS = (
    "op", "shape", "us", "p10", "alone", "floor", "cache", "MHz", "W", "peers (alone)",
    *(f"{kind} target" for kind in TARGET_KINDS), "error", "worst", "note",
)  # fmt: skip
HEADER = "| " + " | ".join(_COLUMNS) + " |\n" + "|---" * len(_COLUMNS) + "|"

LEGEND = f"""\
Microseconds. `us` is the median and `p10` the 10th percentile of replays of a CUDA graph of calls over rotated
buffers, where a call may overlap the end of the one in front, as in a decode step; `alone` is the median of calls that
overlap nothing (an ordinary kernel stands between them, and its time is subtracted), for peers in brackets.
The floor reads and writes each byte once at the ceilings measured in this run: written bytes and as many read
ones at the speed of a copy, further reads at that of the fastest of several kernels that only read, operations at
the rate of a square product of 8,192 with operands of their type. `cache`: cold where the buffers in turn cover
three times the L2, warm where all of them fit into it, partly between. `MHz` and `W` are the clock of the processors
and the driver's mean power while the op ran. A target of a peer is its median in this run, or what the note says of
it (FA3 with its scheduler's metadata computed once outside the graph, as an engine does once a step for all layers;
torch for dense products). A formula is a launch and a share of the bandwidth or of the tensor cores' rate on an
{TARGET_GPU}; a goal is a figure that was set; both are judged on an {TARGET_GPU} only. Every element of every row is
compared with float64: `error` is the norm of the difference over that of the reference, `worst` the largest deviation
over what one element is allowed (at most 1)."""


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _median(timing: Timing | None) -> float | None:
    return None if timing is None else timing.median


def _peers(result: Result) -> str:
    parts = []
    for name, timing in result.peers.items():
        alone = result.peers_alone.get(name)
        suffix = "" if alone is None else f" ({alone.median:.2f})"
        parts.append(f"{name} {timing.median:.2f}{suffix}")
    return ", ".join(parts) or "-"


def _target(result: Result, kind: str) -> str:
    target = result.targets.get(kind)
    if target is None or result.time is None:
        return "-"
    return f"{target:.2f} {verdict(result.time.median, target)}"


def _note(result: Result) -> str:
    notes = [result.note] if result.note else []
    if not result.is_correct:
        notes.append("WRONG")
    if result.is_below_floor:
        notes.append("below the floor: faster than the measured ceilings")
    return "; ".join(notes)


def row(result: Result) -> str:
    """One line of the Markdown table."""
    clocks = result.clocks
    cells = (
        result.op, result.shape, _number(_median(result.time)),
        _number(None if result.time is None else result.time.p10),
        _number(_median(result.alone)), _number(result.floor_us), result.cache,
        _number(None if clocks is None else clocks.sm_mhz, 0),
        _number(None if clocks is None else clocks.watts, 0), _peers(result),
        *(_target(result, kind) for kind in TARGET_KINDS),
        f"{result.error:.1e}", _number(result.worst), _note(result),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def absences(results: Iterable[Result]) -> list[str]:
    """Which peers were not timed, and why."""
    pairs = {pair for result in results for pair in result.absent.items()}
    return [f"{peer}: {reason}" for peer, reason in sorted(pairs)]


def counts(results: Sequence[Result]) -> str:
    """How many rows meet each kind of target."""
    parts = []
    for kind in TARGET_KINDS:
        found = [result.verdicts()[kind] for result in results if kind in result.verdicts()]
        parts.append(f"{kind}: {found.count('pass')} pass, {found.count('FAIL')} fail")
    wrong = sum(not result.is_correct for result in results)
    below = sum(result.is_below_floor for result in results)
    return f"{len(results)} rows; {'; '.join(parts)}; {wrong} wrong; {below} below the floor"


def document(facts: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The whole report in Markdown."""
    gpu, commands = facts.get("gpu", "CPU"), facts["command"]
    if isinstance(commands, str):
        commands = [commands]
    others = {name: value for name, value in facts.items() if name != "command"}
    lines = [
        f"# Kernels on one {gpu}", "", *(f"    {command}" for command in commands), "", LEGEND, "",
        "Reasons for misses: [README](README.md). Peers that were not timed are named behind each table.", "",
        *(f"    {name}: {value}" for name, value in others.items()), "", counts(results) + ".",
    ]  # fmt: skip
    for section, group in groupby(results, key=lambda result: result.section):
        part = list(group)
        lines += ["", f"## {section}", "", HEADER, *map(row, part)]
        if missing := absences(part):
            lines += ["", *(f"* {line}" for line in missing)]
    return "\n".join(lines) + "\n"
