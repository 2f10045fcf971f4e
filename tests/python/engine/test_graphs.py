# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: buckets, and decoding that equals the eager path token for token."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex import SamplingParams
from diffulex.engine.output import GenerationOutputs
from diffulex.ops.workspace import attention_workspace_bytes
from diffulex.runner.attention_workspace import decode_workspace_bytes
from diffulex.runner.decode_graphs import Bucket, graph_buckets
from tiny_engine import TinyModel


@pytest.mark.parametrize(
    ("max_num_reqs", "expected"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (48, (1, 2, 4, 8, 16, 32, 48)),
        (5000, (1, 2, 4, 8, *range(16, 513, 16))),
    ],
)
def test_buckets(max_num_reqs: int, expected: tuple[int, ...]) -> None:
    assert graph_buckets(max_num_reqs) == expected


def test_workspace_suffices_for_every_bucket(tiny: TinyModel) -> None:
    """Small batches split the keys, so the largest bucket is not the one that needs the most."""
    spec, rows, length = tiny.facts.spec, 32, 4096
    buckets = graph_buckets(128)
    needs = [
        attention_workspace_bytes(
            bucket, spec.num_q_heads, spec.num_kv_heads, spec.head_dim, rows, length, 0, "cuda"
        )
        for bucket in buckets
    ]
    assert needs[-1] < max(needs)
    shapes = [Bucket(bucket, rows, length) for bucket in buckets]
    assert decode_workspace_bytes(spec, shapes, "cuda") == max(needs)


def requests(seed: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 40))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 24),
            ignore_eos=True,
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.getrandbits(64),
        )
        for _ in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize("max_num_reqs", [3, 8])
def test_dummy_requests_of_an_eager_step(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, max_num_reqs: int
) -> None:
    """What CUDA does to every decode plan, on CPU: padding changes no result."""
    settings: dict[str, Any] = {"block_size": 8, "buffer_size": 2, "max_num_reqs": max_num_reqs}
    prompts, params = requests(11, 7)
    with tiny.engine(**settings) as engine:
        expected = engine.generate(prompts, params, summary=False)
    with tiny.engine(**settings) as engine:
        runner = engine._executor.runner
        monkeypatch.setattr(runner._graphs, "buckets", {16: (2, max_num_reqs)})
        monkeypatch.setattr(runner, "_is_cuda", True)
        monkeypatch.setattr(runner, "_on_device", contextlib.nullcontext)
        num_padded = []
        forward = runner._forward

        def counting(views: Any, shape: Any, plan: Any, bucket: Any = None) -> torch.Tensor:
            num_padded.append(plan.num_padded_reqs)
            assert plan.kind.name != "DECODE" or plan.num_reqs in (2, max_num_reqs)
            assert (shape.num_rows, shape.num_reqs) == (plan.num_rows, plan.num_reqs)
            return forward(views, shape, plan, bucket)

        monkeypatch.setattr(runner, "_forward", counting)
        outputs = engine.generate(prompts, params, summary=False)
        assert any(num_padded)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [o.metrics.nfe for o in outputs] == [o.metrics.nfe for o in expected]


@pytest.mark.cuda
@pytest.mark.parametrize(("block_size", "buffer_size"), [(4, 1), (8, 3), (32, 2)])
@pytest.mark.parametrize("layout", ["unified", "distinct"])
def test_graph_decode_equals_eager_decode(
    tiny_cuda: TinyModel, block_size: int, buffer_size: int, layout: str
) -> None:
    settings: dict[str, Any] = {
        "block_size": block_size,
        "buffer_size": buffer_size,
        "kv_cache_layout": layout,
        "max_num_reqs": 11,
        "decoding_thresholds": {"accept_threshold": 0.3},
    }
    prompts, params = requests(block_size, 24)
    with tiny_cuda.engine(**settings) as engine:
        graphed = engine.generate(prompts, params, summary=False)
        assert engine._executor.runner.graph_buckets == (1, 2, 4, 8, 11)
        assert graphed.stats.num_graph_steps > 0
        assert graphed.stats.num_graph_fallbacks == 0
        # The same request alone uses another bucket.
        alone = engine.generate([prompts[3]], [params[3]], summary=False)
        assert alone[0].token_ids == graphed[3].token_ids
    with tiny_cuda.engine(**settings, enforce_eager=True) as engine:
        eager = engine.generate(prompts, params, summary=False)
        assert engine._executor.runner.graph_buckets == ()
        assert eager.stats.num_graph_steps == 0
    assert [o.token_ids for o in graphed] == [o.token_ids for o in eager]
    assert [o.metrics.nfe for o in graphed] == [o.metrics.nfe for o in eager]


