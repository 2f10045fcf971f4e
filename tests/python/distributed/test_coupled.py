# SPDX-License-Identifier: Apache-2.0
"""Replicas that share their experts: what one engine decodes, with uneven rows and with none at all."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex import ConfigError, Diffulex, EngineDeadError, SamplingParams, ops
from diffulex.config.config import Config, read_model_facts
from diffulex.distributed import store as store_module
from diffulex.distributed.gloo_comm import GlooComm
from diffulex.distributed.lockstep import Lockstep
from diffulex.distributed.outbox import Outbox
from diffulex.distributed.shard import ExpertShard
from diffulex.engine.ranks import executor
from diffulex.engine.replicas import loop
from diffulex.nn.dispatch import CountedDispatch, GatheredDispatch, RowDispatch
from diffulex.serving.engine import ServingEngine
from fixtures.coupled_threads import CoupledThreads
from fixtures.gate import Gate
from fixtures.gloo_threads import run_gloo_ranks
from fixtures.moe_families import moe_builder
from fixtures.processes import PATIENCE_S, children_of, is_there, until
from fixtures.thread_comm import ThreadComm, run_ranks
from fixtures.thread_ranks import Stable

ZOO = Path(__file__).resolve().parents[3] / "examples" / "zoo"
LIMITS: dict[str, Any] = {"max_model_len": 128, "num_pages": 64, "max_num_reqs": 2}
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
HEAD_SCALE = 6.0


def sharpen(tensors: Any) -> None:
    """Spreads the confidences of random weights over (0, 1)."""
    tensors["lm_head.weight"] *= HEAD_SCALE


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(200) for _ in range(length)] for length in lengths]


PROMPTS = prompts_of(0, 33, 5, 18, 40, 9, 27)


def questions(count: int) -> list[str]:
    lines = (ZOO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line)["question"] for line in lines]


# What the engines agree on.


@pytest.mark.parametrize("seed", range(6))
def test_calls_that_come_late_leave_nobody_waiting(seed: int) -> None:
    """Each request is a call to all; ranks get calls at different times, some when it is over."""
    size, num_requests = 3, 12
    rng = random.Random(seed)
    owners = [rng.randrange(size) for _ in range(num_requests)]
    delays = [[rng.random() * 0.004 for _ in owners] for _ in range(size)]

    def run(comm: ThreadComm) -> tuple[int, list[tuple[int, ...]]]:
        lockstep, waits, forwards = Lockstep(comm), 0, []
        for number, owner in enumerate(owners, 1):
            num_left = 2 if owner == comm.rank else 0  # it is there before its call
            time.sleep(delays[comm.rank][number - 1])
            lockstep.call(number)
            while num_left or lockstep.is_called:
                rows = lockstep.agree(num_left, has_more=num_left > 0)
                if any(rows):
                    forwards.append(rows)
                waits += 1
                num_left = max(0, num_left - 1)
        return waits, forwards

    answers = run_ranks(size, run)
    assert all(answer == answers[0] for answer in answers)
    rows = [sum(forward[rank] for forward in answers[0][1]) for rank in range(size)]
    assert rows == [3 * owners.count(rank) for rank in range(size)]


def test_a_call_counts_until_it_has_come_to_all() -> None:
    """Rank 0 is called first: rank 1 may get the request, and the call, after a step without any."""

    def run(comm: ThreadComm) -> list[bool]:
        lockstep = Lockstep(comm)
        seen = [lockstep.is_called]
        lockstep.call(1)
        lockstep.call(2 - comm.rank)
        assert lockstep.agree(0, has_more=comm.rank == 1) == (0, 0)
        seen.append(lockstep.is_called)  # rank 1 has requests that wait
        lockstep.agree(0, has_more=False)
        seen.append(lockstep.is_called)  # rank 1: not yet
        lockstep.call(2)
        seen.append(lockstep.is_called)
        assert lockstep.agree(7 * comm.rank, has_more=False) == (0, 7)
        lockstep.agree(0, has_more=False)
        lockstep.call(2)  # has come to all: wakes none
        return [*seen, lockstep.is_called]

    assert run_ranks(2, run) == [[False, True, rank == 0, True, False] for rank in range(2)]


# How rows reach the experts.


def routed(x: torch.Tensor, routing: ops.Routing, w: torch.Tensor) -> torch.Tensor:
    """Sums [R, H] of one matrix for each expert [E, H, H]; zeros stand for experts of others."""
    chosen = w[routing.ids.clamp(min=0).long()] * (routing.ids >= 0)[..., None, None]
    return torch.einsum("rk,rkij,rj->ri", routing.weights, chosen, x)


@pytest.mark.parametrize("counts", [(5, 2, 9), (0, 4, 0), (1, 0, 1), (0, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run_on_ranks", [run_ranks, run_gloo_ranks])
def test_rows_reach_their_experts_and_come_back(
    run_on_ranks: Any, counts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Both ways give the sums of all experts; padding of the step itself (id -1) stays out."""
    generator = torch.Generator().manual_seed(sum(counts))
    size, num_experts, top_k, hidden = len(counts), 7, 3, 8
    w = torch.randint(-3, 4, (num_experts, hidden, hidden), generator=generator).float()
    inputs = []
    for count in counts:
        x = torch.randint(-2, 3, (count, hidden), generator=generator).to(dtype)
        ids = torch.rand(count, num_experts, generator=generator).argsort(1)[:, :top_k].int()
        ids[1:2] = -1
        weights = torch.randint(1, 3, (count, top_k), generator=generator).float()
        inputs.append((x, ops.Routing(weights, ids), torch.ones_like(x)))
    owners = torch.empty(num_experts, dtype=torch.int64)
    for rank in range(size):
        owners[
            list(ExpertShard(rank, size, "expert").experts(num_experts, is_interleaved=False))
        ] = rank

    def run(comm: Any) -> list[torch.Tensor]:
        own = w * (owners == comm.rank)[:, None, None]
        found = []
        dispatches: list[RowDispatch] = [GatheredDispatch(comm), CountedDispatch(comm, owners)]
        for dispatch in dispatches:
            dispatch.counts = counts
            for addend in (None, inputs[comm.rank][2]):
                x, routing, _ = inputs[comm.rank]
                rows, sent, rest = dispatch.send(x, routing, addend)
                assert rest is None
                assert rows.dtype == dtype
                found.append(dispatch.receive(routed(rows.float(), sent, own).to(dtype)))
        return found

    for (x, routing, ones), found in zip(inputs, run_on_ranks(size, run), strict=True):
        expected = routed(x.float(), routing, w)  # small integers: exact in both dtypes
        for got, addend in zip(found, (0, ones, 0, ones), strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(got, (expected + addend).to(dtype), rtol=0, atol=0)


def test_counted_rows_are_sent_once_and_only_where_they_are_needed() -> None:
    owners = torch.tensor([0, 0, 1, 1])

    def run(comm: ThreadComm) -> int:
        dispatch = CountedDispatch(comm, owners)
        dispatch.counts = (2, 0)
        count = dispatch.counts[comm.rank]
        ids = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)[:count]
        x = torch.ones(count, 4)
        rows, _, _ = dispatch.send(x, ops.Routing(torch.ones(count, 2), ids), None)
        dispatch.receive(rows)
        return rows.size(0)

    assert run_ranks(2, run) == [2, 1]


