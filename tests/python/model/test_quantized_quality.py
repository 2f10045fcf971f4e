# SPDX-License-Identifier: Apache-2.0
"""How far the logits of a random model move under every scheme; a guard, not a measure of answers."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex.checkpoint.auto_model import random_model
from diffulex.nn.kv_cache import kv_dtype
from diffulex.quantization.scheme import SCHEMES, QuantizationPlan
from fixtures.paged_batch import PagedRunner, Rows
from fixtures.quantized import quantize_in_place

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks" / "python"))

from published_shapes import SHAPES

pytestmark = pytest.mark.slow

HIDDEN, BLOCK, CACHED = 2048, 32, 64
SHAPE = SHAPES["sdar-8b"].with_keys(
    vocab_size=16384,
    hidden_size=HIDDEN,
    intermediate_size=6144,
    num_hidden_layers=6,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    mask_token_id=16383,
    eos_token_id=16382,
    block_size=BLOCK,
)
#: Norms of trained models have a few channels far above the others.
NUM_OUTLIERS, OUTLIER = 6, 20.0


#: A model, and tokens.
Drawn = tuple[Any, list[int]]


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    """Drawn once, which takes longer than the products: a test quantises a copy."""
    model: Any = random_model("sdar", SHAPE.facts().spec, torch.float32, "cpu", seed=3)
    generator = torch.Generator().manual_seed(1)
    norms = [
        values
        for name, values in model.layers.named_parameters()
        if "norm" in name and values.numel() == HIDDEN
    ]
    assert len(norms) == 12
    for values in norms:
        values.data[torch.randperm(HIDDEN, generator=generator)[:NUM_OUTLIERS]] *= OUTLIER
    return model, torch.randint(0, 16000, (CACHED + BLOCK,), generator=generator).tolist()


def logits(drawn: Drawn, scheme: str | None) -> torch.Tensor:
    """Logits [32, V] of a block behind 64 cached tokens, weights or else the cache in `scheme`."""
    model, tokens = drawn
    if scheme in SCHEMES:
        model = copy.deepcopy(model)
        quantize_in_place(model, QuantizationPlan(scheme))
    runner = PagedRunner(model, BLOCK, kv_dtype=kv_dtype(scheme or "auto", torch.float32))
    sequence = runner.sequence(tokens)
    with torch.inference_mode():
        runner.forward([Rows(sequence, CACHED, should_store=True)])
        return runner.forward([Rows(sequence, CACHED + BLOCK, should_store=False)])[0].float()


@pytest.fixture(scope="module")
def dense(drawn: Drawn) -> torch.Tensor:
    return logits(drawn, None)


# A scheme that changes nothing is as wrong as one that changes too much.
@pytest.mark.parametrize(
    ("scheme", "least", "most"),
    [
        ("fp8", 0.15, 0.27),
        ("fp8_block", 0.15, 0.27),
        ("int8", 0.06, 0.14),
        ("int4", 0.35, 0.7),
        ("fp8_e4m3", 0.03, 0.075),
    ],
)
def test_relative_error_of_the_logits(
    drawn: Drawn, dense: torch.Tensor, scheme: str, least: float, most: float
) -> None:
    error = (logits(drawn, scheme) - dense).norm() / dense.norm()
    assert least < error.item() <= most
