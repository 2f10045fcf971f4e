# SPDX-License-Identifier: Apache-2.0
"""Share of the time in which the GPU works, in steady-state decode of a random model.

    python benchmarks/python/profile_decode.py --shape sdar-8b --batch 1 --target 97

Steps run under the torch profiler, which records every kernel and copy on the device, those inside
CUDA graphs too. The busy share is the union of their intervals over the time from the first to the
last; the program fails below `--target`. It also lists the kernels of a step and, as a check against
the profiler's own cost, the period of a step without it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from published_shapes import SHAPES
from random_engine import build_engine, build_model, random_prompts
from step_timing import machine_facts, markdown_table, summary, timed_steps
from torch.profiler import ProfilerActivity, profile

from diffulex import SamplingParams
from diffulex.quantization.scheme import SCHEMES

_DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


class Work(NamedTuple):
    """One kernel or copy on the device, in microseconds."""

    name: str
    begin: float
    end: float


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="sdar-8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", *SCHEMES), default="none")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--buffer-size", type=int, default=1)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=8, help="decode steps before")
    parser.add_argument("--steps", type=int, default=24, help="profiled decode steps")
    parser.add_argument("--run-ahead", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--target", type=float, help="least busy share in percent")
    parser.add_argument("--top", type=int, default=20, help="kernels to list")
    parser.add_argument("--output", type=Path, help="also append the JSON line to this file")
    return parser.parse_args(argv)


def device_work(trace: Path) -> list[Work]:
    """Everything the device did, by begin."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    work = [
        Work(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in _DEVICE_EVENTS
    ]
    return sorted(work, key=lambda item: item.begin)


def busy_and_gaps(work: Sequence[Work]) -> tuple[float, list[tuple[float, str, str]]]:
    """Microseconds in which anything ran, and the idle spans with what came before and after."""
    busy, gaps = 0.0, []
    end, before = work[0].begin, work[0].name
    for item in work:
        if item.begin > end:
            gaps.append((item.begin - end, before, item.name))
        busy += max(0.0, item.end - max(end, item.begin))
        if item.end > end:
            end, before = item.end, item.name
    return busy, gaps


def kernel_rows(work: Sequence[Work], steps: int, top: int) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = defaultdict(list)
    for item in work:
        times[item.name].append(item.end - item.begin)
    rows = [
        {
            "us_per_step": round(sum(values) / steps, 1),
            "launches": round(len(values) / steps, 2),
            "us": round(statistics.median(values), 2),
            "name": name[:100],
        }
        for name, values in times.items()
    ]
    return sorted(rows, key=lambda row: -row["us_per_step"])[:top]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    dtype = getattr(torch, options.dtype)
    model = build_model(SHAPES[options.shape], dtype, "cuda", quantization=options.quantization)
    window = options.buffer_size * options.block_size
    all_steps = options.warmup + 2 * options.steps + 4
    new_tokens = all_steps * options.buffer_size + options.block_size
    max_model_len = options.prompt_len + new_tokens + window
    engine = build_engine(
        SHAPES[options.shape],
        model,
        "cuda",
        decoding_strategy="multi_bd",
        block_size=options.block_size,
        buffer_size=options.buffer_size,
        decoding_thresholds={"accept_threshold": 1.0},
        max_num_reqs=options.batch,
        max_model_len=max_model_len,
        max_num_batched_tokens=max(4096, max_model_len + 2 * window, options.batch * window),
        enable_prefix_caching=False,
        run_ahead=options.run_ahead,
        quantization=options.quantization,
    )
    with engine, tempfile.TemporaryDirectory() as folder:
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        for prompt in random_prompts(model.spec, options.batch, options.prompt_len):
            engine.add_request(prompt, params)
        seconds = timed_steps(engine, options.batch, options.warmup, options.steps)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            timed_steps(engine, options.batch, 0, options.steps)
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        work = device_work(path)
    busy, gaps = busy_and_gaps(work)
    span = max(item.end for item in work) - work[0].begin
    return {
        "busy_percent": round(100 * busy / span, 2),
        "launches_per_step": round(len(work) / options.steps, 1),
        "gap_us_per_step": round((span - busy) / options.steps, 1),
        "step_ms": summary(seconds)["step_ms"],
        "kernels": kernel_rows(work, options.steps, options.top),
        "gaps": sorted(gaps, reverse=True)[:5],
    }


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    result = measure(options)
    kernels, gaps = result.pop("kernels"), result.pop("gaps")
    line = {
        "benchmark": "profile_decode",
        "shape": options.shape,
        "quantization": options.quantization,
        "batch": options.batch,
        "buffer": options.buffer_size,
        "prompt_len": options.prompt_len,
        "run_ahead": options.run_ahead,
        **machine_facts("cuda"),
        **result,
    }
    print(json.dumps(line))
    if options.output is not None:
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    print(markdown_table(("us_per_step", "launches", "us", "name"), kernels))
    for span, before, after in gaps:
        print(f"idle {span:.1f} us between {before[:60]} and {after[:60]}")
    if options.target is not None and result["busy_percent"] < options.target:
        print(f"busy: expected >= {options.target} %, got {result['busy_percent']} %")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
