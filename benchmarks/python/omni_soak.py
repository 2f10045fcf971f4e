# SPDX-License-Identifier: Apache-2.0
"""Many requests to a server of images, some of which leave or are wrong; then it must be as before.

    python benchmarks/python/omni_soak.py --requests 500

starts `diffulex omni serve` and compares memory, descriptors, threads and waiting requests of its process
at idle, before and after. The seed decides what is sent. Exit code 1: something was not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import httpx

_PATH = "/v1/images/generations"
_IN_FLIGHT = 4
#: The allocator of the host and caches of PyTorch reach their size in the first requests.
_WARM_UP = 20
_MOST_GROWTH_MIB = 48
_STOP_S = 60
_WRONG: tuple[dict[str, Any], ...] = (
    {"prompt": ""},
    {"prompt": "a", "size": "65x64"},
    {"prompt": "a", "size": "wide"},
    {"prompt": "a", "n": 99},
    {"prompt": "a", "seed": -1},
    {"prompt": "a", "num_inference_steps": 0},
    {"prompt": "a", "colour": "red"},
    {"prompt": "word " * 2000},
)


def facts(pid: int) -> dict[str, int]:
    """Resident MiB, open descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    (resident,) = re.findall(r"VmRSS:\s+(\d+)", status)
    (threads,) = re.findall(r"Threads:\s+(\d+)", status)
    return {
        "resident_mib": int(resident) // 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(threads),
    }


async def send(client: httpx.AsyncClient, rng: random.Random, steps: int) -> str:
    """One request; returns what became of it."""
    body = {
        "prompt": rng.choice(("a red circle", "a blue square above a pink cross")),
        "seed": rng.randrange(1 << 40),
        "num_inference_steps": steps,
    }
    kind = rng.choices(("whole", "stream", "leaves", "wrong"), (5, 3, 3, 1))[0]
    if kind == "wrong":
        answer = await client.post(_PATH, json=rng.choice(_WRONG))
        return "refused" if answer.status_code == 400 else f"wrong: {answer.status_code}"
    if kind == "leaves":
        try:
            many = {**body, "num_inference_steps": 200, "stream": True}
            await asyncio.wait_for(client.post(_PATH, json=many), rng.uniform(0.05, 1.0))
        except (asyncio.TimeoutError, httpx.HTTPError):
            return "left"
        return "done before it could leave"
    if kind == "stream":
        extra = {"stream": True, "diffulex": {"preview_every": 1}}
        answer = await client.post(_PATH, json={**body, **extra})
        is_whole = answer.text.endswith("data: [DONE]\n\n") and "completed" in answer.text
        return "streamed" if is_whole else f"stream: {answer.status_code}"
    answer = await client.post(_PATH, json=body)
    return "drawn" if answer.status_code == 200 else f"whole: {answer.status_code}"


async def soak(url: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """Sends all requests and returns the report."""
    rng = random.Random(options.seed)
    counts: Counter[str] = Counter()
    timeout = httpx.Timeout(600)
    # A connection that is kept is a descriptor of the server.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as client:

        async def idle() -> dict[str, int]:
            while (await client.get("/health")).json()["waiting"]:
                await asyncio.sleep(0.5)
            # What the last clients have left behind ends with the next step.
            await client.post(_PATH, json={"prompt": "a", "num_inference_steps": 2})
            await asyncio.sleep(2)
            return facts(pid)

        async def run(count: int) -> None:
            gate = asyncio.Semaphore(_IN_FLIGHT)

            async def one() -> None:
                async with gate:
                    counts[await send(client, rng, options.steps)] += 1

            await asyncio.gather(*(one() for _ in range(count)))

        await run(_WARM_UP)
        before = await idle()
        start = time.perf_counter()
        await run(options.requests)
        seconds = time.perf_counter() - start
        after = await idle()
    return {
        "requests": _WARM_UP + options.requests,
        "seconds": round(seconds, 1),
        "outcomes": dict(counts),
        "before": before,
        "after": after,
    }


def is_as_before(report: dict[str, Any]) -> bool:
    """Whether every request ended as it must, and the process is what it was."""
    expected = {"drawn", "streamed", "left", "refused"}
    before, after = report["before"], report["after"]
    return (
        set(report["outcomes"]) <= expected
        and after["resident_mib"] <= before["resident_mib"] + _MOST_GROWTH_MIB
        and after["descriptors"] <= before["descriptors"]
        and after["threads"] <= before["threads"] + 1
    )


def stop(server: subprocess.Popen[str]) -> int:
    """Ends the server, by force if it does not end by itself; returns its exit code."""
    server.send_signal(signal.SIGTERM)
    try:
        return server.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--steps", type=int, default=2, help="denoising steps of a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="[the bundled one]")
    options = parser.parse_args()
    command = [sys.executable, "-m", "diffulex", "omni", "serve", "--port", "0", "--device", "cpu"]
    if options.model:
        command += ["--model", options.model]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        line = server.stderr.readline()
        found = re.search(r"http://[\d.]+:\d+", line)
        if found is None:
            print(line + server.stderr.read(), file=sys.stderr)
            return 1
        # A pipe that nobody reads fills up, and then the server waits.
        threading.Thread(target=deque, args=(server.stderr, 0), daemon=True).start()
        report = asyncio.run(soak(found[0], server.pid, options))
    finally:
        code = stop(server)
    report["exit_code"] = code
    is_good = is_as_before(report) and code == 0
    print(json.dumps({**report, "is_as_before": is_good}, indent=2))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
