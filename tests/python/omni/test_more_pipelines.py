# SPDX-License-Identifier: Apache-2.0
"""Ovis-Image, LongCat-Image, layered Qwen-Image and videos that begin with a picture, against diffusers."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import time

import numpy as np
import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")
pytest.importorskip("fastapi", reason="pip install '.[serve]'")
pytest.importorskip("ftfy", reason="pip install ftfy")

import torch  # noqa: E402
from PIL import Image  # noqa: E402

from diffulex.errors import ConfigError  # noqa: E402
from diffulex.omni import (  # noqa: E402
    OmniDiffusion,
    RequestAborted,
    RequestError,
    RequestTimeout,
    UnsupportedFeatureError,
)
from diffulex.omni._diffusers_compat import import_diffusers  # noqa: E402
from diffulex.omni.mp4 import write_mp4  # noqa: E402
from diffulex.omni.registry import AutoOmniPipeline, find_pipeline  # noqa: E402
from fixtures.omni_http import WAIT_S, ask  # noqa: E402

SMALL = {"height": 64, "width": 64, "num_inference_steps": 3}
PLAIN = {"enable_prompt_rewrite": False}

pytestmark = pytest.mark.usefixtures("one_thread")


def photo(width=64, height=48):
    """A picture whose right half is seen through."""
    pixels = np.linspace(0, 255, width * height * 4, dtype=np.uint8).reshape(height, width, 4)
    return Image.fromarray(pixels)


def on_white(picture):
    white = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(white, picture).convert("RGB")


#: Fields of the engine, and arguments of diffusers, per pipeline.
CASES = {
    "ovis": (SMALL, {**SMALL, "guidance_scale": 5.0, "negative_prompt": ""}),
    "longcat": (
        {**SMALL, "extra": PLAIN},
        {**SMALL, **PLAIN, "guidance_scale": 4.5, "negative_prompt": ""},
    ),
    "wan_i2v": (
        {**SMALL, "num_frames": 5, "pil_image": photo()},
        {**SMALL, "num_frames": 5, "image": on_white(photo()), "guidance_scale": 5.0,
         "negative_prompt": ""},
    ),
    "qwen_layered": (
        {"num_inference_steps": 2, "true_cfg_scale": 1, "pil_image": photo(),
         "extra": {"layers": 1}},
        {"num_inference_steps": 2, "true_cfg_scale": 1, "image": photo(), "layers": 1},
    ),
}  # fmt: skip


def load(path):
    """The pipeline of diffusers, without what the checkpoint lacks."""
    index = json.loads((path / "model_index.json").read_text())
    absent = {
        name: None for name, entry in index.items() if isinstance(entry, list) and None in entry
    }
    cls = getattr(import_diffusers(), index["_class_name"])
    pipeline = cls.from_pretrained(path, **absent)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "qwen_layered")) for name in CASES],
)
def test_one_rank_is_what_diffusers_does(tiny, name):
    fields, call = CASES[name]
    generator = torch.Generator().manual_seed(7)
    direct = load(tiny(name))(prompt="a cat", **call, generator=generator, output_type="pt")
    expected = direct.frames if name == "wan_i2v" else direct.images
    # Its layers are the images of a request.
    expected = expected[0] if name == "qwen_layered" else expected
    steps = []
    with OmniDiffusion(model=str(tiny(name))) as engine:
        (output,) = engine.generate(
            "a cat", **fields, seed=7, output_type="pt",
            on_step=lambda event: steps.append((event.step, event.num_steps)) or None,
        )  # fmt: skip
    assert len(output.images) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(output.images, expected, strict=True))
    most = fields["num_inference_steps"]
    assert steps == [(step, most) for step in range(1, most + 1)]
    shape = tuple(output.images[0].shape[-2:])
    assert (output.metrics["height"], output.metrics["width"]) == shape


def test_layers_have_no_latents(tiny):
    """Its call ends with an error there, so ranks that do not lead cannot have them either."""
    model = str(tiny("qwen_layered"))
    for key in ("cfg_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(UnsupportedFeatureError) as raised:
            OmniDiffusion(model=model, **{key: 2})
        assert str(raised.value) == f"{key}: expected 1 for QwenImageLayeredPipeline, got 2"
    message = "output_type: expected pictures of QwenImageLayeredPipeline, got latent"
    with pytest.raises(UnsupportedFeatureError) as raised:
        OmniDiffusion(model=model, output_type="latent")
    assert str(raised.value) == message
    fields = CASES["qwen_layered"][0]
    with OmniDiffusion(model=model) as engine, pytest.raises(RequestError) as refused:
        engine.generate("a cat", **fields, output_type="latent")
    assert str(refused.value) == message


def test_prompts_are_not_rewritten_without_the_processor(tiny):
    drawn = []
    with OmniDiffusion(model=str(tiny("longcat"))) as engine:
        for extra in ({}, PLAIN):
            fields = {**SMALL, "extra": extra, "seed": 1, "output_type": "latent"}
            drawn.append(engine.generate("a cat", **fields)[0].latents[0])
    assert torch.equal(*drawn)


@pytest.mark.parametrize("name", ["ovis", "longcat"])
@pytest.mark.usefixtures("exact_previews")
def test_previews_stops_and_limits(tiny, name):
    """LongCat has no callback of its own: its schedule is watched."""
    previews = []
    fields = {**CASES[name][0], "seed": 1}
    with OmniDiffusion(model=str(tiny(name))) as engine:
        (drawn,) = engine.generate(
            "a", **fields, on_step=lambda event: previews.append(event.preview()[0])
        )
        assert len(previews) == 3
        assert np.array_equal(np.asarray(previews[-1]), np.asarray(drawn.images[0]))
        steps = []
        with pytest.raises(RequestAborted):
            engine.generate("a", **fields, on_step=lambda event: steps.append(event.step) or False)
        assert steps == [1]
        with pytest.raises(RequestTimeout):
            engine.generate("a", **fields, timeout_s=1e-6)
        (again,) = engine.generate("a", **fields)
        assert np.array_equal(np.asarray(again.images[0]), np.asarray(drawn.images[0]))
        assert "step" not in vars(engine.engine._worker.pipeline.scheduler)


def test_noise_embeddings_and_sigmas_of_ovis(tiny):
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn(1, 16, 16, generator=generator)
    embeds = {
        "prompt_embeds": torch.randn(1, 9, 16),
        "negative_prompt_embeds": torch.randn(1, 5, 16),
    }
    size, sigmas = {"height": 64, "width": 64}, [1.0, 0.6, 0.2]
    direct = load(tiny("ovis"))(
        **size, **embeds, latents=latents, sigmas=sigmas, num_inference_steps=3,
        guidance_scale=5.0, negative_prompt=None, output_type="latent",
    )  # fmt: skip
    with OmniDiffusion(model=str(tiny("ovis"))) as engine:
        (output,) = engine.generate(
            prompt_embeds=embeds, **size, latents=latents, sigmas=sigmas, output_type="latent"
        )
    assert torch.equal(output.latents[0], direct.images[0])


@pytest.mark.slow  # two processes each
@pytest.mark.parametrize("name", ["ovis", "longcat", "wan_i2v"])
def test_two_processes_share_the_branches_of_guidance(tiny, name):
    fields = {**CASES[name][0], "seed": 3, "output_type": "latent"}
    with OmniDiffusion(model=str(tiny(name))) as engine:
        (alone,) = engine.generate("a cat", **fields)
    settings = {"cfg_parallel_size": 2, "cpu_threads_per_worker": 1}
    with OmniDiffusion(model=str(tiny(name)), **settings) as engine:
        (both,) = engine.generate("a cat", **fields)
    assert torch.equal(alone.latents[0], both.latents[0])


@pytest.mark.parametrize("name", ["ovis", "longcat"])
@pytest.mark.parametrize(
    "key", ["ulysses_degree", "tensor_parallel_size", "pipeline_parallel_size"]
)
def test_what_they_cannot_share_is_refused(tiny, name, key):
    with pytest.raises(UnsupportedFeatureError, match=f"{key}: expected 1 for "):
        OmniDiffusion(model=str(tiny(name)), **{key: 2})


def test_caches_need_blocks_that_are_known(tiny):
    for keywords, message in (
        ({"cache_backend": "cache_dit"},
         "cache_backend: expected a pipeline whose blocks are known, got OvisImagePipeline"),
        ({"cache_backend": "tea_cache"},
         "cache_backend: expected none or cache_dit for OvisImagePipeline, got 'tea_cache'"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedFeatureError) as raised:
            OmniDiffusion(model=str(tiny("ovis")), **keywords)
        assert str(raised.value) == message


@pytest.mark.slow
def test_a_cache_and_the_default_size_of_videos_with_a_picture(tiny):
    cache = {"cache_backend": "cache_dit", "residual_diff_threshold": 0.9, "max_warmup_steps": 1}
    fields = {**CASES["wan_i2v"][0], "seed": 1}
    with OmniDiffusion(model=str(tiny("wan_i2v")), **cache) as engine:
        (output,) = engine.generate("a cat", **fields)
        assert all(branch["cached"] for branch in output.metrics["cache"]["transformer"].values())
        # Half as high as wide, about 480 x 832 pixels, in multiples of 16.
        assert engine.engine.size_of({"pil_image": photo(60, 30)}) == {"height": 432, "width": 880}


def test_the_encoder_of_pictures_can_stay_in_host_memory(tiny):
    fields = {**CASES["wan_i2v"][0], "seed": 1, "output_type": "latent"}
    drawn = []
    for keeps in (False, True):
        settings = {"image_encoder_cpu_offload": keeps}
        with OmniDiffusion(model=str(tiny("wan_i2v")), **settings) as engine:
            encoder = engine.engine._worker.pipeline.image_encoder
            has_hooks = any(hasattr(part, "_diffusers_hook") for part in encoder.modules())
            assert has_hooks is keeps
            drawn.append(engine.generate("a cat", **fields)[0].latents[0])
    assert torch.equal(*drawn)
    with pytest.raises(UnsupportedFeatureError) as raised:
        OmniDiffusion(model=str(tiny("ovis")), image_encoder_cpu_offload=True)
    expected = "image_encoder_cpu_offload: expected a pipeline with such an encoder, got "
    assert str(raised.value) == expected + "OvisImagePipeline"


def test_sizes_are_those_that_the_pipelines_choose():
    from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit as longcat
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_layered as layered

    for name, module, area, extra in (
        ("LongCatImageEditPipeline", longcat, 1024 * 1024, {}),
        ("QwenImageLayeredPipeline", layered, 640 * 640, {}),
        ("QwenImageLayeredPipeline", layered, 1024 * 1024, {"resolution": 1024}),
    ):
        own_size = find_pipeline(name).image_input.own_size
        for size in ((1, 1), (64, 48), (48, 64), (640, 360), (1000, 17), (333, 777)):
            width, height = module.calculate_dimensions(area, size[0] / size[1])
            assert own_size(size, extra) == {"height": height, "width": width}, (name, size)


def test_what_does_not_fit_is_refused_by_name(tiny):
    def refused(engine, **fields):
        with pytest.raises(RequestError) as raised:
            engine.generate(**{"prompt": "a cat", **fields})
        return str(raised.value)

    with OmniDiffusion(model=str(tiny("longcat"))) as engine:
        expected = "prompt_embeds: expected none for LongCatImagePipeline, got 'prompt_embeds'"
        embeds = {"prompt": None, "prompt_embeds": torch.zeros(1, 5, 16)}
        assert refused(engine, **SMALL, **embeds) == expected
    with OmniDiffusion(model=str(tiny("qwen_layered"))) as engine:
        one = {"pil_image": photo()}
        expected = (
            "height: expected none for QwenImageLayeredPipeline, which takes it from the picture"
        )
        assert refused(engine, **one, height=64) == expected
        expected = "resolution: expected 640 or 1024, got 512"
        assert refused(engine, **one, extra={"resolution": 512}) == expected
        assert "pil_image: expected 1 pictures" in refused(engine)
        expected = "latents: expected none for QwenImageLayeredPipeline, got some"
        assert refused(engine, **one, latents=torch.zeros(1, 8, 8)) == expected
    with OmniDiffusion(model=str(tiny("wan_i2v"))) as engine:
        assert "pil_image: expected 1 pictures" in refused(engine, **SMALL, num_frames=5)


def test_packages_are_needed_where_their_component_is(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    missing = ("torchvision", "ftfy")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *a: None if name in missing else find(name, *a)
    )
    for name, component, package in (
        ("LongCatImageEditPipeline", "text_processor", "torchvision"),
        ("QwenImageLayeredPipeline", "processor", "torchvision"),
        ("WanImageToVideoPipeline", "tokenizer", "ftfy"),
    ):
        index = {"_class_name": name, component: ["transformers", "AnyClass"]}
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        with pytest.raises(ConfigError) as raised:
            OmniDiffusion(model=str(tmp_path))
        assert str(raised.value) == f"{name}: expected the package {package}, got none"


def test_every_pipeline_of_the_registry_is_one_of_diffusers():
    diffusers = import_diffusers()
    for name in AutoOmniPipeline.available():
        spec = find_pipeline(name)
        assert spec.name == name
        assert isinstance(getattr(diffusers, name), type), name
        assert set(spec.defaults) >= {"height", "width", "num_inference_steps"}
        assert spec.guidance.argument in spec.defaults


def test_a_video_over_http_begins_with_a_picture(tiny, tmp_path):
    file = io.BytesIO()
    on_white(photo()).save(file, "PNG")
    fields = {"size": "32x32", "num_frames": "5", "num_inference_steps": "2", "seed": "1"}
    with OmniDiffusion(model=str(tiny("wan_i2v"))) as engine:
        (plain,) = engine.generate(
            "a cat", height=32, width=32, num_frames=5, num_inference_steps=2, seed=1,
            pil_image=on_white(photo()),
        )  # fmt: skip

    async def body(client, _engine):
        files = {"input_reference": ("a.png", file.getvalue(), "image/png")}
        job = (
            await client.post("/v1/videos", data={"prompt": "a cat", **fields}, files=files)
        ).json()
        end = time.monotonic() + WAIT_S
        while job["status"] in ("queued", "in_progress"):
            assert time.monotonic() < end, job
            await asyncio.sleep(0.01)
            job = (await client.get(f"/v1/videos/{job['id']}")).json()
        content = await client.get(f"/v1/videos/{job['id']}/content")
        none = await client.post("/v1/videos", json={"prompt": "a cat"})
        part = {"prompt": (None, "a cat")}
        form_without = await client.post("/v1/videos", files=part)
        wrong = {"input_reference": ("a.png", b"no picture", "image/png")}
        broken = await client.post("/v1/videos", data={"prompt": "a cat"}, files=wrong)
        document = (await client.get("/openapi.json")).json()
        return job, content.content, none, form_without, broken, document

    write_mp4(tmp_path / "plain.mp4", [np.asarray(frame) for frame in plain.images[0]], 16)
    job, content, none, form_without, broken, document = ask(tiny("wan_i2v"), body)
    assert (job["status"], job["size"], job["error"]) == ("completed", "32x32", None)
    assert content == (tmp_path / "plain.mp4").read_bytes()
    assert none.status_code == broken.status_code == 400
    assert none.json()["error"]["message"].startswith("pil_image: expected 1 pictures for Wan")
    assert broken.json()["error"]["message"].startswith("input_reference: expected a readable PNG")
    params = [answer.json()["error"]["param"] for answer in (none, form_without, broken)]
    assert params == [None, "input_reference", "input_reference"]
    content_types = document["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    form = content_types["multipart/form-data"]["schema"]
    assert "input_reference" in form["required"]
