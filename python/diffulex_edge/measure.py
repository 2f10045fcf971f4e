# SPDX-License-Identifier: Apache-2.0
"""What a program costs: an estimate from shapes alone, and times and memory measured here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffulex.errors import ConfigError
from diffulex_edge.errors import EdgeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.families.spec import ModelSpec
    from diffulex_edge.recipes import Recipe

__all__ = ["Estimate", "StepTimes", "bench_bundle", "estimate", "longest_length", "step_times"]

_SPARE_ROWS = 32
#: Bytes of a layer's graph in the file.
_GRAPH = 17_000
#: Resident bytes per byte of the file: the backend repacks the weights.
_RESIDENT = 1.2
_CONTEXT = 64
_LONGEST_SEARCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of a program, by part."""

    max_model_len: int
    weights: int
    rotary: int
    graph: int
    cache: int
    #: Output for the most logits rows, and the scores of one layer for the most rows.
    logits: int
    scores: int

    @property
    def file(self) -> int:
        """Size of the program."""
        return self.weights + self.rotary + self.graph

    @property
    def resident(self) -> int:
        """Memory while it runs, without that of Python and PyTorch."""
        return int(_RESIDENT * self.file) + self.cache + self.logits + self.scores

    def to_json(self) -> dict[str, int]:
        """All fields and sums."""
        return {**asdict(self), "file": self.file, "resident": self.resident}


def estimate(
    spec: ModelSpec,
    recipe: Recipe,
    max_model_len: int,
    *,
    max_rows: int = 256,
    max_logits: int = 64,
) -> Estimate:
    """Bytes of the program of a model, without exporting it."""
    hidden, dim = spec.hidden_size, spec.head_dim
    q_size, kv_size = spec.num_q_heads * dim, spec.num_kv_heads * dim
    shapes = [
        (q_size, hidden),
        (kv_size, hidden),
        (kv_size, hidden),
        (hidden, q_size),
        (spec.intermediate_size, hidden),
        (spec.intermediate_size, hidden),
        (hidden, spec.intermediate_size),
    ]
    layer = sum(recipe.weight_bytes(recipe.layers, *shape) for shape in shapes)
    size = recipe.float_bytes
    layer += size * (2 * hidden + (2 * dim if spec.qk_norm else 0))
    layer += size * (
        (q_size + 2 * kv_size if spec.qkv_bias else 0) + (hidden if spec.o_bias else 0)
    )
    head = recipe.weight_bytes(recipe.head, spec.vocab_size, hidden)
    table = recipe.embedding_bytes(spec.embedding_rows, hidden)
    rows = max_model_len + _SPARE_ROWS
    return Estimate(
        max_model_len=max_model_len,
        weights=int(spec.num_layers * layer + head + table + size * hidden),
        rotary=(2 * rows + dim) * dim * size,
        graph=_GRAPH * spec.num_layers,
        cache=spec.num_layers * 2 * spec.num_kv_heads * rows * dim * size,
        logits=max_logits * spec.vocab_size * 4,
        scores=2 * spec.num_q_heads * max_rows * rows * size,
    )


def longest_length(spec: ModelSpec, recipe: Recipe, budget: int) -> int:
    """Largest `max_model_len` whose resident memory fits a budget in bytes; 0: none."""
    low, high = 0, min(spec.max_positions, _LONGEST_SEARCH)
    while low < high:
        middle = (low + high + 1) // 2
        fits = estimate(spec, recipe, middle).resident <= budget
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Cost of a bundle on this machine."""

    bundle: str
    threads: int
    rows: int
    load_ms: float
    #: Fastest and middle time of one call over a block.
    step_min_ms: float
    step_median_ms: float
    #: Growth of the process by loading and running, and the file.
    rss_mb: float
    file_mb: float


def step_times(bundle: Path, threads: int, *, rows: int, repeat: int) -> StepTimes:
    """Loads a program in this process and times calls over a block of `rows`.

    Raises:
        ProgramError: it cannot be loaded.
    """
    from diffulex_edge.bundle import read_bundle  # noqa: PLC0415
    from diffulex_edge.program import PteProgram  # noqa: PLC0415

    path = read_bundle(bundle).program_path
    before = _resident_mb()
    start = time.perf_counter()
    program = PteProgram(path, threads=threads)
    load_ms = (time.perf_counter() - start) * 1e3
    first = min(_CONTEXT, program.cache_rows - rows)
    inputs = (
        torch.zeros(rows, dtype=torch.int64),
        torch.arange(first, first + rows),
        torch.full((rows,), first + rows),
        torch.arange(min(rows, program.max_logits)),
    )
    times = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        program(*inputs)
        times.append((time.perf_counter() - start) * 1e3)
    times = sorted(times[1:])
    return StepTimes(
        bundle=bundle.name,
        threads=program.threads,
        rows=rows,
        load_ms=load_ms,
        step_min_ms=times[0],
        step_median_ms=times[len(times) // 2],
        rss_mb=_resident_mb() - before,
        file_mb=path.stat().st_size / 1e6,
    )


def bench_bundle(bundle: Path, threads: int, *, rows: int, repeat: int) -> StepTimes:
    """`step_times` in a process of its own: thread pool and memory are those of one program.

    Raises:
        ConfigError: a number below 1, or more rows than the program takes.
        ProgramError: it is not the program that was exported.
        EdgeError: the process failed.
    """
    from diffulex_edge.bundle import read_bundle  # noqa: PLC0415
    from diffulex_edge.program import check_program  # noqa: PLC0415

    for name, value in (("rows", rows), ("repeat", repeat), ("threads", threads)):
        if value < 1:
            raise ConfigError(f"{name}: expected >= 1, got {value}")
    found = read_bundle(bundle)
    if rows > found.max_rows:
        raise ConfigError(f"rows: expected at most {found.max_rows} for {bundle}, got {rows}")
    check_program(found)
    code = (
        "import json, sys; from dataclasses import asdict; from pathlib import Path\n"
        "from diffulex_edge.measure import step_times\n"
        "path, threads, rows, repeat = sys.argv[1], *map(int, sys.argv[2:])\n"
        "print(json.dumps(asdict(step_times(Path(path), threads, rows=rows, repeat=repeat))))"
    )
    command = [sys.executable, "-c", code, str(bundle), *map(str, (threads, rows, repeat))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"code {result.returncode}"]
        raise EdgeError(f"bench: expected {bundle} to run, got {lines[-1]}")
    return StepTimes(**json.loads(result.stdout.splitlines()[-1]))


def _resident_mb() -> float:
    """Resident memory of this process in 10^6 bytes; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def parse_bytes(text: str) -> int:
    """A size such as 2GB, 500MB or 1.5e9, in bytes.

    Raises:
        ConfigError: it is none.
    """
    units: dict[str, float] = {"gb": 1e9, "mb": 1e6, "kb": 1e3, "b": 1}
    lower = text.strip().lower()
    unit = next((name for name in units if lower.endswith(name)), "")
    try:
        size = float(lower.removesuffix(unit)) * units.get(unit, 1)
    except ValueError:
        size = -1.0
    if not 0 < size < 1e15:
        raise ConfigError(f"budget: expected a size such as 2GB, got {text!r}")
    return int(size)


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Columns of text, numbers to the right."""
    cells = [[item if isinstance(item, str) else f"{item:.2f}" for item in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            item.ljust(width) if index == 0 else item.rjust(width)
            for index, (item, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
