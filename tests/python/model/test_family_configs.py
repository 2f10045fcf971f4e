# SPDX-License-Identifier: Apache-2.0
"""Configurations of the dense families: defaults, required keys, mask and stop ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.errors import CheckpointError
from diffulex.families.spec import ModelSpec
from fixtures.families import DENSE_FAMILIES, SHIFTED, family_builder, family_config

QWEN = ["dream", "diffucoder", "dream_reasoner", "fast_dllm_v2", "sdar"]
LLAMA_KEYS = [*QWEN, "stable_diffcoder"]


def read(directory: Path, family: str, **overrides) -> ModelSpec:
    """The description of a directory that holds a configuration only."""
    directory.mkdir(parents=True, exist_ok=True)
    overrides.setdefault("mask_token_id", 259)
    (directory / "config.json").write_text(json.dumps(family_config(family, **overrides)))
    return detect(directory, family)[1]


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_facts_of_a_family(tmp_path, family):
    builder = family_builder(family)
    builder.write(tmp_path)
    name, spec, info = detect(tmp_path)
    assert name == ("dream" if family == "diffucoder" else family)
    assert info.family == name
    assert spec.shift == (family in SHIFTED)
    assert spec.qkv_bias == (family in ("dream", "diffucoder", "fast_dllm_v2"))
    assert not spec.o_bias
    assert spec.qk_norm == (family in ("dream_reasoner", "sdar"))
    assert spec.head_dim == spec.rotary_dim == (32 if family == "sdar" else 16)
    assert (spec.num_q_heads, spec.num_kv_heads, spec.num_layers) == (4, 2, 2)
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (64, 112, 300)
    assert spec.max_positions == 512
    assert spec.rms_norm_eps == (1e-5 if family == "llada" else 1e-6)
    assert spec.rope_theta == (5e5 if family in ("llada", "stable_diffcoder") else 1e6)
    assert spec.block_size == {"stable_diffcoder": 4, "sdar": 4}.get(family, 32)
    assert spec.mask_token_id == 259
    assert not spec.tie_word_embeddings
    stops = (256,) if family == "stable_diffcoder" else (256, 258)
    assert spec.stop_token_ids == stops


def test_diffucoder_is_used_by_name(tmp_path):
    assert read(tmp_path, "diffucoder").family == "diffucoder"
    assert detect(tmp_path)[1].family == "dream"


@pytest.mark.parametrize(
    ("family", "mask", "stops"),
    [
        ("dream", 151666, (151643, 151645)),
        ("diffucoder", 151666, (151643, 151645)),
        ("dream_reasoner", 151669, (151643, 151645)),
        ("fast_dllm_v2", 151665, (151643, 151645)),
        ("sdar", 151669, (151643, 151645)),
        ("stable_diffcoder", 5, (2,)),
    ],
)
def test_ids_without_tokenizer_files(tmp_path, family, mask, stops):
    spec = read(tmp_path, family, vocab_size=152064, mask_token_id=..., eos_token_id=...)
    assert spec.mask_token_id == mask
    assert spec.stop_token_ids == stops


def test_ids_of_llada_without_tokenizer_files(tmp_path):
    sizes = {"vocab_size": 126464, "embedding_size": 126464}
    spec = read(tmp_path, "llada", mask_token_id=..., eos_token_id=126081, **sizes)
    assert spec.mask_token_id == 126336
    assert spec.stop_token_ids == (126081, 126348)


@pytest.mark.parametrize("family", DENSE_FAMILIES)
class TestMaskId:
    def test_tokenizer_files_alone(self, tmp_path, family):
        family_builder(family, config=family_config(family, mask_token_id=...)).write(tmp_path)
        assert detect(tmp_path, family)[1].mask_token_id == 259

    def test_files_of_a_slow_tokenizer(self, tmp_path, family):
        config = family_config(family, mask_token_id=...)
        family_builder(family, config=config, tokenizer="slow").write(tmp_path)
        assert detect(tmp_path, family)[1].mask_token_id == 259

    def test_disagreement_is_an_error_unless_overridden(self, tmp_path, family):
        family_builder(family, config=family_config(family, mask_token_id=77)).write(tmp_path)
        with pytest.raises(CheckpointError, match=r"77 from config\.json, 259 from token"):
            detect(tmp_path, family)
        assert detect(tmp_path, family, mask_token_id=3)[1].mask_token_id == 3

    def test_default_of_another_family_is_not_used(self, tmp_path, family):
        """Tokenizer files that hold neither the mask nor the family's default id."""
        sizes = {"vocab_size": 152064, "embedding_size": 152064, "mask_token_id": ...}
        decoder = {"151667": {"content": "<think>"}}
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"added_tokens_decoder": decoder})
        )
        with pytest.raises(CheckpointError, match="pass mask_token_id"):
            read(tmp_path, family, **sizes)

    def test_zero_is_an_id(self, tmp_path, family):
        assert read(tmp_path, family, mask_token_id=0).mask_token_id == 0

    def test_outside_the_vocabulary(self, tmp_path, family):
        with pytest.raises(CheckpointError, match="expected an id below vocab_size 300, got 300"):
            read(tmp_path, family, mask_token_id=300)


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_stop_ids_are_a_union(tmp_path, family):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    spec = read(tmp_path, family, eos_token_id=9, mask_token_id=1)
    assert {7, 8, 9} <= set(spec.stop_token_ids)


