# SPDX-License-Identifier: Apache-2.0
"""multi_bd: the engine's tokens equal those of the oracle, whatever the engine does to get them."""

from __future__ import annotations

import random

import pytest

from brute_force import Network
from cases import (
    VOCABULARY,
    Case,
    add_request,
    check,
    first_is_quick,
    make_case,
    random_prompt,
    random_settings,
    run_case,
    run_with_preemptions,
)
from fixtures.quick import quick
from tiny_engine import TinyModel

CASES_PER_TEST = 5
RULES = (
    "threshold",
    "threshold_non_strict",
    "static",
    "dynamic",
    "sequential",
    "factor",
    "leftmost_prefix",
    "hierarchy",
)

#: Filters of the family.
SDAR = {"filter_order": "k_then_p"}


@pytest.fixture(scope="module")
def oracle_model(tiny: TinyModel) -> Network:
    return Network(tiny.hf_config, tiny.tensors)


@pytest.mark.parametrize("group", first_is_quick(14))
def test_random_batches(tiny: TinyModel, oracle_model: Network, group: int) -> None:
    for number in range(CASES_PER_TEST):
        run_case(
            tiny, make_case(oracle_model, random.Random(f"plain {group} {number}"), family=SDAR)
        )


@pytest.mark.parametrize("group", first_is_quick(8))
def test_tight_page_pools(tiny: TinyModel, oracle_model: Network, group: int) -> None:
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
            add_request(case, oracle_model, rng, [], tail, max_tokens, **SDAR)
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


@pytest.mark.parametrize("group", first_is_quick(3))
def test_preemption_at_any_step(tiny: TinyModel, oracle_model: Network, group: int) -> None:
    num_preemptions = 0
    for number in range(2 * CASES_PER_TEST):
        rng = random.Random(f"preempt {group} {number}")
        settings = {"block_size": rng.choice((4, 8))}
        case = make_case(oracle_model, rng, settings=settings, family=SDAR)
        num_preemptions += run_with_preemptions(tiny, case, rng)
    assert num_preemptions > 2 * CASES_PER_TEST


@pytest.mark.parametrize("group", first_is_quick(4))
def test_chunked_prefill(tiny: TinyModel, oracle_model: Network, group: int) -> None:
    num_chunked_cases = 0
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"chunk {group} {number}")
        block, buffer_size = rng.choice((4, 8)), rng.randint(1, 3)
        case = make_case(
            oracle_model,
            rng,
            family=SDAR,
            settings={
                "block_size": block,
                "buffer_size": buffer_size,
                "enable_chunked_prefill": True,
                "max_num_batched_tokens": block * buffer_size + rng.randint(0, 8),
            },
        )
        with tiny.engine(**case.settings) as engine:
            outputs = engine.generate(case.prompts, case.params, summary=False)
            check(case, outputs)
            num_chunked_cases += any(output.metrics.prefill_steps > 1 for output in outputs)
    assert num_chunked_cases >= CASES_PER_TEST // 2


@pytest.mark.parametrize("group", first_is_quick(4))
def test_shared_prefixes(tiny: TinyModel, oracle_model: Network, group: int) -> None:
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"prefix {group} {number}")
        case = Case(random_settings(rng))
        block, page = rng.choice((4, 8, 16)), rng.choice((4, 8, 16))
        case.settings.update(block_size=block, page_size=page, enable_prefix_caching=True)
        prefix = random_prompt(rng, 2 * max(block, page) + rng.randint(0, 3))
        for _ in range(4):
            lengths = rng.randint(1, 12), rng.randint(1, 16)
            add_request(case, oracle_model, rng, prefix, *lengths, **SDAR)
        with tiny.engine(**case.settings) as engine:
            outputs = [engine.generate(case.prompts[0], case.params[0], summary=False)[0]]
            outputs += engine.generate(case.prompts[1:], case.params[1:], summary=False)
            check(case, outputs)
            hits = [output.metrics.cached_tokens for output in outputs]
            assert hits[0] == 0
            assert all(hit >= max(block, page) for hit in hits[1:]), hits


@pytest.mark.parametrize("group", first_is_quick(2))
@pytest.mark.parametrize("rule", quick(RULES, ("static", "factor", "hierarchy")))
def test_acceptance_rules(tiny: TinyModel, oracle_model: Network, rule: str, group: int) -> None:
    for number in range(2 * group, 2 * group + 2):
        rng = random.Random(f"{rule} {number}")
        block = rng.choice((4, 8, 16))
        settings = {
            "block_size": block,
            "acceptance_rule": rule,
            "denoising_steps": rng.choice((None, 2, 3, block)),
            "factor": rng.choice((0.5, 1.0, 2.0)),
            "low_threshold": rng.choice((0.1, 0.3)),
            "suppress_token_ids": tuple(rng.sample(range(VOCABULARY), 3)),
            "demote_token_ids": tuple(rng.sample(range(VOCABULARY), 20)),
            "forced_gate": rng.choice(("always", "prev_semi_complete")),
            "mask_suppression": rng.choice(("exclude", "renormalize")),
        }
        case = make_case(oracle_model, rng, settings=settings, family=SDAR)
        run_case(tiny, case)


@pytest.mark.parametrize(
    "ranking", quick(["margin_confidence", "neg_entropy"], ["margin_confidence"])
)
def test_rankings(tiny: TinyModel, oracle_model: Network, ranking: str) -> None:
    for number in range(4):
        rng = random.Random(f"{ranking} {number}")
        settings = {"block_size": rng.choice((4, 8)), "confidence_type": ranking}
        run_case(tiny, make_case(oracle_model, rng, settings=settings, family=SDAR))


def test_entropy_bound_rule(tiny: TinyModel, oracle_model: Network) -> None:
    for number in range(4):
        rng = random.Random(f"entropy {number}")
        settings = {
            "block_size": rng.choice((4, 8)),
            "acceptance_rule": "entropy_bound",
            "entropy_bound": rng.choice((0.5, 2.0, 5.0)),
        }
        run_case(tiny, make_case(oracle_model, rng, settings=settings, family=SDAR))
