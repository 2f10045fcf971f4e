# SPDX-License-Identifier: Apache-2.0
"""A server whose model two processes share: it answers, and comes back when one of them is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
#: Generous: the host may be loaded.
PATIENCE_S = 240.0
FLAGS = ("--max-model-len", "128", "--port", "0", "--restart-backend")
BODY = {"prompt": "1 + 1 =", "max_tokens": 8, "temperature": 0}
#: Model, flag of the guide's command, what its processes are called, tensor-parallel size.
CASES = [
    ("demo", "--tensor-parallel-size 2", "rank", 2),
    ("examples/zoo/edit_llada2", "--expert-parallel-size 2", "replica", 1),
]


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return value


def parents() -> dict[int, int]:
    """The parent of every process that runs."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # ended meanwhile
        if state not in ("Z", "X"):
            found[int(stat.parent.name)] = int(parent)
    return found


def family_of(pid: int) -> set[int]:
    """A process and all that it has started, directly or not."""
    of, found = parents(), {pid}
    while more := {child for child, parent in of.items() if parent in found} - found:
        found |= more
    return found


def worker_of(pid: int) -> int | None:
    """One of the processes that the backend has started; None while there is none."""
    for child in family_of(pid):
        try:
            line = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"importlib.import_module(module)" in line:
            return child
    return None


@pytest.fixture(params=CASES, ids=[case[2] for case in CASES])
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def server(tmp_path: Path, case: Any) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    log = tmp_path / "server.log"
    model, flag, *_ = case
    guide = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    (words,) = re.findall(rf"[`\n]diffulex (serve {model} [^`\n]*{flag})[`\n]", guide)
    command = [sys.executable, "-m", "diffulex", *words.split(), *FLAGS]
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output) as process,
    ):
        yield process, log
        if process.poll() is None:
            process.kill()


def url_of(process: subprocess.Popen[bytes], log: Path) -> str:
    def url() -> str | None:
        assert process.poll() is None, log.read_text()
        found = re.search(r"READY url=(\S+)", log.read_text())
        return found and found[1]

    return str(until(url))


def test_server_of_two(server: tuple[subprocess.Popen[bytes], Path], case: Any) -> None:
    process, log = server
    model, _, kind, tensor_size = case
    body = {"model": Path(model).name, **BODY}
    base = url_of(process, log)
    card = httpx.get(f"{base}/v1/models").json()["data"][0]
    assert (card["world_size"], card["tensor_parallel_size"]) == (2, tensor_size)
    first = httpx.post(f"{base}/v1/completions", json=body, timeout=PATIENCE_S)
    assert first.status_code == 200, first.text
    worker = until(lambda: worker_of(process.pid))
    everyone = family_of(process.pid)
    os.kill(worker, signal.SIGKILL)

    def again() -> bool:
        assert process.poll() is None, log.read_text()
        new = worker_of(process.pid)
        if new in (None, worker):
            return False
        answer = httpx.post(f"{base}/v1/completions", json=body, timeout=PATIENCE_S)
        return answer.status_code == 200 and answer.json()["choices"] == first.json()["choices"]

    until(again)
    assert re.search(rf"{kind} \d \(pid {worker}, cpu\) was killed by SIGKILL", log.read_text())
    everyone |= family_of(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    until(lambda: not everyone & parents().keys())


@pytest.mark.parametrize("case", CASES[:1], indirect=True, ids=["rank"])
def test_workers_end_with_the_backend_and_with_the_server(
    server: tuple[subprocess.Popen[bytes], Path], case: Any
) -> None:
    """Both are killed, one after the other."""
    process, log = server
    url_of(process, log)
    worker = until(lambda: worker_of(process.pid))
    backend = parents()[worker]
    assert backend != process.pid
    os.kill(backend, signal.SIGKILL)
    until(lambda: not {backend, worker} & parents().keys())
    until(lambda: worker_of(process.pid))
    everyone = family_of(process.pid)
    process.kill()
    process.wait()
    until(lambda: not everyone & parents().keys())
