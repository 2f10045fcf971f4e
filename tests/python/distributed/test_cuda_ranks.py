# SPDX-License-Identifier: Apache-2.0
"""One model on two GPUs: graphs, the loop of the device and the host's steps decode what one GPU does."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from diffulex import ConfigError, Diffulex, SamplingParams
from diffulex.errors import EngineDeadError
from fixtures.families import family_builder, family_config
from fixtures.moe_families import moe_builder, moe_config

pytestmark = [pytest.mark.multi_gpu, pytest.mark.slow]

ZOO = Path(__file__).resolve().parents[3] / "examples" / "zoo"
#: Generous: how soon an error comes is printed.
BOUND_S = 15.0
SIZES: dict[str, Any] = {"max_model_len": 256, "num_pages": 128, "max_num_reqs": 4}
SHARED: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "tensor_parallel_size": 2,
    "check_ranks": True,
    **SIZES,
}
TEXTS = ["Tom has 3 apples and buys 4 more.", "What is 2 + 2?", "Anna had 9 coins.", "1 + 1 ="]
TEXTS += [f"{index} + {index * 3} =" for index in range(12)]
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, top_k=30, seed=5)


def step_forever(engine: Diffulex) -> None:
    while True:
        engine.step()


def sharpen(weights: Any) -> None:
    """Spreads the confidences of random weights over (0, 1)."""
    for name in weights:
        if "lm_head" in name:
            weights[name] *= 6.0


def tokens(engine: Diffulex, prompts: Any, params: SamplingParams) -> list[list[int]]:
    return [list(o.token_ids) for o in engine.generate(prompts, params, summary=False)]


def prompts_of(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(200) for _ in range(length)] for length in (33, 5, 18, 40)]


def questions(count: int) -> list[str]:
    lines = (ZOO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line)["question"] for line in lines]


def answers(params: SamplingParams, engine: Diffulex) -> list[Any]:
    outputs = engine.generate(TEXTS, params, summary=False)
    return [(list(o.token_ids), o.completion_reason, o.metrics.nfe) for o in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"run_ahead": "off"},
        {"enforce_eager": True},
        {"enforce_eager": True, "run_ahead": "off"},
        {"custom_all_reduce": "off"},
        {"distributed_backend": "gloo"},
        {"buffer_size": 4},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "default",
)
def test_two_gpus_decode_what_one_does(settings: dict[str, Any]) -> None:
    """Exactly: no decision of these prompts hangs on the last bits of a sum in float32."""
    alone = {key: value for key, value in settings.items() if key in ("run_ahead", "buffer_size")}
    with Diffulex("demo", device="cuda", dtype="float32", **SIZES, **alone) as engine:
        expected = [answers(params, engine) for params in (GREEDY, DRAWN)]
    with Diffulex("demo", **SHARED, **settings) as engine:
        assert [answers(params, engine) for params in (GREEDY, DRAWN)] == expected
        counts, stats = engine._executor.counts, engine.stats()
        assert stats.num_free_pages == stats.num_pages
        has_graphs = not {"enforce_eager", "custom_all_reduce"} & settings.keys()
        assert (counts.graph > 0) == has_graphs
        assert (counts.ahead > 0) == (settings.get("run_ahead") != "off")


@pytest.mark.parametrize("family", ["sdar_moe", "llada2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2, "moe_parallel_mode": "width"},
        {"tensor_parallel_size": 2, "moe_parallel_mode": "expert", "run_ahead": "off"},
        {"tensor_parallel_size": 2, "expert_parallel_size": 2},
        {"tensor_parallel_size": 1, "expert_parallel_size": 2},
    ],
    ids=["width", "expert", "tensor and expert", "experts alone"],
)
def test_routed_experts(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    config = moe_config(family, moe_intermediate_size=128)
    moe_builder(family, config=config, edit=sharpen).write(tmp_path)
    prompts, params = prompts_of(0), SamplingParams(max_tokens=16, ignore_eos=True)
    limits = {**SIZES, "max_model_len": 128, "device": "cuda", "dtype": "float32"}
    with Diffulex(str(tmp_path), **limits) as engine:
        expected = tokens(engine, prompts, params)
    with Diffulex(str(tmp_path), **limits, check_ranks=True, **settings) as engine:
        found = tokens(engine, prompts, params)
        assert engine._executor.counts.graph > 0
    # A decision of random weights may hang on the last bits of a sum; most do not.
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= 3


@pytest.mark.parametrize(
    ("name", "settings", "least"),
    [
        ("edit_llada2", {}, 6),
        # It feeds the last bits of a sum back, and so do canvases, unless they have few steps.
        ("dmax_llada2", {}, 4),
        ("diffusion_gemma", {"diffusion_gemma_max_denoising_steps": 3}, 8),
    ],
)
def test_trained_models_that_share_experts_alone(
    name: str, settings: dict[str, Any], least: int
) -> None:
    prompts = questions(8)
    limits = {**SIZES, "max_num_reqs": 8, "device": "cuda", "dtype": "float32", **settings}
    with Diffulex(str(ZOO / name), **limits) as engine:
        expected = tokens(engine, prompts, SamplingParams(max_tokens=64))
    with Diffulex(str(ZOO / name), **limits, expert_parallel_size=2, check_ranks=True) as engine:
        found = tokens(engine, prompts, SamplingParams(max_tokens=64))
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= least


@pytest.mark.alone  # replicas find the pages that the memory of their devices holds
@pytest.mark.parametrize("family", ["sdar_moe", "llada2"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"moe_dispatcher_backend": "naive"}, {"distributed_backend": "gloo"}],
    ids=lambda settings: "-".join(settings.values()) or "default",
)
def test_replicas_that_share_experts(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    """With uneven rows, and with none: the last prompts come one at a time."""
    moe_builder(family, edit=sharpen).write(tmp_path)
    prompts, params = prompts_of(0), SamplingParams(max_tokens=16, ignore_eos=True)
    limits = {**SIZES, "max_model_len": 128, "device": "cuda", "dtype": "float32"}
    with Diffulex(str(tmp_path), **limits) as engine:
        expected = tokens(engine, prompts, params)
    del limits["num_pages"]  # found by forwards that both make at once
    limits["gpu_memory_utilization"] = 0.2
    sizes = {"data_parallel_size": 2, "expert_parallel_size": 2}
    with Diffulex(str(tmp_path), **limits, **sizes, **settings) as engine:
        found = tokens(engine, prompts[:3], params) + tokens(engine, prompts[3:], params)
        again = tokens(engine, prompts[:1], params)
    # A decision of random weights may hang on the last bits of a sum; most do not.
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= 3
    assert again == found[:1]


@pytest.mark.alone
def test_a_killed_replica_ends_those_that_share_its_experts(tmp_path: Path) -> None:
    moe_builder("sdar_moe", edit=sharpen).write(tmp_path)
    sizes = {"data_parallel_size": 2, "expert_parallel_size": 2}
    settings = {**SIZES, **sizes, "max_model_len": 128, "device": "cuda", "dtype": "float32"}
    with Diffulex(str(tmp_path), **settings) as engine:
        pids = [replica.child.pid for replica in engine._loop.replicas]  # type: ignore[union-attr]
        for prompt in prompts_of(1):
            engine.add_request(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
        engine.step()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"replica 1 \(pid {pids[1]}, cuda:1\)"):
            step_forever(engine)


def need_gpus(count: int) -> None:
    import torch

    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, torch sees {torch.cuda.device_count()}")


@pytest.mark.parametrize(
    "settings",
    [{}, {"run_ahead": "off"}, {"custom_all_reduce": "off"}, {"buffer_size": 4}],
    ids=lambda settings: "-".join(map(str, settings.values())) or "default",
)
def test_four_gpus_decode_what_one_does(settings: dict[str, Any]) -> None:
    need_gpus(4)
    alone = {key: value for key, value in settings.items() if key in ("run_ahead", "buffer_size")}
    with Diffulex("demo", device="cuda", dtype="float32", **SIZES, **alone) as engine:
        expected = [answers(params, engine) for params in (GREEDY, DRAWN)]
    with Diffulex("demo", **{**SHARED, "tensor_parallel_size": 4}, **settings) as engine:
        assert [answers(params, engine) for params in (GREEDY, DRAWN)] == expected


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("edit_llada2", 6),
        ("dmax_llada2", 4),
        ("d2f_dream", 6),
        ("d2f_llada", 6),
        ("fast_dllm_v2", 6),
    ],
)
def test_three_gpus_decode_what_one_does(name: str, least: int) -> None:
    """Trained models of three heads, so that every rank has one."""
    need_gpus(3)
    prompts, params = questions(8), SamplingParams(max_tokens=64)
    limits = {**SIZES, "max_num_reqs": 8, "device": "cuda", "dtype": "float32"}
    with Diffulex(str(ZOO / name), **limits) as engine:
        expected = tokens(engine, prompts, params)
    with Diffulex(str(ZOO / name), **limits, tensor_parallel_size=3, check_ranks=True) as engine:
        found = tokens(engine, prompts, params)
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    print(f"{name}: {equal} of {len(prompts)} equal")
    assert equal >= least


@pytest.mark.parametrize("family", ["sdar_moe", "llada2"])
@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 4, "moe_parallel_mode": "width"},
        {"tensor_parallel_size": 4, "moe_parallel_mode": "expert"},
        {"tensor_parallel_size": 4, "expert_parallel_size": 4},
        {"tensor_parallel_size": 1, "expert_parallel_size": 4},
        {"data_parallel_size": 4, "expert_parallel_size": 4},
    ],
    ids=["width", "expert", "tensor and expert", "experts alone", "replicas"],
)
def test_four_gpus_have_parts_of_experts(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    need_gpus(4)
    config = moe_config(
        family, moe_intermediate_size=256, num_attention_heads=8, num_key_value_heads=4
    )
    moe_builder(family, config=config, edit=sharpen).write(tmp_path)
    prompts, params = prompts_of(0), SamplingParams(max_tokens=16, ignore_eos=True)
    limits = {**SIZES, "max_model_len": 128, "device": "cuda", "dtype": "float32"}
    with Diffulex(str(tmp_path), **limits) as engine:
        expected = tokens(engine, prompts, params)
    if "data_parallel_size" in settings:
        del limits["num_pages"]  # found by forwards that all make at once
        limits["gpu_memory_utilization"] = 0.2
    with Diffulex(str(tmp_path), **limits, **settings) as engine:
        found = tokens(engine, prompts, params)
    # A decision of random weights may hang on the last bits of a sum; most do not.
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= 3


def test_more_gpus_than_ranks_of_a_replica_share_experts(tmp_path: Path) -> None:
    need_gpus(4)
    moe_builder("llada2", edit=sharpen).write(tmp_path)
    prompts, params = prompts_of(0), SamplingParams(max_tokens=16, ignore_eos=True)
    limits = {**SIZES, "max_model_len": 128, "device": "cuda", "dtype": "float32"}
    with Diffulex(str(tmp_path), **limits) as engine:
        expected = tokens(engine, prompts, params)
    sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2, "expert_parallel_size": 4}
    with Diffulex(str(tmp_path), **limits, **sizes, check_ranks=True) as engine:
        found = tokens(engine, prompts, params)
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= 3


@pytest.mark.alone
@pytest.mark.parametrize("custom", ["on", "off"])
def test_a_killed_rank_ends_the_steps_of_the_others(custom: str) -> None:
    """Through peer memory, in graphs, and through NCCL."""
    settings = SHARED | {"check_ranks": False, "custom_all_reduce": custom}
    with Diffulex("demo", **settings) as engine:
        worker = engine._executor._followers._group._pipes.children[0].pid
        for text in TEXTS[:4]:
            engine.add_request(text, SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(5):
            engine.step()
        os.kill(worker, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"rank 1 \(pid \d+, cuda:1\)"):
            step_forever(engine)
        seconds = time.monotonic() - begin
        print(f"custom_all_reduce {custom}: error after {seconds:.3f} s")
        assert seconds < BOUND_S


@pytest.mark.alone
@pytest.mark.parametrize(("custom", "where"), [("on", ""), ("off", " of NCCL")])
def test_a_stopped_rank_is_waited_for_as_long_as_asked(custom: str, where: str) -> None:
    settings = SHARED | {"collective_timeout_seconds": 2, "check_ranks": False}
    settings["custom_all_reduce"] = custom
    with Diffulex("demo", **settings) as engine:
        worker = engine._executor._followers._group._pipes.children[0].pid
        engine.add_request(TEXTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        for _ in range(5):
            engine.step()
        os.kill(worker, signal.SIGSTOP)
        begin = time.monotonic()
        text = rf"rank 0 waited 2 s for rank 1 in exchange \d+{where} \(step \d+\)"
        with pytest.raises(EngineDeadError, match=text):
            step_forever(engine)
        seconds = time.monotonic() - begin
        print(f"custom_all_reduce {custom}: error after {seconds:.3f} s")
        assert 1.0 < seconds < BOUND_S / 2


@pytest.mark.alone  # what is free on the devices is everybody's
def test_two_thousand_steps_take_no_further_memory() -> None:
    import torch

    with Diffulex("demo", **SHARED | {"check_ranks": False}) as engine:
        used, free, num_steps = [], [], 0
        for count in (200, 2000):
            for index in range(count):
                if not engine.has_unfinished():
                    engine.add_request(TEXTS[index % len(TEXTS)], GREEDY)
                engine.step()
                num_steps += 1
            while engine.has_unfinished():
                engine.step()
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
            free.append([torch.cuda.mem_get_info(device)[0] for device in range(2)])
            stats = engine.stats()
            assert stats.num_free_pages == stats.num_pages
        assert used[1] <= used[0], used
        assert all(now >= then - (16 << 20) for then, now in zip(*free, strict=True)), free


def test_a_long_prompt_in_chunks(tmp_path: Path) -> None:
    config = family_config("sdar", max_position_embeddings=16384)
    family_builder("sdar", config=config, edit=sharpen).write(tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (8000, 3000, 30, 8111)]
    settings = {"device": "cuda", "dtype": "float32", "max_model_len": 8192, "max_num_reqs": 4}
    settings |= {"max_num_batched_tokens": 2048, "enable_chunked_prefill": True}
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with Diffulex(str(tmp_path), **settings, gpu_memory_utilization=0.2) as engine:
        expected = tokens(engine, prompts, params)
    ranks = {"tensor_parallel_size": 2, "check_ranks": True, "gpu_memory_utilization": 0.2}
    with Diffulex(str(tmp_path), **settings, **ranks) as engine:
        found = tokens(engine, prompts, params)
    # A decision of random weights may hang on the last bits of a sum; most do not.
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= 3


def test_more_ranks_than_gpus_are_refused() -> None:
    import torch

    if torch.cuda.device_count() >= 4:
        pytest.skip("needs a host with fewer than four GPUs")
    with pytest.raises(ConfigError, match="device_ids: expected 4 devices for tensor_parallel"):
        Diffulex("demo", device="cuda", tensor_parallel_size=4)
