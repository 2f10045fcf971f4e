# SPDX-License-Identifier: Apache-2.0
"""Random engines and requests with the oracle's answers.

Cases are random but seeded. A request with a decision closer to its bound than float32 can tell is
drawn again, so that the comparison can be exact on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from brute_force import BruteForceDecoder, Network, Outcome, RequestSettings, Settings
from diffulex import SamplingParams
from fixtures.checkpoints import EOS_ID, MASK_ID, TURN_END_ID
from tiny_engine import TinyModel

VOCABULARY = 256
MAX_MODEL_LEN = 128


def first_is_quick(num_groups: int) -> list[Any]:
    """Groups of random cases, of which all but the first are marked slow."""
    return [0, *(pytest.param(group, marks=pytest.mark.slow) for group in range(1, num_groups))]


@dataclass
class Case:
    """Settings of an engine, its requests, and the oracle's answers."""

    settings: dict[str, Any]
    strategy: str = "multi_bd"  # of the oracle: `edit` is a strategy of its own there
    is_shifted: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    expected: list[Outcome] = field(default_factory=list)


_SAME_NAME = {
    "acceptance_rule": "rule",
    "confidence_type": "ranking",
    "d2f_block_grid": "has_block_grid",
    "denoising_steps": "denoising_steps",
    "dmax_sampler_fast_path": "has_fast_path",
    "dmax_store_soft_embeddings": "stores_soft_embeddings",
    "entropy_bound": "entropy_bound",
    "factor": "factor",
    "fdv2_use_block_cache": "has_block_cache",
    "low_threshold": "low_threshold",
    "max_model_len": "max_model_len",
    "max_post_edit_steps": "max_post_edit_steps",
    "penalty_lambda": "penalty",
    "token_merge_mode": "merge_mode",
    "token_merge_renormalize": "has_renormalised_merge",
    "token_merge_top_k": "merge_top_k",
    "token_merge_weight": "merge_weight",
}
_THRESHOLDS = ("add_block", "semi_complete", "accept", "edit", "token_stability")


def oracle_settings(case: Case, **family: Any) -> Settings:
    """The oracle's view of an engine; `family` are values that the engine's family sets."""
    settings = case.settings
    values: dict[str, Any] = {
        "block_size": settings["block_size"],
        "buffer_size": settings["buffer_size"],
        "mask_id": MASK_ID,
        "candidate_limit": 260,
        "stop_ids": frozenset({EOS_ID, TURN_END_ID}),
        "max_model_len": MAX_MODEL_LEN,
        "strategy": case.strategy,
        "is_shifted": case.is_shifted,
        **family,
    }
    for name in _THRESHOLDS:
        if f"{name}_threshold" in settings["decoding_thresholds"]:
            values[name] = settings["decoding_thresholds"][f"{name}_threshold"]
    values.update({own: settings[key] for key, own in _SAME_NAME.items() if key in settings})
    values["suppressed"] = frozenset(settings.get("suppress_token_ids", ()))
    values["demoted"] = frozenset(settings.get("demote_token_ids", ()))
    values["has_renormalisation"] = settings.get("mask_suppression") == "renormalize"
    values["is_always_open"] = settings.get("forced_gate") == "always"
    return Settings(**values)


def oracle_request(params: SamplingParams) -> RequestSettings:
    """The oracle's view of a request."""
    return RequestSettings(
        max_tokens=params.max_tokens,
        temperature=params.temperature or 0.0,
        seed=params.seed or 0,
        ignore_eos=params.ignore_eos,
        stop_ids=frozenset(params.stop_token_ids),
        max_nfe=params.max_nfe,
        max_repetition_run=params.max_repetition_run,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        min_p=params.min_p or 0.0,
        **{name: getattr(params, f"{name}_threshold") for name in _THRESHOLDS},
    )


def random_settings(rng: random.Random) -> dict[str, Any]:
    """An engine of multi_bd."""
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
    """A request with any of the parameters."""
    return SamplingParams(
        temperature=rng.choice((0.0, 0.0, 0.7, 1.3)),
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.sample(range(VOCABULARY), 2) if rng.random() < 0.5 else (),
        seed=rng.getrandbits(64),
        max_repetition_run=rng.choice((None, None, None, 2, 3)),
        accept_threshold=rng.choice((None, None, None, 0.2)),
        semi_complete_threshold=rng.choice((None, None, None, 0.5)),
        add_block_threshold=rng.choice((None, None, None, 0.3)),
        top_p=rng.choice((None, None, 0.5, 0.9)),
        top_k=rng.choice((None, None, 3, 20)),
        min_p=rng.choice((None, None, None, 0.05)),
    )


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """Token ids; a mask id inside the prompt is an ordinary token."""
    return [MASK_ID if rng.random() < 0.02 else rng.randrange(VOCABULARY) for _ in range(length)]


