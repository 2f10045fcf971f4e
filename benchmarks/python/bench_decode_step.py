# SPDX-License-Identifier: Apache-2.0
"""Milliseconds per decode step of a random model, by batch and buffer size.

    python benchmarks/python/bench_decode_step.py --output decode_step.jsonl
    python benchmarks/python/bench_decode_step.py --quantization fp8 --batch 1,8 --buffer-size 1
    python benchmarks/python/bench_decode_step.py --targets all --json decode_targets.json
    python benchmarks/python/bench_decode_step.py --targets sdar-8b --quantization fp8
    python benchmarks/python/bench_decode_step.py --tp 1,2 --batch 1,8 --buffer-size 1
    python benchmarks/python/bench_decode_step.py --packing on,off --batch 8 --buffer-size 4

A step is a whole engine step as the host sees it: schedule, forward over the rows of every running
request, sampling, and the copy of the result. Random weights accept one position per block and
step. `rows` is what the blocks in flight could run, `valid` the share of it that blocks do. `packed` steps held these
rows alone, by the device's own count; `--packing off` has the device run all of them. The floor is the time to read the weights once at the
copy bandwidth measured in the same run; of experts, those that rows were sent to. They are counted:
a second engine without graphs repeats the timed steps. `--targets` runs all cases that `step_targets.py`
has for the weights asked for, and for the cache if one is, and says which pass.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterable
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import bench_families
import torch
from published_shapes import SDAR_SHAPES, SHAPES
from random_engine import build_engine, build_model, build_shared_engine, random_prompts
from step_probe import StepProbe
from step_targets import TARGETS, StepCase, judge
from step_timing import (
    clock_facts,
    copy_bandwidth,
    machine_facts,
    markdown_table,
    summary,
    timed_steps,
    weight_bytes,
)

from diffulex import Diffulex, SamplingParams
from diffulex.quantization.scheme import SCHEMES

if TYPE_CHECKING:
    from diffulex.config.config import Config

COLUMNS = (
    "shape", "tp", "kv_cache_dtype", "kept", "quantize_head", "prompt_len", "buffer", "batch", "rows", "valid",
    "step_ms", "p10_ms", "p90_ms", "floor_ms", "experts", "sm_mhz", "watts", "graph_steps", "packing", "packed", "peer_ms", "target_ms", "verdict",
)  # fmt: skip


_PAGE_SIZE = 32
MOE_SHAPES = ("llada2-mini", "llada2-flash", "sdar-30b-a3b-b32", "tiny-moe")


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def target_shapes(text: str) -> list[str]:
    known = list(dict.fromkeys(case.shape for case in TARGETS))
    names = known if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"expected all or {', '.join(known)}, got {unknown}")
    return names


def parse(argv: list[str] | None) -> argparse.Namespace:
    is_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", choices=(*SDAR_SHAPES, *MOE_SHAPES), default="sdar-8b")
    parser.add_argument("--device", default="cuda" if is_cuda else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=integers, default=[1, 8, 32], help="requests, 1,8,32")
    parser.add_argument("--buffer-size", type=integers, default=[1, 4], help="blocks, 1,4")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument(
        "--tp", type=integers, default=[1], help="devices that share the weights, 1"
    )
    parser.add_argument("--prompt-len", type=integers, default=[256], help="tokens, 256")
    parser.add_argument(
        "--targets", type=target_shapes, help="run the cases of these shapes, or all, instead"
    )
    parser.add_argument(
        "--max-model-len", type=int, help="limit of the engine [what the steps need]"
    )
    parser.add_argument("--warmup", type=int, default=8, help="decode steps before timing")
    parser.add_argument("--steps", type=int, default=64, help="timed decode steps")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--packing",
        type=lambda text: text.split(","),
        default=["on"],
        help="whether the device leaves out void rows: on, off or on,off [on]",
    )
    parser.add_argument("--run-ahead", choices=("auto", "on", "off"), default="auto")
    parser.add_argument(
        "--quantization", choices=("none", *SCHEMES), default="none", help="of weights [none]"
    )
    parser.add_argument("--quantize-head", action="store_true", help="the output head, too")
    parser.add_argument(
        "--quantization-ignore",
        type=lambda text: tuple(filter(None, text.split(","))),
        help="patterns of modules that keep their dtype; '' for none [what the family keeps]",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8_e4m3"),
        help="of keys and values [auto; of --targets all]",
    )
    parser.add_argument("--output", type=Path, help="also append the JSON lines to this file")
    parser.add_argument("--json", type=Path, help="write facts and rows as one JSON document")
    options = parser.parse_args(argv)
    if not set(options.packing) <= {"on", "off"}:
        parser.error(f"--packing: expected on, off or on,off, got {','.join(options.packing)}")
    if options.targets is not None and not (options.tp == [1] and cases_of(options)):
        precision = f"--quantization {options.quantization}"
        if options.kv_cache_dtype is not None:
            precision += f" --kv-cache-dtype {options.kv_cache_dtype}"
        parser.error(
            f"--targets: nothing is asked of {','.join(options.targets)} with {precision}"
            f" --tp {','.join(map(str, options.tp))}"
        )
    return options


def cases_of(options: argparse.Namespace) -> list[StepCase]:
    if options.targets is not None:
        return [
            case
            for case in TARGETS
            if case.shape in options.targets
            and case.quantization == options.quantization
            and options.kv_cache_dtype in (None, case.kv_cache_dtype)
        ]
    chosen = (
        *(options.quantization, options.kv_cache_dtype or "auto"),
        *(options.quantize_head, options.quantization_ignore),
    )
    return [
        StepCase(options.shape, buffer_size, prompt_len, batch, options.block_size, *chosen)
        for prompt_len in options.prompt_len
        for buffer_size in options.buffer_size
        for batch in options.batch
    ]


def started_engine(
    model: Any, num_ranks: int, options: argparse.Namespace, case: StepCase, *, has_graphs: bool
) -> Diffulex:
    """An engine with all requests of one measurement waiting; with several ranks `model` is not used."""
    if case.buffer_size is None or case.block_size is None:
        given = {"prompt_len": case.prompt_len, "quantization": case.quantization}
        of_family = argparse.Namespace(**{**vars(options), **given})
        return bench_families.started_engine(
            SHAPES[case.shape], model, of_family, case.batch, has_graphs=has_graphs
        )
    # One position per block and step at least, so this many tokens outlast the timed steps.
    steps = options.warmup + options.steps + 2
    new_tokens = steps * case.buffer_size + case.block_size
    window = case.buffer_size * case.block_size
    needed = case.prompt_len + new_tokens + window
    max_model_len = max(options.max_model_len or 0, needed)
    settings: dict[str, Any] = {
        "decoding_strategy": "multi_bd",
        "block_size": case.block_size,
        "buffer_size": case.buffer_size,
        "decoding_thresholds": {"accept_threshold": 1.0},
        "max_num_reqs": case.batch,
        "page_size": _PAGE_SIZE,
        "num_pages": case.batch * (max_model_len // _PAGE_SIZE + 3),
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max(4096, max_model_len + 2 * window, case.batch * window),
        "enforce_eager": not has_graphs,
        "enable_prefix_caching": False,
        "run_ahead": options.run_ahead,
        "quantization": case.quantization,
        "kv_cache_dtype": case.kv_cache_dtype,
        "quantize_head": case.quantize_head,
    }
    if case.quantization_ignore is not None:
        settings["quantization_ignore"] = case.quantization_ignore
    shape = SHAPES[case.shape]
    if num_ranks == 1:
        engine = build_engine(shape, model, options.device, **settings)
    else:
        settings["dtype"] = options.dtype
        engine = build_shared_engine(shape, num_ranks, options.device, **settings)
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    for prompt in random_prompts(engine.config.model.spec, case.batch, case.prompt_len):
        engine.add_request(prompt, params)
    return engine


def weights_read(
    model: Any, num_ranks: int, options: argparse.Namespace, case: StepCase
) -> tuple[float, float | None]:
    """Bytes of the weights that the first rank reads in a step, and experts that a layer of it hits."""
    with started_engine(model, num_ranks, options, case, has_graphs=False) as engine:
        probe = StepProbe(engine._executor.runner.model)
        try:
            timed_steps(engine, case.batch, options.warmup, options.steps, probe.keep)
        finally:
            probe.remove()
        reads = probe.reads()
    parts = reads.bytes_by_part
    return parts["dense"] + parts["experts"] + parts["head"], reads.experts


def pack_no_step(engine: Diffulex) -> None:
    """Has the loop of the device, and with it the host's, run all rows."""
    loop = engine._executor.runner.loop
    if loop is not None:
        loop._packed = loop._host_share = None


