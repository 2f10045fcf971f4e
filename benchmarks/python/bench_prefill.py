# SPDX-License-Identifier: Apache-2.0
"""Milliseconds to read a prompt, by its length and the number of GPUs that share the weights.

    python benchmarks/python/bench_prefill.py --tp 1,2 --json prefill.json
    python benchmarks/python/bench_prefill.py --quantization none,fp8

A prompt is read in one step, without graphs, as the host sees it; random weights, no prefix cache.
`speedup` is over the first of `--tp` in the same scheme, `of_first` the share of the time in the first scheme on
as many GPUs.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from bench_decode_step import integers
from published_shapes import Shape
from random_engine import (
    add_model_flags,
    build_engine,
    build_model,
    build_shared_engine,
    random_prompts,
    shape_of,
)
from step_targets import PREFILL_SHARES
from step_timing import clock_facts, machine_facts, markdown_table, summary

from diffulex import Diffulex, SamplingParams

COLUMNS = (
    "shape", "quantization", "tp", "tokens", "step_ms", "p10_ms", "p90_ms", "tok_s", "sm_mhz", "watts",
    "speedup", "of_first", "target", "verdict",
)  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add_model_flags(parser, has_schemes=True)
    parser.add_argument("--tp", type=integers, default=[1], help="devices that share the weights")
    parser.add_argument("--tokens", type=integers, default=[8192], help="of the prompt, 8192")
    parser.add_argument("--warmup", type=int, default=2, help="prompts before timing")
    parser.add_argument("--repeat", type=int, default=7, help="timed prompts")
    parser.add_argument("--json", type=Path, help="write facts and rows as one JSON document")
    return parser.parse_args(argv)


def started(
    shape: Shape, scheme: str, num_ranks: int, length: int, options: argparse.Namespace
) -> Diffulex:
    needed = length + 2 * options.block_size
    settings: dict[str, Any] = {
        "decoding_strategy": "multi_bd",
        "block_size": options.block_size,
        "max_num_reqs": 1,
        "num_pages": needed // 32 + 4,
        "page_size": 32,
        "max_model_len": needed,
        "max_num_batched_tokens": needed + options.block_size,
        "enable_prefix_caching": False,
        "quantization": scheme,
    }
    if num_ranks > 1:
        return build_shared_engine(
            shape, num_ranks, options.device, dtype=options.dtype, **settings
        )
    dtype = getattr(torch, options.dtype)
    model = build_model(shape, dtype, options.device, quantization=scheme)
    return build_engine(shape, model, options.device, **settings)


def measure(engine: Diffulex, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    seconds = []
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    prompts = random_prompts(
        engine.config.model.spec, options.warmup + options.repeat, length, seed=length
    )
    for index, prompt in enumerate(prompts):
        engine.add_request(prompt, params)
        before = engine.run_stats.prefill_s
        start = time.perf_counter()
        engine.step()
        duration = time.perf_counter() - start
        if engine.run_stats.prefill_s <= before:
            raise RuntimeError(f"expected a step that reads {length} tokens, got another")
        if index >= options.warmup:
            seconds.append(duration)
        while engine.has_unfinished():
            engine.step()
    row = {"tokens": length, **summary(seconds), **clock_facts(options.device)}
    row["tok_s"] = round(1e3 * length / row["step_ms"])
    return row


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to the last row what it is beside those in front."""
    row = rows[-1]

    def ratio(key: str) -> float:
        """Of its time to that of the first row that differs from it in `key` alone, if at all."""
        alike = {"tokens", "quantization", "tp"} - {key}
        first = next(other for other in rows if all(other[name] == row[name] for name in alike))
        return float(row["step_ms"] / first["step_ms"])

    row["speedup"] = round(1 / ratio("tp"), 3)
    row["of_first"] = round(ratio("quantization"), 3)
    share = PREFILL_SHARES.get((row["shape"], row["quantization"], row["tokens"]))
    if share is not None and row["tp"] == 1 and rows[0]["quantization"] == "none":
        row["target"] = share
        row["verdict"] = "pass" if row["of_first"] <= share else "miss"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    shape = shape_of(options)
    rows: list[dict[str, Any]] = []
    for scheme, num_ranks, length in product(options.quantization, options.tp, options.tokens):
        with started(shape, scheme, num_ranks, length, options) as engine:
            row = measure(engine, length, options)
        del engine
        gc.collect()
        named = {"shape": options.shape, "quantization": scheme, "tp": num_ranks}
        rows.append({**named, **row})
        compare(rows)
    facts = {
        "command": shlex.join(["python", *sys.argv]),
        "dtype": options.dtype,
        "block": options.block_size,
        **machine_facts(options.device),
    }
    if options.json is not None:
        text = json.dumps({**facts, "results": rows}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    print(markdown_table([name for name in COLUMNS if any(name in row for row in rows)], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
