# SPDX-License-Identifier: Apache-2.0
"""Previews: what they may cost, and what they show where they are not decoded."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fixtures.extras import need_extra

need_extra("omni", "diffusers", "accelerate", "PIL")

import torch  # noqa: E402

from diffulex.omni import OmniDiffusion, worker  # noqa: E402
from diffulex.omni import previews as previews_module  # noqa: E402
from diffulex.omni.previews import SHARE, Previews  # noqa: E402
from fixtures.omni_tiny import open_engine  # noqa: E402

NUM_STEPS = 40
SMALL = {
    "height": 64,
    "width": 64,
    "num_inference_steps": NUM_STEPS,
    "true_cfg_scale": 1,
    "seed": 1,
}
STEP_S = 0.1

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that only go on as tests say."""
    fake = SimpleNamespace(now=1.0, perf_counter=lambda: fake.now, monotonic=lambda: fake.now)
    for module in (worker, previews_module):
        monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.fixture(scope="module")
def engine(tiny):
    with open_engine(tiny) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(engine):
    """The picture that nobody watches."""
    return np.asarray(engine.generate("a cat", **SMALL)[0].images[0])


@pytest.mark.parametrize(
    ("decode_s", "num_decoded"),
    # A step leaves 5 ms: 16 steps one decode of 79 ms, one step one of 3 ms.
    [(0.079, 2), (0.3, 0), (0.003, NUM_STEPS - 1)],
)
def test_decoding_takes_a_twentieth_of_the_steps(
    engine, plain, monkeypatch, clock, decode_s, num_decoded
):
    own = engine.engine._worker
    pipeline, spent, totals = own.pipeline, [], []
    monkeypatch.setattr(own, "previews", Previews(pipeline, own.spec, "cpu"))
    decode = type(pipeline.vae).decode

    def timed(vae, cells, **keywords):
        share = cells.shape[0] * cells[0, 0].numel() / 64  # of a picture, which has 8 x 8 cells
        clock.now += decode_s * share
        if share == 1:
            spent.append(decode_s)
        return decode(vae, cells, **keywords)

    def step(*_):
        clock.now += STEP_S

    def watch(event):
        event.preview()
        totals.append(sum(spent))
        clock.now += 7  # what the caller does is no time of a step

    monkeypatch.setattr(type(pipeline.vae), "decode", timed)
    with pipeline.transformer.register_forward_pre_hook(step):
        (watched,) = engine.generate("a cat", **SMALL, on_step=watch)
    # The last decode is of the picture itself.
    assert len(spent) == num_decoded + 1
    assert (np.array(totals) <= SHARE * STEP_S * np.arange(NUM_STEPS) + 1e-9).all()
    assert np.array_equal(np.asarray(watched.images[0]), plain)


CAPTIONS = ("a red circle left of a blue square", "a large orange circle on white",
            "a yellow cross above a purple diamond on black")  # fmt: skip


def test_estimates_resemble_the_picture(monkeypatch):
    monkeypatch.setattr(worker, "SHARE", 0)
    fields = {"num_inference_steps": 8, "seed": 1}
    estimates, pictures = [], []
    with OmniDiffusion(device="cpu") as engine:
        for caption in CAPTIONS:
            seen = []
            (output,) = engine.generate(
                caption, **fields, on_step=lambda event, seen=seen: seen.append(event.preview()[0])
            )
            assert len(seen) == 8
            estimates.append(np.asarray(seen[-1].convert("L"), np.float32).ravel())
            pictures.append(np.asarray(output.images[0].convert("L"), np.float32).ravel())
    alike = np.corrcoef(estimates, pictures)[: len(CAPTIONS), len(CAPTIONS) :]
    assert alike.diagonal().min() > 0.7, alike
    assert (alike.argmax(axis=1) == np.arange(len(CAPTIONS))).all(), alike


@pytest.mark.parametrize("has_frames", [False, True])
def test_the_estimate_of_a_linear_autoencoder_is_exact(has_frames):
    """Cells that hold their colour and a constant channel, blown up four times."""
    mix = torch.tensor([[0.5, 0.2, -0.1], [0.1, -0.7, 0.3], [0.2, 0.1, 0.9]])

    def encode(pictures, return_dict):
        assert not return_dict
        assert pictures.dim() == 4 + has_frames
        flat = pictures[:, :, 0] if has_frames else pictures
        colours = torch.nn.functional.avg_pool2d(flat, 4) - 0.25
        colours = torch.einsum("bchw,cd->bdhw", colours, mix.inverse())
        cells = torch.cat([colours, torch.full_like(colours[:, :1], 2.0)], dim=1)
        return (SimpleNamespace(mode=lambda: cells[:, :, None] if has_frames else cells),)

    def decode(cells, return_dict=True):
        assert not return_dict
        flat = cells[:, :, 0] if has_frames else cells
        colours = torch.einsum("bchw,cd->bdhw", flat[:, :3], mix) + 0.25
        pictures = colours.repeat_interleave(4, 2).repeat_interleave(4, 3)
        return (pictures[:, :, None] if has_frames else pictures,)

    pipeline = SimpleNamespace(
        vae=SimpleNamespace(encode=encode, decode=decode),
        image_processor=SimpleNamespace(postprocess=lambda pictures, output_type: pictures),
    )
    spec = SimpleNamespace(
        decode=lambda pipeline, cells, *_: pipeline.vae.decode(cells, return_dict=False)[0]
    )
    latents = torch.tensor([0.3, -0.6, 0.4, 2.0]).view(1, 4, *[1] * has_frames, 1, 1)
    latents = latents.expand(2, -1, *[1] * has_frames, 3, 5)
    got, seconds = Previews(pipeline, spec, "cpu").draw(latents, 12, 20, -1.0)
    assert seconds == 0
    expected = decode(latents, return_dict=False)[0]
    assert got.shape == expected.shape
    assert torch.allclose(got, expected, atol=1e-5)
