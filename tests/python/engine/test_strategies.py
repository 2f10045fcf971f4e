# SPDX-License-Identifier: Apache-2.0
"""Every strategy of masked models: the engine's tokens equal those of a reference without it.

All families share one tiny network here; what a family's network computes is tested elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
    run_mixed,
    run_with_preemptions,
)
from diffulex import Diffulex, SamplingParams
from fixtures.quick import quick
from tiny_engine import TinyModel

CASES_PER_TEST = 8
#: A case of four short requests needs a tenth of them.
MOST_STEPS = 2000


@dataclass(frozen=True)
class Variant:
    """A strategy on a model: names for the engine and for the oracle."""

    model_name: str
    engine: dict[str, Any]
    oracle: str
    family: dict[str, Any]
    is_shifted: bool = False
    spec: dict[str, Any] = field(default_factory=dict)


P_FIRST, K_FIRST = {"filter_order": "p_then_k"}, {"filter_order": "k_then_p"}
THRESHOLD = {"acceptance_rule": "threshold"}
VARIANTS = {
    "shifted_multi_bd": Variant(
        "dream",
        {"decoding_strategy": "multi_bd", **THRESHOLD},
        "multi_bd",
        P_FIRST,
        is_shifted=True,
    ),
    "d2f": Variant("llada", {"decoding_strategy": "d2f", **THRESHOLD}, "d2f", P_FIRST),
    "shifted_d2f": Variant(
        "dream", {"decoding_strategy": "d2f", **THRESHOLD}, "d2f", P_FIRST, is_shifted=True
    ),
    "d2f_on_the_grid": Variant(
        "llada",
        {"decoding_strategy": "d2f", "d2f_block_grid": True, **THRESHOLD},
        "d2f",
        P_FIRST,
    ),
    "shifted_d2f_on_the_grid": Variant(
        "dream",
        {"decoding_strategy": "d2f", "d2f_block_grid": True, **THRESHOLD},
        "d2f",
        P_FIRST,
        is_shifted=True,
    ),
    "tempered_multi_bd": Variant(
        "fast_dllm_v2",
        {"decoding_strategy": "multi_bd", "top_p": 1.0, **THRESHOLD},
        "multi_bd",
        {**P_FIRST, "confidence_space": "tempered"},
        is_shifted=True,
    ),
    "edit": Variant(
        "llada2",
        {"sampling_mode": "edit"},
        "edit",
        {**K_FIRST, "confidence_space": "raw"},
    ),
    "dmax": Variant(
        "llada2",
        {"decoding_strategy": "dmax"},
        "dmax",
        {**K_FIRST, "confidence_space": "raw"},
    ),
    "fast_dllm_v2": Variant(
        "fast_dllm_v2",
        {"decoding_strategy": "fast_dllm_v2", "top_p": 1.0, **THRESHOLD},
        "fast_dllm_v2",
        {**P_FIRST, "confidence_space": "tempered"},
        spec={"shift": True},
    ),
    "fast_dllm_v2_without_block_cache": Variant(
        "fast_dllm_v2",
        {
            "decoding_strategy": "fast_dllm_v2",
            "fdv2_use_block_cache": False,
            "top_p": 1.0,
            **THRESHOLD,
        },
        "fast_dllm_v2",
        {**P_FIRST, "confidence_space": "tempered"},
        spec={"shift": True},
    ),
}
#: The oracle of dmax, which keeps whole distributions, is an order of magnitude slower than the others.
NAMES = quick(sorted(VARIANTS), VARIANTS.keys() - {"dmax"})
#: One of each built-in state machine, with and without shifted logits.
FEW = quick(sorted(VARIANTS), ("d2f", "edit", "fast_dllm_v2", "shifted_multi_bd"))


@pytest.fixture(scope="module")
def network(tiny: TinyModel) -> Network:
    return Network(tiny.hf_config, tiny.tensors)


@pytest.fixture(scope="module")
def network_cuda(tiny_cuda: TinyModel) -> Network:
    return Network(tiny_cuda.hf_config, tiny_cuda.tensors)


def decoded_within(engine: Diffulex, case: Case, most_steps: int) -> list[Any]:
    """Results of the case; requests that preempt each other for ever fail instead of hanging."""
    ids = [
        engine.add_request(prompt, params)
        for prompt, params in zip(case.prompts, case.params, strict=True)
    ]
    done = {}
    for _ in range(most_steps):
        if not engine.has_unfinished():
            break
        done.update({s.req_id: s.output for s in engine.step() if s.output is not None})
    assert set(done) == set(ids), f"unfinished after {most_steps} steps: {engine.stats()}"
    return [done[req_id] for req_id in ids]


def model_of(tiny: TinyModel, variant: Variant) -> TinyModel:
    spec = {"shift": variant.is_shifted, **variant.spec}
    return tiny.under(variant.model_name, **spec)


def strategy_settings(variant: Variant, rng: random.Random) -> dict[str, Any]:
    """Further random settings of the strategy."""
    settings = dict(variant.engine)
    if variant.oracle == "fast_dllm_v2":
        settings.update(block_size=rng.choice((4, 8)), buffer_size=rng.randint(2, 4))
    elif variant.oracle in ("edit", "dmax"):
        settings.update(block_size=rng.choice((4, 8, 16)), buffer_size=rng.randint(1, 4))
    if variant.oracle == "edit":
        settings.update(
            max_post_edit_steps=rng.choice((0, 1, 3, 16)),
            penalty_lambda=rng.choice((0.0, 0.0, 1.0)),
            forced_gate=rng.choice(("prev_semi_complete", "prev_semi_complete", "always")),
        )
    if variant.oracle == "dmax":
        settings.update(
            token_merge_top_k=rng.choice((1, 1, 2, 4)),
            token_merge_mode=rng.choice(("dmax_topk", "dmax_topk", "iter_smooth_topk")),
            token_merge_renormalize=rng.random() < 0.7,
            token_merge_weight=rng.choice((1.0, 1.0, 0.5, 0.0)),
            forced_gate=rng.choice(("prev_semi_complete", "prev_semi_complete", "always")),
        )
    return settings


def strategy_thresholds(variant: Variant, rng: random.Random) -> dict[str, float]:
    thresholds = {"edit_threshold": rng.choice((0.0, 0.1, 0.3, 0.6))}
    if variant.oracle in ("edit", "dmax"):
        thresholds["token_stability_threshold"] = rng.choice((0.0, 0.0, 0.5, 0.9))
    return thresholds


def random_case(
    network: Network,
    name: str,
    rng: random.Random,
    num_reqs: int | None = None,
    **settings: Any,
) -> tuple[Variant, Case]:
    variant = VARIANTS[name]
    case = make_case(
        network,
        rng,
        strategy=variant.oracle,
        is_shifted=variant.is_shifted,
        family=variant.family,
        settings={**strategy_settings(variant, rng), **settings},
        thresholds=strategy_thresholds(variant, rng),
        num_reqs=num_reqs,
    )
    return variant, case


@pytest.mark.parametrize("group", first_is_quick(6))
@pytest.mark.parametrize("name", FEW)
def test_random_batches(tiny: TinyModel, network: Network, name: str, group: int) -> None:
    for number in range(CASES_PER_TEST // 2):
        rng = random.Random(f"{name} {group} {number}")
        variant, case = random_case(network, name, rng)
        run_case(model_of(tiny, variant), case)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_single_requests_step_by_step(tiny: TinyModel, network: Network, name: str) -> None:
    """Alone and without cache hits the number of forwards and their yield agree as well."""
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"steps {name} {number}")
        settings = {"enable_prefix_caching": False, "num_pages": 128}
        variant, case = random_case(network, name, rng, **settings)
        run_case(model_of(tiny, variant), case)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_preemption_at_any_step(tiny: TinyModel, network: Network, name: str) -> None:
    num_preemptions = 0
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"preempt {name} {number}")
        variant, case = random_case(network, name, rng)
        num_preemptions += run_with_preemptions(model_of(tiny, variant), case, rng)
    assert num_preemptions >= CASES_PER_TEST // 2


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_tight_page_pools(tiny: TinyModel, network: Network, name: str) -> None:
    variant = VARIANTS[name]
    num_preemptions = 0
    for number in range(CASES_PER_TEST // 2):
        rng = random.Random(f"tight {name} {number}")
        settings = {**random_settings(rng), **strategy_settings(variant, rng)}
        settings.update(
            block_size=4,
            buffer_size=2,
            page_size=4,
            max_num_reqs=6,
            decode_headroom=False,
            # Long answers over mixed embeddings are rarely decided by float32.
            token_merge_weight=0.0,
        )
        settings["decoding_thresholds"].update(strategy_thresholds(variant, rng))
        case = Case(settings, variant.oracle, variant.is_shifted)
        longest = 0
        for _ in range(4):
            tail, max_tokens = rng.randint(4, 16), rng.randint(12, 20)
            add_request(case, network, rng, [], tail, max_tokens, **variant.family)
            longest = max(longest, tail + max_tokens)
        # fast_dllm_v2 stores whole blocks of eight.
        case.settings["num_pages"] = -(-longest // 8) * 2 + rng.randint(0, 2)
        with model_of(tiny, variant).engine(**case.settings) as engine:
            check(case, decoded_within(engine, case, MOST_STEPS))
            engine._scheduler.check_integrity()
            stats = engine.stats()
            num_preemptions += stats.num_preemptions
            assert stats.num_free_pages == stats.num_pages
    assert num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_chunked_prefill(tiny: TinyModel, network: Network, name: str) -> None:
    variant = VARIANTS[name]
    if variant.oracle == "d2f":
        pytest.skip("d2f prompts are not cut")
    num_chunked_cases = 0
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"chunk {name} {number}")
        block, buffer_size = 4, rng.randint(2, 3)
        settings = {
            "block_size": block,
            "buffer_size": buffer_size,
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": block * buffer_size + rng.randint(0, 8),
        }
        variant, case = random_case(network, name, rng, **settings)
        with model_of(tiny, variant).engine(**case.settings) as engine:
            outputs = engine.generate(case.prompts, case.params, summary=False)
            check(case, outputs)
            num_chunked_cases += any(output.metrics.prefill_steps > 1 for output in outputs)
    assert num_chunked_cases > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_prompts_beside_decoding_requests(tiny: TinyModel, network: Network, name: str) -> None:
    num_mixed = 0
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"mixed {name} {number}")
        is_chunked = number % 2 == 0 and VARIANTS[name].oracle != "d2f"
        settings = {"enable_chunked_prefill": is_chunked, "num_pages": 128}
        variant, case = random_case(network, name, rng, **settings, num_reqs=4)
        if case.settings["block_size"] * case.settings["buffer_size"] > 64:
            continue  # one of them alone fills a step
        outputs, count = run_mixed(model_of(tiny, variant), case)
        check(case, outputs)
        num_mixed += count
    assert num_mixed > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_shared_prefixes(tiny: TinyModel, network: Network, name: str) -> None:
    variant = VARIANTS[name]
    num_hits = 0
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"prefix {name} {number}")
        settings = {**random_settings(rng), **strategy_settings(variant, rng)}
        settings.update(block_size=4, page_size=4, enable_prefix_caching=True)
        settings["decoding_thresholds"].update(strategy_thresholds(variant, rng))
        case = Case(settings, variant.oracle, variant.is_shifted)
        prefix = random_prompt(rng, 16 + rng.randint(0, 3))
        for _ in range(4):
            tail, max_tokens = rng.randint(0, 12), rng.randint(1, 16)
            add_request(case, network, rng, prefix, tail, max_tokens, **variant.family)
        with model_of(tiny, variant).engine(**case.settings) as engine:
            outputs = [engine.generate(case.prompts[0], case.params[0], summary=False)[0]]
            outputs += engine.generate(case.prompts[1:], case.params[1:], summary=False)
            check(case, outputs)
            num_hits += sum(output.metrics.cached_tokens > 0 for output in outputs)
    assert (num_hits == 0) == (variant.oracle == "d2f")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_lengths_around_every_boundary(tiny: TinyModel, network: Network, name: str) -> None:
    variant = VARIANTS[name]
    rng = random.Random(f"lengths {name}")
    settings = {**random_settings(rng), **strategy_settings(variant, rng)}
    settings.update(block_size=4, buffer_size=2, page_size=8, max_model_len=40)
    settings["decoding_thresholds"].update(strategy_thresholds(variant, rng))
    case = Case(settings, variant.oracle, variant.is_shifted)
    for prompt_len in (1, 3, 4, 5, 7, 8, 9, 16, 17, 38, 39):
        for max_tokens in (1, 3, 8, 9):
            add_request(case, network, rng, [], prompt_len, max_tokens, **variant.family)
    run_case(model_of(tiny, variant), case)


@pytest.mark.slow
def test_soft_embeddings_in_the_cache(tiny: TinyModel, network: Network) -> None:
    for number in range(CASES_PER_TEST):
        rng = random.Random(f"soft {number}")
        variant, case = random_case(network, "dmax", rng, dmax_store_soft_embeddings=True)
        run_case(model_of(tiny, variant), case)


@pytest.mark.parametrize("name", FEW)
def test_a_seed_means_the_same_tokens_in_any_company(tiny: TinyModel, name: str) -> None:
    variant = VARIANTS[name]
    model = model_of(tiny, variant)
    rng = random.Random(f"company {name}")
    settings = {**variant.engine, "block_size": 4, "buffer_size": 2, "max_num_reqs": 64}
    prompts = [random_prompt(rng, rng.randint(1, 24)) for _ in range(64)]
    params = [
        SamplingParams(temperature=1.0, top_k=40, max_tokens=6, seed=index, ignore_eos=True)
        for index in range(64)
    ]
    with model.engine(**settings, num_pages=2048) as engine:
        together = engine.generate(prompts, params, summary=False)
    for index in (0, 17, 63):
        with model.engine(**settings) as engine:
            alone = engine.generate([prompts[index]], [params[index]], summary=False)[0]
        assert alone.token_ids == together[index].token_ids


def test_full_prefix_hit_of_a_shifted_model(tiny: TinyModel) -> None:
    """The row that predicts the first token is computed, not borrowed."""
    model = model_of(tiny, VARIANTS["shifted_multi_bd"])
    prompt = random_prompt(random.Random(1), 16)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    settings = {"decoding_strategy": "multi_bd", "block_size": 4, "buffer_size": 1, "page_size": 4}
    with model.engine(**settings) as engine:
        cold = engine.generate([prompt], params, summary=False)[0]
        warm = engine.generate([prompt], params, summary=False)[0]
    assert warm.metrics.cached_tokens == 12
    assert warm.token_ids == cold.token_ids


def test_first_token_behind_whole_fast_dllm_v2_blocks(tiny: TinyModel, network: Network) -> None:
    """It is the best one of the prompt's last row, as in autoregressive decoding."""
    model = model_of(tiny, VARIANTS["fast_dllm_v2"])
    rng = random.Random(2)
    for temperature in (0.0, 1.0):
        prompt = [rng.randrange(VOCABULARY) for _ in range(64)]
        row = network.block_causal(prompt, 32).logits[-1].copy()
        row[259:] = -np.inf
        params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=temperature, seed=3)
        with model.engine(block_size=8, buffer_size=4) as engine:
            output = engine.generate([prompt], params, summary=False)[0]
        assert output.token_ids == (int(row.argmax()),)
        assert output.metrics.nfe == 1


