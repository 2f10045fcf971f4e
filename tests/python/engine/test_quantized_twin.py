# SPDX-License-Identifier: Apache-2.0
"""Trained models in low precision against twins whose products follow the definitions in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.bench.evaluate import read_problems
from diffulex.quantization.scheme import SCHEMES
from fixtures.paged_batch import PagedRunner, Rows
from fixtures.quick import quick
from fixtures.twins import Routes, replace_weights

ZOO = Path(__file__).parents[3] / "examples" / "zoo"
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, seed=1)


def answers(engine: Diffulex, count: int) -> list[tuple[list[int], tuple[int, ...]]]:
    """Tokens of prompts and of what follows."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    prompts: list[Any] = [p.question for p in read_problems(str(ZOO / "heldout.jsonl"))[:count]]
    if tokenizer.has_chat_template:
        turns = ([{"role": "user", "content": question}] for question in prompts)
        prompts = [tokenizer.apply_chat_template(turn) for turn in turns]
    ids = [item if isinstance(item, list) else tokenizer.encode(item) for item in prompts]
    outputs = engine.generate(ids, GREEDY, summary=False)
    return [(i, tuple(o.token_ids)) for i, o in zip(ids, outputs, strict=True)]


def last_rows(model: Any, block: int, tokens: list[int], num_cached: int) -> torch.Tensor:
    """Logits of the rows behind those that a forward before them has stored."""
    runner = PagedRunner(model, block)
    sequence = runner.sequence(tokens)
    if num_cached:
        runner.forward([Rows(sequence, num_cached, should_store=True)])
    rows = runner.forward([Rows(sequence, len(tokens), should_store=False)])[0]
    return rows[len(rows) - block :].double()


#: Model, and how many dense matrices and layers of routed experts it has in low precision.
MODELS = {
    "demo": (24, 0),
    "d2f_llada": (24, 0),
    "d2f_dream": (24, 0),
    "fast_dllm_v2": (24, 0),
    "edit_llada2": (20, 4),
    "dmax_llada2": (20, 4),
    "diffusion_gemma": (20, 5),
}
#: What a family leaves in its dtype: the attention, two matrices a layer, or the experts.
KEPT = {
    ("diffusion_gemma", "int4"): (10, 0),
    ("edit_llada2", "int4"): (0, 4),
    ("dmax_llada2", "int4"): (0, 4),
}
#: Of int4 no code moves.
MAX_ERROR = {"fp8": 0.03, "fp8_block": 0.03, "int8": 0.01, "int4": 1e-5}
#: Model, scheme, problems, and how many of them may have other tokens.
CASES = [
    ("demo", "int8", 4, 0),
    ("edit_llada2", "int8", 4, 0),
    *((model, scheme, 100, 1) for model in MODELS for scheme in SCHEMES),
]


@pytest.mark.parametrize(("model", "scheme", "count", "max_others"), quick(CASES, CASES[:2]))
def test_tokens_and_logits_are_those_of_the_twin(
    monkeypatch: pytest.MonkeyPatch, model: str, scheme: str, count: int, max_others: int
) -> None:
    """Last bits of a product may move a code of the next layer, and so a logit, but hardly a token.

    That moves some rows, but never all: the closest ones tell whether the twin's rows are quantised as
    they should be. A row that another expert takes has other logits altogether: those are compared where
    both went the same way.
    """
    path = model if model == "demo" else str(ZOO / model)
    with Diffulex(path, device="cpu", quantization=scheme, num_pages=2048) as engine:
        decoder, block = engine._executor.runner.model, engine.config.decoding.block_size
        found = answers(engine, count)
        # Whole blocks: the last one behind a cache here, in the twin behind nothing.
        sequences = [[*ids, *answer] for ids, answer in found[:20]]
        sequences = [tokens[: len(tokens) // block * block] for tokens in sequences]
        routes, ways, logits, expected = Routes(monkeypatch), [], [], []
        for tokens in sequences:
            logits.append(last_rows(decoder, block, tokens, len(tokens) - block))
            ways.append(routes.take())
        dense, experts = replace_weights(decoder)
        kept_dense, kept_experts = KEPT.get((model, scheme), (0, 0))
        assert (dense + kept_dense, len(experts) + kept_experts) == MODELS[model]
        again = answers(engine, count)
        for tokens, way in zip(sequences, ways, strict=True):
            assert way.keys() == experts.keys()
            for held, routing in way.items():
                experts[held].forced = routing
            expected.append(last_rows(decoder, block, tokens, 0))
    assert sum(len(answer) > 4 for _, answer in found) == count
    num_other = sum(one != two for one, two in zip(found, again, strict=True))
    assert num_other <= max_others, f"{num_other} of {count} are others"
    difference, want = torch.cat(logits) - torch.cat(expected), torch.cat(expected)
    error = float(difference.norm() / want.norm())
    assert error <= MAX_ERROR[scheme], error
    closest = float((difference.norm(dim=1) / want.norm(dim=1)).quantile(0.02))
    assert closest <= 1e-5, closest
