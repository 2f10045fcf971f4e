# SPDX-License-Identifier: Apache-2.0
"""The engine's tokens equal those of the brute-force decoder, whatever the engine does to get them.

Cases are random but seeded. A request with a decision closer to its bound than float32 can tell is
drawn again, so that the comparison can be exact on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from brute_force import BruteForceDecoder, Outcome, RequestSettings, Settings, WholeSequenceModel
from diffulex import SamplingParams
from fixtures.checkpoints import EOS_ID, MASK_ID, TURN_END_ID
from tiny_engine import TinyModel

CASES_PER_TEST = 10
VOCABULARY = 256
MAX_MODEL_LEN = 128
RULES = ("threshold", "threshold_non_strict", "static", "dynamic", "sequential", "factor")


@dataclass
class Case:
    """Settings of an engine, its requests, and the oracle's answers."""

    settings: dict[str, Any]
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    expected: list[Outcome] = field(default_factory=list)


@pytest.fixture(scope="module")
def oracle_model(tiny: TinyModel) -> WholeSequenceModel:
    return WholeSequenceModel(tiny.hf_config, tiny.tensors)


def oracle_settings(settings: dict[str, Any]) -> Settings:
    thresholds = settings["decoding_thresholds"]
    return Settings(
        block_size=settings["block_size"],
        buffer_size=settings["buffer_size"],
        mask_id=MASK_ID,
        candidate_limit=260,
        stop_ids=frozenset({EOS_ID, TURN_END_ID}),
        max_model_len=settings.get("max_model_len", MAX_MODEL_LEN),
        add_block=thresholds["add_block_threshold"],
        semi_complete=thresholds["semi_complete_threshold"],
        accept=thresholds["accept_threshold"],
        rule=settings.get("acceptance_rule", "dynamic"),
        denoising_steps=settings.get("denoising_steps"),
        ranking=settings.get("confidence_type", "max_prob"),
        factor=settings.get("factor", 1.0),
        entropy_bound=settings.get("entropy_bound", 0.1),
        suppressed=frozenset(settings.get("suppress_token_ids", ())),
    )


def random_settings(rng: random.Random) -> dict[str, Any]:
    return {
        "block_size": rng.choice((4, 8, 16, 32)),
        "buffer_size": rng.randint(1, 6),
        "page_size": rng.choice((4, 8, 16, 32)),
        "kv_cache_layout": rng.choice(("unified", "distinct")),
        "max_num_reqs": rng.randint(1, 6),
        "enable_prefix_caching": rng.random() < 0.7,
        "decode_headroom": rng.random() < 0.5,
        "decoding_thresholds": {
            "add_block_threshold": rng.choice((0.0, 0.1, 0.5, 0.9, 1.0)),
            "semi_complete_threshold": rng.choice((0.25, 0.5, 0.9, 1.0)),
            "accept_threshold": rng.choice((0.05, 0.15, 0.3, 0.6, 0.95)),
        },
    }


def random_params(rng: random.Random, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.sample(range(VOCABULARY), 2) if rng.random() < 0.5 else (),
        seed=rng.getrandbits(64),
        max_repetition_run=rng.choice((None, None, None, 2, 3)),
        accept_threshold=rng.choice((None, None, None, 0.2)),
    )


def random_prompt(rng: random.Random, length: int) -> list[int]:
    # A mask id inside the prompt is an ordinary token.
    return [MASK_ID if rng.random() < 0.02 else rng.randrange(VOCABULARY) for _ in range(length)]


def add_request(
    case: Case,
    model: WholeSequenceModel,
    rng: random.Random,
    prefix: list[int],
    tail_len: int,
    max_tokens: int,
) -> None:
    decoder = BruteForceDecoder(model, oracle_settings(case.settings))
    while True:
        prompt = prefix + random_prompt(rng, tail_len)
        params = random_params(rng, max_tokens)
        outcome = decoder.decode(
            prompt,
            RequestSettings(
                max_tokens=params.max_tokens,
                temperature=params.temperature or 0.0,
                seed=params.seed or 0,
                ignore_eos=params.ignore_eos,
                stop_ids=frozenset(params.stop_token_ids),
                max_repetition_run=params.max_repetition_run,
                accept=params.accept_threshold,
            ),
        )
        if outcome.margin > 1:
            break
    case.prompts.append(prompt)
    case.params.append(params)
    case.expected.append(outcome)


def check(case: Case, outputs: Any) -> None:
    for index, (output, expected) in enumerate(zip(outputs, case.expected, strict=True)):
        where = f"request {index} of {case.settings}, {case.params[index]}, {case.prompts[index]}"
        assert list(output.token_ids) == expected.token_ids, where
        assert output.completion_reason == expected.reason, where


def make_case(model: WholeSequenceModel, rng: random.Random, **overrides: Any) -> Case:
    case = Case({**random_settings(rng), **overrides})
    for _ in range(rng.randint(1, 4)):
        add_request(case, model, rng, [], rng.randint(1, 40), rng.randint(1, 20))
    return case


@pytest.mark.parametrize("group", range(7))
def test_random_batches(tiny: TinyModel, oracle_model: WholeSequenceModel, group: int) -> None:
    for number in range(CASES_PER_TEST):
        case = make_case(oracle_model, random.Random(f"plain {group} {number}"))
        with tiny.engine(**case.settings) as engine:
            outputs = engine.generate(case.prompts, case.params, summary=False)
            check(case, outputs)
            stats = engine.stats()
            assert stats.num_free_pages == stats.num_pages
            if stats.num_preemptions == 0 and not case.settings["enable_prefix_caching"]:
                # Without preemption and cache hits even the steps are the same.
                for output, expected in zip(outputs, case.expected, strict=True):
                    assert list(output.metrics.new_tokens_per_step) == expected.decided_per_step
                    assert output.metrics.nfe == expected.nfe


