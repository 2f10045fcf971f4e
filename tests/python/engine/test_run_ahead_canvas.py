# SPDX-License-Identifier: Apache-2.0
"""Canvases that a device plans itself equal those of the host; see test_run_ahead.py."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from fixtures.gemma import CANVAS, VOCAB
from run_ahead_cases import (
    Requests,
    check_aborts_and_arrivals,
    compare,
    num_compared,
    requests,
    tokens_with_interrupts,
)
from tiny_gemma import TinyGemma

pytestmark = pytest.mark.usefixtures("small_classes")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> TinyGemma:
    return TinyGemma(tmp_path_factory.mktemp("gemma"), "cpu")


@pytest.fixture(scope="module")
def gemma_cuda(tmp_path_factory: pytest.TempPathFactory) -> TinyGemma:
    return TinyGemma(tmp_path_factory.mktemp("gemma_cuda"), "cuda")


def rules(num_steps: int, **settings: Any) -> dict[str, Any]:
    """Settings under which canvases converge, or run out of steps."""
    return {
        "diffusion_gemma_max_denoising_steps": num_steps,
        "diffusion_gemma_stability_threshold": 1,
        "diffusion_gemma_t_min": 0.1,
        "diffusion_gemma_t_max": 0.8,
        "diffusion_gemma_entropy_bound": 3.0,
        "diffusion_gemma_confidence_threshold": 3.0,
        **settings,
    }


def canvas_requests(rng: random.Random, count: int) -> Requests:
    """Requests that end in every way; the id of the mask token is no stop id."""
    prompts, params = requests(rng, count, VOCAB)
    mask_id = 4
    stops = [tuple(i for i in p.stop_token_ids if i != mask_id) for p in params]
    return prompts, [
        dataclasses.replace(p, stop_token_ids=ids) for p, ids in zip(params, stops, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [1, 2, 5, 8])
@pytest.mark.parametrize("max_num_reqs", [1, 2, 4])
def test_equals_the_host_loop(gemma: TinyGemma, num_steps: int, max_num_reqs: int) -> None:
    settings = rules(num_steps, max_num_reqs=max_num_reqs)
    assert sum(compare(gemma, settings, seed, 7, canvas_requests) for seed in range(3)) > 5


@pytest.mark.every(2)
@pytest.mark.parametrize("count", range(1, 6))
def test_every_batch_size(gemma: TinyGemma, count: int) -> None:
    assert compare(gemma, rules(5, max_num_reqs=5), 30 + count, count, canvas_requests) > 0


@pytest.mark.slow
def test_canvases_cut_at_the_longest_sequence(gemma: TinyGemma) -> None:
    for length in range(50, 50 + CANVAS):
        settings = rules(3, max_num_reqs=3, max_model_len=length)
        assert compare(gemma, settings, length, 6, canvas_requests) > 0


@pytest.mark.slow
def test_tight_page_pools(gemma: TinyGemma) -> None:
    """Preempted and resumed in between; forwards may differ, tokens may not."""
    settings = rules(4, num_pages=12, page_size=4, max_num_reqs=4, max_model_len=48)
    num_preemptions = 0
    for seed in range(4):
        prompts, params = canvas_requests(random.Random(seed), 8)
        prompts = [prompt[:20] for prompt in prompts]
        params = [dataclasses.replace(p, max_nfe=None) for p in params]
        with gemma.engine(**settings, run_ahead="off") as engine:
            expected = engine.generate(prompts, params, summary=False)
        with gemma.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
            actual = engine.generate(prompts, params, summary=False)
            num_preemptions += engine.stats().num_preemptions
        assert [o.token_ids for o in actual] == [o.token_ids for o in expected]
        assert [o.completion_reason for o in actual] == [o.completion_reason for o in expected]
    assert num_preemptions > 0


def test_aborts_and_arrivals_in_between(gemma: TinyGemma) -> None:
    rng = random.Random(7)
    prompts, params = canvas_requests(random.Random(7), 12)
    settings = rules(4, max_num_reqs=4)
    with gemma.engine(**settings, run_ahead="off") as engine:
        expected = engine.generate(prompts, params, summary=False)
    with gemma.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        check_aborts_and_arrivals(engine, (prompts, params), expected, rng, 0.1)


@pytest.mark.parametrize("point", ["schedule_ahead", "run_ahead", "collect", "complete_step"])
def test_interrupts_while_a_step_runs_ahead(
    gemma: TinyGemma, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """A step that ran ahead has replaced the signals it read: it cannot run again."""
    prompts, params = canvas_requests(random.Random(5), 4)
    params = [dataclasses.replace(p, max_nfe=None, max_tokens=20, ignore_eos=True) for p in params]
    settings = rules(6, max_num_reqs=4, diffusion_gemma_confidence_threshold=0.005)
    with gemma.engine(**settings, run_ahead="off") as engine:
        expected = engine.generate(prompts, params, summary=False)
    with gemma.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        tokens = tokens_with_interrupts(engine, (prompts, params), point, monkeypatch)
    if point != "complete_step":  # what that step decided was never delivered
        assert tokens == [o.token_ids for o in expected]
    else:
        for found, output in zip(tokens, expected, strict=True):
            assert found
            assert found == output.token_ids[-len(found) :]


@pytest.mark.cuda
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_plans_of_the_device_on_cuda(gemma_cuda: TinyGemma, enforce_eager: bool) -> None:
    """Every plan is the scheduler's. Signals feed the last bits of a step to the next, so that tokens
    may differ from those of the host's loop."""
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts, params = canvas_requests(random.Random(1), 9)
    settings = rules(5, max_num_reqs=4, enforce_eager=enforce_eager)
    with gemma_cuda.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        engine.generate(prompts, params, summary=False)
        assert num_compared(engine) > engine._executor.runner.num_ahead_steps > 3
