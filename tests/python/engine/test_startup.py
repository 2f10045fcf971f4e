# SPDX-License-Identifier: Apache-2.0
"""What an engine says when it is ready: kernels, memory plan, graphs; and what it refuses."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex import Diffulex
from diffulex.distributed.executor import Prepared
from diffulex.engine.metrics import RunStats
from diffulex.engine.startup import check_fast_paths, startup_lines
from diffulex.errors import ConfigError
from diffulex.profiling.kernel_choices import KernelChoice
from diffulex.profiling.memory import MemoryReport, tensor_bytes
from diffulex.profiling.platform import Platform
from diffulex.runner.decode_graphs import DecodeGraphs
from diffulex_ext import _core
from tiny_engine import TinyModel

MIB = 1 << 20


def test_the_block(tiny: TinyModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "diffulex.engine"), tiny.engine(max_num_reqs=4) as engine:
        (record,) = [r for r in caplog.records if r.name == "diffulex.engine.startup"]
        lines = record.getMessage().splitlines()
        report = engine.memory_report()
        kernels = engine.prepared.kernels
    assert lines[0].startswith("Diffulex ")
    assert "no CUDA" in lines[0] or "CUDA 1" in lines[0]
    assert len(lines) <= 25
    text = "\n".join(lines)
    assert [f"  kernel       {choice}" for choice in kernels] == [
        line for line in lines if line.startswith("  kernel ")
    ]
    assert f"  memory MiB   weights {report.weights / MIB:.1f}, kv pool" in text
    assert "  graphs       none: cpu has none" in text
    assert "  concurrency  4 requests of 128 tokens at once" in text
    assert "  template     of the tokenizer" in text or "  template     none" in text


def test_the_block_of_a_device(tiny: TinyModel) -> None:
    """With graphs, the longest there is."""
    choices = tuple(KernelChoice(f"op {i}", "k", "r") for i in range(6))
    prepared = Prepared(1 << 30, (1, 2, 4), "", 2.5, choices)
    memory = MemoryReport(1 * MIB, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB, 6 * MIB, 7, 8 * MIB, 9, 10)
    lines = startup_lines(tiny.config(num_pages=8), prepared, memory, None)
    assert len(lines) <= 25
    assert "  graphs       requests 1, 2, 4, captured in 2.5 s" in lines
    assert "graph pools 5.0, sampler state 6.0" in "\n".join(lines)
    assert "reserved 8.0" in "\n".join(lines)
    assert "  concurrency  2 requests of 128 tokens at once" in lines


def test_memory_report(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        report = engine.memory_report()
        assert engine._executor.runner.kv_cache.nbytes == report.kv_pool
    parameters = sum(p.nbytes for p in tiny.model.parameters())
    # Weights that were packed are no parameters any more.
    assert report.weights >= max(parameters, 1)
    assert report.step_buffers > 1000
    assert report.sampler_state > 0
    assert report.graph_pools == 0
    assert report.reserved is report.device_total is None
    assert set(report.as_dict()) >= {"weights", "kv_pool", "workspace", "graph_pools", "reserved"}
    with pytest.raises(RuntimeError, match="open engine"):
        engine.memory_report()


def test_bytes_of_tensors() -> None:
    big, small = torch.zeros(1000), torch.zeros(10)
    holder: dict[str, Any] = {"a": big, "b": [big[:10], (small, {"c": small})], "d": "text"}
    holder["self"] = holder
    assert tensor_bytes(holder) == 4040
    assert tensor_bytes(holder, without=[big]) == 40
    module = torch.nn.Linear(8, 4)
    module.register_buffer("extra", torch.zeros(5))
    assert tensor_bytes(module, module) == 4 * (32 + 4 + 5)
    assert tensor_bytes(None, object()) == 0


def test_only_fast_paths(tiny: TinyModel) -> None:
    config = tiny.config(require_fast_paths=True)
    fast, slow = KernelChoice("a", "k", "r"), KernelChoice("b", "portable", "old", is_fast=False)
    check_fast_paths(config, Prepared(0, (), "cpu has none", 0.0, (fast,)))
    check_fast_paths(tiny.config(), Prepared(0, (), "", 0.0, (slow,)))
    with pytest.raises(ConfigError, match=r"expected no slower path, got b: portable \(old\)$"):
        check_fast_paths(config, Prepared(0, (), "", 0.0, (fast, slow)))
    device = SimpleNamespace(kernel=config.kernel, model=SimpleNamespace(device="cuda:0"))
    with pytest.raises(ConfigError, match=r"got decode steps: no graphs \(enforce_eager is set\)"):
        check_fast_paths(device, Prepared(0, (), "enforce_eager is set", 0.0, (fast,)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quantization": "int8"}, {"int8 products", "dense products"}),
        ({"quantization": "fp8_block", "quantize_head": True}, {"fp8_block products"}),
        ({"quantization": "int4", "quantize_head": True}, {"int4 products", "int8 products"}),
    ],
)
def test_the_log_names_the_products_of_low_precision(
    tiny: TinyModel, settings: dict[str, Any], expected: set[str]
) -> None:
    """Those of the weights that are there; without a dense one none is a slower path of bfloat16."""
    given: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 128, **settings}
    has_dense = "dense products" in expected
    with Diffulex(str(tiny.directory), require_fast_paths=not has_dense, **given) as engine:
        found = {choice.op for choice in engine.prepared.kernels}
        lines = startup_lines(engine.config, engine.prepared, engine.memory_report(), None)
    assert found - {"ops"} == expected
    for op in expected:
        assert any(line.startswith(f"  kernel       {op}: ") for line in lines)
    if has_dense:
        with pytest.raises(ConfigError, match="got dense products: torch"):
            Diffulex(str(tiny.directory), require_fast_paths=True, **given)


def test_an_engine_refuses_a_slower_path(tiny: TinyModel, monkeypatch) -> None:
    with tiny.engine(require_fast_paths=True) as engine:
        assert all(choice.is_fast for choice in engine.prepared.kernels)
    old = Platform(None, (), None, "v4", ("v3",))
    monkeypatch.setattr(Platform, "of", lambda *_, **__: old)
    with pytest.raises(
        ConfigError, match=r"require_fast_paths: .*the build has no AVX-512 kernels"
    ):
        tiny.engine(require_fast_paths=True)
    tiny.engine().close()


def test_a_step_without_a_graph_is_an_error_where_only_graphs_will_do() -> None:
    plan: Any = SimpleNamespace(
        kind=_core.PlanKind.DECODE, uniform_q_len=8, num_reqs=5, max_context_len=1
    )
    classes: Any = SimpleNamespace(bound=lambda *_: 64)
    for is_strict in (False, True):
        graphs = DecodeGraphs({8: (1, 4)}, classes, is_strict=is_strict)
        assert graphs.bucket_for(plan) is None  # there are none at all
        graphs.forwards = object()  # type: ignore[assignment]
        if is_strict:
            with pytest.raises(RuntimeError, match="for every decode step, 5 requests exceed"):
                graphs.bucket_for(plan)
        else:
            assert graphs.bucket_for(plan) is None
            assert graphs.num_fallbacks == 1


def test_graphs_of_runs() -> None:
    first = RunStats(num_graphs=4, num_graph_steps=10, num_graph_fallbacks=1)
    first.add_step(0.5, 3, 24, 0)
    total = first.merged(RunStats(num_graphs=6, num_graph_steps=5))
    assert (total.num_graphs, total.num_graph_steps, total.num_graph_fallbacks) == (6, 15, 1)
    assert total.num_forwards == 3


def test_graphs_are_counted(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffulex.runner.model_runner import ModelRunner

    with tiny.engine() as engine:
        monkeypatch.setattr(ModelRunner, "num_graphs", 7)
        result = engine.generate([[1, 2, 3]], max_tokens=8, summary=False)
        assert result.stats.num_graphs == engine.run_stats.num_graphs == 7
        assert result.as_dict()["num_graphs"] == 7
        assert "CUDA graphs       7, 0 steps with one, 0 decode steps" in result.summary()
        assert result.stats.num_forwards == result[0].metrics.nfe
