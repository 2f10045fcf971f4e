# SPDX-License-Identifier: Apache-2.0
"""The bundled model in low precision against a twin whose products follow the definitions in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex import Diffulex, SamplingParams
from diffulex.bench.evaluate import read_problems
from diffulex.nn.linear import Linear
from diffulex.ops import QuantizedRows, WeightScheme
from diffulex.quantization.scheme import SCHEMES
from diffulex.quantization.weights import QuantizedWeight
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


def replace_weights(model: Any) -> int:
    """Gives every matrix in low precision its twin; how many there were."""
    count = 0
    for module in model.modules():
        if isinstance(module, Linear) and isinstance(module.format, QuantizedWeight):
            module.format = Twin(module.format)  # type: ignore[assignment]
            count += 1
    return count


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


CASES = [("int8", 4), *((scheme, 100) for scheme in SCHEMES)]


@pytest.mark.parametrize(("scheme", "count"), quick(CASES, CASES[:1]))
def test_tokens_and_logits_are_those_of_the_twin(scheme: str, count: int) -> None:
    """Last bits of a product may move a code of the next layer, and so a logit, but hardly a token."""
    with Diffulex("demo", device="cpu", quantization=scheme, num_pages=2048) as engine:
        model, block = engine._executor.runner.model, engine.config.decoding.block_size
        found = answers(engine, count)
        # Whole blocks: the last one behind a cache here, in the twin behind nothing.
        sequences = [[*ids, *answer] for ids, answer in found[:20]]
        sequences = [tokens[: len(tokens) // block * block] for tokens in sequences]
        logits = [last_rows(model, block, tokens, len(tokens) - block) for tokens in sequences]
        assert replace_weights(model) == 4 * engine.config.model.spec.num_layers
        again = answers(engine, count)
        expected = [last_rows(model, block, tokens, 0) for tokens in sequences]
    assert sum(len(answer) > 4 for _, answer in found) == count
    num_other = sum(one != two for one, two in zip(found, again, strict=True))
    assert num_other <= count // 50, f"{num_other} of {count} answers are others"
    difference, want = torch.cat(logits) - torch.cat(expected), torch.cat(expected)
    error = float(difference.norm() / want.norm())
    assert error <= (1e-5 if scheme == "int4" else 0.03), error
