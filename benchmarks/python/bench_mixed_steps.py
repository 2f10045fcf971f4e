# SPDX-License-Identifier: Apache-2.0
"""How long prompts hold up requests that decode: in steps of their own, in chunks, and in mixed steps.

    python benchmarks/python/bench_mixed_steps.py --quantization fp8 --json mixed_steps.json

`--requests` short requests are in flight all the time, and every `--every` seconds a long prompt comes. A row
is one engine over random weights: `whole` prefills a prompt in one step, `chunks` in steps of
`--chunk` rows of their own, and a number is `mixed_step_rows`. `alone_ms` is the median step while no long
prompt is prefilled; `p50_ms`, `p99_ms` and `most_ms` are those while one is; `ttft_ms` is the median time
from a long prompt to its first token. `tok_s` counts the tokens of the short requests.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_decode_step import integers
from random_engine import add_model_flags, build_engine, build_model, random_prompts, shape_of
from step_timing import machine_facts, markdown_table

from diffulex import Diffulex, SamplingParams

COLUMNS = (
    "steps", "long_prompts", "alone_ms", "p50_ms", "p99_ms", "most_ms", "p99_ratio", "ttft_ms",
    "tok_s",
)  # fmt: skip
_PAGE_SIZE = 32


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add_model_flags(parser)
    parser.add_argument("--requests", type=int, default=16, help="short ones in flight [16]")
    parser.add_argument("--prompt-len", type=int, default=256, help="of the short ones [256]")
    parser.add_argument("--output-len", type=int, default=64, help="of the short ones [64]")
    parser.add_argument("--long-len", type=int, default=8192, help="of the long ones [8192]")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between long ones [2]")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row [10]")
    parser.add_argument("--chunk", type=int, default=1024, help="rows of a chunk [1024]")
    parser.add_argument(
        "--mixed", type=integers, default=[768, 1024, 1536], help="mixed_step_rows, one row each"
    )
    parser.add_argument("--json", type=Path, help="write facts and rows as one JSON document")
    return parser.parse_args(argv)


def settings_of(options: argparse.Namespace, steps: str) -> dict[str, Any]:
    """What an engine of one row is made with."""
    needed = options.long_len + options.output_len + 2 * options.block_size
    settings: dict[str, Any] = {
        "decoding_strategy": "multi_bd",
        "block_size": options.block_size,
        "decoding_thresholds": {"accept_threshold": 1.0},
        "max_num_reqs": options.requests + 2,
        "page_size": _PAGE_SIZE,
        "num_pages": (options.requests + 2) * (-(-needed // _PAGE_SIZE) + 2),
        "max_model_len": needed,
        "max_num_batched_tokens": needed + options.block_size,
        "enable_prefix_caching": False,
        "quantization": options.quantization,
    }
    if steps != "whole":
        rows = options.chunk if steps == "chunks" else int(steps)
        settings |= {"enable_chunked_prefill": True, "max_num_batched_tokens": rows}
        settings["mixed_step_rows"] = 0 if steps == "chunks" else rows
    return settings


class Traffic:
    """Short requests that are always there, and long prompts that come now and then."""

    def __init__(self, engine: Diffulex, options: argparse.Namespace) -> None:
        self._engine, self._options = engine, options
        spec = engine.config.model.spec
        self._short = random_prompts(spec, options.requests, options.prompt_len)
        self._long = random_prompts(spec, 4, options.long_len, seed=1)
        self._params = SamplingParams(max_tokens=options.output_len, ignore_eos=True)
        #: Long prompts without a token yet, and when they came.
        self.waiting: dict[int, float] = {}
        self.first_token_s: list[float] = []
        self.num_long = self.num_tokens = 0
        self._long_ids: set[int] = set()
        for prompt in self._short:
            engine.add_request(prompt, self._params)

    def add_long(self) -> None:
        request = self._engine.add_request(self._long[self.num_long % 4], self._params)
        self.waiting[request] = time.perf_counter()
        self._long_ids.add(request)
        self.num_long += 1

    def step(self) -> None:
        """A step of the engine; a short request that ends is followed by another."""
        for output in self._engine.step():
            if output.req_id not in self._long_ids:
                self.num_tokens += output.new_tokens
                if output.is_finished:
                    prompt = self._short[output.req_id % len(self._short)]
                    self._engine.add_request(prompt, self._params)
            elif output.new_tokens and output.req_id in self.waiting:
                came = self.waiting.pop(output.req_id)
                self.first_token_s.append(time.perf_counter() - came)


def measure(model: Any, options: argparse.Namespace, steps: str) -> dict[str, Any]:
    """One row."""
    shape = shape_of(options)
    engine = build_engine(shape, model, options.device, **settings_of(options, steps))
    alone: list[float] = []
    beside: list[float] = []
    with engine:
        traffic = Traffic(engine, options)
        # Past the first prompts, and once through what long prompts need.
        traffic.add_long()
        while traffic.waiting:
            traffic.step()
        traffic.num_tokens, traffic.num_long = 0, 0
        traffic.first_token_s.clear()
        begin = time.perf_counter()
        due = begin + options.every / 2
        while (start := time.perf_counter()) < begin + options.seconds:
            if start >= due:
                traffic.add_long()
                due += options.every
            is_beside = bool(traffic.waiting)
            traffic.step()
            (beside if is_beside else alone).append(1e3 * (time.perf_counter() - start))
        seconds = time.perf_counter() - begin
    if not beside or not alone:
        raise RuntimeError(f"expected steps with and without a long prompt in {options.seconds} s")
    typical, ordered = statistics.median(alone), sorted(beside)
    late = ordered[round(0.99 * (len(ordered) - 1))]
    return {
        "steps": steps,
        "long_prompts": traffic.num_long,
        "alone_ms": round(typical, 3),
        "p50_ms": round(statistics.median(beside), 3),
        "p99_ms": round(late, 3),
        "most_ms": round(ordered[-1], 3),
        "p99_ratio": round(late / typical, 2),
        "ttft_ms": round(1e3 * statistics.median(traffic.first_token_s or [float("nan")]), 1),
        "tok_s": round(traffic.num_tokens / seconds, 1),
    }


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    shape = shape_of(options)
    dtype = getattr(torch, options.dtype)
    model = build_model(shape, dtype, options.device, quantization=options.quantization)
    rows = []
    for steps in ("whole", "chunks", *map(str, options.mixed)):
        rows.append(measure(model, options, steps))
        gc.collect()
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    facts = {
        "command": shlex.join(["python", *sys.argv]),
        "shape": options.shape,
        "dtype": options.dtype,
        "quantization": options.quantization,
        **machine_facts(options.device),
    }
    if options.json is not None:
        text = json.dumps({**facts, "results": rows}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")
    print(markdown_table(list(COLUMNS), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