def test_d2f_reaches_the_last_position_of_the_model(tmp_path: Path) -> None:
    """Blocks that start behind the prompt may reach past the model's last position."""
    model = TinyModel(tmp_path, "cpu", max_position_embeddings=64).under("llada")
    with model.engine(decoding_strategy="d2f", block_size=8, max_model_len=64) as engine:
        (output,) = engine.generate(
            [list(range(1, 52))], SamplingParams(max_tokens=50, ignore_eos=True), summary=False
        )
    assert output.completion_reason == "max_model_len_reached"
    assert len(output.token_ids) == 64 - 51


def test_streams_of_editing_strategies_hold_what_is_final(tiny: TinyModel) -> None:
    for name in ("edit", "dmax"):
        model = model_of(tiny, VARIANTS[name])
        settings = {**VARIANTS[name].engine, "block_size": 4, "buffer_size": 2}
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        with model.engine(**settings) as engine:
            events = list(engine.stream([1, 2, 3, 4, 5], params))
            pieces = [token for event in events for token in event.token_ids]
            assert tuple(pieces) == events[-1].output.token_ids
            assert "".join(event.text for event in events) == events[-1].output.text
            for event in engine.stream([1, 2, 3, 4, 5], params, mode="denoise"):
                if event.snapshot is not None:
                    settled = event.snapshot.token_ids
                    assert settled == tuple(pieces)[: len(settled)]


