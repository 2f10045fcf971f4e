# SPDX-License-Identifier: Apache-2.0
"""Times every compute op against its floor, its targets and the peers that can be imported.

    python benchmarks/python/bench_kernels.py --json kernels.json --markdown kernels.md
    python benchmarks/python/bench_kernels.py --only sampler,small
    python benchmarks/python/bench_kernels.py --only quant
    python benchmarks/python/bench_kernels.py --only quant-experts,quant-int4
    python benchmarks/python/bench_kernels.py --join a.json b.json --json quant.json --markdown quant.md
    python benchmarks/python/bench_kernels.py --check only

Every element of every case is first compared with float64; what is wrong is not timed. Times are
medians of CUDA graph replays over rotated buffers. Peers are used where they can be imported: the
package `vllm.vllm_flash_attn` for FlashAttention-3, `flashinfer`, torch; CUTLASS where nvcc and the headers of
the package `nvidia-cutlass`, or of the folder CUTLASS_PATH, are to compile it with. Without a GPU tiny shapes run
on the CPU, which shows that the program works and nothing else. `--only quant` are all sections of that
name; where one run may not be so long, `--join` makes one table of several.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
import traceback
from pathlib import Path

import torch
from kernel_bench import (
    acceptance,
    attention,
    coded_attention,
    linear,
    moe,
    nibbles,
    quant,
    quant_experts,
    quant_rows,
    sampler,
    small_ops,
)
from kernel_bench.ceilings import Ceilings, measure_ceilings
from kernel_bench.report import Result, fingerprint, joined, read_json, write_json
from kernel_bench.table import HEADER, absences, counts, document, row

from diffulex import ops

SECTIONS = {
    "attention": attention.cases,
    "prefill": attention.prefill_cases,
    "moe": moe.cases,
    "sampler": sampler.cases,
    "acceptance": acceptance.cases,
    "small": small_ops.cases,
    "linear": linear.cases,
    "quant-rows": quant_rows.cases,
    "quant-experts": quant_experts.cases,
    "quant-dense": quant.cases,
    "quant-layers": quant.layer_cases,
    "quant-int4": nibbles.cases,
    "coded": coded_attention.cases,
}


def section_names(text: str) -> list[str]:
    """Those of the table; a name may stand for all that begin with it and a dash."""
    names = []
    for part in text.split(","):
        found = [name for name in SECTIONS if name == part or name.startswith(f"{part}-")]
        if not found:
            raise argparse.ArgumentTypeError(
                f"expected sections of {', '.join(SECTIONS)}, got {part}"
            )
        names += found
    return names


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--json", type=Path, help="also write machine and results to this file")
    parser.add_argument("--markdown", type=Path, help="also write the whole report to this file")
    parser.add_argument(
        "--only", type=section_names, default=list(SECTIONS), help="sections, comma-separated"
    )
    parser.add_argument(
        "--join",
        type=Path,
        nargs="+",
        metavar="JSON",
        help="run nothing: what these runs have written",
    )
    parser.add_argument(
        "--check",
        choices=("first", "only"),
        default="first",
        help="check, then time; or check only",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    return parser.parse_args(argv)


def run_section(
    name: str, args: argparse.Namespace, ceilings: Ceilings, errors: list[str]
) -> list[Result]:
    """Runs the cases one by one and prints each line as it comes; adds to `errors` what raised."""
    print(f"\n## {name}\n\n{HEADER}", flush=True)
    results = []
    is_small = args.device == "cpu"
    cases = SECTIONS[name](args.device, is_small)
    while True:
        what = name
        try:
            case = next(cases, None)
            if case is None:
                break
            what = f"{name}: {case.op}, {case.shape}"
            results.append(case.run(args.check == "first", ceilings))
            print(row(results[-1]), flush=True)
        except Exception as error:  # one case must not cost the table of the others
            traceback.print_exc()
            errors.append(f"{what}: {type(error).__name__}: {error}"[:400])
        # A generator that raised has ended.
        case = None
        gc.collect()
        if not is_small:
            torch.cuda.empty_cache()
    print("".join(f"\n{line}\n" for line in absences(results)), end="", flush=True)
    return results


def join(args: argparse.Namespace) -> int:
    """One report of several runs."""
    facts, results = joined([read_json(path) for path in args.join])
    if args.json is not None:
        write_json(args.json, facts, results)
    if args.markdown is not None:
        args.markdown.write_text(document(facts, results), encoding="utf-8")
    print(counts(results))
    return 0 if not facts["errors"] and all(result.is_correct for result in results) else 1


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.join is not None:
        return join(args)
    torch.manual_seed(0)
    start = time.perf_counter()
    ceilings = measure_ceilings(args.device)
    facts = fingerprint(ceilings)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    results: list[Result] = []
    errors: list[str] = []
    facts["errors"] = errors
    facts["command"] = shlex.join(
        ["python", "benchmarks/python/bench_kernels.py", *(argv or sys.argv[1:])]
    )
    for name in args.only:
        with ops.settled_weights():  # as inside the engine: no case writes a weight
            results += run_section(name, args, ceilings, errors)
        # After each section, so that a run that is cut off leaves what it has measured.
        if args.json is not None:
            write_json(args.json, facts, results)
        if args.markdown is not None:
            args.markdown.write_text(document(facts, results), encoding="utf-8")
    print(f"\n{counts(results)}; {time.perf_counter() - start:.0f} s")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 0 if not errors and all(result.is_correct for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
