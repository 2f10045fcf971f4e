# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma checkpoints: what config.json may say, and which tensors load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.errors import CheckpointError
from diffulex.families.spec.diffusion_gemma import DiffusionGemmaSpec, GemmaRotary, read_gemma_spec
from diffulex.nn.kv_cache import KVCache
from fixtures.gemma import FULL_ATTENTION, SLIDING, GemmaOracle, make_flat, rewrite

ENCODER = "model.encoder.language_model."
DECODER = "model.decoder."

#: The published 26B-A4B configuration, as far as it matters.
PUBLISHED: dict[str, Any] = {
    "model_type": "diffusion_gemma",
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "canvas_length": 256,
    "tie_word_embeddings": True,
    "eos_token_id": [1, 106],
    "dtype": "bfloat16",
    "text_config": {
        "vocab_size": 262144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "sliding_window": 1024,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "attention_bias": False,
        "max_position_embeddings": 262144,
        "layer_types": ([SLIDING] * 5 + [FULL_ATTENTION]) * 5,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL_ATTENTION: {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
        },
    },
}
EXPERTS = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16}


def read(tmp_path: Path, text: dict[str, Any], **top: Any) -> DiffusionGemmaSpec:
    return read_gemma_spec({"text_config": text, **top}, tmp_path)


def test_published_configuration(tmp_path: Path) -> None:
    spec = read_gemma_spec(PUBLISHED, tmp_path)
    # The published number has one scalar per layer.
    assert spec.num_parameters == 25_250_986_782 + 30
    assert [i for i, layer in enumerate(spec.layers) if not layer.is_sliding] == [5, 11, 17, 23, 29]
    assert spec.kv_layers[0] == (8, 256)
    assert spec.kv_layers[5] == (2, 512)
    assert spec.attention_shapes == ((16, 8, 256), (16, 2, 512))
    assert spec.sliding_rotary == GemmaRotary(1e4, 128, 256, 256)
    assert spec.full_rotary == GemmaRotary(1e6, 64, 512, 512)
    assert (spec.block_size, spec.canvas_length, spec.mask_token_id) == (256, 256, None)
    assert spec.final_logit_softcap == 30.0
    assert spec.sliding_window == 1024
    assert spec.dtype == "bfloat16"
    assert spec.max_positions == 262144
    # 225,280 bytes per token (204,800 sliding and 20,480 full).
    assert KVCache.page_bytes(spec.kv_layers, 32, torch.bfloat16) == 32 * 225_280


def test_defaults_of_the_configuration_class(tmp_path: Path) -> None:
    spec = read(tmp_path, dict(EXPERTS))
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size) == (262144, 2304, 9216)
    assert (spec.num_layers, spec.num_q_heads) == (30, 8)
    assert [i for i, layer in enumerate(spec.layers) if not layer.is_sliding] == [5, 11, 17, 23, 29]
    assert spec.kv_layers[0] == (4, 256)
    # No number of global heads means the same number, not none.
    assert spec.kv_layers[5] == (4, 512)
    assert spec.sliding_window == 512
    assert spec.final_logit_softcap == 30.0
    assert spec.sliding_rotary == GemmaRotary(1e4, 128, 256, 256)
    assert spec.full_rotary == GemmaRotary(1e6, 64, 512, 512)
    assert spec.block_size == 256


@pytest.mark.parametrize(
    ("num_layers", "full"), [(1, [0]), (5, [4]), (6, [5]), (7, [5, 6]), (12, [5, 11])]
)
def test_default_layer_types(tmp_path: Path, num_layers: int, full: list[int]) -> None:
    """Every sixth layer and in any case the last one."""
    spec = read(tmp_path, {**EXPERTS, "num_hidden_layers": num_layers})
    assert [i for i, layer in enumerate(spec.layers) if not layer.is_sliding] == full


def test_per_layer_entries_win(tmp_path: Path) -> None:
    text = {**PUBLISHED["text_config"], "num_hidden_layers": 2}
    text["layer_types"] = [SLIDING, FULL_ATTENTION]
    text["per_layer_config"] = {"1": {"head_dim": 128, "num_key_value_heads": 4}}
    assert read(tmp_path, text).kv_layers == ((8, 256), (4, 128))
    text["per_layer_config"] = {"1": {"head_dim": 128}}
    assert read(tmp_path, text).kv_layers == ((8, 256), (2, 128))
    # transformers leaves out what equals the base value.
    text["per_layer_config"] = {}
    del text["global_head_dim"], text["num_global_key_value_heads"]
    assert read(tmp_path, text).kv_layers == ((8, 256), (8, 256))


