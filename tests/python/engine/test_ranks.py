# SPDX-License-Identifier: Apache-2.0
"""Engines whose model several ranks share decode what one rank does. Ranks are threads here."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffulex import ConfigError, Diffulex, SamplingParams
from diffulex.checkpoint.auto_model import detect, random_model
from diffulex.config.config import Config
from diffulex.config.facts import read_facts
from diffulex.config.parse import Options
from diffulex.distributed.layout import Sizes
from diffulex.distributed.legality import check_model
from diffulex.distributed.shard import Shard
from diffulex.engine.ranks.step_header import StepHeader
from diffulex.runner.decode_graphs import max_graph_rows
from diffulex.runner.decode_loop import DecodeLoop
from diffulex.runner.loop_steps import LoopEntry, LoopStep
from diffulex.runner.model_runner import ModelRunner
from fixtures.families import DENSE_FAMILIES, family_builder
from fixtures.moe_families import moe_builder, moe_config
from fixtures.quick import quick
from fixtures.thread_ranks import Stable, thread_engine
from run_ahead_cases import loop_of, pack_every_step

LIMITS: dict[str, Any] = {"max_model_len": 128, "num_pages": 64, "max_num_reqs": 2}
HEAD_SCALE = 6.0
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


def sharpen(tensors: Any) -> None:
    """Spreads the confidences of random weights over (0, 1)."""
    for name in tensors:
        if "lm_head" in name or ("ff_out" in name and "blocks" not in name):
            tensors[name] *= HEAD_SCALE


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in DENSE_FAMILIES:
        found[name] = tmp_path_factory.mktemp(name)
        family_builder(name, edit=sharpen).write(found[name])
    return found


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(200) for _ in range(length)] for length in (33, 5, 18, 40)]


PROMPTS = prompts_of(0)


def legal_sizes(directory: Path) -> list[int]:
    _, spec, _ = detect(directory)
    found = []
    for size in range(2, 9):
        with contextlib.suppress(ConfigError):
            check_model(spec, Sizes(size))
            found.append(size)
    return found


def compare(directory: Path, params: SamplingParams, sizes: Any = (), **settings: Any) -> None:
    """Compares some numbers of ranks, or every legal one, with one rank."""
    settings = {**LIMITS, **settings}
    one = Stable(directory, PROMPTS, params, **settings)
    sizes = sizes or legal_sizes(directory)
    assert sizes
    for size in sizes:
        with thread_engine(directory, size, **settings) as engine:
            one.check(engine)


@pytest.mark.parametrize("name", quick(DENSE_FAMILIES, ["sdar", "llada"]))
def test_families_at_every_legal_size(directories: dict[str, Path], name: str) -> None:
    options = {"model_name": "diffucoder"} if name == "diffucoder" else {}
    compare(directories[name], GREEDY, **options)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("sdar_moe", {"moe_parallel_mode": "width"}),
        ("sdar_moe", {}),  # auto: whole experts of so narrow ones
        ("llada2", {"expert_parallel_size": 2}),
        ("llada2", {"tensor_parallel_size": 1, "expert_parallel_size": 2}),
    ],
)
def test_routed_experts(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    config = moe_config(family, moe_intermediate_size=32)
    moe_builder(family, config=config, edit=sharpen).write(tmp_path)
    compare(tmp_path, GREEDY, [2], **settings)


def test_ranks_that_share_experts_alone_look_at_rows_and_draw(tmp_path: Path) -> None:
    moe_builder("sdar_moe", edit=sharpen).write(tmp_path)
    settings = {**LIMITS, "tensor_parallel_size": 1, "expert_parallel_size": 3}
    stops = [*range(0, 200, 7)]
    for params in (
        SamplingParams(max_tokens=10, logprobs=3, min_tokens=10, stop_token_ids=stops),
        SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.8, top_k=20, seed=11),
    ):
        one = Stable(tmp_path, PROMPTS, params, **settings)
        with thread_engine(tmp_path, 3, **settings) as engine:
            one.check(engine)


@pytest.mark.parametrize("run_ahead", ["off", "on"])
@pytest.mark.parametrize("name", ["sdar", "dream", "fast_dllm_v2"])
def test_draws_and_filters(directories: dict[str, Path], name: str, run_ahead: str) -> None:
    params = SamplingParams(
        max_tokens=10, ignore_eos=True, temperature=0.8, top_k=20, top_p=0.9, seed=11
    )
    compare(directories[name], params, [2], run_ahead=run_ahead)


@pytest.mark.parametrize(
    "settings",
    [
        {"decoding_strategy": "d2f"},
        {"buffer_size": 4},
        {"kv_cache_layout": "distinct", "page_size": 4, "num_pages": 128},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"max_num_batched_tokens": 72, "max_model_len": 64, "num_pages": 24, "max_num_reqs": 4},
        {"run_ahead": "on"},
        {"num_pages": 20, "run_ahead": "on", "buffer_size": 2, "page_size": 8},
        {"mask_suppression": "renormalize", "demote_token_ids": [7], "suppress_token_ids": [3]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings(directories: dict[str, Path], settings: dict[str, Any]) -> None:
    compare(directories["sdar"], GREEDY, [2], **settings)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("draws", [{}, {"temperature": 0.8, "top_k": 20, "seed": 11}], ids=str)
@pytest.mark.parametrize(
    ("name", "settings"), [("sdar", {}), ("sdar", {"decoding_strategy": "d2f"}), ("dream", {})]
)
def test_each_rank_packs_the_steps_of_the_device(
    directories: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: dict[str, Any],
    draws: dict[str, Any],
    size: int,
) -> None:
    pack_every_step(monkeypatch)
    follow, followed = DecodeLoop.follow, set()

    def watched(loop: DecodeLoop, told: LoopEntry | LoopStep) -> int:
        followed.add(loop)
        return follow(loop, told)

    monkeypatch.setattr(DecodeLoop, "follow", watched)
    params = SamplingParams(max_tokens=24, ignore_eos=True, **draws)
    settings = {**LIMITS, "buffer_size": 3, "run_ahead": "on", **settings}
    one = Stable(directories[name], PROMPTS, params, **settings)
    with thread_engine(directories[name], size, check_run_ahead=True, **settings) as engine:
        one.check(engine)
        counts = [loop.num_packed_steps for loop in (loop_of(engine), *followed)]
    assert len(counts) == size
    assert counts[0] > 3
    assert len(set(counts)) == 1


def test_void_rows_cost_a_rank_its_share(directories: dict[str, Path]) -> None:
    def run(size: int) -> tuple[int, int]:
        settings = {**LIMITS, "buffer_size": 3, "run_ahead": "on"}
        with thread_engine(directories["sdar"], size, **settings) as engine:
            packed = loop_of(engine)._packed
            assert packed is not None
            return packed._products_per_row, engine.config.model.spec.products_per_row

    assert run(1)[0] == run(1)[1]
    assert run(2)[0] == run(1)[0] // 2


def test_ranks_have_the_pages_of_the_smallest(
    directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decide, prepare, found = ModelRunner.decide_num_pages, ModelRunner.prepare, {}

    def decided(runner: Any) -> int:
        return 5 if runner.model.comm.rank == 1 else decide(runner)

    def prepared(runner: Any, *arguments: Any) -> None:
        prepare(runner, *arguments)
        found[runner.model.comm.rank] = runner.kv_cache.num_pages

    monkeypatch.setattr(ModelRunner, "decide_num_pages", decided)
    monkeypatch.setattr(ModelRunner, "prepare", prepared)
    settings = {**LIMITS, "num_pages": -1}
    one = Stable(directories["sdar"], PROMPTS, GREEDY, num_noisy=1, **settings)
    caplog.set_level("INFO", "diffulex")
    with thread_engine(directories["sdar"], 4, **settings) as engine:
        assert engine.config.cache.num_pages == engine.stats().num_pages == 5
        assert found == dict.fromkeys(range(4), 5)
        one.check(engine)
    (line,) = [r.message for r in caplog.records if r.message.startswith("pages: ")]
    assert re.fullmatch(r"pages: 5 \(rank 1 limits: rank 0 could hold \d+\)", line)


def test_preempted_requests_decode_the_same(directories: dict[str, Path]) -> None:
    def run(size: int) -> list[Any]:
        with thread_engine(directories["sdar"], size, **LIMITS) as engine:
            ids = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
            done: dict[int, Any] = {}
            for step in itertools.count():
                if not engine.has_unfinished():
                    break
                done.update({s.req_id: s.output for s in engine.step() if s.output is not None})
                for req_id in ids[step % 5 :: 5]:
                    request = None if req_id in done else engine._scheduler.find_request(req_id)
                    if request is not None and request.request_slot >= 0:
                        engine._scheduler.preempt(req_id)
            assert engine.stats().num_preemptions > 2
            return [done[req_id].token_ids for req_id in ids]

    one = Stable(directories["sdar"], PROMPTS, GREEDY, **LIMITS)
    one.check_tokens(run(1))
    one.check_tokens(run(2))


def test_rows_that_the_host_looks_at(directories: dict[str, Path]) -> None:
    params = SamplingParams(
        max_tokens=10, logprobs=3, min_tokens=10, stop_token_ids=[*range(0, 200, 7)]
    )

    def run(size: int) -> list[Any]:
        with thread_engine(directories["dream"], size, **LIMITS) as engine:
            asked = [*PROMPTS, PROMPTS[0]]
            every = [params] * len(PROMPTS) + [GREEDY]
            return list(engine.generate(asked, every, summary=False))

    one = Stable(directories["dream"], PROMPTS, params, **LIMITS)
    expected, actual = run(1), run(2)
    for index in one.kept:
        assert actual[index].token_ids == expected[index].token_ids
        for own, other in zip(actual[index].logprobs, expected[index].logprobs, strict=True):
            assert own.token_id == other.token_id
            assert own.step == other.step
            assert own.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_ranks_draw_parts_of_the_same_random_weights(directories: dict[str, Path]) -> None:
    name, spec, _ = detect(directories["sdar"])
    whole: Any = random_model(name, spec, torch.float32, "cpu")
    parts: list[Any] = [
        random_model(name, spec, torch.float32, "cpu", shard=Shard(rank, 2)) for rank in range(2)
    ]
    prefix = spec.names.layer.format(1)
    for key, dim in (
        (spec.names.q, 0),
        (spec.names.o, 1),
        (spec.names.up, 0),
        (spec.names.down, 1),
    ):
        weights = [part.weight_table()[f"{prefix}{key}.weight"] for part in parts]
        assert torch.equal(torch.cat(weights, dim), whole.weight_table()[f"{prefix}{key}.weight"])
    heads = [part.weight_table()[spec.names.head] for part in parts]
    assert torch.equal(torch.cat(heads), whole.weight_table()[spec.names.head])
    for part in parts:
        assert torch.equal(part.embedding.weight, whole.embedding.weight)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"tensor_parallel_size": 3},
            "expected one of 1, 2, 4 for sdar (4 query heads, 2 KV heads), got 3",
        ),
        (
            {"expert_parallel_size": 2},
            "expert_parallel_size: expected 1 for a model without routed experts, got 2",
        ),
        (
            {"moe_parallel_mode": "width"},
            "moe_parallel_mode: expected auto for a model without routed experts, got width",
        ),
    ],
)
def test_what_ranks_cannot_do_yet(
    directories: dict[str, Path], settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        Diffulex(str(directories["sdar"]), device="cpu", **{"tensor_parallel_size": 2, **settings})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"tensor_parallel_size": 2, "expert_parallel_size": 4},
            "expert_parallel_size: expected 1, tensor_parallel_size (2) or tensor_parallel_size *"
            " data_parallel_size (2), got 4",
        ),
        (
            {"tensor_parallel_size": 2, "moe_parallel_mode": "width"},
            "moe_parallel_mode: expected expert for an expert width of 12 on 2 ranks, got width",
        ),
        (
            {"expert_parallel_size": 2, "moe_parallel_mode": "width"},
            "moe_parallel_mode: expected auto or expert with expert_parallel_size 2, got width",
        ),
        (
            {"expert_parallel_size": 9},
            "expert_parallel_size: expected at most 8 ranks for 8 routed experts, got 9",
        ),
    ],
)
def test_what_experts_cannot_do(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    config = moe_config("sdar_moe", moe_intermediate_size=12)
    moe_builder("sdar_moe", config=config).write(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(text)):
        Diffulex(str(tmp_path), device="cpu", **settings)


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "hidden_size", "candidates", "rows"),
    [
        (1, "float32", 4096, 1, None),
        (2, "bfloat16", 4096, 1, 1024),
        (2, "float32", 8192, 1, 512),
        (8, "bfloat16", 4096, 8, 481),
    ],
)
def test_graphs_hold_what_kernels_can_exchange(
    num_ranks: int, dtype: str, hidden_size: int, candidates: int, rows: int | None
) -> None:
    config: Any = SimpleNamespace(
        parallel=SimpleNamespace(
            tensor_parallel_size=num_ranks, data_parallel_size=1, expert_parallel_size=1
        ),
        model=SimpleNamespace(dtype=dtype, spec=SimpleNamespace(hidden_size=hidden_size)),
        decoding=SimpleNamespace(
            token_merge_top_k=candidates, traits=SimpleNamespace(has_canvas=False)
        ),
    )
    assert max_graph_rows(config) == rows


def test_finished_models_are_refused(directories: dict[str, Path]) -> None:
    config = Config.of(*options_of(directories["sdar"]))
    with pytest.raises(
        ConfigError, match="from_components: expected one rank, got tensor_parallel_size 2: workers"
    ):
        Diffulex.from_components(config, object(), None)


def options_of(directory: Path) -> tuple[Options, Any]:
    options = Options.parse(str(directory), {"device": "cpu", "tensor_parallel_size": 2})
    return options, read_facts(options)


def test_header_of_a_step_is_a_small_message() -> None:
    header = StepHeader(1, 2, True, False, True, False, 3, 4, 2**40, *range(11))
    assert StepHeader.unpack(header.pack()) == header
    assert len(header.pack()) <= 64
