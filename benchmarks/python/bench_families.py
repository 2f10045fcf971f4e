# SPDX-License-Identifier: Apache-2.0
"""Milliseconds per decode step of every model family, and the bandwidth that makes.

    python benchmarks/python/bench_families.py --output families.json
    python benchmarks/python/bench_families.py --quantization fp8

Random weights in the published shapes, each family under its default strategy and settings, batch 1
and 8. A step is a whole engine step as the host sees it: schedule, forward, sampling, copy of the
result. `read_gb` is what such a step has to read: the weights, of the routed experts only those that
rows were sent to, the cached keys and values, the head. Rows, context and experts are counted, not
estimated: a second engine without graphs repeats the timed steps and looks at them, which also
checks that all logits are finite. `fraction` compares `read_gb` per step time with the bandwidth of
a large copy in the same run. Targets are those of `step_targets.py` for prompts of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from published_shapes import REFERENCE_SHAPES, SHAPES, Shape
from random_engine import build_engine, build_model, random_prompts, resolve_config
from step_probe import StepProbe, StepReads
from step_targets import judge, of_family
from step_timing import (
    clock_facts,
    copy_bandwidth,
    machine_facts,
    markdown_table,
    summary,
    timed_steps,
)

from diffulex import Diffulex, SamplingParams
from diffulex.quantization.scheme import SCHEMES

COLUMNS = (
    "model", "strategy", "batch", "rows", "rows_run", "step_ms", "p10_ms", "p90_ms", "read_gb",
    "floor_ms", "fraction", "experts", "sm_mhz", "watts", "graph_steps", "target_ms", "verdict",
)  # fmt: skip


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    return list(SHAPES) if text == "all" else text.split(",")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--families",
        type=names,
        default=list(REFERENCE_SHAPES),
        help=f"comma-separated, or all, of: {', '.join(SHAPES)} [{','.join(REFERENCE_SHAPES)}]",
    )
    parser.add_argument("--batch", type=integers, default=[1, 8], help="requests, 1,8")
    parser.add_argument("--steps", type=int, default=50, help="timed decode steps [50]")
    parser.add_argument("--warmup", type=int, default=8, help="decode steps before timing [8]")
    parser.add_argument("--prompt-len", type=int, help="tokens [1024, tiny: 64]")
    parser.add_argument("--device", help="[cuda where there is one, tiny: cpu]")
    parser.add_argument("--dtype", help="[bfloat16, tiny: float32]")
    parser.add_argument(
        "--quantization", choices=("none", *SCHEMES), default="none", help="of weights [none]"
    )
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="shrunken models, to try the program")
    parser.add_argument("--output", type=Path, help="write the JSON to this file")
    options = parser.parse_args(argv)
    unknown = [name for name in options.families if name not in SHAPES]
    if unknown:
        parser.error(f"--families: expected {', '.join(SHAPES)}, got {', '.join(unknown)}")
    is_cuda = torch.cuda.is_available() and not options.tiny
    options.device = options.device or ("cuda" if is_cuda else "cpu")
    options.dtype = options.dtype or ("float32" if options.tiny else "bfloat16")
    options.prompt_len = options.prompt_len or (64 if options.tiny else 1024)
    return options


def engine_settings(shape: Shape, options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Room for exactly the requests of one measurement; the rest is the family's default."""
    decoding = resolve_config(shape, device=options.device).decoding
    rows = decoding.block_size * decoding.buffer_size
    length = options.prompt_len + max_new_tokens(shape, options) + 2 * rows
    settings = {
        "max_num_reqs": batch,
        "max_model_len": length,
        "max_num_batched_tokens": max(length + 2 * rows, batch * max(options.prompt_len, rows)),
        "enable_prefix_caching": False,
        "skip_warmup": True,
        "quantization": options.quantization,
    }
    config = resolve_config(shape, device=options.device, num_pages=1, **settings)
    return {**settings, "num_pages": batch * (config.pages_per_request + 2)}


def max_new_tokens(shape: Shape, options: argparse.Namespace) -> int:
    """Enough for every step: random weights decide about one position of each block a step."""
    decoding = resolve_config(shape, device=options.device).decoding
    steps: int = options.warmup + options.steps + 2
    if decoding.decoding_strategy == "fast_dllm_v2":
        steps *= 4  # requests in different modes take turns; only steps of all of them count
    return steps * decoding.buffer_size + decoding.block_size


def started_engine(
    shape: Shape, model: Any, options: argparse.Namespace, batch: int, *, has_graphs: bool
) -> Diffulex:
    """An engine with all requests of one measurement waiting."""
    settings = engine_settings(shape, options, batch)
    engine = build_engine(shape, model, options.device, enforce_eager=not has_graphs, **settings)
    params = SamplingParams(max_tokens=max_new_tokens(shape, options), ignore_eos=True)
    for prompt in random_prompts(model.spec, batch, options.prompt_len):
        engine.add_request(prompt, params)
    return engine