def test_last_layer_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("diffulex").propagate = True
    with caplog.at_level(logging.WARNING):
        spec = read(
            tmp_path, {**EXPERTS, "num_hidden_layers": 2, "layer_types": [SLIDING, SLIDING]}
        )
    assert [layer.is_sliding for layer in spec.layers] == [True, False]
    assert "the last layer is taken as full_attention" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: expected null or"),
        ({"attention_bias": True}, "attention_bias: expected null or False"),
        ({"hidden_activation": "silu"}, "hidden_activation: expected null or 'gelu_pytorch_tanh'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: expected null or True"),
        ({"num_experts": None}, "num_experts: expected an integer of at least 1, got None"),
        ({"top_k_experts": 9}, "top_k_experts: expected at most num_experts 8, got 9"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: expected an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 8, got 3"),
        ({"num_global_key_value_heads": 5}, "num_global_key_value_heads: expected a divisor of 8"),
        ({"layer_types": [SLIDING]}, "layer_types: expected 30 entries"),
        ({"layer_types": ["chunked"] * 30}, "layer_types: expected 30 entries"),
        ({"per_layer_config": []}, "per_layer_config: expected an object by layer number"),
        ({"per_layer_config": {"30": {}}}, "per_layer_config: expected layer numbers below 30"),
        ({"per_layer_config": {"x": {}}}, "per_layer_config: expected layer numbers below 30"),
        ({"per_layer_config": {"5": 4}}, "per_layer_config.5: expected an object, got 4"),
        (
            {"per_layer_config": {"5": {"sliding_window": 4}}},
            "per_layer_config.5: expected head_dim and num_key_value_heads only",
        ),
        (
            {"per_layer_config": {"5": {"head_dim": 0}}},
            "per_layer_config.5.head_dim: expected an integer of at least 1, got 0",
        ),
        (
            {"per_layer_config": {"5": {"head_dim": 64}}},
            "per_layer_config: expected one number of KV heads and head size for all layers",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer of at most 65536"),
        ({"num_experts": 10**9}, "num_experts: expected an integer of at most 65536"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected null"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters: expected an object with"),
        (
            {"rope_parameters": {SLIDING: {"rope_type": "yarn", "rope_theta": 1e4}}},
            "rope_parameters.sliding_attention.rope_type: expected 'default' or 'proportional'",
        ),
        (
            {"rope_parameters": {SLIDING: {"rope_theta": 1e4, "factor": 8}}},
            "rope_parameters.sliding_attention.factor: expected 1",
        ),
        (
            {"rope_parameters": {SLIDING: {"rope_type": "default"}}},
            "rope_parameters.sliding_attention.rope_theta: expected a positive number, got None",
        ),
        (
            {"rope_parameters": {SLIDING: {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
            "rope_parameters.sliding_attention.partial_rotary_factor: expected 1 with 'default'",
        ),
        ({"sliding_window": 0}, "sliding_window: expected an integer of at least 1, got 0"),
        ({"head_dim": 15}, "head_dim: expected an even number, got 15"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping: expected a positive number"),
    ],
)
def test_unusable_configurations(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(tmp_path, {**EXPERTS, **changes})
    assert f"config.json: text_config.{message}" in str(error.value)


def test_unusable_top_level(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: text_config: expected an object"):
        read_gemma_spec({}, tmp_path)
    with pytest.raises(CheckpointError, match="tie_word_embeddings: expected null or True"):
        read(tmp_path, dict(EXPERTS), tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="canvas_length: expected an integer"):
        read(tmp_path, dict(EXPERTS), canvas_length=0)
    with pytest.raises(CheckpointError, match="canvas_length: expected an integer of at most 1024"):
        read(tmp_path, dict(EXPERTS), canvas_length=10**9)
    with pytest.raises(CheckpointError, match=r"mask token: expected none .* got 7"):
        read_gemma_spec({"text_config": dict(EXPERTS)}, tmp_path, mask_token_id=7)


def test_stop_ids(tmp_path: Path) -> None:
    # Without tokenizer files the family's own ids count too.
    assert read_gemma_spec(PUBLISHED, tmp_path).stop_token_ids == (1, 50, 106)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 106, 70]}))
    assert read_gemma_spec(PUBLISHED, tmp_path).stop_token_ids == (1, 50, 70, 106)
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 90, "content": "<turn|>"}]})
    )
    assert read_gemma_spec(PUBLISHED, tmp_path).stop_token_ids == (1, 70, 90, 106)


