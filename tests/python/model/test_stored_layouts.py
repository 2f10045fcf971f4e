# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in low precision whose matrices are fused or tied, and what their own library reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.checkpoint.loader import weight_table_of
from diffulex.quantization.layers import StoredQuantizer
from diffulex.quantization.weights import QuantizedWeight
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.moe_families import moe_builder, moe_config
from fixtures.quantized import FORMATS, read_tensors, rows_by_product

if TYPE_CHECKING:
    from pathlib import Path


def load(directory: Path, as_stored: bool = True) -> Any:
    name, spec, info = detect(directory)
    quantizer = StoredQuantizer(info.stored, directory) if as_stored else None
    return load_model(name, spec, directory, torch.float32, "cpu", quantizer=quantizer)


@pytest.mark.parametrize("name", ["fp8_block", "ct_int8"])
def test_one_tensor_of_queries_keys_and_values(tmp_path, name: str) -> None:
    """Blocks of the fused matrix begin at its first row, not at that of the keys or the values."""
    config = moe_config(
        "llada2", moe_intermediate_size=32, head_dim=40, rotary_dim=20, num_hidden_layers=2
    )
    moe_builder("llada2", config=config).write(tmp_path)
    meant = FORMATS[name].write(tmp_path)
    stored = read_tensors(tmp_path)
    for layer in range(2):
        prefix = f"model.layers.{layer}.attention.query_key_value.weight"
        if name == "fp8_block":
            assert stored[f"{prefix}_scale_inv"].shape == (3, 1)  # 160 + 80 + 80 rows
        assert stored[prefix].shape == (320, 64)
    plain, model = load(tmp_path, as_stored=False), load(tmp_path)
    for key, target in weight_table_of(plain, {}).items():
        assert torch.equal(target, meant[key]), key
    for layer in range(2):
        held = model.layers[layer].attention.qkv.format
        assert isinstance(held, QuantizedWeight)
        rows = meant[f"model.layers.{layer}.attention.query_key_value.weight"]
        assert torch.allclose(rows_by_product(held), rows, rtol=2e-6, atol=0)


@pytest.mark.parametrize("has_head", [False, True], ids=["absent", "equal"])
@pytest.mark.parametrize("name", ["ct_fp8_channel", "fp8_block", "gptq_v1"])
def test_tied_heads_are_the_embedding(tmp_path, name: str, has_head: bool) -> None:
    """As values, stored once or twice, beside codes in all layers."""
    CheckpointBuilder(tiny_config(intermediate_size=160, tie_word_embeddings=True)).write(tmp_path)
    meant = FORMATS[name].write(tmp_path)
    assert "lm_head.weight" not in meant
    embedding = meant["model.embed_tokens.weight"]
    if has_head:
        tensors = {**read_tensors(tmp_path), "lm_head.weight": embedding.clone()}
        save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path)
    table = weight_table_of(model, {})
    assert torch.equal(table["model.embed_tokens.weight"], embedding)
    head = model.head.weight
    assert head.data_ptr() == table["model.embed_tokens.weight"].data_ptr()
    assert all(isinstance(layer.mlp.down.format, QuantizedWeight) for layer in model.layers)


@pytest.mark.slow
def test_a_library_of_the_format_reads_the_same(tmp_path) -> None:
    """compressed-tensors unpacks what the fixtures wrote from its definition, to the same values."""
    reason = "compressed-tensors is not installed (extra `dev`)"
    library = pytest.importorskip("compressed_tensors.compressors", reason=reason)
    schemes = pytest.importorskip("compressed_tensors.quantization", reason=reason)
    names = [
        name for name, item in FORMATS.items() if "group_0" in item.config.get("config_groups", {})
    ]
    assert len(names) == 7
    for name in names:
        directory = tmp_path / name
        CheckpointBuilder(tiny_config(intermediate_size=160, num_hidden_layers=1)).write(directory)
        meant = FORMATS[name].write(directory)
        config = json.loads((directory / "config.json").read_text())["quantization_config"]
        group = config["config_groups"]["group_0"]
        scheme = schemes.QuantizationScheme(targets=["Linear"], weights=group["weights"])
        compressor = library.BaseCompressor.get_value_from_registry(config["format"])
        modules: dict[str, dict[str, torch.Tensor]] = {}
        for key, tensor in read_tensors(directory).items():
            module, _, last = key.rpartition(".")
            modules.setdefault(module, {})[last] = tensor
        coded = {key: parts for key, parts in modules.items() if "weight_scale" in parts}
        assert len(coded) == 7
        for module, parts in coded.items():
            parts["weight_scale"] = parts["weight_scale"].float()
            values = compressor.decompress(parts, scheme)["weight"]
            if FORMATS[name].scheme == "int4":  # rounded once, as the product takes it
                values = values.bfloat16().float()
            assert torch.equal(values, meant[f"{module}.weight"]), f"{name} {module}"
