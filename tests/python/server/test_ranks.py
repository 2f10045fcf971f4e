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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

# Up to five processes import torch one after the other, and the host may do other work.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

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


def is_worker(pid: int) -> bool:
    """Whether a backend has started it as a rank or a replica."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"importlib.import_module(module)" in command or command.startswith(b"diffulex-worker-")


def worker_of(pid: int) -> int | None:
    """One of the processes that the backend has started; None while there is none."""
    return next(filter(is_worker, family_of(pid)), None)


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


def test_replicas_of_two_ranks_answer_an_openai_client(tmp_path: Path) -> None:
    """Two times two processes: answers and streams of both, and nothing left after SIGTERM."""
    openai = pytest.importorskip("openai", reason="the extra `test` is not installed")
    log = tmp_path / "server.log"
    sizes = ("--data-parallel-size", "2", "--tensor-parallel-size", "2")
    command = [sys.executable, "-m", "diffulex", "serve", "demo", "--device", "cpu", *sizes]
    flags = ("--max-model-len", "128", "--port", "0", "--data-parallel-policy", "round_robin")
    with (
        log.open("wb") as output,
        subprocess.Popen([*command, *flags], cwd=ROOT, stdout=output, stderr=output) as process,
    ):
        try:
            _ask_as_openai_does(openai, process, log)
        finally:
            if process.poll() is None:
                process.kill()


def _ask_as_openai_does(openai: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    def url() -> str | None:
        assert process.poll() is None, log.read_text()
        found = re.search(r"READY url=(\S+) .*replicas=2 tp=2$", log.read_text(), re.MULTILINE)
        return found and found[1]

    base = until(url)
    everyone = family_of(process.pid)
    workers = [pid for pid in everyone if is_worker(pid)]
    assert len(workers) == 2
    if find_spec("setproctitle"):
        shown = {Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0") for pid in workers}
        assert shown == {b"diffulex-worker-0.1", b"diffulex-worker-1.1"}
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0)
    asked = {"model": "demo", "temperature": 0, "max_tokens": 24}
    messages = [{"role": "user", "content": "Tom has 3 apples. He buys 4 more apples. How many?"}]
    answers = []
    for _ in range(4):  # in turns: two from each replica
        chunks = client.chat.completions.create(messages=messages, stream=True, **asked)
        answers.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
        whole = client.chat.completions.create(messages=messages, **asked)
        answers.append(whole.choices[0].message.content)
        one = client.completions.create(prompt="1 + 1 =", **asked)
        assert one.choices[0].finish_reason in ("stop", "length")
    assert len(set(answers)) == 1
    assert len(answers[0]) > 1
    text = httpx.get(f"{base}/metrics").text
    for index in "01":
        sent = re.search(
            rf'^diffulex_router_requests_total{{.*replica="{index}".*}} (\S+)', text, re.M
        )
        assert sent
        assert float(sent[1]) == 6
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    until(lambda: not everyone & parents().keys())
