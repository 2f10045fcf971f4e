# SPDX-License-Identifier: Apache-2.0
"""Milliseconds per decode step of a random model, by batch and buffer size.

    python benchmarks/python/bench_decode_step.py --output decode_step.jsonl

A step is a whole engine step as the host sees it: schedule, forward over every row of every running
request, sampling, and the copy of the result. Random weights accept one position per block and
step, so the rows per step stay the same. The floor is the time to read the weights once at the
copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from published_shapes import SDAR_SHAPES, SHAPES
from random_engine import build_engine, build_model, random_prompts
from step_timing import (
    copy_bandwidth,
    machine_facts,
    markdown_table,
    summary,
    timed_steps,
    weight_bytes,
)

from diffulex import SamplingParams

COLUMNS = (
    "batch", "buffer", "rows", "step_ms", "p10_ms", "p90_ms", "floor_ms", "steps", "graph_steps",
)  # fmt: skip


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: list[str] | None) -> argparse.Namespace:
    is_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", choices=(*SDAR_SHAPES, "llada2-mini"), default="sdar-8b")
    parser.add_argument("--device", default="cuda" if is_cuda else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=integers, default=[1, 8, 32], help="requests, 1,8,32")
    parser.add_argument("--buffer-size", type=integers, default=[1, 4], help="blocks, 1,4")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=8, help="decode steps before timing")
    parser.add_argument("--steps", type=int, default=64, help="timed decode steps")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--output", type=Path, help="also append the JSON lines to this file")
    return parser.parse_args(argv)


def measure(
    model: Any, options: argparse.Namespace, batch: int, buffer_size: int
) -> dict[str, Any]:
    """One line of the result."""
    # One position per block and step at least, so this many tokens outlast the timed steps.
    new_tokens = (options.warmup + options.steps + 2) * buffer_size + options.block_size
    window = buffer_size * options.block_size
    max_model_len = options.prompt_len + new_tokens + window
    engine = build_engine(
        SHAPES[options.shape],
        model,
        options.device,
        decoding_strategy="multi_bd",
        block_size=options.block_size,
        buffer_size=buffer_size,
        decoding_thresholds={"accept_threshold": 1.0},
        max_num_reqs=batch,
        max_model_len=max_model_len,
        max_num_batched_tokens=max(4096, max_model_len + 2 * window, batch * window),
        enforce_eager=options.enforce_eager,
        enable_prefix_caching=False,
    )
    with engine:
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        for prompt in random_prompts(model.spec, batch, options.prompt_len):
            engine.add_request(prompt, params)
        seconds = timed_steps(engine, batch, options.warmup, options.steps)
        graph_steps = engine.run_stats.num_graph_steps
    return {
        "batch": batch,
        "buffer": buffer_size,
        "rows": batch * window,
        **summary(seconds),
        "graph_steps": graph_steps,
    }


def environment(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "benchmark": "decode_step",
        "shape": options.shape,
        "block": options.block_size,
        "prompt_len": options.prompt_len,
        "dtype": options.dtype,
        **machine_facts(options.device),
    }


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    model = build_model(SHAPES[options.shape], getattr(torch, options.dtype), options.device)
    bandwidth = copy_bandwidth(options.device)
    facts = environment(options)
    facts["weight_bytes"] = weight_bytes(model)
    facts["copy_gb_per_s"] = round(bandwidth / 1e9, 1)
    rows = []
    for buffer_size in options.buffer_size:
        for batch in options.batch:
            row = measure(model, options, batch, buffer_size)
            row["floor_ms"] = round(1e3 * facts["weight_bytes"] / bandwidth, 4)
            rows.append(row)
            line = json.dumps({**facts, **row})
            print(line, flush=True)
            if options.output is not None:
                with options.output.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            gc.collect()
    print(", ".join(f"{key} {value}" for key, value in facts.items()), end="\n\n")
    print(markdown_table(COLUMNS, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
