# SPDX-License-Identifier: Apache-2.0
"""Runs compute-sanitizer over the CUDA tests in pieces that end, and prints a table of the pieces.

    python scripts/sanitize_cuda.py build/cp312/tests/diffulex_tests_cuda
    python scripts/sanitize_cuda.py --tool racecheck --only linear,overlap --seconds 300 PROGRAM

A tool slows a kernel by two orders of magnitude, so each piece is one gtest filter with few random
seeds, or a choice of tests in Python, and a time limit. A piece that does not end in time counts as cut off, not as
passed. The exit status is 1 if a tool reported something, a test failed, or a piece was cut off.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

#: Name of a piece, gtest filter, random seeds a test.
PIECES: tuple[tuple[str, str, int], ...] = (
    ("attention", "CudaBlockAttentionTest.*:CudaHopperAttentionTest.KernelFollowsTheShape", 2),
    ("attention-splits", "CudaHopperAttentionTest.ReplaysOverAnyWorkspace", 1),
    ("attention-small", "CudaAttentionPathsTest.SmallSharedMemory*", 3),
    ("attention-heads", "CudaAttentionPathsTest.ManyQueryHeadsPerKvHead", 1),
    ("overlap-attention", "CudaAttentionOverlapTest.*", 1),
    ("overlap-weights", "CudaOpOverlapTest.WeightsWritten*", 1),
    ("overlap-activations", "CudaOpOverlapTest.ActivationsWritten*", 1),
    ("overlap-experts", "CudaOpOverlapTest.ExpertInputs*", 1),
    ("overlap-keys", "CudaOpOverlapTest.KeysStored*", 1),
    ("overlap-logits", "CudaOpOverlapTest.LogitsWritten*", 1),
    (
        "linear",
        "*Linear*Test.*-CudaLinearChainTest.*:*ACtaTakes*:*SharesOf*:*DoesNotDepend*:*InARow*",
        1,
    ),
    ("linear-turns", "CudaLinearTest.ACtaTakes*", 1),
    ("linear-shares", "CudaLinearTest.SharesOf*", 1),
    ("linear-rows", "CudaLinearTest.ARowDoesNotDepend*", 1),
    ("linear-launches", "CudaLinearTest.LaunchesInARow*", 1),
    ("linear-chain", "CudaLinearChainTest.*", 1),
    ("experts", "MoeHopperTest.EveryTokenCountEqualsTheDefinition", 1),
    ("sampling", "CudaTokenStats*:CudaSampleFiltered*", 1),
    ("dense", "CudaNormTest.*:CudaRopeTest.*:CudaActivationTest.*:CudaOpLimitsTest.A*", 3),
    ("accept", "*Accept*:*Advance*", 2),
)
#: Name of a piece, a file of tests/python/ops, pytest's -k.
PYTHON_PIECES: tuple[tuple[str, str, str], ...] = (
    ("short-tiles", "test_attention.py", "short_tiles and cuda"),
    ("routing", "test_routing.py", "random_options and cuda and 2"),
    ("graphs", "test_cuda_graph.py", "rope or norm"),
    ("codes-rows", "test_code_rows.py", "cuda and 136"),
    ("codes-of-attention", "test_attention_codes.py", "split_keys and 128-dtype0-e4m3 and cuda"),
    ("codes-over-codes", "test_attention_codes.py", "caches and cuda and 256-128-e4m3"),
    ("codes-products", "test_quantize_cuda.py", "captured_graph or gated_products and 32"),
    ("codes-many-rows", "test_quantize_cuda.py", "many_rows_have and (65 or 257)"),
    ("codes-experts", "test_scaled_experts_cuda.py", "one_expert_has_all_slots and not 2500"),
    (
        "codes-attention",
        "test_scaled_cache_hopper.py",
        "smallest or units and 32 or decode and 32-2-128",
    ),
    ("codes-store", "test_scaled_cache_cuda.py", "every_rounding or hold_the_stored and 9"),
    ("nibbles", "test_nibble_tiles.py", "two_streams or rounded_once"),
    ("nibbles-products", "test_nibble_tiles.py", "test_product and (shape5 or shape6) and 64"),
    ("nibbles-experts", "test_nibble_experts.py", "experts_elsewhere and NibbleLayer"),
    ("nibbles-experts-tiles", "test_nibble_experts.py", "experts_elsewhere and TiledLayer"),
    ("nibbles-zeros", "test_nibble_tiles.py", "zero_points_are_rounded"),
    ("nibbles-wide", "test_dequantize_nibbles.py", "cuda and (tiles or rows)"),
    ("codes-portable", "test_quantize_cuda.py", "int8_products"),
    ("exchanges", "test_comm.py", "one_rank_after_the_other"),
    ("soft-embedding", "test_soft_embedding.py", "cuda and several_chunks"),
)
OP_TESTS = Path(__file__).resolve().parents[1] / "tests" / "python" / "ops"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: Pieces whose kernels convert a cache of codes: different warps write the same rows in turns that mbarriers
#: keep (csrc/ops/attention/sm90/converter.cuh), which racecheck does not follow and reports as hazards. So it
#: does where experts of codes or nibbles gather rows: each of 97 threads writes its part of a stage again after
#: an mbarrier has an arrival of one lane of every warp that read it (csrc/ops/moe/sm90/kernel.cuh).
NOT_FOR_RACECHECK = (
    "codes-attention",
    "codes-over-codes",
    "codes-experts",
    "nibbles-experts-tiles",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one piece under one tool."""

    tool: str
    piece: str
    verdict: str
    tests: str
    errors: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.verdict == "ended"

    def row(self) -> str:
        cells = (self.tool, self.piece, self.verdict, self.tests, self.errors)
        return f"| {' | '.join(cells)} | {self.seconds:.0f} |"


