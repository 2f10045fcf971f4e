# SPDX-License-Identifier: Apache-2.0
"""Steps of the host hold real rows alone, and decide what the device's loop decides over all rows.

The CPU plays the device, whose loop gives every request all of its rows: packed equals unpacked.
"""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex import SamplingParams
from diffulex.bench.problem_file import load_problems
from diffulex.checkpoint.resolve import demo_dir
from diffulex.engine.engine import Diffulex
from diffulex.runner.decode_graphs import Bucket, DecodeGraphs, packed_row_counts
from diffulex.runner.decode_loop import DecodeLoop
from diffulex.runner.model_runner import ModelRunner
from diffulex.runner.row_share import HOST_LIMITS, LOOP_LIMITS, RowShare
from diffulex.runner.sampler_inputs import SamplerInputsBuilder
from diffulex_ext import _core
from fixtures.quick import quick
from run_ahead_cases import (
    FILL,
    PACKING,
    STRATEGIES,
    answers,
    loop_of,
    model_of,
    pack_every_step,
    requests,
)
from step_watch import Watched
from tiny_engine import TinyModel


@pytest.mark.parametrize("name", PACKING)
@pytest.mark.parametrize(("block_size", "buffer_size"), quick([(8, 1), (4, 6), (8, 3)], [(8, 3)]))
def test_packed_steps_decide_bit_for_bit_what_whole_ones_do(
    tiny: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    block_size: int,
    buffer_size: int,
) -> None:
    shape = {"block_size": block_size, "buffer_size": buffer_size, "max_num_reqs": 4}
    model, prompts_of = model_of(tiny, name), random.Random(buffer_size)
    prompts, params = requests(prompts_of, 9)
    seen = []
    for run_ahead in ("off", "on"):
        with model.engine(**STRATEGIES[name][1], **shape, run_ahead=run_ahead) as engine:
            watched = Watched(engine, monkeypatch)
            outputs = engine.generate(prompts, params, summary=False)
            assert (engine._executor.runner.num_ahead_steps > 0) == (run_ahead == "on")
        assert all(real == held for real, held, _ in watched.rows)
        seen.append((answers(outputs), watched.decided))
    assert seen[0] == seen[1]
    assert len(seen[0][1]) > 80
    capacity = sum(count for *_, count in watched.rows) * block_size * buffer_size
    held = sum(held for _, held, _ in watched.rows)
    assert held < capacity if buffer_size > 1 else held == capacity


