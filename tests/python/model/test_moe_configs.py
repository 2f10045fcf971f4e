# SPDX-License-Identifier: Apache-2.0
"""Configurations and checkpoints of the families with routed experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffulex.checkpoint.auto_model import detect, load_model
from diffulex.errors import CheckpointError, ConfigError
from diffulex.families.spec import ModelSpec
from diffulex.nn.moe import MoeFeedForward, valid_rows
from fixtures.moe_families import MOE_FAMILIES, moe_builder, moe_config, stack_experts


def read(directory: Path, family: str, **overrides: Any) -> ModelSpec:
    """The description of a directory that holds a configuration only."""
    directory.mkdir(parents=True, exist_ok=True)
    overrides.setdefault("mask_token_id", 259)
    (directory / "config.json").write_text(json.dumps(moe_config(family, **overrides)))
    return detect(directory)[1]


def read_moe(directory: Path, family: str, **overrides: Any) -> Any:
    moe = read(directory, family, **overrides).moe
    assert moe is not None
    return moe


def test_facts_of_sdar_moe(tmp_path: Path) -> None:
    moe_builder("sdar_moe").write(tmp_path)
    name, spec, info = detect(tmp_path)
    assert name == spec.family == info.family == "sdar_moe"
    assert (spec.head_dim, spec.rotary_dim, spec.qk_norm) == (32, 32, True)
    assert (spec.block_size, spec.mask_token_id, spec.stop_token_ids) == (4, 259, (256, 258))
    assert not spec.shift
    moe = spec.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (8, 3, 24)
    assert moe.layers == {0, 1}
    assert not moe.is_sigmoid
    assert moe.renormalize
    assert (moe.n_group, moe.topk_group, moe.routed_scaling, moe.shared_size) == (0, 0, 1.0, 0)
    assert not moe.has_expert_bias


def test_facts_of_llada2(tmp_path: Path) -> None:
    """Mask, end of text and block length come from tokenizer files and the family."""
    moe_builder("llada2").write(tmp_path)
    name, spec, info = detect(tmp_path)
    assert name == spec.family == info.family == "llada2"
    assert (spec.head_dim, spec.rotary_dim, spec.qk_norm) == (16, 8, True)
    assert (spec.block_size, spec.mask_token_id) == (32, 259)
    assert spec.stop_token_ids == (256, 258), "end of text and end of a turn"
    assert not spec.qkv_bias
    assert not spec.o_bias
    moe = spec.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.intermediate_size) == (16, 3, 24)
    assert moe.layers == {1, 2}
    assert moe.is_sigmoid
    assert moe.renormalize
    assert (moe.n_group, moe.topk_group, moe.routed_scaling, moe.shared_size) == (4, 2, 2.5, 24)
    assert moe.has_expert_bias


@pytest.mark.parametrize(
    "name", ["llada2", "llada2_moe", "llada2_mini", "llada2dot1_mini", "llada2_mini_dmax"]
)
def test_names_of_llada2(tmp_path: Path, name: str) -> None:
    moe_builder("llada2").write(tmp_path)
    assert detect(tmp_path, name)[0] == "llada2"


def test_detection_by_model_type(tmp_path: Path) -> None:
    for model_type in ("llada2_moe", "llada2_moe_veomni"):
        spec = read(tmp_path, "llada2", architectures=..., model_type=model_type)
        assert spec.family == "llada2"
    assert read(tmp_path, "sdar_moe", architectures=...).family == "sdar_moe"
    with pytest.raises(ConfigError, match="expected the family of the checkpoint"):
        detect(tmp_path, "llada2")


@pytest.mark.parametrize("key", ["num_experts", "n_routed_experts", "num_local_experts"])
def test_names_of_the_number_of_experts(tmp_path: Path, key: str) -> None:
    for family in MOE_FAMILIES:
        config = {"num_experts": ..., key: 32}
        assert read_moe(tmp_path, family, **config).num_experts == 32
    with pytest.raises(CheckpointError, match="expected the value of num_experts"):
        read(tmp_path, "llada2", n_routed_experts=17)


def test_layers_with_experts(tmp_path: Path) -> None:
    assert read_moe(tmp_path, "sdar_moe", num_hidden_layers=6).layers == set(range(6))
    second = {"num_hidden_layers": 6, "decoder_sparse_step": 2}
    assert read_moe(tmp_path, "sdar_moe", **second).layers == {1, 3, 5}
    some = {"num_hidden_layers": 6, "mlp_only_layers": [1, 4]}
    assert read_moe(tmp_path, "sdar_moe", **some).layers == {0, 2, 3, 5}
    assert read(tmp_path, "sdar_moe", mlp_only_layers=[0, 1]).moe is None
    assert read(tmp_path, "sdar_moe", num_experts=0).moe is None
    assert read_moe(tmp_path, "llada2", first_k_dense_replace=2).layers == {2}
    assert read(tmp_path, "llada2", first_k_dense_replace=3).moe is None
    with pytest.raises(CheckpointError, match="mlp_only_layers: expected a list"):
        read(tmp_path, "sdar_moe", mlp_only_layers=3)


@pytest.mark.parametrize("family", ["sdar_moe", "llada2"])
@pytest.mark.parametrize("key", ["num_experts", "num_hidden_layers"])
def test_counts_are_checked_before_lists_of_them_are_built(
    tmp_path: Path, family: str, key: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: {key}: expected .* at most 65536"):
        read(tmp_path, family, **{key: 10**9})


def test_class_defaults_of_llada2(tmp_path: Path) -> None:
    """An absent key has the value of the family's configuration class."""
    names = (
        "num_experts_per_tok",
        "num_shared_experts",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "partial_rotary_factor",
        "rotary_dim",
        "rms_norm_eps",
        "use_bias",
        "num_key_value_heads",
        "first_k_dense_replace",
        "norm_topk_prob",
        "moe_router_enable_expert_bias",
        "score_function",
        "router_dtype",
        "max_position_embeddings",
    )
    spec = read(tmp_path, "llada2", **dict.fromkeys(names, ...))
    moe = spec.moe
    assert moe is not None
    assert (moe.top_k, moe.shared_size, moe.n_group, moe.topk_group) == (2, 0, 8, 4)
    assert (moe.routed_scaling, moe.renormalize, moe.layers) == (2.5, True, {0, 1, 2})
    assert moe.has_expert_bias
    assert (spec.rotary_dim, spec.rms_norm_eps) == (8, 1e-5)
    assert (spec.o_bias, spec.qkv_bias, spec.qk_norm) == (True, False, True)
    assert (spec.num_kv_heads, spec.max_positions) == (4, 16384)


