# SPDX-License-Identifier: Apache-2.0
"""Layers in low precision: what the plan takes, what loading writes, what products give."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from diffulex import ops
from diffulex.checkpoint import memory, random_weights, tensor_reader
from diffulex.checkpoint.auto_model import detect, load_model, random_model
from diffulex.checkpoint.loader import weight_table_of
from diffulex.config.config import Config, read_model_facts
from diffulex.errors import CheckpointError, ConfigError
from diffulex.nn.linear import pack_weights
from diffulex.nn.weights import DenseExperts, DenseWeight, PackedWeight
from diffulex.ops import WeightScheme
from diffulex.profiling.memory import tensor_bytes
from diffulex.quantization.experts import QuantizedExperts, check_stackable
from diffulex.quantization.layers import ModelQuantizer
from diffulex.quantization.scheme import SCHEMES, QuantizationPlan
from diffulex.quantization.weights import QuantizedWeight, Shape
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.families import DENSE_FAMILIES, family_builder
from fixtures.gemma import GemmaOracle
from fixtures.moe_families import moe_builder, moe_config, tiny_builder
from fixtures.quantized import quantize_in_place
from reference import quantize as reference

EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES)
FP32, BF16 = torch.float32, torch.bfloat16


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def load(directory, plan: QuantizationPlan | None, dtype: torch.dtype = FP32) -> Any:
    name, spec, _ = detect(directory)
    quantizer = None if plan is None else ModelQuantizer(plan)
    return load_model(name, spec, directory, dtype, "cpu", quantizer=quantizer)


def formats(model: Any) -> dict[str, Any]:
    """Layers that hold something other than plain matrices."""
    found = {}
    for name, module in model.named_modules():
        held = getattr(module, "format", getattr(module, "matrices", None))
        if held is not None and not isinstance(held, (DenseWeight, PackedWeight, DenseExperts)):
            found[name] = held
    return found


def codes_of(weight: QuantizedWeight) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Codes by row, packed or not, and the scales of every part."""
    parts = weight._parts
    codes = [part.row_major().view(torch.uint8) for part in parts]
    return torch.cat(codes), [part.scale for part in parts]


def same_codes(one: Any, two: Any) -> int:
    """Compares all weights in low precision of two models; returns how many experts have them."""
    first, second = formats(one), formats(two)
    assert first.keys() == second.keys() != set()
    num_experts = 0
    for name, held in first.items():
        pairs = [(held, second[name])]
        if isinstance(held, QuantizedExperts):
            num_experts += len(held.w13)
            other = second[name]
            pairs = list(zip((*held.w13, *held.w2), (*other.w13, *other.w2), strict=True))
        for a, b in pairs:
            assert torch.equal(codes_of(a)[0], codes_of(b)[0]), name
            for scale, expected in zip(codes_of(a)[1], codes_of(b)[1], strict=True):
                assert torch.equal(scale, expected), name
    return num_experts


PLAN_CASES = [
    ("model.layers.0.self_attn.q_proj", 32, 32, True),
    ("model.layers.0.self_attn.k_proj", 16, 64, False),
    ("model.layers.0.mlp.down_proj", 64, 31, False),
    ("model.decoder.self_conditioning.gate_proj", 64, 64, False),
    ("model.layers.3.mlp.up_proj", 64, 64, False),
    ("model.layers.13.mlp.up_proj", 64, 64, True),
]


@pytest.mark.parametrize(("module", "rows", "depth", "is_taken"), PLAN_CASES)
def test_plan_takes(module: str, rows: int, depth: int, is_taken: bool) -> None:
    plan = QuantizationPlan("fp8", ignore=("model.layers.3.*",))
    assert plan.takes(module, rows, depth) == is_taken


