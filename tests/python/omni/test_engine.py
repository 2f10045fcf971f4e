# SPDX-License-Identifier: Apache-2.0
"""The image engine against the pipelines of diffusers, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import weakref

import numpy as np
import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import torch  # noqa: E402

from diffulex.errors import ConfigError  # noqa: E402
from diffulex.omni import (  # noqa: E402
    AutoOmniPipeline,
    ModelLoadError,
    OmniDiffusion,
    OmniDiffusionConfig,
    PipelineSpec,
    RequestAborted,
    RequestError,
    RequestTimeout,
    UnsupportedFeatureError,
    UnsupportedModelError,
    register_pipeline,
)
from diffulex.omni._diffusers_compat import capturable_text_length, import_diffusers  # noqa: E402
from diffulex.omni.models.qwen_image import SPEC as QWEN  # noqa: E402
from fixtures.omni_tiny import dtypes_of, offloaded  # noqa: E402

SMALL = {"height": 64, "width": 64, "num_inference_steps": 3}
#: What the engine adds to a plain prompt, per pipeline.
DIRECT = {
    "qwen": {"true_cfg_scale": 4.0, "negative_prompt": " "},
    "flux": {"guidance_scale": 3.5, "true_cfg_scale": 1.0},
    "sd3": {"guidance_scale": 7.0, "negative_prompt": ""},
    "z_image": {"guidance_scale": 5.0, "negative_prompt": ""},
    "wan": {"guidance_scale": 5.0, "negative_prompt": "", "num_frames": 5},
}
#: First list of blocks of the transformer.
BLOCKS = {
    **dict.fromkeys(("qwen", "flux", "sd3"), "transformer_blocks"),
    **{"z_image": "layers", "wan": "blocks"},
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def qwen(tiny):
    with OmniDiffusion(model=str(tiny("qwen"))) as engine:
        yield engine


def pixels(engine, prompt="a cat", **fields):
    """One picture, uint8 [H, W, 3]."""
    return np.asarray(engine.generate(prompt, **{**SMALL, "seed": 1, **fields})[0].images[0])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("qwen", "wan") else [pytest.mark.slow])
        for name in DIRECT
    ],
)
def test_one_rank_is_what_diffusers_does(tiny, name):
    pipeline = import_diffusers().DiffusionPipeline.from_pretrained(tiny(name))
    pipeline.set_progress_bar_config(disable=True)
    call = {**SMALL, **DIRECT[name]}
    frames = {"num_frames": 5} if name == "wan" else {}
    with OmniDiffusion(model=str(tiny(name))) as engine:
        for kind in ("pt", "pil", "latent"):
            direct = pipeline(
                "a cat", **call, generator=torch.Generator().manual_seed(7), output_type=kind
            )
            expected = (direct.frames if name == "wan" else direct.images)[0]
            (output,) = engine.generate("a cat", **SMALL, **frames, seed=7, output_type=kind)
            (got,) = output.latents if kind == "latent" else output.images
            if kind == "pil":
                assert np.array_equal(np.asarray(got), np.asarray(expected))
            else:
                assert torch.equal(got, expected)
                assert torch.isfinite(got).all()


def test_guidance_decides_about_the_negative_prompt(tiny, qwen):
    pipeline = import_diffusers().DiffusionPipeline.from_pretrained(tiny("qwen"))
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    direct = pipeline("a cat", **SMALL, true_cfg_scale=1.0, generator=generator)
    assert np.array_equal(pixels(qwen, true_cfg_scale=1.0), np.asarray(direct.images[0]))
    generator = torch.Generator().manual_seed(1)
    direct = pipeline(
        "a cat", **SMALL, true_cfg_scale=2.0, negative_prompt="a dog", generator=generator
    )
    got = pixels(qwen, true_cfg_scale=2.0, negative_prompt="a dog")
    assert np.array_equal(got, np.asarray(direct.images[0]))
    with pytest.raises(RequestError) as raised:
        pixels(qwen, true_cfg_scale=1.0, negative_prompt="a dog")
    expected = "negative_prompt: expected true_cfg_scale above 1 with it, got 1"
    assert str(raised.value) == expected


def test_a_picture_depends_on_its_seed_alone(qwen):
    (three,) = qwen.generate("a cat", **SMALL, seed=5, num_outputs_per_prompt=3)
    assert three.metrics["seeds"] == [5, 6, 7]
    for image, seed in zip(three.images, (5, 6, 7)):
        assert np.array_equal(np.asarray(image), pixels(qwen, seed=seed))
    assert not np.array_equal(np.asarray(three.images[0]), np.asarray(three.images[1]))
    (listed,) = qwen.generate("a cat", **SMALL, seeds=[7, 5], num_outputs_per_prompt=2)
    assert np.array_equal(np.asarray(listed.images[1]), np.asarray(three.images[0]))


def test_a_drawn_seed_is_reported_and_repeats_the_picture(qwen):
    (output,) = qwen.generate("a cat", **SMALL)
    again = pixels(qwen, seed=output.metrics["seed"])
    assert np.array_equal(np.asarray(output.images[0]), again)
    assert json.loads(json.dumps(output.to_dict()))["metrics"]["height"] == 64


@pytest.mark.slow
def test_several_prompts_keep_their_order_in_any_batch(tiny, qwen):
    prompts = ["a cat", "two dogs", "a very long line about birds"]
    outputs = qwen.generate(prompts, **SMALL, seed=1)
    assert [output.prompt for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs):
        assert np.array_equal(np.asarray(output.images[0]), pixels(qwen, prompt))
    with OmniDiffusion(model=str(tiny("qwen")), max_batch_size=2) as batched:
        calls = []
        together = batched.generate(
            prompts, **SMALL, seed=1, output_type="np", on_step=lambda e: calls.append(e) or None
        )
    assert sorted({len(event.request_ids) for event in calls}) == [1, 2]
    for output, image in zip(outputs, together):
        expected = np.asarray(output.images[0]) / 255
        assert np.abs(expected - image.images[0]).max() < 0.01


@pytest.mark.usefixtures("exact_previews")
def test_steps_are_reported_and_previews_end_in_the_picture(qwen):
    events, previews = [], []

    def watch(event):
        events.append((event.call, event.step, event.num_steps, event.num_calls))
        previews.append(np.asarray(event.preview()[0]))

    (output,) = qwen.generate("a cat", **SMALL, seed=1, num_outputs_per_prompt=2, on_step=watch)
    assert events == [(call, step, 3, 2) for call in (0, 1) for step in (1, 2, 3)]
    assert all(preview.shape == (64, 64, 3) for preview in previews)
    assert np.array_equal(previews[2], np.asarray(output.images[0]))
    assert np.array_equal(previews[5], np.asarray(output.images[1]))
    # Watching changes nothing.
    assert np.array_equal(previews[2], pixels(qwen))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "sd3", "z_image"])
@pytest.mark.usefixtures("exact_previews")
def test_previews_of_other_pipelines(tiny, name):
    previews = []
    with OmniDiffusion(model=str(tiny(name))) as engine:
        got = engine.generate(
            "a", **SMALL, seed=1, on_step=lambda event: previews.append(event.preview()[0])
        )[0].images[0]
    assert np.array_equal(np.asarray(previews[-1]), np.asarray(got))


def test_a_pipeline_without_previews_says_so(tiny):
    def ask(event):
        event.preview()

    with (
        OmniDiffusion(model=str(tiny("wan"))) as engine,
        pytest.raises(UnsupportedFeatureError, match="expected a pipeline with previews"),
    ):
        engine.generate("a", **SMALL, num_frames=5, on_step=ask)


def test_a_callback_stops_the_request_and_nothing_else(qwen):
    before, steps = pixels(qwen), []

    def stop(event):
        steps.append(event.step)
        return event.step < 2

    with pytest.raises(RequestAborted, match="stopped by its callback"):
        qwen.generate("a cat", **SMALL, seed=1, num_outputs_per_prompt=2, on_step=stop)
    with pytest.raises(RequestTimeout, match=r"within 1e-06 s \(timeout_s\), got none"):
        qwen.generate("a cat", **SMALL, timeout_s=1e-6)
    assert steps == [1, 2]
    assert np.array_equal(pixels(qwen), before)

    def fail(_event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        qwen.generate("a cat", **SMALL, seed=1, on_step=fail)
    assert np.array_equal(pixels(qwen), before)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"height": 72}, "height: expected a multiple of 16, got 72"),
        ({"width": 8}, "width: expected a multiple of 16, got 8"),
        ({"height": 16384, "width": 2048},
         "size: expected at most 16777216 pixels (max_pixels), got 2048x16384"),
        ({"num_inference_steps": 1},
         "num_inference_steps: expected at least 2 for the model's schedule, got 1"),
        ({"guidance_scale": 3.0},
         "guidance_scale: expected one of height, width, num_inference_steps, true_cfg_scale,"
         " max_sequence_length for QwenImagePipeline, got 3.0"),
        ({"num_frames": 5},
         "num_frames: expected one of height, width, num_inference_steps, true_cfg_scale,"
         " max_sequence_length for QwenImagePipeline, got 5"),
        ({"extra": {"generator": 1}},
         "extra: expected a known key, got 'generator'; QwenImagePipeline takes"
         " attention_kwargs"),
        ({"extra": {"attention_kwarg": {}}},
         "extra: expected a known key, nearest is 'attention_kwargs', got 'attention_kwarg';"
         " QwenImagePipeline takes attention_kwargs"),
    ],
)  # fmt: skip
def test_requests_that_the_model_cannot_serve(qwen, fields, message):
    with pytest.raises(RequestError) as raised:
        qwen.generate("a cat", **{**SMALL, **fields})
    assert str(raised.value) == message


def test_prompts_and_their_negative_ones(qwen):
    with pytest.raises(RequestError, match="prompt: expected a text or a list of texts, got 5"):
        qwen.generate(5)
    with pytest.raises(RequestError, match="negative_prompt: expected 2 texts, got 1"):
        qwen.generate(["a", "b"], negative_prompt=["c"])
    assert qwen.generate([]) == []


def test_a_prompt_is_not_cut(qwen):
    for name, fields in (("prompt", {}), ("negative_prompt", {"negative_prompt": "b " * 600})):
        prompt = "a cat" if fields else "b " * 600
        with pytest.raises(RequestError) as raised:
            qwen.generate(prompt, **SMALL, **fields)
        text = str(raised.value)
        assert text.startswith(f"{name}: expected at most 512 tokens (max_sequence_length), got 1")
    with pytest.raises(RequestError, match="prompt: expected at most 3 tokens"):
        pixels(qwen, max_sequence_length=3)
    pixels(qwen, max_sequence_length=200)


def test_frames_are_not_rounded(tiny):
    with OmniDiffusion(model=str(tiny("wan"))) as engine, pytest.raises(RequestError) as raised:
        engine.generate("a", **SMALL, num_frames=6)
    assert str(raised.value) == "num_frames: expected a multiple of 4 plus 1, got 6"


def test_extra_arguments_reach_the_pipeline(tiny):
    fields = {**SMALL, "seed": 1, "output_type": "latent"}
    with OmniDiffusion(model=str(tiny("z_image"))) as engine:
        (plain,) = engine.generate("a cat", **fields)
        (other,) = engine.generate("a cat", **fields, extra={"cfg_normalization": True})
    assert not torch.equal(plain.latents[0], other.latents[0])


@pytest.mark.parametrize(
    "keywords",
    [
        {"vae_use_slicing": True},
        {"text_encoder_cpu_offload": True, "vae_cpu_offload": True},
        {"dit_cpu_offload": True},
    ],
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "qwen" else [pytest.mark.slow]) for name in DIRECT],
)
def test_what_saves_memory_changes_no_pixel(tiny, name, keywords):
    frames = {"num_frames": 5} if name == "wan" else {}
    drawn = []
    for settings in ({}, keywords):
        with OmniDiffusion(model=str(tiny(name)), max_batch_size=2, **settings) as engine:
            fields = {**SMALL, **frames, "seed": 1, "output_type": "np"}
            (output,) = engine.generate("a cat", **fields, num_outputs_per_prompt=2)
            drawn.append(np.stack(output.images))
            found, vae = offloaded(engine), engine.engine._worker.pipeline.vae
            of_text = tuple(part for part in found if part.startswith("text_encoder"))
            assert bool(of_text) == settings.get("text_encoder_cpu_offload", False)
            assert ("vae" in found) == settings.get("vae_cpu_offload", False)
            assert ("transformer" in found) == settings.get("dit_cpu_offload", False)
            assert vae.use_slicing == settings.get("vae_use_slicing", False)
            if "transformer" in found:
                block = getattr(engine.engine._worker.pipeline.transformer, BLOCKS[name])[0]
                assert type(block).__name__ in found["transformer"]
    # Two pictures at once are rounded otherwise than one after the other.
    assert np.abs(drawn[0] - drawn[1]).max() <= (1e-5 if "vae_use_slicing" in keywords else 0)


def test_slicing_decodes_one_picture_at_a_time(tiny):
    sizes = []
    with OmniDiffusion(model=str(tiny("flux")), vae_use_slicing=True, max_batch_size=2) as engine:
        engine.engine._worker.pipeline.vae.decoder.register_forward_pre_hook(
            lambda _, args: sizes.append(len(args[0]))
        )
        engine.generate(["a cat", "a dog"], **SMALL, seed=1)
    assert sizes == [1, 1]


def test_tiling_equals_the_whole_where_the_tile_covers_it(tiny, qwen):
    with OmniDiffusion(model=str(tiny("qwen")), vae_use_tiling=True) as engine:
        assert engine.engine._worker.pipeline.vae.use_tiling
        assert np.array_equal(pixels(engine), pixels(qwen))
        # Tiles of a quarter of the picture, which meet in it.
        engine.engine._worker.pipeline.vae.enable_tiling(32, 32, 24, 24)
        assert not np.array_equal(pixels(engine), pixels(qwen))
    assert not qwen.engine._worker.pipeline.vae.use_tiling


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("qwen", "text_encoder"), ("flux", "vae"), ("sd3", "text_encoder"),
        *(pytest.param("qwen", part, marks=pytest.mark.slow) for part in ("transformer", "vae")),
        *(pytest.param("sd3", part, marks=pytest.mark.slow) for part in ("transformer", "vae")),
        *(pytest.param("flux", part, marks=pytest.mark.slow)
          for part in ("transformer", "text_encoder", "text_encoder_2")),
    ],
)  # fmt: skip
def test_components_have_dtypes_of_their_own(tiny, name, other):
    """Also where the pipeline of diffusers hands one what another gives in its dtype."""
    fields = {**SMALL, "seed": 1, "output_type": "pt"}
    images = []
    for dtype in ("float32", {"default": "bfloat16", other: "float32"}):
        with OmniDiffusion(model=str(tiny(name)), device="cpu", dtype=dtype) as engine:
            found = dtypes_of(engine)
            images.append(engine.generate("a cat", **fields)[0].images[0].float())
    assert found.pop(other) == {torch.float32}
    assert found
    assert all(item == {torch.bfloat16} for item in found.values())
    assert (images[0] - images[1]).abs().mean() < 0.02


def test_the_vae_of_wan_is_in_32_bits_unless_it_is_named(tiny):
    for dtype, of_vae in (
        ("bfloat16", torch.float32),
        ({"default": "bfloat16"}, torch.float32),
        ({"default": "bfloat16", "vae": "bfloat16"}, torch.bfloat16),
    ):
        with OmniDiffusion(model=str(tiny("wan")), device="cpu", dtype=dtype) as engine:
            found = dtypes_of(engine)
            assert found.pop("vae") == {of_vae}
            # The transformer of Wan keeps some in 32 bits.
            assert all(torch.bfloat16 in item for item in found.values())
    with pytest.raises(ConfigError) as raised:
        OmniDiffusion(model=str(tiny("wan")), dtype={"scheduler": "float32"})
    shown = str(raised.value).removeprefix("dtype: expected default or one of ")
    names, _, got = shown.partition(", got ")
    assert set(names.split(", ")) == {"text_encoder", "transformer", "vae"}
    assert got == "'scheduler'"


def test_dtypes_and_random_weights(tiny, qwen):
    with OmniDiffusion(model=str(tiny("qwen")), dtype="bfloat16") as engine:
        assert set.union(*dtypes_of(engine).values()) == {torch.bfloat16}
        image = engine.generate("a", **SMALL, seed=1, output_type="pt")[0].images[0]
        assert torch.isfinite(image.float()).all()
    with OmniDiffusion(model=str(tiny("qwen")), load_format="dummy") as first:
        one = pixels(first)
    with OmniDiffusion(model=str(tiny("qwen")), load_format="dummy") as second:
        assert np.array_equal(pixels(second), one)
    assert not np.array_equal(one, pixels(qwen))


def test_the_warm_up_draws_the_default_size(tiny, tmp_path, monkeypatch):
    from diffulex.omni.worker import Worker

    model = shutil.copytree(tiny("qwen"), tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"diffulex": SMALL}))
    drawn = []
    run = Worker.run
    monkeypatch.setattr(Worker, "run", lambda *a: drawn.extend(a[1]) or run(*a))
    with OmniDiffusion(model=str(model), warmup=True):
        pass
    assert [(call.height, call.num_inference_steps) for call in drawn] == [(64, 2)]
    with OmniDiffusion(model=str(model)):
        pass
    assert len(drawn) == 1


def test_defaults_of_the_checkpoint(tiny, tmp_path):
    model = shutil.copytree(tiny("qwen"), tmp_path / "model")
    target = model / "generation_config.json"
    target.write_text(json.dumps({"diffulex": {**SMALL, "true_cfg_scale": 1.0}}))
    with OmniDiffusion(model=str(model)) as engine:
        (output,) = engine.generate("a", seed=1)
        assert output.images[0].size == (64, 64)
        assert output.metrics["num_inference_steps"] == 3
        assert output.metrics["true_cfg_scale"] == 1.0
    target.write_text(json.dumps({"diffulex": {"colour": 1}}))
    with pytest.raises(ModelLoadError, match="expected the keys height, width"):
        OmniDiffusion(model=str(model))
    target.write_text(json.dumps({"diffulex": {"height": -1}}))
    with pytest.raises(ModelLoadError, match="height: expected an integer of at least 1, got -1"):
        OmniDiffusion(model=str(model))


def drop_tensor(path):
    """Removes the last tensor of a safetensors file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    name = sorted(tensors)[-1]
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize(
    "file",
    ["transformer/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors",
     "vae/diffusion_pytorch_model.safetensors"],
)  # fmt: skip
def test_a_missing_tensor_is_an_error_of_the_start(tiny, tmp_path, file):
    model = shutil.copytree(tiny("qwen"), tmp_path / "model")
    name = drop_tensor(model / file)
    with pytest.raises(ModelLoadError) as raised:
        OmniDiffusion(model=str(model))
    assert name in str(raised.value)
    assert "missing keys" in str(raised.value)


