# SPDX-License-Identifier: Apache-2.0
"""CPU: decode steps of one random model with its weights in several forms, in turns.

    python benchmarks/python/bench_cpu_steps.py --threads 2 --output cpu_steps.json

`float32` has weights that need it, `bfloat16` those of a checkpoint in bfloat16 (held as such, multiplied in
float32), `bfloat16 rows` a model whose rows are bfloat16 too; a scheme of low precision has float32 rows, and
with `+head` its output head has the scheme too. Every round runs one whole step of each, so that what else the
host does meets all of them; `of_first` is the median over the rounds of the ratio to the first of them. A step
has `batch` requests with one block each; random weights accept one position of it, and the head runs over the
`head_rows` that are open.

    python benchmarks/python/bench_cpu_steps.py --llama-cpp VENV/bin/python

takes turns with forwards of llama.cpp too (`llama_cpp_peer.py`): as many rows, cached positions, threads and
logits. A forward of it samples nothing and decides nothing, a step here does. Its keys and values are float16,
and whether it takes flash attention is left to it; here they are those of the rows, float32 but with `bfloat16
rows`. Like `q8_0`, `int8+head` has 8 bits in every product; `int8` keeps a head in float32.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch
from published_shapes import SDAR_SHAPES, SHAPES, Shape
from random_engine import build_engine, make_quantizer, random_prompts
from step_timing import machine_facts, markdown_table, summary, timed_steps, weight_bytes

from diffulex import SamplingParams
from diffulex.checkpoint.auto_model import random_model
from diffulex.checkpoint.loader import weight_table_of
from diffulex.quantization.scheme import SCHEMES

DENSE = ("float32", "bfloat16", "bfloat16 rows")
WEIGHTS = (*DENSE, *SCHEMES, *(f"{scheme}+head" for scheme in SCHEMES))
PEERS = ("f32", "f16", "q8_0")
#: Decode steps of an engine before the first that is timed.
_WARMUP = 2
_PAGE_SIZE = 32
COLUMNS = (
    "batch",
    "rows",
    "weights",
    "step_ms",
    "p10_ms",
    "p90_ms",
    "of_first",
    "rows_per_s",
    "weight_bytes",
)


class Turns(Protocol):
    """What is timed once a round, batch by batch."""

    num_bytes: int

    def prepare(self, batch: int) -> None: ...

    def step(self, head_rows: int) -> float:
        """Seconds of one step."""


def cpu_name() -> str:
    """The processor, as the kernel calls it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


