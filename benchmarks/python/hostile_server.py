# SPDX-License-Identifier: Apache-2.0
"""What one client with large requests does to the others: a chat and /health are asked meanwhile.

    python benchmarks/python/hostile_server.py --output hostile.json

Starts a server with the bundled model that takes bodies of up to 32 MiB. For every case it prints the
answer, the slowest chat and the slowest /health while it ran, each less what the idle server takes,
and the most memory the HTTP process had. The exit code is 1 if a bound of `BOUNDS` or `TIGHTER` was passed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import json
import platform
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from server_process import ServerProcess, resident_mib, running_server

#: Seconds that a chat and /health may take longer than idle, and MiB of the HTTP process.
BOUNDS = {"chat_s": 0.5, "health_s": 0.5, "resident_mib": 400.0}
_FOUR_PROMPTS = "4 prompts of 5 MB"
#: Of single cases.
TIGHTER = {_FOUR_PROMPTS: {"chat_s": 0.3}}
_MAX_BODY = 32 << 20
_SENTENCE = "The quick brown fox 12345 jumps. "
_CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 1})
_LEAVE_S = 0.3
_HEADER_BYTES = 100 << 20


def post(server: ServerProcess, path: str, body: bytes) -> int:
    """The status of a request."""
    url = urlsplit(server.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=300)
    try:
        method = "GET" if not body else "POST"
        connection.request(method, path, body or None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def post_several(path: str, body: bytes, count: int) -> Callable[[ServerProcess], str]:
    """Sends a body so many times at once."""

    def run(server: ServerProcess) -> str:
        with ThreadPoolExecutor(count) as pool:
            statuses = pool.map(lambda _: post(server, path, body), range(count))
            counts = Counter(statuses)
            return ", ".join(f"{number} x {status}" for status, number in counts.items())

    return run


def post_and_leave(path: str, body: bytes) -> Callable[[ServerProcess], str]:
    """Sends a body and closes the connection soon, whether or not an answer is there by then."""

    def run(server: ServerProcess) -> str:
        url = urlsplit(server.url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=300)
        with contextlib.closing(connection):
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            time.sleep(_LEAVE_S)
        return "left"

    return run


def send_headers(server: ServerProcess) -> str:
    """Sends headers without end; tells after how much the server had enough."""
    url = urlsplit(server.url)
    num_sent, line = 0, b"A: " + b"x" * 8000 + b"\r\n"
    with socket.create_connection((url.hostname, url.port), 60) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            while num_sent < _HEADER_BYTES:
                client.sendall(line)
                num_sent += len(line)
    return f"closed after {num_sent / (1 << 20):.1f} MiB"


def cases() -> Iterator[tuple[str, Callable[[ServerProcess], str]]]:
    """Name and deed of each case."""

    def text(size: int) -> bytes:
        prompt = _SENTENCE * (size // len(_SENTENCE))
        return json.dumps({"prompt": prompt, "max_tokens": 8}).encode()

    def listed(name: str, item: str, size: int, **more: Any) -> bytes:
        items = ",".join([item] * (size // (len(item) + 1)))
        rest = "".join(f",{json.dumps(key)}:{json.dumps(value)}" for key, value in more.items())
        return f'{{"{name}":[{items}]{rest}}}'.encode()

    completions, size = "/v1/completions", 30_000_000
    message = '{"role":"user","content":""}'
    long = text(5_000_000)
    # Short enough to be encoded, and too long.
    dense = json.dumps({"prompt": "a1 " * 2000, "max_tokens": 8}).encode()
    yield _FOUR_PROMPTS, post_several(completions, long, 4)
    yield (
        "4 x 5 MB, client leaves",
        lambda server: " ".join(post_and_leave(completions, long)(server) for _ in range(4)),
    )
    yield "prompt of 31 MB", post_several(completions, text(31_000_000), 1)
    yield "64 prompts of 2,000 numbers", post_several(completions, dense, 64)
    yield (
        "conversation of 30 MB",
        post_several(
            "/v1/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode(),
            1,
        ),
    )
    yield "7.5 M prompts of one id", post_several(completions, listed("prompt", "[5]", size), 1)
    yield "15 M token ids", post_several(completions, listed("prompt", "5", size), 1)
    yield "7.5 M stop texts", post_several(completions, listed("stop", '"a"', size, prompt="x"), 1)
    yield "1 M messages", post_several("/v1/chat/completions", listed("messages", message, size), 1)
    yield "/tokenize of 5 MB", post_several("/tokenize", text(5_000_000), 1)
    yield "/detokenize of 4 M ids", post_several("/detokenize", listed("tokens", "5", 8_000_000), 1)
    yield "headers without end", send_headers


def watch(url: str, pid: int) -> dict[str, Any]:
    """Asks a server until standard input is closed: the slowest answers, and the most memory."""
    server = ServerProcess(url, pid)
    found: dict[str, Any] = {"chat_s": 0.0, "health_s": 0.0, "resident_mib": 0.0, "asked": 0}
    is_over = threading.Event()

    def ask(name: str, path: str, body: str) -> None:
        while not is_over.wait(0.02):
            start = time.perf_counter()
            status = post(server, path, body.encode())
            seconds = time.perf_counter() - start
            if status != 200:
                raise RuntimeError(f"{path}: expected 200, got {status}")
            found[name] = round(max(found[name], seconds), 3)
            found["asked"] += 1
            found["resident_mib"] = round(max(found["resident_mib"], resident_mib(pid)), 1)

    with ThreadPoolExecutor(2) as pool:
        chats = pool.submit(ask, "chat_s", "/v1/chat/completions", _CHAT)
        healths = pool.submit(ask, "health_s", "/health", "")
        sys.stdin.read()
        is_over.set()
        chats.result()
        healths.result()
    return found


def measure(server: ServerProcess, deed: Callable[[ServerProcess], str]) -> dict[str, Any]:
    """What a deed did, and to whom; they ask from a process of their own."""
    command = [sys.executable, str(Path(__file__)), "--watch", server.url, str(server.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        time.sleep(1.0)
        start = time.perf_counter()
        answer = deed(server)
        seconds = time.perf_counter() - start
        time.sleep(1.0)
        output, _ = other.communicate()
    if other.returncode != 0:
        raise RuntimeError(f"watch: expected exit code 0, got {other.returncode}")
    return {"answer": answer, "seconds": round(seconds, 2), **json.loads(output)}


def run(server: ServerProcess) -> dict[str, Any]:
    """All cases and the idle server."""
    measure(server, lambda _: "")  # warm
    idle = measure(server, lambda _: time.sleep(3) or "")  # type: ignore[func-returns-value]
    print(f"idle: {idle}", flush=True)
    rows: dict[str, Any] = {}
    for name, deed in cases():
        row = measure(server, deed)
        for key in ("chat_s", "health_s"):
            row[f"more_{key}"] = round(max(0.0, row[key] - idle[key]), 3)
        bounds = BOUNDS | TIGHTER.get(name, {})
        row["is_within"] = row["resident_mib"] <= bounds["resident_mib"] and all(
            row[f"more_{key}"] <= bounds[key] for key in ("chat_s", "health_s")
        )
        rows[name] = row
        print(
            f"| {name} | {row['answer']} | {row['seconds']:.2f} | {row['more_chat_s']:.3f} |"
            f" {row['more_health_s']:.3f} | {row['resident_mib']:.0f} |"
            f" {'yes' if row['is_within'] else 'no'} |",
            flush=True,
        )
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": platform.machine(),
        "bounds": BOUNDS,
        "idle": idle,
        "cases": rows,
        "is_within": all(row["is_within"] for row in rows.values()),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--server-flags", default="--model demo --device cpu", help="further flags")
    parser.add_argument("--watch", nargs=2, metavar=("URL", "PID"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.watch is not None:
        print(json.dumps(watch(options.watch[0], int(options.watch[1]))))
        return 0
    flags = options.server_flags.split()
    with running_server(*flags, "--max-body-bytes", str(_MAX_BODY)) as server:
        result = run(server)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["is_within"] else 1


if __name__ == "__main__":
    sys.exit(main())