@pytest.mark.parametrize("name", STRATEGIES)
def test_heads_run_over_rows_that_decide_nothing_only_to_equal_the_loop(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Shifted logits and a dual cache have many such rows; a head of fewer rounds otherwise."""
    is_dual = name.startswith("dual")
    for run_ahead, buffer_size in [("on", 1), ("off", 1), ("on", 2), ("off", 2)]:
        if is_dual and buffer_size == 1:
            continue
        settings = {**STRATEGIES[name][1], "run_ahead": run_ahead, "buffer_size": buffer_size}
        with model_of(tiny, name).engine(**settings) as engine:
            runner = engine._executor.runner
            bucket = runner._graphs.shapes()[0]
            block_size, heads = engine.config.decoding.block_size, []
            monkeypatch.setattr(
                runner.model, "compute_logits", lambda h, heads=heads: heads.append(len(h)) or h
            )
            hidden = torch.arange(bucket.num_rows).view(-1, 1)
            rows = torch.tensor([3, 0, 2], dtype=torch.int32)
            assert runner._logits(rows, hidden, bucket).flatten().tolist() == rows.tolist()
        is_packed = buffer_size > 1 and not is_dual  # other rows than the loop's anyway
        is_spared = run_ahead == "off" and (name.endswith("_shifted") or name == "dual_blocks")
        has_all = not is_spared and not is_packed and name != "dual_cache"
        # Of two sub-blocks one is sampled.
        num_loop = bucket.num_reqs * block_size if is_dual else bucket.num_rows
        assert heads == [num_loop if has_all else 3]


@pytest.mark.parametrize("name", [*PACKING, "dual_cache"])
def test_the_loop_has_logits_of_rows_that_a_step_may_sample(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """And statistics of those that it does: `check_run_ahead` says that they are the scheduler's."""
    heads: list[tuple[int, int, int | None]] = []
    is_loop = False
    enqueue, inputs = DecodeLoop._enqueue, SamplerInputsBuilder.inputs

    def enqueued(self: DecodeLoop, variant: Any) -> None:
        nonlocal is_loop
        is_loop = True
        enqueue(self, variant)
        is_loop = False

    def watched(self: Any, views: Any, shape: Any, logits: Any, rows: Any = None) -> Any:
        if is_loop:
            num_read = None if rows is None else int((rows >= 0).sum())
            heads.append((logits.size(0), shape.num_reqs, num_read))
        return inputs(self, views, shape, logits, rows)

    monkeypatch.setattr(DecodeLoop, "_enqueue", enqueued)
    monkeypatch.setattr(SamplerInputsBuilder, "inputs", watched)
    settings = {**STRATEGIES[name][1], "block_size": 4, "buffer_size": 3, "max_num_reqs": 4}
    prompts, params = requests(random.Random(2), 9)
    with model_of(tiny, name).engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        engine.generate(prompts, params, summary=False)
        assert len(heads) >= engine._executor.runner.num_ahead_steps > 3
    per_request = 4 if name == "dual_cache" else 12
    assert all(num_logits == num_reqs * per_request for num_logits, num_reqs, _ in heads)
    if name == "dual_cache":
        assert all(num_read is None for *_, num_read in heads)
    else:
        num_read = sum(read for *_, read in heads if read is not None)
        assert 0 < num_read < sum(num_logits for num_logits, *_ in heads)


def test_a_batch_has_room_for_all_that_its_requests_might_run(tiny: TinyModel) -> None:
    """What a request runs in a step decides neither who else is in it nor who gets a page."""
    settings = {**FILL, "block_size": 8, "buffer_size": 3, "max_num_reqs": 5}
    prompts, _ = requests(random.Random(4), 10)
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    limits = {"max_num_batched_tokens": 112, "max_model_len": 96}
    with tiny.engine(**settings, **limits) as engine:
        batches: list[tuple[int, int]] = []
        complete = engine._scheduler.complete_step

        class Counting:
            def __getattr__(self, name: str) -> Any:
                return getattr(scheduler, name)

            def complete_step(self, plan: _core.StepPlan, output: _core.SamplerOutput) -> Any:
                if plan.kind == _core.PlanKind.DECODE:
                    batches.append((plan.num_reqs, plan.num_rows))
                return complete(plan, output)

        scheduler = engine._scheduler
        engine._loop._scheduler = Counting()  # type: ignore[assignment]
        engine.generate(prompts, params, summary=False)
        assert engine.stats().num_free_pages == engine.stats().num_pages
    assert max(num_reqs for num_reqs, _ in batches) == 4  # room for 24 rows each
    assert min(num_rows for num_reqs, num_rows in batches if num_reqs == 4) <= 112 - 24


def test_row_counts_of_packed_steps() -> None:
    assert packed_row_counts(1024) == (256, 384, 512, 768)
    assert packed_row_counts(128) == (32, 64, 96)
    assert packed_row_counts(96) == (32, 64)
    assert packed_row_counts(32) == packed_row_counts(16) == ()
    classes: Any = SimpleNamespace(bound=lambda *_: 64, bounds=lambda *_: (32, 64))
    graphs = DecodeGraphs({128: (1, 8)}, classes, is_packed=True)
    shapes = graphs.shapes()
    assert len(shapes) == len(set(shapes)) == 2 * (5 + 4)
    assert [b.num_rows for b in shapes] == sorted((b.num_rows for b in shapes), reverse=True)
    assert shapes[0] == Bucket(8, 128, 64)

    def bucket(num_reqs: int, num_rows: int, most: int = 128) -> Bucket | None:
        plan: Any = SimpleNamespace(
            kind=_core.PlanKind.DECODE,
            num_reqs=num_reqs,
            num_rows=num_rows,
            max_seqlen_q=most,
            max_context_len=1,
        )
        return graphs.bucket_for(plan)

    assert bucket(1, 32) == Bucket(1, 128, 64, 32)
    assert bucket(1, 97) == bucket(1, 128) == Bucket(1, 128, 64)
    assert bucket(2, 64) == bucket(8, 256) == Bucket(8, 128, 64, 256)
    assert bucket(3, 257) == Bucket(8, 128, 64, 384)
    assert bucket(8, 800) == Bucket(8, 128, 64)
    assert bucket(9, 288) is None
    assert bucket(1, 160, 160) is None  # a custom strategy that runs more


@pytest.mark.every(3)
@pytest.mark.parametrize("name", PACKING)
def test_padding_to_a_bucket_changes_no_result(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What CUDA does to every packed plan, on the CPU: rows that no request owns."""
    settings = {**STRATEGIES[name][1], "block_size": 4, "buffer_size": 8, "max_num_reqs": 5}
    model = model_of(tiny, name)
    prompts, _ = requests(random.Random(6), 9)
    params = [SamplingParams(max_tokens=12 + 3 * i, ignore_eos=True) for i in range(9)]
    with model.engine(**settings) as engine:
        expected = engine.generate(prompts, params, summary=False)
    with model.engine(**settings) as engine:
        runner = engine._executor.runner
        assert runner._graphs.is_packed
        monkeypatch.setattr(runner, "_is_cuda", True)
        monkeypatch.setattr(runner, "_on_device", contextlib.nullcontext)
        shapes = []
        run = runner._step_forward.run

        def counting(views: Any, num_rows: int, num_reqs: int, *args: Any) -> torch.Tensor:
            ends = views.first("cu_seqlens_q", num_reqs + 1)
            shapes.append((num_reqs, num_rows, num_rows - int(ends[-1])))
            return run(views, num_rows, num_reqs, *args)

        monkeypatch.setattr(runner._step_forward, "run", counting)
        outputs = engine.generate(prompts, params, summary=False)
    assert answers(outputs) == answers(expected)
    assert any(unowned for *_, unowned in shapes)


def plan_of(step_id: int, num_reqs: int, num_rows: int) -> Any:
    return SimpleNamespace(
        kind=_core.PlanKind.DECODE, step_id=step_id, num_reqs=num_reqs, num_rows=num_rows
    )


def test_the_host_takes_over_where_most_rows_are_void() -> None:
    share = RowShare(128, 10**11, HOST_LIMITS)
    assert not share.is_low(SimpleNamespace(kind=_core.PlanKind.PREFILL))  # type: ignore[arg-type]
    assert not share.is_low(plan_of(0, 1, 32))  # too few to gain anything
    assert share.is_low(plan_of(1, 2, 64))
    for step_id in range(2, 8):
        share.is_low(plan_of(step_id, 2, 256))
    assert not share.is_low(plan_of(8, 2, 256))  # (64 + 7 * 256) / 2048
    assert share.is_low(plan_of(9, 8, 1024 // 4)) is True
    for _ in range(20):
        assert share.is_low(plan_of(9, 8, 1024))  # a plan counts once, whoever asks
    for step_id in range(10, 17):
        share.is_low(plan_of(step_id, 8, 1024))
    assert not share.is_low(plan_of(17, 8, 1024))


def test_a_small_model_stays_on_the_device() -> None:
    """Its void rows cost less than the host."""
    assert not RowShare(128, 10**9, HOST_LIMITS).is_low(plan_of(0, 8, 1024 - 449))
    assert RowShare(128, 10**9, HOST_LIMITS).is_low(plan_of(0, 8, 1024 - 450))
    # The device does without the wait for the host.
    assert not RowShare(128, 10**9, LOOP_LIMITS).is_low(plan_of(0, 1, 128 - 49))
    assert RowShare(128, 10**9, LOOP_LIMITS).is_low(plan_of(0, 1, 128 - 50))
    assert not RowShare(64, 10**12, LOOP_LIMITS).is_low(plan_of(0, 1, 16))


def test_steps_that_fill_up_are_packed_a_while() -> None:
    """So that a share around the limit does not change how steps are run again and again."""
    share = RowShare(100, 10**11, LOOP_LIMITS)
    assert not share.is_low(plan_of(0, 2, 2 * 80))
    assert share.is_low(plan_of(1, 2, 2 * 79))
    for step_id in range(2, 20):
        assert share.is_low(plan_of(step_id, 2, 2 * 89))
    for step_id in range(20, 28):
        is_low = share.is_low(plan_of(step_id, 2, 2 * 90))
    assert not is_low
    assert not share.is_low(plan_of(28, 2, 2 * 85))
    share = RowShare(200, 10**11, HOST_LIMITS)  # the host packs as long as it gains
    assert share.is_low(plan_of(0, 2, 2 * 158))
    for step_id in range(1, 9):
        is_low = share.is_low(plan_of(step_id, 2, 2 * 162))
    assert not is_low


@pytest.mark.parametrize(("accept", "is_full"), [(0.9999, False), (0.0, True)])
@pytest.mark.parametrize("packer", ["loop", "host"])
def test_void_rows_are_left_out_where_there_are_many(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, packer: str, accept: float, is_full: bool
) -> None:
    """As on CUDA, with the CPU as the device: the same tokens, whoever packs a step. The host does it
    where ranks share a model."""
    settings: dict[str, Any] = {
        **{"block_size": 8, "buffer_size": 4, "max_num_reqs": 8},
        "decoding_thresholds": {"accept_threshold": accept, "add_block_threshold": 0.75},
    }
    for limits in (LOOP_LIMITS, HOST_LIMITS):
        monkeypatch.setattr(limits, "products", 0.0)
    prompts, _ = requests(random.Random(2), 8)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with tiny.engine(**settings) as engine:
        expected = engine.generate(prompts, params, summary=False)
    with tiny.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        monkeypatch.setattr(loop_of(engine), "_packed", None)
        whole = engine.generate(prompts, params, summary=False)
        num_whole = engine._executor.runner.num_ahead_steps
    monkeypatch.setattr(ModelRunner, "_wants_loop", lambda *_: True)
    with tiny.engine(**settings, check_run_ahead=True) as engine:
        loop = loop_of(engine)
        if packer == "host":
            share = RowShare(32, 1, HOST_LIMITS)
            monkeypatch.setattr(loop, "_packed", None)
            monkeypatch.setattr(loop, "_host_share", share)
        actual = engine.generate(prompts, params, summary=False)
        num_ahead = engine._executor.runner.num_ahead_steps
        num_steps, num_packed = engine.stats().num_decode_steps, loop.num_packed_steps
        alone = engine.generate(prompts[:1], params, summary=False)
        ahead_alone = engine._executor.runner.num_ahead_steps - num_ahead
        assert loop.num_packed_steps == num_packed  # 32 rows: nothing to gain
    assert answers(actual) == answers(expected) == answers(whole)
    assert answers(alone) == answers(expected[:1])
    assert ahead_alone > 3
    assert num_whole > 3
    if packer == "host":
        assert num_packed == 0
        assert 2 * num_ahead < num_steps if not is_full else num_ahead > 0
    else:
        assert num_ahead > 3
        assert is_full or 2 * num_packed > num_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "precision"),
    [(400, {}), (100, {"quantization": "int8", "kv_cache_dtype": "fp8_e4m3"})],
    ids=["as stored", "codes"],
)
def test_held_out_problems_in_whole_and_packed_steps(
    monkeypatch: pytest.MonkeyPatch, count: int, precision: dict[str, Any]
) -> None:
    """Problems of the demo, four blocks in flight: tokens and confidences, bit for bit."""
    problems = load_problems(demo_dir() / "heldout.jsonl")[:count]
    settings = {"device": "cpu", "dtype": "float32", "buffer_size": 4, "max_num_reqs": 16}
    settings |= precision
    seen = []
    for kind in ("host", "whole", "packed"):
        if kind == "packed":
            pack_every_step(monkeypatch)
        run_ahead = "off" if kind == "host" else "on"
        with Diffulex("demo", **settings, run_ahead=run_ahead) as engine:
            if kind == "whole":
                monkeypatch.setattr(loop_of(engine), "_packed", None)
            watched = Watched(engine, monkeypatch)
            chats = [[{"role": "user", "content": p.question}] for p in problems]
            prompts = [engine.tokenizer.apply_chat_template(chat) for chat in chats]
            outputs = engine.generate(prompts, SamplingParams(max_tokens=96), summary=False)
            if kind == "packed":
                assert loop_of(engine).num_packed_steps > count // 4
        seen.append((answers(outputs), watched.decided))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.cuda
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_packed_graphs_are_captured_once(
    tiny_cuda: TinyModel, monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    """A second run captures no graph and takes no memory; none of its steps lacks a graph."""
    torch.backends.cuda.matmul.allow_tf32 = False
    settings: dict[str, Any] = {
        **FILL,
        **{"block_size": 16, "buffer_size": 4, "max_num_reqs": 8},
        **{"enforce_eager": enforce_eager, "enable_prefix_caching": False},
    }
    prompts, _ = requests(random.Random(3), 8)
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    with tiny_cuda.engine(**settings, run_ahead="on") as engine:
        whole = engine.generate(prompts, params, summary=False)
    pack_every_step(monkeypatch)
    for run_ahead in ("off", "auto"):
        with tiny_cuda.engine(**settings, run_ahead=run_ahead) as engine:
            runner = engine._executor.runner
            first = engine.generate(prompts, params, summary=False)
            num_graphs, num_bytes = runner.num_graphs, torch.cuda.memory_allocated()
            second = engine.generate(prompts, params, summary=False)
            assert runner.num_graphs == num_graphs
            assert torch.cuda.memory_allocated() == num_bytes
            assert runner.num_graph_fallbacks == 0
            if not enforce_eager:
                forwards = runner._graphs.forwards
                assert forwards is not None
                assert any(bucket.packed_rows for bucket in forwards.captured)
        assert answers(first) == answers(second) == answers(whole)
