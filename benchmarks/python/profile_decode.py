# SPDX-License-Identifier: Apache-2.0
"""Where the time of a decode step goes: of a random model, or of a checkpoint, on one rank or several.

    python benchmarks/python/profile_decode.py --shape sdar-8b --batch 1 --target 97
    python benchmarks/python/profile_decode.py --shape sdar-8b --tp 2
    python benchmarks/python/profile_decode.py --shape diffusion-gemma-26b-a4b --strategy default
    python benchmarks/python/profile_decode.py --model demo --block-size 8 --device cpu --dtype float32 --tp 2

On one GPU, steps run under the torch profiler, which records every kernel and copy on the device, those
inside CUDA graphs too. The busy share is the union of their intervals over the time from the first to the
last; the program fails below `--target`. It also lists the kernels of a step and, as a check against the
profiler's own cost, the period of a step without it.

Several ranks record the same steps, each in its own process. Listed are what rank 0 spends a step on, and
of every rank the period of a step, its exchanges and their share, the share in which its device works,
and how late it begins the first exchange of a step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from published_shapes import SHAPES
from random_engine import (
    build_engine,
    build_model,
    build_shared_engine,
    random_prompts,
    resolve_config,
)
from rank_traces import (
    RankTotals,
    Work,
    busy_and_gaps,
    device_work,
    host_work,
    rank_totals,
    whole_steps,
)
from step_timing import machine_facts, markdown_table, summary, timed_steps
from torch.profiler import ProfilerActivity, profile

from diffulex import Diffulex, SamplingParams
from diffulex.quantization.scheme import SCHEMES

_RECORDING = "decode"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=sorted(SHAPES), default="sdar-8b")
    which.add_argument("--model", help="a checkpoint, or demo, in place of a random model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the weights")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("none", *SCHEMES), default="none")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--strategy",
        choices=("multi_bd", "default"),
        default="multi_bd",
        help="of a random model; default: the family's own, with its blocks and thresholds",
    )
    parser.add_argument("--block-size", type=int, help="with --strategy multi_bd [32]")
    parser.add_argument("--buffer-size", type=int, help="with --strategy multi_bd [1]")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=8, help="decode steps before")
    parser.add_argument("--steps", type=int, default=24, help="profiled decode steps")
    parser.add_argument("--run-ahead", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--target", type=float, help="least busy share in percent, on one GPU")
    parser.add_argument("--top", type=int, default=20, help="kernels or ops to list")
    parser.add_argument("--output", type=Path, help="also append the JSON line to this file")
    options = parser.parse_args(argv)
    if options.tp == 1 and (options.device == "cpu" or options.model is not None):
        parser.error("--tp: expected several ranks with --device cpu or --model, got 1")
    if options.strategy == "default":
        if options.model is not None:
            parser.error("--strategy: expected multi_bd with --model, got default")
        for name, value in _blocks_of(options).items():
            if value is not None:
                flag = "--" + name.replace("_", "-")
                parser.error(f"{flag}: expected it unset with --strategy default, got {value}")
    if options.tp > 1 and options.target is not None:
        parser.error("--target: expected --tp 1")
    return options


def kernel_rows(
    work: Sequence[Work], steps: int, top: int, *, has_threads: bool = False
) -> list[dict[str, Any]]:
    """What most of the busy time went to.

    A kernel may start before the one in front of it has ended and then waits for it. `us_alone` counts from
    that end on: all of it adds up to the busy time. `has_threads`: what overlaps is computed at the same
    time, as by the threads of a host, and counts as a whole.
    """
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    end = -math.inf
    for item in work:
        alone = max(0.0, item.end - (item.begin if has_threads else max(end, item.begin)))
        end = max(end, item.end)
        times[item.name].append((item.end - item.begin, alone))
    rows = [
        {
            "us_per_step": round(sum(alone for _, alone in values) / steps, 1),
            "launches": round(len(values) / steps, 2),
            "us_alone": round(statistics.median(alone for _, alone in values), 2),
            "us": round(statistics.median(whole for whole, _ in values), 2),
            "name": name[:100],
        }
        for name, values in times.items()
    ]
    return sorted(rows, key=lambda row: -row["us_per_step"])[:top]


def started(options: argparse.Namespace, **settings: Any) -> Diffulex:
    """An engine with all requests waiting, which outlast the steps."""
    blocks, is_default = _blocks(options), options.strategy == "default"
    window = blocks["buffer_size"] * blocks["block_size"]
    all_steps = options.warmup + 2 * options.steps + 4
    # Under its own thresholds a strategy may end a block, or a canvas, in every step.
    tokens = max(blocks.values()) if is_default else blocks["buffer_size"]
    new_tokens = all_steps * tokens + blocks["block_size"]
    max_model_len = options.prompt_len + new_tokens + window
    settings |= {
        "max_num_reqs": options.batch,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max(4096, max_model_len + 2 * window, options.batch * window),
        "enable_prefix_caching": False,
        "run_ahead": options.run_ahead,
        "quantization": options.quantization,
    }
    if not is_default:
        settings |= {**blocks, "decoding_thresholds": {"accept_threshold": 1.0}}
        if options.model is None:
            settings["decoding_strategy"] = options.strategy
    engine = _engine(options, settings)
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    spec = engine.config.model.spec
    for prompt in random_prompts(spec, options.batch, options.prompt_len):
        engine.add_request(prompt, params)
    return engine


def _blocks(options: argparse.Namespace) -> dict[str, int]:
    if options.strategy == "default":
        decoding = resolve_config(SHAPES[options.shape], device=options.device).decoding
        return {"block_size": decoding.block_size, "buffer_size": decoding.buffer_size}
    given = {name: value for name, value in _blocks_of(options).items() if value is not None}
    return {"block_size": 32, "buffer_size": 1, **given}


def _blocks_of(options: argparse.Namespace) -> dict[str, int | None]:
    return {"block_size": options.block_size, "buffer_size": options.buffer_size}


def _engine(options: argparse.Namespace, settings: dict[str, Any]) -> Diffulex:
    if options.model is not None:
        settings |= {"device": options.device, "dtype": options.dtype}
        return Diffulex(options.model, tensor_parallel_size=options.tp, **settings)
    shape = SHAPES[options.shape]
    if options.tp > 1:
        settings["dtype"] = options.dtype
        return build_shared_engine(shape, options.tp, options.device, **settings)
    dtype = getattr(torch, options.dtype)
    model = build_model(shape, dtype, "cuda", quantization=options.quantization)
    return build_engine(shape, model, "cuda", **settings)


def device_facts(work: Sequence[Work], steps: int, top: int) -> dict[str, Any]:
    """What a GPU did in so many steps."""
    busy, gaps = busy_and_gaps(work)
    span = max(item.end for item in work) - work[0].begin
    return {
        "busy_percent": round(100 * busy / span, 2),
        "launches_per_step": round(len(work) / steps, 1),
        "gap_us_per_step": round((span - busy) / steps, 1),
        "kernels": kernel_rows(work, steps, top),
        "gaps": sorted(gaps, reverse=True)[:5],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One rank on a GPU."""
    with started(options) as engine, tempfile.TemporaryDirectory() as folder:
        seconds = timed_steps(engine, options.batch, options.warmup, options.steps)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            timed_steps(engine, options.batch, 0, options.steps)
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        work = device_work(path)
    facts = device_facts(work, options.steps, options.top)
    return {**facts, "step_ms": summary(seconds)["step_ms"]}


