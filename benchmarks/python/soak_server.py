# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests of which many leave, abort or are wrong; then everything must be free again.

    python benchmarks/python/soak_server.py --output soak.json

Starts a server with the bundled model (or takes `--base-url` and `--pid`), writes down its idle level,
sends `--requests` random requests, `--concurrency` at a time, and compares: pages, request slots,
sampler state, the request maps of both processes, their file descriptors and threads. The exit code
is 1 if anything is not back, if no abort hit, or if an answer was wrong: greedy answers are compared with
those of the idle server, and what must be refused with its status.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import platform
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server_process import ServerProcess, num_threads, open_files, resident_mib, running_server
from soak_requests import KINDS, Soaker

from diffulex.bench.evaluate import read_problems
from diffulex.bench.serve.http_stream import Endpoint, HttpClient

#: Gauges that count what requests hold. Their names, without the prefix of the server's metrics.
GAUGES = (
    "kv_pages_free",
    "requests_running",
    "requests_waiting",
    "request_slots_used",
    "sampler_states",
    "requests_known",
    "requests_encoding",
    "requests_tracked",
    "requests_live",
    "requests_inflight_http",
)
_NUM_QUESTIONS = 12
_SETTLE_S = 15.0
#: For so long the server keeps connections that clients before us left open.
_KEEP_ALIVE_S = 5.0
_SHOWN_FAILURES = 20
_API_ABORTS = re.compile(
    r'^diffulex_request_aborted_total\{[^}]*reason="api"[^}]*\} (\S+)$', re.MULTILINE
)
_SAMPLE = re.compile(r"^diffulex_(\w+?)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=2000, help="[2000]")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once [16]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    parser.add_argument("--base-url", help="a server that runs already; needs --pid")
    parser.add_argument("--pid", type=int, help="its HTTP process")
    parser.add_argument(
        "--server-flags", default="--model demo --device cpu", help="else its flags"
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    if (options.base_url is None) != (options.pid is None):
        parser.error("--base-url and --pid: expected both or neither")
    return options


@contextlib.contextmanager
def server_of(options: argparse.Namespace) -> Iterator[ServerProcess]:
    """The given server, or one that lives as long as the block."""
    if options.base_url is not None:
        yield ServerProcess(options.base_url, options.pid)
        return
    with running_server(*options.server_flags.split()) as server:
        yield server


async def read_metrics(client: HttpClient) -> str:
    """The server's metrics."""
    async with client.request("GET", "/metrics") as response:
        return (await response.read()).decode()


async def num_api_aborts(client: HttpClient) -> int:
    """How many requests `/abort` ended, as the server counts."""
    found = _API_ABORTS.search(await read_metrics(client))
    return int(float(found[1])) if found else 0


async def read_level(client: HttpClient, server: ServerProcess) -> dict[str, Any]:
    """What is in use now; a gauge the server does not report is None."""
    values = dict(_SAMPLE.findall(await read_metrics(client)))
    level: dict[str, Any] = {
        name: float(values[name]) if name in values else None for name in GAUGES
    }
    for name, pid in (("http", server.pid), ("backend", server.backend_pid)):
        level[f"{name}_files"] = open_files(pid)
        level[f"{name}_threads"] = num_threads(pid)
    return level


async def settled_level(server: ServerProcess, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """The level once it is `wanted`, or what it is when time is up; None waits until it rests."""
    deadline = time.monotonic() + _SETTLE_S
    last: dict[str, Any] | None = None
    since = 0.0
    while True:
        # The only connection there is, so that the count of files is the same each time.
        client = HttpClient(Endpoint.parse(server.url))
        async with client.request("POST", "/flush_cache", b"{}") as response:
            await response.read()
        # Heartbeats carry the backend's gauges once a second.
        await asyncio.sleep(1.5)
        level = await read_level(client, server)
        await client.close()
        now = time.monotonic()
        if level != last:
            last, since = level, now
        is_idle = not level["requests_inflight_http"] and not level["requests_running"]
        is_at_rest = is_idle and now - since > _KEEP_ALIVE_S
        is_right = level == wanted if wanted is not None else is_at_rest
        if is_right or now > deadline:
            return level


async def prepare(server: ServerProcess) -> Soaker:
    """Asks every question once, which also warms the server up."""
    client = HttpClient(Endpoint.parse(server.url))
    async with client.request("GET", "/server_info") as response:
        info = json.loads(await response.read())
    soaker = Soaker(client, {}, info["vocab_size"], info.get("mask_token_id"))
    answers = {}
    for problem in read_problems(None)[:_NUM_QUESTIONS]:
        body = soaker.chat_body(problem.question)
        status, content = await soaker.post("/v1/chat/completions", body)
        if status != 200:
            raise RuntimeError(f"soak: expected an answer, got {status}: {content}")
        answers[problem.question] = content["choices"][0]["message"]["content"]
    soaker.answers = answers
    return soaker


async def run_requests(
    soaker: Soaker, options: argparse.Namespace
) -> tuple[Counter[str], list[str]]:
    """Sends all requests; returns how many of each kind, and what went wrong."""
    names = list(KINDS)
    weights = [weight for weight, _ in KINDS.values()]
    counts: Counter[str] = Counter()
    failures: list[str] = []
    numbers = iter(range(options.requests))

    async def work() -> None:
        for number in numbers:
            # A generator per request: what one does is independent of the others' timing.
            rng = random.Random(f"soak/{options.seed}/{number}")
            name = rng.choices(names, weights)[0]
            counts[name] += 1
            try:
                await asyncio.wait_for(KINDS[name][1](soaker, rng), 120)
            except Exception as error:
                failures.append(f"{number} {name}: {type(error).__name__}: {error}")

    await asyncio.gather(*(work() for _ in range(options.concurrency)))
    return counts, failures


async def soak(server: ServerProcess, options: argparse.Namespace) -> dict[str, Any]:
    """The whole run; the result has `is_clean`."""
    soaker = await prepare(server)
    # Once with few requests: threads and buffers that are made on first use belong to the idle level.
    short = argparse.Namespace(**{**vars(options), "requests": 4 * len(KINDS), "seed": "warm-up"})
    _, failures = await run_requests(soaker, short)
    await soaker.client.close()
    before = await settled_level(server, None)
    memory = [resident_mib(pid) for pid in (server.pid, server.backend_pid)]
    num_aborted, num_counted = soaker.num_aborted, await num_api_aborts(soaker.client)
    start = time.perf_counter()
    counts, more_failures = await run_requests(soaker, options)
    failures += more_failures
    duration = time.perf_counter() - start
    num_aborted = soaker.num_aborted - num_aborted
    num_counted = await num_api_aborts(soaker.client) - num_counted
    await soaker.client.close()
    after = await settled_level(server, before)
    missing = [name for name, value in after.items() if value is None]
    changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": platform.machine(),
        "requests": options.requests,
        "concurrency": options.concurrency,
        "seed": options.seed,
        "duration_s": round(duration, 2),
        "kinds": dict(sorted(counts.items())),
        "aborted": num_aborted,
        "aborts_counted_by_server": num_counted,
        "failures": failures,
        "idle_before": before,
        "idle_after": after,
        "changed": changed,
        "missing": missing,
        "resident_mib_before": [round(value, 1) for value in memory],
        "resident_mib_after": [
            round(resident_mib(pid), 1) for pid in (server.pid, server.backend_pid)
        ],
        "is_clean": not failures and not changed and not missing and 0 < num_aborted == num_counted,
    }


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    with server_of(options) as server:
        result = asyncio.run(soak(server, options))
    text = json.dumps(result, indent=1)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    print(text if len(result["failures"]) < _SHOWN_FAILURES else text[:20000])
    return 0 if result["is_clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