@pytest.mark.parametrize(
    ("wanted", "depth", "group"),
    [(128, 256, 128), (128, 192, 64), (64, 256, 64), (128, 96, 32), (128, 48, 48), (32, 704, 32)],
)
def test_group_of_a_row(wanted: int, depth: int, group: int) -> None:
    assert QuantizationPlan("int4", wanted).group_of(depth) == group


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_loading_quantises_every_projection_and_nothing_else(tmp_path, family: str) -> None:
    family_builder(family).write(tmp_path)
    model = load(tmp_path, QuantizationPlan("int8"))
    kinds = {name.split(".", 2)[2] for name in formats(model)}
    assert kinds == {"attention.qkv", "attention.o", "mlp.gate_up", "mlp.down"}
    assert len(formats(model)) == 4 * model.spec.num_layers
    values = [parameter for parameter in model.parameters() if not parameter.is_meta]
    assert all(parameter.isfinite().all() for parameter in values)


@pytest.mark.every(5)
@EVERY_SCHEME
@pytest.mark.parametrize("family", ["llada", "sdar_moe", "llada2"])
def test_pieces_and_whole_matrices_give_the_same_codes(
    tmp_path, monkeypatch: pytest.MonkeyPatch, scheme: str, family: str
) -> None:
    """Loading in pieces of few rows, and quantising a model that was loaded as it is."""
    tiny_builder(family, moe_intermediate_size=144, hidden_size=64).write(tmp_path)
    plan = QuantizationPlan(scheme)
    whole: Any = load(tmp_path, None)
    quantize_in_place(whole, plan)
    monkeypatch.setattr(tensor_reader, "_PIECE_BYTES", 5000)
    streamed = load(tmp_path, plan)
    assert (same_codes(whole, streamed) > 0) == (family != "llada")


def test_codes_are_those_of_the_stored_matrix(tmp_path) -> None:
    tensors = family_builder("sdar").write(tmp_path)
    model = load(tmp_path, QuantizationPlan("int8"))
    stored = tensors["model.layers.1.mlp.down_proj.weight"]
    codes, scale = ops.quantize_weight(stored, WeightScheme.INT8)
    held = model.layers[1].mlp.down.format
    assert torch.equal(codes_of(held)[0], codes.view(torch.uint8))
    assert torch.equal(codes_of(held)[1][0], scale)


def test_no_matrix_is_ever_there_in_the_compute_dtype(tmp_path) -> None:
    family_builder("sdar").write(tmp_path)
    name, spec, _ = detect(tmp_path)
    quantizer = ModelQuantizer(QuantizationPlan("int8"))
    from diffulex.registry import AutoModelForDiffusionLM

    model: Any = quantizer.build(lambda: AutoModelForDiffusionLM.get(name)(spec, FP32, "cpu"))
    linears = [
        p for key, p in model.named_parameters() if key.endswith(("qkv.weight", "down.weight"))
    ]
    assert linears
    assert all(parameter.is_meta for parameter in linears)
    assert not model.embedding.weight.is_meta
    quantizer.apply(model, weight_table_of(model, {}), "cpu")
    left = [key for key, parameter in model.named_parameters() if not parameter.is_meta]
    assert "head.weight" in left
    assert not any(key.startswith("layers.0.mlp") for key in left)
    # The memory that was announced is the memory that is there.
    dense = random_model(name, spec, FP32, "cpu")
    bytes_of = sum(m.format.nbytes for m in dense.modules() if hasattr(m, "format"))
    held = sum(m.format.nbytes for m in model.modules() if hasattr(m, "format"))
    saved = quantizer.saved_bytes(dense, weight_table_of(dense, {}), FP32, "cpu")
    assert held == bytes_of - saved
    assert held < 0.6 * bytes_of


