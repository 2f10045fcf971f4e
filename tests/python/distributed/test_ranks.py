# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes: what they decode, how they fail, and that nothing of them stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from diffulex import CheckpointError, ConfigError, Diffulex, SamplingParams
from diffulex.checkpoint import loader, random_weights
from diffulex.config.config import read_model_facts
from diffulex.distributed.group import WorkerGroup
from diffulex.distributed.layout import LOOPBACK
from diffulex.engine.ranks import executor
from diffulex.errors import EngineDeadError
from diffulex.serving.engine import ServingEngine
from fixtures.processes import PATIENCE_S, children_of, is_there, until
from fixtures.rank_faults import FAULT
from fixtures.thread_ranks import Stable

# Several processes import torch, and the host may do other work.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMITS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_pages": 64, "max_num_reqs": 3}
TEXTS = ["Tom has 3 apples and buys 4 more.", "What is 2 + 2?", "Anna had 9 coins.", "1 + 1 ="]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.8, top_k=30, seed=5)
PROMPT = list(range(20, 40))


def pids(engine: Diffulex) -> list[int]:
    return [child.pid for child in engine._executor._followers._group._pipes.children]


def children() -> set[int]:
    return set(children_of(os.getpid()))


def assert_dead(engine: Diffulex, workers: list[int], error: EngineDeadError) -> None:
    """Nothing of the workers is left, and every call but `close` says why."""
    until(lambda: not any(map(is_there, workers)))
    for call in (
        engine.step,
        engine.stats,
        engine.flush_prefix_cache,
        lambda: engine.add_request(PROMPT, GREEDY),
        lambda: engine.abort(0),
        lambda: engine.generate([PROMPT], GREEDY, summary=False),
    ):
        with pytest.raises(EngineDeadError) as again:
            call()
        assert str(again.value) == str(error)
    engine.close()
    engine.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Diffulex]:
    """Two ranks of the bundled model."""
    with Diffulex("demo", tensor_parallel_size=2, check_ranks=True, **LIMITS) as engine:
        workers = pids(engine)
        yield engine
    assert not any(map(is_there, workers))


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_two_ranks_decode_what_one_does(pair: Diffulex, params: SamplingParams) -> None:
    directory = read_model_facts("demo", {}).model_dir
    Stable(directory, TEXTS, params, num_noisy=1, **LIMITS).check(pair)
    assert not dist.is_initialized()
    assert pair.stats().num_pages == LIMITS["num_pages"]


def test_a_server_is_told_of_every_device(pair: Diffulex) -> None:
    assert ServingEngine(pair).serving_info()["devices"] == ["cpu", "cpu"]


def test_what_ranks_cannot_do_says_so(pair: Diffulex, tmp_path: Path) -> None:
    for call in (
        lambda: pair.score([PROMPT], [(4, 8)]),
        lambda: pair.update_weights({}),
        lambda: pair.load_lora(tmp_path),
        pair.unload_lora,
    ):
        with pytest.raises(ConfigError, match=r"\w+: expected tensor_parallel_size 1, got 2"):
            call()


def test_ctrl_c_ends_the_call_and_no_rank(pair: Diffulex) -> None:
    """A terminal sends it to all of them."""
    params, workers = SamplingParams(max_tokens=64, ignore_eos=True), pids(pair)
    full = pair.generate([PROMPT], params, summary=False)[0].token_ids
    events: list[object] = []

    def interrupt(event: object) -> None:
        events.append(event)
        for pid in (*workers, os.getpid()) if len(events) == 1 else ():
            os.kill(pid, signal.SIGINT)

    settings: Any = {"stream_callback": interrupt, "summary": False}
    outputs = pair.generate([PROMPT] * 2, params, on_interrupt="return", **settings)
    assert {output.completion_reason for output in outputs} == {"aborted"}
    assert all(output.token_ids == full[: len(output.token_ids)] for output in outputs)
    events.clear()
    with pytest.raises(KeyboardInterrupt):
        pair.generate([PROMPT] * 2, params, **settings)
    assert not pair.has_unfinished()
    assert pair.generate([PROMPT], params, summary=False)[0].token_ids == full
    assert all(map(is_there, workers))


