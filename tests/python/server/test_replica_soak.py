# SPDX-License-Identifier: Apache-2.0
"""Many requests while replicas are killed: what was promised arrives.

`python tests/python/server/test_replica_soak.py 2000 200` runs more of it with the bundled model: so many
requests, and a replica killed every so many.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fixtures.processes import until
from test_launch import Server, start  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow

CLIENTS = 6


class Soak:
    """Clients of one server, and what became of their requests."""

    def __init__(self, url: str, num_requests: int, kill_every: int, kill: Callable[[], None]):
        self.url = url
        self.num_requests = num_requests
        self.kill_every = kill_every
        self.kill = kill
        self.ends: collections.Counter[str] = collections.Counter()
        self.num_kills = 0
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._num_begun = 0

    def run(self) -> None:
        """Every third request streams; the others want the answer as a whole."""
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(self._one, range(self.num_requests)))
        self.seconds = time.monotonic() - begin

    def _one(self, number: int) -> None:
        with self._lock:
            self._num_begun += 1
            if self._num_begun % self.kill_every == 0:
                self.kill()
                self.num_kills += 1
        end = self._ask(number)
        with self._lock:
            self.ends[end] += 1

    def _ask(self, number: int) -> str:
        is_streaming = number % 3 == 0
        body = {
            "prompt": f"Tom has {number % 40} apples and buys 4.", "max_tokens": 40, "seed": number,
            "ignore_eos": True, "stream": is_streaming, "stream_mode": "block_append",
        }  # fmt: skip
        answer = httpx.post(f"{self.url}/generate", json=body, timeout=120)
        if not is_streaming:
            return "whole" if is_whole(answer) else f"failed {answer.text}"
        frames = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        if not frames or frames[-1] != "[DONE]":
            return f"cut {answer.text[-200:]}"
        last: dict[str, Any] = json.loads(frames[-2])
        # A stream may be told that its replica is gone, once part of its answer was delivered.
        if last.get("code") == "replica_lost":
            return "replica_lost" if len(frames) > 2 else "lost without a delta"
        return "streamed" if "text" in last else f"failed {last}"

    def check(self) -> None:
        """Nothing but answers, and streams that were told."""
        assert set(self.ends) <= {"whole", "streamed", "replica_lost"}, self.ends
        assert sum(self.ends.values()) == self.num_requests
        assert self.ends["whole"] == self.num_requests - len(range(0, self.num_requests, 3))
        assert self.ends["replica_lost"] <= self.num_kills * CLIENTS


def is_whole(answer: httpx.Response) -> bool:
    return answer.status_code == 200 and len(answer.json()["token_ids"]) == 40


def children_of(pid: int) -> list[int]:
    """Backends: processes with a server as their parent that are no trackers of its resources."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z" and b"spawn_main" in command:
            found.append(int(path.parent.name))
    return found


def killer(pid: int) -> Callable[[], None]:
    """Kills one of the replicas that live, as soon as it is not the last."""
    rng = random.Random(0)

    def kill() -> None:
        until(lambda: len(children_of(pid)) > 1)
        os.kill(rng.choice(children_of(pid)), signal.SIGKILL)

    return kill


def test_soak(start):  # noqa: F811
    server = start("--data-parallel-size", "3")
    soak = Soak(server.ready(), 200, 20, killer(server.process.pid))
    soak.run()
    print(f"{soak.num_kills} kills, {soak.seconds:.1f} s, {dict(soak.ends)}")
    soak.check()
    assert soak.num_kills == 10
    rows = httpx.get(f"{soak.url}/replicas").json()["replicas"]
    assert sum(row["in_flight"] for row in rows) == 0


def main() -> None:
    num_requests, kill_every = map(int, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as directory:
        flags = "--data-parallel-size", "2", "--device", "cpu", "--max-num-reqs", "8"
        server = Server(Path(directory), *flags, factory="real")
        try:
            soak = Soak(server.ready(), num_requests, kill_every, killer(server.process.pid))
            soak.run()
            print(f"{soak.num_kills} kills, {soak.seconds:.1f} s, {dict(soak.ends)}")
            soak.check()
        finally:
            server.process.send_signal(signal.SIGTERM)
            server.wait()


if __name__ == "__main__":
    main()
