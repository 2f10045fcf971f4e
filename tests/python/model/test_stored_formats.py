# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in low precision: every format that is read, as codes and as values."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from diffulex import Diffulex, SamplingParams, ops
from diffulex.checkpoint import low_precision, memory
from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.checkpoint.join_matrices import join_matrices
from diffulex.checkpoint.loader import find_stored, weight_table_of
from diffulex.checkpoint.tensor_files import find_tensors
from diffulex.checkpoint.tensor_reader import TensorReader
from diffulex.errors import CheckpointError, ConfigError
from diffulex.nn.linear import Linear, pack_weights
from diffulex.profiling.memory import tensor_bytes
from diffulex.quantization.experts import QuantizedExperts
from diffulex.quantization.layers import StoredQuantizer
from diffulex.quantization.stored import read_stored
from diffulex.quantization.weights import QuantizedWeight
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.moe_families import moe_builder, moe_config, stack_experts
from fixtures.paged_batch import PagedRunner, Rows
from fixtures.quantized import (
    EXPERT_FORMATS,
    FORMATS,
    Checked,
    Format,
    awq,
    compressed,
    error_of,
    gptq,
    packed,
    read_tensors,
    rows_by_product,
)
from fixtures.twins import Twin

if TYPE_CHECKING:
    from pathlib import Path

#: All projections have columns of whole groups, and blocks that end inside of 128 rows.
CONFIG = tiny_config(intermediate_size=160)
FP32 = torch.float32


def write(directory: Path, stored: Format, config: dict[str, Any] = CONFIG) -> dict[str, Any]:
    CheckpointBuilder(config).write(directory)
    return stored.write(directory)


def load(directory: Path, as_stored: bool = True, dtype: torch.dtype = FP32) -> Any:
    name, spec, info = detect(directory)
    assert info.stored is not None
    quantizer = StoredQuantizer(info.stored, directory) if as_stored else None
    return load_model(name, spec, directory, dtype, "cpu", quantizer=quantizer)


def meant_rows(meant: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{layer}."
    parts = {
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.o": ("self_attn.o_proj",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    }
    return {
        name: torch.cat([meant[f"{prefix}{part}.weight"] for part in stacked])
        for name, stacked in parts.items()
    }


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_of_the_definition(tmp_path, name: str) -> None:
    meant = write(tmp_path, FORMATS[name])
    model = load(tmp_path, as_stored=False)
    table = weight_table_of(model, {})
    assert table.keys() == meant.keys()
    for key, target in table.items():
        assert torch.equal(target, meant[key]), key


@pytest.mark.every(3)
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_the_dequantised_matrix(tmp_path, name: str) -> None:
    """Every row of a matrix in one product, so that a column cannot be exchanged for another."""
    meant = write(tmp_path, FORMATS[name])
    model = load(tmp_path)
    pack_weights(model)
    for layer in range(model.spec.num_layers):
        for key, rows in meant_rows(meant, layer).items():
            held = model.layers[layer].get_submodule(key).format
            assert isinstance(held, QuantizedWeight)
            assert held.scheme.name.lower() == FORMATS[name].scheme
            found = rows_by_product(held)
            assert torch.allclose(found, rows, rtol=2e-6, atol=0), key


def of_group(name: str, group: int, encode: Any) -> Format:
    """A format of 4 bits with groups of another size."""
    config = json.loads(json.dumps(FORMATS[name].config))
    if name.startswith("ct"):
        config["config_groups"]["group_0"]["weights"]["group_size"] = group
    else:
        config["group_size"] = group
    return replace(FORMATS[name], config=config, encode=encode)


@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("gptq_v1", gptq),
        ("gptq_sym", partial(gptq, is_symmetric=True)),
        ("awq", awq),
        ("ct_int4", partial(packed, is_symmetric=True)),
        ("ct_int4", partial(packed, is_symmetric=True, of_scale=torch.float16)),
        ("ct_int4_zeros", partial(packed, is_symmetric=False)),
    ],
)
def test_the_memory_that_is_asked_for_holds_scales_and_zero_points(
    tmp_path, monkeypatch: pytest.MonkeyPatch, name: str, make: Any, group: int, is_hopper: bool
) -> None:
    """In the types that products take, which beside tiles are larger than the stored ones; tiles are made
    anywhere, and multiplied on compute capability 9.0."""
    config = tiny_config(hidden_size=128, intermediate_size=256)
    meant = write(tmp_path, of_group(name, group, make(group)), config)
    asked: list[int] = []
    monkeypatch.setattr(memory, "check_memory", lambda needed, *_: asked.append(needed))
    # As on a device, only its own answers so: not the meta device, on which bytes are counted.
    monkeypatch.setattr(
        ops, "has_hopper_kernels", lambda device: is_hopper and device.type == "cpu"
    )
    model = load(tmp_path, dtype=torch.bfloat16)
    assert asked == [tensor_bytes(model)]
    pack_weights(model)
    assert asked == [tensor_bytes(model)]
    for layer in range(model.spec.num_layers):
        for key, rows in meant_rows(meant, layer).items():
            held = model.layers[layer].get_submodule(key).format
            assert torch.equal(Twin(held).values, rows.double())
            for part in held.parts:
                assert part.has_tiles == is_hopper
                if part.has_tiles:
                    assert part.codes.size(0) == part.shape.rows // 8
                    is_pair = (part.scale.dtype, part.zeros is not None) == (FP32, True)
                    assert is_pair == part.is_foreign
                    assert not is_pair or part.zeros.dtype == torch.bfloat16


