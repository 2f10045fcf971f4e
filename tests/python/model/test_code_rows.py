# SPDX-License-Identifier: Apache-2.0
"""Layers whose rows come as codes, and products of many e4m3 rows by the library of the vendor."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from diffulex import ops
from diffulex.checkpoint.auto_model import detect, random_model
from diffulex.nn.attention import PagedAttention
from diffulex.nn.feed_forward import GatedMLP, MLPScratch
from diffulex.nn.linear import Linear, set_batch_invariant
from diffulex.nn.norm import RMSNorm
from diffulex.ops import WeightScheme
from diffulex.quantization import vendor
from diffulex.quantization.layers import ModelQuantizer
from diffulex.quantization.scheme import QuantizationPlan
from diffulex.quantization.weights import QuantizedWeight, Shape
from fixtures.moe_families import tiny_builder
from fixtures.paged_batch import PagedRunner, Rows
from fixtures.quantized import spoil_rows_left_out

SCHEMES = pytest.mark.parametrize("scheme", list(WeightScheme), ids=lambda scheme: scheme.name)
FP8 = pytest.mark.parametrize("scheme", [WeightScheme.FP8, WeightScheme.FP8_BLOCK])
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


def needs_hopper() -> None:
    if not ops.has_hopper_kernels(torch.device("cuda")):
        pytest.skip("the products need compute capability 9.0")


@DEVICES
@SCHEMES
@pytest.mark.parametrize("num_rows", [3, 160])
def test_codes_of_the_norm_give_the_bits_of_its_rows(
    device: str, scheme: WeightScheme, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a feed-forward block, which reads the rows themselves for an adapter alone."""
    spoil_rows_left_out(monkeypatch)
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
        if rows is not None:
            assert rows.codes_only != has_adapter
        if rows is None or has_adapter:
            assert torch.equal(coded, plain)
        assert torch.equal(sums, total)
        want = mlp(plain, MLPScratch(plain, 384))
        assert torch.equal(mlp(coded, MLPScratch(coded, 384), rows), want)