class Checkpoint:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors = GemmaOracle(seed=3).write(directory)

    def load(self) -> Any:
        name, spec, info = detect(self.directory)
        assert (name, info.family) == ("diffusion_gemma", "diffusion_gemma")
        return load_model(name, spec, self.directory, torch.float32, "cpu")

    def change(self, tensors: dict[str, torch.Tensor]) -> None:
        rewrite(self.directory, tensors)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp("gemma"))


@pytest.fixture
def checkpoint(written: Checkpoint) -> Checkpoint:
    """The checkpoint in its original state."""
    written.change(written.tensors)
    return written


def test_every_text_tensor_is_loaded(checkpoint: Checkpoint) -> None:
    assert any("vision_tower" in name for name in checkpoint.tensors)
    table = checkpoint.load().weight_table()
    text = {name for name in checkpoint.tensors if "vision" not in name}
    assert text == table.keys() - {"lm_head.weight"}
    for name in text:
        assert torch.equal(table[name], checkpoint.tensors[name]), name


def test_the_two_scalars_stay_apart(checkpoint: Checkpoint) -> None:
    scalars = checkpoint.load().layer_scalars
    for layer in range(3):
        name = f"layers.{layer}.layer_scalar"
        assert scalars[0, layer] == checkpoint.tensors[ENCODER + name][0]
        assert scalars[1, layer] == checkpoint.tensors[DECODER + name][0]
    assert not torch.equal(scalars[0], scalars[1])


def test_shared_tensors_may_lie_below_the_encoder(checkpoint: Checkpoint) -> None:
    expected = checkpoint.load().weight_table()
    renamed = {
        name.replace(DECODER, ENCODER)
        if not name.endswith("layer_scalar") and "self_conditioning" not in name
        else name: tensor
        for name, tensor in checkpoint.tensors.items()
    }
    assert ENCODER + "embed_tokens.weight" in renamed
    checkpoint.change(renamed)
    model = checkpoint.load()
    assert model.head.row_major() is model.embedding.weight
    table = model.weight_table()
    for name, tensor in expected.items():
        assert torch.equal(tensor, table[name]), name


def test_one_tensor_under_two_names_is_an_error(checkpoint: Checkpoint) -> None:
    copy = checkpoint.tensors[DECODER + "norm.weight"].clone()
    checkpoint.change({**checkpoint.tensors, ENCODER + "norm.weight": copy})
    with pytest.raises(CheckpointError, match=r"model\.decoder\.norm\.weight: expected one tensor"):
        checkpoint.load()


@pytest.mark.parametrize(
    "name",
    [
        DECODER + "layers.1.layer_scalar",
        ENCODER + "layers.1.layer_scalar",
        DECODER + "self_conditioning.pre_norm.weight",
        DECODER + "layers.0.experts.down_proj",
        DECODER + "layers.0.self_attn.v_proj.weight",
        DECODER + "embed_tokens.weight",
    ],
)
def test_missing_tensors(checkpoint: Checkpoint, name: str) -> None:
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key != name}
    checkpoint.change(tensors)
    with pytest.raises(CheckpointError, match=f"missing tensors: {name}"):
        checkpoint.load()


@pytest.mark.parametrize(
    "name",
    [
        DECODER + "layers.0.experts.down_proj.weight",
        # Full-attention layers have no values of their own.
        DECODER + "layers.2.self_attn.v_proj.weight",
        ENCODER + "layers.3.layer_scalar",
        "model.encoder.audio_tower.weight",
    ],
)
def test_unknown_tensors(checkpoint: Checkpoint, name: str) -> None:
    checkpoint.change({**checkpoint.tensors, name: torch.ones(3)})
    with pytest.raises(CheckpointError, match=f"expected only tensors of the model, got {name}"):
        checkpoint.load()


