# SPDX-License-Identifier: Apache-2.0
"""How long a picture takes, in which part of its way, with each cache."""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffulex.errors import ConfigError
from diffulex.omni.bench.evaluate import check_variants, describe_machine, write_report
from diffulex.omni.omni_diffusion import OmniDiffusion
from diffulex.omni.outputs import count_blocks
from diffulex.omni.request import make_request

if TYPE_CHECKING:
    from diffulex.omni.worker import StepEvent

__all__ = ["SpeedReport", "SpeedRun", "measure_speed"]

_SUFFIXES = (".json", ".md")


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """One variant; every figure is the median of the repetitions.

    Attributes:
        cache: name of the cache, or the settings; empty where none was asked for.
        load_s: of the engine.
        first_s: of the first request, which is in no other figure.
        request_s, fastest_s: of a request, and of the fastest one.
        encode_s, decode_s: before the first step ends, less the median step; after the last step.
        step_s: of a step.
        blocks_run: share of the blocks of transformers that ran.
        peak_bytes: of the device, of the busiest process; on the CPU of this process.
    """

    cache: str
    num_images: int
    load_s: float
    first_s: float
    request_s: float
    fastest_s: float
    encode_s: float
    step_s: float
    decode_s: float
    blocks_run: float
    peak_bytes: int


_COLUMNS: dict[str, Callable[[SpeedRun], str]] = {
    "setting": lambda run: run.cache or "as configured",
    "request s": lambda run: f"{run.request_s:.3f}",
    "fastest s": lambda run: f"{run.fastest_s:.3f}",
    "image s": lambda run: f"{run.request_s / run.num_images:.3f}",
    "encode s": lambda run: f"{run.encode_s:.3f}",
    "step ms": lambda run: f"{run.step_s * 1e3:.1f}",
    "decode s": lambda run: f"{run.decode_s:.3f}",
    "blocks run": lambda run: f"{run.blocks_run:.1%}",
    "peak MiB": lambda run: f"{run.peak_bytes / 2**20:.0f}",
    "load s": lambda run: f"{run.load_s:.1f}",
    "first s": lambda run: f"{run.first_s:.2f}",
}


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """All caches of one command."""

    environment: Mapping[str, Any]
    runs: tuple[SpeedRun, ...]

    def to_json(self) -> str:
        """One object with ``environment`` and ``runs``."""
        runs = [{name: getattr(run, name) for name in run.__slots__} for run in self.runs]
        return json.dumps({"environment": dict(self.environment), "runs": runs}, indent=2) + "\n"

    def to_text(self) -> str:
        """A table for a terminal."""
        rows = [list(_COLUMNS), *([cell(run) for cell in _COLUMNS.values()] for run in self.runs)]
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip()
            for row in rows
        )

    def to_markdown(self) -> str:
        """A document with the command, the machine and a table."""
        lines = ["# Speed of images", "", "```", str(self.environment["command"]), "```", ""]
        facts = {key: value for key, value in self.environment.items() if key != "command"}
        lines += [f"- {key}: {value}" for key, value in facts.items()]
        lines += ["", "| " + " | ".join(_COLUMNS) + " |", "|" + " --- |" * len(_COLUMNS)]
        for run in self.runs:
            lines.append("| " + " | ".join(cell(run) for cell in _COLUMNS.values()) + " |")
        return "\n".join(lines) + "\n"


def measure_speed(
    engine_kwargs: Mapping[str, Any],
    prompt: str,
    fields: Mapping[str, Any],
    *,
    caches: Mapping[str, Mapping[str, Any]] | None = None,
    repeat: int = 5,
    outputs: Sequence[str] = (),
    command: str = "",
    on_request: Callable[[], None] | None = None,
) -> SpeedReport:
    """Draws one request several times, with each cache.

    Args:
        engine_kwargs: of `OmniDiffusion`.
        prompt: of the request.
        fields: further fields of the request.
        caches: what each is called and its further keywords of the engine.
        repeat: measured requests; one more comes first.
        outputs: files for the report, .json or .md.
        command: for the report.
        on_request: called after each request.

    Raises:
        ConfigError: a report of an unknown kind, or in a directory that does not exist.
        OmniError, ConfigError: the model or this host cannot do one of the runs; none has begun.
    """
    for name in outputs:
        if Path(name).suffix not in _SUFFIXES or not Path(name).resolve().parent.is_dir():
            raise ConfigError(
                f"--output: expected a .json or .md file in an existing directory, got {name!r}"
            )
    variants = caches or {"": {}}
    check_variants(engine_kwargs, variants.values())
    runs: list[SpeedRun] = []
    for name, cache in variants.items():
        start = time.perf_counter()
        with OmniDiffusion(**{**engine_kwargs, **cache}) as engine:
            load_s = time.perf_counter() - start
            courses = []
            for _ in range(repeat + 1):
                courses.append(_measure(engine, prompt, fields))
                if on_request is not None:
                    on_request()
            peak = _peak_bytes(engine)
            environment = {
                **describe_machine(engine, command),
                "fields": dict(fields),
                "repeat": repeat,
            }
        runs.append(_as_run(name, load_s, courses, peak))
        report = SpeedReport(environment, tuple(runs))
        # After every run: a later one may fail.
        write_report(report, outputs)
    return report


@dataclass(frozen=True, slots=True)
class _Course:
    """One request: when its steps were done, from its start; a call has several steps."""

    request_s: float
    encode_s: float
    decode_s: float
    steps_s: tuple[float, ...]
    num_images: int
    blocks_run: float


def _measure(engine: OmniDiffusion, prompt: str, fields: Mapping[str, Any]) -> _Course:
    calls: dict[int, list[float]] = {}

    def watch(event: StepEvent) -> None:
        calls.setdefault(event.call, []).append(time.perf_counter())

    request = make_request(prompt, dict(fields))
    start = time.perf_counter()
    (output,) = engine.generate_requests([request], on_step=watch)
    end = time.perf_counter()
    steps = [b - a for times in calls.values() for a, b in pairwise(times)]
    step = statistics.median(steps) if steps else 0.0
    # Replicas draw at the same time: what is before the first step and after the last one of all.
    first = min(times[0] for times in calls.values())
    last = max(times[-1] for times in calls.values())
    counts = [count_blocks(cache) for cache in output.metrics.get("caches", ())]
    total, run = (sum(column) for column in zip(*counts)) if counts else (0, 0)
    return _Course(
        request_s=end - start,
        encode_s=max(0.0, first - start - step),
        decode_s=end - last,
        steps_s=tuple(steps),
        num_images=max(output.num_images, len(output.latents)),
        blocks_run=run / total if total else 1.0,
    )


def _as_run(name: str, load_s: float, courses: Sequence[_Course], peak_bytes: int) -> SpeedRun:
    first, *measured = courses
    steps = [step for course in measured for step in course.steps_s]

    def middle(field: str) -> float:
        return float(statistics.median(getattr(course, field) for course in measured))

    return SpeedRun(
        cache=name,
        num_images=first.num_images,
        load_s=load_s,
        first_s=first.request_s,
        request_s=middle("request_s"),
        fastest_s=min(course.request_s for course in measured),
        encode_s=middle("encode_s"),
        step_s=statistics.median(steps) if steps else 0.0,
        decode_s=middle("decode_s"),
        blocks_run=middle("blocks_run"),
        peak_bytes=peak_bytes,
    )


def _peak_bytes(engine: OmniDiffusion) -> int:
    found = engine.engine.memory_stats()
    peak = max(stats["peak"] for stats in found)
    # Linux counts in KiB.
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