def test_directories_that_are_no_models(tiny, tmp_path):
    with pytest.raises(
        ModelLoadError, match=r"expected a directory with model_index\.json or a hub"
    ):
        OmniDiffusion(model=str(tmp_path / "nothing"))
    with pytest.raises(ModelLoadError, match=r"expected the file .*model_index\.json, got none"):
        OmniDiffusion(model=str(tmp_path))
    index = tmp_path / "model_index.json"
    index.write_text("{")
    with pytest.raises(ModelLoadError, match="expected readable JSON"):
        OmniDiffusion(model=str(tmp_path))
    index.write_text('{"_class_name": "KandinskyPipeline"}')
    with pytest.raises(UnsupportedModelError, match=r"expected one of .*FluxPipeline"):
        OmniDiffusion(model=str(tmp_path))
    index.write_text('{"_class_name": ["mine", "MyPipeline"]}')
    with pytest.raises(ModelLoadError, match="expected a class of diffusers"):
        OmniDiffusion(model=str(tmp_path))
    for entry in ("x", 5, True, False, {}):
        index.write_text(json.dumps({"_class_name": "QwenImagePipeline", "transformer": entry}))
        expected = f"model_index.json: transformer: expected a list of two, got {entry!r}"
        with pytest.raises(ModelLoadError, match=f"^{re.escape(expected)}$"):
            OmniDiffusion(model=str(tmp_path))
    index.write_text('{"_class_name": "QwenImagePipeline", "vae": ["diffusers", 5]}')
    with pytest.raises(ModelLoadError, match="expected a class of diffusers, got 5"):
        OmniDiffusion(model=str(tmp_path))
    broken = shutil.copytree(tiny("qwen"), tmp_path / "broken")
    shutil.rmtree(broken / "vae")
    with pytest.raises(ModelLoadError, match=r"expected the file .*vae/config\.json, got none"):
        OmniDiffusion(model=str(broken))
    if not torch.cuda.is_available():
        with pytest.raises(
            UnsupportedFeatureError, match="expected one of 0 CUDA devices, got cuda"
        ):
            OmniDiffusion(model=str(tiny("qwen")), device="cuda")


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("sd3", {"ulysses_degree": 2},
         "ulysses_degree: expected 1 for StableDiffusion3Pipeline, got 2"),
        ("z_image", {"ring_degree": 2}, "ring_degree: expected 1 for ZImagePipeline, got 2"),
        ("wan", {"tensor_parallel_size": 2},
         "tensor_parallel_size: expected 1 for WanPipeline, got 2"),
        ("qwen", {"tensor_parallel_size": 3},
         "tensor_parallel_size: expected a divisor of 4 heads, got 3"),
    ],
)  # fmt: skip
def test_what_a_pipeline_cannot_share_is_refused_before_a_process_starts(
    tiny, monkeypatch, name, sizes, message
):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(UnsupportedFeatureError) as raised:
        OmniDiffusion(model=str(tiny(name)), **sizes)
    assert str(raised.value) == message


