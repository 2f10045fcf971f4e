# SPDX-License-Identifier: Apache-2.0
"""`Diffulex(model, data_parallel_size=n)`: results of one engine, whatever happens to a replica."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from diffulex import Diffulex, SamplingParams
from diffulex.engine.metrics import RequestMetrics, RequestRecord
from diffulex.engine.output import BlockSnapshot, DenoiseSnapshot, RequestOutput, StepOutput
from diffulex.engine.replicas.members import REPLICATED
from diffulex.engine.replicas.requests import ReplicaRequest
from diffulex.engine.routing import StepQueue
from diffulex.errors import CheckpointError, ConfigError, EngineDeadError, OutOfPagesError
from diffulex.log import is_json_line
from fixtures.processes import PATIENCE_S, children_of, is_there, until

SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_reqs": 3, "num_pages": 15}
PROMPTS = [
    f"Tom has {i} apples. He buys 4 more apples. How many apples does Tom have now?"
    for i in range(1, 25)
]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
#: Half of the requests draw, with a seed that follows from their number.
PARAMS = [
    SamplingParams(max_tokens=48, temperature=0.8 * (i % 2), ignore_eos=i % 3 == 0)
    for i in range(len(PROMPTS))
]


def facts(outputs: Any) -> list[Any]:
    """What must not depend on the number of replicas."""
    return [
        (out.req_id, out.token_ids, out.text, out.completion_reason, out.metrics.nfe)
        for out in outputs
    ]


@pytest.fixture(scope="module")
def alone() -> Iterator[Diffulex]:
    with Diffulex("demo", **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(alone: Diffulex) -> list[Any]:
    return facts(alone.generate(PROMPTS, PARAMS, summary=False))


def children(engine: Diffulex) -> list[int]:
    return [replica.child.pid for replica in engine._loop.replicas]  # type: ignore[union-attr]


def wait_gone(pids: list[int], seconds: float = PATIENCE_S) -> None:
    """Zombies of this process do not count: they hold nothing."""
    end = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, f"expected no process, got {pids}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.slow
def test_two_replicas_do_as_one_engine(alone: Diffulex, expected: list[Any]) -> None:
    """Order, ids, seeds, texts and forwards; streams, steps, operations; nothing is left behind."""
    with Diffulex("demo", data_parallel_size=2, **SETTINGS) as engine:
        pids = children(engine)
        outputs = engine.generate(PROMPTS, PARAMS, summary=False)
        assert facts(outputs) == expected
        # Both had requests, and none of them a queue that the other one could have taken.
        sent = [engine._loop._choice.num_sent(i) for i in range(2)]  # type: ignore[union-attr]
        assert min(sent) >= 8
        assert outputs.as_dict()["dp"] == 2
        info = engine.parallel_info()
        assert (info["executor"], info["data_parallel_size"]) == ("mp", 2)
        assert [row["replica"] for row in info["ranks"]] == [0, 1]
        assert alone.parallel_info()["executor"] == "local"
        assert outputs.stats.num_steps > max(out.metrics.nfe for out in outputs)
        assert engine.stats().num_finished == len(PROMPTS)
        check_streams(engine, alone)
        check_steps(engine, alone)
        check_limits(engine)
        assert engine.flush_prefix_cache() >= 0
        assert not engine.has_unfinished()
        engine.close()
        engine.close()
        with pytest.raises(RuntimeError, match="expected an open engine, got a closed one"):
            engine.generate("x")
    wait_gone(pids)


def check_streams(engine: Diffulex, alone: Diffulex) -> None:
    params = SamplingParams(max_tokens=32, temperature=0, stop=["4="])
    for mode in ("block_append", "denoise"):
        pieces = [
            [
                (e.text, e.token_ids, e.snapshot is None)
                for e in one.stream(PROMPTS[2], params, mode)
            ]
            for one in (engine, alone)
        ]
        assert pieces[0] == pieces[1]
    stream = engine.stream(PROMPTS[0], max_tokens=400, ignore_eos=True)
    next(stream)
    stream.close()  # aborts
    assert not engine.has_unfinished()


def check_steps(engine: Diffulex, alone: Diffulex) -> None:
    """The interface of requests and steps, with snapshots, counts of blocks and an abort."""
    found = []
    for one in (engine, alone):
        blocks: list[int] = []
        one.observe_blocks(blocks.append)
        first = one.add_request(PROMPTS[0], SamplingParams(max_tokens=24), has_text=True)
        gone = one.add_request(PROMPTS[1], SamplingParams(max_tokens=400, ignore_eos=True))
        one.watch_buffer(first)
        assert one.record(first).req_id == first
        assert one.abort(gone)
        assert not one.abort(10_000)
        steps: list[StepOutput] = []
        while one.has_unfinished():
            steps += one.step()
        results = {step.req_id: step.output for step in steps if step.output is not None}
        answer, aborted = results[first], results[gone]
        assert answer is not None
        assert aborted is not None
        assert aborted.completion_reason == "aborted"
        assert any(step.snapshot is not None for step in steps if step.req_id == first)
        text = "".join(step.text or "" for step in steps if step.req_id == first)
        with pytest.raises(KeyError):
            one.record(first)
        found.append((answer.text, text, bool(blocks)))
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]


def check_limits(engine: Diffulex) -> None:
    """What one engine refuses is refused before anything is sent."""
    message = r"at most 15 pages, got 16 pages .*; lower max_tokens or raise num_pages"
    with pytest.raises(OutOfPagesError, match=message):
        engine.generate([[5] * 400], max_tokens=112, ignore_eos=True)
    with pytest.raises(ValueError, match="stop_token_ids"):
        engine.add_request("x", SamplingParams(stop_token_ids=(10_000_000,)))
    for name in ("start_profile", "stop_profile", "pause", "resume", "update_weights", "score"):
        with pytest.raises(RuntimeError, match=f"^{name}: expected data_parallel_size 1, got 2$"):
            getattr(engine, name)()
    assert not engine.has_unfinished()


@pytest.mark.slow
def test_a_replica_that_is_killed_loses_nothing(
    alone: Diffulex, expected: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with Diffulex("demo", data_parallel_size=3, **SETTINGS) as engine:
        pids = children(engine)
        victims = list(pids)
        num_events = 0

        def kill_one(event: Any) -> None:
            nonlocal num_events
            num_events += 1
            if num_events in (4, 40) and len(victims) > 1:
                os.kill(victims.pop(), signal.SIGKILL)

        # A callback sees what is decoded again once.
        pieces: dict[int, str] = {}

        def see(event: Any) -> None:
            pieces[event.req_id] = pieces.get(event.req_id, "") + event.text
            kill_one(event)

        outputs = engine.generate(PROMPTS, PARAMS, summary=False, stream_callback=see)
        assert facts(outputs) == expected
        assert pieces == {out.req_id: out.text for out in outputs}
        assert len(victims) == 1
        check_death_of_the_last(engine, victims[0])
    wait_gone(pids)


@pytest.mark.slow
def test_a_replica_that_has_lost_a_rank_gets_nothing_more() -> None:
    """It has the least to do of all, and would refuse everything."""
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    with Diffulex("demo", **sizes, **SETTINGS) as engine:
        pids = children(engine)
        workers = [children_of(pid) for pid in pids]
        assert [len(of) for of in workers] == [1, 1]
        if find_spec("setproctitle"):
            shown = [Path(f"/proc/{of[0]}/cmdline").read_bytes().rstrip(b"\0") for of in workers]
            assert shown == [b"diffulex-worker-0.1", b"diffulex-worker-1.1"]
        os.kill(workers[0][0], signal.SIGKILL)
        until(engine._loop.replicas[0].child.connection.poll)  # type: ignore[attr-defined]
        outputs = engine.generate(PROMPTS[:4], GREEDY, summary=False)
        assert [out.completion_reason for out in outputs] == ["max_new_tokens_reached"] * 4
        assert [replica.is_alive for replica in engine._loop.replicas] == [False, True]  # type: ignore[attr-defined]
        os.kill(workers[1][0], signal.SIGKILL)
        with pytest.raises(
            EngineDeadError, match=rf"^replica 1 .*rank 1 \(pid {workers[1][0]}, cpu"
        ):
            engine.generate(PROMPTS[:4], GREEDY, summary=False)
    until(lambda: not any(map(is_there, [*pids, *workers[0], *workers[1]])))


def check_death_of_the_last(engine: Diffulex, pid: int) -> None:
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError) as caught:
        step_forever(engine)
    assert time.monotonic() - start < 20
    text = f"replica 0 (pid {pid}, cpu) was killed by SIGKILL, possibly out of memory"
    assert str(caught.value) == text
    assert (caught.value.rank, caught.value.pid, caught.value.device) == (0, pid, "cpu")
    for call in (engine.step, engine.stats, lambda: engine.generate("x"), lambda: engine.abort(0)):
        with pytest.raises(EngineDeadError):
            call()
    engine.close()
    engine.close()


def step_forever(engine: Diffulex) -> None:
    while True:
        engine.step()


@pytest.mark.slow
def test_replicas_log_as_their_program_does() -> None:
    program = (
        "from diffulex import Diffulex, log\n"
        "log.configure('info', json=True)\n"
        "Diffulex('demo', device='cpu', data_parallel_size=2, num_pages=64).close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    # Libraries may warn there as well.
    lines = [json.loads(line) for line in done.stderr.splitlines() if is_json_line(line)]
    starts = [line["process"] for line in lines if line["msg"].startswith("Diffulex ")]
    assert sorted(starts) == ["replica 0", "replica 1"]
    assert {line["process"] for line in lines} == {"", "replica 0", "replica 1"}


def test_settings_that_are_refused_start_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/proc"))
    with pytest.raises(ConfigError, match=r"data_parallel_size: expected int \[1, 1024\], got 0"):
        Diffulex("demo", device="cpu", data_parallel_size=0)
    with pytest.raises(CheckpointError):
        Diffulex(str(tmp_path), device="cpu", data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"device: expected cuda with data_parallel_size 2"):
        Diffulex("demo", device="cuda:0", data_parallel_size=2)
    mine = {pid for pid in set(os.listdir("/proc")) - before if is_child(pid)}
    assert not mine


def is_child(pid: str) -> bool:
    try:
        return (
            int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
        )
    except (OSError, ValueError):
        return False


def test_components_are_one_engine(alone: Diffulex) -> None:
    import dataclasses

    parallel = dataclasses.replace(alone.config.parallel, data_parallel_size=2)
    config = dataclasses.replace(alone.config, parallel=parallel)
    message = (
        r"^from_components: expected data_parallel_size 1, got 2: replicas load the checkpoint"
        r" themselves$"
    )
    with pytest.raises(ConfigError, match=message):
        Diffulex.from_components(config, None, None)


def test_every_replicated_method_exists() -> None:
    assert {name for name in REPLICATED if not callable(getattr(Diffulex, name))} == set()


def test_outputs_travel() -> None:
    """What replicas send is what an engine gives, and pickles."""
    block = BlockSnapshot(1, 4, "ACTIVE", (1, 2), (0,), (0.5, 0.0))
    snapshot = DenoiseSnapshot(3, 99, 4, (1,), (block,))
    result = RequestOutput(3, (1,), (2,), "a", "b", "stop", RequestMetrics(1))
    step = StepOutput(3, (2,), 1, True, result, snapshot, "a")
    assert pickle.loads(pickle.dumps(step)) == step


def shown_request(*, is_shown: bool = True) -> ReplicaRequest:
    queue = StepQueue()
    queue.is_shown = is_shown
    record = RequestRecord(0, (1,), 8, 0.0)
    return ReplicaRequest((1,), SamplingParams(), {}, [], queue, record)


def step(*token_ids: int, text: str | None = None, **fields: Any) -> StepOutput:
    return StepOutput(0, token_ids, len(token_ids), text=text, **fields)


def test_what_was_seen_is_not_said_again() -> None:
    request = shown_request()
    assert request.book(step(5, 6, text="ab"), 0.1, True).token_ids == (5, 6)
    assert request.book(step(7, text="c"), 0.1, True).token_ids == (7,)
    request.begin_again()
    assert (request.record.token_ids, request.record.num_steps) == ([], 0)
    assert request.book(step(5, text="a"), 0.1, True) == StepOutput(0, (), 1, text="")
    # Its second replica is lost before it has come as far as the first one.
    request.begin_again()
    rest = request.book(step(5, 6, 7, 8, text="abcd"), 0.1, True)
    assert (rest.token_ids, rest.text) == ((8,), "d")
    assert request.record.token_ids == [5, 6, 7, 8]


def test_other_tokens_than_those_that_were_seen_are_an_error() -> None:
    for again in (step(5, 9), step(5, is_finished=True)):
        request = shown_request()
        request.book(step(5, 6), 0.1, True)
        request.begin_again()
        end = request.book(again, 0.1, True)
        assert end.is_finished
        assert end.output is not None
        assert end.output.error == (
            "request 0: expected the 2 tokens that a lost replica had delivered, got others"
        )
    # One that showed nothing takes the second answer.
    request = shown_request(is_shown=False)
    request.book(step(5, 6), 0.1, True)
    request.begin_again()
    assert request.book(step(5, 9), 0.1, True).token_ids == (5, 9)


PROGRAM = """
import os, sys, threading, time
from diffulex import Diffulex
made = []
def make():
    made.append(Diffulex("demo", device="cpu", data_parallel_size=2, num_pages=64))
thread = threading.Thread(target=make)
thread.start(); thread.join()
engine = made[0]
print(*(r.child.pid for r in engine._loop.replicas), flush=True)
print(repr(engine.generate("Tom has 3 apples.", max_tokens=8, summary=False)[0].text), flush=True)
engine.add_request("Tom", None)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_replicas_of_a_killed_program_end() -> None:
    """From standard input, without a guard, by a thread that has ended; then SIGKILL."""
    program = subprocess.Popen(
        [sys.executable, "-c", "import sys; exec(compile(sys.stdin.readline().encode().decode("
         "'unicode_escape'), '<stdin>', 'exec'))"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(PROGRAM.replace("\n", "\\n") + "\n")
    program.stdin.flush()
    pids = [int(word) for word in program.stdout.readline().split()]
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    assert program.stdout.readline().startswith("'")
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.wait(30) == -signal.SIGKILL
    wait_gone(pids, 5.0)
