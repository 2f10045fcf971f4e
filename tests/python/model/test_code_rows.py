# SPDX-License-Identifier: Apache-2.0
"""Layers whose rows come as codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffulex.nn.feed_forward import GatedMLP, MLPScratch
from diffulex.nn.linear import Linear
from diffulex.nn.norm import RMSNorm
from diffulex.ops import WeightScheme
from diffulex.quantization.weights import QuantizedWeight, Shape

SCHEMES = pytest.mark.parametrize("scheme", list(WeightScheme), ids=lambda scheme: scheme.name)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(layer: Linear, scheme: WeightScheme, seed: int) -> QuantizedWeight:
    rows, depth = layer.num_rows, layer.in_features
    group = 64 if scheme == WeightScheme.INT4 else 0
    weight = QuantizedWeight([Shape(rows, group)], depth, scheme, layer.device)
    weight.write(0, (normal(rows, depth, seed=seed) * 0.05).to(layer.device))
    layer.quantize(weight)
    return weight


@DEVICES
@SCHEMES
@pytest.mark.parametrize("num_rows", [3, 160])
def test_codes_of_the_norm_give_the_bits_of_its_rows(
    device: str, scheme: WeightScheme, num_rows: int
) -> None:
    """Of a feed-forward block with an adapter, which takes the rows themselves."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    place: dict[str, Any] = {"dtype": dtype, "device": device}
    mlp, norm = GatedMLP(256, 384, **place), RMSNorm(256, eps=1e-6, **place)
    norm.weight.copy_(normal(256))
    quantized(mlp.gate_up, scheme, 1)
    quantized(mlp.down, scheme, 2)
    x, residual = (normal(num_rows, 256, seed=seed).to(device, dtype) for seed in (3, 4))
    for has_adapter in (False, True):
        if has_adapter:
            mlp.gate_up.add_update(slice(384, 768), normal(4, 256), normal(384, 4), 0.5)
        plain, total = x.clone(), residual.clone()
        norm.add_norm_(plain, total)
        coded, sums = x.clone(), residual.clone()
        rows = mlp.new_rows(coded)
        assert (rows is None) == (scheme == WeightScheme.INT4)
        norm.add_norm_(coded, sums, rows)
        assert torch.equal(coded, plain)
        assert torch.equal(sums, total)
        want = mlp(plain, MLPScratch(plain, 384))
        assert torch.equal(mlp(coded, MLPScratch(coded, 384), rows), want)