@EVERY_SCHEME
def test_product_of_a_stacked_layer(scheme: str) -> None:
    """Rows of three projections, of which blocks do not share a scale."""
    sizes, depth = (48, 130, 20), 192
    kind = WeightScheme[scheme.upper()]
    group = 64 if scheme == "int4" else 0
    weight = QuantizedWeight([Shape(size, group) for size in sizes], depth, kind, "cpu")
    w, x, bias = normal(sum(sizes), depth), normal(9, depth, seed=1), normal(sum(sizes), seed=2)
    start = 0
    for size in sizes:
        weight.write(start, w[start : start + size])
        start += size
    out = weight.product(x, None, bias)
    parts, start = [], 0
    for size in sizes:
        codes, scale = ops.quantize_weight(w[start : start + size], kind, group=group)
        part = torch.empty(9, size)
        if scheme == "int4":
            ops.linear_w4a16(
                x, codes, scale, bias=bias[start : start + size], group=group, out=part
            )
        else:
            dtype = torch.int8 if scheme == "int8" else torch.float8_e4m3fn
            rows = ops.quantize_rows(x, dtype)
            ops.linear_scaled(rows, codes, scale, bias[start : start + size], out=part)
        parts.append(part)
        start += size
    assert torch.equal(out, torch.cat(parts, 1))
    error = (out - (x @ w.T + bias)).norm() / out.norm()
    assert (1e-4 if scheme == "int8" else 1e-3) < error < (0.15 if scheme == "int4" else 0.06)


@pytest.mark.parametrize("act", [ops.Activation.SILU, ops.Activation.GELU_TANH])
def test_experts_quantise_a_row_once_and_the_activation_from_float32(act: ops.Activation) -> None:
    """Against a loop over slots in float64 with the same quantisers; -1 marks rows without a token."""
    num_rows, num_experts, hidden, width, top_k = 11, 4, 64, 40, 2
    two, one, kind = (Shape(width), Shape(width)), (Shape(hidden),), WeightScheme.INT8
    w13 = [QuantizedWeight(two, hidden, kind, "cpu") for _ in range(num_experts)]
    w2 = [QuantizedWeight(one, width, kind, "cpu") for _ in range(num_experts)]
    dense13, dense2 = (
        normal(num_experts, 2 * width, hidden),
        normal(num_experts, hidden, width, seed=1),
    )
    for expert in range(num_experts):
        w13[expert].write(0, dense13[expert])
        w2[expert].write(0, dense2[expert])
    x, addend = normal(num_rows, hidden, seed=2), normal(num_rows, hidden, seed=3)
    generator = torch.Generator().manual_seed(4)
    ids = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :top_k].int()
    ids[5] = -1
    weights = torch.rand(num_rows, top_k, generator=generator)
    out = torch.empty_like(x)
    experts = QuantizedExperts(w13, w2, "cpu")
    routing = ops.Routing(weights, ids)
    workspace = experts.new_workspace(x, top_k)
    experts.product(x, routing, out=out, workspace=workspace, addend=addend, act=act)

    def rounded(values: np.ndarray) -> np.ndarray:
        codes, scale = reference.quantize_rows(values.astype(np.float32), True, 128)
        return codes * np.repeat(scale.T.astype(np.float64), 128, 1)[:, : values.shape[1]]

    want = addend.double().numpy()
    rows = rounded(x.numpy())
    by_channel = [
        [reference.quantize_rows(w.numpy(), True, w.shape[1]) for w in stack]
        for stack in (dense13, dense2)
    ]
    for row, slot in np.ndindex(num_rows, top_k):
        expert = int(ids[row, slot])
        if expert < 0:
            continue
        first, second = ((c * s.T) for c, s in (by_channel[0][expert], by_channel[1][expert]))
        gate_up = torch.from_numpy(first @ rows[row]).float()
        inner = ops.act_and_mul(gate_up[None], act)
        want[row] += float(weights[row, slot]) * (second @ rounded(inner.numpy())[0])
    # One code of an activation may round to the other side.
    assert np.abs(out.numpy() - want).max() < 0.02 * np.abs(want).max()
    assert np.median(np.abs(out.numpy() - want)) < 1e-5 * np.abs(want).max()
    assert torch.equal(out[5], addend[5])


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
@pytest.mark.parametrize("family", ["sdar_moe", "llada2"])
def test_the_router_is_never_quantised(tmp_path, scheme: str, family: str) -> None:
    moe_builder(family, config=moe_config(family, moe_intermediate_size=32)).write(tmp_path)
    plain, model = load(tmp_path, None), load(tmp_path, QuantizationPlan(scheme))
    names = [name for name, _ in model.named_parameters() if name.endswith("router")]
    assert names
    values, others = dict(plain.named_parameters()), dict(model.named_parameters())
    assert all(torch.equal(values[name], others[name]) for name in names)
    assert any(isinstance(held, QuantizedExperts) for held in formats(model).values())


