# SPDX-License-Identifier: Apache-2.0
"""Configuration and requests: names, types and ranges, without a model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diffulex.errors import CheckpointError, ConfigError, DiffulexError
from diffulex.omni import DiffusionParallelConfig, OmniDiffusionConfig, RequestError
from diffulex.omni.config_markdown import render_markdown
from diffulex.omni.errors import ModelLoadError, OmniError, UnsupportedModelError
from diffulex.omni.registry import find_pipeline
from diffulex.omni.request import MAX_SEED, make_request

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"modle": "x"}, "configuration: expected a known key, nearest is 'model', got 'modle'"),
        (
            {"dtype": "float8"},
            "dtype: expected one of auto, float32, bfloat16, float16, got 'float8'",
        ),
        (
            {"dtype": {"default": "bfloat16", "vae": "int7"}},
            "dtype.vae: expected one of auto, float32, bfloat16, float16, got 'int7'",
        ),
        ({"dtype": 5}, "dtype: expected one of auto, float32, bfloat16, float16, got '5'"),
        ({"max_batch_size": 0}, "max_batch_size: expected int >= 1, got 0"),
        ({"device": "tpu"}, "device: expected str auto, cpu, cuda, cuda:N, got 'tpu'"),
        (
            {"pipeline_parallel_size": 2, "cache_backend": "cache_dit"},
            "pipeline_parallel_size: expected cache_backend none with it, got cache_dit",
        ),
        (
            {"pipeline_parallel_size": 2, "dit_cpu_offload": True},
            "dit_cpu_offload: expected pipeline_parallel_size 1 with it, got more",
        ),
        (
            {"enable_torch_compile": True, "dit_cpu_offload": True},
            "enable_torch_compile: expected dit_cpu_offload false with it, got true",
        ),
        (
            {"torch_compile_kwargs": {"backend": "eager"}},
            "torch_compile_kwargs: expected enable_torch_compile with it, got none",
        ),
        (
            {"attention_backend": "xformers"},
            "attention_backend: expected one of TORCH_SDPA, MATH, FLASH_ATTN, SAGE_ATTN,"
            " SLIDING_TILE_ATTN, got 'XFORMERS'",
        ),
        (
            {"attention_backend": "math", "ring_degree": 2},
            "ring_degree: expected 1 with MATH, got 2: a ring merges what TORCH_SDPA gives",
        ),
        (
            {"sliding_tile_window": [3, 2, 3]},
            "sliding_tile_window: expected 3 odd numbers, got [3, 2, 3]",
        ),
        (
            {"cache_backend": "deep_cache"},
            "cache_backend: expected one of none, tea_cache, cache_dit, got 'deep_cache'",
        ),
        (
            {"coefficients": [1, 2, 3, 4]},
            "coefficients: expected floats 5 numbers, got [1, 2, 3, 4]",
        ),
        ({"rel_l1_thresh": 0}, "rel_l1_thresh: expected float > 0, got 0"),
        ({"taylorseer_order": 5}, "taylorseer_order: expected int [0, 4], got 5"),
        (
            {"scm_steps_mask": [1, 2]},
            "scm_steps_mask: expected 0 or 1 for each step, got [1, 2]",
        ),
        (
            {"scm_steps_mask_policy": "faster"},
            "scm_steps_mask_policy: expected one of slow, medium, fast, ultra, got 'faster'",
        ),
        (
            {"cache_config": {"Fn_blocks": 1}},
            "configuration: expected a known key, nearest is 'Fn_compute_blocks',"
            " got 'cache_config.Fn_blocks'",
        ),
        (
            {"data_parallel_size": 2, "distributed_executor_backend": "inproc"},
            "distributed_executor_backend: expected mp for 2 processes, got 'inproc'",
        ),
        (
            {"data_parallel_size": 2, "num_gpus": 3},
            "num_gpus: expected 2, the product of the parallel sizes, got 3",
        ),
        (
            {"ulysses_degree": 2, "ring_degree": 2, "sequence_parallel_size": 2},
            "sequence_parallel_size: expected 4, the product of ulysses_degree and ring_degree, got 2",
        ),
        (
            {"parallel_config": {"sequence_parallel_size": 2}},
            "sequence_parallel_size: expected 1, the product of ulysses_degree and ring_degree, got 2",
        ),
        (
            {"cfg_parallel_size": 3},
            "cfg_parallel_size: expected one of 1, 2, got 3",
        ),
        (
            {"cfg_parallel_size": 2, "device": "cuda:1"},
            "device: expected cuda or cpu for 2 processes, got 'cuda:1'",
        ),
        (
            {"request_timeout_s": 1},
            "request_timeout_s: expected distributed_executor_backend mp with it, got a model in"
            " the caller's process",
        ),
        (
            {"parallel_config": {"tensor_parallel_size": 0}},
            "tensor_parallel_size: expected int >= 1, got 0",
        ),
        (
            {"tensor_parallel_size": 2, "dit_cpu_offload": True},
            "dit_cpu_offload: expected tensor_parallel_size 1 with it, got more",
        ),
        (
            {"parallel_config": {"tensor_parallel": 1}},
            "configuration: expected a known key, nearest is 'tensor_parallel_size',"
            " got 'parallel_config.tensor_parallel'",
        ),
        (
            {"cache_config": 3},
            "cache_config: expected a mapping or a DiffusionCacheConfig, got 3",
        ),
    ],
)
def test_illegal_configurations(keywords, message):
    with pytest.raises(ConfigError) as raised:
        OmniDiffusionConfig.from_kwargs(**keywords)
    assert str(raised.value) == message


def test_sizes_are_checked_at_once():
    for sizes, message in (
        ({"cfg_parallel_size": 3}, "cfg_parallel_size: expected one of 1, 2, got 3"),
        ({"ring_degree": "2"}, "ring_degree: expected int >= 1, got '2'"),
        ({"num_gpus": 2}, "num_gpus: expected 1, the product of the parallel sizes, got 2"),
    ):
        with pytest.raises(ConfigError) as raised:
            DiffusionParallelConfig(**sizes)
        assert str(raised.value) == message
    sizes = {"ulysses_degree": 2, "ring_degree": 2, "sequence_parallel_size": 4}
    config = OmniDiffusionConfig.from_kwargs(parallel_config=sizes)
    assert config.parallel.world_size == 4


def test_names_of_dtypes():
    import torch

    for given, expected in (
        ("float", "float32"),
        (torch.float16, "float16"),
        ({"default": torch.bfloat16, "vae": "float"}, {"default": "bfloat16", "vae": "float32"}),
        ({}, {}),
    ):
        config = OmniDiffusionConfig.from_kwargs(dtype=given)
        assert config.model.dtype == expected
        assert OmniDiffusionConfig.from_kwargs(**config.to_dict()) == config


def test_configurations_survive_the_round_trip():
    config = OmniDiffusionConfig.from_kwargs(
        model="somewhere",
        dtype="bf16",
        vae_use_slicing=True,
        max_batch_size=4,
        parallel_config=DiffusionParallelConfig(),
        cache_config={"cache_backend": "tea_cache", "coefficients": [-1, 2.5, 0, 0, 0]},
    )
    assert config.cache.coefficients == (-1.0, 2.5, 0.0, 0.0, 0.0)
    assert config.model.dtype == "bfloat16"
    assert config.memory.vae_use_slicing
    assert OmniDiffusionConfig.from_kwargs(**config.to_dict()) == config
    with pytest.raises(AttributeError):
        config.model.dtype = "float32"


def test_the_table_in_the_documentation_is_current():
    written = (ROOT / "docs/omni_configuration.md").read_text(encoding="utf-8")
    assert written == render_markdown()


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("  ", {}, "prompt: expected some text, got '  '"),
        (None, {}, "prompt: expected some text, got None"),
        ("a", {"heigth": 64}, "request: expected a known key, nearest is 'height', got 'heigth'"),
        ("a", {"height": 0}, "height: expected an integer of at least 1, got 0"),
        ("a", {"width": "64"}, "width: expected an integer of at least 1, got '64'"),
        ("a", {"num_inference_steps": 1001},
         "num_inference_steps: expected an integer in [1, 1000], got 1001"),
        ("a", {"num_outputs_per_prompt": 65},
         "num_outputs_per_prompt: expected an integer in [1, 64], got 65"),
        ("a", {"num_outputs_per_prompt": True},
         "num_outputs_per_prompt: expected an integer in [1, 64], got True"),
        ("a", {"guidance_scale": float("nan")}, "guidance_scale: expected a number >= 0, got nan"),
        ("a", {"seed": -1}, "seed: expected an integer in [0, 2**63), got -1"),
        ("a", {"seed": MAX_SEED}, f"seed: expected an integer in [0, 2**63), got {MAX_SEED}"),
        ("a", {"seeds": [1, 2]}, "seeds: expected 1 integers in [0, 2**63), got [1, 2]"),
        ("a", {"seed": 1, "seeds": [1]}, "seeds: expected either seed or seeds, got both"),
        ("a", {"negative_prompt": 5}, "negative_prompt: expected text, got 5"),
        ("a", {"output_type": "jpeg"}, "output_type: expected one of pil, np, pt, latent, got 'jpeg'"),
        ("a", {"extra": 1}, "extra: expected a mapping, got 1"),
        ("a", {"timeout_s": 0}, "timeout_s: expected a number > 0, got 0"),
        ("a \udcff", {}, r"prompt: expected UTF-8 text, got 'a \udcff'"),
        ("a", {"negative_prompt": "\ud800"},
         r"negative_prompt: expected UTF-8 text, got '\ud800'"),
        ("a", {"request_id": "\ud800"}, r"request_id: expected UTF-8 text, got '\ud800'"),
        ("a", {"extra": {"prompt_2": ["b", "\ud800"]}},
         r"extra: expected UTF-8 text, got '\ud800'"),
    ],
)  # fmt: skip
def test_illegal_requests(prompt, fields, message):
    with pytest.raises(RequestError) as raised:
        make_request(prompt, fields)
    assert str(raised.value) == message


def test_seeds_count_on_and_wrap_around():
    request = make_request("a", {"seed": MAX_SEED - 1, "num_outputs_per_prompt": 3})
    assert request.sample_seeds() == (MAX_SEED - 1, 0, 1)
    assert make_request("a", {"seeds": [7, 5], "num_outputs_per_prompt": 2}).sample_seeds() == (
        7,
        5,
    )
    drawn = {make_request("a", {}).sample_seeds() for _ in range(20)}
    assert len(drawn) == 20
    assert make_request("a", {}).request_id != make_request("a", {}).request_id


def test_errors_have_their_place_in_the_tree():
    assert issubclass(RequestError, (OmniError, ValueError))
    assert issubclass(OmniError, DiffulexError)
    assert issubclass(ModelLoadError, CheckpointError)
    assert issubclass(UnsupportedModelError, ConfigError)
    with pytest.raises(
        UnsupportedModelError, match=r"expected one of .*FluxPipeline, .*QwenImagePipeline"
    ):
        find_pipeline("StableCascadePipeline")


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, diffulex, diffulex.omni as omni, diffulex.omni.cli\n"
        "assert all(getattr(omni, name) for name in omni.__all__)\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'accelerate', 'PIL', 'diffulex_ext'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert result.stdout.strip() == "[]"


def test_missing_packages_are_named_with_their_command(monkeypatch):
    from diffulex.omni import _diffusers_compat as compat

    def missing(package):
        raise compat.PackageNotFoundError(package)

    monkeypatch.setattr(compat, "version", missing)
    with pytest.raises(ConfigError) as raised:
        compat.import_diffusers()
    expected = "omni: expected the package diffusers (pip install '.[omni]' in the source directory), got none"
    assert str(raised.value) == expected
    monkeypatch.setattr(compat, "version", lambda _: "0.1.0")
    with pytest.raises(ConfigError, match=r"expected diffusers 0\.42\.1 .*, got 0\.1\.0"):
        compat.import_diffusers()


def test_the_engine_for_images_does_not_use_the_one_for_language():
    for path in (ROOT / "python/diffulex/omni").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        # What knows HTTP and pages and no language is shared.
        text = re.sub(r"from diffulex\.server\.(http|loopback|ui)\b", "", text)
        for name in ("diffulex_ext", "diffulex.engine", "diffulex.samplers", "diffulex.server"):
            assert f"import {name}" not in text, path
            assert f"from {name}" not in text, path
