# SPDX-License-Identifier: Apache-2.0
"""Noise, embeddings and schedules that a request brings: against diffusers, and what is refused."""

from __future__ import annotations

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import torch  # noqa: E402

from diffulex.omni import OmniDiffusion, RequestError  # noqa: E402
from diffulex.omni._diffusers_compat import import_diffusers  # noqa: E402

SMALL = {"height": 64, "width": 64}
SIGMAS = (1.0, 0.7, 0.3)
#: Per pipeline: its guidance, the shape of its latents, and shapes of embeddings by their names.
CASES = {
    "qwen": ({"true_cfg_scale": 3.0}, (16, 16), {"prompt_embeds": (1, 9, 16)}),
    "flux": (
        {"true_cfg_scale": 2.0},
        (16, 16),
        {"prompt_embeds": (1, 9, 32), "pooled_prompt_embeds": (1, 32)},
    ),
    "sd3": (
        {"guidance_scale": 3.0},
        (4, 8, 8),
        {"prompt_embeds": (1, 9, 64), "pooled_prompt_embeds": (1, 64)},
    ),
    "z_image": ({"guidance_scale": 3.0}, (16, 8, 8), {"prompt_embeds": (1, 9, 16)}),
    "wan": ({"guidance_scale": 3.0}, (16, 2, 8, 8), {"prompt_embeds": (1, 9, 32)}),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def given(name, num_images=2):
    """Noise of the images, and embeddings of both branches; Qwen's end with two that are hidden."""
    _, shape, embeds = CASES[name]
    generator = torch.Generator().manual_seed(5)
    found = {key: torch.randn(size, generator=generator) for key, size in embeds.items()}
    found |= {
        f"negative_{key}": torch.randn(value.shape, generator=generator)
        for key, value in found.items()
    }
    if name == "qwen":
        mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0, 0]])
        found |= {"prompt_embeds_mask": mask, "negative_prompt_embeds_mask": mask}
    return torch.randn((num_images, *shape), generator=generator), found


def direct(pipeline, name, call, row):
    result = pipeline(**SMALL, **call, latents=row, output_type="latent")
    return (result.frames if name == "wan" else result.images)[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("qwen", "z_image") else [pytest.mark.slow])
        for name in CASES
    ],
)
def test_what_a_request_brings_is_used_as_diffusers_does(tiny, name):
    pipeline = import_diffusers().DiffusionPipeline.from_pretrained(tiny(name))
    pipeline.set_progress_bar_config(disable=True)
    latents, embeds = given(name)
    fields = {**CASES[name][0], **({"num_frames": 5} if name == "wan" else {})}
    call = {**fields, **embeds}
    if name == "z_image":
        call |= {key: [value[0]] for key, value in embeds.items()}
    # Wan's own scheduler has no other schedule than its own.
    steps = {"num_inference_steps": 3} if name == "wan" else {"sigmas": SIGMAS}
    call |= steps if name == "wan" else {"sigmas": list(SIGMAS), "num_inference_steps": 3}
    with OmniDiffusion(model=str(tiny(name))) as engine:
        (output,) = engine.generate(
            prompt_embeds=embeds, latents=latents, num_outputs_per_prompt=2, seed=3,
            **SMALL, **fields, **steps, output_type="latent",
        )  # fmt: skip
    assert output.prompt is None
    assert output.metrics["num_inference_steps"] == 3
    rows = [direct(pipeline, name, call, latents[i : i + 1]) for i in range(2)]
    assert [torch.equal(got, row) for got, row in zip(output.latents, rows, strict=True)] == [
        True, True,
    ]  # fmt: skip
    assert not torch.equal(*rows)


