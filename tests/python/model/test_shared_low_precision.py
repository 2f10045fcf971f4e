# SPDX-License-Identifier: Apache-2.0
"""Weights in low precision on several ranks: parts of stored codes, and parts that are quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex.checkpoint.auto_model import detect, load_model, random_model
from diffulex.distributed.shard import ONE_RANK, ExpertShard, Shard
from diffulex.errors import CheckpointError
from diffulex.nn.linear import pack_weights
from diffulex.quantization.experts import QuantizedExperts
from diffulex.quantization.layers import ModelQuantizer, StoredQuantizer
from diffulex.quantization.scheme import SCHEMES, QuantizationPlan
from diffulex.quantization.weights import QuantizedWeight
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.gemma import GemmaOracle
from fixtures.moe_families import moe_builder, moe_config
from fixtures.quantized import EXPERT_FORMATS, FORMATS, rows_by_product

FP32 = torch.float32
#: Two ranks have blocks of 128 rows and columns of every matrix.
CONFIG = tiny_config(
    hidden_size=256,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    num_hidden_layers=1,
)
#: Formats whose scales or columns no two ranks can share.
UNCUT = {
    "ct_int4_row": "expected a multiple of 256 columns on each of several ranks",
    "gptq_v2_rows": "expected a multiple of 256 columns on each of several ranks",
    "gptq_desc_act": r"_proj\.g_idx: expected columns in order, which several ranks can share",
}
PARTS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.o": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def load(directory: Path, shard: Shard, quantizer: Any = None) -> Any:
    name, spec, info = detect(directory)
    if quantizer is None:
        assert info.stored is not None
        quantizer = StoredQuantizer(info.stored, directory)
    model = load_model(name, spec, directory, FP32, "cpu", quantizer=quantizer, shard=shard)
    pack_weights(model)
    return model


def cut(model: Any, values: dict[str, torch.Tensor], names: tuple[str, ...]) -> torch.Tensor:
    """The rows that a rank has of some matrices, one after another."""
    slices, found = model.weight_slices(), []
    for name in names:
        key = f"model.layers.0.{name}.weight"
        part = slices[key]
        found.append(part.cut(torch.cat([values[key][rows] for rows in part.rows])))
    return torch.cat(found)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_have_parts_of_the_stored_codes(tmp_path: Path, name: str) -> None:
    CheckpointBuilder(CONFIG).write(tmp_path)
    meant = FORMATS[name].write(tmp_path)
    if name in UNCUT:
        with pytest.raises(CheckpointError, match=UNCUT[name]):
            load(tmp_path, Shard(0, 2))
        return
    for rank in range(2):
        model = load(tmp_path, Shard(rank, 2))
        for path, names in PARTS.items():
            held = model.layers[0].get_submodule(path).format
            assert isinstance(held, QuantizedWeight)
            expected = cut(model, meant, names)
            assert expected.numel() < sum(
                meant[f"model.layers.0.{n}.weight"].numel() for n in names
            )
            assert torch.allclose(rows_by_product(held), expected, rtol=2e-6, atol=0), path


def test_parts_that_split_a_block_are_refused_by_name(tmp_path: Path) -> None:
    CheckpointBuilder({**CONFIG, "intermediate_size": 192}).write(tmp_path)
    FORMATS["fp8_block"].write(tmp_path)
    text = (
        r"checkpoint: model\.layers\.0\.mlp\.down_proj\.weight: expected a multiple of 128 columns"
        r" on each of several ranks, for whole groups with one scale, got 0:96"
    )
    with pytest.raises(CheckpointError, match=text):
        load(tmp_path, Shard(0, 2))
    load(tmp_path, ONE_RANK)


def held_parts(model: Any, layer: int = 0) -> dict[str, torch.Tensor]:
    """Values of the matrices that a rank holds, by their names in checkpoints."""
    found = {}
    for path, names in PARTS.items():
        product = model.layers[layer].get_submodule(path)
        values = rows_by_product(product.format)
        for index, name in enumerate(names):
            found[f"model.layers.{layer}.{name}.weight"] = values[product.rows_of(index)]
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("heads", [4, 2], ids=["", "one half of a block"])
def test_parts_are_quantised_as_the_whole_is(tmp_path: Path, scheme: str, heads: int) -> None:
    """Rows and columns alike; of two KV heads a rank has one, of 64 rows of a block."""
    CheckpointBuilder({**CONFIG, "num_key_value_heads": heads}).write(tmp_path)
    plan = ModelQuantizer(QuantizationPlan(scheme))
    whole = held_parts(load(tmp_path, ONE_RANK, plan))
    for rank in range(2):
        model = load(tmp_path, Shard(rank, 2), plan)
        slices = model.weight_slices()
        for name, found in held_parts(model).items():
            part = slices[name]
            assert part.shape == whole[name].shape
            assert found.numel() < whole[name].numel()
            expected = part.cut(torch.cat([whole[name][rows] for rows in part.rows]))
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sums_of_products_are_those_of_the_whole(tmp_path: Path, scheme: str) -> None:
    """Rows are scaled alike: ranks have whole groups of the columns that share a scale."""
    CheckpointBuilder({**CONFIG, "intermediate_size": 384}).write(tmp_path)
    quantizer = ModelQuantizer(QuantizationPlan(scheme))
    whole = load(tmp_path, ONE_RANK, quantizer).layers[0]
    layers = [load(tmp_path, Shard(r, 2, unit=128), quantizer).layers[0] for r in range(2)]
    for path in ("attention.o", "mlp.down"):
        products = [layer.get_submodule(path) for layer in layers]
        expected = whole.get_submodule(path)
        x = torch.randn(9, expected.in_features, generator=torch.Generator().manual_seed(1))
        found = sum(p.multiply(x[:, p.stored_columns].contiguous()) for p in products)
        torch.testing.assert_close(found, expected.multiply(x), rtol=1e-5, atol=1e-6)


def test_stored_blocks_that_begin_on_another_rank(tmp_path: Path) -> None:
    CheckpointBuilder({**CONFIG, "num_key_value_heads": 2}).write(tmp_path)
    meant = FORMATS["fp8_block"].write(tmp_path)
    for rank in range(2):
        model = load(tmp_path, Shard(rank, 2))
        for name, found in held_parts(model).items():
            part = model.weight_slices()[name]
            expected = part.cut(torch.cat([meant[name][rows] for rows in part.rows]))
            assert torch.allclose(found, expected, rtol=2e-6, atol=0), name


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["llada2", "sdar_moe", "diffusion_gemma"])
def test_parts_of_experts_are_quantised_as_the_whole_is(
    tmp_path: Path, family: str, scheme: str
) -> None:
    """Of tensors for each projection, and of stacked ones."""
    if family == "diffusion_gemma":
        GemmaOracle(moe_intermediate_size=256).write(tmp_path)
    else:
        moe_builder(family, config=moe_config(family, moe_intermediate_size=256)).write(tmp_path)
    plan = ModelQuantizer(QuantizationPlan(scheme))
    whole = experts_of(load(tmp_path, ONE_RANK, plan))
    part = experts_of(load(tmp_path, Shard(1, 2, ExpertShard(1, 2, "width", 128), 128), plan))
    for number in (0, 3):
        gate, up = rows_by_product(whole.w13[number]).chunk(2)
        expected = torch.cat([gate[128:], up[128:]])
        assert torch.equal(rows_by_product(part.w13[number]), expected)
        expected = rows_by_product(whole.w2[number])[:, 128:]
        assert torch.equal(rows_by_product(part.w2[number]), expected)


def experts_of(model: Any) -> QuantizedExperts:
    """Of the first layer that has some."""
    found = (getattr(module, "matrices", None) for module in model.modules())
    return next(matrices for matrices in found if isinstance(matrices, QuantizedExperts))


@pytest.mark.parametrize("mode", ["expert", "width"])
@pytest.mark.parametrize("name", EXPERT_FORMATS)
def test_experts_in_low_precision(tmp_path: Path, name: str, mode: str) -> None:
    config = moe_config("llada2", moe_intermediate_size=256, hidden_size=128)
    if name == "f5":
        pytest.skip("one tensor for all experts is written by another builder")
    moe_builder("llada2", config=config).write(tmp_path)
    meant = EXPERT_FORMATS[name].write(tmp_path)
    model = load(tmp_path, Shard(1, 2, ExpertShard(1, 2, mode)))
    layer = model.layers[1].mlp
    assert isinstance(layer.matrices, QuantizedExperts)
    assert len(layer.matrices.w13) == (8 if mode == "expert" else 16)
    number = 3 if mode == "expert" else 1  # of a router with groups every second one
    prefix = f"model.layers.1.mlp.experts.{number}."
    rows = slice(0, 256) if mode == "expert" else slice(128, 256)
    gate, up, down = (meant[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down"))
    found = rows_by_product(layer.matrices.w13[1])
    assert torch.allclose(found, torch.cat([gate[rows], up[rows]]), rtol=2e-6, atol=0)
    found = rows_by_product(layer.matrices.w2[1])
    assert torch.allclose(found, down[:, rows], rtol=2e-6, atol=0)


def test_random_weights_are_quantised_on_every_rank(tmp_path: Path) -> None:
    CheckpointBuilder(CONFIG).write(tmp_path)
    name, spec, _ = detect(tmp_path)
    quantizer = ModelQuantizer(QuantizationPlan("int8"))
    model: Any = random_model(name, spec, FP32, "cpu", quantizer=quantizer, shard=Shard(1, 2))
    assert isinstance(model.layers[0].mlp.down.format, QuantizedWeight)
