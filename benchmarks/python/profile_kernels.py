# SPDX-License-Identifier: Apache-2.0
"""Hardware counters of single kernels of `bench_kernels.py`, read by Nsight Compute (`ncu`).

    python benchmarks/python/profile_kernels.py                            # the shapes of DEFAULT
    python benchmarks/python/profile_kernels.py --match "moe:.*mini, 2048"  # others, by regular expression

A shape is named section:op:shape, with the words of the benchmark's table. Each is called once, with
cold caches and the clocks as they are; every kernel that the call launches gives one line. A first
call, which is not measured, loads the kernels.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import torch
from bench_kernels import SECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel_bench.report import Case

DEFAULT = (
    "attention:.*: 1 x ctx 1024, 32 tokens, 32/8",
    "attention:.*: 1 x ctx 32768, 128 tokens, 32/8",
    "attention:.*: 8 x ctx 32768, 32 tokens, 32/8 x 128$",
    "prefill:.*: 1 x ctx 0, 8192",
    "moe:.*uniform: LLaDA2-mini, (4|2048|8192) tokens",
    "sampler:token_stats .*: R (32|256), V 151936",
    "sampler:sample_filtered: R 32",
    "small:",
)
#: Column -> metric, and the factor to its unit.
METRICS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "memory %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "L2 %": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1.0),
    "tensor %": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 1.0),
    "issue %": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1.0),
    "warps %": ("sm__warps_active.avg.pct_of_peak_sustained_active", 1.0),
    "grid": ("launch__grid_size", 1.0),
    "threads": ("launch__block_size", 1.0),
    "registers": ("launch__registers_per_thread", 1.0),
}
#: Why a warp did not issue: the largest of these is named, with its share of a warp's time.
STALLS = (
    "barrier", "branch_resolve", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle",
    "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "no_instruction",
    "not_selected", "selected", "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
#: Ranges are named so, and by a number.
RANGE = "diffulex-case-"
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--match", action="append", help="shapes, regular expression; repeatable")
    parser.add_argument("--under-ncu", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.match = args.match or list(DEFAULT)
    return args


def chosen_cases(patterns: list[str]) -> Iterator[tuple[str, Case]]:
    """Name and case of every shape that a pattern matches."""
    device = "cuda"
    for section, cases in SECTIONS.items():
        if not any(re.match(pattern.split(":")[0], section) for pattern in patterns):
            continue
        for case in cases(device, False):
            name = f"{section}:{case.op}: {case.shape}"
            if any(re.match(pattern, name) for pattern in patterns):
                yield name, case
            torch.cuda.empty_cache()


def run_cases(patterns: list[str]) -> None:
    """Prints the name of each shape and calls it once, in a range that says which it is."""
    for index, (name, case) in enumerate(chosen_cases(patterns)):
        case.calls[0]()
        torch.cuda.synchronize()
        print(f"case {index}: {name}", flush=True)
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda.nvtx.range_push(f"{RANGE}{index}")
        case.calls[-1]()
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_pop()
        torch.cuda.cudart().cudaProfilerStop()


def profiled(patterns: list[str]) -> str:
    """Standard output of this program under ncu: names of the cases, then the counters as CSV."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("profile_kernels.py: expected ncu (Nsight Compute) on PATH, got none")
    metrics = [name for name, _ in METRICS.values()] + [_STALL.format(name) for name in STALLS]
    command = [
        ncu, "--clock-control", "none", "--profile-from-start", "off", "--nvtx", "--csv", "--page", "raw",
        "--print-units", "base", "--metrics", ",".join(metrics),
        sys.executable, __file__, "--under-ncu",
    ]  # fmt: skip
    for pattern in patterns:
        command += ["--match", pattern]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"profile_kernels.py: ncu failed: {(done.stdout + done.stderr)[-800:]}")
    return done.stdout


def read_output(lines: list[str]) -> list[tuple[str, dict[str, str]]]:
    """Case and counters of every kernel: a row of ncu names the range that it was launched in."""
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise SystemExit(
            "profile_kernels.py: expected counters of ncu, got none: no shape matched?"
        )
    names = dict(re.findall(r"^case (\d+): (.*)$", "\n".join(lines[:start]), re.MULTILINE))
    found = []
    for row in list(csv.DictReader(lines[start:]))[1:]:  # the first row has the units
        ranges = (re.search(rf"{RANGE}(\d+)", value or "") for value in row.values())
        index = next((match[1] for match in ranges if match), None)
        if index is None:
            raise SystemExit(f"profile_kernels.py: expected a range of {RANGE}, got {row}")
        found.append((names[index], row))
    return found


def number(text: str) -> float:
    return float(text.replace(",", "")) if text not in ("", "n/a") else float("nan")


def table_line(row: dict[str, str]) -> str:
    """One kernel."""
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void ", "", row["Kernel Name"])
    kernel = re.sub(r"<.*|\(.*", "", name).split("::")[-1]
    values = [number(row[metric]) * factor for metric, factor in METRICS.values()]
    cells = [f"{value:.0f}" if value >= 1000 else f"{value:.4g}" for value in values]
    stalls = {
        name: number(row[_STALL.format(name)]) for name in STALLS if _STALL.format(name) in row
    }
    stalls = {name: value for name, value in stalls.items() if not math.isnan(value)}
    total = sum(stalls.values())
    first = max(stalls, key=stalls.__getitem__) if total > 0 else "-"
    share = f"{first} {100 * stalls[first] / total:.0f} %" if total > 0 else "-"
    return "| " + " | ".join([kernel, *cells, share]) + " |"


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.manual_seed(0)
    if args.under_ncu:
        run_cases(args.match)
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("profile_kernels.py: expected a CUDA device, got none")
    kernels = read_output(profiled(args.match).splitlines())
    print("| shape | kernel | " + " | ".join(METRICS) + " | most of a warp's time |")
    print("|---" * (len(METRICS) + 3) + "|")
    for name, row in kernels:
        print(f"| {name} {table_line(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
