# SPDX-License-Identifier: Apache-2.0
"""Cases of the kernel benchmark, their results, and how they are printed."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kernel_bench.timing import Timing, time_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = [
    "BANDWIDTH",
    "TENSOR_RATE",
    "Case",
    "Result",
    "fingerprint",
    "floor_us",
    "relative_error",
]

#: Ceilings of an H200 that floors are counted with: bytes per second of a copy, FLOP per second.
BANDWIDTH = 4.3e12
TENSOR_RATE = 790e12


def floor_us(num_bytes: float, flops: float = 0.0) -> float:
    """No version runs faster than this, in microseconds."""
    return max(num_bytes / BANDWIDTH, flops / TENSOR_RATE) * 1e6


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in float64; NaN stays NaN."""
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm().clamp_min(1e-30))


@dataclass(slots=True)
class Case:
    """One op at one shape: how to check it, what to time, what it is held against."""

    section: str
    op: str
    shape: str
    #: Calls over rotated buffers.
    calls: Sequence[Callable[[], object]]
    #: Relative error against float64 on a subsample; runs before anything is timed.
    check: Callable[[], float]
    tolerance: float
    num_bytes: float
    flops: float = 0.0
    #: Peer name -> calls over the same buffers.
    peers: Mapping[str, Sequence[Callable[[], object]]] = field(default_factory=dict)
    #: Peer name -> why it is not timed.
    absent: Mapping[str, str] = field(default_factory=dict)
    #: Target in microseconds, given the times of the peers; None = no target.
    target: Callable[[Mapping[str, float]], float | None] = lambda _: None
    note: str = ""

    def run(self, is_timed: bool) -> Result:
        """Checks, then times; a wrong op is not timed."""
        error = self.check()
        result = Result(
            self.section, self.op, self.shape, error, error <= self.tolerance,
            floor_us(self.num_bytes, self.flops), self.num_bytes, self.flops, note=self.note,
            absent=dict(self.absent),
        )  # fmt: skip
        if not result.is_correct or not is_timed:
            return result
        result.time = time_calls(self.calls)
        for name, calls in self.peers.items():
            self._time_peer(name, calls, result)
        if not torch.cuda.is_available():
            return result  # targets are those of a GPU
        result.target_us = self.target({name: t.median for name, t in result.peers.items()})
        return result

    @staticmethod
    def _time_peer(name: str, calls: Sequence[Callable[[], object]], result: Result) -> None:
        try:
            result.peers[name] = time_calls(calls)
        except Exception as error:  # a peer may not support a shape
            result.absent[name] = f"{type(error).__name__}: {error}"[:120]


@dataclass(slots=True)
class Result:
    """What came out of one case."""

    section: str
    op: str
    shape: str
    error: float
    is_correct: bool
    floor_us: float
    num_bytes: float
    flops: float
    time: Timing | None = None
    peers: dict[str, Timing] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    target_us: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """wrong, -, pass or FAIL."""
        if not self.is_correct:
            return "WRONG"
        if self.time is None or self.target_us is None:
            return "-"
        return "pass" if self.time.median <= self.target_us else "FAIL"

    def record(self) -> dict[str, Any]:
        """For JSON, with the derived rates."""
        data = {**asdict(self), "verdict": self.verdict}
        if self.time is not None:
            seconds = self.time.median * 1e-6
            data["gb_per_s"] = self.num_bytes / seconds / 1e9
            data["tflop_per_s"] = self.flops / seconds / 1e12
            data["fraction_of_floor"] = self.floor_us / self.time.median
        return data

    def row(self) -> str:
        """One line of the Markdown table."""
        peers = ", ".join(f"{name} {t.median:.2f}" for name, t in self.peers.items())
        ours = "-" if self.time is None else f"{self.time.median:.2f}"
        spread = "-" if self.time is None else f"{self.time.p10:.2f}-{self.time.p90:.2f}"
        target = "-" if self.target_us is None else f"{self.target_us:.2f}"
        cells = (
            self.op, self.shape, ours, spread, f"{self.floor_us:.2f}", peers or "-", target,
            self.verdict, f"{self.error:.1e}", self.note,
        )  # fmt: skip
        return "| " + " | ".join(cells) + " |"


HEADER = (
    "| op | shape | us | p10-p90 | floor | peers | target | verdict | error | note |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def fingerprint(bandwidth: float) -> dict[str, Any]:
    """Machine, software and ceilings of a run."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "floor_ceilings": {"bytes_per_s": BANDWIDTH, "flop_per_s": TENSOR_RATE},
        "caches": "cold: buffers rotate over at least 180 MB",
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver_and_clocks"] = _output(
            [
                "nvidia-smi",
                "--query-gpu=driver_version,clocks.sm,clocks.mem",
                "--format=csv,noheader",
            ]
        )
    facts["commit"] = _output(["git", "rev-parse", "--short", "HEAD"])
    return facts


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def write_json(path: Path, facts: Mapping[str, Any], results: Sequence[Result]) -> None:
    """One file: the machine and one entry per case."""
    data = {"machine": dict(facts), "results": [result.record() for result in results]}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
