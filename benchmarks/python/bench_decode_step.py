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
import datetime
import gc
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from random_engine import SHAPES, build_engine, build_model, random_prompts

from diffulex import Diffulex, SamplingParams
from diffulex.layers.linear import MatrixProduct
from diffulex.model.sdar import SdarForDiffusionLM

COLUMNS = (
    "batch", "buffer", "rows", "step_ms", "p10_ms", "p90_ms", "floor_ms", "steps", "graph_steps",
)  # fmt: skip


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: list[str] | None) -> argparse.Namespace:
    is_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="sdar-8b")
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


def weight_bytes(model: SdarForDiffusionLM) -> int:
    """Bytes a forward with logits reads; of an untied embedding table only a few rows."""
    products = [module for module in model.modules() if isinstance(module, MatrixProduct)]
    # A packed matrix is no parameter; the matrices are counted by their layers.
    matrices = {id(product.weight) for product in products} | {id(model.embedding.weight)}
    rest = sum(part.nbytes for part in model.parameters() if id(part) not in matrices)
    return rest + sum(product.nbytes for product in products)


def copy_bandwidth(device: str) -> float:
    """Bytes read plus written per second by a large copy."""
    num_bytes = 1 << (30 if device.startswith("cuda") else 27)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * num_bytes / best


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed_steps(engine: Diffulex, num_requests: int, warmup: int, steps: int) -> list[float]:
    """Seconds of each decode step in which every request takes part."""
    seconds: list[float] = []
    num_seen = 0
    while len(seconds) < steps and engine.has_unfinished():
        before = engine.run_stats.decode_s
        results = engine.step()
        duration = engine.run_stats.decode_s - before
        if duration > 0 and len(results) == num_requests:
            num_seen += 1
            if num_seen > warmup:
                seconds.append(duration)
        if any(result.is_finished for result in results):
            break
    if len(seconds) < steps:
        raise RuntimeError(f"expected {steps} full decode steps, got {len(seconds)}")
    return seconds


def measure(
    model: SdarForDiffusionLM, options: argparse.Namespace, batch: int, buffer_size: int
) -> dict[str, Any]:
    """One line of the result."""
    # One position per block and step at least, so this many tokens outlast the timed steps.
    new_tokens = (options.warmup + options.steps + 2) * buffer_size + options.block_size
    window = buffer_size * options.block_size
    max_model_len = options.prompt_len + new_tokens + window
    engine = build_engine(
        model,
        options.device,
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
    milliseconds = sorted(1e3 * value for value in seconds)
    last = len(milliseconds) - 1
    return {
        "batch": batch,
        "buffer": buffer_size,
        "rows": batch * window,
        "step_ms": round(statistics.median(milliseconds), 4),
        "mean_ms": round(statistics.fmean(milliseconds), 4),
        "p10_ms": round(milliseconds[round(0.1 * last)], 4),
        "p90_ms": round(milliseconds[round(0.9 * last)], 4),
        "steps": len(milliseconds),
        "graph_steps": graph_steps,
    }


def environment(options: argparse.Namespace) -> dict[str, Any]:
    is_cuda = options.device.startswith("cuda")
    name = torch.cuda.get_device_name(options.device) if is_cuda else platform.machine()
    return {
        "benchmark": "decode_step",
        "shape": options.shape,
        "block": options.block_size,
        "prompt_len": options.prompt_len,
        "dtype": options.dtype,
        "device": name,
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def table(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [", ".join(f"{key} {value}" for key, value in facts.items()), ""]
    cells = [COLUMNS, *([str(row[name]) for name in COLUMNS] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(COLUMNS))]
    for index, line in enumerate(cells):
        padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append(f"| {' | '.join(padded)} |")
        if index == 0:
            lines.append(f"|{'|'.join('-' * (width + 2) for width in widths)}|")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    spec = SHAPES[options.shape]
    model = build_model(spec, getattr(torch, options.dtype), options.device)
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
    print(table(facts, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
