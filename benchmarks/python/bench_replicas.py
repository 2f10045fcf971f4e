# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of several replicas, one device each, offline and behind the router.

    python benchmarks/python/bench_replicas.py --shape sdar-8b --device cuda --replicas 1,2

Offline is `Diffulex(..., data_parallel_size=N).generate` over `--prompts` prompts at once; a server gets
`--concurrency` requests in flight over HTTP, of `--repeat` runs the best one. Every engine is in processes
of its own and warms up first. `speedup` is over the first of `--replicas`. Flags, prompts and
checkpoints are those of `bench_serving_overhead.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_serving_overhead as serving

from diffulex.bench.serve.report import ReportSettings, summarize

COLUMNS = (
    "replicas", "offline_tok_s", "offline_speedup", "server_tok_s", "server_speedup",
    "ttft_ms", "p99_ttft_ms", "failed",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0], add_help=False)
    parser.add_argument("--replicas", type=serving.integers, default=[1, 2], help="[1,2]")
    parser.add_argument("--prompts", type=int, default=2000, help="offline, at once [2000]")
    own, others = parser.parse_known_args()
    if "-h" in others or "--help" in others:
        parser.print_help()
    if not any(word.startswith("--concurrency") for word in others):
        others += ["--concurrency", "64"]
    options = serving.parse(others)
    if len(options.concurrency) != 1:
        parser.error(f"--concurrency: expected one number, got {options.concurrency}")
    if options.engine_part is not None:
        print(json.dumps(_generate(options, own.prompts)))
        return 0
    rows: list[dict[str, Any]] = []
    for count in own.replicas:
        rows.append(_row(options, count, [*others, "--prompts", str(own.prompts)]))
        for kind in ("offline", "server"):
            gain = rows[-1][f"{kind}_tok_s"] / rows[0][f"{kind}_tok_s"]
            rows[-1][f"{kind}_speedup"] = round(gain, 3)
        serving.say(str(rows[-1]))
        _report(options, rows)
    return int(any(row["failed"] for row in rows))


def _row(options: argparse.Namespace, count: int, words: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.shape is not None:
            serving.write_checkpoint(options.shape, directory)
        settings = serving.settings_of(options, directory) | {"data_parallel_size": count}
        part = directory / "settings.json"
        part.write_text(json.dumps(settings), encoding="utf-8")
        command = [sys.executable, __file__, *words, "--engine-part", str(part)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        offline = json.loads(ended.stdout.splitlines()[-1])
        with serving.started_server(settings) as server:
            (concurrency,) = options.concurrency
            runs = asyncio.run(serving.measure(server, options, concurrency))
    best = min(runs, key=lambda run: run.duration_s)
    figures = summarize(best, ReportSettings(max_concurrency=concurrency))
    return {
        "replicas": count,
        **offline,
        "server_tok_s": round(figures["output_throughput"] or 0.0, 1),
        "server_tokens": figures["total_output_tokens"],
        "server_runs_s": [round(run.duration_s, 4) for run in runs],
        "ttft_ms": round(figures["median_ttft_ms"] or 0.0, 1),
        "p99_ttft_ms": round(figures["p99_ttft_ms"] or 0.0, 1),
        "failed": sum(not record.is_ok for run in runs for record in run.records),
    }


def _generate(options: argparse.Namespace, count: int) -> dict[str, Any]:
    """The engine's own process: all prompts in one call."""
    from diffulex import Diffulex, SamplingParams  # noqa: PLC0415 (imports torch)

    params = SamplingParams(
        temperature=0.0, max_tokens=options.output_len, ignore_eos=options.shape is not None
    )
    settings = json.loads(options.engine_part.read_text(encoding="utf-8"))
    prompts = serving.make_prompts(options, count)
    with Diffulex(**settings) as engine:
        engine.generate(prompts[: 2 * max(options.concurrency)], params, use_tqdm=False)
        engine.flush_prefix_cache()
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    tokens = sum(len(output.token_ids) for output in outputs)
    return {
        "offline_prompts": count,
        "offline_tokens": tokens,
        "offline_s": round(seconds, 4),
        "offline_tok_s": round(tokens / seconds, 1),
    }


def _report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    from step_timing import machine_facts, markdown_table  # noqa: PLC0415 (imports torch)

    content = {
        "command": " ".join(["python", *sys.argv]),
        "model": options.shape or options.model,
        "output_len": options.output_len,
        "concurrency": options.concurrency[0],
        **machine_facts(options.device),
        "rows": rows,
    }
    if options.output is not None:
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(markdown_table(COLUMNS, rows), flush=True)


if __name__ == "__main__":
    sys.exit(main())