class TimedSteps(NamedTuple):
    """What an engine says of the steps that were timed."""

    seconds: list[float]
    valid_rows: float  # of a step
    clocks: dict[str, Any]
    graph_steps: int
    num_packed: int
    num_bytes: float  # of the weights of this rank
    config: Config


def run_steps(
    model: Any,
    num_ranks: int,
    options: argparse.Namespace,
    case: StepCase,
    *,
    is_packing: bool,
) -> TimedSteps:
    """The engine, and with several ranks its weights, are gone when this returns."""
    has_graphs = not options.enforce_eager
    with started_engine(model, num_ranks, options, case, has_graphs=has_graphs) as engine:
        if not is_packing:
            pack_no_step(engine)
        num_valid: list[int] = []
        seconds = timed_steps(
            *(engine, case.batch, options.warmup, options.steps),
            lambda: num_valid.append(engine.stats().num_rows),
        )
        loop = engine._executor.runner.loop
        return TimedSteps(
            seconds,
            (num_valid[-1] - num_valid[0]) / (len(num_valid) - 1),
            clock_facts(options.device),
            engine.run_stats.num_graph_steps,
            0 if loop is None else loop.num_packed_steps,
            float(weight_bytes(engine._executor.runner.model)),
            engine.config,
        )


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(
    model: Any,
    num_ranks: int,
    options: argparse.Namespace,
    case: StepCase,
    bandwidth: float,
    *,
    is_packing: bool = True,
) -> dict[str, Any]:
    """One line of the result."""
    timed = run_steps(model, num_ranks, options, case, is_packing=is_packing)
    free_memory()
    num_bytes, experts = timed.num_bytes, None
    decoding, moe = timed.config.decoding, timed.config.model.spec.moe
    if moe is not None:
        num_bytes, experts = weights_read(model, num_ranks, options, case)
        free_memory()
    num_rows = case.batch * decoding.buffer_size * decoding.block_size
    row = {
        "tp": num_ranks,
        "kv_cache_dtype": case.kv_cache_dtype,
        "prompt_len": case.prompt_len,
        "block": decoding.block_size,
        "buffer": decoding.buffer_size,
        "batch": case.batch,
        "rows": num_rows,
        "valid": round(timed.valid_rows / num_rows, 4),
        **summary(timed.seconds),
        **timed.clocks,
        "graph_steps": timed.graph_steps,
        "packing": "on" if is_packing else "off",
        "packed": timed.num_packed,
        "weight_bytes": round(num_bytes),
        "floor_ms": round(1e3 * num_bytes / bandwidth, 4),
    }
    if experts is not None:
        row["experts"] = round(experts, 2)
        row["experts_total"] = moe.num_experts
    if case.quantization != "none":
        row["kept"] = " ".join(timed.config.model.quantization_ignore) or "nothing"
        row["quantize_head"] = case.quantize_head
    known = {"target_ms": case.target_ms, "peer_ms": case.peer_ms}
    row |= {key: round(value, 3) for key, value in known.items() if value is not None}
    if options.targets is not None and (verdict := judge(row)) is not None:
        row["verdict"] = verdict
    return row


