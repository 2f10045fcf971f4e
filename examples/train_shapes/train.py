# SPDX-License-Identifier: Apache-2.0
"""Trains the bundled image model: autoencoder, then text model and transformer together.

See README.md beside this file for the command of the shipped model.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bank import Bank, make_bank
from build import PREFIX, PREFIX_LEN, SUFFIX, TINY, Sizes, pipeline
from diffulex.omni._diffusers_compat import capturable_text_length, import_diffusers
from diffulex.omni.bench.evaluate import evaluate_shapes
from diffulex.omni.bench.scenes import GRAMMAR_VERSION
from stepper import Stepper

_EMA_DECAY = 0.999
_EMPTY_SHARE = 0.1
_KL_WEIGHT = 1e-5
_ENCODE_BATCH = 1000
#: Requests that give nothing else; read by the engine from generation_config.json.
_STEPS, _GUIDANCE = 20, 3.0
#: Least shares of the shipped model on the held-out captions.
GATE = {"all": 0.85, "relation": 0.95, "ground": 0.99}
_START = time.monotonic()


def log(text: str) -> None:
    print(f"{time.monotonic() - _START:5.0f} s  {text}", flush=True)


class Texts(NamedTuple):
    """Tokens of every caption and, in the last row, of the empty one: [N + 1, L]."""

    ids: torch.Tensor
    mask: torch.Tensor


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vae-seconds", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=300, help="of the transformer")
    parser.add_argument("--bank", type=int, default=100_000, help="training scenes")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--vae-batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--side", type=int, default=64, help="pixels of a picture's side")
    parser.add_argument("--eval", type=int, default=500, help="held-out captions; 0: none")
    parser.add_argument("--eval-batch", type=int, default=250)
    parser.add_argument("--tiny", action="store_true", help="a model that only shows the way")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="run the repeated layers through torch.compile; default: on CUDA",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def autocast(device: str) -> Any:
    """bfloat16 on CUDA; its cache of cast weights would not survive a capture."""
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False)


def train_vae(vae: Any, pixels: torch.Tensor, options: argparse.Namespace) -> int:
    """Trains the autoencoder on single pictures; returns the number of steps."""

    def loss() -> torch.Tensor:
        rows = torch.randint(0, len(pixels), (options.vae_batch,), device=pixels.device)
        picture = pixels[rows].float() / 127.5 - 1
        with autocast(options.device):
            posterior = vae.encode(picture.unsqueeze(2)).latent_dist
            noise = torch.randn_like(posterior.mean)
            latents = posterior.mean + noise * torch.exp(0.5 * posterior.logvar)
            decoded = vae.decode(latents).sample.squeeze(2)
        error = decoded.float() - picture
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        divergence = (mean.square() + logvar.exp() - 1 - logvar).mean()
        return error.abs().mean() + error.square().mean() + _KL_WEIGHT * divergence

    stepper = Stepper(list(vae.parameters()), 2e-3, loss, weight_decay=0.0)
    stepper.run(options.vae_seconds, "autoencoder", log)
    vae.eval().requires_grad_(False)
    return stepper.num_steps


@torch.no_grad()
def encode_bank(vae: Any, pixels: torch.Tensor, device: str) -> torch.Tensor:
    """Latents of all pictures, float16 [N, C, h, w], normalised; the VAE learns how to undo it."""
    parts = []
    for start in range(0, len(pixels), _ENCODE_BATCH):
        picture = pixels[start : start + _ENCODE_BATCH].float() / 127.5 - 1
        with autocast(device):
            parts.append(vae.encode(picture.unsqueeze(2)).latent_dist.mean.squeeze(2).half())
    latents = torch.cat(parts)
    mean, std = latents.float().mean((0, 2, 3)), latents.float().std((0, 2, 3))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    few = latents[:200].float().unsqueeze(2)
    decoded = (vae.decode(few).sample.squeeze(2) / 2 + 0.5).clamp(0, 1)
    error = (decoded - pixels[: len(decoded)].float() / 255).square().mean().item()
    log(f"latents {tuple(latents.shape)}, reconstruction {-10 * math.log10(error):.1f} dB")
    column = (slice(None), None, None)
    normalised: torch.Tensor = ((latents.float() - mean[column]) / std[column]).half()
    return normalised


def tokenize(tokenizer: Any, bank: Bank, device: str) -> Texts:
    captions = [scene.caption for scene in bank.scenes]
    texts = [PREFIX + caption + SUFFIX for caption in (*captions, " ")]
    encoded = tokenizer(texts, padding=True, return_tensors="pt")
    return Texts(encoded.input_ids.to(device), encoded.attention_mask.to(device))


def packed(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, 2h, 2w] as the transformer's tokens [B, h * w, 4 * C]."""
    batch, channels, height, width = latents.shape
    cells = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, channels * 4)