def test_saved_rows_do_not_outlive_their_request(tiny: TinyModel) -> None:
    """An aborted request leaves its slot; the next one there starts from its own rows."""
    model = model_of(tiny, VARIANTS["shifted_multi_bd"])
    rng = random.Random(5)
    prompts = [random_prompt(rng, 8) for _ in range(2)]
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=9)
    settings = {"block_size": 4, "buffer_size": 1, "max_num_reqs": 1, **THRESHOLD}
    settings["decoding_strategy"] = "multi_bd"
    with model.engine(**settings) as engine:
        expected = engine.generate([prompts[1]], params, summary=False)[0]
    with model.engine(**settings) as engine:
        first = engine.add_request(prompts[0], params)
        for _ in range(3):
            engine.step()
        engine.abort(first)
        second = engine.add_request(prompts[1], params)
        done = {}
        while engine.has_unfinished():
            done.update({s.req_id: s.output for s in engine.step() if s.output is not None})
    assert done[second].token_ids == expected.token_ids


@pytest.mark.cuda
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_strategies_on_cuda(
    tiny_cuda: TinyModel, network_cuda: Network, name: str, enforce_eager: bool
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for number in range(CASES_PER_TEST // 2):
        rng = random.Random(f"cuda {name} {number}")
        variant, case = random_case(network_cuda, name, rng, enforce_eager=enforce_eager)
        run_case(model_of(tiny_cuda, variant), case)


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
def test_graphs_equal_eager_steps(tiny_cuda: TinyModel, name: str) -> None:
    variant = VARIANTS[name]
    model = model_of(tiny_cuda, variant)
    rng = random.Random(f"graphs {name}")
    settings = {**variant.engine, "block_size": 8, "buffer_size": 2, "max_num_reqs": 11}
    prompts = [random_prompt(rng, rng.randint(1, 40)) for _ in range(24)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 24),
            ignore_eos=True,
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.getrandbits(64),
        )
        for _ in range(24)
    ]
    with model.engine(**settings) as engine:
        graphed = engine.generate(prompts, params, summary=False)
        assert graphed.stats.num_graph_steps > 0
        assert graphed.stats.num_graph_fallbacks == 0
    with model.engine(**settings, enforce_eager=True) as engine:
        eager = engine.generate(prompts, params, summary=False)
    assert [o.token_ids for o in graphed] == [o.token_ids for o in eager]
    assert [o.metrics.nfe for o in graphed] == [o.metrics.nfe for o in eager]