# Engines, as threads.


@pytest.mark.parametrize(
    ("family", "size", "settings"),
    [
        ("sdar_moe", 2, {}),
        ("sdar_moe", 3, {"moe_dispatcher_backend": "naive"}),
        ("llada2", 2, {}),
        ("llada2", 3, {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}),
        ("llada2", 2, {"num_ranks": 2}),
        ("sdar_moe", 2, {"num_ranks": 2, "moe_dispatcher_backend": "naive", "check_ranks": True}),
    ],
)
def test_random_models(tmp_path: Path, family: str, size: int, settings: dict[str, Any]) -> None:
    """Uneven: the first replica has most requests, the last one none for a while."""
    of_several = ("moe_dispatcher_backend", "num_ranks", "check_ranks")
    moe_builder(family, edit=sharpen).write(tmp_path)
    own = {name: value for name, value in settings.items() if name not in of_several}
    one = Stable(tmp_path, PROMPTS, GREEDY, num_noisy=1, **LIMITS, **own)
    with CoupledThreads(tmp_path, size, **LIMITS, **settings) as group:
        for index, prompt in enumerate(PROMPTS[:5]):
            group.add(index, index % 4 // 3, prompt, GREEDY)
        found = group.results(5)
        group.add(5, size - 1, PROMPTS[5], GREEDY)
        one.check_tokens([*found, *group.results(1)])


@pytest.mark.parametrize("backend", ["allgather", "naive"])
def test_one_has_requests_the_others_never(tmp_path: Path, backend: str) -> None:
    """They sleep in between and are woken by the next request, wherever it goes."""
    moe_builder("sdar_moe", edit=sharpen).write(tmp_path)
    one = Stable(tmp_path, PROMPTS[:3], GREEDY, num_noisy=1, **LIMITS)
    with CoupledThreads(tmp_path, 3, moe_dispatcher_backend=backend, **LIMITS) as group:
        for rank in (0, 2, 1):
            found = []
            for index, prompt in enumerate(PROMPTS[:3]):
                group.add(index, rank, prompt, GREEDY)
                found += group.results(1)
            one.check_tokens(found)
        assert [engine.stats().num_finished for engine in group.engines] == [3, 3, 3]


def test_a_reader_that_stops_keeps_only_its_own_requests_waiting(tmp_path: Path) -> None:
    """What a replica tells is not read: its requests wait, its experts serve the others."""
    moe_builder("sdar_moe", edit=sharpen).write(tmp_path)
    one = Stable(tmp_path, PROMPTS, GREEDY, num_noisy=1, **LIMITS)
    gate = Gate()
    outbox = Outbox(gate, lambda: group.tell(0, ("room",)), max_bytes=1)
    with CoupledThreads(tmp_path, 2, outboxes={0: outbox}, **LIMITS) as group:
        for index in range(3):
            group.add(index, 0, PROMPTS[index], GREEDY)
        group.add(3, 1, PROMPTS[3], GREEDY)
        found = group.results(1)
        assert outbox.is_full  # of its first step
        assert group.engines[0].stats().num_finished == 0
        for index in (4, 5):  # the others are awake all the time
            group.add(index, 1, PROMPTS[index], GREEDY)
            found += group.results(1)
        own: dict[int, tuple[int, ...]] = {}
        while len(own) < 3:
            gate.let_through(1)
            _, outputs, *_ = gate.next()
            own |= {step.req_id: step.output.token_ids for step in outputs if step.is_finished}
        one.check_tokens([own[0], own[1], own[2], *found])
    outbox.close()


def test_prefills_meet_decodes_and_aborts(tmp_path: Path) -> None:
    """A long request decodes while short ones come and go elsewhere; some of them are aborted."""
    moe_builder("llada2", edit=sharpen).write(tmp_path)
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    one = Stable(tmp_path, PROMPTS[:1], long, num_noisy=1, **LIMITS)
    with CoupledThreads(tmp_path, 2, **LIMITS) as group:
        group.add(0, 0, PROMPTS[0], long)
        for index, prompt in enumerate(prompts_of(1, *[30] * 9), 1):
            group.add(index, 1, prompt, GREEDY)
            if index % 3 == 0:
                group.abort(index, 1)
        outputs = [group.result() for _ in range(10)]
        reasons = {output.req_id: output.completion_reason for output in outputs}
        assert {i for i, reason in reasons.items() if reason == "aborted"} <= {3, 6, 9}
        assert "aborted" in reasons.values()
        one.check_tokens([output.token_ids for output in outputs if output.req_id == 0])


ROUNDING = 1e-7
CASES: dict[str, dict[str, Any]] = {
    "dmax_llada2": {},
    "edit_llada2": {"buffer_size": 1},
    "diffusion_gemma": {"diffusion_gemma_max_denoising_steps": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_trained_models(name: str) -> None:
    settings = {"max_model_len": 192, "max_num_reqs": 3, **CASES[name]}
    params, texts = SamplingParams(max_tokens=32), questions(3)
    one = Stable(ZOO / name, texts, params, num_noisy=1, scale=ROUNDING, **settings)
    with CoupledThreads(ZOO / name, 3, **settings) as group:
        encode = group.engines[0].tokenizer.encode
        for index, text in enumerate(texts):
            group.add(index, index // 2, encode(text), params)
        one.check_tokens(group.results(3))


# Processes.

SERVED: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 192,
    "max_num_reqs": 3,
    "buffer_size": 1,
}
TWO: dict[str, Any] = {"data_parallel_size": 2, "expert_parallel_size": 2}
MODEL = str(ZOO / "edit_llada2")


def processes(engine: Diffulex) -> list[int]:
    return [replica.child.pid for replica in engine._loop.replicas]  # type: ignore[union-attr]


def run_on(engine: Diffulex) -> None:
    while engine.has_unfinished():
        engine.step()


#: A loss is seen by itself, not because an exchange took too long: that would be later than the bound.
BOUND_S, COLLECTIVE_S = 15.0, 600


def check_dead(engine: Diffulex, pids: list[int], text: str, start: float) -> None:
    """Soon after `start` everything is over, for good; `pytest -rP` shows how soon."""
    with pytest.raises(EngineDeadError, match=text):
        run_on(engine)
    seconds = time.monotonic() - start
    print(f"error after {seconds:.3f} s")  # below 2 where the host is idle
    assert seconds < BOUND_S
    for call in (engine.step, lambda: engine.generate(["x"])):
        with pytest.raises(EngineDeadError, match=text):
            call()
    engine.close()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_processes_and_one_that_is_killed() -> None:
    texts, params = questions(5), SamplingParams(max_tokens=32)
    with Diffulex(MODEL, **SERVED) as engine:
        expected = [o.token_ids for o in engine.generate(texts, params, summary=False)]
    patient = {**SERVED, **TWO, "collective_timeout_seconds": COLLECTIVE_S}
    with Diffulex(MODEL, **patient) as engine:
        assert ServingEngine(engine).serving_info()["max_num_reqs"] == 2 * SERVED["max_num_reqs"]
        pids = processes(engine)
        for count in (5, 1, 1):  # with uneven rows, and with none: in turn on both
            outputs = engine.generate(texts[:count], params, summary=False)
            assert [o.token_ids for o in outputs] == expected[:count]
        stream = engine.stream(texts[0], max_tokens=100, ignore_eos=True)
        next(stream)
        stream.close()  # aborts
        assert not engine.has_unfinished()
        assert engine.stats().num_finished >= 7
        with pytest.raises(RuntimeError, match="pause: expected data_parallel_size 1, got 2"):
            engine.pause()
        for text in texts:
            engine.add_request(text, SamplingParams(max_tokens=100, ignore_eos=True))
        engine.step()
        start = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        text = rf"^replica 1 \(pid {pids[1]}, cpu\) was killed by SIGKILL"
        check_dead(engine, pids, text, start)


@pytest.mark.slow
@pytest.mark.parametrize("maker", [loop, executor], ids=["replicas", "ranks"])
def test_the_place_where_they_meet_is_there_until_the_end(
    monkeypatch: pytest.MonkeyPatch, maker: Any
) -> None:
    """A library may look there as late as in an exchange of the first step, as NCCL does. Here two ranks
    more meet there after it, and exchange through gloo, which they could not had the store gone."""
    places = []

    def place_of(store: Any) -> Any:
        places.append(store_module.place_of(store))
        return places[-1]

    monkeypatch.setattr(maker, "place_of", place_of)
    model, sizes = (MODEL, TWO) if maker is loop else ("demo", {"tensor_parallel_size": 2})
    with Diffulex(model, **SERVED, **sizes) as engine:
        engine.generate(questions(1), SamplingParams(max_tokens=8), summary=False)
        gc.collect()
        ((host, port, _),) = places

        def late(rank: int) -> float:
            comm = GlooComm(rank, 2, (host, port, "late"), PATIENCE_S, PATIENCE_S)
            x = torch.full((3,), 1.0 + rank)
            comm.all_reduce_(x)
            comm.close()
            return float(x[0])

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(late, range(2))) == [3.0, 3.0]
        engine.generate(questions(1), SamplingParams(max_tokens=8), summary=False)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["allgather", "naive"])
def test_processes_of_several_ranks_and_one_that_is_killed(backend: str) -> None:
    """Two replicas of three ranks, each with some experts: six parts of 8 experts."""
    texts, params = questions(5), SamplingParams(max_tokens=32)
    with Diffulex(MODEL, **SERVED) as engine:
        expected = [o.token_ids for o in engine.generate(texts, params, summary=False)]
    patient = {**SERVED, "data_parallel_size": 2, "tensor_parallel_size": 3}
    patient |= {"expert_parallel_size": 6, "moe_dispatcher_backend": backend, "check_ranks": True}
    with Diffulex(MODEL, **patient, collective_timeout_seconds=COLLECTIVE_S) as engine:
        assert len(engine.parallel_info()["ranks"]) == 6
        pids = processes(engine)
        workers = [worker for pid in pids for worker in children_of(pid)]
        assert len(workers) == 4
        for count in (5, 1, 1):  # with uneven rows, and with none: in turn on both
            outputs = engine.generate(texts[:count], params, summary=False)
            assert [o.token_ids for o in outputs] == expected[:count]
        for text in texts:
            engine.add_request(text, SamplingParams(max_tokens=100, ignore_eos=True))
        engine.step()
        start = time.monotonic()
        os.kill(workers[2], signal.SIGKILL)
        text = rf"^replica 1 \(pid {pids[1]}, cpu\) failed: EngineDeadError: rank 1 \(pid {workers[2]}, cpu\)"
        check_dead(engine, pids, text + " was killed by SIGKILL", start)
        until(lambda: not any(map(is_there, workers)))


@pytest.mark.slow
def test_one_that_fails_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUPLED_FAULT", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    faulty = {"worker_imports": ("fixtures.coupled_faults",), "moe_dispatcher_backend": "naive"}
    patient = {**SERVED, **TWO, **faulty, "collective_timeout_seconds": COLLECTIVE_S}
    with Diffulex(MODEL, **patient) as engine:
        pids = processes(engine)
        for text in questions(4):
            engine.add_request(text, SamplingParams(max_tokens=100, ignore_eos=True))
        expected = rf"^replica 1 \(pid {pids[1]}, cpu\) failed: ValueError: injected"
        check_dead(engine, pids, expected, time.monotonic())


# What is refused, before any process starts.


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"num_devices": 1, "device": "cuda"},
            "device_ids: expected 2 devices for data_parallel_size 2, got 1",
        ),
        (
            {"distributed_executor": "ray"},
            "distributed_executor: expected mp with experts over data-parallel shards, got 'ray'",
        ),
        (
            {"run_ahead": "on"},
            "run_ahead: expected auto or off with experts over data-parallel shards, got 'on'",
        ),
        (
            {"moe_dispatcher_backend": "deepep"},
            "moe_dispatcher_backend: deepep is not supported: expert groups of at most 8 ranks of one"
            " host use allgather",
        ),
        (
            {"data_parallel_size": 1, "moe_dispatcher_backend": "naive"},
            "moe_dispatcher_backend: expected standard unless replicas share the experts"
            " (expert_parallel_size), got naive",
        ),
        (
            {"data_parallel_size": 9, "expert_parallel_size": 9},
            "expert_parallel_size: expected at most 8 ranks for 8 routed experts, got 9",
        ),
    ],
)
def test_refused(settings: dict[str, Any], text: str) -> None:
    facts = read_model_facts(MODEL, {})
    values = {"device": "cpu", **TWO, **settings}
    if num_devices := values.pop("num_devices", 0):
        facts = type(facts)(
            **{**{n: getattr(facts, n) for n in facts.__slots__}, "num_devices": num_devices}
        )
    with pytest.raises(ConfigError) as caught:
        Config.resolve(MODEL, facts, values)
    assert str(caught.value) == text


def test_standard_becomes_allgather() -> None:
    facts = read_model_facts(MODEL, {})
    config = Config.resolve(MODEL, facts, {"device": "cpu", **TWO})
    assert config.parallel.moe_dispatcher_backend == "allgather"
    alone = Config.resolve(MODEL, facts, {"device": "cpu"})
    assert alone.parallel.moe_dispatcher_backend == "standard"