def model_of(case: StepCase) -> tuple[str, bool, tuple[str, ...] | None]:
    """What tells the models of cases in one scheme apart."""
    return case.shape, case.quantize_head, case.quantization_ignore


def measured_rows(options: argparse.Namespace, bandwidth: float) -> Iterable[dict[str, Any]]:
    cases = cases_of(options)
    first = {model_of(case): index for index, case in reversed(list(enumerate(cases)))}
    # Cases of one model in a row: it is made once.
    cases.sort(key=lambda case: first[model_of(case)])
    for (shape, *choices), of_model in groupby(cases, key=model_of):
        listed = list(of_model)
        dtype, quantization = getattr(torch, options.dtype), options.quantization
        named = dict(zip(("quantize_head", "ignore"), choices, strict=True))
        for num_ranks in options.tp:
            model = None
            if num_ranks == 1:
                model = build_model(
                    SHAPES[shape], dtype, options.device, quantization=quantization, **named
                )
            for case, packing in product(listed, options.packing):
                given = model, num_ranks, options, case, bandwidth
                is_packing = packing == "on" and case.is_packing
                yield {"shape": shape, **measure(*given, is_packing=is_packing)}
            del model
            gc.collect()
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    bandwidth = copy_bandwidth(options.device)
    facts = {
        "benchmark": "decode_step",
        "dtype": options.dtype,
        "quantization": options.quantization,
        **machine_facts(options.device),
        "copy_gb_per_s": round(bandwidth / 1e9, 1),
    }
    rows = []
    for row in measured_rows(options, bandwidth):
        rows.append(row)
        line = json.dumps({**facts, **row})
        print(line, flush=True)
        if options.output is not None:
            with options.output.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        if options.json is not None:
            text = json.dumps({**facts, "results": rows}, indent=2)
            options.json.write_text(text + "\n", encoding="utf-8")
    print(", ".join(f"{key} {value}" for key, value in facts.items()), end="\n\n")
    print(markdown_table([name for name in COLUMNS if any(name in row for row in rows)], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