class TestRotary:
    @pytest.mark.parametrize("family", DENSE_FAMILIES)
    def test_nested_base(self, tmp_path, family):
        nested = {"rope_type": "default", "rope_theta": 4321.0}
        spec = read(tmp_path, family, rope_theta=..., rope_parameters=nested)
        assert spec.rope_theta == 4321.0

    @pytest.mark.parametrize("family", DENSE_FAMILIES)
    def test_bases_must_agree(self, tmp_path, family):
        with pytest.raises(CheckpointError, match="rope_theta: expected the value of rope_param"):
            read(tmp_path, family, rope_theta=2.0, rope_parameters={"rope_theta": 3.0})

    @pytest.mark.parametrize("family", DENSE_FAMILIES)
    @pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"])
    def test_scaled_types(self, tmp_path, family, kind):
        with pytest.raises(CheckpointError, match=rf"rope_scaling.rope_type: .*got '{kind}'"):
            read(tmp_path, family, rope_scaling={"rope_type": kind, "factor": 2.0})

    def test_base_beside_an_old_scaling_object(self, tmp_path):
        """transformers 5 reads ``rope_scaling`` as ``rope_parameters``, base included."""
        old = {"type": "default", "rope_theta": 4321.0}
        assert read(tmp_path, "sdar", rope_theta=..., rope_scaling=old).rope_theta == 4321.0
        with pytest.raises(CheckpointError, match=r"rope_theta: expected .*\(4321\.0\), got 5\.0"):
            read(tmp_path, "sdar", rope_theta=5.0, rope_scaling=old)

    def test_parameters_by_layer_type(self, tmp_path):
        """Not taken for absent, which would mean the default base."""
        nested = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}
        with pytest.raises(CheckpointError, match="rope_parameters: expected one set"):
            read(tmp_path, "fast_dllm_v2", rope_theta=..., rope_parameters=nested)

    @pytest.mark.parametrize("family", DENSE_FAMILIES)
    def test_partial(self, tmp_path, family):
        full = 32 if family == "sdar" else 16
        assert read(tmp_path, family, partial_rotary_factor=0.5).rotary_dim == full // 2
        nested = {"rope_theta": 5e5, "partial_rotary_factor": 0.25}
        spec = read(
            tmp_path,
            family,
            rope_theta=...,
            rope_parameters=nested,
            partial_rotary_factor=0.5,
        )
        assert spec.rotary_dim == full // 4

    @pytest.mark.parametrize(
        "family",
        ["dream", "dream_reasoner", "fast_dllm_v2", "sdar", "stable_diffcoder", "llada"],
    )
    def test_base_is_required(self, tmp_path, family):
        """With another base a checkpoint answers fluent nonsense."""
        with pytest.raises(
            CheckpointError, match=r"config\.json: rope_theta: expected .* got None"
        ):
            read(tmp_path, family, rope_theta=...)

    def test_explicit_dimensions_must_agree_with_the_factor(self, tmp_path):
        spec = read(tmp_path, "sdar", partial_rotary_factor=0.5, rotary_dim=16)
        assert spec.rotary_dim == 16
        assert read(tmp_path, "sdar", rotary_dim=8).rotary_dim == 8
        with pytest.raises(CheckpointError, match=r"rotary_dim: .* head_dim 32 .* = 16, got 8"):
            read(tmp_path, "sdar", partial_rotary_factor=0.5, rotary_dim=8)