class Engine:
    """Engines over one model, for one batch after the other."""

    def __init__(self, shape: Shape, weights: str, options: argparse.Namespace) -> None:
        self.shape, self.options = shape, options
        self.scheme, _, head = weights.partition("+")
        self.has_head = bool(head)
        is_dense = weights in DENSE
        quantizer = None
        if not is_dense:
            quantizer = make_quantizer(shape, self.scheme, quantize_head=self.has_head)
        dtype = torch.bfloat16 if weights == "bfloat16 rows" else torch.float32
        self.scheme = "none" if is_dense else self.scheme
        self.model: Any = random_model(shape.family, shape.facts().spec, dtype, "cpu", 0, quantizer)
        if weights == "bfloat16":
            for values in weight_table_of(self.model, {}).values():
                values.copy_(values.bfloat16())
        self.num_bytes = 0
        self.head_rows: list[int] = []
        plain = self.model.compute_logits

        def compute_logits(rows: torch.Tensor) -> torch.Tensor:
            self.head_rows.append(rows.size(0))
            logits: torch.Tensor = plain(rows)
            return logits

        self.model.compute_logits = compute_logits
        self._stack = ExitStack()

    def prepare(self, batch: int) -> None:
        """Starts an engine and runs the prompts and the first steps."""
        self._stack.close()
        options, block = self.options, self.options.block_size
        steps = _WARMUP + options.rounds + 2
        max_model_len = options.prompt_len + steps + 3 * block
        self.batch = batch
        self.engine = build_engine(
            self.shape,
            self.model,
            "cpu",
            block_size=block,
            buffer_size=1,
            decoding_thresholds={"accept_threshold": 1.0},
            max_num_reqs=batch,
            page_size=_PAGE_SIZE,
            num_pages=batch * (max_model_len // _PAGE_SIZE + 3),
            max_model_len=max_model_len,
            enable_prefix_caching=False,
            quantization=self.scheme,
            quantize_head=self.has_head,
        )
        self._stack.enter_context(self.engine)
        params = SamplingParams(max_tokens=steps + block, ignore_eos=True)
        for prompt in random_prompts(self.model.spec, batch, options.prompt_len):
            self.engine.add_request(prompt, params)
        timed_steps(self.engine, batch, 0, _WARMUP)
        self.num_bytes = weight_bytes(self.model)

    def step(self, head_rows: int) -> float:
        del head_rows  # the engine decides
        return timed_steps(self.engine, self.batch, 0, 1)[0]

    def close(self) -> None:
        self._stack.close()


class LlamaCpp:
    """A process of `llama_cpp_peer.py`."""

    def __init__(self, shape: Shape, weights: str, options: argparse.Namespace) -> None:
        spec = shape.facts().spec
        sizes = {
            "layers": spec.num_layers,
            "hidden": spec.hidden_size,
            "inner": spec.intermediate_size,
            "q_heads": spec.num_q_heads,
            "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "vocab": spec.vocab_size,
            "positions": spec.max_positions,
            "rope_theta": spec.rope_theta,
        }
        script = Path(__file__).with_name("llama_cpp_peer.py")
        command = [options.llama_cpp, script, json.dumps(sizes), "--weights", weights]
        self._process = subprocess.Popen(
            [*map(str, command), "--threads", str(torch.get_num_threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._rows = {"rows": options.block_size, "context": options.prompt_len}
        self.facts = self._read()
        self.num_bytes = self.facts["weight_bytes"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("llama_cpp_peer.py: expected a line of JSON, got none")
        found: dict[str, Any] = json.loads(line)
        return found

    def prepare(self, batch: int) -> None:
        self.batch = batch
        self.step(self._rows["rows"])

    def step(self, head_rows: int) -> float:
        assert self._process.stdin is not None
        asked = {"batch": self.batch, **self._rows, "logits": head_rows}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(self._read()["ms"]) / 1e3

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure(
    turns: dict[str, Turns], engine: Engine, batch: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each; `engine` is one of them, whose rows of the head the others have as well."""
    for each in turns.values():
        each.prepare(batch)
    engine.head_rows.clear()
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(options.rounds):
        for name, each in turns.items():
            head_rows = engine.head_rows[-1] if engine.head_rows else batch * options.block_size
            seconds[name].append(each.step(max(1, head_rows // batch)))
    first, rows = next(iter(seconds.values())), batch * options.block_size
    head_rows = statistics.fmean(engine.head_rows)
    found = []
    for name, each in turns.items():
        ratios = [mine / its for mine, its in zip(seconds[name], first, strict=True)]
        of_step = summary(seconds[name])
        found.append(
            {
                "batch": batch,
                "rows": rows,
                "weights": name,
                **of_step,
                "of_first": round(statistics.median(ratios), 3),
                "rows_per_s": round(1e3 * rows / of_step["step_ms"], 1),
                "head_rows": round(head_rows, 1),
                "weight_bytes": each.num_bytes,
                "all_ms": [round(1e3 * value, 2) for value in seconds[name]],
            }
        )
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shape", choices=SDAR_SHAPES, default="sdar-0.6b")
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=WEIGHTS,
        default=["float32", "bfloat16", "int8", "int8+head"],
    )
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="requests [1 8]")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12, help="steps of each [12]")
    parser.add_argument("--threads", type=int, help="of each [torch's choice]")
    parser.add_argument("--llama-cpp", type=Path, help="a Python with llama-cpp-python and gguf")
    parser.add_argument("--llama-weights", nargs="+", choices=PEERS, default=["q8_0", "f16"])
    parser.add_argument("--output", type=Path, help="write the JSON to this file")
    options = parser.parse_args(argv)
    rounds, block, prompt_len = options.rounds, options.block_size, options.prompt_len
    # Every step accepts one position: all of them are within the first block, which is behind whole ones.
    if _WARMUP + rounds >= block:
        parser.error(f"--block-size: expected more than {_WARMUP} + --rounds {rounds}, got {block}")
    if prompt_len % block:
        parser.error(f"--prompt-len: expected a multiple of --block-size {block}, got {prompt_len}")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    shape = SHAPES[options.shape]
    engines = {name: Engine(shape, name, options) for name in options.weights}
    facts = {
        "benchmark": "cpu_steps",
        "cpu": cpu_name(),
        **machine_facts("cpu"),
        "threads": torch.get_num_threads(),
        "shape": options.shape,
        "prompt_len": options.prompt_len,
    }
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for engine in engines.values():
            stack.callback(engine.close)
        turns: dict[str, Turns] = dict(engines)
        if options.llama_cpp is not None:
            for name in options.llama_weights:
                peer = LlamaCpp(shape, name, options)
                stack.callback(peer.close)
                turns[f"llama.cpp {name}"] = peer
                facts |= {key: peer.facts[key] for key in ("llama_cpp_python", "system")}
        for batch in options.batch:
            for row in measure(turns, next(iter(engines.values())), batch, options):
                results.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
            if options.output is not None:
                text = json.dumps({**facts, "results": results}, indent=1)
                options.output.write_text(text + "\n", encoding="utf-8")
    print(markdown_table(COLUMNS, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
