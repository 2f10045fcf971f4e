# SPDX-License-Identifier: Apache-2.0
"""What computes attention: names, errors, masks, windows of tiles, and compiled blocks."""

from __future__ import annotations

import sys
import types

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from diffulex.errors import ConfigError  # noqa: E402
from diffulex.omni import OmniDiffusion, UnsupportedFeatureError, _diffusers_compat  # noqa: E402
from diffulex.omni._diffusers_compat import set_handle  # noqa: E402
from diffulex.omni.attention.kernels import (  # noqa: E402
    FlashAttention,
    Math,
    SageAttention,
    TorchSdpa,
)
from diffulex.omni.attention.selector import make_kernel  # noqa: E402
from diffulex.omni.attention.sliding_tile import SlidingTile, tile_slices  # noqa: E402
from diffulex.omni.config import OmniDiffusionConfig  # noqa: E402
from diffulex.omni.config_table import KernelConfig  # noqa: E402
from diffulex.omni.registry import find_pipeline  # noqa: E402
from fixtures.omni_tiny import counted_compilation  # noqa: E402

REQUEST = {
    "seed": 5,
    "height": 64,
    "width": 64,
    "num_inference_steps": 3,
    "output_type": "latent",
}


def draw(model, fields, **keywords):
    with OmniDiffusion(model=str(model), device="cpu", **keywords) as engine:
        (output,) = engine.generate("a cat", **REQUEST, **fields)
    return torch.from_numpy(np.asarray(output.latents[0]))


def make_tensors(tokens=12, batch=2, heads=3, width=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, tokens, heads, width, generator=generator) for _ in range(3)]


def fields_of(name):
    return {"num_frames": 5} if name == "wan" else {}


@pytest.mark.parametrize("name", ["qwen", "flux", "wan", "z_image"])
def test_the_seam_changes_nothing_and_the_reference_last_bits(tiny, name):
    from diffulex.omni.attention import seam

    model, fields = tiny(name), fields_of(name)
    expected = draw(model, fields)
    calls = []

    def attend(self, *args):
        calls.append(args[0].shape)
        return run(self, *args)

    run = seam.AttentionSeam.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seam.AttentionSeam, "__call__", attend)
        # The default kernel, but behind the seam.
        patch.setattr("diffulex.omni.loader.DEFAULT_ATTENTION", "")
        assert torch.equal(draw(model, fields), expected)
        assert calls
    difference = (draw(model, fields, attention_backend="math") - expected).abs().max()
    assert 0 < difference < 1e-4
    # Nothing of it stays in the process.
    assert torch.equal(draw(model, fields), expected)


def test_pipelines_say_whether_their_attention_can_be_replaced(tiny):
    import diffusers

    for name in ("qwen", "flux", "sd3", "z_image", "wan"):
        pipeline = diffusers.DiffusionPipeline.from_pretrained(tiny(name), local_files_only=True)
        spec = find_pipeline(type(pipeline).__name__)
        assert (set_handle(pipeline.transformer, None) == 0) == spec.has_own_attention, name