def test_how_late_ranks_begin_a_step() -> None:
    """It is known of the first step, once the others have said when they began, and again later."""
    with Diffulex("demo", tensor_parallel_size=2, **LIMITS) as engine:
        serving = ServingEngine(engine)
        assert "rank_step_skew_seconds" not in serving.serving_stats()["gauges"]
        seen = set()
        while len(seen) < 2:
            engine.generate([PROMPT], GREEDY, summary=False)
            skew = serving.serving_stats()["gauges"].get("rank_step_skew_seconds")
            if skew is not None:
                assert 0.0 < skew < PATIENCE_S
                seen.add(skew)
    with Diffulex("demo", **LIMITS) as engine:
        engine.generate([PROMPT], GREEDY, summary=False)
        assert "rank_step_skew_seconds" not in ServingEngine(engine).serving_stats()["gauges"]


_SCRIPT = """
import json, sys
from diffulex import Diffulex, SamplingParams
limits, prompt = json.loads(sys.argv[1])
engine = Diffulex("demo", tensor_parallel_size=2, **limits)
output, = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True), summary=False)
workers = [child.pid for child in engine._executor._followers._group._pipes.children]
print(json.dumps([workers, output.token_ids]), flush=True)
if len(sys.argv) > 2:
    sys.exit()
import os, signal
fork = os.fork()
if fork:
    print(fork, flush=True)
signal.pause()
"""


def test_program_from_standard_input_without_guard_that_is_killed() -> None:
    """While a fork of it holds the pipes."""
    arguments = [sys.executable, "-", json.dumps([LIMITS, PROMPT])]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(_SCRIPT)
        program.stdin.close()
        workers, token_ids = json.loads(program.stdout.readline())
        assert len(token_ids) == 8
        fork = int(program.stdout.readline())
        assert all(map(is_there, [*workers, fork]))
        program.kill()
        program.wait()
        try:
            until(lambda: not any(map(is_there, workers)))
            assert is_there(fork)
        finally:
            os.kill(fork, signal.SIGKILL)


def test_program_that_forgets_to_close() -> None:
    arguments = [sys.executable, "-c", _SCRIPT, json.dumps([LIMITS, PROMPT]), "exit"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    workers, _ = json.loads(done.stdout)
    assert not any(map(is_there, workers))
    # Libraries may warn of the host; what Python says of what was left behind is one of these.
    assert not re.search("Traceback|leaked|Error|Exception", done.stderr)


def test_worker_that_is_killed_while_nothing_runs() -> None:
    engine = Diffulex("demo", tensor_parallel_size=2, **LIMITS)
    workers = pids(engine)
    engine.generate([PROMPT], GREEDY, summary=False)
    os.kill(workers[0], signal.SIGKILL)
    until(lambda: engine._executor.death is not None)
    error = engine._executor.death
    expected = f"rank 1 (pid {workers[0]}, cpu) was killed by SIGKILL, possibly out of memory"
    assert str(error) == expected
    assert (error.rank, error.pid, error.device) == (1, workers[0], "cpu")
    assert_dead(engine, workers, error)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("kill 2 3", r"rank 2 \(pid \d+, cpu\) was killed by SIGKILL, possibly out of memory"),
        (
            "sampler 1 3",
            r"rank 1 \(pid \d+, cpu\) failed in a step: ValueError: injected in the sam",
        ),
        (
            "before 1 3",
            r"rank 1 \(pid \d+, cpu\) failed in a step: ValueError: injected before the forward$",
        ),
        (
            "after 1 3",
            r"rank 1 \(pid \d+, cpu\) failed in a step: ValueError: injected after the step$",
        ),
        ("stop 1 2", r"rank 0 waited 5 s for rank 1 in all-reduce: .*imed out.* \(step \d+\)$"),
        (
            "disagree 1 4",
            r"ranks disagree: step 4, rank 1 decided other tokens than rank 0"
            r" \(first difference: request 0, position \d+\)",
        ),
        (
            "hidden 1 1",
            r"ranks disagree: step 1, rank 1 has other hidden states than rank 0$",
        ),
    ],
)
def test_rank_that_fails_in_a_step_ends_the_group(
    monkeypatch: pytest.MonkeyPatch, fault: str, text: str
) -> None:
    monkeypatch.setenv(FAULT, fault)
    size = 4 if fault.startswith("kill") else 2
    engine = Diffulex(
        "demo",
        tensor_parallel_size=size,
        worker_imports=["fixtures.rank_faults"],
        check_ranks=fault.startswith(("disagree", "hidden")),
        collective_timeout_seconds=5 if fault.startswith("stop") else 60,
        **LIMITS,
    )
    workers = pids(engine)
    with pytest.raises(EngineDeadError, match=text) as dead:
        engine.generate([PROMPT], GREEDY, summary=False)
    assert_dead(engine, workers, dead.value)


