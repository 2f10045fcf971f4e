# SPDX-License-Identifier: Apache-2.0
"""What HTTP and the backend process cost: server throughput against the engine's own.

    python benchmarks/python/bench_serving_overhead.py                                   # bundled model, CPU
    python benchmarks/python/bench_serving_overhead.py --shape sdar-8b --device cuda     # random weights

The same prompts are decoded twice, each time with `--concurrency` requests in flight: by an engine in a
process of its own, which adds a request when one ends, and through a server over HTTP, every answer
streamed. Both have the same settings and warm up first; of `--repeat` runs the best one counts.

The overhead is how much longer the server takes for the same tokens. It has in it the time in which the
next request is on its way and its place in the batch stays empty; `--queued 16` keeps as many requests
waiting on both sides, so that no place does. The overhead must be at most `--limit` percent, no request
may fail, and a stream must not hold back its first block until the second is decided; otherwise the
exit code is 1.

`--shape` writes the configuration of a published model and a tokenizer of its size, and takes random
weights; prompts are then random ids. `target_tok_s` are those of `step_targets.py`. CPU figures need a host with nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from server_process import ServerProcess, running_server

from diffulex.bench.serve.dataset import BenchRequest
from diffulex.bench.serve.http_stream import Endpoint, HttpClient
from diffulex.bench.serve.load import LoadPlan, LoadRun, RequestSettings, Sender, run_load, warm_up
from diffulex.bench.serve.report import ReportSettings, summarize

COLUMNS = (
    "concurrency", "requests", "tokens", "engine_tok_s", "server_tok_s", "overhead_percent",
    "ttft_ms", "block_latency_ms", "failed", "target_tok_s", "verdict",
)  # fmt: skip

_NUM_ALONE = 12


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="demo", help="checkpoint [demo]")
    parser.add_argument("--shape", help="random weights in a published shape instead")
    parser.add_argument("--device", default="cpu", help="[cpu]")
    parser.add_argument("--concurrency", type=integers, help="[16,64; with --shape 1,16,64]")
    parser.add_argument(
        "--queued",
        type=int,
        default=0,
        help="requests that wait besides; one --concurrency only [0]",
    )
    parser.add_argument("--waves", type=int, help="requests per place in flight [12, --shape: 4]")
    parser.add_argument("--min-requests", type=int, default=8, help="[8]")
    parser.add_argument("--input-len", type=int, default=256, help="prompt ids of --shape [256]")
    parser.add_argument("--output-len", type=int, default=96, help="max_tokens [96]")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the best counts [3]")
    parser.add_argument("--limit", type=float, default=10.0, help="largest overhead, percent [10]")
    parser.add_argument("--engine-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--engine-part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.concurrency is None:
        options.concurrency = [16, 64] if options.shape is None else [1, 16, 64]
    if options.waves is None:
        # Long enough that filling and emptying the batch does not count; steps of a published shape
        # are long enough themselves.
        options.waves = 12 if options.shape is None else 4
    if options.queued and len(options.concurrency) != 1:
        parser.error(f"--queued: expected one --concurrency with it, got {options.concurrency}")
    return options


# What both parts run.


def write_checkpoint(shape_name: str, directory: Path) -> None:
    """Configuration and tokenizer of a published shape, without weights."""
    from published_shapes import SHAPES  # noqa: PLC0415 (imports torch)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    shape = SHAPES[shape_name]
    config = {"torch_dtype": "bfloat16", "eos_token_id": 0, **shape.config}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    size = shape.config["vocab_size"]
    # Words of four letters on average, as byte-level vocabularies have them.
    vocab = {f"Ġ{index:x}": index for index in range(size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def settings_of(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Settings of the engine, in both parts."""
    settings: dict[str, Any] = {"device": options.device, "max_num_reqs": max(options.concurrency)}
    if options.shape is None:
        settings["model"] = options.model
    else:
        from published_shapes import SHAPES  # noqa: PLC0415 (imports torch)

        settings |= {"model": str(directory), "load_format": "dummy", "max_model_len": 1024}
        settings["model_name"] = SHAPES[options.shape].model_name
    settings |= dict(pair.split("=", 1) for pair in options.engine_arg)
    return {key: _number(value) for key, value in settings.items()}


def _number(value: Any) -> Any:
    try:
        return json.loads(value)
    except (ValueError, TypeError):
        return value


def make_prompts(options: argparse.Namespace, count: int) -> list[Any]:
    """Questions for a real model, random ids for a random one."""
    if options.shape is None:
        from diffulex.bench.evaluate import read_problems  # noqa: PLC0415

        questions = [problem.question for problem in read_problems(None)]
        return [questions[index % len(questions)] for index in range(count)]
    from published_shapes import SHAPES  # noqa: PLC0415
    from random_engine import random_prompts  # noqa: PLC0415

    return random_prompts(SHAPES[options.shape].facts().spec, count, options.input_len)


