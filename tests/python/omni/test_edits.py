# SPDX-License-Identifier: Apache-2.0
"""Pictures that are changed: against diffusers, in two processes, from files, and what is refused."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import torch  # noqa: E402
from PIL import Image  # noqa: E402

from diffulex.omni import OmniDiffusion, RequestError  # noqa: E402
from diffulex.omni._diffusers_compat import import_diffusers  # noqa: E402
from diffulex.omni.pictures import read_picture, size_like, steps_run  # noqa: E402
from diffulex.tools.cli import main  # noqa: E402

SMALL = {"height": 48, "width": 64, "num_inference_steps": 4}
#: What the engine adds to a plain prompt, per pipeline. The condition of Kontext would be 1 megapixel.
DIRECT = {
    "flux_img2img": {"guidance_scale": 7.0, "strength": 0.6},
    "flux_kontext": {"guidance_scale": 2.5, "max_area": 48 * 64, "_auto_resize": False},
    "qwen_img2img": {"true_cfg_scale": 4.0, "negative_prompt": " ", "strength": 0.6},
}
EXTRA = {"flux_kontext": {"extra": {"_auto_resize": False}}}
STEPS_RUN = {"flux_img2img": 3, "flux_kontext": 4, "qwen_img2img": 3}

pytestmark = pytest.mark.usefixtures("one_thread")


def photo(width=80, height=60):
    """A picture with a gradient and a square."""
    rows = np.linspace(0, 255, height, dtype=np.uint8)[:, None, None]
    pixels = np.broadcast_to(rows, (height, width, 3)).copy()
    pixels[10:30, 10:30] = (200, 30, 40)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("name", list(DIRECT))
def test_an_edit_is_what_diffusers_does(tiny, name):
    pipeline = import_diffusers().DiffusionPipeline.from_pretrained(tiny(name))
    pipeline.set_progress_bar_config(disable=True)
    fields = {**SMALL, **EXTRA.get(name, {}), "pil_image": photo(), "num_outputs_per_prompt": 2}
    events = []
    # A batch would give the second image the noise of the first.
    with OmniDiffusion(model=str(tiny(name)), max_batch_size=2) as engine:
        (output,) = engine.generate(
            "a cat",
            **fields,
            seed=7,
            output_type="pt",
            on_step=lambda event: events.append(event) or None,
        )
        (other,) = engine.generate("a cat", **{**fields, "pil_image": photo(64, 64)}, seed=7)
    for seed, image in zip((7, 8), output.images, strict=True):
        generator = torch.Generator().manual_seed(seed)
        call = {**SMALL, **DIRECT[name], "generator": generator, "output_type": "pt"}
        assert torch.equal(image, pipeline(prompt="a cat", image=photo(), **call).images[0])
    assert {event.num_steps for event in events} == {STEPS_RUN[name]}
    assert events[-1].step == STEPS_RUN[name]
    first = (output.images[0].permute(1, 2, 0).numpy() * 255).round()
    assert not np.array_equal(first, np.asarray(other.images[0]))


@pytest.mark.usefixtures("exact_previews")
def test_previews_and_caches_follow_the_steps_that_are_run(tiny):
    seen = []
    fields = {**SMALL, "num_inference_steps": 8, "strength": 0.5, "pil_image": photo(), "seed": 1}
    cache = {"cache_backend": "cache_dit", "residual_diff_threshold": 0.9, "max_warmup_steps": 1}
    with OmniDiffusion(model=str(tiny("qwen_img2img")), **cache) as engine:
        (output,) = engine.generate(
            "a cat", **fields, on_step=lambda event: seen.append(np.asarray(event.preview()[0]))
        )
    (branch, _) = output.metrics["cache"]["transformer"].values()
    assert sorted([*branch["computed"], *branch["cached"]]) == [0, 1, 2, 3]
    assert len(seen) == 4
    assert np.array_equal(seen[-1], np.asarray(output.images[0]))


def test_a_size_follows_from_the_picture(tiny):
    with OmniDiffusion(model=str(tiny("flux_img2img"))) as engine:
        engine.engine._defaults |= {"height": 64, "width": 64}
        fields = {"num_inference_steps": 2, "strength": 0.5, "seed": 1}
        (output,) = engine.generate("a cat", pil_image=photo(96, 48), **fields)
        assert output.images[0].size == (80, 32)
        (output,) = engine.generate("a cat", pil_image=photo(96, 48), height=32, **fields)
        assert output.images[0].size == (64, 32)


@pytest.mark.parametrize("name", list(DIRECT))
def test_the_warm_up_has_the_picture_that_a_pipeline_needs(tiny, tmp_path, monkeypatch, name):
    from diffulex.omni.worker import Worker

    model = shutil.copytree(tiny(name), tmp_path / "model")
    size = {"height": 48, "width": 64}
    (model / "generation_config.json").write_text(json.dumps({"diffulex": size}))
    drawn = []
    run = Worker.run
    monkeypatch.setattr(Worker, "run", lambda *a: drawn.extend(a[1]) or run(*a))
    with OmniDiffusion(model=str(model), warmup=True):
        pass
    (call,) = drawn
    assert (call.width, call.height, call.num_inference_steps) == (64, 48, 2)
    needed = [] if name == "flux_kontext" else [(64, 48)]
    assert [picture.size for picture in call.pictures] == needed


def test_sizes_and_steps_by_hand():
    assert size_like((200, 100), 1024 * 1024, 32, 16) == {"width": 1440, "height": 736}
    assert size_like((1000, 1), 64 * 64, 1, 16) == {"width": 2016, "height": 16}
    assert [steps_run(10, share) for share in (None, 1, 0.6, 0.05)] == [10, 10, 6, 1]
    assert steps_run(4, 0.1) == 1


@pytest.mark.slow  # two processes
def test_two_processes_draw_the_same(tiny):
    fields = {**SMALL, "pil_image": photo(), "seed": 3, "output_type": "pt"}
    model = str(tiny("qwen_img2img"))
    with OmniDiffusion(model=model) as engine:
        (alone,) = engine.generate("a cat", **fields)
    with OmniDiffusion(model=model, cfg_parallel_size=2, cpu_threads_per_worker=1) as engine:
        (both,) = engine.generate("a cat", **fields)
    assert torch.equal(alone.images[0], both.images[0])


def test_requests_that_do_not_fit(tiny):
    def refused(engine, **fields):
        with pytest.raises(RequestError) as raised:
            engine.generate("a cat", **{**SMALL, **fields})
        return str(raised.value)

    with OmniDiffusion(model=str(tiny("flux"))) as engine:
        expected = "pil_image: expected 0 pictures for FluxPipeline, got 1"
        assert refused(engine, pil_image=photo()) == expected
        assert refused(engine, strength=0.5).startswith("strength: expected one of height, ")
    with OmniDiffusion(model=str(tiny("flux_img2img"))) as engine:
        expected = "pil_image: expected 1 pictures for FluxImg2ImgPipeline, got "
        assert refused(engine) == expected + "0"
        assert refused(engine, pil_image=[photo(), photo()]) == expected + "2"
        one = {"pil_image": photo()}
        for value in (0, 1.5, -1, "much"):
            assert refused(engine, **one, strength=value).startswith("strength: expected a number")
        assert (
            refused(engine, pil_image="x.png") == "pil_image: expected pictures of PIL, got 'x.png'"
        )
        expected = "extra: expected a known key, got 'max_area'; FluxImg2ImgPipeline takes prompt_2"
        assert refused(engine, **one, extra={"max_area": 4}).startswith(expected)
        assert "got both" in refused(engine, **one, image_path="x.png")


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [("flux_img2img", "FluxImg2ImgPipeline"), ("qwen_img2img", "QwenImageImg2ImgPipeline")],
)
def test_noise_in_place_of_the_picture_is_refused(tiny, name, pipeline):
    with OmniDiffusion(model=str(tiny(name))) as engine, pytest.raises(RequestError) as raised:
        engine.generate("a cat", **SMALL, pil_image=photo(), latents=torch.zeros(1, 12, 16))
    assert str(raised.value) == f"latents: expected none for {pipeline}, got some"


def test_kontext_draws_without_a_picture(tiny):
    pipeline = import_diffusers().DiffusionPipeline.from_pretrained(tiny("flux_kontext"))
    pipeline.set_progress_bar_config(disable=True)
    call = {**SMALL, **DIRECT["flux_kontext"], "output_type": "pt"}
    direct = pipeline(prompt="a cat", **call, generator=torch.Generator().manual_seed(1))
    with OmniDiffusion(model=str(tiny("flux_kontext"))) as engine:
        (output,) = engine.generate("a cat", **SMALL, seed=1, output_type="pt")
    assert torch.equal(output.images[0], direct.images[0])


def test_files_are_read_upright_and_refused_in_one_line(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    photo(80, 60).save(tmp_path / "turned.jpg", exif=exif)
    assert read_picture(tmp_path / "turned.jpg", "image", 5000).size == (60, 80)
    deep = np.linspace(0, 65535, 4800).astype(np.uint16).reshape(60, 80)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    read = np.asarray(read_picture(tmp_path / "deep.png", "image", 5000), dtype=np.float64)
    assert np.abs(read - deep[..., None] / 257).max() <= 1
    read = np.asarray(read_picture(tmp_path / "deep.png", "image", 5000, "RGBA"))
    assert np.abs(read[..., :3] - deep[..., None] / 257).max() <= 1
    assert (read[..., 3] == 255).all()
    file = io.BytesIO()
    photo().save(file, "PNG")
    for source, most, expected in (
        (file.getvalue(), 4799, "image: expected at most 4799 pixels (max_pixels), got 80x60"),
        (b"GIF89a", 5000, "image: expected a readable PNG, JPEG or WebP file, got another"),
        (file.getvalue()[:60], 5000, "image: expected a readable PNG, JPEG or WebP file, got "),
        (tmp_path / "none.png", 5000, "image: expected a readable PNG, JPEG or WebP file, got "),
    ):
        with pytest.raises(RequestError) as raised:
            read_picture(source, "image", most)
        assert str(raised.value).startswith(expected)
        assert "\n" not in str(raised.value)


def shades():
    """A black picture, transparent at the left, half of it in the middle, and opaque at the right."""
    alpha = np.repeat(np.uint8([[0, 128, 255]]), 10, axis=1).repeat(20, axis=0)
    clear = Image.new("RGBA", (30, 20), "black")
    clear.putalpha(Image.fromarray(alpha))
    return clear


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_what_is_transparent_shows_white(mode):
    clear = shades()
    if mode in ("P", "RGB"):
        # One colour stands for what is transparent.
        clear = Image.new(mode, (30, 20), 0)
        clear.paste(1 if mode == "P" else (1, 1, 1), (10, 0, 30, 20))
        if mode == "P":
            clear.putpalette([0, 0, 0, 90, 90, 90])
        file = io.BytesIO()
        clear.save(file, "PNG", transparency=0 if mode == "P" else (0, 0, 0))
        right, middle = (90, 90) if mode == "P" else (1, 1)
    else:
        file = io.BytesIO()
        clear.convert(mode).save(file, "PNG")
        right, middle = 0, 127
    read = np.asarray(read_picture(file.getvalue(), "image", 5000))
    assert [read[5, place].tolist() for place in (5, 15, 25)] == [
        [255] * 3, [middle] * 3, [right] * 3,
    ]  # fmt: skip


def test_transparency_stays_where_it_is_asked_for():
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 3
    shades().save(file, "PNG", exif=exif)
    read = read_picture(file.getvalue(), "image", 5000, "RGBA")
    assert np.array_equal(np.asarray(read), np.asarray(shades())[::-1, ::-1])


def test_a_transparent_picture_of_a_program_is_the_one_on_white(tiny):
    white = Image.new("RGB", (30, 20), "white")
    white.paste(shades(), mask=shades().getchannel("A"))
    fields = {**SMALL, "seed": 2, "output_type": "pt"}
    with OmniDiffusion(model=str(tiny("flux_img2img"))) as engine:
        (clear,) = engine.generate("a cat", pil_image=shades(), **fields)
        (plain,) = engine.generate("a cat", pil_image=white, **fields)
    assert torch.equal(clear.images[0], plain.images[0])


@pytest.mark.slow  # the bundled model on one core
def test_the_command_changes_a_picture_of_the_bundled_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    photo(64, 64).save("before.png")
    edit = ["--model-class-name", "QwenImageImg2ImgPipeline", "--image", "before.png"]
    common = ["omni", "generate", "a red circle", "--device", "cpu", "--seed", "0", *edit]
    assert main([*common, "--strength", "0.9", "-o", "after.png"]) == 0
    assert capsys.readouterr().out == "after.png\n"
    with Image.open("after.png") as after:
        assert after.size == (64, 64)
    assert main([*common, "--image", "none.png"]) == 2
    assert "--image none.png: expected a readable PNG" in capsys.readouterr().err


@pytest.mark.slow  # a megapixel each, where the package is there
def test_edits_of_qwen_need_a_package_or_are_what_diffusers_does(tiny, tmp_path):
    """Without torchvision its processor cannot be made, which is said before anything is loaded."""
    import importlib.util

    from diffulex.errors import ConfigError

    if importlib.util.find_spec("torchvision") is None:
        (tmp_path / "model_index.json").write_text(
            json.dumps(
                {
                    "_class_name": "QwenImageEditPipeline",
                    "processor": ["transformers", "Qwen2VLProcessor"],
                }
            )
        )
        with pytest.raises(ConfigError) as raised:
            OmniDiffusion(model=str(tmp_path))
        expected = "QwenImageEditPipeline: expected the package torchvision, got none"
        assert str(raised.value) == expected
        return
    fields = {"height": 64, "width": 64, "num_inference_steps": 2}
    for name, pictures in (("qwen_edit", photo()), ("qwen_edit_plus", [photo(), photo(64, 64)])):
        pipeline = import_diffusers().DiffusionPipeline.from_pretrained(tiny(name))
        pipeline.set_progress_bar_config(disable=True)
        direct = pipeline(
            prompt="a cat", negative_prompt=" ", image=pictures, **fields, true_cfg_scale=4.0,
            generator=torch.Generator().manual_seed(1), output_type="pt",
        )  # fmt: skip
        with OmniDiffusion(model=str(tiny(name))) as engine:
            (output,) = engine.generate(
                "a cat", **fields, pil_image=pictures, seed=1, output_type="pt"
            )
        assert torch.equal(output.images[0], direct.images[0])