def run_piece(
    program: Path, tool: str, piece: tuple[str, str, int | str], seconds: float
) -> Outcome:
    """One run; `errors` is the tool's own summary."""
    name, tests, choice = piece
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
    if tool == "memcheck":
        command += ["--leak-check", "no", "--report-api-errors", "no"]
    environment = dict(os.environ)
    if isinstance(choice, int):
        command += [str(program), f"--gtest_filter={tests}", "--gtest_brief=1"]
        environment["DIFFULEX_TEST_SEEDS"] = str(choice)
    else:
        command += ["--kernel-name", "kernel_substring=diffulex"]  # not those of torch
        command += [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += [str(OP_TESTS / tests), "-k", choice]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
        text, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as expired:
        text = (expired.stdout or b"").decode(errors="replace")
        status = None
    passed = re.search(r"\[  PASSED  \] (\d+) tests?|^(\d+) passed", text, re.MULTILINE)
    num_passed = next(filter(None, passed.groups())) if passed else "-"
    summary = re.search(r"(ERROR|RACECHECK) SUMMARY: (.*)", text)
    if status is None:
        verdict = "cut off"
    elif status == 0:
        verdict = "ended" if num_passed not in ("-", "0") else "no test ran"
    else:
        verdict = "reported" if status == 9 else f"failed ({status})"
        print(text[-4000:], file=sys.stderr)
    return Outcome(
        tool,
        name,
        verdict,
        num_passed,
        summary[2] if summary else "-",
        time.monotonic() - start,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("program", type=Path, help="the program diffulex_tests_cuda")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="repeatable; default all")
    parser.add_argument("--only", default="", help="names of pieces or of their first words")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of a piece")
    parser.add_argument("--total", type=float, default=3600.0, help="limit of all pieces")
    args = parser.parse_args()
    if not args.program.is_file():
        parser.error(f"program: expected a file, got {args.program}")
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer: expected it on PATH, got none")
    wanted = [word for word in args.only.split(",") if word]
    every = [*PIECES, *PYTHON_PIECES]
    pieces = [
        piece for piece in every if not wanted or any(piece[0].startswith(word) for word in wanted)
    ]
    if not pieces:
        parser.error(f"--only: expected words of {[piece[0] for piece in every]}, got {args.only}")
    print("| tool | piece | verdict | tests | summary | s |\n|---|---|---|---|---|---|", flush=True)
    end = time.monotonic() + args.total
    are_good = True
    for tool in args.tool or TOOLS:
        for piece in pieces:
            if tool == "racecheck" and piece[0] in NOT_FOR_RACECHECK:
                print(Outcome(tool, piece[0], "not for this tool", "-", "-", 0.0).row(), flush=True)
                continue
            left = end - time.monotonic()
            if left < 1:
                outcome = Outcome(tool, piece[0], "not started", "-", "-", 0.0)
            else:
                outcome = run_piece(args.program, tool, piece, min(args.seconds, left))
            are_good = are_good and outcome.is_good
            print(outcome.row(), flush=True)
    return 0 if are_good else 1


if __name__ == "__main__":
    sys.exit(main())