def train_transformer(
    pipe: Any, latents: torch.Tensor, texts: Texts, options: argparse.Namespace
) -> int:
    """Flow matching of text model and transformer; leaves the averaged weights in place."""
    device, batch = options.device, options.batch
    language_model = pipe.text_encoder.model.language_model
    parameters = [*pipe.transformer.parameters(), *language_model.parameters()]
    average = [parameter.detach().clone() for parameter in parameters]
    length = texts.ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
    positions = torch.arange(length, device=device).expand(3, batch, length)
    empty = torch.tensor(len(latents), device=device)
    shapes = [[(1, latents.shape[2] // 2, latents.shape[3] // 2)]] * batch

    def loss() -> torch.Tensor:
        rows = torch.randint(0, len(latents), (batch,), device=device)
        picture = latents[rows].float()
        is_empty = torch.rand(batch, device=device) < _EMPTY_SHARE
        rows = torch.where(is_empty, empty, rows)
        noise = torch.randn_like(picture)
        sigma = torch.sigmoid(torch.randn(batch, device=device) + 0.3)
        share = sigma.view(-1, 1, 1, 1)
        with autocast(device):
            states = language_model(
                input_ids=texts.ids[rows],
                attention_mask=causal,
                position_ids=positions,
                use_cache=False,
            ).last_hidden_state
            velocity = pipe.transformer(
                hidden_states=packed((1 - share) * picture + share * noise),
                timestep=sigma,
                encoder_hidden_states=states[:, PREFIX_LEN:],
                encoder_hidden_states_mask=texts.mask[rows][:, PREFIX_LEN:].bool(),
                img_shapes=shapes,
                return_dict=False,
            )[0]
        return (velocity.float() - packed(noise - picture)).square().mean()

    def follow() -> None:
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - _EMA_DECAY)

    pipe.transformer.train()
    pipe.text_encoder.train()
    if options.compile if options.compile is not None else device == "cuda":
        # Layers of one kind share their code: only the first of each kind is compiled.
        for layer in (*pipe.transformer.transformer_blocks, *language_model.layers):
            layer.compile(dynamic=False)
    stepper = Stepper(parameters, options.rate, loss, after=follow)
    with capturable_text_length():
        stepper.run(options.seconds, "transformer", log)
    for parameter, value in zip(parameters, average):
        parameter.data.copy_(value)
    return stepper.num_steps


def write_results(options: argparse.Namespace, recipe: dict[str, Any]) -> None:
    """Judges the saved model and writes shapes.json beside it."""
    record: dict[str, Any] = {"grammar": GRAMMAR_VERSION, "recipe": recipe, "gate": None}
    target = options.out / "shapes.json"
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if not options.eval:
        return
    report = evaluate_shapes(
        {
            "model": str(options.out),
            "device": options.device,
            "dtype": "float32",
            "max_batch_size": options.eval_batch,
        },
        limit=options.eval,
    )
    log("held-out captions\n" + report.to_text())
    accuracy = report.runs[0].accuracy
    rows = {name: {"least": least, "got": accuracy[name]} for name, least in GATE.items()}
    record["gate"] = {"captions": options.eval, "attributes": accuracy, "rows": rows}
    target.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for name, row in rows.items():
        verdict = "passed" if row["got"] >= row["least"] else "missed"
        log(f"gate {name}: at least {row['least']:.0%}, got {row['got']:.1%}: {verdict}")


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    is_cuda = options.device == "cuda"
    import_diffusers()  # checks the version, turns its bars off
    bank = make_bank(options.bank, options.side)
    distinct = len({scene.caption for scene in bank.scenes})
    log(f"{len(bank.scenes)} scenes, {distinct} distinct captions")
    if is_cuda:
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    pipe = pipeline(TINY if options.tiny else Sizes(), options.seed)
    pipe.to(options.device)
    models = {name: getattr(pipe, name) for name in ("transformer", "vae", "text_encoder")}
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    log(", ".join(f"{name} {size / 1e6:.2f} M" for name, size in sizes.items()))
    pixels = torch.from_numpy(bank.pixels).to(options.device)
    vae_steps = train_vae(pipe.vae, pixels, options)
    latents = encode_bank(pipe.vae, pixels, options.device)
    steps = train_transformer(
        pipe, latents, tokenize(pipe.tokenizer, bank, options.device), options
    )
    training_seconds = time.monotonic() - _START
    for model in models.values():
        model.eval()
    pipe.to(torch.bfloat16).save_pretrained(options.out)
    defaults = {
        "height": options.side,
        "width": options.side,
        "num_inference_steps": _STEPS,
        "true_cfg_scale": _GUIDANCE,
    }
    (options.out / "generation_config.json").write_text(
        json.dumps({"diffulex": defaults}, indent=2) + "\n", encoding="utf-8"
    )
    log(f"saved {options.out}")
    # The gate is judged in plain float32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    recipe = {
        "seed": options.seed,
        "scenes": options.bank,
        "autoencoder_steps": vae_steps,
        "transformer_steps": steps,
        "batch": options.batch,
        "seconds": round(training_seconds),
        "device": torch.cuda.get_device_name() if is_cuda else platform.machine(),
        "torch": torch.__version__,
        "parameters": sum(sizes.values()),
    }
    write_results(options, recipe)


if __name__ == "__main__":
    main()