def count_reads(shape: Shape, model: Any, options: argparse.Namespace, batch: int) -> StepReads:
    """What the steps that are timed read."""
    with started_engine(shape, model, options, batch, has_graphs=False) as engine:
        probe = StepProbe(model)
        try:
            timed_steps(engine, batch, options.warmup, options.steps, probe.keep)
        finally:
            probe.remove()
        return probe.reads()


def measure(
    shape: Shape, model: Any, options: argparse.Namespace, batch: int, bandwidth: float
) -> dict[str, Any]:
    """One line of the result, but for the names."""
    with started_engine(
        shape, model, options, batch, has_graphs=not options.enforce_eager
    ) as engine:
        seconds = timed_steps(engine, batch, options.warmup, options.steps)
        clocks = clock_facts(options.device)
        graph_steps = engine.run_stats.num_graph_steps
        decoding = engine.config.decoding
        kept = engine.config.model.quantization_ignore
    has_graphs = options.device.startswith("cuda") and not options.enforce_eager
    # Steps before the timed ones are counted as well.
    if has_graphs and graph_steps < options.steps:
        raise RuntimeError(f"expected a graph for every timed step, got {graph_steps}")
    release_memory(options.device)
    reads = count_reads(shape, model, options, batch)
    times = summary(seconds)
    total = sum(reads.bytes_by_part.values())
    row: dict[str, Any] = {
        "strategy": decoding.decoding_strategy,
        "sampling_mode": decoding.sampling_mode,
        "block": decoding.block_size,
        "buffer": decoding.buffer_size,
        "batch": batch,
        "rows": round(reads.rows, 1),
        "rows_run": round(reads.rows_run, 1),
        "context": round(reads.context, 1),
        **times,
        **clocks,
        "graph_steps": graph_steps,
        "read_bytes": {part: round(value) for part, value in reads.bytes_by_part.items()},
        "read_gb": round(total / 1e9, 6),
        "floor_ms": round(1e3 * total / bandwidth, 4),
        "fraction": round(1e3 * total / bandwidth / times["step_ms"], 6),
    }
    if options.quantization != "none":
        row["kept"] = " ".join(kept) or "nothing"
    moe = model.spec.moe
    if reads.experts is not None:
        share = 1 - (1 - moe.top_k / moe.num_experts) ** reads.rows
        row["experts"] = round(reads.experts, 2)
        row["experts_if_uniform"] = round(moe.num_experts * share, 2)
        row["experts_total"] = moe.num_experts
    return row


def release_memory(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def run_shape(name: str, options: argparse.Namespace, bandwidth: float) -> list[dict[str, Any]]:
    """The lines of one model."""
    shape = SHAPES[name].tiny() if options.tiny else SHAPES[name]
    start = time.perf_counter()
    dtype, scheme = getattr(torch, options.dtype), options.quantization
    model = build_model(shape, dtype, options.device, quantization=scheme)
    rows = []
    for batch in options.batch:
        row = measure(shape, model, options, batch, bandwidth)
        target_ms = None if options.tiny else of_family(name, batch, scheme, options.prompt_len)
        if target_ms is not None:
            row |= {"target_ms": target_ms, "verdict": judge({**row, "target_ms": target_ms})}
        rows.append({"model": name, "parameters": model.spec.num_parameters, **row})
        print(
            f"{name}, {row['strategy']}, batch {batch}: {row['step_ms']} ms per step,"
            f" {row['fraction']} of the copy bandwidth"
            f" ({time.perf_counter() - start:.0f} s since the model was begun)",
            file=sys.stderr,
            flush=True,
        )
        release_memory(options.device)
    return rows


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    bandwidth = copy_bandwidth(options.device)
    facts = {
        "benchmark": "families",
        "command": shlex.join(
            ["python", "benchmarks/python/bench_families.py", *(argv or sys.argv[1:])]
        ),
        "is_tiny": options.tiny,
        **machine_facts(options.device),
        "dtype": options.dtype,
        "quantization": options.quantization,
        "prompt_len": options.prompt_len,
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
        "experts_counted": "distinct experts of the routing ids, mean over layers and timed steps",
    }
    results: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for name in options.families:
        try:
            results += run_shape(name, options, bandwidth)
        except Exception as error:  # one model must not cost the table of the others
            traceback.print_exc()
            errors[name] = f"{type(error).__name__}: {error}"
        release_memory(options.device)
        if options.output is not None:
            content = {**facts, "results": results, "errors": errors}
            options.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(", ".join(f"{key} {value}" for key, value in facts.items()), end="\n\n")
    print(markdown_table(COLUMNS, results))
    for name, text in errors.items():
        print(f"{name}: {text}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