@pytest.mark.cuda
def test_cuda_equals_cpu(tiny: TinyModel, tiny_cuda: TinyModel) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = {"block_size": 8, "buffer_size": 2}
    prompts, _ = requests(5, 6)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with tiny.engine(**settings) as engine:
        expected = engine.generate(prompts, params, summary=False)
    with tiny_cuda.engine(**settings) as engine:
        outputs = engine.generate(prompts, params, summary=False)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]


@pytest.mark.cuda
def test_page_pool_from_device_memory(tiny_cuda: TinyModel) -> None:
    # What other processes hold counts as used.
    free, total = torch.cuda.mem_get_info()
    share = min(1.0, 1.1 - free / total)
    settings = {"num_pages": -1, "gpu_memory_utilization": share, "enforce_eager": True}
    with tiny_cuda.engine(**settings) as engine:
        total = torch.cuda.get_device_properties(0).total_memory
        assert engine.config.cache.num_pages >= engine.config.pages_per_request
        assert engine._executor.runner.kv_cache.nbytes <= share * total
    with pytest.raises(ValueError, match="num_pages: expected memory for at least"):
        tiny_cuda.engine(**{**settings, "gpu_memory_utilization": 1e-6})


@pytest.mark.cuda
def test_static_runner_switch(tiny_cuda: TinyModel) -> None:
    with tiny_cuda.engine(enable_full_static_runner=False) as engine:
        assert engine._executor.runner.graph_buckets == ()


LONG: dict[str, Any] = {
    "block_size": 32,
    "buffer_size": 2,
    "page_size": 32,
    "max_model_len": 2560,
    "max_num_reqs": 11,
    "num_pages": 1100,
    "max_num_batched_tokens": 8192,
    "decoding_thresholds": {"accept_threshold": 0.8},
}


def long_requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Lengths from one page to the limit; every second prompt starts like the one before it."""
    rng = random.Random(count)
    lengths = (2400, 2410, 40, 700, 1500, 1530, 90, 2000, 300, 2300, 64, 1000, 1200)
    prompts: list[list[int]] = []
    for index in range(count):
        prompt = [rng.randrange(256) for _ in range(lengths[index % len(lengths)])]
        if index % 2:
            shared = min(len(prompts[-1]), len(prompt)) // 2
            prompt[:shared] = prompts[-1][:shared]
        prompts.append(prompt)
    params = [
        SamplingParams(max_tokens=rng.randint(20, 100), ignore_eos=True) for _ in range(count)
    ]
    return prompts, params


def long_run(
    model: TinyModel, batch_sizes: tuple[int, ...], **settings: Any
) -> list[GenerationOutputs]:
    """Batches in turn; within one, requests that join late prefill between decode steps."""
    with model.engine(**{**LONG, **settings}) as engine:
        runner = engine._executor.runner
        workspace = runner._step_forward.decode_workspace
        address = None if workspace is None else workspace.data_ptr()
        runs = [engine.generate(*long_requests(size), summary=False) for size in batch_sizes]
        if runner.graph_buckets:
            # The graphs read this memory for as long as they live, whatever eager steps needed.
            assert workspace is not None
            assert runner._step_forward.decode_workspace is workspace
            assert workspace.data_ptr() == address
            eager = runner._workspace.memory
            assert eager is None or eager.data_ptr() != address
    return runs


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["unified", "distinct"])
def test_long_contexts_with_graphs_and_eager_steps_in_turn(
    tiny_cuda_bf16: TinyModel, layout: str
) -> None:
    # Batches that fit a bucket, need padding, and are larger than the engine: 17 and 24 requests
    # share 11 places, so that prefills run between replays.
    sizes = (1, 3, 5, 9, 11, 17, 24, 2)
    graphed = long_run(tiny_cuda_bf16, sizes, kv_cache_layout=layout)
    eager = long_run(tiny_cuda_bf16, sizes, kv_cache_layout=layout, enforce_eager=True)
    assert sum(run.stats.num_graph_steps for run in graphed) > 0
    assert all(run.stats.num_graph_fallbacks == 0 for run in graphed)
    assert all(run.stats.num_graph_steps == 0 for run in eager)
    assert any(output.metrics.cached_tokens > 0 for run in graphed for output in run)
    for size, left, right in zip(sizes, graphed, eager, strict=True):
        assert [o.token_ids for o in left] == [o.token_ids for o in right], size
        assert [o.metrics.nfe for o in left] == [o.metrics.nfe for o in right], size


@pytest.mark.cuda
def test_graphs_survive_a_larger_eager_workspace(tiny_cuda_bf16: TinyModel) -> None:
    """The memory eager steps give back is overwritten; replays must not depend on it."""
    prompts, params = long_requests(3)
    with tiny_cuda_bf16.engine(**LONG, enable_prefix_caching=False) as engine:
        before = engine.generate(prompts, params, summary=False)
        runner = engine._executor.runner
        runner._workspace.release()
        junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
        after = engine.generate(prompts, params, summary=False)
        del junk
        assert [o.token_ids for o in after] == [o.token_ids for o in before]
        assert after.stats.num_graph_steps > 0


@pytest.mark.cuda
@pytest.mark.parametrize("run_ahead", ["auto", "off"])
def test_the_budget_counts_the_graphs(tiny_cuda_bf16: TinyModel, run_ahead: str) -> None:
    prompts, params = long_requests(3)
    watched = [dataclasses.replace(item, logprobs=1) for item in params]
    gc.collect()
    torch.cuda.empty_cache()  # lets go of the pools of earlier engines
    before = pool_bytes()
    with tiny_cuda_bf16.engine(**LONG, run_ahead=run_ahead) as engine:
        runner = engine._executor.runner
        memory = runner._graph_memory()
        assert memory is not None
        assert (memory.logits_rows > 0) == (run_ahead == "auto")
        reserved = memory.measure(engine.config, runner._call, runner._cache, runner._workspace)
        engine.generate(prompts, watched, summary=False)
        assert engine._executor.runner.num_graph_steps > 0
        assert 0 < pool_bytes() - before <= reserved


def pool_bytes() -> int:
    """What the memory pools of graphs hold."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


