# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks as programs use them: streams, storms of requests, several engines and groups in
one process, threads that end; and a rank that is slow at the worst places."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from diffulex import Diffulex, SamplingParams
from diffulex.config.config import read_model_facts
from diffulex.distributed.child_process import ChildProcess
from diffulex.distributed.layout import LOOPBACK
from diffulex.engine.output import DenoiseSnapshot
from fixtures.families import family_builder
from fixtures.processes import PATIENCE_S, is_there, until
from fixtures.rank_faults import FAULT
from fixtures.thread_ranks import Stable

# Several processes import torch, and the host may do other work.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIMITS: dict[str, Any] = {"device": "cpu", "max_model_len": 128, "num_pages": 64, "max_num_reqs": 3}
TWO = {"tensor_parallel_size": 2, "check_ranks": True}
TEXTS = [
    f"Tom has {i} apples. He buys 4 more apples. How many apples does Tom have now?"
    for i in range(1, 5)
]
GREEDY = SamplingParams(max_tokens=24)
PROMPTS = [list(range(20 + length, 20 + 2 * length)) for length in (20, 7, 33, 12, 1, 40)]
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
_HEAD_SCALE = 6.0


def sharpen(tensors: Any) -> None:
    """Spreads the confidences of random weights."""
    for name in tensors:
        if "lm_head" in name:
            tensors[name] *= _HEAD_SCALE


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, whose steps are quick."""
    directory = tmp_path_factory.mktemp("tiny")
    family_builder("sdar", edit=sharpen).write(directory)
    return directory


@pytest.fixture(scope="module")
def long(tiny: Path) -> Stable:
    """What one rank of the small model answers to the prompts."""
    return Stable(tiny, PROMPTS, LONG, num_noisy=1, **LIMITS)


@pytest.fixture(scope="module")
def greedy() -> Stable:
    """What one rank of the bundled model answers to the texts."""
    directory = read_model_facts("demo", {}).model_dir
    return Stable(directory, TEXTS, GREEDY, num_noisy=1, **LIMITS)


@pytest.fixture(scope="module")
def pair() -> Iterator[Diffulex]:
    """Two ranks of the bundled model."""
    with Diffulex("demo", **TWO, **LIMITS) as engine:
        yield engine


def pids(engine: Diffulex) -> list[int]:
    return [child.pid for child in engine._executor._followers._group._pipes.children]  # type: ignore[attr-defined]


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_a_storm_of_arrivals_and_aborts(tiny: Path, long: Stable, run_ahead: str) -> None:
    """Requests come and go between any two steps, also while one runs ahead: those that stay are answered
    as on one rank, what the others had is the beginning of that, and no page is lost. `check_ranks` ends
    the engine should ranks decide differently."""
    rng, expected = random.Random(0), long._expected
    asked: dict[int, int] = {}
    results: dict[int, Any] = {}
    with Diffulex(str(tiny), run_ahead=run_ahead, **TWO, **LIMITS) as engine:
        while len(asked) < 60 or engine.has_unfinished():
            for _ in range(rng.choice((0, 0, 0, 1, 2)) if len(asked) < 60 else 0):
                which = rng.choice(long.kept)
                asked[engine.add_request(PROMPTS[which], LONG)] = which
            is_open = [req_id for req_id in asked if req_id not in results]
            if is_open and rng.random() < 0.1:
                engine.abort(rng.choice(is_open))
            for step in engine.step():
                if step.output is not None:
                    results[step.req_id] = step.output
        stats = engine.stats()
        assert stats.num_free_pages == stats.num_pages
        assert stats.num_running == stats.num_waiting == 0
        assert (engine._loop.counts.ahead > 0) == (run_ahead == "on")
    reasons = [output.completion_reason for output in results.values()]
    assert reasons.count("aborted") > 5
    assert reasons.count("max_new_tokens_reached") > 5
    for req_id, which in asked.items():
        tokens, whole = list(results[req_id].token_ids), expected[which][0]
        is_whole = results[req_id].completion_reason != "aborted"
        assert tokens == (whole if is_whole else whole[: len(tokens)])


def observed(engine: Diffulex, text: str) -> list[Any]:
    """Everything that callers see of one request, in several ways."""
    found: list[Any] = []
    for mode in ("block_append", "denoise"):
        events = engine.stream(text, GREEDY, mode)
        found.append([(e.text, e.token_ids, e.snapshot) for e in events])
    blocks: list[int] = []
    engine.observe_blocks(blocks.append)
    req_id = engine.add_request(text, GREEDY, has_text=True)
    engine.watch_buffer(req_id)
    steps = []
    while engine.has_unfinished():
        steps += engine.step()
    (output,) = [step.output for step in steps if step.output is not None]
    assert "".join(step.text or "" for step in steps) == output.text
    assert any(step.snapshot is not None for step in steps)
    found.append([(step.token_ids, step.new_tokens, step.is_finished) for step in steps])
    found.append([step.snapshot for step in steps])
    return [*found, blocks, output.token_ids, output.metrics.nfe]


def plain(value: Any) -> Any:
    """Without numbers of requests, which go on from call to call, and to the digits that rounding leaves."""
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, DenoiseSnapshot):
        return plain(dataclasses.astuple(value)[1:])
    return round(value, 3) if isinstance(value, float) else value


def test_streams_snapshots_and_blocks(pair: Diffulex, greedy: Stable) -> None:
    with Diffulex("demo", **LIMITS) as alone:
        for index in greedy.kept[:2]:
            assert plain(observed(pair, TEXTS[index])) == plain(observed(alone, TEXTS[index]))
    stream = pair.stream(TEXTS[0], LONG)
    next(stream)
    stream.close()  # aborts
    assert not pair.has_unfinished()


def test_two_engines_of_one_process(
    pair: Diffulex, greedy: Stable, tiny: Path, long: Stable
) -> None:
    """Their steps take turns; the end of one is nothing to the other."""
    with Diffulex(str(tiny), **TWO, **LIMITS) as other:
        workers, results = pids(other), [{}, {}]
        for prompts, params, engine in ((TEXTS, GREEDY, pair), (PROMPTS, LONG, other)):
            for prompt in prompts:
                engine.add_request(prompt, params)
        while pair.has_unfinished() or other.has_unfinished():
            for engine, found in zip((pair, other), results, strict=True):
                steps = engine.step() if engine.has_unfinished() else []
                found.update({s.req_id: s.output.token_ids for s in steps if s.output is not None})
        for one, found in zip((greedy, long), results, strict=True):
            one.check_tokens([found[req_id] for req_id in sorted(found)])
    assert not any(map(is_there, workers))
    greedy.check(pair)


def test_beside_the_default_group_of_a_program(
    tiny: Path, long: Stable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer has its own ranks, which go on to exchange, before, with and after an engine."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # nothing of an engine reads these
    monkeypatch.setenv("MASTER_PORT", "1")
    store = distributed.TCPStore(LOOPBACK, 0, 2, is_master=True, wait_for_workers=False)
    peer = ChildProcess("children:trains", "trainer", {})
    try:
        peer.connection.send((LOOPBACK, store.port))
        distributed.init_process_group("gloo", store=store, rank=0, world_size=2)

        def check_group(value: int) -> None:
            peer.connection.send(value)
            own = torch.tensor([1])
            distributed.all_reduce(own)
            assert own.item() == peer.connection.recv() == value + 1

        check_group(3)
        with Diffulex(str(tiny), **TWO, **LIMITS) as engine:
            check_group(4)
            long.check(engine)
            check_group(5)
        check_group(6)
        peer.connection.send(None)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        peer.stop()


_PROGRAM = """
import json, sys, threading
from diffulex import Diffulex, SamplingParams
limits, text = json.loads(sys.argv[1])
made = []
thread = threading.Thread(target=lambda: made.append(Diffulex("demo", tensor_parallel_size=2, **limits)))
thread.start()
thread.join()
(engine,) = made
workers = [child.pid for child in engine._executor._followers._group._pipes.children]
(output,) = engine.generate([text], max_tokens=24, summary=False)
thread = threading.Thread(target=engine.close)
thread.start()
thread.join()
print(json.dumps([workers, output.token_ids]))
"""


def test_a_script_without_guard_and_threads_that_end(tmp_path: Path, greedy: Stable) -> None:
    """One thread makes the engine and ends, another one closes it."""
    script = tmp_path / "script.py"
    script.write_text(_PROGRAM)
    index = greedy.kept[0]
    done = subprocess.run(
        [sys.executable, script, json.dumps([LIMITS, TEXTS[index]])],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    workers, tokens = json.loads(done.stdout)
    assert tokens == greedy._expected[index][0]
    assert not any(map(is_there, workers))


class Later:
    """What another rank decides in a step: compared when the first one has gone on, which does not wait."""

    own: bytes | None = None

    def __eq__(self, own: object) -> bool:
        assert isinstance(own, bytes)
        self.own = own
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_a_rank_that_is_slow_anywhere_reads_its_own_steps(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, long: Stable, run_ahead: str
) -> None:
    """Rank 0 fills the next plan while rank 1 may sleep in this one: 500 steps of changing batches."""
    monkeypatch.setenv(FAULT, "slow 1 7")
    faults = {"worker_imports": ["fixtures.rank_faults"], "run_ahead": run_ahead}
    rng, num_steps = random.Random(1), 0
    asked: dict[int, int] = {}
    decided: list[Later] = []

    def ask_later() -> list[Later]:
        decided.append(Later())
        return decided[-1:]

    with Diffulex(str(tiny), **TWO, **faults, **LIMITS) as engine:
        followers: Any = engine._executor._followers  # type: ignore[attr-defined]
        monkeypatch.setattr(followers, "decided", ask_later)
        while num_steps < 500 or engine.has_unfinished():
            if num_steps < 500 and (rng.random() < 0.2 or not engine.has_unfinished()):
                which = rng.choice(long.kept)
                asked[engine.add_request(PROMPTS[which], LONG)] = which
            for step in engine.step():
                if step.output is not None:
                    which = asked.pop(step.req_id)
                    assert list(step.output.token_ids) == long._expected[which][0]
            num_steps += 1
        (replies,) = followers._group._pipes.replies
        until(lambda: len(replies) >= len(decided))  # one more, where a step runs ahead
        told = list(replies)[: len(decided)]
        differing = [
            index
            for index, (theirs, own) in enumerate(zip(told, decided, strict=True))
            if own.own not in (None, theirs)
        ]
    assert not differing
    assert sum(own.own is not None for own in decided) > 400
    assert not asked