def test_first_rank_that_fails_in_a_step_ends_the_group() -> None:
    engine = Diffulex("demo", tensor_parallel_size=2, **LIMITS)
    workers = pids(engine)

    def failing(inputs: object) -> None:
        raise ValueError("injected here")

    engine._executor.runner.sampler = failing
    with pytest.raises(
        EngineDeadError, match="rank 0 failed in step 1: ValueError: injected"
    ) as dead:
        engine.generate([PROMPT], GREEDY, summary=False)
    assert isinstance(dead.value.__cause__, ValueError)
    assert_dead(engine, workers, dead.value)


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("load 1 0", CheckpointError, r"^rank 1: checkpoint: injected$"),
        ("load-kill 1 0", EngineDeadError, r"^rank 1 \(pid \d+, cpu\) was killed by SIGKILL"),
    ],
)
@pytest.mark.parametrize("settings", [{}, {"load_format": "dummy"}], ids=["stored", "drawn"])
def test_worker_that_cannot_load_its_weights(
    monkeypatch: pytest.MonkeyPatch, fault: str, error: Any, text: str, settings: dict[str, Any]
) -> None:
    """The first rank, which is slower, loads no further then."""
    monkeypatch.setenv(FAULT, fault)
    groups, names, copy_values = [], [], loader.copy_values

    def group(*arguments: Any) -> WorkerGroup:
        groups.append(WorkerGroup(*arguments))
        return groups[-1]

    def slow(name: str, *arguments: Any) -> None:
        names.append(name)
        until(lambda: groups[0].death is not None)
        copy_values(name, *arguments)

    monkeypatch.setattr(executor, "WorkerGroup", group)
    for module in (loader, random_weights):
        monkeypatch.setattr(module, "copy_values", slow)
    before, faults = children(), ["fixtures.rank_faults"]
    with pytest.raises(error, match=text):
        Diffulex("demo", tensor_parallel_size=2, worker_imports=faults, **settings, **LIMITS)
    assert len(names) == 1
    assert children() <= before


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("prepare 1 0", r"could not start: ValueError: injected before the first step$"),
        ("prepare-kill 1 0", r"was killed by SIGKILL, possibly out of memory$"),
    ],
)
def test_worker_that_cannot_prepare_its_steps(
    monkeypatch: pytest.MonkeyPatch, fault: str, text: str
) -> None:
    """Where a GPU would capture graphs."""
    monkeypatch.setenv(FAULT, fault)
    before, faults = children(), ["fixtures.rank_faults"]
    with pytest.raises(EngineDeadError, match=rf"^rank 1 \(pid \d+, cpu\) {text}"):
        Diffulex("demo", tensor_parallel_size=2, worker_imports=faults, **LIMITS)
    assert children() <= before


