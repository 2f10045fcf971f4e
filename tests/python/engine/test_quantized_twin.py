# SPDX-License-Identifier: Apache-2.0
"""Trained models in low precision against twins whose products follow the definitions in float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex import Diffulex, SamplingParams, ops
from diffulex.bench.evaluate import read_problems
from diffulex.nn.linear import Linear
from diffulex.ops import QuantizedRows, WeightScheme
from diffulex.quantization.scheme import SCHEMES
from diffulex.quantization.weights import QuantizedExperts, QuantizedWeight
from fixtures.paged_batch import PagedRunner, Rows
from fixtures.quantized import rows_by_product
from fixtures.quick import quick

ZOO = Path(__file__).parents[3] / "examples" / "zoo"
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, seed=1)
GROUP = 128


class Twin:
    """A matrix W [N, K] that quantises rows as docs/quantization.md says, and multiplies in float64."""

    def __init__(self, held: QuantizedWeight) -> None:
        self.scheme, self.num_rows, self.nbytes = held.scheme, held.num_rows, held.nbytes
        self.values = rows_by_product(held).double()

    def packed(self) -> Twin:
        return self

    def new_rows(self, x: torch.Tensor) -> None:
        return None

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """What the codes of rows stand for, float64."""
        if self.scheme == WeightScheme.INT4:
            return x.double()
        is_int8, depth = self.scheme == WeightScheme.INT8, x.size(1)
        groups = torch.nn.functional.pad(x.float(), (0, -depth % GROUP)).view(len(x), -1, GROUP)
        largest, limit = groups.abs().amax(-1, keepdim=True), 127.0 if is_int8 else 448.0
        scaled = groups * torch.where(largest > 0, limit / largest, 0.0)
        codes = scaled.clamp(-limit, limit)
        codes = codes.round() if is_int8 else codes.to(torch.float8_e4m3fn).float()
        return (codes.double() * (largest / limit).double()).view(len(x), -1)[:, :depth]

    def multiply(
        self, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return out.copy_(x @ self.values.T + (0 if bias is None else bias))

    def product(
        self,
        x: torch.Tensor,
        out: torch.Tensor | None,
        bias: torch.Tensor | None,
        rows: QuantizedRows | None = None,
    ) -> torch.Tensor:
        assert rows is None
        out = x.new_empty(len(x), self.num_rows) if out is None else out
        return self.multiply(self.rows_of(x), out, bias)

    def gated_product(self, *_: object) -> bool:
        return False


ACTIVATIONS = {
    ops.Activation.SILU: torch.nn.functional.silu,
    ops.Activation.GELU_TANH: partial(torch.nn.functional.gelu, approximate="tanh"),
}


class ExpertTwins:
    """Routed experts, a token and a slot after the other: each result is float32, their sum float64."""

    def __init__(self, held: QuantizedExperts) -> None:
        self.w13, self.w2 = ([Twin(w) for w in side] for side in (held.w13, held.w2))
        self.nbytes = held.nbytes
        #: What took the rows in place of the router; None: it did.
        self.forced: ops.Routing | None = None

    def packed(self) -> ExpertTwins:
        return self

    def new_workspace(self, like: torch.Tensor, top_k: int) -> torch.Tensor:
        return like.new_empty(0, dtype=torch.uint8)

    def product(
        self,
        x: torch.Tensor,
        routing: ops.Routing,
        *,
        out: torch.Tensor,
        addend: torch.Tensor | None = None,
        act: ops.Activation = ops.Activation.SILU,
        **_: object,
    ) -> torch.Tensor:
        routing = routing if self.forced is None else self.forced
        total = torch.zeros_like(x, dtype=torch.float64) if addend is None else addend.double()
        for expert, (w13, w2) in enumerate(zip(self.w13, self.w2, strict=True)):
            tokens, slots = (routing.ids == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            gate, up = (w13.rows_of(x[tokens]) @ w13.values.T).chunk(2, 1)
            inner = (ACTIVATIONS[act](gate) * up).float()
            result = (w2.rows_of(inner) @ w2.values.T).float()
            weights = routing.weights[tokens, slots].double()
            total.index_add_(0, tokens, weights[:, None] * result)
        return out.copy_(total)


def replace_weights(model: Any) -> tuple[int, dict[QuantizedExperts, ExpertTwins]]:
    """Gives every matrix in low precision its twin: how many dense ones there were, and layers of experts."""
    dense, experts = 0, {}
    for module in model.modules():
        if isinstance(module, Linear) and isinstance(module.format, QuantizedWeight):
            module.format = Twin(module.format)  # type: ignore[assignment]
            dense += 1
        elif isinstance(held := getattr(module, "matrices", None), QuantizedExperts):
            module.matrices = experts[held] = ExpertTwins(held)
    return dense, experts


class Routes:
    """Where the rows of forwards went, layer by layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._seen: dict[QuantizedExperts, list[ops.Routing]] = {}
        plain = QuantizedExperts.product

        def product(held: QuantizedExperts, x: torch.Tensor, routing: ops.Routing, **rest: Any):
            copies = ops.Routing(*(part.clone() for part in routing))
            self._seen.setdefault(held, []).append(copies)
            return plain(held, x, routing, **rest)

        monkeypatch.setattr(QuantizedExperts, "product", product)

    def take(self) -> dict[QuantizedExperts, ops.Routing]:
        """Of all rows since the last call."""
        seen, self._seen = self._seen, {}
        return {held: ops.Routing(*map(torch.cat, zip(*each))) for held, each in seen.items()}


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
    *(("demo", scheme, 100, 1) for scheme in SCHEMES),
    *((model, scheme, 25, 1) for model in MODELS if model != "demo" for scheme in SCHEMES),
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
