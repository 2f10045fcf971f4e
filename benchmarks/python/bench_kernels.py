# SPDX-License-Identifier: Apache-2.0
"""Times every compute op against its floor, its targets and the peers that can be imported.

    python benchmarks/python/bench_kernels.py --json kernels.json
    python benchmarks/python/bench_kernels.py --only sampler,small
    python benchmarks/python/bench_kernels.py --check only

Every case is first checked against float64 on a subsample; what is wrong is not timed. Times are
medians of CUDA graph replays over rotated buffers (cold L2). Without a GPU tiny shapes run on the
CPU, which shows that the program works and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

import torch
from kernel_bench import attention, linear, moe, sampler, small_ops
from kernel_bench.report import HEADER, Result, fingerprint, write_json
from kernel_bench.timing import copy_bandwidth

SECTIONS = {
    "attention": attention.cases,
    "prefill": attention.prefill_cases,
    "moe": moe.cases,
    "sampler": sampler.cases,
    "small": small_ops.cases,
    "linear": linear.cases,
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, help="also write machine and results to this file")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated")
    parser.add_argument(
        "--check",
        choices=("first", "only"),
        default="first",
        help="check, then time; or check only",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    unknown = [name for name in args.only if name not in SECTIONS]
    if unknown:
        parser.error(f"--only: expected sections of {', '.join(SECTIONS)}, got {unknown[0]}")
    return args


def run_section(name: str, args: argparse.Namespace) -> list[Result]:
    """Runs the cases one by one and prints each line as it comes."""
    print(f"\n## {name}\n\n{HEADER}", flush=True)
    results = []
    is_small = args.device == "cpu"
    cases = SECTIONS[name](args.device, is_small)
    while True:
        try:
            case = next(cases)
        except StopIteration:
            break
        results.append(case.run(args.check == "first"))
        print(results[-1].row(), flush=True)
        del case
        gc.collect()
        if not is_small:
            torch.cuda.empty_cache()
    for peer, reason in sorted({pair for result in results for pair in result.absent.items()}):
        print(f"\n{peer}: {reason}")
    return results


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    torch.manual_seed(0)
    start = time.perf_counter()
    facts = fingerprint(copy_bandwidth(args.device))
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    results = [result for name in args.only for result in run_section(name, args)]
    verdicts = [result.verdict for result in results]
    seconds = time.perf_counter() - start
    print(
        f"\n{verdicts.count('pass')} pass, {verdicts.count('FAIL')} fail, "
        f"{verdicts.count('WRONG')} wrong, {verdicts.count('-')} without target; {seconds:.0f} s"
    )
    if args.json is not None:
        facts["clocks_after"] = fingerprint(0.0).get("driver_and_clocks", "none")
        write_json(args.json, facts, results)
    return 1 if "WRONG" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