def test_each_of_them_counts_by_itself(tiny):
    """A prompt with the noise alone; embeddings with a text of the other branch."""
    pipeline = import_diffusers().DiffusionPipeline.from_pretrained(tiny("qwen"))
    pipeline.set_progress_bar_config(disable=True)
    latents, embeds = given("qwen", 1)
    scale = CASES["qwen"][0]
    positive = {key: value for key, value in embeds.items() if not key.startswith("negative")}
    negative = {key: value for key, value in embeds.items() if key.startswith("negative")}
    steps = {"num_inference_steps": 2}
    with OmniDiffusion(model=str(tiny("qwen"))) as engine:
        for own, direct_own in (
            ({"prompt": "a cat"}, {"prompt": "a cat", "negative_prompt": " "}),
            ({"prompt": "a", "prompt_embeds": negative}, {"prompt": "a", **negative}),
            ({"prompt_embeds": positive, "negative_prompt": "a dog"},
             {**positive, "negative_prompt": "a dog"}),
            ({"prompt_embeds": positive["prompt_embeds"], "true_cfg_scale": 1.0},
             {"prompt_embeds": positive["prompt_embeds"], "true_cfg_scale": 1.0}),
        ):  # fmt: skip
            call = {**scale, **steps, **direct_own}
            fields = {**scale, **SMALL, **steps, "output_type": "latent", **own}
            (output,) = engine.generate(**fields, latents=latents)
            assert torch.equal(output.latents[0], direct(pipeline, "qwen", call, latents))
            (drawn,) = engine.generate(**fields, seed=4)
            generator = torch.Generator().manual_seed(4)
            expected = direct(pipeline, "qwen", {**call, "generator": generator}, None)
            assert torch.equal(drawn.latents[0], expected)


def test_a_batch_takes_each_its_row(tiny):
    latents, embeds = given("qwen", 3)
    fields = {**CASES["qwen"][0], **SMALL, "sigmas": SIGMAS, "output_type": "latent"}
    several = {"prompt_embeds": embeds, "latents": latents, "num_outputs_per_prompt": 3}
    with OmniDiffusion(model=str(tiny("qwen"))) as engine:
        (alone,) = engine.generate(**fields, **several)
    with OmniDiffusion(model=str(tiny("qwen")), max_batch_size=2) as engine:
        (batched,) = engine.generate(**fields, **several)
    for one, other in zip(alone.latents, batched.latents, strict=True):
        assert (one - other).abs().max() < 1e-5
    assert (alone.latents[0] - alone.latents[1]).abs().max() > 0.1


@pytest.mark.slow  # two processes
@pytest.mark.parametrize("name", ["qwen", "z_image"])
def test_two_processes_draw_the_same(tiny, name):
    latents, embeds = given(name)
    fields = {**CASES[name][0], **SMALL, "sigmas": SIGMAS, "output_type": "latent"}
    several = {"prompt_embeds": embeds, "latents": latents, "num_outputs_per_prompt": 2}
    model = str(tiny(name))
    with OmniDiffusion(model=model) as engine:
        (alone,) = engine.generate(**fields, **several)
    # Small enough that the noise goes through shared memory.
    settings = {"shm_threshold_bytes": 1024, "cpu_threads_per_worker": 1}
    with OmniDiffusion(model=model, cfg_parallel_size=2, **settings) as engine:
        (both,) = engine.generate(**fields, **several)
        with pytest.raises(RequestError, match=r"latents: expected the shape \[1, 16"):
            engine.generate("a", **{**fields, "latents": torch.zeros(1, 3)})
    for one, other in zip(alone.latents, both.latents, strict=True):
        # Z-Image's branches are the two halves of a batch, which is rounded differently.
        assert torch.equal(one, other) if name == "qwen" else (one - other).abs().max() < 1e-5