class TestKeysThatChangeTheMath:
    @pytest.mark.parametrize("family", LLAMA_KEYS)
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("use_sliding_window", True),
            ("use_mrope", True),
            ("mlp_bias", True),
            ("hidden_act", "gelu"),
            ("num_experts", 8),
            ("n_routed_experts", 8),
            ("num_local_experts", 8),
            ("layer_types", ["full_attention", "sliding_attention"]),
        ],
    )
    def test_llama_style(self, tmp_path, family, key, value):
        with pytest.raises(CheckpointError, match=rf"config\.json: {key}: expected "):
            read(tmp_path, family, **{key: value})

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("alibi", True),
            ("attention_layer_norm", True),
            ("input_emb_norm", True),
            ("scale_logits", True),
            ("layer_norm_type", "default"),
            ("layer_norm_type", ...),
            ("block_type", "sequential"),
            ("block_type", ...),
            ("bias_for_layer_norm", True),
            ("activation_type", "swiglu"),
            ("activation_type", ...),
            ("rope", False),
            ("rope", ...),
            ("block_group_size", 2),
            ("layer_norm_with_affine", False),
            ("clip_qkv", 8.0),
        ],
    )
    def test_llada(self, tmp_path, key, value):
        with pytest.raises(CheckpointError, match=rf"config\.json: {key}: expected "):
            read(tmp_path, "llada", **{key: value})

    @pytest.mark.parametrize("family", DENSE_FAMILIES)
    def test_harmless_keys(self, tmp_path, family):
        harmless = {
            "ep_size": 1,
            "fuse_cross_entropy": True,
            "conplemenrary_mask": True,
            "max_window_layers": 9,
            "attention_dropout": 0.1,
            "sliding_window": 4096,
            "use_cache": False,
        }
        assert read(tmp_path, family, **harmless) == read(tmp_path, family)


class TestHeads:
    @pytest.mark.parametrize("family", LLAMA_KEYS)
    @pytest.mark.parametrize("value", [None, 0, ...])
    def test_kv_heads_default(self, tmp_path, family, value):
        assert read(tmp_path, family, num_key_value_heads=value).num_kv_heads == 4

    @pytest.mark.parametrize("family", LLAMA_KEYS)
    def test_head_dim(self, tmp_path, family):
        assert read(tmp_path, family, head_dim=None).head_dim == 16
        assert read(tmp_path, family, head_dim=24).head_dim == 24


class TestLlada:
    def read(self, directory: Path, **overrides) -> ModelSpec:
        return read(directory, "llada", **overrides)

    def test_kv_heads(self, tmp_path):
        assert self.read(tmp_path, n_kv_heads=None).num_kv_heads == 4
        assert self.read(tmp_path, n_kv_heads=0).num_kv_heads == 4
        many = {"multi_query_attention": True}
        assert self.read(tmp_path, n_kv_heads=None, **many).num_kv_heads == 1
        with pytest.raises(CheckpointError, match="n_kv_heads: expected 1 with multi_query"):
            self.read(tmp_path, n_kv_heads=2, **many)

    def test_class_defaults_are_its_own(self, tmp_path):
        """Absent keys mean what LLaDA's configuration class says, not what Llama's does."""
        absent = ("rms_norm_eps", "weight_tying", "max_sequence_length")
        spec = self.read(tmp_path, **dict.fromkeys(absent, ...))
        assert spec.rms_norm_eps == 1e-5
        assert spec.tie_word_embeddings
        assert spec.max_positions == 1024

    @pytest.mark.parametrize("key", ["d_model", "n_layers", "n_heads", "vocab_size"])
    def test_shapes_are_required(self, tmp_path, key):
        with pytest.raises(CheckpointError, match=rf"config\.json: {key}: expected an integer"):
            self.read(tmp_path, **{key: ...})

    def test_width_of_the_feed_forward_block(self, tmp_path):
        assert self.read(tmp_path, mlp_hidden_size=None).intermediate_size == 256
        assert self.read(tmp_path, mlp_hidden_size=None, mlp_ratio=2).intermediate_size == 128

    def test_biases(self, tmp_path):
        spec = self.read(tmp_path, include_qkv_bias=True)
        assert (spec.qkv_bias, spec.o_bias) == (True, False)
        spec = self.read(tmp_path, include_bias=True)
        assert (spec.qkv_bias, spec.o_bias) == (False, True)

    def test_embedding_size(self, tmp_path):
        spec = self.read(tmp_path, embedding_size=320)
        assert (spec.vocab_size, spec.embedding_size, spec.embedding_rows) == (300, 320, 320)
        assert self.read(tmp_path, embedding_size=None).embedding_rows == 300
        with pytest.raises(CheckpointError, match=r"embedding_size: expected .* at least 300"):
            self.read(tmp_path, embedding_size=299)

    def test_length(self, tmp_path):
        assert self.read(tmp_path, max_sequence_length=77).max_positions == 77
        assert self.read(tmp_path, max_position_embeddings=88).max_positions == 88