@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_models_read_no_rows_that_are_left_out(
    tmp_path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router and an adapter read rows; a shared expert and plain projections only their codes."""
    tiny_builder(family, moe_intermediate_size=144).write(tmp_path)
    name, spec, _ = detect(tmp_path)
    quantizer = ModelQuantizer(QuantizationPlan("fp8"))
    model: Any = random_model(name, spec, torch.float32, "cpu", quantizer=quantizer)
    runner = PagedRunner(model, 4)
    sequence = runner.sequence(list(range(3, 15)))

    def logits() -> torch.Tensor:
        (found,) = runner.forward([Rows(sequence, 12, should_store=False)])
        return found

    want = logits()
    assert want.isfinite().all()
    calls = spoil_rows_left_out(monkeypatch)
    assert torch.equal(logits(), want)
    assert set(calls) >= {"rms_norm", "add_rms_norm"}


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int8", "int4"])
@pytest.mark.parametrize("family", ["sdar", "sdar_moe"])
def test_codes_of_attention_give_the_bits_of_its_rows(
    tmp_path, family: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of heads of 128, and the rows themselves are read for an adapter alone."""
    builder = tiny_builder(family)
    builder.write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": 128}))
    name, spec, _ = detect(tmp_path)
    quantizer = ModelQuantizer(QuantizationPlan(scheme))
    model: Any = random_model(name, spec, torch.float32, "cpu", quantizer=quantizer)
    runner = PagedRunner(model, 4)
    sequence = runner.sequence(list(range(3, 15)))
    calls = spoil_rows_left_out(monkeypatch)

    def logits() -> torch.Tensor:
        calls.clear()
        (found,) = runner.forward([Rows(sequence, 12, should_store=False)])
        return found

    makes_rows = PagedAttention._new_inner_rows
    for has_adapter in (False, True):
        if has_adapter:
            for layer in model.decoder_layers:
                o = layer.attention.o
                a, b = normal(4, o.in_features), normal(o.num_rows, 4)
                o.add_update(slice(0, o.num_rows), a, b, 0.5)
        found = logits()
        assert found.isfinite().all()
        assert ("block_attention" in calls) == (scheme != "int4" and not has_adapter)
        monkeypatch.setattr(PagedAttention, "_new_inner_rows", lambda self, heads: None)
        assert torch.equal(logits(), found)
        assert "block_attention" not in calls
        monkeypatch.setattr(PagedAttention, "_new_inner_rows", makes_rows)


def test_attention_makes_no_codes_of_other_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a head is no group, and where one scale is of the whole row."""
    place: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    for head_dim in (64, 128):
        attention = PagedAttention(64, 4, 2, head_dim, eps=1e-6, **place)
        heads = torch.empty(3, 4 * head_dim)
        assert attention._new_inner_rows(heads) is None
        quantized(attention.o, WeightScheme.FP8, 1)
        assert (attention._new_inner_rows(heads) is None) == (head_dim == 64)
        whole = ops.new_quantized_rows(
            3, 4 * head_dim, torch.int8, heads.device, group=4 * head_dim
        )
        monkeypatch.setattr(attention.o, "new_rows", lambda x, rows=whole: rows)
        assert attention._new_inner_rows(heads) is None


def test_what_the_vendor_takes() -> None:
    def takes(scheme: WeightScheme, num_rows: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return vendor.takes_rows(scheme, torch.empty(num_rows, 64, dtype=dtype), 128)

    assert [takes(WeightScheme.FP8, rows) for rows in (1, 128, 129, 8192)] == [0, 0, 1, 1]
    assert [takes(WeightScheme.FP8_BLOCK, rows) for rows in (128, 129, 130, 132)] == [0, 0, 0, 1]
    assert not takes(WeightScheme.FP8, 256, torch.float16)
    codes = torch.empty(1024, 1024, dtype=torch.float8_e4m3fn)
    assert all(vendor.own_rows(scheme, codes) is None for scheme in WeightScheme)


@pytest.mark.parametrize(
    ("num_columns", "num_processors", "fp8", "blocks"),
    [
        *[(24576, 132, 192, 128), (6144, 132, 192, 128), (4096, 132, 256, 256)],
        *[(4097, 132, 256, 256), (2048, 132, 512, 512), (16, 132, 8448, 8448)],
        *[(4096, 114, 192, 128), (4096, 1, 192, 128)],
    ],
)
def test_rows_up_to_which_the_own_product_is_faster(
    num_columns: int, num_processors: int, fp8: int, blocks: int
) -> None:
    """192 or 128, or as many as leave half of the processors without a tile of 128 x 128."""
    assert vendor._own_rows(WeightScheme.FP8, num_columns, num_processors) == fp8
    assert vendor._own_rows(WeightScheme.FP8_BLOCK, num_columns, num_processors) == blocks


@pytest.mark.cuda
def test_weights_that_the_vendor_takes() -> None:
    needs_hopper()

    def own_rows(scheme: WeightScheme, columns: int, depth: int) -> int | None:
        codes = torch.empty(columns, depth, dtype=torch.float8_e4m3fn, device="cuda")
        return vendor.own_rows(scheme, codes)

    def takes(scheme: WeightScheme, columns: int, depth: int) -> bool:
        return own_rows(scheme, columns, depth) is not None

    assert takes(WeightScheme.FP8, 48, 80)
    assert not takes(WeightScheme.FP8, 40, 80)
    assert not takes(WeightScheme.FP8, 48, 72)
    assert takes(WeightScheme.FP8_BLOCK, 384, 1024)
    assert not takes(WeightScheme.FP8_BLOCK, 320, 1024)
    assert not takes(WeightScheme.FP8_BLOCK, 384, 640)
    assert not takes(WeightScheme.INT8, 1024, 1024)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    expected = vendor._own_rows(WeightScheme.FP8, 2048, processors)
    assert own_rows(WeightScheme.FP8, 2048, 4096) == expected


@FP8
def test_layers_send_many_rows_to_the_vendor(
    scheme: WeightScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, with a product in its place that counts its calls: by rows, bias and invariance."""
    calls: list[int] = []

    def multiply(rows: Any, weight: Any, scale: Any, bias: Any, out: torch.Tensor) -> torch.Tensor:
        count, depth = rows.codes.shape
        calls.append(count)
        factors = rows.scale[:, :count].T.repeat_interleave(depth // len(rows.scale), 1)
        if scale.dim() == 2:
            scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        # On the CPU, layers keep codes in panels.
        weight = ops.unpack_panels(weight, out.size(-1), depth, torch.float8_e4m3fn)
        dense = weight.float() * (scale if scale.dim() == 2 else scale[:, None])
        return out.copy_(torch.nn.functional.linear(rows.codes.float() * factors, dense, bias))

    # Gate and up are the library's from fewer rows on than down.
    gate_up, down = 128, 140
    monkeypatch.setattr(
        vendor, "own_rows", lambda _, codes: gate_up if codes.size(0) == 1024 else down
    )
    monkeypatch.setattr(vendor, "multiply", multiply)
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu"}
    mlp = GatedMLP(512, 512, **place)
    quantized(mlp.gate_up, scheme, 1)
    quantized(mlp.down, scheme, 2)
    for num_rows in (0, 1, 128, 129, 132, 160):
        x = normal(num_rows, 512, seed=num_rows).bfloat16()
        set_batch_invariant(mlp, True)
        want = mlp(x.clone(), MLPScratch(x, 512)).float()
        assert not calls
        set_batch_invariant(mlp, False)
        got = mlp(x.clone(), MLPScratch(x, 512)).float()
        is_whole = scheme == WeightScheme.FP8 or num_rows % 4 == 0
        num_calls = is_whole * ((num_rows > gate_up) + (num_rows > down))
        assert calls == [num_rows] * num_calls
        assert num_calls or torch.equal(got, want)
        assert (got - want).norm() <= 0.1 * want.norm()
        calls.clear()


@pytest.mark.cuda
@FP8
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [129, 132, 256, 1001])
def test_products_of_many_rows(
    scheme: WeightScheme, has_bias: bool, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the vendor are near the exact ones; where a row may not depend on others there are none."""
    needs_hopper()
    calls: list[int] = []
    library = vendor.multiply
    monkeypatch.setattr(vendor, "multiply", lambda *a: calls.append(1) or library(*a))
    own_rows = vendor.own_rows
    monkeypatch.setattr(vendor, "own_rows", lambda *a: own_rows(*a) and 128)
    layer = Linear(1024, (512,), bias=has_bias, dtype=torch.bfloat16, device="cuda")
    weight = quantized(layer, scheme, num_rows)
    if layer.bias is not None:
        layer.bias.copy_(normal(512, seed=5))
    x = normal(num_rows, 1024, seed=6).cuda().bfloat16()
    out = torch.full((num_rows, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
    (part,) = weight.parts
    scale = part.scale
    if scheme == WeightScheme.FP8_BLOCK:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    dense = part.codes.double() * (scale if scale.dim() == 2 else scale[:, None]).double()

    def error() -> float:
        rows = layer.new_rows(x)
        assert rows is not None
        ops.quantize_rows_into(x, rows)
        factors = rows.scale[:, :num_rows].T.double().repeat_interleave(1024 // len(rows.scale), 1)
        want = rows.codes.double() * factors @ dense.T
        if layer.bias is not None:
            want += layer.bias
        with_codes = layer(x, out, rows).clone()
        assert torch.equal(layer(x, out.fill_(torch.nan)), with_codes)
        return float((out - want).norm() / want.norm())

    assert error() <= 4e-3
    is_taken = scheme == WeightScheme.FP8 or (num_rows % 4 == 0 and not has_bias)
    assert len(calls) == (2 if is_taken else 0)
    set_batch_invariant(layer, True)
    calls.clear()
    assert error() <= 4e-3
    assert not calls
    alone = torch.empty(1, 512, dtype=torch.bfloat16, device="cuda")
    assert torch.equal(layer(x[-1:].clone(), alone)[0], out[-1])


@pytest.mark.cuda
@FP8
@pytest.mark.parametrize("most_columns", [0, 512, 2048])
def test_a_captured_graph_of_many_rows(
    scheme: WeightScheme, most_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the library's products, with own ones between them, and of own ones."""
    needs_hopper()
    own_rows = vendor.own_rows
    monkeypatch.setattr(
        vendor,
        "own_rows",
        lambda scheme, codes: (
            own_rows(scheme, codes) and (128 if codes.size(0) > most_columns else 256)
        ),
    )
    mlp = GatedMLP(512, 1024, dtype=torch.bfloat16, device="cuda")
    norm = RMSNorm(512, eps=1e-6, dtype=torch.bfloat16, device="cuda")
    norm.weight.fill_(1)
    quantized(mlp.gate_up, scheme, 1)
    quantized(mlp.down, scheme, 2)
    x = normal(160, 512).cuda().bfloat16()

    def chain() -> torch.Tensor:
        out, residual = x.clone(), torch.zeros_like(x)
        scratch = MLPScratch(out, 1024)
        with ops.settled_weights():
            for _ in range(3):
                rows = mlp.new_rows(out)
                norm.add_norm_(out, residual, rows)
                mlp(out, scratch, rows)
        return out

    want = chain().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(5):
        graph.replay()
        assert torch.equal(found, want)