def add_request(
    case: Case,
    network: Network,
    rng: random.Random,
    prefix: list[int],
    tail_len: int,
    max_tokens: int,
    **family: Any,
) -> None:
    """Appends a request whose outcome float32 decides."""
    settings = oracle_settings(case, **family)
    decoder = BruteForceDecoder(network, settings)
    while True:
        prompt = prefix + random_prompt(rng, tail_len)
        params = random_params(rng, max_tokens)
        outcome = decoder.decode(prompt, oracle_request(params))
        if outcome.margin > 1 and _is_stable(network, settings, prompt, params, outcome):
            break
    case.prompts.append(prompt)
    case.params.append(params)
    case.expected.append(outcome)


def _is_stable(
    network: Network,
    settings: Settings,
    prompt: list[int],
    params: SamplingParams,
    outcome: Outcome,
) -> bool:
    """Whether errors of the size of float32's leave an outcome as it is.

    dmax feeds probabilities back as embeddings, so that an error may grow from step to step.
    """
    if settings.strategy != "dmax" or settings.merge_weight == 0:
        return True
    for seed in range(6):
        decoder = BruteForceDecoder(network.perturbed(seed), settings)
        again = decoder.decode(prompt, oracle_request(params))
        if (again.token_ids, again.decided_per_step) != (
            outcome.token_ids,
            outcome.decided_per_step,
        ):
            return False
    return True


def make_case(
    network: Network,
    rng: random.Random,
    *,
    strategy: str = "multi_bd",
    is_shifted: bool = False,
    family: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    thresholds: dict[str, float] | None = None,
    num_reqs: int | None = None,
) -> Case:
    """One to four requests of any length in a random engine."""
    case = Case({**random_settings(rng), **(settings or {})}, strategy, is_shifted)
    case.settings["decoding_thresholds"].update(thresholds or {})
    for _ in range(num_reqs or rng.randint(1, 4)):
        tail_len, max_tokens = rng.randint(1, 40), rng.randint(1, 20)
        add_request(case, network, rng, [], tail_len, max_tokens, **(family or {}))
    return case


def check(case: Case, outputs: Any) -> None:
    """The engine's tokens and reasons are those of the oracle."""
    for index, (output, expected) in enumerate(zip(outputs, case.expected, strict=True)):
        where = f"request {index} of {case.settings}, {case.params[index]}, {case.prompts[index]}"
        assert list(output.token_ids) == expected.token_ids, where
        assert output.completion_reason == expected.reason, where


def check_steps(case: Case, outputs: Any) -> None:
    """Without preemptions and cache hits even the steps are the same."""
    for output, expected in zip(outputs, case.expected, strict=True):
        assert list(output.metrics.new_tokens_per_step) == expected.decided_per_step, case.settings
        assert output.metrics.nfe == expected.nfe


def run_case(model: TinyModel, case: Case) -> None:
    """Decodes the case in one batch and checks everything."""
    with model.engine(**case.settings) as engine:
        outputs = engine.generate(case.prompts, case.params, summary=False)
        check(case, outputs)
        stats = engine.stats()
        assert stats.num_free_pages == stats.num_pages
        if stats.num_preemptions == 0 and not case.settings["enable_prefix_caching"]:
            check_steps(case, outputs)


def run_mixed(model: Any, case: Any) -> tuple[list[Any], int]:
    """The outputs of a case, in steps that prompts and decoding requests may share, and how many did."""
    settings = {
        **case.settings,
        "max_num_reqs": 2,
        "mixed_step_rows": 96,
        "max_num_batched_tokens": 256,
        "step_records": 1024,
    }
    with model.engine(**settings) as engine:
        outputs = engine.generate(case.prompts, case.params, summary=False)
        steps = engine.step_stats()
        rows = steps["query_rows"][(steps["n_prefill"] > 0) & (steps["n_decode"] > 0)]
        assert rows.max(initial=0) <= 96
        stats, totals = engine.stats(), outputs.stats
        assert stats.num_mixed_steps == len(rows)
        assert stats.num_free_pages == stats.num_pages
        assert totals.decode_s + totals.prefill_s == pytest.approx(totals.total_s)
        return outputs, len(rows)


def run_with_preemptions(model: TinyModel, case: Case, rng: random.Random) -> int:
    """Decodes the case while requests are preempted at random; returns how many were."""
    with model.engine(**case.settings) as engine:
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
        engine._scheduler.check_integrity()
        return int(engine.stats().num_preemptions)
