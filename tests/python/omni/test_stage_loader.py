# SPDX-License-Identifier: Apache-2.0
"""Stages of blocks: each is what the whole has at its place, and the others are never in memory."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import torch  # noqa: E402

from diffulex.omni import ModelLoadError, OmniDiffusionConfig  # noqa: E402
from diffulex.omni._diffusers_compat import import_diffusers  # noqa: E402
from diffulex.omni.loader import load_pipeline  # noqa: E402
from diffulex.omni.registry import find_pipeline  # noqa: E402
from diffulex.omni.stage_loader import Stage, load_stage, stage_of  # noqa: E402

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def peak_of(action):
    """Most memory of this process while it runs, beyond what it had before, in MiB."""
    CLEAR.write_text("5")
    before = int(re.findall(r"VmRSS:\s+(\d+)", STATUS.read_text())[0])
    result = action()
    peak = int(re.findall(r"VmHWM:\s+(\d+)", STATUS.read_text())[0])
    return result, (peak - before) / 1024


def test_blocks_are_shared_in_runs():
    assert [stage_of(block, 5, 2) for block in range(5)] == [0, 0, 1, 1, 1]
    assert [stage_of(block, 4, 4) for block in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", [None, "200KB"])
def test_stages_are_parts_of_the_whole(tiny, tmp_path, dtype, shard):
    cls = import_diffusers().WanTransformer3DModel
    where = tiny("wan") / "transformer"
    if shard is not None:
        cls.from_pretrained(where).save_pretrained(tmp_path, max_shard_size=shard)
        where = tmp_path
        assert len(list(where.glob("*.safetensors"))) > 1
    whole = cls.from_pretrained(where, dtype=dtype).state_dict()
    seen = set()
    for index in range(2):
        part, info = load_stage(cls, where, dtype, ("blocks",), Stage(index, 2))
        assert info == {"missing_keys": [], "unexpected_keys": []}
        for name, tensor in part.state_dict().items():
            is_foreign = name.startswith(f"blocks.{1 - index}.")
            assert tensor.is_meta == is_foreign, name
            if not is_foreign:
                assert tensor.dtype == whole[name].dtype, name
                assert torch.equal(tensor, whole[name]), name
                seen.add(name)
        assert not any(buffer.is_meta for buffer in part.buffers())
    assert seen == set(whole)


@pytest.mark.parametrize("stage", [None, Stage(0, 2)])
@pytest.mark.parametrize(
    "content", ["{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}', "["]
)
def test_a_broken_index_is_an_error_that_names_it(tiny, tmp_path, content, stage):
    model = shutil.copytree(tiny("wan"), tmp_path / "model")
    index = model / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    (index.parent / "diffusion_pytorch_model.safetensors").unlink()
    index.write_text(content)
    config = OmniDiffusionConfig.from_kwargs(model=str(model), device="cpu")
    with pytest.raises(ModelLoadError) as raised:
        load_pipeline(config, stage)
    assert str(raised.value).startswith(f"checkpoint: {index}")
    assert "\n" not in str(raised.value)


def test_a_broken_index_of_a_text_encoder_is_an_error_that_names_it(tiny, tmp_path):
    model = shutil.copytree(tiny("wan"), tmp_path / "model")
    index = model / "text_encoder" / "model.safetensors.index.json"
    (index.parent / "model.safetensors").unlink()
    index.write_text('{"metadata": {}}')
    config = OmniDiffusionConfig.from_kwargs(model=str(model), device="cpu")
    with pytest.raises(ModelLoadError) as raised:
        load_pipeline(config)
    expected = f"checkpoint: {index}: weight_map: expected names, got None"
    assert str(raised.value) == expected


@pytest.mark.parametrize("name", ["qwen", "flux"])
def test_a_pipeline_keeps_one_stage(tiny, name):
    config = OmniDiffusionConfig.from_kwargs(model=str(tiny(name)), device="cpu")
    transformer = load_pipeline(config, Stage(1, 2)).pipeline.transformer
    for blocks in (getattr(transformer, item) for item in find_pipeline_lists(name)):
        for number, block in enumerate(blocks):
            is_own = stage_of(number, len(blocks), 2) == 1
            assert all(tensor.is_meta != is_own for tensor in block.parameters())
    dummy = OmniDiffusionConfig.from_kwargs(
        model=str(tiny(name)), device="cpu", load_format="dummy"
    )
    first = load_pipeline(dummy, Stage(1, 2)).pipeline.transformer.transformer_blocks[0]
    assert all(tensor.is_meta for tensor in first.parameters())


def find_pipeline_lists(name):
    """Lists of blocks of a tiny pipeline."""
    return find_pipeline({"qwen": "QwenImagePipeline", "flux": "FluxPipeline"}[name]).block_lists


@pytest.mark.skipif(not CLEAR.exists(), reason="counts memory as Linux tells it")
def test_a_stage_needs_the_memory_of_its_blocks(tmp_path):
    diffusers = import_diffusers()
    cls = diffusers.WanTransformer3DModel
    cls(
        num_attention_heads=4, attention_head_dim=48, in_channels=16, out_channels=16,
        text_dim=32, freq_dim=64, ffn_dim=8192, num_layers=8, rope_max_seq_len=32,
    ).save_pretrained(tmp_path)  # fmt: skip
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) / 2**20
    assert size > 100
    # In another dtype, so that tensors are memory and not places in the file.
    module, part = peak_of(
        lambda: load_stage(cls, tmp_path, torch.bfloat16, ("blocks",), Stage(0, 4))[0]
    )
    held = sum(t.nbytes for t in module.parameters() if not t.is_meta) / 2**20
    assert held < 0.15 * size
    _, whole = peak_of(lambda: cls.from_pretrained(tmp_path, dtype=torch.bfloat16))
    assert whole > 0.5 * size
    assert part < 0.5 * whole, (part, whole)


def test_files_that_do_not_fit(tiny, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    path = shutil.copytree(tiny("wan"), tmp_path / "wan")
    weights = path / "transformer/diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    config = OmniDiffusionConfig.from_kwargs(model=str(path), device="cpu")

    def refused():
        with pytest.raises(ModelLoadError) as raised:
            load_pipeline(config, Stage(0, 2))
        return str(raised.value)

    # Of another stage: it is noticed by its name.
    name = "blocks.1.attn1.to_q.weight"
    save_file({key: value for key, value in state.items() if key != name}, weights)
    assert f"missing keys {name}" in refused()
    save_file({**state, "blocks.0.attn1.to_q.weight": torch.zeros(2, 2)}, weights)
    assert "size mismatch" in refused()
    weights.write_bytes(b"12345678")
    assert "expected complete weights, got" in refused()
    weights.unlink()
    assert "expected complete weights, got" in refused()
    index = {"weight_map": {"a": "b.safetensors"}}
    weights.with_name(weights.name + ".index.json").write_text(json.dumps(index))
    assert "b.safetensors" in refused()
