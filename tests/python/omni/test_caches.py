# SPDX-License-Identifier: Apache-2.0
"""Caches over steps: what they decide, what they put in place of blocks, and that off means off."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import torch  # noqa: E402

from diffulex.errors import ConfigError  # noqa: E402
from diffulex.omni import (  # noqa: E402
    AutoCacheBackend,
    AutoOmniPipeline,
    OmniDiffusion,
    OmniDiffusionConfig,
    PipelineSpec,
    RequestAborted,
    RequestError,
    UnsupportedFeatureError,
    get_cache_backend,
)
from diffulex.omni._diffusers_compat import import_diffusers  # noqa: E402
from diffulex.omni.cache.scm import SCM_POLICIES, scm_mask  # noqa: E402
from diffulex.omni.cache.taylorseer import TaylorSeer  # noqa: E402
from diffulex.omni.cache.teacache import polynomial  # noqa: E402
from diffulex.omni.outputs import count_blocks  # noqa: E402
from diffulex.omni.registry import Guidance, TeaCacheSpec, register_pipeline  # noqa: E402
from fixtures.omni_tiny import FRAMES, IDENTITY, offloaded, open_engine  # noqa: E402

SMALL = {"height": 64, "width": 64, "num_inference_steps": 12, "output_type": "latent"}
#: What changes little between steps: far below it on every processor.
MOSTLY_CACHED = {"cache_backend": "cache_dit", "residual_diff_threshold": 0.9}
PIPELINES = ("qwen", "flux", "wan", "sd3", "z_image")

pytestmark = pytest.mark.usefixtures("one_thread")


def draw(engine, name="qwen", **fields):
    """Latents of a picture and its metrics."""
    fields = {**SMALL, **FRAMES.get(name, {}), "seed": 3, **fields}
    (output,) = engine.generate("a cat", **fields)
    return output.latents[0], output.metrics


@pytest.fixture(scope="module")
def plain(tiny):
    """Latents without a cache, by pipeline."""
    made = {}

    def get(name="qwen"):
        if name not in made:
            with open_engine(tiny, name) as engine:
                made[name], metrics = draw(engine, name)
                assert "cache" not in metrics
        return made[name]

    return get


# A transformer that does what it is told.


class ScriptedBlock(torch.nn.Module):
    """Adds a number to the image tokens, and another to the text tokens."""

    def __init__(self):
        super().__init__()
        self.adds = (0.0, 0.0)
        self.num_calls = 0

    def forward(self, hidden_states, encoder_hidden_states, mark):
        self.num_calls += 1
        image, text = self.adds
        return encoder_hidden_states + text, hidden_states + image


class Scripted:
    """A pipeline of four blocks over one token; `mark` is what TeaCache compares."""

    def __init__(self, num_steps):
        transformer = torch.nn.Module()
        transformer.blocks = torch.nn.ModuleList(ScriptedBlock() for _ in range(4))
        transformer.config = {}
        self.transformer = transformer
        self.config = {}
        self.scheduler = SimpleNamespace(timesteps=torch.arange(num_steps))

    def step(self, firsts, middle=1.0, text=1.0, mark=1.0, size=1):
        """One step: what the first and the other blocks add; gives image and text afterwards."""
        image, words = torch.zeros(1, size, 2), torch.zeros(1, 1, 2)
        for number, block in enumerate(self.transformer.blocks):
            block.adds = (firsts if number == 0 else middle, text)
            words, image = block(image, words, mark=torch.full((1, 2), float(mark)))
        return image[0, 0, 0].item(), words[0, 0, 0].item()

    @property
    def num_calls(self):
        return [block.num_calls for block in self.transformer.blocks]


@pytest.fixture(autouse=True, scope="module")
def _scripted():
    import_diffusers()
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry

    metadata = TransformerBlockMetadata(
        return_hidden_states_index=1, return_encoder_hidden_states_index=0
    )
    TransformerBlockRegistry.register(ScriptedBlock, metadata)
    register_pipeline(
        PipelineSpec(
            name="Scripted",
            media="image",
            size_multiple=lambda _: 1,
            defaults={},
            guidance=Guidance("guidance_scale"),
            block_lists=("blocks",),
            tea_cache=TeaCacheSpec(lambda _, arguments: arguments["mark"], lambda _: None),
        )
    )
    yield
    AutoOmniPipeline.unregister("Scripted")
    del TransformerBlockRegistry._registry[ScriptedBlock]


def make_scripted(num_steps, backend="cache_dit", **keywords):
    pipeline = Scripted(num_steps)
    keywords = {"max_warmup_steps": 0, "max_continuous_cached_steps": -1, **keywords}
    if backend == "tea_cache":
        keywords = {"coefficients": IDENTITY, **keywords}
    config = OmniDiffusionConfig.from_kwargs(cache_backend=backend, **keywords).cache
    cache = get_cache_backend(backend, config)
    cache.enable(pipeline)
    cache.refresh(pipeline, num_steps)
    return pipeline, cache


def decisions(cache):
    ((branch,),) = [tuple(branches.values()) for branches in cache.summary().values()]
    assert sorted(branch["computed"] + branch["cached"]) == [
        *range(len(branch["computed"]) + len(branch["cached"]))
    ]
    return branch["cached"]


def run(firsts, *, marks=None, **keywords):
    """Cached steps of a course in which the first block adds these numbers."""
    pipeline, cache = make_scripted(len(firsts), **keywords)
    for first, mark in zip(firsts, marks or firsts, strict=True):
        pipeline.step(first, mark=mark)
    return decisions(cache)


# DBCache.


@pytest.mark.parametrize(
    ("keywords", "firsts", "cached"),
    [
        # Below the threshold, at it, and above it; a computed step is what the next is compared with.
        ({"residual_diff_threshold": 0.25}, [4, 4, 3, 5, 4.5, 8], [1, 4]),
        # Nothing to recall yet, however high the threshold is.
        ({"residual_diff_threshold": 1}, [4, 40, 400], [1, 2]),
        ({"residual_diff_threshold": 0}, [4, 4, 4], []),
        # What has been zero cannot be compared with.
        ({}, [0, 0, 0], []),
        ({"max_warmup_steps": 3}, [4] * 5, [3, 4]),
        ({"max_warmup_steps": 5, "warmup_interval": 2}, [4] * 7, [1, 3, 5, 6]),
        ({"max_cached_steps": 2}, [4] * 6, [1, 2]),
        ({"max_cached_steps": 0}, [4] * 3, []),
        ({"max_continuous_cached_steps": 2}, [4] * 8, [1, 2, 4, 5, 7]),
        # A run that a change has ended counts from its start again.
        ({"max_continuous_cached_steps": 2}, [4, 4, 8, 8, 8, 8, 8], [1, 3, 4, 6]),
        # Changes add up, also those of computed steps.
        ({"max_accumulated_residual_diff_threshold": 0.375}, [4, 4.5, 5, 4, 4], [1]),
        ({"max_accumulated_residual_diff_threshold": 0.5}, [4, 4.5, 4.5, 4.5, 4.5, 4], [1, 2, 3, 4]),
        # The mask computes, and leaves the rest to the rules, or skips it.
        ({"scm_steps_mask": [1, 0, 1, 0, 0, 1]}, [4, 4, 4, 8, 8, 8], [1, 4]),
        ({"scm_steps_mask": [1, 0, 1, 0, 0, 1], "scm_steps_policy": "static",
          "max_cached_steps": 0}, [4, 4, 4, 8, 8, 8], [1, 3, 4]),
        ({"scm_steps_mask": [0, 0, 1], "scm_steps_policy": "static"}, [4, 8, 8], [1]),
        # With a mask the warm-up is at most as long as the ones it starts with.
        ({"scm_steps_mask": [1, 1, 0, 0], "max_warmup_steps": 4}, [4] * 4, [2, 3]),
        ({"scm_steps_mask_policy": "ultra", "scm_steps_policy": "static"}, [4] * 8, [2, 3, 5, 6]),
    ],
)  # fmt: skip
def test_rules_of_dbcache(keywords, firsts, cached):
    assert run(firsts, **keywords) == cached


def test_what_stands_for_the_middle_blocks():
    pipeline, cache = make_scripted(3, Fn_compute_blocks=1, Bn_compute_blocks=1)
    assert pipeline.step(4.0, middle=2.0, text=1.0) == (10.0, 4.0)
    # Two blocks are left out: they would have added 6, and to the text 10; the last one runs.
    assert pipeline.step(4.5, middle=3.0, text=5.0) == (4.5 + 4.0 + 3.0, 5.0 + 2.0 + 5.0)
    assert decisions(cache) == [1]
    assert pipeline.num_calls == [2, 1, 1, 2]
    (branch,) = cache.summary()["transformer"].values()
    assert (branch["num_blocks"], branch["num_blocks_run"]) == (8, 6)
    assert branch["diffs"] == {"1": 0.125}
    assert count_blocks(cache.summary()) == (8, 6)
    cache.disable(pipeline)
    assert not cache.is_enabled()
    assert pipeline.step(4.5, middle=3.0, text=5.0) == (13.5, 20.0)


def test_an_image_of_another_size_is_computed():
    for keywords in ({"residual_diff_threshold": 1}, {"backend": "tea_cache", "rel_l1_thresh": 9}):
        pipeline, cache = make_scripted(6, **keywords)
        for size in (1, 1, 2, 2, 1):
            pipeline.step(4.0, size=size)
        assert decisions(cache) == [1, 3]


def test_too_few_blocks():
    with pytest.raises(UnsupportedFeatureError) as raised:
        make_scripted(3, Fn_compute_blocks=2, Bn_compute_blocks=2)
    expected = "Fn_compute_blocks + Bn_compute_blocks: expected at most 3 for 4 blocks, got 4"
    assert str(raised.value) == expected


def test_a_mask_has_a_value_for_every_step():
    pipeline, _ = make_scripted(3, scm_steps_mask=[1, 0])
    with pytest.raises(RequestError) as raised:
        pipeline.step(1.0)
    expected = "scm_steps_mask: expected one value for each of 3 steps, got 2"
    assert str(raised.value) == expected


def test_taylorseer_continues_what_the_blocks_add():
    pipeline, cache = make_scripted(
        6, enable_taylorseer=True, scm_steps_mask=[1, 0, 1, 0, 0, 1], scm_steps_policy="static"
    )
    # The last three blocks add 3 * (1 + 2 s) to the image and -3 s to the text.
    course = [pipeline.step(1.0, middle=1.0 + 2 * s, text=-float(s)) for s in range(6)]
    assert decisions(cache) == [1, 3, 4]
    images = [1 + 3 * (1 + 2 * s) for s in (0, 0, 2, 3, 4, 5)]
    assert [image for image, _ in course] == images
    # The first block has added its part to the text at every step.
    assert [text for _, text in course] == [0.0, -1.0, -8.0, -12.0, -16.0, -20.0]


def test_taylorseer_by_hand():
    for order, gap in ((1, 1), (1, 3), (4, 2)):
        line = TaylorSeer(order)
        for step in (2, 2 + gap):
            line.keep(torch.tensor([5.0 * step + 1]), step)
        for step in range(3 + gap, 9):
            assert line.at(step).item() == pytest.approx(5.0 * step + 1)
    square = TaylorSeer(2)
    for step in range(3):
        square.keep(torch.tensor([float(step**2)]), step)
    # The differences are backward ones: 4 + 3 + 2 / 2, and not 9.
    assert square.at(3).item() == 8
    repeated = TaylorSeer(0)
    repeated.keep(torch.tensor([1.0]), 0)
    repeated.keep(torch.tensor([4.0]), 1)
    assert repeated.at(7).item() == 4


def test_masks_of_policies():
    masks = {
        50: (
            "11111111111111100111110001111110001111000010000001",
            "11111111111001111000001110000001110000001110000001",
            "11111111111001100000110000000110000000001100000001",
            "11111111000110000000001100000000001100000000000001",
        ),
        28: (
            "1111111101110011100110010001",
            "1111110110001100011000110001",
            "1111110100010000100000100001",
            "1111001000001000000100000001",
        ),
        20: (
            "11111101101110100101",
            "11111110010001001101",
            "11111100100010001001",
            "11100000010000100001",
        ),
        12: ("111111110111", "111111001001", "111110110001", "111000110001"),
        8: ("11111011", "11110101", "11101001", "11001001"),
    }
    for num_steps, texts in masks.items():
        for policy, text in zip(SCM_POLICIES, texts, strict=True):
            assert "".join(map(str, scm_mask(policy, num_steps))) == text, (policy, num_steps)
    for policy in SCM_POLICIES:
        assert scm_mask(policy, 6) == (1, 1, 1, 0, 0, 1)
        assert scm_mask(policy, 4) == (1, 1, 0, 1)
        assert [scm_mask(policy, n) for n in (1, 2, 3)] == [(1,), (1, 1), (1, 1, 1)]
        assert all(len(scm_mask(policy, n)) == n for n in range(1, 70))


# TeaCache.


def test_teacache_adds_up_changes():
    # Changes by hand: 1, 0.5, 1/3, 0.25, 0.2, 1/6, 1/7 and 1/8.
    marks = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    keywords = {"backend": "tea_cache", "marks": marks}
    firsts = [1.0] * len(marks)
    # 0.5 | 0.5 + 1/3 is computed | 0.25, 0.45, 0.62 | is computed; 0.125 at the last step, which is, too.
    assert run(firsts, rel_l1_thresh=0.6, **keywords) == [2, 4, 5, 7]
    assert run(firsts, rel_l1_thresh=1e-12, **keywords) == []
    assert run(firsts, rel_l1_thresh=1e9, **keywords) == [1, 2, 3, 4, 5, 6, 7]
    # A negative estimate counts by its size.
    negative = (0.0, 0.0, 0.0, -1.0, 0.0)
    assert run(firsts, rel_l1_thresh=0.6, coefficients=negative, **keywords) == [2, 4, 5, 7]
    # After zeros nothing can be said.
    marks = [0, 0, 1, 1, 1]
    assert run([1.0] * 5, backend="tea_cache", marks=marks, rel_l1_thresh=9) == [3]


def test_teacache_repeats_the_image_and_passes_the_text():
    pipeline, _ = make_scripted(4, backend="tea_cache", rel_l1_thresh=9)
    assert pipeline.step(4.0, middle=2.0, text=1.0) == (10.0, 4.0)
    assert pipeline.step(7.0, middle=3.0, text=5.0) == (10.0, 0.0)
    assert pipeline.num_calls == [1, 1, 1, 1]


def test_the_polynomial_has_the_highest_power_first():
    assert polynomial((1, 2, 3, 4, 5), 10) == 12345


# On real transformers.


@pytest.mark.parametrize("name", PIPELINES)
def test_a_cache_that_always_computes_changes_nothing(tiny, plain, name):
    settings = [{"cache_backend": "cache_dit", "residual_diff_threshold": 0}]
    if name != "z_image":
        tea = {"cache_backend": "tea_cache", "rel_l1_thresh": 1e-12, "coefficients": IDENTITY}
        settings.append(tea)
    for keywords in settings:
        with open_engine(tiny, name, **keywords) as engine:
            latents, metrics = draw(engine, name)
            assert torch.equal(latents, plain(name))
            for branch in metrics["cache"]["transformer"].values():
                assert branch["computed"] == [*range(12)]
                assert branch["num_blocks"] == branch["num_blocks_run"]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_high_threshold_skips_all_but_the_forced_steps(tiny, plain, name):
    branches = {"sd3": {"default"}, "z_image": {"default"}, "flux": {"cond"}}
    # The one block of the random Z-Image that always runs changes by its whole size: no comparison.
    above = {"residual_diff_threshold": 1} if name == "z_image" else {}
    with open_engine(tiny, name, **{**MOSTLY_CACHED, **above}) as engine:
        latents, metrics = draw(engine, name)
        cache = metrics["cache"]["transformer"]
        assert set(cache) == branches.get(name, {"cond", "uncond"})
        for branch in cache.values():
            assert branch["cached"] == [4, 5, 6, 8, 9, 10], branch["diffs"]
        assert torch.isfinite(latents).all()
        assert not torch.equal(latents, plain(name))
    if name == "z_image":
        return
    huge = {"cache_backend": "tea_cache", "rel_l1_thresh": 1e9, "coefficients": IDENTITY}
    with open_engine(tiny, name, **huge) as engine:
        _, metrics = draw(engine, name)
        first = 5 if name == "wan" else 1
        for branch in metrics["cache"]["transformer"].values():
            assert branch["computed"] == [*range(first), 11]


def test_one_process_remembers_nothing_of_a_request(tiny):
    def stop(event):
        return event.step < 7

    with open_engine(tiny, **MOSTLY_CACHED) as engine, open_engine(tiny, **MOSTLY_CACHED) as other:
        first, metrics = draw(engine, num_inference_steps=8)
        again, repeated = draw(engine, num_inference_steps=8)
        assert torch.equal(again, first)
        assert repeated["cache"] == metrics["cache"]
        long, _ = draw(engine)
        # A second pipeline of the same class has a cache of its own.
        assert torch.equal(draw(other)[0], long)
        assert torch.equal(draw(engine, num_inference_steps=8)[0], first)
        with pytest.raises(RequestAborted):
            engine.generate("a dog", **SMALL, seed=1, on_step=stop)
        assert torch.equal(draw(engine, num_inference_steps=8)[0], first)

        def fail(_):
            raise OSError("no disk")

        with pytest.raises(OSError, match="no disk"):
            engine.generate("a dog", **SMALL, seed=1, on_step=fail)
        assert torch.equal(draw(engine)[0], long)


def test_every_image_has_its_own_account(tiny):
    with open_engine(tiny, **MOSTLY_CACHED) as engine:
        (output,) = engine.generate("a cat", **SMALL, seed=3, num_outputs_per_prompt=2)
        assert len(output.metrics["caches"]) == 2
        assert output.metrics["cache"] == output.metrics["caches"][0]
        assert torch.equal(output.latents[0], draw(engine)[0])


def test_lists_of_blocks_decide_together_or_apart(tiny):
    with open_engine(tiny, "flux", **MOSTLY_CACHED, block_groups="separate") as engine:
        cache = draw(engine, "flux")[1]["cache"]
        assert {*cache} == {
            "transformer.transformer_blocks", "transformer.single_transformer_blocks",
        }  # fmt: skip
        for branches in cache.values():
            assert branches["cond"]["num_blocks"] == 24
            assert branches["cond"]["cached"]
    with open_engine(tiny, "flux", **MOSTLY_CACHED) as engine:
        (branches,) = draw(engine, "flux")[1]["cache"].values()
        assert branches["cond"]["num_blocks"] == 48


@pytest.mark.parametrize(("threshold", "is_cached"), [(0.05, False), (0.45, True), (0.6, True)])
def test_the_first_block_cache_of_diffusers_decides_alike(tiny, threshold, is_cached):
    diffusers = import_diffusers()
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tiny("qwen"))
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=threshold))
    direct = pipeline(
        "a cat", **SMALL, true_cfg_scale=4.0, negative_prompt=" ",
        generator=torch.Generator().manual_seed(3),
    ).images[0]  # fmt: skip
    keywords = {"max_warmup_steps": 0, "max_continuous_cached_steps": -1}
    with open_engine(
        tiny, cache_backend="cache_dit", residual_diff_threshold=threshold, **keywords
    ) as engine:
        latents, metrics = draw(engine)
        branches = metrics["cache"]["transformer"].values()
        assert any(branch["cached"] for branch in branches) == is_cached
        assert torch.equal(latents, direct), metrics["cache"]


def test_text_and_image_residuals_of_two_experts(wan22):
    """Two transformers, each with its share of the steps; the second one starts empty."""
    with OmniDiffusion(model=str(wan22), device="cpu") as engine:
        expected, _ = draw(engine, "wan")
        timesteps = engine.engine._worker.pipeline.scheduler.timesteps
        high = int((timesteps >= 875).sum())
    keywords = {"cache_backend": "cache_dit", "max_warmup_steps": 1}
    with OmniDiffusion(
        model=str(wan22), device="cpu", residual_diff_threshold=0, **keywords
    ) as engine:
        latents, metrics = draw(engine, "wan")
        assert torch.equal(latents, expected)
        counts = {n: len(b["cond"]["computed"]) for n, b in metrics["cache"].items()}
        assert counts == {"transformer": high, "transformer_2": 12 - high}
        assert 0 < high < 12
    mask = [1] * high + [1, 0, 0] + [1] * (12 - high - 3)
    with OmniDiffusion(
        model=str(wan22), device="cpu", scm_steps_mask=mask,
        scm_steps_policy="static", **keywords,
    ) as engine:  # fmt: skip
        _, metrics = draw(engine, "wan")
        cached = {n: b["uncond"]["cached"] for n, b in metrics["cache"].items()}
        assert cached == {"transformer": [], "transformer_2": [1, 2]}
    with pytest.raises(UnsupportedFeatureError, match="coefficients: expected 5 numbers"):
        OmniDiffusion(model=str(wan22), device="cpu", cache_backend="tea_cache")


def test_offloaded_blocks_can_be_skipped(tiny):
    with open_engine(tiny, **MOSTLY_CACHED) as engine:
        expected, _ = draw(engine)
    with open_engine(tiny, **MOSTLY_CACHED, dit_cpu_offload=True) as engine:
        assert set(offloaded(engine)) == {"transformer"}
        assert torch.equal(draw(engine)[0], expected)


# What is refused.


@pytest.mark.parametrize(
    ("name", "keywords", "message"),
    [
        ("z_image", {"coefficients": IDENTITY},
         "cache_backend: expected none or cache_dit for ZImagePipeline, got 'tea_cache'"),
        ("sd3", {},
         "coefficients: expected 5 numbers for tea_cache, as none are known for this"
         " StableDiffusion3Pipeline, got none"),
        ("wan", {"distributed_executor_backend": "mp"},
         "coefficients: expected 5 numbers for tea_cache, as none are known for this WanPipeline,"
         " got none"),
    ],
)  # fmt: skip
def test_what_teacache_needs(tiny, name, keywords, message):
    with pytest.raises(UnsupportedFeatureError) as raised:
        open_engine(tiny, name, cache_backend="tea_cache", **keywords)
    assert str(raised.value) == message


def test_names_of_caches(monkeypatch):
    make = partial(OmniDiffusionConfig.from_kwargs)
    assert make(cache_backend="Cache-DiT").cache.cache_backend == "cache_dit"
    assert make().cache.cache_backend == "none"
    assert get_cache_backend("none", make().cache) is None
    monkeypatch.setenv("DIFFUSION_CACHE_ADAPTER", "tea-cache")
    assert make().cache.cache_backend == "tea_cache"
    monkeypatch.setenv("DIFFUSION_CACHE_BACKEND", "cache_dit")
    assert make().cache.cache_backend == "cache_dit"
    assert make(cache_backend="none").cache.cache_backend == "none"
    assert make(cache_config={"max_warmup_steps": 2}).cache.cache_backend == "cache_dit"
    with pytest.raises(ConfigError) as raised:
        get_cache_backend("deep_cache", make().cache)
    message = "cache_backend: expected one of none, cache_dit, tea_cache, got 'deep_cache'"
    assert str(raised.value) == message


def test_a_cache_of_ones_own(tiny, plain):
    from diffulex.omni.cache.dbcache import DBCacheBackend

    class Never(DBCacheBackend):
        def refresh(self, pipeline, num_inference_steps, verbose=True):
            super().refresh(pipeline, num_inference_steps, verbose)
            self.seen = num_inference_steps

    AutoCacheBackend.register("never", Never)
    try:
        with open_engine(tiny, cache_backend="never", residual_diff_threshold=0) as engine:
            assert torch.equal(draw(engine)[0], plain())
            assert engine.engine._worker._cache.seen == 12
    finally:
        AutoCacheBackend.unregister("never")