def test_a_closed_engine_says_so(tiny):
    engine = OmniDiffusion({"model": str(tiny("qwen"))})
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="expected an open engine, got a closed one"):
        engine.generate("a", **SMALL)
    config = OmniDiffusionConfig.from_kwargs(model=str(tiny("qwen")))
    with pytest.raises(ConfigError, match="od_config: expected no keywords beside it, got dtype"):
        OmniDiffusion(config, dtype="float32")


def test_a_closed_engine_gives_the_weights_back(tiny):
    with OmniDiffusion(model=str(tiny("qwen"))) as engine:
        engine.generate("a", **SMALL)
        transformer = weakref.ref(engine.engine._worker.pipeline.transformer)
    is_held = transformer() is not None  # an assertion would hold it too
    assert not is_held


def test_a_pipeline_of_a_program(tiny):
    seen = []

    def shout(requests):
        import dataclasses

        return [dataclasses.replace(r, prompt=r.prompt.upper()) for r in requests]

    def invert(request, images):
        seen.append(request.prompt)
        return [255 - np.asarray(image) for image in images]

    spec = PipelineSpec(
        name="QwenImagePipeline", media="image", size_multiple=QWEN.size_multiple,
        defaults=QWEN.defaults, guidance=QWEN.guidance, pre_process=shout, post_process=invert,
    )  # fmt: skip
    with pytest.raises(ValueError, match="registered already"):
        register_pipeline(spec)
    register_pipeline(spec, exist_ok=True)
    try:
        with OmniDiffusion(model=str(tiny("qwen"))) as engine:
            got = pixels(engine, "cat")
    finally:
        register_pipeline(QWEN, exist_ok=True)
    assert seen == ["CAT"]
    assert AutoOmniPipeline.get("QwenImagePipeline") is QWEN
    with OmniDiffusion(model=str(tiny("qwen"))) as engine:
        assert np.array_equal(got, 255 - pixels(engine, "CAT"))


