# SPDX-License-Identifier: Apache-2.0
"""diffusion_gemma: the engine's canvases equal those that transformers' model and the rules give."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from brute_force import Outcome, RequestSettings, Settings
from brute_force.canvas import CanvasRun, CanvasSettings
from cases import first_is_quick, run_mixed
from diffulex import SamplingParams
from diffulex.samplers.inputs import SamplerInputs
from fixtures.gemma import CANVAS, VOCAB
from tiny_gemma import MAX_MODEL_LEN, TinyGemma

CONVERGED = 128


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> TinyGemma:
    return TinyGemma(tmp_path_factory.mktemp("gemma"), "cpu")


@dataclass
class CanvasCase:
    """Settings of an engine, its requests, and the oracle's answers."""

    settings: dict[str, Any]
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    expected: list[Outcome] = field(default_factory=list)


def decode(
    gemma: TinyGemma,
    settings: dict[str, Any],
    prompt: list[int],
    params: SamplingParams,
    noise: np.random.Generator | None = None,
) -> Outcome:
    gemma.forget()
    prefix = "diffusion_gemma_"
    stop_ids = frozenset(gemma.facts.spec.stop_token_ids)
    rules = {k.removeprefix(prefix): v for k, v in settings.items() if k.startswith(prefix)}
    run = CanvasRun(
        gemma.denoise,
        Settings(CANVAS, 1, -1, VOCAB, stop_ids, settings.get("max_model_len", MAX_MODEL_LEN)),
        CanvasSettings(VOCAB, **rules),
        prompt,
        RequestSettings(
            max_tokens=params.max_tokens,
            seed=params.seed or 0,
            ignore_eos=params.ignore_eos,
            max_nfe=params.max_nfe,
        ),
        noise,
    )
    return run.outcome()


def random_settings(rng: random.Random) -> dict[str, Any]:
    return {
        "page_size": rng.choice((4, 8, 32)),
        "max_num_reqs": rng.randint(1, 4),
        "kv_cache_layout": rng.choice(("unified", "distinct")),
        "enable_prefix_caching": rng.random() < 0.5,
        "diffusion_gemma_max_denoising_steps": rng.choice((1, 2, 5, 8)),
        "diffusion_gemma_stability_threshold": rng.choice((0, 1, 2)),
        "diffusion_gemma_t_min": 0.1,
        "diffusion_gemma_t_max": rng.choice((0.2, 0.8)),
        "diffusion_gemma_entropy_bound": rng.choice((0.1, 3.0, 10.0)),
        "diffusion_gemma_confidence_threshold": rng.choice((0.005, 3.0, 5.0)),
    }


def add_request(gemma: TinyGemma, case: CanvasCase, rng: random.Random, prefix: list[int]) -> None:
    """Appends a request whose outcome errors of float32 leave as it is."""
    while True:
        prompt = prefix + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 3 * CANVAS),
            seed=rng.getrandbits(64),
            ignore_eos=rng.random() < 0.5,
            max_nfe=rng.choice((None, None, 7)),
        )
        outcome = decode(gemma, case.settings, prompt, params)
        again = [
            decode(gemma, case.settings, prompt, params, np.random.default_rng(seed))
            for seed in range(4)
        ]
        if all(other == outcome for other in again):
            break
    case.prompts.append(prompt)
    case.params.append(params)
    case.expected.append(outcome)


def check(case: CanvasCase, outputs: Any) -> None:
    for index, (output, expected) in enumerate(zip(outputs, case.expected, strict=True)):
        where = f"request {index} of {case.settings}, {case.params[index]}, {case.prompts[index]}"
        assert list(output.token_ids) == expected.token_ids, where
        assert output.completion_reason == expected.reason, where


def run_case(gemma: TinyGemma, case: CanvasCase) -> None:
    """Decodes the case in one batch and checks everything."""
    with gemma.engine(**case.settings) as engine:
        outputs = engine.generate(case.prompts, case.params, summary=False)
        check(case, outputs)
        stats = engine.stats()
        assert stats.num_free_pages == stats.num_pages
        if stats.num_preemptions == 0 and not case.settings["enable_prefix_caching"]:
            for output, expected in zip(outputs, case.expected, strict=True):
                assert output.metrics.nfe == expected.nfe
                assert list(output.metrics.new_tokens_per_step) == expected.decided_per_step