def num_requests(options: argparse.Namespace, concurrency: int) -> int:
    return max(options.min_requests, options.waves * concurrency)


def num_warm(concurrency: int) -> int:
    """Requests before the clock runs."""
    return 2 * concurrency


def say(text: str) -> None:
    """Progress: what a run that is cut off leaves."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# The engine alone.


def run_engine(options: argparse.Namespace, settings: dict[str, Any]) -> list[Any]:
    """Tokens and best seconds per concurrency."""
    from step_timing import clock_facts  # noqa: PLC0415 (imports torch)

    from diffulex import Diffulex, SamplingParams  # noqa: PLC0415

    params = SamplingParams(
        temperature=0.0, max_tokens=options.output_len, ignore_eos=options.shape is not None
    )
    results = []
    with Diffulex(**settings) as engine:
        for concurrency in options.concurrency:
            prompts = make_prompts(options, num_requests(options, concurrency))
            in_flight = concurrency + options.queued
            closed_loop(engine, prompts[: num_warm(concurrency)], params, in_flight)
            runs = [closed_loop(engine, prompts, params, in_flight) for _ in range(options.repeat)]
            seconds = [run[1] for run in runs]
            rounded = [round(value, 4) for value in seconds]
            results.append(
                {
                    "tokens": runs[0][0],
                    "seconds": min(seconds),
                    "runs_s": rounded,
                    **clock_facts(options.device),
                }
            )
            say(f"engine alone, concurrency {concurrency}: {rounded} s")
    return results


def closed_loop(engine: Any, prompts: Sequence[Any], params: Any, in_flight: int) -> Any:
    """Decodes all prompts, so many at once; returns tokens and seconds."""
    engine.flush_prefix_cache()
    start = time.perf_counter()
    waiting = iter(prompts)
    num_tokens, num_done, num_running = 0, 0, 0
    while num_done < len(prompts):
        while num_running < in_flight and (prompt := next(waiting, None)) is not None:
            # Text goes through the chat template, as the server does it.
            if isinstance(prompt, str):
                prompt = engine.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            engine.add_request(prompt, params)
            num_running += 1
        for step in engine.step():
            if step.output is not None:
                num_tokens += len(step.output.token_ids)
                num_done += 1
                num_running -= 1
    return num_tokens, time.perf_counter() - start


# The server.


def make_requests(options: argparse.Namespace, count: int) -> list[BenchRequest]:
    requests = []
    for prompt in make_prompts(options, count):
        if isinstance(prompt, str):
            message = {"role": "user", "content": prompt}
            requests.append(BenchRequest(None, [message], options.output_len))
        else:
            requests.append(BenchRequest(prompt, None, options.output_len))
    return requests


def request_settings(options: argparse.Namespace) -> RequestSettings:
    is_random = options.shape is not None
    return RequestSettings(api="completions" if is_random else "chat", ignore_eos=is_random)


async def measure(
    server: ServerProcess, options: argparse.Namespace, concurrency: int
) -> list[LoadRun]:
    """Runs of one concurrency."""
    client = HttpClient(Endpoint.parse(server.url))
    sender = Sender(client, request_settings(options))
    requests = make_requests(options, num_requests(options, concurrency))
    await warm_up(sender, requests[: num_warm(concurrency)], concurrency)
    runs = []
    for _ in range(options.repeat):
        async with client.request("POST", "/flush_cache", b"{}") as response:
            await response.read()
        plan = LoadPlan(max_concurrency=concurrency + options.queued)
        runs.append(await run_load(sender, requests, plan))
    await client.close()
    return runs


@contextlib.contextmanager
def started_server(settings: dict[str, Any]) -> Iterator[ServerProcess]:
    flags = [
        part
        for key, value in settings.items()
        for part in (f"--{key.replace('_', '-')}", str(value))
    ]
    # Requests of a benchmark are not worth a log line each.
    quiet = ["--no-access-log", "--log-requests", "none"]
    with running_server(*flags, *quiet, start_s=300) as server:
        yield server


async def run_alone(server: ServerProcess, options: argparse.Namespace) -> LoadRun:
    """A few requests, one at a time."""
    client = HttpClient(Endpoint.parse(server.url))
    requests = make_requests(options, _NUM_ALONE)
    run = await run_load(
        Sender(client, request_settings(options)), requests, LoadPlan(max_concurrency=1)
    )
    await client.close()
    return run


def first_gaps(run: LoadRun) -> list[float]:
    """Milliseconds from the first block of an answer to its second."""
    return [1000 * record.gaps_s[0] for record in run.records if record.gaps_s]


def compare(
    options: argparse.Namespace, concurrency: int, engine: Any, runs: Sequence[LoadRun]
) -> dict[str, Any]:
    """One row of the result."""
    best = min(runs, key=lambda run: run.duration_s)
    figures = summarize(best, ReportSettings(max_concurrency=concurrency))
    engine_speed = engine["tokens"] / engine["seconds"]
    server_speed = figures["output_throughput"] or math.nan
    return {
        "concurrency": concurrency,
        "requests": len(best.records),
        "tokens": figures["total_output_tokens"],
        "engine_tokens": engine["tokens"],
        "engine_tok_s": round(engine_speed, 1),
        "server_tok_s": round(server_speed, 1),
        "overhead_percent": round(100 * (engine_speed / server_speed - 1), 2),
        "ttft_ms": _rounded(figures["median_ttft_ms"]),
        "block_latency_ms": _rounded(figures["median_itl_ms"]),
        "failed": sum(not record.is_ok for run in runs for record in run.records),
        "errors": figures["errors"],
        "runs_s": [round(run.duration_s, 4) for run in runs],
        "engine_runs_s": engine["runs_s"],
        **{name: engine[name] for name in ("sm_mhz", "watts") if name in engine},
    }


def add_targets(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """What the server's speed is held against, where it was set for these requests."""
    from step_targets import SERVING_TARGETS  # noqa: PLC0415

    settings = dict(pair.split("=", 1) for pair in options.engine_arg)
    targets = SERVING_TARGETS.get((options.shape, settings.get("quantization", "none")), {})
    is_asked = (options.input_len, options.output_len) == (256, 64)
    if is_asked and row["concurrency"] in targets:
        row["target_tok_s"] = targets[row["concurrency"]]
        row["verdict"] = "pass" if row["server_tok_s"] >= row["target_tok_s"] else "miss"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def problems_of(
    options: argparse.Namespace, rows: Sequence[dict[str, Any]], gaps: Sequence[float]
) -> list[str]:
    """What misses its bound."""
    problems = []
    # A busy client reads late and sees two blocks at once, now and then.
    if not gaps or statistics.median(gaps) <= 0:
        problems.append("stream: expected the first block before the second, got both at once")
    for row in rows:
        where = f"concurrency {row['concurrency']}"
        if row["failed"]:
            problems.append(f"{where}: expected no failed request, got {row['errors']}")
        if row["tokens"] != row["engine_tokens"]:
            problems.append(
                f"{where}: expected {row['engine_tokens']} tokens as the engine, got {row['tokens']}"
            )
        if row["overhead_percent"] > options.limit:
            problems.append(
                f"{where}: expected at most {options.limit:g} % overhead,"
                f" got {row['overhead_percent']:.1f} %"
            )
    return problems


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    options = parse(arguments)
    if options.engine_part is not None:
        settings = json.loads(options.engine_part.read_text(encoding="utf-8"))
        print(json.dumps(run_engine(options, settings)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.shape is not None:
            write_checkpoint(options.shape, directory)
        settings = settings_of(options, directory)
        part = directory / "settings.json"
        part.write_text(json.dumps(settings), encoding="utf-8")
        # A process of its own: two engines at once would share the machine.
        result = subprocess.run(
            [sys.executable, __file__, *arguments, "--engine-part", str(part)],
            stdout=subprocess.PIPE,
            check=True,
        )
        engine = json.loads(result.stdout.splitlines()[-1])
        rows, alone = [], None
        with started_server(settings) as server:
            for index, concurrency in enumerate(options.concurrency):
                runs = asyncio.run(measure(server, options, concurrency))
                rows.append(compare(options, concurrency, engine[index], runs))
                add_targets(options, rows[-1])
                say(f"server, concurrency {concurrency}: {rows[-1]}")
                if concurrency + options.queued == 1:
                    alone = runs[0]
            if alone is None:
                alone = asyncio.run(run_alone(server, options))
    return report(options, arguments, rows, first_gaps(alone))


def report(
    options: argparse.Namespace,
    arguments: Sequence[str],
    rows: Sequence[dict[str, Any]],
    gaps: Sequence[float],
) -> int:
    """Prints and writes the result; the exit code."""
    from step_timing import machine_facts, markdown_table  # noqa: PLC0415 (imports torch)

    problems = problems_of(options, rows, gaps)
    content = {
        "model": options.shape or options.model,
        "arguments": list(arguments),
        "output_len": options.output_len,
        "queued": options.queued,
        **machine_facts(options.device),
        "rows": rows,
        "first_to_second_block_ms": [round(gap, 2) for gap in gaps],
        "problems": problems,
    }
    if options.output is not None:
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(content))
    print(markdown_table(COLUMNS, rows))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
