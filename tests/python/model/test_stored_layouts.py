# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in low precision whose matrices are fused or tied, and what their own library reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from diffulex import Diffulex, SamplingParams
from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.checkpoint.loader import find_stored, weight_table_of
from diffulex.config.config import Config
from diffulex.config.types import ModelFacts
from diffulex.quantization.experts import QuantizedExperts
from diffulex.quantization.layers import StoredQuantizer
from diffulex.quantization.weights import QuantizedWeight
from fixtures.checkpoints import CheckpointBuilder, tiny_config
from fixtures.gemma import GemmaOracle, rewrite
from fixtures.moe_families import moe_builder, moe_config
from fixtures.paged_batch import CAUSAL, FULL, PagedRunner, Rows
from fixtures.quantized import FORMATS, read_tensors, rows_by_product
from fixtures.twins import Record, replace_weights

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


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor for each projection of an expert, in place of stacks."""
    split: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        prefix, dot, last = name.rpartition(".experts.")
        if not dot:
            split[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = {"down": matrix}
            if last == "gate_up_proj":
                parts = dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
            for part, rows in parts.items():
                split[f"{prefix}.experts.{expert}.{part}_proj.weight"] = rows
    return split


def gemma_engine(directory: Path, quantization: str) -> Diffulex:
    name, spec, info = detect(directory)
    model = load(directory, as_stored=quantization != "none")
    settings = {"device": "cpu", "dtype": "float32", "quantization": quantization}
    settings |= {"max_model_len": 64, "num_pages": 64, "page_size": 8}
    facts = ModelFacts(name, directory, spec, info.engine_defaults)
    return Diffulex.from_components(
        Config.resolve(str(directory), facts, settings), model, tokenizer=None
    )


def canvas_logits(model: Any) -> torch.Tensor:
    """Of the rows of a prompt, and of a canvas behind it."""
    runner = PagedRunner(model, 6)
    sequence = runner.sequence([30, 2, 64, 8, 20, 50, 41, 33, 12, 5, 6, 7, 5, 90, 11])
    prompt = runner.forward([Rows(sequence, 9, should_store=True, mask_kind=CAUSAL)])
    rows = Rows(sequence, 15, should_store=False, mask_kind=FULL)
    canvas = runner.forward([rows], row_pass_kind=torch.ones(6, dtype=torch.uint8))
    return torch.cat([*prompt, *canvas]).double()


@pytest.mark.parametrize(("name", "scheme"), [("ct_fp8_channel", "fp8"), ("ct_int8", "int8")])
def test_diffusion_gemma_of_one_tensor_for_each_expert(
    tmp_path, monkeypatch: pytest.MonkeyPatch, name: str, scheme: str
) -> None:
    """As published in e4m3 and in int8 of rows: attention, dense blocks and every expert are codes, the
    self-conditioning, routers and embeddings values. Forwards are those of dequantised operands."""
    stored, plain = tmp_path / "stored", tmp_path / "plain"
    for directory in (stored, plain):
        rewrite(directory, split_experts(GemmaOracle(moe_intermediate_size=48).write(directory)))
    meant = FORMATS[name].write(stored)
    rewrite(plain, meant)
    coded = {key.removesuffix("_scale") for key in read_tensors(stored) if key.endswith("_scale")}
    coded = {key for key in coded if key.endswith("weight")}
    # Per layer o and three of the dense block, 24 of the experts, and q, k and, where it is sliding, v.
    assert len(coded) == 3 * (1 + 3 + 24) + 2 * 3 + 2
    assert not [key for key in coded if "self_cond" in key or "router" in key or "embed" in key]
    dense = load(stored, as_stored=False)
    embedding = meant["model.decoder.embed_tokens.weight"]
    for key, target in weight_table_of(dense, find_stored(dense, stored)).items():
        assert torch.equal(target, embedding if key == "lm_head.weight" else meant[key]), key
    model = load(stored)
    for layer, values in zip(model.decoder_layers, dense.decoder_layers, strict=True):
        experts, both = layer.experts.matrices, values.experts
        assert isinstance(experts, QuantizedExperts)
        for held, rows in ((experts.w13, both.w13), (experts.w2, both.w2)):
            found = torch.stack([rows_by_product(weight) for weight in held])
            assert torch.allclose(found, rows, rtol=2e-6, atol=0)
    params = SamplingParams(temperature=0.0, max_tokens=18, seed=1, ignore_eos=True)

    def tokens(engine: Diffulex) -> list[list[int]]:
        prompts = [[7, 9, 11], [30, 2, 64, 8, 20, 50, 41, 33, 12], [77]]
        outputs = engine.generate(prompts, params, summary=False)
        return [list(output.token_ids) for output in outputs]

    with gemma_engine(stored, "none") as values, gemma_engine(plain, "none") as other:
        assert tokens(values) == tokens(other)
    with gemma_engine(stored, scheme) as engine:
        assert [len(answer) for answer in tokens(engine)] == [18] * 3
    record = Record(monkeypatch)
    found = canvas_logits(model)
    num_dense, layers = replace_weights(model, record)
    assert (num_dense, len(layers)) == (3 * 4, 3)
    want = canvas_logits(model)
    assert (found - want).norm() <= 1e-5 * want.norm()


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
