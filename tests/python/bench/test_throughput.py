# SPDX-License-Identifier: Apache-2.0
"""Synthetic load on an engine with random weights, and work that does not depend on them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from diffulex import Diffulex
from diffulex.bench.__main__ import main
from diffulex.bench.throughput import Load, fixed_work, measure
from diffulex.checkpoint.resolve import demo_dir
from diffulex.errors import ConfigError
from diffulex.trace.trajectory import TraceRecorder

ZOO = Path(__file__).parents[3] / "examples" / "zoo"
#: Of users' programs that read the file.
KEYS = {
    "requests", "input_tokens", "output_tokens", "steps", "prefill_steps", "decode_steps", "seconds",
    "steps_per_s", "ms_per_prefill_step", "ms_per_decode_step", "tokens_per_s",
    "decode_throughput_tok_s", "prefill_throughput_tok_s", "tpf_aggregate", "peak_pages", "num_pages",
    "kv_use", "graph_hit_rate", "host_time_share", "max_concurrency", "time_semantics",
    "token_semantics",
}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "model": "demo", "device": "cpu", "max_model_len": 128, "max_num_batched_tokens": 512,
    "num_pages": 64, "enable_prefix_caching": False, "load_format": "dummy",
}  # fmt: skip


def run(load: Load, **settings: Any) -> dict[str, Any]:
    with Diffulex(**{**SETTINGS, **settings}) as engine:
        return measure(engine, load)


@pytest.mark.parametrize("tpf", [1, 3, 8])
def test_fixed_work_takes_the_same_steps_whatever_the_weights_say(tpf: int) -> None:
    load = Load(num_prompts=1, input_len=16, output_len=24, num_warmup=0)
    settings = fixed_work({**SETTINGS, "buffer_size": 1, "block_size": 8}, tpf)
    figures = run(load, **settings)
    # Three blocks, the first of which begins in the prefill; all but the last are stored by a forward.
    assert figures["steps"] == 3 * -(-8 // tpf) + 2
    trained = run(load, **{**settings, "load_format": "auto"})
    assert (trained["steps"], trained["decode_steps"]) == (
        figures["steps"],
        figures["decode_steps"],
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tpf", "steps"),
    # d2f: blocks of 8 in company; fast_dllm_v2: sub-blocks of 8; a canvas of 32 in 8 steps, and stored.
    [("diffusion_gemma", 4, {9, 10}), ("fast_dllm_v2", 8, None), ("d2f_llada", 8, None)],
)
def test_other_strategies_are_fixed_as_well(name: str, tpf: int, steps: set[int] | None) -> None:
    settings = {**SETTINGS, "model": str(ZOO / name)}
    load = Load(num_prompts=2, input_len=16, output_len=32, num_warmup=0)
    dummy = run(load, **fixed_work(settings, tpf))
    trained = run(load, **fixed_work({**settings, "load_format": "auto"}, tpf))
    assert dummy["steps"] == trained["steps"]
    assert steps is None or dummy["steps"] in steps


def test_figures_follow_from_the_load() -> None:
    load = Load(num_prompts=5, input_len=20, output_len=16, input_range=0.5, num_warmup=1)
    figures = run(load, **fixed_work(SETTINGS, 4))
    assert figures.keys() == KEYS
    assert figures["requests"] == 5
    assert figures["steps"] == figures["prefill_steps"] + figures["decode_steps"]
    assert 5 * 10 <= figures["input_tokens"] <= 5 * 30
    assert figures["steps_per_s"] == pytest.approx(figures["steps"] / figures["seconds"])
    assert figures["tokens_per_s"] == pytest.approx(figures["output_tokens"] / figures["seconds"])
    assert 0 < figures["kv_use"] <= 1
    assert 0 < figures["host_time_share"] < 1
    assert figures["graph_hit_rate"] is None  # a CPU has none
    assert 1 < figures["tpf_aggregate"] <= 16
    again = run(load, **fixed_work(SETTINGS, 4))
    assert [again[key] for key in ("steps", "input_tokens", "output_tokens", "peak_pages")] == [
        figures[key] for key in ("steps", "input_tokens", "output_tokens", "peak_pages")
    ]


def test_requests_may_record_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[str] = []

    def recorder(level: str, *arguments: Any) -> TraceRecorder:
        levels.append(level)
        return TraceRecorder(level, *arguments)

    monkeypatch.setattr("diffulex.engine.ledger.TraceRecorder", recorder)
    plain = Load(num_prompts=2, input_len=8, output_len=8, num_warmup=1)
    traced = dataclasses.replace(plain, return_trajectory="full")
    with Diffulex(**fixed_work(SETTINGS, 4)) as engine:
        steps = measure(engine, plain)["steps"]
        assert levels == []
        assert measure(engine, traced)["steps"] == steps
    assert levels == 3 * ["full"]  # the warm-up as well


@pytest.mark.parametrize(
    ("settings", "tpf", "message"),
    [
        ({}, 9, "force_tpf: expected 1 to block_size 8, got 9"),
        ({}, 0, "force_tpf: expected 1 to block_size 8, got 0"),
        (
            {"model": str(ZOO / "edit_llada2"), "block_size": 32, "page_size": 32},
            4,
            "force_tpf: expected a sampler that fills masks",
        ),
    ],
)
def test_work_that_cannot_be_fixed_is_refused(
    settings: dict[str, Any], tpf: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fixed_work({**SETTINGS, "block_size": 8, **settings}, tpf)


def test_a_load_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected at most max_model_len 128 together, got 200"):
        run(Load(num_prompts=1, input_len=150, output_len=50))


def test_the_command_needs_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_dir() / name, model / name)
    arguments = [
        "throughput", "--model", str(model), "--load-format", "dummy", "--device", "cpu",
        "--num-prompts", "2", "--input-len", "16", "--output-len", "8", "--force-tpf", "4",
        "--max-model-len", "64", "--num-pages", "16", "--warmup", "0",
    ]  # fmt: skip
    path = tmp_path / "result.json"
    assert main([*arguments, "--output", str(path)]) == 0
    assert "ms per decode step" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert written["schema"] == "diffulex.bench.throughput"
    assert written.keys() >= KEYS | {"load", "machine", "engine", "command", "force_tpf"}
    # What the gate for CI reads.
    assert main(["compare", str(path), str(path), "--max-regression", "3%"]) == 0
    assert main([*arguments, "--output", str(tmp_path / "result.txt")]) == 2
    assert "--output: expected a .json file" in capsys.readouterr().err