def test_ignored_modules_keep_their_dtype(tmp_path) -> None:
    family_builder("sdar").write(tmp_path)
    plan = QuantizationPlan("fp8", ignore=("model.layers.0.*", "*.down_proj"))
    held = formats(load(tmp_path, plan))
    kinds = {"attention.qkv", "attention.o", "mlp.gate_up"}
    assert held.keys() == {f"layers.1.{kind}" for kind in kinds}


def test_a_part_of_a_matrix_cannot_be_ignored(tmp_path) -> None:
    family_builder("sdar").write(tmp_path)
    with pytest.raises(ConfigError, match=r"quantization_ignore: expected all or none of .*q_proj"):
        load(tmp_path, QuantizationPlan("fp8", ignore=("*.q_proj",)))


@pytest.mark.every(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_stacked_experts_of_diffusion_gemma(tmp_path, scheme: str) -> None:
    """Gate and up are one stored tensor; a product of every expert against that of the values."""
    GemmaOracle(seed=3, moe_intermediate_size=144).write(tmp_path)
    plain, model = load(tmp_path, None), load(tmp_path, QuantizationPlan(scheme))
    names = {name.rpartition(".")[2] for name in formats(model)}
    assert names == {"experts", "qkv", "o", "gate_up", "down"}
    assert not any("self_conditioning" in name for name in formats(model))
    x = normal(16, 64, seed=5)
    ids = torch.arange(32, dtype=torch.int32).reshape(16, 2) % 8
    routing = ops.Routing(torch.full((16, 2), 0.5), ids)
    for layer in range(model.spec.num_layers):
        results = []
        for each in (plain, model):
            experts = each.decoder_layers[layer].experts.matrices
            out = torch.empty_like(x)
            workspace = experts.new_workspace(x, 2)
            experts.product(x, routing, out=out, workspace=workspace, act=ops.Activation.GELU_TANH)
            results.append(out)
        error = (results[1] - results[0]).norm() / results[0].norm()
        assert 1e-4 < error < (0.25 if scheme == "int4" else 0.08)


def test_experts_are_packed_when_the_other_weights_are(tmp_path) -> None:
    moe_builder("sdar_moe", config=moe_config("sdar_moe", moe_intermediate_size=32)).write(tmp_path)
    model = load(tmp_path, QuantizationPlan("int8"))
    experts = [held for held in formats(model).values() if isinstance(held, QuantizedExperts)]
    parts = [part for held in experts for weight in (*held.w13, *held.w2) for part in weight._parts]
    assert {part.codes.dtype for part in parts} == {torch.int8}
    pack_weights(model)
    assert {part.codes.dtype for part in parts} == {torch.uint8}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_matrix_with_a_small_projection_keeps_its_dtype(tmp_path, scheme: str) -> None:
    """Keys of 16 rows lie with the queries in one matrix, which has one format."""
    config = tiny_config(num_key_value_heads=1, head_dim=16)
    CheckpointBuilder(config).write(tmp_path)
    held = formats(load(tmp_path, QuantizationPlan(scheme)))
    assert {name.split(".", 2)[2] for name in held} == {"attention.o", "mlp.gate_up", "mlp.down"}


@pytest.mark.parametrize("pattern", ["*.down_proj", "*.gate_proj"])
def test_one_matrix_of_experts_cannot_be_ignored(tmp_path, pattern: str) -> None:
    moe_builder("sdar_moe", config=moe_config("sdar_moe", moe_intermediate_size=32)).write(tmp_path)
    with pytest.raises(ConfigError, match="quantization_ignore: expected all or none of"):
        load(tmp_path, QuantizationPlan("int8", ignore=(pattern,)))
    load(tmp_path, QuantizationPlan("int8", ignore=("*.experts.*",)))


def test_patterns_without_a_module_are_an_error(tmp_path) -> None:
    family_builder("sdar").write(tmp_path)
    with pytest.raises(ConfigError, match=r"quantization_ignore: .* got '\*\.o_prj', which"):
        load(tmp_path, QuantizationPlan("int8", ignore=("lm_head", "*.o_prj")))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("has_hopper", "dtype"), [(True, BF16), (True, FP32), (False, BF16)])