def test_pages_that_another_rank_has_no_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT, "pages 1 0")
    before, settings = children(), {**LIMITS, "worker_imports": ["fixtures.rank_faults"]}
    text = (
        r"^rank 1: num_pages: expected at most \d+ \(\d+ bytes each, 0.0 GiB .* on cpu\), got 640$"
    )
    with pytest.raises(ConfigError, match=text):
        Diffulex("demo", tensor_parallel_size=2, **{**settings, "num_pages": 640})
    assert children() <= before


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_recordings_of_every_rank(
    tmp_path: Path, run_ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank writes its own files of the steps that rank 0 records, and its times of stages."""
    monkeypatch.setenv("DIFFULEX_CUDA_STAGE_TIMING_PATH", str(tmp_path / "times.csv"))
    recordings = {"torch_profiler_dir": str(tmp_path), "delay_iterations": 1}
    settings = {**LIMITS, "run_ahead": run_ahead, "profiler_config": recordings}
    with Diffulex("demo", tensor_parallel_size=2, check_ranks=True, **settings) as engine:
        for run_id, most in (("apples", 3), ("apples-2", 0)):
            engine.start_profile("apples", max_iterations=most)
            engine.generate([PROMPT], GREEDY, summary=False)
            result = engine.stop_profile()
            assert result["steps"] == 3 if most else result["steps"] > 3
            begin = str(tmp_path / f"{run_id}.model_runner.rank1.")
            paths = [path for path in result["files"] if path.startswith(begin)]
            assert len(paths) == 4 == len(result["files"]) - 4
            with open(f"{begin}trace.json", encoding="utf-8") as file:
                events = json.load(file)["traceEvents"]
            names = [event.get("name") for event in events]
            # A step that runs ahead may be told before the recording begins, or before it ends.
            num_ahead = int(run_ahead == "on")
            assert abs(names.count("diffulex.engine.step") - result["steps"]) <= num_ahead
            assert "diffulex.multi_block.model_forward" in names
    for rank in (0, 1):
        lines = (tmp_path / f"times.rank{rank}.csv").read_text().splitlines()[1:]
        assert {line.split(",")[1] for line in lines} == {str(rank)}
        assert any(line.split(",")[4] == "total" for line in lines)


def test_the_block_at_the_start_tells_of_the_ranks(caplog: pytest.LogCaptureFixture) -> None:
    settings = {**LIMITS, "tensor_parallel_size": 2, "distributed_backend": "nccl"}
    with caplog.at_level("INFO", "diffulex"), Diffulex("demo", **settings) as engine:
        assert engine.config.parallel.distributed_backend == "gloo"
    text = "distributed_backend: changed from 'nccl' to 'gloo': the ranks are on the CPU"
    assert caplog.messages.count(text) == 1
    (block,) = (text for text in caplog.messages if text.startswith("Diffulex "))
    ready = r"^  ranks        TP 2 on cpu, workers ready in \d+\.\d s; the ranks exchange on the host; on a CPU"
    assert re.search(ready, block, re.MULTILINE)


def test_where_ranks_meet() -> None:
    """At the port that was asked for, or at none; no process has started then."""
    before = children()
    with socket.create_server((LOOPBACK, 0)) as door:
        port = door.getsockname()[1]
        limits = {"tensor_parallel_size": 2, "master_port": port, **LIMITS}
        with pytest.raises(ConfigError) as error:
            Diffulex("demo", **limits)
    assert str(error.value) == f"master_port: {port} is in use; leave it unset for a free one"
    text = rf"^master_addr: expected an address of this host, got '192.0.2.1' and port {port}: \S"
    with pytest.raises(ConfigError, match=text):
        Diffulex("demo", master_addr="192.0.2.1", **limits)
    assert children() <= before
    engines: list[Diffulex] = []
    while len(engines) < 2:  # the second one gets the port of the first, which is closed
        try:
            engines.append(Diffulex("demo", master_addr=LOOPBACK, **limits))
        except ConfigError as taken:  # by another program meanwhile
            if "is in use" not in str(taken):
                raise
            with socket.create_server((LOOPBACK, 0)) as door:
                limits["master_port"] = door.getsockname()[1]
            engines.clear()
            continue
        with engines[-1] as engine:
            found = engine._executor._followers._store.port  # type: ignore[attr-defined]
            assert found == limits["master_port"]
            assert engine.generate([PROMPT], GREEDY, summary=False)[0].token_ids


def test_a_model_that_is_registered_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank has it by `worker_imports`; without, the error of the one that has not says what to do."""
    from fixtures import own_model

    monkeypatch.setenv(own_model.MARKS, str(tmp_path))
    settings = {**LIMITS, "tensor_parallel_size": 2}
    with Diffulex("demo", **settings) as engine:
        expected = engine.generate([PROMPT], GREEDY, summary=False)[0].token_ids
    settings["model_name"] = "own"
    try:
        imports = {"worker_imports": ["fixtures.own_model"]}
        with Diffulex("demo", check_ranks=True, **settings, **imports) as engine:
            assert type(engine._executor.runner.model) is own_model.OwnModel
            assert engine.generate([PROMPT], GREEDY, summary=False)[0].token_ids == expected
            assert {path.name for path in tmp_path.iterdir()} == {
                str(pid) for pid in (os.getpid(), *pids(engine))
            }
        hint = r"got 'own' \(registered in this process\? add its module to worker_imports\)$"
        with pytest.raises(EngineDeadError, match=rf"^rank 1\b.*{hint}"):
            Diffulex("demo", **settings)
    finally:
        own_model.unregister()


def test_processes_that_share_experts_alone() -> None:
    zoo = Path(__file__).resolve().parents[3] / "examples" / "zoo" / "edit_llada2"
    limits = {**LIMITS, "expert_parallel_size": 2}
    with Diffulex(str(zoo), check_ranks=True, **limits) as engine:
        workers = pids(engine)
        assert len(workers) == 1
        shared = engine.generate([PROMPT], GREEDY, summary=False)[0].token_ids
        with pytest.raises(ConfigError, match="score: expected expert_parallel_size 1, got 2"):
            engine.score([PROMPT], [(4, 8)])
    with Diffulex(str(zoo), **LIMITS) as engine:
        assert engine.generate([PROMPT], GREEDY, summary=False)[0].token_ids == shared
    assert not any(map(is_there, workers))
