# SPDX-License-Identifier: Apache-2.0
"""Low precision in the kernel benchmark: its references, its peers, and goals that have rows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffulex import ops
from diffulex.quantization.experts import QuantizedExperts
from diffulex.quantization.weights import QuantizedWeight, Shape

SCRIPTS = Path(__file__).resolve().parents[3] / "benchmarks" / "python"


@pytest.fixture
def bench(monkeypatch):
    """The modules of the benchmark by name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = (
        "agreement", "attention", "codes", "linear", "moe", "nibbles", "peers", "quant", "quant_experts",
        "quant_peers", "quant_rows",
    )  # fmt: skip
    return SimpleNamespace(**{name: import_module(f"kernel_bench.{name}") for name in names})


def test_every_goal_has_a_row(bench):
    """A name that is not the table's would make a target that nothing is held against."""
    products = {product.name for product in bench.linear.MODELS["SDAR-8B"]}
    assert products >= bench.quant.GOALS.keys() | bench.nibbles.GOALS.keys()
    rows = {count for goals in bench.quant.GOALS.values() for count in goals}
    assert set(bench.linear.ROWS) >= rows | bench.quant.PEER_LIMITS.keys()
    layer_rows = bench.quant.LAYER_GOALS.keys() | bench.quant.LAYER_OF_PLAIN.keys()
    assert set(bench.quant.LAYER_ROWS) >= layer_rows | {bench.quant.PROMPT_ROWS}
    assert set(bench.attention.decode_shapes()) >= bench.attention.GOALS.keys()
    tokens = {model.name: set(model.tokens) for model in bench.moe.MODELS}
    assert all(tokens[model] >= {count} for model, count in bench.moe.GOALS)
    for scheme, goals in bench.quant_experts.GOALS.items():
        some = bench.quant_experts.SOME.get(scheme, tokens)
        assert all(set(some[model]) >= wanted.keys() for model, wanted in goals.items()), scheme


@pytest.fixture
def fake_vendor(bench, monkeypatch):
    """A library in place of the vendor's, which takes more than 64 rows of any codes."""

    def multiply(rows, weight, scale, bias, out):
        assert bias is None
        wide = scale[:, None]
        if scale.dim() == 2:
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            wide = wide[: weight.size(0), : weight.size(1)]
        values = bench.codes.row_values(rows)
        return out.copy_(values @ (weight.double() * wide.double()).t())

    fake = SimpleNamespace(
        multiply=multiply,
        own_rows=lambda scheme, codes: 64,
        takes_rows=lambda scheme, x, limit: x.size(0) > limit,
    )
    monkeypatch.setattr(bench.quant, "vendor", fake)
    monkeypatch.setattr(bench.quant_peers, "vendor", fake)


@pytest.mark.parametrize(
    ("rows", "has_codes", "judges"),
    [
        (32, False, {"bfloat16"}),
        (65, True, {"linear_scaled alone", "vendor's library"}),
        (8192, True, {"linear_scaled alone", "vendor's library", "bfloat16"}),
    ],
)
def test_products_of_a_layer(bench, monkeypatch, fake_vendor, rows, has_codes, judges):
    """Own products, the library's and the layers' choice of them give the same within rounding."""
    monkeypatch.setattr(bench.quant, "num_rotations", lambda num_bytes: 2)
    product = bench.linear.Product
    products = (product("gate and up, silu", 256, 128, is_gated=True), product("down", 48, 128))
    case = bench.quant._layer_case("SDAR-8B", products, rows, "cpu", has_codes=has_codes)
    assert case.judges.keys() == judges
    assert (case.formula_us is not None) == (rows == 8192)
    assert case.operands == "e4m3"
    agreement = case.check()
    assert agreement.is_right
    assert agreement.compared == 3 * rows * (128 + 48)
    for name in ("bfloat16", "linear_scaled alone", "vendor's library"):
        case.peers[name][1]()


