# SPDX-License-Identifier: Apache-2.0
"""Images and videos on GPUs: 16 bits, memory that offload frees, a captured step, several devices."""

from __future__ import annotations

import math

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import torch  # noqa: E402

from diffulex.omni._diffusers_compat import capturable_text_length  # noqa: E402
from fixtures.omni_tiny import FRAMES, dtypes_of, open_engine  # noqa: E402

SMALL = {"height": 64, "width": 64, "num_inference_steps": 4, "output_type": "latent"}
CACHED = {"cache_backend": "cache_dit", "max_warmup_steps": 1, "residual_diff_threshold": 0.9}
OFFLOAD = ("dit_cpu_offload", "text_encoder_cpu_offload", "vae_cpu_offload")
SIZES = [
    {"cfg_parallel_size": 2}, {"data_parallel_size": 2}, {"ulysses_degree": 2}, {"ring_degree": 2},
    {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}, {"ulysses_degree": 4}, {"ring_degree": 4},
    {"cfg_parallel_size": 2, "ulysses_degree": 2},
]  # fmt: skip
#: What the pipelines share otherwise: halves of a batch, widths of heads, an exact sum of tokens.
OTHERS = [
    ("sd3", {"cfg_parallel_size": 2}), ("flux", {"tensor_parallel_size": 2}),
    ("flux", {"ring_degree": 2}), ("wan", {"cfg_parallel_size": 2}), ("wan", {"ulysses_degree": 2}),
    ("wan", {"ring_degree": 2}), ("wan", {"pipeline_parallel_size": 2}),
]  # fmt: skip


def latents(engine, name, prompts=("a cat", "two dogs"), **fields):
    """Of every prompt, float32 on the host."""
    fields = {**SMALL, **FRAMES.get(name, {}), "seed": 3, **fields}
    outputs = engine.generate(list(prompts), **fields)
    return torch.stack([output.latents[0].float().cpu() for output in outputs])


def distance(got, expected):
    """Relative, by the sums of squares."""
    assert torch.isfinite(got).all()
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ["qwen", "flux", "wan"])
def test_pipelines_draw_in_16_bits(tiny, device, name):
    with open_engine(tiny, name) as engine:
        shape = latents(engine, name, ["a"]).shape
        # Some versions of torch draw other noise in 16 bits than in 32.
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        expected = latents(engine, name, latents=noise)
    with open_engine(tiny, name, device=device, dtype="bfloat16") as engine:
        dtypes = dtypes_of(engine)
        assert torch.bfloat16 in dtypes["transformer"]
        if name != "wan":  # which keeps some in 32 bits
            assert dtypes["transformer"] == dtypes["vae"] == {torch.bfloat16}
        got = latents(engine, name, latents=noise)
        assert distance(got, expected) < 0.05
        assert torch.equal(latents(engine, name, latents=noise), got)
        (output,) = engine.generate("a", **{**SMALL, **FRAMES.get(name, {}), "output_type": "pt"})
        assert torch.isfinite(output.images[0].float()).all()


@pytest.mark.parametrize("name", ["qwen", "sd3", "flux"])
def test_previews_and_dtypes_by_component(tiny, device, name):
    """Watching changes no pixel; the autoencoder has other numbers than what it gets."""
    dtype = {"default": "bfloat16", "vae": "float32"}
    fields = {**SMALL, "seed": 3, "num_inference_steps": 20, "output_type": "pt"}
    seen = []
    with open_engine(tiny, name, device=device, dtype=dtype) as engine:
        dtypes = dtypes_of(engine)
        assert dtypes["transformer"] == {torch.bfloat16}
        assert dtypes["vae"] == {torch.float32}
        (plain,) = engine.generate("a cat", **fields)
        (watched,) = engine.generate(
            "a cat", **fields, on_step=lambda event: seen.extend(event.preview())
        )
    assert torch.isfinite(plain.images[0].float()).all()
    assert torch.equal(watched.images[0], plain.images[0])
    assert [preview.size for preview in seen] == [(64, 64)] * 20


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [False, True])
def test_offload_frees_memory_of_the_device(tiny, pinned):
    used, drawn = [], []
    for is_offloaded in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        settings = dict.fromkeys(OFFLOAD, is_offloaded)
        with open_engine(tiny, device="cuda", pin_cpu_memory=pinned, **settings) as engine:
            used.append(engine.engine.memory_stats()[0]["allocated"] - before)
            drawn.append(latents(engine, "qwen"))
    assert torch.equal(*drawn)
    # 0.9 million parameters in 16 bits.
    assert used[0] > 1 << 20
    assert used[1] < used[0] / 4


@pytest.mark.cuda
def test_a_graph_captures_a_step_of_qwen(tiny):
    seen = []

    def keep(_module, args, kwargs):
        seen.append((args, kwargs))

    with open_engine(tiny, device="cuda") as engine:
        transformer = engine.engine._worker.pipeline.transformer
        hook = transformer.register_forward_pre_hook(keep, with_kwargs=True)
        latents(engine, "qwen", ["a cat"])
        hook.remove()
        args, kwargs = seen[0]
        with capturable_text_length(), torch.inference_mode():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                expected = transformer(*args, **kwargs)[0].clone()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = transformer(*args, **kwargs)[0]
            captured.zero_()
            graph.replay()
            torch.cuda.synchronize()
        assert distance(captured.float(), expected.float()) < 1e-2


@pytest.mark.multi_gpu
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, CACHED], ids=["plain", "cached"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [*(("qwen", sizes) for sizes in SIZES), *OTHERS],
    ids=lambda item: (
        item if isinstance(item, str) else "-".join(f"{k}={v}" for k, v in item.items())
    ),
)
def test_gpus_draw_what_one_draws(tiny, name, sizes, settings):
    if math.prod(sizes.values()) > torch.cuda.device_count():
        pytest.skip(f"needs four GPUs, torch sees {torch.cuda.device_count()}")
    if settings and "pipeline_parallel_size" in sizes:
        pytest.skip("stages of blocks exclude a cache")
    for dtype, most in (("float32", 1e-3), ("bfloat16", 2e-2)):
        common = {"device": "cuda", "dtype": dtype, **settings}
        with open_engine(tiny, name, **common) as engine:
            assert getattr(torch, dtype) in dtypes_of(engine)["transformer"]
            expected = latents(engine, name)
        with open_engine(tiny, name, **common, **sizes) as engine:
            assert distance(latents(engine, name), expected) < most