def measure_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Several ranks, by what each of them records."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(options, profiler_config={"torch_profiler_dir": name}) as engine:
            seconds = timed_steps(engine, options.batch, options.warmup, options.steps)
            engine.start_profile(_RECORDING)
            timed_steps(engine, options.batch, 0, options.steps)
            engine.stop_profile()
        names = [f"{_RECORDING}.model_runner.rank{rank}.trace.json" for rank in range(options.tp)]
        traces = [folder / each for each in names]
        totals, skew = rank_totals(traces)
        steps = whole_steps(traces[0])
        work = steps.within(device_work(traces[0]))
        if work:
            facts = device_facts(work, steps.count, options.top)
        else:
            work = steps.within(host_work(traces[0]))
            rows = kernel_rows(work, steps.count, options.top, has_threads=True)
            facts = {"kernels": rows, "gaps": []}
    ranks = [each._asdict() for each in totals]
    step_ms = summary(seconds)["step_ms"]
    return {**facts, "step_ms": step_ms, "first_exchange_skew_us": skew, "ranks": ranks}


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    result = measure(options) if options.tp == 1 else measure_ranks(options)
    kernels, gaps = result.pop("kernels"), result.pop("gaps")
    blocks = _blocks(options)
    line = {
        "benchmark": "profile_decode",
        "shape": options.model or options.shape,
        "quantization": options.quantization,
        "tp": options.tp,
        "batch": options.batch,
        "strategy": options.strategy,
        "block": blocks["block_size"],
        "buffer": blocks["buffer_size"],
        "prompt_len": options.prompt_len,
        "run_ahead": options.run_ahead,
        **machine_facts(options.device),
        **result,
    }
    print(json.dumps(line))
    if options.output is not None:
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    if options.tp > 1:
        print(markdown_table(RankTotals._fields, result["ranks"]))
    print(markdown_table(("us_per_step", "launches", "us_alone", "us", "name"), kernels))
    for span, before, after in gaps:
        print(f"idle {span:.1f} us between {before[:60]} and {after[:60]}")
    if options.target is not None and result["busy_percent"] < options.target:
        print(f"busy: expected >= {options.target} %, got {result['busy_percent']} %")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