@pytest.mark.parametrize(
    ("name", "keywords", "message"),
    [
        ("qwen", {"attention_backend": "FLASH_ATTN"},
         "attention_backend: expected the package flash_attn for FLASH_ATTN, got none"),
        ("qwen", {"attention_backend": "sage-attn"},
         "attention_backend: expected the package sageattention for SAGE_ATTN, got none"),
        ("qwen", {"attention_backend": "SLIDING_TILE_ATTN"},
         "attention_backend: expected a pipeline for video with SLIDING_TILE_ATTN, got"
         " QwenImagePipeline"),
        ("sd3", {"attention_backend": "MATH"},
         "attention_backend: expected TORCH_SDPA for StableDiffusion3Pipeline, got MATH"),
        ("wan", {"attention_backend": "SLIDING_TILE_ATTN", "ulysses_degree": 2},
         "attention_backend: expected ulysses_degree 1 with SLIDING_TILE_ATTN, got more"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said_before_anything_is_loaded(tiny, name, keywords, message):
    with pytest.raises(ConfigError) as raised:
        OmniDiffusion(model=str(tiny(name)), device="cpu", **keywords)
    assert str(raised.value) == message


def test_a_missing_package_can_be_replaced_with_a_warning(tiny, caplog):
    expected = draw(tiny("qwen"), {})
    got = draw(tiny("qwen"), {}, attention_backend="FLASH_ATTN", attention_fallback=True)
    assert torch.equal(got, expected)
    assert (
        "attention_backend: expected the package flash_attn for FLASH_ATTN, got none;"
        " computing with TORCH_SDPA"
    ) in caplog.text


def test_the_environment_names_a_kernel(monkeypatch):
    monkeypatch.setenv("DIFFUSION_ATTENTION_BACKEND", "sliding-tile-attn")
    assert OmniDiffusionConfig.from_kwargs().kernels.attention_backend == "SLIDING_TILE_ATTN"
    named = OmniDiffusionConfig.from_kwargs(attention_backend="math")
    assert named.kernels.attention_backend == "MATH"


def test_kernels_say_which_devices_and_heads_they_have():
    for device, dtype, head in (
        ("cpu", "bfloat16", 64),
        ("cuda", "float32", 64),
        ("cuda", "bfloat16", 12),
    ):
        with pytest.raises(ConfigError):
            FlashAttention.check("FLASH_ATTN", device, dtype, head)
    FlashAttention.check("FLASH_ATTN", "cuda", "bfloat16", 128)
    Math.check("MATH", "cpu", "float32", 12)


@pytest.mark.parametrize("kind", ["none", "two axes", "four axes", "additive", "all visible"])
@pytest.mark.parametrize(("cls", "package", "function"), [
    (FlashAttention, "flash_attn_interface", "flash_attn_func"),
    (FlashAttention, "flash_attn", "flash_attn_func"),
    (SageAttention, "sageattention", "sageattn"),
])  # fmt: skip
def test_packages_without_masks_get_no_call_that_needs_one(
    monkeypatch, cls, package, function, kind
):
    """Their function is a fake that tells itself by its sign."""
    fake = types.ModuleType(package)
    fake.__spec__ = types.SimpleNamespace(name=package)
    seen = []

    def attend(query, key, value, **keywords):
        seen.append(keywords)
        out = -TorchSdpa(KernelConfig())(query, key, value)
        return (out, None) if package == "flash_attn_interface" else out

    setattr(fake, function, attend)
    monkeypatch.setitem(sys.modules, package, fake)
    q, k, v = make_tensors()
    visible = torch.ones(2, 12, dtype=torch.bool)
    if kind != "all visible":
        visible[1, 5:] = False
    mask = {
        "none": None,
        "two axes": visible,
        "four axes": visible[:, None, None, :],
        "additive": torch.zeros(2, 1, 1, 12).masked_fill(~visible[:, None, None, :], -torch.inf),
        "all visible": visible,
    }[kind]
    kernel = cls(KernelConfig())
    plain = TorchSdpa(KernelConfig())(q, k, v, mask)
    is_theirs = kind in ("none", "all visible")
    for _ in range(2):
        got = kernel(q, k, v, mask, scale=None)
        assert torch.equal(got, -plain if is_theirs else plain)
    assert len(seen) == (2 if is_theirs else 0)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_reference_is_what_pytorch_computes(is_causal):
    q, k, v = make_tensors()
    reference, sdpa = Math(KernelConfig()), TorchSdpa(KernelConfig())
    few = [item[:, :, :1] for item in (k, v)]
    options = {"scale": 0.3, "is_causal": is_causal}
    assert torch.allclose(reference(q, k, v, **options), sdpa(q, k, v, **options), atol=1e-6)
    options["enable_gqa"] = True
    assert torch.allclose(reference(q, *few, **options), sdpa(q, *few, **options), atol=1e-6)
    blind = torch.zeros(2, 12, dtype=torch.bool)
    assert not reference(q, k, v, blind).any()


def tile_of(cell, tile):
    return [c // t for c, t in zip(cell, tile)]


def visible_by_rule(grid, tile, window):
    """[S, S] from the definition: the centre of a window is moved inside, tile by tile."""
    cells = [(f, r, c) for f in range(grid[0]) for r in range(grid[1]) for c in range(grid[2])]
    counts = [-(-length // t) for length, t in zip(grid, tile)]
    rows = []
    for query in cells:
        row = []
        for key in cells:
            is_seen = True
            for q, k, n, w in zip(tile_of(query, tile), tile_of(key, tile), counts, window):
                half = w // 2
                centre = min(max(q, half), n - 1 - half)
                is_seen &= w >= n or abs(centre - k) <= half
            row.append(is_seen)
        rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("grid", "tile", "window"),
    [
        ((2, 7, 5), (1, 2, 2), (1, 3, 1)),
        ((5, 4, 4), (2, 2, 1), (3, 1, 3)),
        ((3, 3, 3), (1, 1, 1), (1, 1, 1)),
        ((2, 4, 4), (6, 8, 8), (3, 3, 3)),
    ],
)
def test_windows_of_tiles_are_those_of_the_rule(grid, tile, window):
    tokens = grid[0] * grid[1] * grid[2]
    kernel = SlidingTile(
        KernelConfig(sliding_tile_size=tile, sliding_tile_window=window, sliding_tile_full_steps=2)
    )
    q, k, v = make_tensors(tokens=tokens)
    sdpa = TorchSdpa(KernelConfig())
    kernel.start_step(grid, 2)
    mask = visible_by_rule(grid, tile, window)[None, None]
    assert torch.allclose(kernel(q, k, v), sdpa(q, k, v, mask), atol=1e-6)
    kernel.start_step(grid, 1)
    assert torch.equal(kernel(q, k, v), sdpa(q, k, v))


def test_every_rank_gets_tokens_or_says_that_there_are_too_few():
    from diffulex.omni.sequence_parallel import _split

    rule = types.SimpleNamespace(split_dim=1, expected_dims=3)
    ranks = [types.SimpleNamespace(rank=rank, ranks=lambda _: [0, 1, 2]) for rank in range(3)]
    tokens = torch.arange(4.0)[None, :, None]
    parts = [_split(tokens, rule, groups) for groups in ranks]
    assert [part.shape[1] for part in parts] == [2, 1, 1]
    assert torch.equal(torch.cat(parts, 1), tokens)
    # What has other axes is no sequence.
    assert _split(tokens[0], rule, ranks[1]).shape == (4, 1)
    with pytest.raises(UnsupportedFeatureError, match=r"at least 3 tokens, .*, got 2"):
        _split(tokens[:, :2], rule, ranks[0])


def test_the_installation_is_what_the_engine_expects():
    assert _diffusers_compat.check_installation() == "works with diffusers 0.42.1"


def test_every_cell_is_in_one_window():
    for length in range(1, 20):
        for tile in (1, 2, 3, 8):
            for window in (1, 3, 5):
                found = [slice_ for slice_, _ in tile_slices(length, tile, window)]
                covered = [i for s in found for i in range(s.start, s.stop)]
                assert covered == list(range(length))


def test_videos_with_windows(tiny):
    """A window over everything is attention as it was; a small one is another video."""
    model, fields = tiny("wan"), {"num_frames": 5}
    expected = draw(model, fields)
    keywords = {"attention_backend": "SLIDING_TILE_ATTN", "sliding_tile_full_steps": 0}
    assert torch.allclose(draw(model, fields, **keywords), expected, atol=1e-5)
    small = {"sliding_tile_size": (1, 2, 2), "sliding_tile_window": (1, 1, 1)}
    assert (draw(model, fields, **keywords, **small) - expected).abs().max() > 1e-3
    late = {**keywords, **small, "sliding_tile_full_steps": 15}
    assert torch.equal(draw(model, fields, **late), expected)


def test_a_registered_kernel_is_found():
    from diffulex.omni import AutoAttentionBackend

    class Doubling(TorchSdpa):
        """Another one."""

    AutoAttentionBackend.register("DOUBLING", Doubling, exist_ok=True)
    config = OmniDiffusionConfig.from_kwargs(attention_backend="doubling")
    assert isinstance(make_kernel(config.kernels), Doubling)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen", "flux", "sd3", "z_image", "wan"])
def test_compiled_blocks_draw_the_same(tiny, name):
    expected = draw(tiny(name), fields_of(name))
    with counted_compilation() as (keywords, graphs):
        assert torch.equal(draw(tiny(name), fields_of(name), **keywords), expected)
        assert graphs


@pytest.mark.parametrize("is_compiled", [False, True])
def test_compiled_blocks_of_qwen_get_no_copy_of_the_host(tiny, is_compiled):
    from diffusers.models.transformers import transformer_qwenimage as module

    keywords = {"enable_torch_compile": True, "torch_compile_kwargs": {"backend": "eager"}}
    original, seen = module.compute_text_seq_len_from_mask, set()
    with OmniDiffusion(
        model=str(tiny("qwen")), device="cpu", **(keywords if is_compiled else {})
    ) as engine:
        engine.generate(
            "a",
            **REQUEST,
            on_step=lambda _: seen.add(module.compute_text_seq_len_from_mask is original),
        )
    assert seen == {not is_compiled}
    assert module.compute_text_seq_len_from_mask is original


@pytest.mark.slow
def test_compiled_blocks_can_be_cached(tiny):
    keywords = {"cache_backend": "cache_dit", "residual_diff_threshold": 0.9}
    with pytest.MonkeyPatch.context() as patch, counted_compilation() as (compiled, graphs):
        patch.setitem(REQUEST, "num_inference_steps", 8)
        expected = draw(tiny("qwen"), {}, **keywords)
        assert torch.equal(draw(tiny("qwen"), {}, **keywords, **compiled), expected)
        assert graphs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_8_bit_weights_are_within_half_a_step_of_the_scale_that_is_kept(dtype):
    from diffulex.omni.int8_linear import Int8Linear

    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, dtype=dtype)
    rounded = Int8Linear(layer)
    steps = rounded.scale.float()
    assert ((rounded.weight * steps - layer.weight.float()).abs() <= 0.501 * steps).all()


def test_8_bit_layers_in_float32_take_the_float16_that_t5_gives_them():
    from diffulex.omni.int8_linear import Int8Linear

    layer = torch.nn.Linear(8, 4)
    inputs = torch.randn(3, 8).half()
    assert torch.equal(Int8Linear(layer)(inputs), Int8Linear(layer)(inputs.float()))


def test_8_bit_text_encoders_are_nearly_the_same(tiny):
    from diffulex.omni.int8_linear import Int8Linear

    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 16)
    inputs = torch.randn(4, 32)
    rounded = Int8Linear(layer)
    # At most half a step of each weight: |x| times half of the largest weight over 127.
    bound = inputs.abs().sum(1, keepdim=True) * layer.weight.abs().amax(1) / 127 / 2
    assert ((rounded(inputs) - layer(inputs)).abs() <= bound + 1e-6).all()
    assert rounded.weight.dtype == torch.int8
    expected = draw(tiny("flux"), {})
    change = (draw(tiny("flux"), {}, text_encoder_int8=True) - expected).abs().max()
    assert 0 < change < 0.1