@pytest.mark.cuda
@pytest.mark.parametrize("num_failures", [1, 3])
def test_failed_steps_do_not_disturb_the_staging(
    tiny_cuda: TinyModel, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    """A step that fails after its upload leaves a copy in flight from the memory of its plan."""
    prompts, params = requests(7, 8)
    settings = {"block_size": 8, "buffer_size": 2, "enable_prefix_caching": False}
    with tiny_cuda.engine(**settings) as engine:
        expected = engine.generate(prompts, params, summary=False)
        ids = [engine.add_request(p, s) for p, s in zip(prompts, params, strict=True)]
        runner, loop = engine._executor.runner, engine._executor.runner._decode_loop
        assert loop is not None
        calls = 0

        def failing(run: Callable[..., Any]) -> Callable[..., Any]:
            def fail_first(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls <= num_failures:
                    torch.cuda._sleep(50_000_000)
                    raise RuntimeError("injected")
                return run(*args)

            return fail_first

        # A step ends in one of the two: on the host, or in the loop of the device.
        monkeypatch.setattr(runner, "_sample", failing(runner._sample))
        monkeypatch.setattr(loop, "_launch", failing(loop._launch))
        for _ in range(20):  # a step without ACTIVE blocks samples nothing
            if calls < num_failures:
                with contextlib.suppress(RuntimeError):
                    engine.step()
        assert calls == num_failures
        done = {}
        while engine.has_unfinished():
            done.update({s.req_id: s.output for s in engine.step() if s.output is not None})
        assert [done[i].token_ids for i in ids] == [o.token_ids for o in expected]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_engine_beside_the_current_device(
    tiny_cuda: TinyModel, tmp_path: Path, enforce_eager: bool
) -> None:
    settings: dict[str, Any] = {"block_size": 8, "buffer_size": 2, "enforce_eager": enforce_eager}
    prompts, params = requests(3, 12)
    with tiny_cuda.engine(**settings) as engine:
        expected = engine.generate(prompts, params, summary=False)
    other = TinyModel(tmp_path, "cuda:1")
    with torch.cuda.device(0), other.engine(**settings) as engine:
        for _ in range(3):
            outputs = engine.generate(prompts, params, summary=False)
            assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        assert (outputs.stats.num_graph_steps > 0) != enforce_eager
        assert torch.cuda.current_device() == 0
        assert engine._executor.runner.kv_cache.layer(0)[0].device == torch.device("cuda", 1)