BAD_TENSORS = {
    "missing": (lambda tensors, name: tensors.pop(name), "missing tensors: "),
    "extra": (
        lambda tensors, name: tensors.update({name.replace(".1.", ".9."): torch.zeros(1)}),
        "expected only tensors of the model, got ",
    ),
    "misshapen": (
        lambda tensors, name: tensors.update({name: torch.zeros(3)}),
        r"expected shape \[64\], got \[3\]",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_incomplete_checkpoints(tmp_path, family, case):
    change, message = BAD_TENSORS[case]
    norm = "model.layers.1.input_layernorm.weight"
    if family == "llada":
        norm = "model.transformer.blocks.1.attn_norm.weight"
    builder = family_builder(family, edit=lambda tensors: change(tensors, norm))
    builder.write(tmp_path)
    name, spec, _ = detect(tmp_path, family)
    with pytest.raises(CheckpointError, match=message):
        load_model(name, spec, tmp_path, torch.float32, "cpu")


def test_missing_bias_is_named(tmp_path):
    name = "model.layers.0.self_attn.k_proj.bias"
    family_builder("dream", edit=lambda tensors: tensors.pop(name)).write(tmp_path)
    _, spec, _ = detect(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing tensors: .*k_proj\.bias"):
        load_model("dream", spec, tmp_path, torch.float32, "cpu")


def test_head_of_a_tied_llada(tmp_path):
    """The tied matrix goes by either of the family's own names."""
    config = family_config("llada", weight_tying=True)

    def keep_head(tensors):
        tensors["model.transformer.ff_out.weight"] = tensors.pop("model.transformer.wte.weight")

    tensors = family_builder("llada", config=config, edit=keep_head).write(tmp_path)
    _, spec, _ = detect(tmp_path)
    model = load_model("llada", spec, tmp_path, torch.float32, "cpu")
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, tensors["model.transformer.ff_out.weight"])


PUBLISHED_SIZES = [
    # H, I, L, nq, nk, V, parameters of the published checkpoint
    ("dream", 3584, 18944, 28, 28, 4, 152064, False, 7_615_616_512),
    ("fast_dllm_v2", 3584, 18944, 28, 28, 4, 152064, False, 7_615_616_512),
    ("fast_dllm_v2", 1536, 8960, 28, 12, 2, 151936, True, 1_543_714_304),
    ("dream_reasoner", 4096, 12288, 36, 32, 8, 151936, False, 8_190_735_360),
    ("stable_diffcoder", 4096, 14336, 32, 32, 8, 155136, False, 8_250_462_208),
    ("llada", 4096, 12288, 32, 32, 32, 126464, False, 8_015_581_184),
]


@pytest.mark.parametrize("sizes", PUBLISHED_SIZES)
def test_published_number_of_parameters(tmp_path, sizes):
    family, hidden, inner, layers, q_heads, kv_heads, vocab, is_tied, expected = sizes
    if family == "llada":
        shapes = {
            "d_model": hidden,
            "mlp_hidden_size": inner,
            "n_layers": layers,
            "n_heads": q_heads,
            "n_kv_heads": kv_heads,
            "vocab_size": vocab,
            "embedding_size": vocab,
            "weight_tying": is_tied,
        }
    else:
        shapes = {
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": q_heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "tie_word_embeddings": is_tied,
            "layer_types": ["full_attention"] * layers,
        }
    assert read(tmp_path, family, **shapes).num_parameters == expected