def test_peers_of_codes_give_the_product(bench, monkeypatch, fake_vendor):
    plain = [torch.randn(48, 256, dtype=torch.bfloat16) for _ in range(2)]
    weights = [ops.quantize_weight(w, ops.WeightScheme.FP8) for w in plain]
    out = torch.empty(32, 48, dtype=torch.bfloat16)
    x = torch.randn(32, 256, dtype=torch.bfloat16)
    operands = bench.quant_peers.Operands(x, plain, weights, out)

    def wrong(operands):
        return [operands.out.zero_]

    def refused(operands):
        raise ValueError("no such package")

    peers = {**bench.quant_peers.FP8_PEERS, "wrong": wrong, "gone": refused}
    monkeypatch.setattr(bench.quant_peers, "FP8_PEERS", peers)
    found, absent = bench.quant_peers.fp8_peers(operands)
    assert {name: len(calls) for name, calls in found.items()} == {
        "vendor's library": 2,
        "vendor's library, blocks": 2,
    }
    assert "off by" in absent["wrong"]
    assert "no such package" in absent["gone"]
    few = operands._replace(x=x[:1], out=out[:1])
    assert bench.quant_peers.fp8_peers(few) == ({}, {})


@pytest.mark.parametrize(("factor", "is_timed"), [(1.0, True), (1.2, False)])
def test_grouped_products_of_codes(bench, monkeypatch, factor, is_timed):
    """Routing and scales of the peer, over a reference in the place of torch's op, which is of GPUs alone."""

    def scaled_grouped_mm(rows, weights, scale, weight_scale, *, offs, out_dtype):
        parts, start = [], 0
        for matrix, its_scale, stop in zip(weights, weight_scale, offs.tolist()):
            values = rows[start:stop].float() * scale[start:stop, None]
            parts.append(values @ (matrix.float() * its_scale))
            start = stop
        assert start == len(rows) == len(scale)
        return (factor * torch.cat(parts)).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    bench.peers._attribute.cache_clear()
    model = bench.moe.Experts("tiny", 4, 2, 256, 128, ops.Activation.GELU_TANH)
    coded = bench.quant_experts.CodedExperts(bench.moe.Layer(model, "cpu"), "fp8")
    x = torch.randn(6, model.hidden, dtype=torch.bfloat16)
    weights = torch.rand(6, 2)
    routes = [bench.moe.uniform_routes(6, model, "cpu") for _ in range(2)]
    ours = coded.exact(model, x, weights, routes[0])
    calls = coded.grouped(model, x, weights, routes, ours)
    bench.peers._attribute.cache_clear()
    if is_timed:
        assert len(calls) == 2
        exact = coded.exact(model, x, weights, routes[1])
        assert float((calls[1]() - exact).norm() / exact.norm()) < 0.08
    else:
        assert "differs from ours" in calls


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("act", [ops.Activation.SILU, ops.Activation.GELU_TANH])
def test_reference_of_coded_experts(bench, scheme, act):
    """It is what the layers' experts compute where each has a matrix of its own."""
    model = bench.moe.Experts("tiny", 4, 2, 256, 128, act)
    layer = bench.moe.Layer(model, "cpu")
    coded = bench.quant_experts.CodedExperts(layer, scheme)
    kind, group = coded.scheme.weight, coded.scheme.group

    def matrices(stack):
        for values in stack:
            weight = QuantizedWeight([Shape(len(values), group)], values.size(1), kind, "cpu")
            weight.write(0, values)
            yield weight

    experts = QuantizedExperts(list(matrices(layer.w13)), list(matrices(layer.w2)), "cpu")
    assert coded.bytes_of_one * model.num_experts == experts.nbytes
    x = torch.randn(6, model.hidden, dtype=torch.bfloat16)
    weights, ids = torch.rand(6, 2), bench.moe.uniform_routes(6, model, "cpu")
    out = experts.packed().product(
        x, ops.Routing(weights, ids), out=torch.empty_like(x), workspace=torch.empty(0), act=act
    )
    agreement = bench.agreement.Agreement(out.numel(), bench.quant_experts.TOLERANCE)
    agreement.add(out, coded.exact(model, x, weights, ids))
    assert agreement.is_right