def test_null_is_not_absent_for_groups(tmp_path: Path) -> None:
    for n_group in (None, 0, 1):
        moe = read_moe(tmp_path, "llada2", n_group=n_group, num_experts_per_tok=16)
        assert (moe.n_group, moe.topk_group) == (0, 0)
    assert read_moe(tmp_path, "llada2", topk_group=4).n_group == 0


def test_width_of_the_shared_expert(tmp_path: Path) -> None:
    assert read_moe(tmp_path, "llada2", num_shared_experts=2).shared_size == 48
    assert (
        read_moe(tmp_path, "llada2", num_shared_experts=..., n_shared_experts=3).shared_size == 72
    )
    explicit = {"moe_shared_expert_intermediate_size": 40}
    assert read_moe(tmp_path, "llada2", **explicit).shared_size == 40
    assert read_moe(tmp_path, "llada2", num_shared_experts=0, **explicit).shared_size == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_head", True),
        ("using_split_qkv_in_self_attention", True),
        ("score_function", "softmax"),
        ("router_dtype", "bf16"),
        ("use_rmsnorm", False),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("image_token_offset", 157184),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("rotary_dim", 16),
        ("moe_intermediate_size", None),
        ("n_group", 3),
        ("num_experts_per_tok", 9),
        ("intermediate_size", None),
        ("num_nextn_predict_layers", 1),
    ],
)
def test_what_llada2_does_not_support(tmp_path: Path, key: str, value: Any) -> None:
    where = {"rope_scaling": "rope_scaling.rope_type"}.get(key, key)
    with pytest.raises(CheckpointError, match=rf"^config\.json: {where}: expected"):
        read(tmp_path, "llada2", **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_sliding_window", True),
        ("use_mrope", True),
        ("use_regular_causal", True),
        ("block_causal_prompt", False),
        ("num_experts_per_tok", 9),
        ("moe_intermediate_size", None),
        ("num_shared_experts", 1),
        ("shared_expert_intermediate_size", 24),
    ],
)
def test_what_sdar_moe_does_not_support(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: {key}: expected"):
        read(tmp_path, "sdar_moe", **{key: value})


def test_dense_size_is_only_needed_for_dense_layers(tmp_path: Path) -> None:
    assert read(tmp_path, "sdar_moe", intermediate_size=...).moe is not None
    spec = read(tmp_path, "llada2", intermediate_size=None, first_k_dense_replace=0)
    assert spec.moe is not None


# Checkpoints


def load(directory: Path, **options: Any) -> Any:
    name, spec, _ = detect(directory)
    return load_model(name, spec, directory, options.pop("dtype", torch.float32), "cpu")


def blocks(model: torch.nn.Module) -> list[MoeFeedForward]:
    return [module for module in model.modules() if isinstance(module, MoeFeedForward)]


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_every_layout_fills_the_same_memory(tmp_path: Path, family: str) -> None:
    num_experts = moe_config(family)["num_experts"]
    tensors = moe_builder(family).write(tmp_path / "single")
    expected = load(tmp_path / "single")
    for block in blocks(expected):
        width = block.moe.intermediate_size
        layer = next(i for i, item in enumerate(expected.layers) if item.mlp is block)
        prefix = f"model.layers.{layer}.mlp.experts.5."
        assert torch.equal(block.w13[5, :width], tensors[f"{prefix}gate_proj.weight"])
        assert torch.equal(block.w13[5, width:], tensors[f"{prefix}up_proj.weight"])
        assert torch.equal(block.w2[5], tensors[f"{prefix}down_proj.weight"])
    for layout in ("merged", "merged_weight", "gate_up"):
        builder = moe_builder(
            family,
            num_shards=3,
            edit=lambda stored, layout=layout: stack_experts(stored, num_experts, layout),
        )
        builder.write(tmp_path / layout)
        for first, second in zip(expected.parameters(), load(tmp_path / layout).parameters()):
            assert torch.equal(first, second)


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            drop("model.layers.1.mlp.experts.3.up_proj.weight"),
            r"missing tensors: model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight",
        ),
        (drop("model.layers.1.mlp.gate.weight"), r"missing tensors: .*mlp\.gate\.weight"),
        (
            # No bias at all means zeros; one layer without is a damaged checkpoint.
            drop("model.layers.2.mlp.gate.expert_bias"),
            r"missing tensors: model\.layers\.2\.mlp\.gate\.expert_bias",
        ),
        (
            drop("model.layers.2.mlp.shared_experts.down_proj.weight"),
            r"missing tensors: .*shared_experts\.down_proj",
        ),
        (
            lambda tensors: tensors.update(
                {"model.layers.1.mlp.experts.16.up_proj.weight": torch.ones(24, 64)}
            ),
            r"expected only tensors of the model, got .*experts\.16\.up_proj",
        ),
        (
            lambda tensors: tensors.update(
                {"model.layers.1.mlp.experts.0.up_proj.weight": torch.ones(64, 24)}
            ),
            r"experts\.0\.up_proj\.weight: expected shape \[24, 64\], got \[64, 24\]",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.gate.weight": torch.ones(16, 64)}),
            r"expected only tensors of the model, got model\.layers\.0\.mlp\.gate\.weight",
        ),
    ],
)
def test_incomplete_checkpoints(tmp_path: Path, edit: Any, message: str) -> None:
    moe_builder("llada2", edit=edit).write(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_stacked_experts_are_not_transposed_by_guess(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        stack_experts(tensors, 16, "merged")
        name = "model.layers.1.mlp.experts.down_proj"
        tensors[name] = tensors[name].transpose(1, 2).contiguous()

    moe_builder("llada2", edit=edit).write(tmp_path)
    message = r"experts\.down_proj: expected shape \[16, 64, 24\], got \[16, 24, 64\]"
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_expert_bias_stays_float32(tmp_path: Path) -> None:
    tensors = moe_builder("llada2").write(tmp_path)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for layer, block in enumerate(blocks(load(tmp_path, dtype=dtype)), 1):
            assert block.expert_bias is not None
            assert block.expert_bias.dtype == torch.float32
            stored = tensors[f"model.layers.{layer}.mlp.gate.expert_bias"]
            assert torch.equal(block.expert_bias, stored)
            assert block.router.dtype in (torch.float32, torch.bfloat16)
            assert block.w13.dtype == dtype


def test_names_of_the_expert_bias(tmp_path: Path) -> None:
    """Either name; none at all means zeros; a configuration may switch the vector off."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for layer in (1, 2):
            prefix = f"model.layers.{layer}.mlp.gate."
            tensors[f"{prefix}e_score_correction_bias"] = tensors.pop(f"{prefix}expert_bias")

    def remove(tensors: dict[str, torch.Tensor]) -> None:
        for layer in (1, 2):
            del tensors[f"model.layers.{layer}.mlp.gate.expert_bias"]

    moe_builder("llada2").write(tmp_path / "own")
    moe_builder("llada2", edit=rename).write(tmp_path / "alias")
    for first, second in zip(blocks(load(tmp_path / "own")), blocks(load(tmp_path / "alias"))):
        assert torch.equal(first.expert_bias, second.expert_bias)
    moe_builder("llada2", edit=remove).write(tmp_path / "absent")
    for block in blocks(load(tmp_path / "absent")):
        assert (block.expert_bias == 0).all()
    moe_builder("llada2").write(tmp_path / "off")
    config = moe_config("llada2", moe_router_enable_expert_bias=False)
    (tmp_path / "off" / "config.json").write_text(json.dumps(config))
    for block in blocks(load(tmp_path / "off")):
        assert block.expert_bias is None


class _Metadata:
    """What valid_rows reads of AttnMetadata."""

    def __init__(self, starts: list[int], ends: list[int]) -> None:
        self.cu_seqlens_q = torch.tensor(starts, dtype=torch.int32)
        self.valid_slices = torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize(
    ("starts", "ends", "num_rows"),
    [
        ([0, 4, 8], [4, 8], 8),
        ([0, 4, 8, 12], [3, 8, 8], 12),
        ([0, 4, 4, 8], [2, 4, 7], 10),
        ([0, 0], [0], 4),
        ([0, 3], [3], 0),
        ([0], [], 0),
    ],
)
def test_valid_rows(starts: list[int], ends: list[int], num_rows: int) -> None:
    """Rows [start, valid end) of every request, nothing else."""
    expected = [
        any(start <= row < end for start, end in zip(starts, ends)) for row in range(num_rows)
    ]
    metadata: Any = _Metadata(starts, ends)
    assert valid_rows(metadata, num_rows).tolist() == expected