def test_misshapen_tensor(checkpoint: Checkpoint) -> None:
    name = DECODER + "layers.0.router.scale"
    checkpoint.change({**checkpoint.tensors, name: torch.ones(65)})
    with pytest.raises(CheckpointError, match=rf"{name}: expected shape \[64\], got \[65\]"):
        checkpoint.load()


def test_stored_head_is_tied_only_when_equal(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    embedding = checkpoint.tensors[DECODER + "embed_tokens.weight"]
    checkpoint.change({**checkpoint.tensors, "lm_head.weight": embedding.clone()})
    model = checkpoint.load()
    assert model.head.row_major() is model.embedding.weight
    checkpoint.change({**checkpoint.tensors, "lm_head.weight": embedding + 1})
    logging.getLogger("diffulex").propagate = True
    with caplog.at_level(logging.WARNING):
        model = checkpoint.load()
    assert "not tied" in caplog.text
    assert torch.equal(model.head.row_major(), embedding + 1)
    assert torch.equal(model.embedding.weight, embedding)


def test_shards(checkpoint: Checkpoint, tmp_path: Path) -> None:
    names = sorted(checkpoint.tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: checkpoint.tensors[name] for name in names if files[name] == file}
        save_file(part, tmp_path / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = (checkpoint.directory / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    name, spec, _ = detect(tmp_path)
    table = load_model(name, spec, tmp_path, torch.float32, "cpu").weight_table()
    expected = checkpoint.load().weight_table()
    for key, tensor in expected.items():
        assert torch.equal(tensor, table[key]), key


def test_flat_form_describes_the_same_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint.directory / "config.json").read_text())
    before = detect(tmp_path)
    make_flat(tmp_path)
    after = detect(tmp_path)
    assert before[:2] == after[:2]


def test_detection_by_either_key(checkpoint: Checkpoint, tmp_path: Path) -> None:
    content = json.loads((checkpoint.directory / "config.json").read_text())
    for key in ("architectures", "model_type"):
        reduced = {name: value for name, value in content.items() if name != key}
        (tmp_path / "config.json").write_text(json.dumps(reduced))
        assert detect(tmp_path)[0] == "diffusion_gemma"
        assert detect(tmp_path, "diffusion_gemma")[0] == "diffusion_gemma"


def test_cache_has_a_shape_per_layer() -> None:
    shapes = ((2, 16), (2, 16), (1, 32), (2, 16))
    for layout in ("unified", "distinct"):
        cache = KVCache(shapes, 5, 4, torch.float32, "cpu", layout, 8)  # type: ignore[arg-type]
        assert cache.nbytes == 5 * KVCache.page_bytes(shapes, 4, torch.float32)
        for index, (heads, size) in enumerate(shapes):
            k, v = cache.layer(index)
            if layout == "unified":
                assert k.shape == v.shape == (5, 4, heads, size)
            else:
                assert k.shape == (5, heads, size // 8, 4, 8)
                assert v.shape == (5, heads, size, 4)
            k.fill_(index + 1)
            v.fill_(-index - 1)
        for index in range(len(shapes)):
            k, v = cache.layer(index)
            assert (k == index + 1).all()
            assert (v == -index - 1).all()
    with pytest.raises(ValueError, match="expected x to divide head size 12, got 8"):
        KVCache(((1, 16), (1, 12)), 1, 4, torch.float32, "cpu", "distinct")


def test_cache_of_a_uniform_model_is_one_tensor() -> None:
    cache = KVCache(((2, 16),) * 3, 5, 4, torch.float32, "cpu")
    bases = {part.untyped_storage().data_ptr() for i in range(3) for part in cache.layer(i)}
    assert len(bases) == 1
    assert cache.nbytes == 5 * (
        2 * 3 * 4 * 2 * 16 * 4
    )  # K and V, layers, slots, heads, size, bytes


def test_loading_folds_what_the_steps_read(checkpoint: Checkpoint) -> None:
    """No step computes a weight: kernels read those ahead of the launches in front of them."""
    for layer in checkpoint.load().layers:
        scale = layer.experts.router_scale
        assert torch.equal(layer.experts._norm_weight, scale * scale.numel() ** -0.5)