@pytest.mark.parametrize("group", range(4))
def test_tight_page_pools(tiny: TinyModel, oracle_model: WholeSequenceModel, group: int) -> None:
    num_preempted_cases = 0
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"tight {group} {number}")
        case = Case(random_settings(rng))
        block = rng.choice((4, 8))
        case.settings.update(
            block_size=block, page_size=rng.choice((4, 8)), max_num_reqs=6, decode_headroom=False
        )
        longest = 0
        for _ in range(4):
            tail = rng.randint(4, 16)
            max_tokens = rng.randint(3 * block, 4 * block)
            add_request(case, oracle_model, rng, [], tail, max_tokens)
            longest = max(longest, tail + max_tokens)
        page = case.settings["page_size"]
        case.settings["num_pages"] = -(-longest // page) + rng.randint(0, 2)
        with tiny.engine(**case.settings) as engine:
            check(case, engine.generate(case.prompts, case.params, summary=False))
            engine._scheduler.check_integrity()
            stats = engine.stats()
            num_preempted_cases += stats.num_preemptions > 0
            assert stats.num_free_pages == stats.num_pages
    assert num_preempted_cases >= CASES_PER_TEST // 2


@pytest.mark.parametrize("group", range(3))
def test_preemption_at_any_step(
    tiny: TinyModel, oracle_model: WholeSequenceModel, group: int
) -> None:
    num_preemptions = 0
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"preempt {group} {number}")
        case = make_case(oracle_model, rng, block_size=rng.choice((4, 8)))
        with tiny.engine(**case.settings) as engine:
            ids = [
                engine.add_request(prompt, params)
                for prompt, params in zip(case.prompts, case.params, strict=True)
            ]
            done = {}
            while engine.has_unfinished():
                done.update({s.req_id: s.output for s in engine.step() if s.output is not None})
                victims = [i for i in ids if i not in done and rng.random() < 0.15]
                for req_id in victims:
                    if engine._scheduler.find_request(req_id).request_slot >= 0:
                        engine._scheduler.preempt(req_id)
            check(case, [done[req_id] for req_id in ids])
            num_preemptions += engine.stats().num_preemptions
    assert num_preemptions > CASES_PER_TEST


@pytest.mark.parametrize("group", range(2))
def test_chunked_prefill(tiny: TinyModel, oracle_model: WholeSequenceModel, group: int) -> None:
    num_chunked_cases = 0
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"chunk {group} {number}")
        block, buffer_size = rng.choice((4, 8)), rng.randint(1, 3)
        case = make_case(
            oracle_model,
            rng,
            block_size=block,
            buffer_size=buffer_size,
            enable_chunked_prefill=True,
            max_num_batched_tokens=block * buffer_size + rng.randint(0, 8),
        )
        with tiny.engine(**case.settings) as engine:
            outputs = engine.generate(case.prompts, case.params, summary=False)
            check(case, outputs)
            num_chunked_cases += any(output.metrics.prefill_steps > 1 for output in outputs)
    assert num_chunked_cases >= CASES_PER_TEST // 2


@pytest.mark.parametrize("group", range(2))
def test_shared_prefixes(tiny: TinyModel, oracle_model: WholeSequenceModel, group: int) -> None:
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"prefix {group} {number}")
        case = Case(random_settings(rng))
        block, page = rng.choice((4, 8, 16)), rng.choice((4, 8, 16))
        case.settings.update(block_size=block, page_size=page, enable_prefix_caching=True)
        prefix = random_prompt(rng, 2 * max(block, page) + rng.randint(0, 3))
        for _ in range(4):
            add_request(case, oracle_model, rng, prefix, rng.randint(1, 12), rng.randint(1, 16))
        with tiny.engine(**case.settings) as engine:
            outputs = [engine.generate(case.prompts[0], case.params[0], summary=False)[0]]
            outputs += engine.generate(case.prompts[1:], case.params[1:], summary=False)
            check(case, outputs)
            hits = [output.metrics.cached_tokens for output in outputs]
            assert hits[0] == 0
            assert all(hit >= max(block, page) for hit in hits[1:]), hits


@pytest.mark.parametrize("rule", RULES)
def test_acceptance_rules(tiny: TinyModel, oracle_model: WholeSequenceModel, rule: str) -> None:
    for number in range(4):
        rng = random.Random(f"{rule} {number}")
        block = rng.choice((4, 8, 16))
        case = make_case(
            oracle_model,
            rng,
            block_size=block,
            acceptance_rule=rule,
            denoising_steps=rng.choice((None, 2, 3, block)),
            confidence_type=rng.choice(("max_prob", "margin_confidence", "neg_entropy")),
            factor=rng.choice((0.5, 1.0, 2.0)),
            suppress_token_ids=tuple(rng.sample(range(VOCABULARY), 3)),
        )
        with tiny.engine(**case.settings) as engine:
            check(case, engine.generate(case.prompts, case.params, summary=False))


def test_entropy_bound_rule(tiny: TinyModel, oracle_model: WholeSequenceModel) -> None:
    for number in range(4):
        rng = random.Random(f"entropy {number}")
        case = make_case(
            oracle_model,
            rng,
            block_size=rng.choice((4, 8)),
            acceptance_rule="entropy_bound",
            entropy_bound=rng.choice((0.5, 2.0, 5.0)),
        )
        with tiny.engine(**case.settings) as engine:
            check(case, engine.generate(case.prompts, case.params, summary=False))