def random_case(gemma: TinyGemma, rng: random.Random, **settings: Any) -> CanvasCase:
    case = CanvasCase({**random_settings(rng), **settings})
    for _ in range(rng.randint(1, 4)):
        add_request(gemma, case, rng, [])
    return case


@pytest.mark.parametrize("group", first_is_quick(8))
def test_random_batches(gemma: TinyGemma, group: int) -> None:
    for number in range(2):
        run_case(gemma, random_case(gemma, random.Random(f"canvas {group} {number}")))


@pytest.mark.slow
def test_canvas_cut_at_the_longest_sequence(gemma: TinyGemma) -> None:
    """Positions beyond max_model_len take no part in bound, mean and stability."""
    for number in range(6):
        rng = random.Random(f"cut {number}")
        case = random_case(gemma, rng, max_model_len=32 + rng.randint(1, CANVAS))
        run_case(gemma, case)


@pytest.mark.slow
def test_chunked_prefill(gemma: TinyGemma) -> None:
    num_chunked = 0
    for number in range(4):
        rng = random.Random(f"chunk {number}")
        case = random_case(
            gemma, rng, enable_chunked_prefill=True, max_num_batched_tokens=12, max_num_reqs=2
        )
        with gemma.engine(**case.settings) as engine:
            outputs = engine.generate(case.prompts, case.params, summary=False)
            if all(params.max_nfe is None for params in case.params):
                check(case, outputs)
            num_chunked += any(output.metrics.prefill_steps > 1 for output in outputs)
    assert num_chunked > 0


@pytest.mark.slow
def test_prompts_beside_decoding_requests(gemma: TinyGemma) -> None:
    num_mixed = 0
    for number in range(4):
        rng = random.Random(f"mixed {number}")
        settings = {**random_settings(rng), "enable_chunked_prefill": number % 2 == 0}
        case = CanvasCase(settings)
        for _ in range(4):
            add_request(gemma, case, rng, [])
        outputs, count = run_mixed(gemma, case)
        check(case, outputs)
        num_mixed += count
    assert num_mixed > 0


@pytest.mark.slow
def test_shared_prefixes(gemma: TinyGemma) -> None:
    num_hits = 0
    for number in range(4):
        rng = random.Random(f"prefix {number}")
        settings = {**random_settings(rng), "page_size": 4, "enable_prefix_caching": True}
        case = CanvasCase(settings)
        prefix = [rng.randrange(VOCAB) for _ in range(13)]
        for _ in range(3):
            add_request(gemma, case, rng, prefix)
        with gemma.engine(**case.settings) as engine:
            outputs = [engine.generate(case.prompts[0], case.params[0], summary=False)[0]]
            outputs += engine.generate(case.prompts[1:], case.params[1:], summary=False)
            num_hits += sum(output.metrics.cached_tokens > 0 for output in outputs)
            check(case, outputs)
    assert num_hits > 0


@pytest.mark.slow
def test_preempted_canvases_come_out_the_same(gemma: TinyGemma) -> None:
    num_preemptions = 0
    for number in range(6):
        rng = random.Random(f"preempt {number}")
        case = random_case(gemma, rng)
        if any(params.max_nfe is not None for params in case.params):
            continue  # a canvas that starts again costs forwards
        with gemma.engine(**case.settings) as engine:
            ids = [
                engine.add_request(prompt, params)
                for prompt, params in zip(case.prompts, case.params, strict=True)
            ]
            done = {}
            while engine.has_unfinished():
                done.update({s.req_id: s.output for s in engine.step() if s.output is not None})
                for req_id in ids:
                    if req_id in done or rng.random() > 0.1:
                        continue
                    if engine._scheduler.find_request(req_id).request_slot >= 0:
                        engine._scheduler.preempt(req_id)
            check(case, [done[req_id] for req_id in ids])
            num_preemptions += engine.stats().num_preemptions
    assert num_preemptions > 0


