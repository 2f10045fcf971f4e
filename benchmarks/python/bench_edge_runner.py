# SPDX-License-Identifier: Apache-2.0
"""The C++ program over exported bundles against the engine: tokens, speed, memory.

    python benchmarks/python/bench_edge_runner.py BUNDLE --reference demo --limit 200 --output FILE

Both answer the same held-out problems one after the other; the engine runs the reference, a checkpoint or
the bundle itself, on the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from diffulex import Diffulex, SamplingParams

_ROOT = Path(__file__).resolve().parents[2]
_HELDOUT = {
    "demo": _ROOT / "python/diffulex/assets/demo/heldout.jsonl",
    "zoo": _ROOT / "examples/zoo/heldout.jsonl",
}


def run_engine(options: argparse.Namespace) -> tuple[list[list[int]], list[list[int]], float]:
    """Prompts and answers as token ids, and the seconds of all answers."""
    lines = _HELDOUT[options.problems].read_text().splitlines()[: options.limit]
    settings: dict[str, Any] = {"device": "cpu", "max_num_reqs": 1, "enable_prefix_caching": False}
    if options.buffer_size:
        settings["buffer_size"] = options.buffer_size
    params = SamplingParams(max_tokens=options.max_tokens)
    torch.set_num_threads(options.threads)
    with Diffulex(options.reference, **settings) as engine:
        prompts = [
            engine.tokenizer.apply_chat_template(
                [{"role": "user", "content": json.loads(line)["question"]}]
            )
            for line in lines
        ]
        engine.generate(prompts[:1], params)
        start = time.perf_counter()
        answers = [list(engine.generate([prompt], params)[0].token_ids) for prompt in prompts]
        return prompts, answers, time.perf_counter() - start


def run_program(options: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Answers of the C++ program, its seconds and its largest resident set."""
    command = [str(options.runner), str(options.bundle), "--ids", "-", "--json"]
    command += ["--max-tokens", str(options.max_tokens), "--threads", str(options.threads)]
    if options.buffer_size:
        command += ["--buffer-size", str(options.buffer_size)]
    text = "\n".join(" ".join(map(str, prompt)) for prompt in prompts)
    start = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        output, _ = process.communicate(text.encode())
        seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{options.runner}: exit status {process.returncode}")
    lines = [json.loads(line) for line in output.splitlines()]
    return {
        "answers": [line["token_ids"] for line in lines],
        "forwards": sum(line["nfe"] for line in lines),
        "seconds": sum(line["seconds"] for line in lines),
        "process_seconds": seconds,
    }


def report(options: argparse.Namespace) -> dict[str, Any]:
    """One row of results."""
    load = os.getloadavg()[0]
    prompts, expected, engine_seconds = run_engine(options)
    program = run_program(options, prompts)
    equal = sum(a == b for a, b in zip(program["answers"], expected, strict=True))
    tokens = sum(map(len, program["answers"]))
    return {
        "bundle": options.bundle.name,
        "reference": Path(options.reference).name,
        "buffer_size": options.buffer_size,
        "threads": options.threads,
        "problems": len(prompts),
        "equal_answers": equal,
        "tokens_per_second": round(tokens / program["seconds"], 1),
        "tokens_per_forward": round(tokens / program["forwards"], 2),
        "engine_tokens_per_second": round(sum(map(len, expected)) / engine_seconds, 1),
        "start_and_load_ms": round(1e3 * (program["process_seconds"] - program["seconds"]), 1),
        "load_average_before": round(load, 2),
        "load_average_after": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    """Prints the row, and appends it to a file of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--reference", default="demo", help="what the engine runs")
    parser.add_argument("--runner", type=Path, default=Path("diffulex-edge-run"))
    parser.add_argument("--problems", choices=sorted(_HELDOUT), default="demo")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--buffer-size", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON list to append to")
    options = parser.parse_args()
    row = report(options)
    print(json.dumps(row))
    if options.output is not None:
        is_new = not options.output.is_file()
        rows = [] if is_new else json.loads(options.output.read_text())["rows"]
        host = {"processors": os.cpu_count(), "torch": torch.__version__}
        content = {"host": host, "rows": [*rows, row]}
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
