# SPDX-License-Identifier: Apache-2.0
"""The schedule of Wan with one transformer and with two, beside the pipeline of diffusers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import torch  # noqa: E402

from diffulex.omni import ModelLoadError, OmniDiffusion, UnsupportedFeatureError  # noqa: E402
from diffulex.omni._diffusers_compat import import_diffusers  # noqa: E402
from diffulex.omni.config import OmniDiffusionConfig  # noqa: E402
from diffulex.omni.loader import _set_schedule  # noqa: E402

SMALL = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4}
SCALES = {"guidance_scale": 4.0, "guidance_scale_2": 3.0}


@pytest.fixture(scope="module")
def two_experts(wan22):
    """(pipeline of diffusers, its directory)."""
    return import_diffusers().WanPipeline.from_pretrained(wan22), wan22


@pytest.mark.parametrize(
    ("shift", "boundary", "num_calls"), [(None, None, 4), (9.0, None, 2), (None, 0.95, 6)]
)
def test_two_experts_draw_what_diffusers_draws(two_experts, shift, boundary, num_calls):
    pipeline, directory = two_experts
    scheduler = pipeline.scheduler
    calls = []
    hook = pipeline.transformer_2.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        if shift is not None:
            changed = type(scheduler).from_config(scheduler.config, flow_shift=shift)
            pipeline.register_modules(scheduler=changed)
        pipeline.register_to_config(boundary_ratio=boundary or 0.875)
        expected = pipeline(
            "a cat", "bad", **SMALL, **SCALES, generator=torch.Generator().manual_seed(3),
            output_type="latent",
        ).frames  # fmt: skip
    finally:
        hook.remove()
        pipeline.register_modules(scheduler=scheduler)
    # Two calls a step: a stronger shift gives the second one fewer of them, a high boundary more.
    assert len(calls) == num_calls
    settings = {"flow_shift": shift, "boundary_ratio": boundary}
    with OmniDiffusion(model=str(directory), device="cpu", **settings) as engine:
        (output,) = engine.generate(
            "a cat", negative_prompt="bad", **SMALL, **SCALES, seed=3, output_type="latent"
        )
    difference = (output.latents[0] - expected[0]).abs().max().item()
    assert difference == 0


def test_what_has_no_such_schedule_is_refused(tiny):
    for name, settings, text in (
        ("flux", {"flow_shift": 3.0}, "flow_shift: expected none for FluxPipeline, got 3"),
        ("wan", {"boundary_ratio": 0.5}, "with two transformers, got transformer"),
    ):
        with pytest.raises(UnsupportedFeatureError, match=text):
            OmniDiffusion(model=str(tiny(name)), device="cpu", **settings)


def test_schedulers_shift_by_their_own_names():
    diffusers = import_diffusers()
    model = OmniDiffusionConfig.from_kwargs(model="none", flow_shift=5.0).model
    pipeline = SimpleNamespace()
    pipeline.register_modules = lambda scheduler: setattr(pipeline, "scheduler", scheduler)
    pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    _set_schedule(pipeline, model)
    assert pipeline.scheduler.config.shift == 5.0
    for scheduler in (
        diffusers.UniPCMultistepScheduler(),
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    ):
        pipeline.scheduler = scheduler
        with pytest.raises(ModelLoadError, match="flow_shift: expected a schedule with a fixed"):
            _set_schedule(pipeline, model)
