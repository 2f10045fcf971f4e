# SPDX-License-Identifier: Apache-2.0
"""Pauses, other weights and adapters between two steps of an engine."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffulex import CheckpointError, ConfigError, Diffulex, SamplingParams
from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.checkpoint.lora import MergePlan
from diffulex.config.config import Config
from diffulex.config.types import ModelFacts
from diffulex.update import live_weights
from fixtures.adapters import QWEN_TARGETS, AdapterBuilder
from fixtures.checkpoints import CheckpointBuilder, random_tensors, tiny_config
from fixtures.families import DENSE_FAMILIES, family_builder
from fixtures.gemma import GemmaOracle
from fixtures.moe_families import MOE_FAMILIES, moe_builder
from fixtures.quick import quick
from tiny_engine import TinyModel

LIMITS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 128,
    "num_pages": 64,
    "max_num_reqs": 4,
}
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(5, 45)), [7, 9, 11]]
FAMILIES = (*DENSE_FAMILIES, *MOE_FAMILIES, "diffusion_gemma")


def write(family: str, seed: int, directory: Path) -> None:
    if family == "diffusion_gemma":
        GemmaOracle(seed=seed).write(directory)
    else:
        builder = moe_builder if family in MOE_FAMILIES else family_builder
        builder(family, seed=seed).write(directory)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors.update(load_file(file))
    return tensors


def engine_of(directory: Path, **settings: Any) -> Diffulex:
    if (directory / "tokenizer.json").is_file():
        return Diffulex(str(directory), **{**LIMITS, **settings})
    name, spec, info = detect(directory)
    facts = ModelFacts(name, directory, spec, info.engine_defaults)
    limits = {**LIMITS, "max_model_len": 64, "page_size": 8}
    config = Config.resolve(str(directory), facts, {**limits, **settings})
    model = load_model(name, spec, directory, torch.float32, "cpu")
    return Diffulex.from_components(config, model, None)


def tokens(engine: Diffulex, prompts: Any = None) -> list[Any]:
    outputs = engine.generate(prompts or PROMPTS, GREEDY, summary=False)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("family", "way"),
    quick(
        [(family, way) for family in FAMILIES for way in ("tensors", "directory")],
        [("sdar", "directory"), ("sdar", "tensors"), ("dream", "tensors"), ("llada2", "tensors")],
    ),
)
def test_new_weights_decode_as_an_engine_that_started_with_them(
    family: str, way: str, tmp_path: Path
) -> None:
    name = {"model_name": family} if family == "diffucoder" else {}
    old, new = tmp_path / "old", tmp_path / "new"
    write(family, 0, old)
    write(family, 1, new)
    with engine_of(new, **name) as engine:
        expected = tokens(engine)
    with engine_of(old, **name) as engine:
        before = tokens(engine)
        assert before != expected
        given: Any = new if way == "directory" else stored(new)
        # The image tower of DiffusionGemma is not loaded.
        used = [name for name in stored(new) if "vision" not in name]
        assert engine.update_weights(given) == len(used)
        assert tokens(engine) == expected
        engine.update_weights(old if way == "directory" else iter(stored(old).items()))
        assert tokens(engine) == before


def test_a_few_tensors_change_alone_and_are_rounded_to_the_engines_type(tmp_path: Path) -> None:
    write("sdar", 0, tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    other = stored(tmp_path)[name].double() * 2
    with engine_of(tmp_path, dtype="bfloat16") as engine:
        assert engine.update_weights({name: other}) == 1
        changed = engine._executor.runner.model.weight_table()
        expected = stored(tmp_path) | {name: other}
        for key, value in expected.items():
            assert torch.equal(changed[key], value.bfloat16()), key


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_requests_keep_their_tokens_and_go_on_with_the_new_weights(
    tiny: TinyModel, run_ahead: str
) -> None:
    # One block a forward, so that a request stands between two blocks after a step.
    settings = {
        "run_ahead": run_ahead,
        "buffer_size": 1,
        "decoding_thresholds": {"accept_threshold": 0.0},
    }
    other = random_tensors(tiny_config(), seed=5)
    with tiny.engine(**settings) as engine:
        old = tokens(engine, [PROMPTS[0]])[0]
    own = {name: tensor.clone() for name, tensor in tiny.model.weight_table().items()}
    try:
        with tiny.engine(**settings) as engine:
            req_id = engine.add_request(PROMPTS[0], GREEDY)
            record = engine.record(req_id)
            written: list[int] = []
            while len(written) < 4:
                for step in engine.step():
                    written += step.token_ids
            engine.update_weights(other)
            done: list[Any] = []
            while engine.has_unfinished():
                done += [step.output for step in engine.step() if step.output is not None]
            assert record.req_id == req_id
            result = list(done[0].token_ids)
            kept = len(written)
            assert result[:kept] == list(old)[:kept] == written
            rest = SamplingParams(max_tokens=len(result) - kept, ignore_eos=True)
            again = engine.generate([PROMPTS[0] + written], rest, summary=False)[0]
            assert result[kept:] == list(again.token_ids)
            assert result != list(old)
    finally:
        with tiny.engine() as engine:
            engine.update_weights(own)


def test_refused_weights_change_nothing(tmp_path: Path) -> None:
    write("sdar", 0, tmp_path / "old")
    write("sdar", 1, tmp_path / "new")
    new = stored(tmp_path / "new")
    norm, table = "model.norm.weight", "model.embed_tokens.weight"
    spoiled = new[norm].clone()
    spoiled[3] = float("nan")
    bad: list[tuple[Any, str]] = [
        ({**new, "model.nothing": new[norm]}, "expected only tensors of the model, got model.noth"),
        ({**new, norm: new[norm][1:]}, r"norm.weight: expected shape \[64\], got \[63\]"),
        ({**new, norm: new[norm].long()}, "norm.weight: expected one of .*, got torch.int64"),
        ({**new, norm: spoiled}, "norm.weight: expected finite values, got NaN"),
        ({**new, norm: [1.0]}, "norm.weight: expected a tensor, got list"),
        ([(norm, new[norm]), (norm, new[norm])], "norm.weight: expected one tensor, got two"),
        ({}, "expected at least one tensor, got none"),
        (tmp_path / "none", "expected a directory, got"),
    ]
    for name, edit in {
        "missing": lambda found: found.pop(table),
        "nan": lambda found: found.update({norm: spoiled}),
    }.items():
        shutil.copytree(tmp_path / "new", tmp_path / name)
        found = dict(new)
        edit(found)
        for file in (tmp_path / name).glob("*.safetensors*"):
            file.unlink()
        save_file(found, tmp_path / name / "model.safetensors")
    bad += [
        (tmp_path / "missing", "missing tensors: model.embed_tokens.weight"),
        (str(tmp_path / "nan"), "norm.weight: expected finite values"),
    ]
    shutil.copytree(tmp_path / "new", tmp_path / "other")
    config = json.loads((tmp_path / "other/config.json").read_text())
    config["rope_theta"] = 7.0
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    bad.append((tmp_path / "other", "config.json: expected rope_theta 1000000.0 .*, got 7.0"))
    with engine_of(tmp_path / "old") as engine:
        before = tokens(engine)
        for given, message in bad:
            with pytest.raises(CheckpointError, match=message):
                engine.update_weights(given)
            assert tokens(engine) == before, message


@pytest.mark.parametrize("way", ["tensors", "directory"])
def test_values_that_the_engines_type_cannot_hold_are_refused(way: str, tmp_path: Path) -> None:
    write("sdar", 0, tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    norm = "model.norm.weight"
    large = {norm: torch.full((64,), 65519.0)}  # rounds to the largest of float16
    over = {norm: torch.full((64,), -65520.0)}
    with engine_of(tmp_path / "old", dtype="float16") as engine:
        before = tokens(engine)
        for tensors in (over, large):
            given: Any = tensors
            if way == "directory":
                given = tmp_path / "new"
                for file in given.glob("*.safetensors*"):
                    file.unlink()
                save_file({**stored(tmp_path / "old"), **tensors}, given / "model.safetensors")
            if tensors is large:
                engine.update_weights(given)
                break
            message = rf"{norm}: expected values that torch.float16 can hold, got one of 65520"
            with pytest.raises(CheckpointError, match=message):
                engine.update_weights(given)
            assert tokens(engine) == before
        table = engine._executor.runner.model.weight_table()
        assert table[norm].isfinite().all()


@pytest.mark.parametrize("layout", ["fused", "stacked", "stacked_weight"])
def test_any_part_of_the_experts_changes_alone(layout: str, tmp_path: Path) -> None:
    write("sdar_moe", 0, tmp_path)
    with engine_of(tmp_path) as engine:
        model = engine._executor.runner.model
        names = [name for name in model.weight_table() if name.endswith(".0.up_proj.weight")]
        prefix = names[0].rpartition(".0.")[0]
        suffix = ".weight" if layout == "stacked_weight" else ""
        up_name = "gate_up_proj" if layout == "fused" else f"up_proj{suffix}"
        whole = [f"{prefix}.{up_name}", f"{prefix}.down_proj{suffix}"]
        table = model.weight_table_for(set(whole))
        for part in whole:
            given = table[part] * 2
            assert engine.update_weights({part: given}) == 1
            assert torch.equal(model.weight_table_for(set(whole))[part], given)


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Lets the copy into the weight of this number fail, once."""
    count, copy = 0, live_weights._write

    def write(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise error
        copy(*arguments)

    monkeypatch.setattr(live_weights, "_write", write)


@pytest.mark.parametrize("way", ["tensors", "directory"])
def test_a_mixture_of_weights_is_never_served(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("sdar", 0, tmp_path / "old")
    write("sdar", 1, tmp_path / "new")
    new = stored(tmp_path / "new")
    with engine_of(tmp_path / "new") as engine:
        expected = tokens(engine)
    with engine_of(tmp_path / "old") as engine:
        engine.add_request(PROMPTS[0], GREEDY)
        engine.step()
        fail_at(monkeypatch, 6, torch.OutOfMemoryError("no room"))
        given: Any = tmp_path / "new" if way == "directory" else new
        with pytest.raises(torch.OutOfMemoryError):
            engine.update_weights(given)
        assert engine.has_broken_weights
        message = r"expected whole weights, got some old and some new \(update_weights: no room\)"
        for call in (
            engine.step,
            lambda: tokens(engine),
            lambda: engine.score([[1, 2, 3]], [(1, 3)]),
        ):
            with pytest.raises(RuntimeError, match=message):
                call()
        # The rest of the weights would still be a mixture, and an adapter would hide it.
        with pytest.raises(CheckpointError, match="missing tensors"):
            engine.update_weights({"model.norm.weight": new["model.norm.weight"]})
        with pytest.raises(ConfigError, match="load_lora: expected whole weights, got a mixture"):
            engine.load_lora(tmp_path)
        assert engine.has_broken_weights
        engine.update_weights(given)
        assert not engine.has_broken_weights
        while engine.has_unfinished():
            engine.step()
        assert tokens(engine) == expected


@pytest.mark.parametrize("first", [None, "lora0"])
def test_an_adapter_that_fails_midway_can_be_taken_out(
    first: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = family_builder("dream").write(tmp_path / "base")
    for seed in (0, 1):
        AdapterBuilder(QWEN_TARGETS, seed=seed).write(tmp_path / f"lora{seed}", base)
    with engine_of(tmp_path / "base") as engine:
        before = tokens(engine)
        if first is not None:
            engine.load_lora(tmp_path / first)
        num_left, apply = 3, MergePlan.apply

        def failing(*arguments: Any) -> torch.Tensor:
            nonlocal num_left
            num_left -= 1
            if num_left == 0:
                raise KeyboardInterrupt
            return apply(*arguments)

        monkeypatch.setattr(MergePlan, "apply", failing)
        with pytest.raises(KeyboardInterrupt):
            engine.load_lora(tmp_path / "lora1")
        with pytest.raises(RuntimeError, match=r"new \(load_lora: KeyboardInterrupt\)"):
            engine.generate(PROMPTS, GREEDY, summary=False)
        assert engine.unload_lora() == 8
        assert tokens(engine) == before
        table = engine._executor.runner.model.weight_table()
        assert all(torch.equal(table[name], value) for name, value in base.items())


class PlanLog:
    """An observer that keeps the requests of every plan."""

    def __init__(self) -> None:
        self.plans: list[list[int]] = []

    def before_step(self, plan: Any) -> None:
        self.plans.append(plan.req_ids.tolist())

    def after_step(self) -> None: ...


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_refused_calls_cost_requests_nothing(tiny: TinyModel, run_ahead: str) -> None:
    norm = "model.norm.weight"
    bad: list[Any] = [
        lambda engine: engine.update_weights({norm: torch.ones(3)}),
        lambda engine: engine.update_weights({norm: torch.full((64,), float("nan"))}),
        lambda engine: engine.load_lora(Path(__file__).parent),
        Diffulex.unload_lora,
    ]
    with tiny.engine(run_ahead=run_ahead) as engine:
        expected = tokens(engine)
        ahead = engine._executor.counts.ahead
    with tiny.engine(run_ahead=run_ahead) as engine:
        req_ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        done: dict[int, Any] = {}
        while engine.has_unfinished():
            cached = engine.stats().num_cached_units
            for call in bad:
                with pytest.raises((CheckpointError, ConfigError)):
                    call(engine)
            stats = engine.stats()
            assert (stats.num_preemptions, stats.num_cached_units) == (0, cached)
            done |= {s.req_id: s.output.token_ids for s in engine.step() if s.output is not None}
        assert [done[req_id] for req_id in req_ids] == expected
        assert engine._executor.counts.ahead == ahead
        assert (ahead > 0) == (run_ahead == "on")


def test_requests_keep_their_order(tiny: TinyModel) -> None:
    own = dict(tiny.model.weight_table())
    with tiny.engine() as engine:
        log = PlanLog()
        req_ids = [engine.add_request([5 + i, 6, 7], GREEDY) for i in range(4)]
        while engine.stats().num_running < len(req_ids):
            engine.step()
        for _ in range(2):
            engine.update_weights(own)
            assert engine.stats().num_waiting == len(req_ids)
            engine._executor.observer = log
            engine.step()
        assert log.plans == [req_ids, req_ids]


def test_a_tied_head_needs_one_value(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    CheckpointBuilder(config=config).write(tmp_path / "old")
    new = CheckpointBuilder(config=config, seed=1).write(tmp_path / "new")
    table = new["model.embed_tokens.weight"]
    with engine_of(tmp_path / "new") as engine:
        expected = tokens(engine)
    with engine_of(tmp_path / "old") as engine:
        with pytest.raises(CheckpointError, match=r"expected equal values .*ties them"):
            engine.update_weights({**new, "lm_head.weight": table + 1})
        engine.update_weights({**new, "lm_head.weight": table})
        assert tokens(engine) == expected
        engine.update_weights(tmp_path / "old")
        assert tokens(engine) != expected
        engine.update_weights(tmp_path / "new")
        assert tokens(engine) == expected


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_comes_and_goes(tmp_path: Path, dtype: str) -> None:
    base = family_builder("dream", dtype=getattr(torch, dtype)).write(tmp_path / "base")
    for seed in (0, 1):
        AdapterBuilder(QWEN_TARGETS, seed=seed).write(tmp_path / f"lora{seed}", base)
    settings = {"dtype": dtype}
    lora = {"use_lora": True, "lora_path": str(tmp_path / "lora1"), "pre_merge_lora": True}
    with engine_of(tmp_path / "base", **settings, **lora) as engine:
        expected = tokens(engine)
        with pytest.raises(ConfigError, match="without a merged adapter"):
            engine.update_weights(base)
    with engine_of(tmp_path / "base", **settings) as engine:
        before = tokens(engine)
        assert before != expected
        with pytest.raises(ConfigError, match="expected an adapter of load_lora, got none"):
            engine.unload_lora()
        assert engine.load_lora(tmp_path / "lora0") == 8
        assert engine.load_lora(str(tmp_path / "lora1")) == 8  # instead of the first
        assert tokens(engine) == expected
        with pytest.raises(ConfigError, match="unload_lora first"):
            engine.update_weights(base)
        with pytest.raises(CheckpointError, match=r"expected a file adapter_config\.json"):
            engine.load_lora(tmp_path / "base")
        assert tokens(engine) == expected
        assert engine.unload_lora() == 8
        assert tokens(engine) == before
        table = engine._executor.runner.model.weight_table()
        for name, value in base.items():
            assert torch.equal(table[name], value), name


def test_an_adapter_beside_the_weights_stays_and_takes_no_other(tmp_path: Path) -> None:
    base = family_builder("dream").write(tmp_path / "base")
    AdapterBuilder(QWEN_TARGETS).write(tmp_path / "lora", base)
    lora = {"use_lora": True, "lora_path": str(tmp_path / "lora")}
    with engine_of(tmp_path / "base", **lora) as engine:
        expected = tokens(engine)
        engine.update_weights({name: tensor * 2 for name, tensor in base.items()})
        assert tokens(engine) != expected
        engine.update_weights(base)
        assert tokens(engine) == expected
        with pytest.raises(ConfigError, match="expected an engine that started without use_lora"):
            engine.load_lora(tmp_path / "lora")


def test_a_family_without_adapters_says_so(tmp_path: Path) -> None:
    base = family_builder("dream").write(tmp_path / "dream")
    AdapterBuilder(QWEN_TARGETS).write(tmp_path / "lora", base)
    write("diffusion_gemma", 0, tmp_path / "gemma")
    with (
        engine_of(tmp_path / "gemma") as engine,
        pytest.raises(CheckpointError, match="expected a family with adapters"),
    ):
        engine.load_lora(tmp_path / "lora")


def test_derived_weights_keep_their_place(tmp_path: Path) -> None:
    write("diffusion_gemma", 0, tmp_path)
    with engine_of(tmp_path) as engine:
        experts = [layer.experts for layer in engine._executor.runner.model.decoder_layers]
        places = [item._norm_weight.data_ptr() for item in experts]
        values = [item._norm_weight.clone() for item in experts]
        scales = {k: v * 2 for k, v in stored(tmp_path).items() if k.endswith("router.scale")}
        assert engine.update_weights(scales) == len(experts)
        assert [item._norm_weight.data_ptr() for item in experts] == places
        for item, value in zip(experts, values, strict=True):
            assert torch.equal(item._norm_weight, value * 2)


def test_a_paused_engine_takes_requests_and_runs_none(tiny: TinyModel) -> None:
    with tiny.engine() as engine:
        expected = tokens(engine)
        first = engine.add_request(PROMPTS[0], GREEDY)
        engine.step()
        engine.pause()
        engine.pause()
        assert engine.is_paused
        second = engine.add_request(PROMPTS[1], GREEDY)
        assert engine.has_unfinished()
        for call in (
            engine.step,
            lambda: tokens(engine),
            lambda: next(engine.stream(PROMPTS[0], GREEDY)),
        ):
            with pytest.raises(RuntimeError, match=r"expected an engine that runs, got a paused"):
                call()
        engine.resume()
        engine.resume()
        done: dict[int, Any] = {}
        while engine.has_unfinished():
            done |= {s.req_id: s.output.token_ids for s in engine.step() if s.output is not None}
        assert [done[first], done[second]] == expected
        assert tokens(engine) == expected


class Gate:
    """An observer that holds every step until it is open."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.has_begun, self.is_open = threading.Event(), threading.Event()

    def before_step(self, plan: Any) -> None:
        self.num_steps += 1
        self.has_begun.set()
        assert self.is_open.wait(60)

    def after_step(self) -> None: ...


def streamed(engine: Diffulex) -> list[Any]:
    events = list(engine.stream(PROMPTS[0], GREEDY))
    return [tuple(token for event in events for token in event.token_ids)]


@pytest.mark.parametrize("call", [tokens, streamed])
def test_a_call_under_way_waits_while_another_thread_pauses(tiny: TinyModel, call: Any) -> None:
    own = dict(tiny.model.weight_table())
    gate = Gate()
    with tiny.engine() as engine, ThreadPoolExecutor(2) as pool:
        expected = [tuple(item) for item in call(engine)]
        engine._executor.observer = gate
        answer = pool.submit(call, engine)
        assert gate.has_begun.wait(60)
        engine.pause(wait=False)  # the step goes on
        engine.resume()
        pause = pool.submit(engine.pause)
        with pytest.raises(TimeoutError):
            pause.result(0.1)
        gate.is_open.set()
        pause.result(60)
        num_steps = gate.num_steps
        for _ in range(20):
            assert engine.update_weights(own) == len(own)
        assert not answer.done()
        assert gate.num_steps == num_steps
        engine.resume()
        assert [tuple(item) for item in answer.result(60)] == expected
        # Closing ends the wait as well.
        gate.has_begun.clear()
        gate.is_open.clear()
        answer = pool.submit(call, engine)
        assert gate.has_begun.wait(60)
        engine.pause(wait=False)
        gate.is_open.set()
        engine.pause()
        engine.close()
        with pytest.raises(RuntimeError, match="expected an open engine"):
            answer.result(60)


def test_weights_do_not_change_during_a_step(tiny: TinyModel) -> None:
    own = dict(tiny.model.weight_table())
    with tiny.engine() as engine:

        def update(event: object) -> None:
            with engine._loop.exclusive():
                engine.update_weights(own)

        with pytest.raises(RuntimeError, match="got a call during a step"):
            engine.generate(PROMPTS, GREEDY, summary=False, stream_callback=update)
        before = tokens(engine)
        engine.generate(
            PROMPTS, GREEDY, summary=False, stream_callback=lambda _: engine.update_weights(own)
        )
        assert tokens(engine) == before
    with pytest.raises(RuntimeError, match="expected an open engine"):
        engine.update_weights(own)
    with pytest.raises(RuntimeError, match="expected an open engine"):
        engine.pause()


@pytest.mark.cuda
def test_graphs_see_new_weights(tiny_cuda: TinyModel) -> None:
    other = random_tensors(tiny_config(), seed=5)
    own = {name: tensor.clone() for name, tensor in tiny_cuda.model.weight_table().items()}
    try:
        with tiny_cuda.engine() as engine:
            before = tokens(engine)
            engine.update_weights(other)
            assert engine._executor.counts.graph > 0
            after = tokens(engine)
        with tiny_cuda.engine(enforce_eager=True) as engine:
            assert tokens(engine) == after != before
            engine.update_weights(own)
    finally:
        for name, tensor in tiny_cuda.model.weight_table().items():
            tensor.copy_(own[name])
