# SPDX-License-Identifier: Apache-2.0
"""Cases of the kernel benchmark and their results."""

from __future__ import annotations

import datetime
import json
import math
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kernel_bench.timing import Clocks, Timing, time_alone, time_and_watch, time_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from kernel_bench.agreement import Agreement
    from kernel_bench.ceilings import Ceilings

__all__ = [
    "TARGET_GPU",
    "TARGET_KINDS",
    "Case",
    "Limit",
    "Result",
    "commit",
    "fingerprint",
    "joined",
    "read_json",
    "verdict",
    "write_json",
]

#: GPU whose times the formulas and goals are; elsewhere only peers of the same run are targets.
TARGET_GPU = "H200"
#: Least of the limits by peers that the case names, formula of bytes and operations, figure that was set.
TARGET_KINDS = ("peer", "formula", "goal")


class Limit(NamedTuple):
    """What an op may take by the time of a peer."""

    share: float = 1.0
    plus_us: float = 0.0


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
    #: Type of the operands that the operations are counted of; see `Ceilings.products`.
    operands: str = "bfloat16"
    #: Peer name -> calls over the same buffers.
    peers: Mapping[str, Sequence[Callable[[], object]]] = field(default_factory=dict)
    #: Peer name -> why it is not timed.
    absent: Mapping[str, str] = field(default_factory=dict)
    #: Peer name -> what its time allows; the least of those is a target.
    judges: Mapping[str, Limit] = field(default_factory=dict)
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
            ceilings.floor_us(self.read_bytes, self.written_bytes, self.flops, self.operands),
            self.read_bytes, self.written_bytes, self.flops, ceilings.cache(self.rotated_bytes),
            note="; ".join(filter(None, (self.note, self._limits()))), absent=dict(self.absent),
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

    def _limits(self) -> str:
        """What of the peers' times is asked, where that is not the time itself."""
        texts = [
            f"{limit.share:g} of {name}" + (f" + {limit.plus_us:g} us" if limit.plus_us else "")
            for name, limit in self.judges.items()
            if limit != Limit()
        ]
        return "target " + ", ".join(texts) if texts else ""

    def _set_targets(self, result: Result, gpu: str) -> None:
        limits = [
            limit.share * result.peers[name].median + limit.plus_us
            for name, limit in self.judges.items()
            if name in result.peers
        ]
        if limits:
            result.targets["peer"] = min(limits)
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

    @classmethod
    def of_record(cls, data: Mapping[str, Any]) -> Self:
        """What `record` was made of."""
        known = {each.name: data[each.name] for each in fields(cls)}
        for name in ("error", "worst"):
            known[name] = math.inf if known[name] is None else known[name]
        for name in ("time", "alone"):
            known[name] = known[name] and Timing(**known[name])
        for name in ("peers", "peers_alone"):
            known[name] = {peer: Timing(**timing) for peer, timing in known[name].items()}
        known["clocks"] = known["clocks"] and Clocks(**known["clocks"])
        return cls(**known)


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
        "read_gb_per_s": _rounded(ceilings.reads, 1e9),
        "product_tflop_per_s": _rounded(ceilings.products, 1e12),
        "l2_bytes": ceilings.l2_bytes,
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = _output(
            ["nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"]
        )
    facts["commit"] = commit()
    return facts


def commit() -> str:
    """Of the tree that this file is in, with a mark where files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    return _output([*git, "describe", "--always", "--dirty", "--exclude", "*"])


def _rounded(rates: Mapping[str, float | str], unit: float) -> dict[str, float | str]:
    return {
        name: round(rate / unit, 1) if isinstance(rate, float) else rate
        for name, rate in rates.items()
    }


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


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` has written."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def joined(parts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[Result]]:
    """Facts and results of several files, in their order; facts that differ are lists of all."""
    facts: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part["machine"]):
        values = [part["machine"].get(name) for part in parts]
        facts[name] = values[0] if all(value == values[0] for value in values) else values
    facts["errors"] = [error for part in parts for error in part["machine"]["errors"]]
    results = [Result.of_record(record) for part in parts for record in part["results"]]
    return facts, results