@pytest.mark.parametrize("is_stacked", [False, True])
def test_the_memory_that_is_asked_for_holds_the_scales_of_experts(
    tmp_path, monkeypatch: pytest.MonkeyPatch, is_stacked: bool
) -> None:
    """Experts in stacks have no tiles, so that their scales stay without zero points."""
    config = moe_config("sdar_moe", moe_intermediate_size=128, hidden_size=128)
    moe_builder("sdar_moe", config=config).write(tmp_path)
    replace(FORMATS["ct_int4"], encode=packed(32, True, torch.float16)).write(tmp_path)
    asked: list[int] = []
    monkeypatch.setattr(memory, "check_memory", lambda needed, *_: asked.append(needed))
    monkeypatch.setattr(ops, "has_hopper_kernels", lambda device: device.type == "cpu")
    monkeypatch.setattr(QuantizedExperts, "are_stacked", staticmethod(lambda device: is_stacked))
    model = load(tmp_path, dtype=torch.bfloat16)
    assert asked == [tensor_bytes(model)]
    for experts in experts_of(model):
        parts = [part for weight in (*experts.w13, *experts.w2) for part in weight.parts]
        assert all(part.has_tiles != is_stacked for part in parts)
        assert all((part.zeros is None) == is_stacked for part in parts)


def logits(model: Any) -> torch.Tensor:
    runner = PagedRunner(model, 4)
    return runner.forward([Rows(runner.sequence([7, 9, 30, 41, 5, 6, 250, 11]), 8, False)])[0]


@pytest.mark.every(5)
@pytest.mark.parametrize("name", FORMATS)
def test_a_forward_multiplies_by_the_dequantised_matrices(tmp_path, name: str) -> None:
    """Each product within the rounding of its sum; beside 4 bits the logits too.

    Rows of 8 bits would move with the last bits of the product before them.
    """
    meant = write(tmp_path, FORMATS[name])
    model = load(tmp_path)
    found = logits(model)
    for layer in range(model.spec.num_layers):
        for key, rows in meant_rows(meant, layer).items():
            linear = model.layers[layer].get_submodule(key)
            linear.format = Checked(linear.format, rows)
    assert torch.equal(logits(model), found)
    checked = [m.format for m in model.modules() if isinstance(m, Linear)]
    assert all(each.products == 1 for each in checked)
    if FORMATS[name].scheme == "int4":
        expected = logits(load(tmp_path, as_stored=False))
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * expected.abs().max())


