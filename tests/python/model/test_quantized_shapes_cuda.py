# SPDX-License-Identifier: Apache-2.0
"""Layers of published sizes in low precision on CUDA, against twins that multiply in float64."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex.checkpoint.auto_model import random_model
from diffulex.nn.linear import Linear
from diffulex.quantization.layers import ModelQuantizer
from diffulex.quantization.scheme import SCHEMES, QuantizationPlan
from fixtures.paged_batch import PagedRunner, Rows
from fixtures.twins import Record, replace_weights

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks" / "python"))

from published_shapes import SHAPES

pytestmark = pytest.mark.cuda

LAYERS, BLOCK, CACHED, REQUESTS = 4, 32, 64, 8
#: Family and shape; how many dense matrices and layers of experts four layers have.
MODELS = {"sdar-8b": (4 * LAYERS, 0), "llada2-mini": (4 * LAYERS, LAYERS - 1)}
DTYPE = torch.bfloat16


def new_model(name: str, scheme: str, device: str) -> Any:
    """Of the published width, with few layers, quantised as it is drawn."""
    shape = SHAPES[name].with_keys(
        num_hidden_layers=LAYERS, block_size=BLOCK, mask_token_id=1, eos_token_id=2
    )
    model = random_model(
        shape.family,
        shape.facts().spec,
        DTYPE,
        device,
        seed=3,
        quantizer=ModelQuantizer(QuantizationPlan(scheme)),
    )
    for module in model.modules():
        if isinstance(module, Linear):
            # One scale for 128 columns of a row, however many rows: twins know no other.
            module.set_batch_invariant(True)
    return model


def forwards(model: Any, device: str, requests_at_once: int) -> torch.Tensor:
    """Logits [256, V] of a block of each of eight requests, each behind cached tokens."""
    vocabulary = model.spec.vocab_size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, vocabulary, (REQUESTS, CACHED + BLOCK), generator=generator).tolist()
    runner = PagedRunner(model, BLOCK, num_pages=128, device=device, dtype=DTYPE)
    sequences = [runner.sequence(each) for each in tokens]
    logits: list[torch.Tensor] = []
    for end, should_store in ((CACHED, True), (CACHED + BLOCK, False)):
        logits.clear()
        for first in range(0, REQUESTS, requests_at_once):
            chosen = sequences[first : first + requests_at_once]
            logits += runner.forward([Rows(one, end, should_store) for one in chosen])
    return torch.cat(logits)


def divergence(found: torch.Tensor, want: torch.Tensor) -> float:
    """Mean over rows of KL(found || want), in variances of the logits."""
    total, variance = 0.0, 0.0
    for one, two in zip(found.split(32), want.split(32), strict=True):
        p, q = (rows.double().log_softmax(-1) for rows in (one, two))
        total += float((p.exp() * (p - q)).sum())
        variance += float(two.double().var(-1).sum())
    return total / variance


@pytest.mark.parametrize("requests_at_once", [1, REQUESTS])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_near_those_of_the_twin(
    monkeypatch: pytest.MonkeyPatch, name: str, scheme: str, requests_at_once: int
) -> None:
    """Of few rows a forward and of many. The twin takes the codes of rows and the experts that the model took,
    each of them almost its own."""
    check(monkeypatch, name, scheme, requests_at_once, "cuda")


def check(
    monkeypatch: pytest.MonkeyPatch, name: str, scheme: str, requests_at_once: int, device: str
) -> None:
    model = new_model(name, scheme, device)
    record = Record(monkeypatch)
    found = forwards(model, device, requests_at_once)
    dense, experts = replace_weights(model, record)
    assert (dense, len(experts)) == MODELS[name]
    want = forwards(model, device, requests_at_once)
    assert found.shape == (REQUESTS * BLOCK, model.spec.vocab_size)
    assert found.isfinite().all()
    assert 0 < divergence(found, want) <= 1e-3
