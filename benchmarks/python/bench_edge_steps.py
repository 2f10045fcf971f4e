# SPDX-License-Identifier: Apache-2.0
"""Steps of programs against the module that they were exported from, in turns on one host.

    python benchmarks/python/bench_edge_steps.py --model demo demo-none demo-8da8w demo-8da4w --output FILE

The host may be shared: every round calls each of them a few times, over a block of 8 rows, and the smallest
times of many rounds are compared. Ratios are what counts, not milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from diffulex.checkpoint.auto_model import detect
from diffulex.checkpoint.resolve import resolve_model
from diffulex_edge.backends import backend_of
from diffulex_edge.bundle import read_bundle
from diffulex_edge.exporter import load_decoder
from diffulex_edge.model import EdgeProgram
from diffulex_edge.program import PteProgram

_ROWS, _CONTEXT = 8, 64
#: Calls in a row: the first finds the caches of the processor full of another's weights.
_BURST = 5


def callers(model: Path, bundles: list[Path], threads: int) -> dict[str, Any]:
    """What is timed, by name; the module first."""
    spec = detect(model)[1]
    rows = read_bundle(bundles[0]).cache_rows
    module = EdgeProgram(load_decoder(model, spec, rows, backend_of("xnnpack")))
    tokens = torch.zeros(_ROWS, dtype=torch.int64)
    positions = torch.arange(_CONTEXT, _CONTEXT + _ROWS)
    ends, wanted = torch.full((_ROWS,), _CONTEXT + _ROWS), torch.arange(_ROWS)

    def run_module() -> None:
        with torch.inference_mode():
            module(tokens.unsqueeze(0), positions, ends, wanted)

    found: dict[str, Any] = {"module": run_module}
    for path in bundles:
        program = PteProgram(read_bundle(path).program_path, threads=threads)
        found[path.name] = lambda program=program: program(tokens, positions, ends, wanted)
    return found


def main() -> int:
    """Prints one object, and writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", type=Path, nargs="+", help="the first one without quantisation")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    timed = callers(resolve_model(options.model), options.bundles, options.threads)
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(options.rounds):
        for name, call in timed.items():
            for _ in range(_BURST):
                start = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - start)
    first = options.bundles[0].name
    result = {
        "model": options.model,
        "rows": _ROWS,
        "threads": options.threads,
        "rounds": options.rounds,
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "milliseconds": {name: round(1e3 * seconds, 3) for name, seconds in best.items()},
        "program_to_module": round(best[first] / best["module"], 3),
        "to_float32_program": {
            name: round(best[name] / best[first], 3)
            for name in best
            if name not in ("module", first)
        },
    }
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