def test_what_does_not_fit_is_refused_by_name(tiny):
    embeds = given("qwen", 1)[1]
    one, mask = embeds["prompt_embeds"], embeds["prompt_embeds_mask"]

    def refused(engine, **fields):
        with pytest.raises(RequestError) as raised:
            engine.generate(**{**SMALL, "num_inference_steps": 2, **fields})
        return str(raised.value)

    with OmniDiffusion(model=str(tiny("qwen"))) as engine:
        for fields, message in (
            ({}, "prompt: expected some text, got None"),
            ({"prompt": "a", "prompt_embeds": one},
             "prompt_embeds: expected no prompt beside it, got both"),
            ({"prompt_embeds": embeds, "negative_prompt": "a"},
             "negative_prompt_embeds: expected no negative_prompt beside it, got both"),
            ({"prompt_embeds": embeds, "true_cfg_scale": 1.0},
             "negative_prompt_embeds: expected true_cfg_scale above 1 with it, got 1"),
            ({"prompt": "a", "prompt_embeds": {"prompt_embeds_mask": mask}},
             "prompt_embeds: expected it beside prompt_embeds_mask, got none"),
            ({"prompt_embeds": {"prompt_embeds": one, "prompt_embeds_mask": mask[:, :4]}},
             "prompt_embeds_mask: expected the shape [1, 9], got [1, 4]"),
            ({"prompt_embeds": one[..., :8]},
             "prompt_embeds: expected the shape [1, 9, 16], got [1, 9, 8]"),
            ({"prompt_embeds": one.repeat(2, 1, 1)},
             "prompt_embeds: expected a tensor with 1 rows, got [2, 9, 16]"),
            ({"prompt_embeds": one, "max_sequence_length": 8},
             "prompt_embeds: expected at most 8 tokens (max_sequence_length), got 9"),
            ({"prompt_embeds": [1.0]}, "prompt_embeds: expected a tensor with 1 rows, got list"),
            ({"prompt": "a", "latents": torch.zeros(16, 16)},
             "latents: expected a tensor with 1 rows, got [16, 16]"),
            ({"prompt": "a", "latents": torch.zeros(1, 16, 8)},
             "latents: expected the shape [1, 16, 16], got [1, 16, 8]"),
            ({"prompt": "a", "latents": torch.full((1, 16, 16), float("nan"))},
             "latents: expected finite numbers, got some that are not"),
            ({"prompt_embeds": one * float("inf")},
             "prompt_embeds: expected finite numbers, got some that are not"),
            ({"prompt": "a", "sigmas": [1.0, 0.5, 0.2]},
             "num_inference_steps: expected 3 with so many sigmas, got 2"),
            ({"prompt": "a", "sigmas": [0.5, 1.0]},
             "sigmas: expected 1 to 1000 falling numbers in (0, 1], got [0.5, 1.0]"),
            ({"prompt": "a", "num_inference_steps": None, "sigmas": [1.0]},
             "num_inference_steps: expected at least 2 for the model's schedule, got 1"),
        ):  # fmt: skip
            assert refused(engine, **fields) == message
        for sigmas in ([], [1.5], [0.0], ["1"], [True], [float("nan")], 0.5):
            assert refused(engine, prompt="a", sigmas=sigmas).startswith("sigmas: expected 1 to")
        text = refused(engine, prompt="a", prompt_embeds={"pooled_prompt_embeds": one})
        shown = text.removeprefix("prompt_embeds: expected ").partition(
            " for QwenImagePipeline, got "
        )
        assert set(shown[0].split(", ")) == set(embeds)
        assert shown[2] == "'pooled_prompt_embeds'"
    with OmniDiffusion(model=str(tiny("flux"))) as engine:
        expected = "pooled_prompt_embeds: expected it beside prompt_embeds, got none"
        assert refused(engine, prompt_embeds=torch.zeros(1, 9, 32)) == expected
    with OmniDiffusion(model=str(tiny("z_image"))) as engine:
        expected = "negative_prompt_embeds: expected it beside prompt_embeds, got none"
        assert refused(engine, prompt_embeds=torch.zeros(1, 9, 16)) == expected
    with OmniDiffusion(model=str(tiny("wan"))) as engine:
        expected = "sigmas: expected none for WanPipeline, got some"
        fields = {"prompt": "a", "sigmas": [1.0, 0.5], "num_frames": 5}
        assert refused(engine, **fields) == expected


def test_a_pipeline_that_says_no_shape_takes_no_noise(tiny):
    import dataclasses

    from diffulex.omni import register_pipeline
    from diffulex.omni.models.qwen_image import SPEC

    spec = dataclasses.replace(SPEC, latents_shape=None, has_embeds=False)
    register_pipeline(spec, exist_ok=True)
    try:
        with OmniDiffusion(model=str(tiny("qwen"))) as engine:
            with pytest.raises(RequestError) as raised:
                engine.generate("a", **SMALL, latents=torch.zeros(1, 16, 16))
            assert str(raised.value) == "latents: expected none for QwenImagePipeline, got some"
            with pytest.raises(RequestError) as raised:
                engine.generate(prompt_embeds=torch.zeros(1, 9, 16), **SMALL)
            expected = "prompt_embeds: expected none for QwenImagePipeline, got 'prompt_embeds'"
            assert str(raised.value) == expected
    finally:
        register_pipeline(SPEC, exist_ok=True)