def test_a_head_of_four_bits_is_of_eight(
    tmp_path, monkeypatch, scheme: str, has_hopper: bool, dtype: torch.dtype
) -> None:
    """Of e4m3 where the device multiplies it."""
    family_builder("sdar").write(tmp_path)
    seen = []

    def answer(device: torch.device) -> bool:
        seen.append(device)
        return has_hopper

    monkeypatch.setattr("diffulex.quantization.layers.has_hopper_kernels", answer)
    model = load(tmp_path, QuantizationPlan(scheme, quantize_head=True), dtype)
    schemes = {name: held.scheme.name.lower() for name, held in formats(model).items()}
    expected = scheme
    if scheme == "int4":
        expected = "fp8" if has_hopper and dtype == BF16 else "int8"
    assert schemes.pop("head") == expected
    assert set(schemes.values()) == {scheme}
    assert (torch.device("cpu") in seen) == (scheme == "int4" and dtype == BF16)


def test_which_forms_hopper_multiplies() -> None:
    def suits(scheme: str, rows: int, depth: int) -> bool:
        weight = QuantizedWeight(
            [Shape(rows, 64)], depth, WeightScheme[scheme.upper()], "cpu", BF16
        )
        return weight.suits_hopper

    assert suits("fp8", 48, 80)
    assert not suits("fp8", 40, 80)
    assert not suits("fp8_block", 48, 72)
    weight = QuantizedWeight([Shape(32, 64)], 128, WeightScheme.INT4, "cpu", BF16)
    assert not weight.suits_hopper  # rows of nibbles
    (part,) = weight.parts
    part.codes = ops.to_nibble_tiles(part.codes)
    assert weight.suits_hopper


def test_what_a_family_keeps_need_not_be_there(tmp_path, caplog) -> None:
    """LLaDA2 keeps its experts with int4, which a model may lack; to quantise them warns."""
    small = moe_config("llada2", moe_intermediate_size=64)
    moe_builder("llada2", config=small).write(tmp_path / "experts")
    facts, given = read_model_facts(str(tmp_path / "experts"), {}), {"device": "cpu"}
    for scheme, ignore in (("int4", ("*.experts.*",)), ("int8", ())):
        config = Config.resolve("", facts, {**given, "quantization": scheme})
        assert config.model.quantization_ignore == ignore
    kept = QuantizationPlan("int4", ignore=("*.experts.*",))
    held = formats(load(tmp_path / "experts", kept))
    assert not any(isinstance(each, QuantizedExperts) for each in held.values())
    assert "is not accepted" not in caplog.text
    held = formats(load(tmp_path / "experts", QuantizationPlan("int4")))
    assert any(isinstance(each, QuantizedExperts) for each in held.values())
    text = "quantization: int4 of *.experts.* is not accepted for llada2 (docs/quantization.md)"
    assert text in caplog.text
    moe_builder("llada2", config={**small, "first_k_dense_replace": 2}).write(tmp_path / "dense")
    assert formats(load(tmp_path / "dense", kept))


def test_an_embedding_that_is_stored_as_the_head_is_read(tmp_path) -> None:
    builder = family_builder("sdar")
    builder.config["tie_word_embeddings"] = True

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        assert "model.embed_tokens.weight" not in tensors

    builder.edit = rename
    stored = builder.write(tmp_path)
    for quantize_head in (False, True):
        model = load(tmp_path, QuantizationPlan("int8", quantize_head=quantize_head))
        assert torch.equal(model.embedding.weight, stored["lm_head.weight"])
        assert model.head.is_shared


