# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks that die at any point, or just start and end, leave nothing behind.

`python tests/python/distributed/test_wear.py 20 50` does more of it: so many deaths, and so many starts.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.errors import EngineDeadError

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fixtures.processes import PATIENCE_S, children_of, is_there, until

# Engines of four processes start again and again, and the host may do other work.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMITS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_pages": 64, "max_num_reqs": 3}
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
#: Processes that start three engines each on two GPUs.
_NUM_PROGRAMS = 17
#: A driver may keep a little more in each: what ranks exchange through would be more.
_SLACK_BYTES = _NUM_PROGRAMS * (16 << 20)
#: Seconds until a death is an error: it is seen by itself, and hosts may do other work.
BOUND_S = 15.0
PROMPTS = [list(range(20, 20 + length)) for length in (20, 7, 33)]


def held() -> tuple[int, int, list[int]]:
    """Files, threads and processes of this process."""
    files = len(os.listdir("/proc/self/fd"))
    return files, threading.active_count(), children_of(os.getpid())


def step_forever(engine: Diffulex) -> None:
    while True:
        if not engine.has_unfinished():
            for prompt in PROMPTS:
                engine.add_request(prompt, GREEDY)
        engine.step()


def die_at_random(rng: random.Random, rank: int, *, is_idle: bool = False) -> float:
    """Kills a rank of four while steps run, or between them; seconds until an error says so."""
    before = held()
    engine = Diffulex("demo", tensor_parallel_size=4, **LIMITS)
    workers = [child.pid for child in engine._executor._followers._group._pipes.children]
    victim, killed_at = workers[rank - 1], 0.0

    def kill() -> None:
        nonlocal killed_at
        time.sleep(rng.random() * 0.03)  # wherever it is by then
        killed_at = time.monotonic()
        os.kill(victim, signal.SIGKILL)

    for prompt in PROMPTS:
        engine.add_request(prompt, GREEDY)
    for _ in range(rng.randrange(8)):
        engine.step()
    killer = threading.Thread(target=kill)
    killer.start()
    if is_idle:
        killer.join()
        until(lambda: not any(map(is_there, workers)))
    with pytest.raises(EngineDeadError) as dead:
        step_forever(engine)
    seconds = time.monotonic() - killed_at
    killer.join()
    text = f"rank {rank} (pid {victim}, cpu) was killed by SIGKILL, possibly out of memory"
    assert str(dead.value) == text
    engine.close()
    engine.close()
    until(lambda: not any(map(is_there, workers)))
    del engine, dead
    check_left(before)
    return seconds


def check_left(before: tuple[int, int, list[int]]) -> None:
    """Threads that wait for an end that has come may take a moment."""

    def is_left() -> bool:
        gc.collect()  # an error and the frames that it has gone through refer to each other
        return all(now <= then for now, then in zip(held()[:2], before[:2], strict=True))

    until(is_left)
    assert set(held()[2]) <= set(before[2])  # one of an earlier test may end meanwhile


@pytest.fixture(scope="module")
def _warm() -> None:
    """What the first engine of a process keeps for good."""
    start_and_stop()


def start_and_stop(device: str = "cpu") -> None:
    settings = LIMITS | {"device": device}
    if device == "cuda":
        settings |= {"max_num_reqs": 1}  # few graphs
    with Diffulex("demo", tensor_parallel_size=2, **settings) as engine:
        engine.generate(PROMPTS[:1], GREEDY, summary=False)


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_rank_of_four_dies_at_any_point(rank: int) -> None:
    assert die_at_random(random.Random(rank), rank, is_idle=rank == 2) < BOUND_S


@pytest.mark.usefixtures("_warm")
def test_starts_and_stops_leave_nothing() -> None:
    before = held()
    for _ in range(3):
        start_and_stop()
        check_left(before)


def free_bytes() -> list[int]:
    """Of both GPUs."""
    return [torch.cuda.mem_get_info(device)[0] for device in range(2)]


@pytest.mark.alone
@pytest.mark.multi_gpu
def test_fifty_starts_on_two_gpus_leave_no_memory() -> None:
    """In several processes at once; all of them wait without an engine while memory is looked at."""
    shared = set(os.listdir("/dev/shm"))
    command = [sys.executable, __file__, "gpus", "2"]
    programs = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(_NUM_PROGRAMS)
    ]
    try:
        free = []
        for said in ("warm\n", "done\n"):
            for program in programs:
                assert program.stdout is not None
                assert program.stdout.readline() == said
            free.append(free_bytes())
            for program in programs:
                assert program.stdin is not None
                program.stdin.write("\n")
                program.stdin.flush()
        assert [program.wait(PATIENCE_S) for program in programs] == [0] * len(programs)
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    print(f"free after the first starts, and after all: {free}")
    assert all(now >= then - _SLACK_BYTES for then, now in zip(*free, strict=True)), free
    assert set(os.listdir("/dev/shm")) <= shared


def start_on_gpus(count: int) -> None:
    """What each of these processes does."""
    start_and_stop("cuda")
    before, allocated = held(), torch.cuda.memory_allocated()
    print("warm", flush=True)
    sys.stdin.readline()
    for _ in range(count):
        start_and_stop("cuda")
    check_left(before)
    assert torch.cuda.memory_allocated() <= allocated
    print("done", flush=True)
    sys.stdin.readline()


def main() -> None:
    if sys.argv[1] == "gpus":
        start_on_gpus(int(sys.argv[2]))
        return
    num_deaths, num_starts = map(int, sys.argv[1:3])
    start_and_stop()
    before, begin = held(), time.monotonic()
    seconds = [
        die_at_random(random.Random(index), 1 + index % 3, is_idle=index % 4 == 3)
        for index in range(num_deaths)
    ]
    print(
        f"{num_deaths} deaths: errors after {min(seconds):.3f} to {max(seconds):.3f} s", flush=True
    )
    for _ in range(num_starts):
        start_and_stop()
    check_left(before)
    print(f"{num_starts} starts: {held()[:2]} files and threads, as before", flush=True)
    print(f"{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
