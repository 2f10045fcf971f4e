# SPDX-License-Identifier: Apache-2.0
"""The tables of results/README.md, printed from the JSON of bench_kernels.py.

PYTHONPATH=benchmarks/python python -m kernel_bench.summary benchmarks/results/h200_kernels.json
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_bench.report import TARGET_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Row = dict[str, Any]


def _us(value: float | None) -> str:
    """Three digits, as far as a figure in microseconds says something."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _median(row: Row, name: str | None = None) -> Any:
    """Of the op, or of a peer; None = not timed."""
    timing = row["time"] if name is None else row["peers"].get(name)
    return None if timing is None else timing["median"]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _counts(rows: list[Row]) -> list[str]:
    parts = []
    for kind in TARGET_KINDS:
        verdicts = [row["verdicts"][kind] for row in rows if kind in row["verdicts"]]
        parts.append(f"{verdicts.count('pass')} of {len(verdicts)} rows meet their {kind} target")
    warm = sum(row["cache"] == "warm" for row in rows)
    below = sum(row["is_below_floor"] for row in rows)
    return [f"{', '.join(parts)}; {warm} rows are warm, {below} are below their floor.", ""]


def _misses(rows: list[Row]) -> list[str]:
    """Every verdict that is a miss, with what the row takes of its target."""
    found = [
        [
            f"{row['op']}, {row['shape']}", _us(_median(row)), _us(row["time"]["p10"]), kind,
            _us(row["targets"][kind]), f"{_median(row) / row['targets'][kind]:.2f}",
        ]
        for kind in TARGET_KINDS
        for row in rows
        if row["verdicts"].get(kind) == "FAIL"
    ]  # fmt: skip
    if not found:
        return ["No row misses a target.", ""]
    return _table(("missed", "us", "p10", "by", "target", "of target"), found)


def _attention(rows: list[Row]) -> list[str]:
    def cells(row: Row) -> list[str]:
        flashinfer = [
            timing["median"] for name, timing in row["peers"].items() if "FlashInfer" in name
        ]
        alone = None if row["alone"] is None else row["alone"]["median"]
        theirs = row["peers_alone"].get("FA3", {}).get("median")
        return [
            row["shape"], _us(_median(row)), _us(_median(row, "FA3")), _us(alone), _us(theirs),
            _us(_median(row, "FA3 without metadata")), _us(min(flashinfer, default=None)),
            _us(row["targets"].get("formula")), _us(row["targets"].get("goal")),
        ]  # fmt: skip

    header = (
        "attention", "ours", "FA3", "ours alone", "FA3 alone", "FA3 without metadata", "FlashInfer",
        "formula", "goal",
    )  # fmt: skip
    return _table(header, (cells(row) for row in rows))


def _experts(rows: list[Row]) -> list[str]:
    header = (
        "experts", "routing", "ours", "floor", "torch grouped_mm", "formula", "goal", "verdicts"
    )  # fmt: skip
    return _table(
        header,
        (
            [
                row["shape"], row["op"].split()[-1], _us(_median(row)), _us(row["floor_us"]),
                _us(_median(row, "torch grouped_mm")), _us(row["targets"].get("formula")),
                _us(row["targets"].get("goal")), _verdicts(row),
            ]
            for row in rows
        ),
    )  # fmt: skip


def _verdicts(row: Row) -> str:
    return ", ".join(f"{kind} {text}" for kind, text in row["verdicts"].items())


def _others(rows: list[Row]) -> list[str]:
    def cells(row: Row) -> list[str]:
        peers = ", ".join(
            f"{name} {_us(timing['median'])}" for name, timing in row["peers"].items()
        )
        return [
            f"{row['op']}, {row['shape']}", _us(_median(row)), _us(row["floor_us"]), row["cache"],
            peers, _verdicts(row),
        ]  # fmt: skip

    return _table(
        ("op", "ours", "floor", "cache", "peers", "verdicts"), (cells(row) for row in rows)
    )


#: Pattern of section and op -> how its rows are shown.
_PARTS: tuple[tuple[str, Callable[[list[Row]], list[str]]], ...] = (
    (r"(attention|prefill) ", _attention),
    (r"moe ", _experts),
    (r"(sampler|small|linear|quant|coded) ", _others),
)


def tables(content: dict[str, Any]) -> str:
    """Markdown of a whole result."""
    rows = [row for row in content["results"] if row["time"] is not None]
    lines = _counts(rows) + _misses(rows)
    for pattern, show in _PARTS:
        part = [row for row in rows if re.match(pattern, f"{row['section']} {row['op']}")]
        if part:
            lines += show(part)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("json", type=Path, help="written by bench_kernels.py --json")
    content = json.loads(parser.parse_args().json.read_text(encoding="utf-8"))
    print(tables(content))


if __name__ == "__main__":
    main()