@pytest.mark.every(5)
@EVERY_SCHEME
@pytest.mark.parametrize("family", ["sdar", "sdar_moe", "llada2"])
def test_the_memory_that_is_asked_for_is_the_memory_that_is_taken(
    tmp_path, scheme: str, family: str
) -> None:
    """Blocks of projections that end inside 128 rows and stacked experts included."""
    tiny_builder(family, moe_intermediate_size=144).write(tmp_path)
    name, spec, _ = detect(tmp_path)
    dense = random_model(name, spec, FP32, "cpu")
    plan = QuantizationPlan(scheme)
    saved = ModelQuantizer(plan).saved_bytes(dense, weight_table_of(dense, {}), FP32, "cpu")
    assert tensor_bytes(load(tmp_path, plan)) == tensor_bytes(dense) - saved


@pytest.mark.parametrize("scheme", ["fp8", "fp8_block", "int4"])
def test_stacked_experts_have_one_memory(
    tmp_path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Codes and scales are written where the kernels of stacks read them, and lie nowhere else."""
    moe_builder("llada2", config=moe_config("llada2", moe_intermediate_size=128)).write(tmp_path)
    plan = QuantizationPlan(scheme)
    apart = load(tmp_path, plan)
    monkeypatch.setattr(QuantizedExperts, "are_stacked", staticmethod(lambda device: True))
    made: list[torch.device] = []
    new_part = QuantizedWeight.__init__

    def watched(self, *arguments):
        new_part(self, *arguments)
        made.append(self.parts[0].codes.device)

    monkeypatch.setattr(QuantizedWeight, "__init__", watched)
    stacked = load(tmp_path, plan)
    found = [held for held in formats(stacked).values() if isinstance(held, QuantizedExperts)]
    assert found
    num_experts = sum(len(held.w13) + len(held.w2) for held in found)
    assert sum(device.type == "meta" for device in made) >= num_experts
    for held in found:
        for stack, weights in zip(held._stacks, (held.w13, held.w2), strict=True):
            for index, weight in enumerate(weights):
                codes, scales = codes_of(weight)
                assert weight.parts[0].codes.data_ptr() == stack.codes[index].data_ptr()
                assert torch.equal(stack.codes[index].view(torch.uint8), codes)
                assert torch.equal(
                    torch.cat(scales, -1 if scheme == "int4" else 0), stack.scale[index]
                )
    assert same_codes(stacked, apart) == num_experts // 2


@pytest.mark.every(3)
@EVERY_SCHEME
@pytest.mark.parametrize("family", ["sdar", "llada2"])
def test_drawn_weights_are_quantised_as_they_are_drawn(
    tmp_path, monkeypatch: pytest.MonkeyPatch, scheme: str, family: str
) -> None:
    """The values are those of a model in its dtype, whose large matrices never are there whole."""
    monkeypatch.setattr(random_weights, "_CHUNK_VALUES", 2000)
    if family == "sdar":
        CheckpointBuilder(tiny_config(intermediate_size=200)).write(tmp_path)
    else:
        moe_builder(family, config=moe_config(family, moe_intermediate_size=144)).write(tmp_path)
    name, spec, _ = detect(tmp_path)
    plan = QuantizationPlan(scheme)
    whole: Any = random_model(name, spec, FP32, "cpu")
    quantize_in_place(whole, plan)
    drawn = random_model(name, spec, FP32, "cpu", quantizer=ModelQuantizer(plan))
    assert (same_codes(whole, drawn) > 0) == (family != "sdar")
    for (key, value), other in zip(whole.named_parameters(), drawn.parameters(), strict=True):
        assert value.is_meta or torch.equal(value, other), key


def test_a_model_that_does_not_fit_is_refused_with_its_scheme(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family_builder("sdar").write(tmp_path)
    name, spec, _ = detect(tmp_path)
    dense = random_model(name, spec, FP32, "cpu")
    plan = QuantizationPlan("int8")
    saved = ModelQuantizer(plan).saved_bytes(dense, weight_table_of(dense, {}), FP32, "cpu")
    needed = memory.model_bytes(spec, FP32) - saved
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed)
    load(tmp_path, plan)
    monkeypatch.setattr(memory, "available_bytes", lambda device: needed - 1)
    text = r"model: needs 0\.0 GiB of weights \(int8\), 0\.0 GiB available"
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path, plan)


def test_a_failed_allocation_tells_what_the_scheme_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 3 << 29)
    text = r"model: needs 4\.0 GiB of weights \(int4\), 1\.5 GiB available"
    with (
        pytest.raises(CheckpointError, match=text),
        memory.reporting_memory(4 << 30, "cpu", "int4"),
    ):
        raise MemoryError


def test_a_plan_that_takes_nothing_is_an_error(tmp_path) -> None:
    family_builder("sdar").write(tmp_path)
    with pytest.raises(ConfigError, match="expected a model with matrices to quantise"):
        load(tmp_path, QuantizationPlan("fp8", ignore=("*",)))


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("scheme", "of_head"), [("int8", "INT8"), ("int4", "INT8"), ("fp8", "FP8")]
)
def test_the_head_is_quantised_on_request_unless_tied(
    tmp_path, scheme: str, of_head: str, is_tied: bool
) -> None:
    builder = family_builder("sdar")
    builder.config["tie_word_embeddings"] = is_tied
    builder.write(tmp_path)
    assert "head" not in formats(load(tmp_path, QuantizationPlan(scheme)))
    model = load(tmp_path, QuantizationPlan(scheme, quantize_head=True))
    assert ("head" in formats(model)) == (not is_tied)
    if not is_tied:
        assert model.head.format.scheme == WeightScheme[of_head]
    assert model.compute_logits(normal(3, 64)).isfinite().all()


def test_values_cannot_be_read_back(tmp_path) -> None:
    weight = QuantizedWeight((Shape(32),), 32, WeightScheme.FP8, "cpu")
    with pytest.raises(
        ConfigError, match="expected quantization none to read or write them, got fp8"
    ):
        weight.row_major()


def test_blocks_are_written_whole() -> None:
    weight = QuantizedWeight((Shape(300),), 64, WeightScheme.FP8_BLOCK, "cpu")
    with pytest.raises(ValueError, match="expected blocks of 128 rows, got 128:200"):
        weight.write(128, normal(72, 64))


@pytest.mark.parametrize(
    ("scheme", "other", "width", "text"),
    [
        (
            "fp8_block",
            "fp8_block",
            96,
            "expected gate and up of stacked experts in whole blocks of 128",
        ),
        ("fp8_block", "fp8_block", 128, ""),
        ("fp8", "int8", 128, "in one scheme on cuda, got fp8, int8"),
        ("int4", "int8", 128, "in one scheme on cuda, got int4, int8"),
        ("int4", "int4", 128, ""),
    ],
)
def test_experts_that_cannot_be_stacked(scheme: str, other: str, width: int, text: str) -> None:
    """On a device, where both matrices of an expert are stored as they are multiplied."""
    first, second = WeightScheme[scheme.upper()], WeightScheme[other.upper()]
    w13 = [QuantizedWeight((Shape(2 * width, 64),), 256, first, "meta")]
    w2 = [QuantizedWeight((Shape(256, 64),), width, second, "meta")]
    if not text:
        check_stackable(w13, w2)
        return
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_stackable(w13, w2)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ([Shape(64, 32), Shape(64, 32)], ""),
        ([Shape(64, 32, has_exact_scale=True)] * 2, ""),
        ([Shape(64, 32), Shape(64, 64)], "several kinds of groups and scales"),
        (
            [Shape(64, 32), Shape(64, 32, has_exact_scale=True)],
            "several kinds of groups and scales",
        ),
        ([Shape(64, 32, has_zeros=True)] * 2, "zero points"),
        ([Shape(64, 32, has_zeros=True, has_order=True)] * 2, "zero points and orders of columns"),
    ],
)
def test_experts_of_4_bits_that_cannot_be_stacked(shapes: list[Shape], text: str) -> None:
    w13 = [QuantizedWeight(shapes, 128, WeightScheme.INT4, "meta") for _ in range(3)]
    w2 = [QuantizedWeight((Shape(128, 32),), 64, WeightScheme.INT4, "meta") for _ in range(3)]
    if not text:
        check_stackable(w13, w2)
        return
    message = (
        f"without zero points, in groups and scales of one kind, got {text} (quantization none"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_stackable(w13, w2)