def test_a_check_applies_the_hook_of_a_pipeline(tiny):
    """A request that only the hook makes legal is legal, and one that it spoils is not."""
    import dataclasses

    from diffulex.omni import OmniDiffusionRequest

    def halve(requests):
        return [dataclasses.replace(r, height=r.height // 2) for r in requests]

    register_pipeline(dataclasses.replace(QWEN, pre_process=halve), exist_ok=True)
    try:
        with OmniDiffusion(model=str(tiny("qwen")), max_pixels=64 * 64) as engine:
            engine.engine.check(OmniDiffusionRequest("a", height=128, width=64))
            with pytest.raises(RequestError, match="height: expected a multiple of 16, got 24"):
                engine.engine.check(OmniDiffusionRequest("a", height=48, width=64))
    finally:
        register_pipeline(QWEN, exist_ok=True)


def test_the_replacement_of_a_function_of_diffusers_is_exact():
    from diffusers.models.transformers import transformer_qwenimage as module

    original = module.compute_text_seq_len_from_mask
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]])
    expected = original(torch.zeros(3, 3, 2), mask)
    with capturable_text_length():
        got = module.compute_text_seq_len_from_mask(torch.zeros(3, 3, 2), mask)
        assert module.compute_text_seq_len_from_mask(torch.zeros(3, 3, 2), None) == (3, None, None)
    assert module.compute_text_seq_len_from_mask is original
    assert got[0] == expected[0]
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[2], expected[2])
    module.compute_text_seq_len_from_mask = lambda states, mask: (0, mask, mask)
    try:
        with (
            pytest.raises(ModelLoadError, match="expected compute_text_seq_len_from_mask"),
            capturable_text_length(),
        ):
            pass
    finally:
        module.compute_text_seq_len_from_mask = original