class PoisoningSampler:
    """Checks the signals of each step, and replaces by NaN those of canvases that ended."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.num_converged = 0

    def __call__(self, inputs: SamplerInputs) -> None:
        self._sampler(inputs)
        assert inputs.canvas is not None
        slots = inputs.canvas.request_slots.tolist()
        for slot, flags in zip(slots, inputs.flags.tolist(), strict=True):
            signals = inputs.canvas.signals[slot * CANVAS : (slot + 1) * CANVAS]
            assert signals.isfinite().all()
            if flags & CONVERGED:
                self.num_converged += 1
                assert not signals.any()
                signals.fill_(float("nan"))
            else:
                assert signals.any()

    def evict(self, request_slots: Sequence[int]) -> None:
        self._sampler.evict(request_slots)


@pytest.mark.slow
def test_new_canvases_read_no_signal(gemma: TinyGemma) -> None:
    """Whatever lies in the buffer when a canvas begins, the first one of a slot included."""
    num_converged = 0
    for number in range(4):
        case = random_case(gemma, random.Random(f"signals {number}"))
        with gemma.engine(**case.settings) as engine:
            engine._executor.runner._call.signals.fill_(float("nan"))
            sampler = PoisoningSampler(engine._executor.runner.sampler)
            engine._executor.runner.sampler = sampler
            check(case, engine.generate(case.prompts, case.params, summary=False))
            num_converged += sampler.num_converged
    assert num_converged > 8


def test_nan_in_pages_that_were_never_written(gemma: TinyGemma) -> None:
    rng = random.Random(8)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 7, 20)]
    params = SamplingParams(max_tokens=13, ignore_eos=True, seed=4)
    answers = []
    for is_poisoned in (False, True):
        with gemma.engine(diffusion_gemma_max_denoising_steps=4) as engine:
            if is_poisoned:
                for layer in range(engine.config.model.spec.num_layers):
                    for cache in engine._executor.runner.kv_cache.layer(layer):
                        cache.fill_(float("nan"))
            outputs = engine.generate(prompts, params, summary=False)
            answers.append([output.token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_temperature_0_without_seed_is_reproducible(gemma: TinyGemma, run_ahead: str) -> None:
    check_reproducible(gemma, run_ahead)


def check_reproducible(gemma: TinyGemma, run_ahead: str) -> None:
    prompt = [3, 4, 5]
    settings = {"run_ahead": run_ahead, "diffusion_gemma_max_denoising_steps": 3}
    with gemma.engine(**settings, seed=9, max_num_reqs=2) as engine:

        def answers(count: int, **fields: Any) -> list[tuple[int, ...]]:
            params = SamplingParams(max_tokens=CANVAS, ignore_eos=True, **fields)
            outputs = engine.generate([prompt] * count, params, summary=False)
            return [tuple(output.token_ids) for output in outputs]

        (expected,) = answers(1, temperature=0.7, seed=9)
        assert answers(5, temperature=0.0) == [expected] * 5
        assert answers(5, temperature=9e-6) == [expected] * 5
        assert len(set(answers(5, temperature=0.7))) == 5
        assert answers(1, temperature=0.0, seed=8) != [expected]


def test_snapshots_have_no_masks(gemma: TinyGemma) -> None:
    with gemma.engine() as engine:
        events = list(
            engine.stream([3, 4, 5], SamplingParams(max_tokens=4, seed=1), mode="denoise")
        )
    snapshots = [event.snapshot for event in events if event.snapshot is not None]
    assert all(snapshot.mask_token_id == -1 for snapshot in snapshots)
    assert any(len(block.token_ids) == CANVAS for s in snapshots for block in s.blocks)


def test_requests_of_other_strategies_are_noticed(
    gemma: TinyGemma, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffulex.log._warned", set())
    with caplog.at_level("WARNING", "diffulex"), gemma.engine() as engine:
        engine.generate([[3]], SamplingParams(max_tokens=1, top_k=3), summary=False)
    assert "SamplingParams.top_k: without effect under decoding_strategy" in caplog.text


@pytest.fixture(scope="module")
def gemma_cuda(tmp_path_factory: pytest.TempPathFactory) -> TinyGemma:
    return TinyGemma(tmp_path_factory.mktemp("gemma_cuda"), "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_temperature_0_without_seed_is_reproducible_on_cuda(
    gemma_cuda: TinyGemma, run_ahead: str
) -> None:
    check_reproducible(gemma_cuda, run_ahead)


@pytest.mark.cuda
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_canvases_on_cuda(gemma_cuda: TinyGemma, enforce_eager: bool) -> None:
    for number in range(4):
        case = random_case(gemma_cuda, random.Random(f"cuda {number}"))
        case.settings["enforce_eager"] = enforce_eager
        run_case(gemma_cuda, case)