@pytest.mark.parametrize("name", ["ct_fp8_block", "ct_int8", "ct_int4", "fp8_block"])
def test_pieces_of_few_rows_give_the_same(
    tmp_path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = {**CONFIG, "intermediate_size": 288}
    write(tmp_path, FORMATS[name], config)
    whole = load(tmp_path)
    monkeypatch.setattr(low_precision, "_PIECE_VALUES", 300)
    cut = load(tmp_path)
    for one, two in zip(whole.modules(), cut.modules(), strict=True):
        if isinstance(one, Linear):
            assert torch.equal(rows_by_product(one.format), rows_by_product(two.format))
    # Any rows of the values can be asked for.
    stored = find_stored(whole, tmp_path)["model.layers.0.mlp.gate_proj.weight"]
    values = [piece.clone() for _, piece in TensorReader("cpu").pieces(stored)]
    asked = list(TensorReader("cpu").pieces(stored, 7, slice(100, 250)))
    starts = [rows.start for rows, _ in asked]
    assert starts[0] == 100
    assert [*starts[1:], 250] == [rows.stop for rows, _ in asked]
    assert all(rows.stop - rows.start == len(piece) <= 7 for rows, piece in asked)
    assert torch.equal(torch.cat([piece for _, piece in asked]), torch.cat(values)[100:250])


@pytest.mark.parametrize("name", EXPERT_FORMATS)
def test_experts_alone(tmp_path, name: str) -> None:
    """The flags of LLaDA2: blocks of experts, everything else as it is."""
    config = moe_config("llada2", moe_intermediate_size=144, hidden_size=64)
    num = config["num_experts"]
    edit = (lambda tensors: stack_experts(tensors, num, "merged")) if name == "f5" else None
    moe_builder("llada2", config=config, edit=edit).write(tmp_path)
    meant = EXPERT_FORMATS[name].write(tmp_path)
    plain, model = load(tmp_path, as_stored=False), load(tmp_path)
    stored_names = find_stored(plain, tmp_path)
    for key, target in weight_table_of(plain, stored_names).items():
        assert torch.equal(target, meant[key]), key
    held = [getattr(module, "matrices", None) for module in model.modules()]
    found = [item for item in held if item is not None]
    assert len(found) == 2
    assert all(isinstance(item, QuantizedExperts) for item in found)
    dense = [module for module in plain.modules() if hasattr(module, "w13")]
    for experts, module in zip(found, dense, strict=True):
        for expert in range(num):
            rows = rows_by_product(experts.w13[expert])
            assert torch.allclose(rows, module.w13[expert], rtol=2e-6, atol=0)
            rows = rows_by_product(experts.w2[expert])
            assert torch.allclose(rows, module.w2[expert], rtol=2e-6, atol=0)


def experts_of(model: Any) -> list[QuantizedExperts]:
    held = (getattr(module, "matrices", None) for module in model.modules())
    return [item for item in held if isinstance(item, QuantizedExperts)]


@pytest.mark.parametrize(
    ("name", "got"),
    [("ct_int4_zeros", "zero points"), ("gptq_sym", "zero points and orders of columns")],
)
def test_experts_that_have_no_stacks(
    tmp_path, monkeypatch: pytest.MonkeyPatch, name: str, got: str
) -> None:
    config = moe_config("sdar_moe", moe_intermediate_size=32, hidden_size=64)
    moe_builder("sdar_moe", config=config).write(tmp_path)
    FORMATS[name].write(tmp_path)
    assert experts_of(load(tmp_path))
    monkeypatch.setattr(QuantizedExperts, "are_stacked", staticmethod(lambda device: True))
    with pytest.raises(ConfigError, match=f"got {got} .quantization none takes the values"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["ct_int8", "ct_int4", "ct_int4_row"])
def test_experts_of_one_tensor_each(tmp_path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """compressed-tensors has a tensor for each projection of an expert; routers stay as they are. In
    stacks, as devices have them, are the same codes."""
    config = moe_config("sdar_moe", moe_intermediate_size=32, hidden_size=64)
    moe_builder("sdar_moe", config=config).write(tmp_path)
    meant = FORMATS[name].write(tmp_path)
    plain, model = load(tmp_path, as_stored=False), load(tmp_path)
    for key, target in weight_table_of(plain, {}).items():
        assert torch.equal(target, meant[key]), key
    monkeypatch.setattr(QuantizedExperts, "are_stacked", staticmethod(lambda device: True))
    apart, stacked = experts_of(model), experts_of(load(tmp_path))
    assert len(apart) == len(stacked) == config["num_hidden_layers"]
    for one, two in zip(apart, stacked, strict=True):
        for weight, of_stack in zip((*one.w13, *one.w2), (*two.w13, *two.w2), strict=True):
            for part, other in zip(weight.parts, of_stack.parts, strict=True):
                assert torch.equal(part.codes, other.codes)
                assert torch.equal(part.scale, other.scale)
    names = [name for name, _ in model.named_parameters() if name.endswith("router")]
    assert names
    assert all(
        torch.equal(dict(model.named_parameters())[name], dict(plain.named_parameters())[name])
        for name in names
    )


def test_an_engine_runs_what_is_stored(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    """`auto` takes the codes; `none` the values, as a plain checkpoint of them gives them."""
    meant = write(tmp_path / "stored", FORMATS["ct_fp8_channel"])
    CheckpointBuilder(CONFIG).write(tmp_path / "plain")
    save_file(meant, tmp_path / "plain" / "model.safetensors")
    settings = {"device": "cpu", "max_model_len": 128, "max_num_reqs": 2}
    params = SamplingParams(temperature=0.0, max_tokens=12)

    def tokens(engine: Diffulex) -> list[int]:
        return list(engine.generate([[5, 6, 7]], params, summary=False)[0].token_ids)

    with Diffulex(str(tmp_path / "plain"), **settings) as engine:
        expected = tokens(engine)
    with Diffulex(str(tmp_path / "stored"), quantization="none", **settings) as engine:
        assert tokens(engine) == expected
    with (
        caplog.at_level("INFO", logger="diffulex"),
        Diffulex(str(tmp_path / "stored"), **settings) as engine,
    ):
        assert engine.config.model.quantization == "fp8"
        layers = [m for m in engine._executor.runner.model.modules() if isinstance(m, Linear)]
        assert all(isinstance(layer.format, QuantizedWeight) for layer in layers)
        assert len(tokens(engine)) == 12
    assert 'not "token" as the checkpoint says' in caplog.text


def test_stored_matrices_are_what_new_weights_are_read_from(tmp_path) -> None:
    """A running engine in its dtype takes a directory in low precision as values."""
    plain = CheckpointBuilder(CONFIG, seed=3)
    plain.write(tmp_path / "plain")
    meant = write(tmp_path / "stored", FORMATS["gptq_v1"])
    with Diffulex(str(tmp_path / "plain"), device="cpu", max_model_len=128) as engine:
        engine.update_weights(str(tmp_path / "stored"))
        table = weight_table_of(engine._executor.runner.model, {})
        assert all(torch.equal(table[key], values) for key, values in meant.items())


ENGINE_ERRORS = [
    ({"quantization": "int8"}, "quantization: expected auto, none or fp8, the scheme of the checkpoint, got 'int8'"),
    ({"quantize_head": True}, "quantize_head: expected False with a quantised checkpoint, got True"),
    (
        {"use_lora": True, "pre_merge_lora": True, "lora_path": "x"},
        "pre_merge_lora: expected False with a quantised checkpoint, got True",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), ENGINE_ERRORS)
def test_settings_against_the_checkpoint(tmp_path, settings, message: str) -> None:
    write(tmp_path, FORMATS["fp8_tensor"])
    with pytest.raises(ConfigError) as caught:
        Diffulex(str(tmp_path), device="cpu", **settings)
    assert str(caught.value) == message


REFUSED = [
    ({"quant_method": "bitsandbytes"}, "quant_method: expected one of compressed-tensors, fp8, modelopt, gptq, awq, got 'bitsandbytes'"),
    ({"quant_method": "w8a8_fp8"}, "quant_method: expected one of compressed-tensors, fp8, modelopt, gptq, awq, got 'w8a8_fp8'"),
    ({"bits": 4}, "quant_method: expected one of compressed-tensors, fp8, modelopt, gptq, awq, got None"),
    ({**FORMATS["fp8_block"].config, "weight_block_size": [64, 64]}, r"weight_block_size: expected \[128, 128\] or null, got \[64, 64\]"),
    ({**FORMATS["fp8_block"].config, "fmt": "e5m2"}, "fmt: expected one of e4m3, .* got 'e5m2'"),
    ({**FORMATS["awq"].config, "version": "gemv"}, "version: expected gemm, got 'gemv'"),
    ({**FORMATS["awq"].config, "version": "gemv_fast"}, "version: expected gemm, got 'gemv_fast'"),
    ({**FORMATS["awq"].config, "version": "marlin"}, "version: expected gemm, got 'marlin'"),
    ({**FORMATS["awq"].config, "zero_point": False}, "zero_point: expected True, got False"),
    ({**FORMATS["awq"].config, "bits": 8}, "bits: expected 4, got 8"),
    ({**FORMATS["gptq_v1"].config, "bits": 3}, "bits: expected 4, got 3"),
    ({**FORMATS["gptq_v1"].config, "group_size": 16}, "group_size: expected one of 32, 64, 128, -1, got 16"),
    ({**FORMATS["gptq_v1"].config, "is_marlin_format": True}, "is_marlin_format: expected False, got True"),
    ({**FORMATS["gptq_v1"].config, "lm_head": True}, "lm_head: expected False, got True"),
    ({**FORMATS["gptq_v1"].config, "checkpoint_format": "marlin"}, "checkpoint_format: expected one of gptq, gptq_v2, got 'marlin'"),
    ({**FORMATS["gptq_v1"].config, "dynamic": {"x": {}}}, "dynamic: expected none"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo: expected FP8, got 'NVFP4'"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo: expected FP8, got 'W4A8_AWQ'"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo: expected FP8, got 'MIXED_PRECISION'"),
    (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "format: expected one of float-quantized"),
    (compressed("int-quantized", num_bits=8, type="int", strategy="group", group_size=128), r"quantization: int8: expected group size 0 in quantization_config\.config_groups\.group_0\.weights, got 128"),
    (compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False), "symmetric: expected true, got False"),
    (compressed("pack-quantized", num_bits=8, type="int", strategy="channel"), "num_bits: expected 4, got 8"),
    (compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, actorder="group"), "actorder: expected null, weight or static, got 'group'"),
    (compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[1, 128]), "block_structure: expected"),
    ({**compressed("float-quantized"), "quantization_status": "calibration"}, "quantization_status: expected one of compressed, frozen, got 'calibration'"),
    ({**compressed("float-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config: expected none"),
    ({**FORMATS["ct_fp8_preset"].config, "config_groups": {"NVFP4": ["Linear"]}}, "NVFP4: expected an object, or one of the schemes"),
    ({**FORMATS["ct_int8"].config, "ignore": ["re:("]}, "ignore: expected regular expressions"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_read_is_refused_by_name(tmp_path, config, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_stored(tmp_path)
    assert "\n" not in str(caught.value)


def test_output_activations_are_refused(tmp_path) -> None:
    config = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    config["config_groups"]["group_0"]["output_activations"] = {"num_bits": 8}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(CheckpointError, match=r"group_0\.output_activations: expected null"):
        read_stored(tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"format": "e5m2"}, "format: expected one of e4m3fn, e4m3, got 'e5m2'"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size: expected \[128, 128\]"),
        ({"activation_method": "static"}, "activation_method: expected a dynamic one"),
        ({"weight_granularity": "per_tensor"}, "weight_granularity: expected per_expert_2d_block"),
        ([1], "expected an object"),
    ],
)
def test_flags_of_experts_are_refused(tmp_path, value, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"llada_fp8_experts": value}))
    with pytest.raises(CheckpointError, match=rf"config\.json: llada_fp8_experts.*{message}"):
        read_stored(tmp_path)


def test_two_places_that_disagree(tmp_path) -> None:
    config = {"quantization_config": FORMATS["ct_int8"].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = {"quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(other))
    message = r"hf_quant_config\.json: quantization: expected int8 as in config\.json"
    with pytest.raises(CheckpointError, match=message):
        read_stored(tmp_path)
    del other["quantization"]["quant_algo"]  # speaks of the KV cache alone
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(other))
    assert read_stored(tmp_path).scheme == "int8"


@pytest.mark.parametrize("kept", [["a", "b"], ["b", "a"], ["a"], ["a", "b", "c"]])
def test_two_places_that_leave_out_other_modules(tmp_path, kept: list[str]) -> None:
    config = {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["a", "b"],
        }
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = {"quantization": {"quant_algo": "FP8", "exclude_modules": kept}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(other))
    if set(kept) == {"a", "b"}:
        assert read_stored(tmp_path).ignore == ("a", "b")
        return
    message = rf"hf_quant_config\.json: quantization: expected modules to be left out as in config\.json: quantization_config, got a difference in {'c' if 'c' in kept else 'b'}$"
    with pytest.raises(CheckpointError, match=message):
        read_stored(tmp_path)


def test_two_groups_of_one_target(tmp_path) -> None:
    """Of the same form they are one; in two forms neither can be meant."""
    config = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    groups = config["config_groups"]
    groups["group_1"] = dict(groups["group_0"])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert read_stored(tmp_path).scheme == "fp8"
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    groups["group_1"]["weights"] = weights
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(
        CheckpointError,
        match=r"quantization_config\.config_groups: expected one form of Linear, got two",
    ):
        read_stored(tmp_path)
    groups["group_1"]["targets"] = ["re:.*down_proj$"]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = read_stored(tmp_path)
    assert [found.rule_of(name).scheme for name in ("x.up_proj", "x.down_proj")] == [
        "fp8",
        "fp8_block",
    ]


@pytest.mark.parametrize("depth", [16_384, 16_392])
def test_rows_of_gptq_without_groups_have_a_bound(tmp_path, depth: int) -> None:
    tensors = {
        "m.qweight": torch.zeros(depth // 8, 8, dtype=torch.int32),
        "m.qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "m.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": FORMATS["gptq_v2_rows"].config})
    )
    message = "checkpoint: m.qweight: expected at most 16384 columns with group_size -1, got 16392"
    said = error_of(lambda: join_matrices(find_tensors(tmp_path), read_stored(tmp_path)))
    assert said == ("" if depth == 16_384 else message)


LAYER = "model.layers.0.mlp.down_proj"
#: Format, edit of the tensors, and what is said about it.
DAMAGES = [
    ("ct_fp8_channel", lambda t: t.pop(f"{LAYER}.weight_scale"), f"{LAYER}.weight: expected weight_scale beside an F8_E4M3 weight, got none"),
    ("fp8_block", lambda t: t.pop(f"{LAYER}.weight_scale_inv"), f"{LAYER}.weight: expected weight_scale_inv beside an F8_E4M3 weight, got none"),
    ("ct_fp8_channel", lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].bfloat16()}), f"{LAYER}.weight: expected F8_E4M3 beside weight_scale, got BF16"),
    ("ct_fp8_channel", lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(32, 96)}), f"{LAYER}.weight_scale: expected shape [64, 1], [64] or [1], got [32, 96]"),
    ("ct_fp8_channel", lambda t: t[f"{LAYER}.weight_scale"].__setitem__(17, float("nan")), f"{LAYER}.weight_scale: expected finite scales, got nan at row 17"),
    ("ct_int8", lambda t: t[f"{LAYER}.weight_scale"].__setitem__(9, 0.0), f"{LAYER}.weight_scale: expected scales other than zero, got 0 at row 9"),
    ("fp8_block", lambda t: t[f"{LAYER}.weight"].view(torch.uint8).__setitem__(3, 0x7F), f"{LAYER}.weight: expected finite values, got NaN"),
    ("gptq_v1", lambda t: t.pop(f"{LAYER}.qzeros"), f"{LAYER}.qzeros: expected I32, got none"),
    ("gptq_v1", lambda t: t.pop(f"{LAYER}.qweight"), f"{LAYER}.qweight: expected I32 beside"),
    ("gptq_desc_act", lambda t: t[f"{LAYER}.g_idx"].fill_(1), f"{LAYER}.g_idx: expected 32 columns of each of 5 groups, got others"),
    ("ct_int4", lambda t: t[f"{LAYER}.weight_shape"].fill_(7), f"{LAYER}.weight_shape: expected the shape of 64 rows of 20 words, got [7, 7]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "message"), DAMAGES)
def test_damaged_tensors_are_named(tmp_path, name: str, edit, message: str) -> None:
    write(tmp_path, FORMATS[name])
    tensors = read_tensors(tmp_path)
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert f"checkpoint: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_scale_of_zero_is_legal_where_the_row_is_zero(tmp_path) -> None:
    write(tmp_path, FORMATS["ct_int8"])
    tensors = read_tensors(tmp_path)
    tensors[f"{LAYER}.weight"][9] = 0
    tensors[f"{LAYER}.weight_scale"][9] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    rows = rows_by_product(load(tmp_path).layers[0].mlp.down.format)
    assert (rows[9] == 0).all()
    assert (rows[8] != 0).any()


def test_parts_of_a_matrix_have_one_format(tmp_path) -> None:
    meant = write(tmp_path, FORMATS["fp8_block"])
    tensors, module = read_tensors(tmp_path), "model.layers.1.self_attn.k_proj"
    del tensors[f"{module}.weight_scale_inv"]
    tensors[f"{module}.weight"] = meant[f"{module}.weight"].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    message = (
        r"checkpoint: model\.layers\.1\.self_attn: expected q_proj, k_proj and v_proj in one format,"
        r" got fp8_block and BF16"
    )
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_matrix_that_should_be_in_low_precision(tmp_path) -> None:
    meant = write(tmp_path, FORMATS["ct_int8"])
    tensors = read_tensors(tmp_path)
    del tensors[f"{LAYER}.weight_scale"]
    tensors[f"{LAYER}.weight"] = meant[f"{LAYER}.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    message = rf"checkpoint: {LAYER}\.weight: expected int8, as config\.json: .* got F32"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_codes_without_a_word_about_them_are_never_values(tmp_path) -> None:
    write(tmp_path, FORMATS["fp8_tensor"])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    name, spec, info = detect(tmp_path)
    assert info.stored is None
    with pytest.raises(CheckpointError, match=r"expected|got"):
        load_model(name, spec, tmp_path, FP32, "cpu")
