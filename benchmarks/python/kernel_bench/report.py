# SPDX-License-Identifier: Apache-2.0
"""Cases of the kernel benchmark and their results."""

from __future__ import annotations

import datetime
import json
import math
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kernel_bench.timing import Clocks, Timing, time_alone, time_and_watch, time_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kernel_bench.agreement import Agreement
    from kernel_bench.ceilings import Ceilings

__all__ = ["TARGET_GPU", "TARGET_KINDS", "Case", "Result", "fingerprint", "verdict", "write_json"]

#: GPU whose times the formulas and goals are; elsewhere only peers of the same run are targets.
TARGET_GPU = "H200"
#: Best of the peers named by the case, formula of bytes and operations, figure that was set.
TARGET_KINDS = ("peer", "formula", "goal")


@dataclass(slots=True)
class Case:
    """One op at one shape: how to check it, what to time, what it is held against."""

    section: str
    op: str
    shape: str
    #: Calls over rotated buffers.
    calls: Sequence[Callable[[], object]]
    #: Compares every element that the op writes; runs before anything is timed.
    check: Callable[[], Agreement]
    read_bytes: float
    written_bytes: float = 0.0
    flops: float = 0.0
    #: Distinct bytes of all buffer sets.
    rotated_bytes: float = 0.0
    #: Peer name -> calls over the same buffers.
    peers: Mapping[str, Sequence[Callable[[], object]]] = field(default_factory=dict)
    #: Peer name -> why it is not timed.
    absent: Mapping[str, str] = field(default_factory=dict)
    #: Peers of which the fastest is a target.
    judges: Sequence[str] = ()
    #: Of the fastest judge's time, what the op may take.
    share: float = 1.0
    #: Targets in microseconds on TARGET_GPU; None = no such target.
    formula_us: float | None = None
    goal_us: float | None = None
    note: str = ""

    def run(self, is_timed: bool, ceilings: Ceilings) -> Result:
        """Checks, then times; a wrong op is not timed."""
        agreement = self.check()
        result = Result(
            self.section, self.op, self.shape, agreement.error, agreement.worst,
            agreement.compared, agreement.is_right,
            ceilings.floor_us(self.read_bytes, self.written_bytes, self.flops),
            self.read_bytes, self.written_bytes, self.flops, ceilings.cache(self.rotated_bytes),
            note=self.note, absent=dict(self.absent),
        )  # fmt: skip
        if not result.is_correct or not is_timed:
            return result
        result.time, result.clocks = time_and_watch(self.calls)
        result.alone = time_alone(self.calls)
        for name, calls in self.peers.items():
            self._time_peer(name, calls, result)
        if torch.cuda.is_available():
            self._set_targets(result, torch.cuda.get_device_name())
        return result

    def _set_targets(self, result: Result, gpu: str) -> None:
        times = [result.peers[name].median for name in self.judges if name in result.peers]
        if times:
            result.targets["peer"] = self.share * min(times)
        if TARGET_GPU not in gpu:
            return
        if self.formula_us is not None:
            result.targets["formula"] = self.formula_us
        if self.goal_us is not None:
            result.targets["goal"] = self.goal_us

    @staticmethod
    def _time_peer(name: str, calls: Sequence[Callable[[], object]], result: Result) -> None:
        try:
            result.peers[name] = time_calls(calls)
            alone = time_alone(calls)
        except Exception as error:  # a peer may not support a shape
            result.absent[name] = f"{type(error).__name__}: {error}"[:120]
            return
        if alone is not None:
            result.peers_alone[name] = alone


@dataclass(slots=True)
class Result:
    """What came out of one case; times in microseconds."""

    section: str
    op: str
    shape: str
    #: Norm of the error over that of the reference, and the largest over what an element is allowed.
    error: float
    worst: float
    compared: int
    is_correct: bool
    floor_us: float
    read_bytes: float
    written_bytes: float
    flops: float
    cache: str
    time: Timing | None = None
    #: The same without overlap of the calls.
    alone: Timing | None = None
    clocks: Clocks | None = None
    peers: dict[str, Timing] = field(default_factory=dict)
    peers_alone: dict[str, Timing] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    #: Kind -> microseconds.
    targets: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def verdicts(self) -> dict[str, str]:
        """Of each target: pass or FAIL."""
        if self.time is None:
            return {}
        return {kind: verdict(self.time.median, us) for kind, us in self.targets.items()}

    @property
    def is_below_floor(self) -> bool:
        """Faster than the measured ceilings allow: they are not the device's last word."""
        return self.time is not None and self.time.median < self.floor_us

    def record(self) -> dict[str, Any]:
        """For JSON, with the derived rates."""
        data = {**asdict(self), "verdicts": self.verdicts(), "is_below_floor": self.is_below_floor}
        # JSON has no infinity: a wrong result has no finite deviation.
        data |= {key: None for key in ("error", "worst") if not math.isfinite(data[key])}
        if self.time is not None:
            seconds = self.time.median * 1e-6
            data["gb_per_s"] = (self.read_bytes + self.written_bytes) / seconds / 1e9
            data["tflop_per_s"] = self.flops / seconds / 1e12
            data["fraction_of_floor"] = self.floor_us / self.time.median
        return data


def verdict(time_us: float, target_us: float) -> str:
    """pass or FAIL."""
    return "pass" if time_us <= target_us else "FAIL"


def fingerprint(ceilings: Ceilings) -> dict[str, Any]:
    """Machine, software and ceilings of a run."""
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "copy_gb_per_s": round(ceilings.copy / 1e9, 1),
        "read_gb_per_s": {
            name: round(rate / 1e9, 1) if isinstance(rate, float) else rate
            for name, rate in ceilings.reads.items()
        },
        "product_tflop_per_s": round(ceilings.products / 1e12, 1),
        "l2_bytes": ceilings.l2_bytes,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = _output(
            ["nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"]
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
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
