# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny `WanPipeline` on videos of one moving shape: "a red circle moving right".

See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from diffulex.omni import OmniDiffusion
from diffulex.omni._diffusers_compat import import_diffusers
from diffulex.omni.bench.motion import DIRECTIONS, check_motion, draw_motions, render_motion
from diffulex.omni.bench.scenes import COLORS, KINDS
from stepper import Stepper

_FRAMES, _SIDE, _CHANNELS = 9, 32, 16
_TEXT_TOKENS = 16
_STEPS, _GUIDANCE = 20, 3.0
_EMPTY_SHARE, _KL_WEIGHT = 0.1, 1e-5
_ENCODE_BATCH = 64
#: Added to the scores of positions that are not there.
_HIDDEN = torch.finfo(torch.float32).min
_HELD_OUT_SEED = 54321
_START = time.monotonic()


def log(text: str) -> None:
    print(f"{time.monotonic() - _START:5.0f} s  {text}", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vae-seconds", type=float, default=150)
    parser.add_argument("--seconds", type=float, default=150, help="of the transformer")
    parser.add_argument("--bank", type=int, default=8000, help="training videos")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--vae-batch", type=int, default=16)
    parser.add_argument("--eval", type=int, default=100, help="videos of held-out captions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge", action="store_true", help="only judge the model of --out, again")
    options = parser.parse_args(argv)
    for name in ("vae_seconds", "seconds", "bank", "batch", "vae_batch"):
        if not getattr(options, name) > 0:
            parser.error(f"--{name.replace('_', '-')}: expected a number above 0")
    if options.eval < 0:
        parser.error("--eval: expected a number of at least 0")
    # What would fail after minutes of training.
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out: expected a directory, got the file {options.out}")
    if not next(path for path in options.out.absolute().parents if path.exists()).is_dir():
        parser.error(f"--out: expected a directory that can be made, got {options.out}")
    try:
        torch.zeros(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device: expected one that is here, got {options.device}: {error}")
    return options


def tokenizer() -> T5Tokenizer:
    """One token per word of the captions."""
    words = ["a", "an", "moving", *COLORS, *KINDS, *DIRECTIONS]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab += [(f"\u2581{word}", -1.0) for word in words]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=_TEXT_TOKENS)


def pipeline(seed: int) -> Any:
    """The untrained pipeline: 2.2 M parameters; a latent cell is 4 frames of 4 x 4 pixels."""
    torch.manual_seed(seed)
    words = tokenizer()
    return diffusers.WanPipeline(
        tokenizer=words,
        text_encoder=UMT5EncoderModel(
            UMT5Config(
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=2,
                num_heads=4,
                vocab_size=len(words),
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
                is_encoder_decoder=False,
            )
        ),
        transformer=diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=24,
            in_channels=_CHANNELS,
            out_channels=_CHANNELS,
            text_dim=64,
            freq_dim=64,
            ffn_dim=384,
            num_layers=4,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=64,
        ),
        vae=diffusers.AutoencoderKLWan(
            base_dim=24,
            z_dim=_CHANNELS,
            dim_mult=[1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[True, True],
            latents_mean=[0.0] * _CHANNELS,
            latents_std=[1.0] * _CHANNELS,
            scale_factor_spatial=4,
            scale_factor_temporal=4,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0),
    )


def train_vae(vae: Any, pixels: torch.Tensor, options: argparse.Namespace) -> None:
    """Videos as bytes [N, 3, frames, side, side]."""

    def loss() -> torch.Tensor:
        rows = torch.randint(0, len(pixels), (options.vae_batch,), device=pixels.device)
        video = pixels[rows].float() / 127.5 - 1
        posterior = vae.encode(video).latent_dist
        latents = posterior.mean + torch.randn_like(posterior.mean) * posterior.std
        error = vae.decode(latents).sample - video
        divergence = (posterior.mean.square() + posterior.var - 1 - posterior.logvar).mean()
        return error.abs().mean() + error.square().mean() + _KL_WEIGHT * divergence

    torch.backends.cudnn.benchmark = True  # every step has the same shapes
    stepper = Stepper(list(vae.parameters()), 2e-3, loss, weight_decay=0.0)
    stepper.run(options.vae_seconds, "autoencoder", log)
    vae.eval().requires_grad_(False)


@torch.no_grad()
def encode_bank(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Normalised latents [N, C, f, h, w]; the VAE learns how to undo it."""
    parts = [
        vae.encode(part.float() / 127.5 - 1).latent_dist.mean
        for part in pixels.split(_ENCODE_BATCH)
    ]
    latents = torch.cat(parts)
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    column = (slice(None), None, None, None)
    normalised: torch.Tensor = (latents - mean[column]) / std[column]
    return normalised


def train_transformer(
    pipe: Any, latents: torch.Tensor, captions: list[str], options: argparse.Namespace
) -> int:
    """Flow matching of text model and transformer; returns the number of steps."""
    device, batch = latents.device, options.batch
    encoded = pipe.tokenizer(
        [*captions, ""], padding="max_length", max_length=_TEXT_TOKENS, return_tensors="pt"
    )
    ids, mask = encoded.input_ids.to(device), encoded.attention_mask.to(device)
    # A prepared mask: of another one transformers asks the device something, which no graph can have.
    hidden = torch.zeros_like(mask, dtype=torch.float32).masked_fill(mask == 0, _HIDDEN)
    hidden = hidden[:, None, None, :]
    empty = torch.tensor(len(captions), device=device)

    def loss() -> torch.Tensor:
        rows = torch.randint(0, len(latents), (batch,), device=device)
        video = latents[rows]
        rows = torch.where(torch.rand(batch, device=device) < _EMPTY_SHARE, empty, rows)
        noise = torch.randn_like(video)
        sigma = torch.sigmoid(torch.randn(batch, device=device) + 0.3)
        share = sigma.view(-1, 1, 1, 1, 1)
        states = pipe.text_encoder(ids[rows], attention_mask=hidden[rows]).last_hidden_state
        velocity = pipe.transformer(
            hidden_states=(1 - share) * video + share * noise,
            timestep=sigma * 1000,
            # The pipeline fills up with zeros.
            encoder_hidden_states=states * mask[rows][..., None],
            return_dict=False,
        )[0]
        return (velocity - (noise - video)).square().mean()

    parameters = [*pipe.transformer.parameters(), *pipe.text_encoder.parameters()]
    stepper = Stepper(parameters, 2e-3, loss)
    stepper.run(options.seconds, "transformer", log)
    return stepper.num_steps


def judge(options: argparse.Namespace) -> dict[str, float]:
    """Shares of the videos of held-out captions that are right."""
    motions = list(islice(draw_motions(random.Random(_HELD_OUT_SEED), held_out=True), options.eval))
    verdicts = []
    with OmniDiffusion(model=str(options.out), device=options.device, dtype="float32") as engine:
        for seed, motion in enumerate(motions):
            (output,) = engine.generate(motion.caption, seed=seed, output_type="np")
            verdicts.append(check_motion(motion, np.asarray(output.images[0], np.float32)))
    names = ("count", "color", "shape", "direction", "all")
    return {name: sum(getattr(v, name) for v in verdicts) / len(verdicts) for name in names}


def train(options: argparse.Namespace) -> None:
    """Writes the model to the directory."""
    motions = list(islice(draw_motions(random.Random(options.seed), held_out=False), options.bank))
    videos = np.stack([render_motion(motion, _FRAMES, _SIDE) for motion in motions])
    pixels = torch.from_numpy((videos * 255).round().astype(np.uint8)).permute(0, 4, 1, 2, 3)
    pixels = pixels.contiguous().to(options.device)
    log(f"{len(motions)} videos")
    pipe = pipeline(options.seed).to(options.device)
    train_vae(pipe.vae, pixels, options)
    latents = encode_bank(pipe.vae, pixels)
    steps = train_transformer(pipe, latents, [motion.caption for motion in motions], options)
    for name in ("transformer", "vae", "text_encoder"):
        getattr(pipe, name).eval()
    pipe.to(torch.bfloat16).save_pretrained(options.out)
    defaults = {
        "height": _SIDE,
        "width": _SIDE,
        "num_frames": _FRAMES,
        "num_inference_steps": _STEPS,
        "guidance_scale": _GUIDANCE,
        "max_sequence_length": _TEXT_TOKENS,
    }
    (options.out / "generation_config.json").write_text(
        json.dumps({"diffulex": defaults}, indent=2) + "\n", encoding="utf-8"
    )
    log(f"saved {options.out} after {steps} steps")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    import_diffusers()  # checks the version, turns its bars off
    if not options.judge:
        train(options)
    record = {"captions": options.eval, "right": judge(options) if options.eval else None}
    (options.out / "motion.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    log(json.dumps(record))


if __name__ == "__main__":
    main()
