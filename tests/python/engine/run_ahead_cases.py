# SPDX-License-Identifier: Apache-2.0
"""Strategies whose decode steps a device plans itself, and requests to compare the two loops with."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from diffulex import SamplingParams
from diffulex.engine.engine import Diffulex
from diffulex.engine.output import RequestOutput
from diffulex.runner import row_share
from diffulex.runner.decode_loop import DecodeLoop
from fixtures.families import SHIFTED
from tiny_engine import TinyModel
from tiny_gemma import TinyGemma

#: Prompts, and what is asked for each.
Requests = tuple[list[list[int]], list[SamplingParams]]

FILL: dict[str, Any] = {"decoding_thresholds": {"accept_threshold": 0.3}}
EDIT: dict[str, Any] = {
    "sampling_mode": "edit",
    "decoding_thresholds": {"accept_threshold": 0.3, "edit_threshold": 0.4},
}
#: Name -> family, settings.
STRATEGIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "multi_bd": ("sdar", FILL),
    "edit": ("llada2", EDIT),
    "d2f": ("llada", {**FILL, "decoding_strategy": "d2f"}),
    "d2f_on_the_grid": ("llada", {**FILL, "decoding_strategy": "d2f", "d2f_block_grid": True}),
    "multi_bd_shifted": ("fast_dllm_v2", {**FILL, "decoding_strategy": "multi_bd"}),
    "d2f_shifted": ("dream", {**FILL, "decoding_strategy": "d2f"}),
    "dual_cache": ("fast_dllm_v2", {**FILL, "decoding_strategy": "fast_dllm_v2"}),
    "dual_blocks": (
        "fast_dllm_v2",
        {
            **FILL,
            "decoding_strategy": "fast_dllm_v2",
            "fdv2_use_block_cache": False,
            "fdv2_exact_graph_buckets": False,
        },
    ),
    "dmax": ("llada2_mini_dmax", {"decoding_strategy": "dmax", "token_merge_top_k": 3}),
}


#: Those with a block buffer: a dual cache runs no block that is not open.
PACKING = [name for name in STRATEGIES if not name.startswith("dual")]


def model_of(tiny: TinyModel, name: str) -> TinyModel:
    family, _ = STRATEGIES[name]
    if family == "sdar":
        return tiny
    return tiny.under(family, shift=True) if family in SHIFTED else tiny.under(family)


#: Strategies whose steps have other shapes in the two loops, or feed the last bits of one step to the
#: next: on CUDA their tokens may differ.
ROUNDED = {"dmax", "dual_cache"}


@dataclasses.dataclass
class Place:
    """Where steps run, and whether graphs replay them."""

    tiny: TinyModel
    enforce_eager: bool

    def of(self, name: str, **settings: Any) -> tuple[TinyModel, dict[str, Any]]:
        """The model of a strategy and the settings of its engines."""
        if self.tiny.device == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
            if name in ROUNDED:
                pytest.skip(f"{name}: products round otherwise in the two loops")
        fixed = {"enforce_eager": self.enforce_eager}
        return model_of(self.tiny, name), {**STRATEGIES[name][1], **fixed, **settings}


def requests(rng: random.Random, count: int, vocab_size: int = 256) -> Requests:
    """Requests that end in every way, at different steps."""
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(1, 40))] for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=rng.choice((1, rng.randint(2, 48))),
            ignore_eos=rng.random() < 0.4,
            stop_token_ids=rng.sample(range(vocab_size), 12) if rng.random() < 0.4 else (),
            temperature=rng.choice((0.0, 0.0, 0.8)),
            top_k=rng.choice((None, None, 5)),
            top_p=rng.choice((None, 0.9)),
            seed=rng.getrandbits(64),
            max_nfe=rng.choice((None, None, None, 7)),
            max_repetition_run=rng.choice((None, None, 3)),
        )
        for _ in range(count)
    ]
    return prompts, params


def answers(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    return [(o.token_ids, o.completion_reason, o.metrics.nfe) for o in outputs]


def loop_of(engine: Diffulex) -> DecodeLoop:
    loop = engine._executor.runner._decode_loop
    assert loop is not None
    return loop


def num_compared(engine: Diffulex) -> int:
    check = loop_of(engine)._check
    assert check is not None
    return check.num_compared


def compare(
    model: TinyModel | TinyGemma,
    settings: dict[str, Any],
    seed: int,
    count: int = 9,
    make: Callable[[random.Random, int], Requests] = requests,
) -> int:
    """Both loops over the requests of `make`; returns how many steps ran ahead."""
    prompts, params = make(random.Random(seed), count)
    with model.engine(**settings, run_ahead="off") as engine:
        expected = engine.generate(prompts, params, summary=False)
        assert engine._executor.runner.num_ahead_steps == 0
    with model.engine(**settings, run_ahead="on", check_run_ahead=True) as engine:
        actual = engine.generate(prompts, params, summary=False)
        ahead, compared = engine._executor.runner.num_ahead_steps, num_compared(engine)
        # Steps of requests that must be watched by the host are not among them.
        assert ahead <= compared <= engine.stats().num_decode_steps
    assert answers(actual) == answers(expected)
    return ahead


def tokens_with_interrupts(
    engine: Diffulex, asked: Requests, point: str, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, ...]]:
    """Tokens by request of a run that Ctrl-C meets twice while a step runs ahead, behind `point`.

    `point` is a method of the scheduler or, for run_ahead and collect, of the runner.
    """
    ids = [engine.add_request(p, s) for p, s in zip(*asked, strict=True)]
    tokens: dict[int, list[int]] = {req_id: [] for req_id in ids}
    loop, scheduler = engine._loop, engine._scheduler
    executor: Any = loop._executor
    is_of_runner = point in ("run_ahead", "collect")
    holder, owner = (executor, "_runner") if is_of_runner else (loop, "_scheduler")
    target: Any = getattr(holder, owner)

    def interrupted(*args: Any) -> Any:
        getattr(target, point)(*args)
        raise KeyboardInterrupt

    class Late:
        def __getattr__(self, name: str) -> Any:
            return interrupted if name == point else getattr(target, name)

    num_interrupts = 0
    for number in range(300):
        if not engine.has_unfinished():
            break
        if number >= 4 and num_interrupts < 2 and executor.is_ahead:
            with monkeypatch.context() as patch:
                patch.setattr(holder, owner, Late())
                with pytest.raises(KeyboardInterrupt):
                    engine.step()
            num_interrupts += 1
            assert not executor.is_ahead
            scheduler.check_integrity()
            continue
        for step in engine.step():
            tokens[step.req_id] += step.token_ids
    assert num_interrupts == 2
    assert engine.stats().num_free_pages == engine.stats().num_pages
    return [tuple(tokens[req_id]) for req_id in ids]


def check_aborts_and_arrivals(
    engine: Diffulex,
    asked: Requests,
    expected: list[RequestOutput],
    rng: random.Random,
    abort_rate: float,
) -> int:
    """Requests come and go while steps run ahead; those that stay get their own tokens.

    Returns how many ended.
    """
    prompts, params = asked
    ids: dict[int, int] = {}
    aborted: set[int] = set()
    done: dict[int, RequestOutput] = {}
    waiting = list(range(len(prompts)))
    while waiting or engine.has_unfinished():
        if waiting and rng.random() < 0.3:
            index = waiting.pop(0)
            ids[engine.add_request(prompts[index], params[index])] = index
        running = [req_id for req_id in ids if ids[req_id] not in done]
        if running and rng.random() < abort_rate:
            req_id = rng.choice(running)
            assert engine.abort(req_id)
            aborted.add(ids[req_id])
        for step in engine.step():
            if step.output is not None:
                done[ids[step.req_id]] = step.output
        engine._scheduler.check_integrity()
    assert engine._executor.runner.num_ahead_steps > 3
    assert engine.stats().num_free_pages == engine.stats().num_pages
    assert aborted
    for index, output in done.items():
        if output.completion_reason == "aborted":
            assert index in aborted
            assert output.token_ids == expected[index].token_ids[: len(output.token_ids)]
        else:
            assert answers([output]) == answers([expected[index]])
    return len(done)


def pack_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the loop of a small model hold valid rows alone, however many are void."""
    monkeypatch.setattr(row_share.LOOP_LIMITS, "rows", 0)
    monkeypatch.setattr(row_share.LOOP_LIMITS, "products", 0.0)
    monkeypatch.setattr(row_share, "LOW_SHARE", 2.0)
    monkeypatch.setattr(row_share.LOOP_LIMITS, "upper_share", 2.0)
