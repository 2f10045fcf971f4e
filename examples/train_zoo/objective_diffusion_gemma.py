# SPDX-License-Identifier: Apache-2.0
"""diffusion_gemma: uniform noise on canvases, self-conditioning in half of each batch.

Rows of one forward: the canvases of the answer (decoder pass) and the clean sequence (encoder pass).
Every canvas position keeps its token or holds a uniformly random one. For half of the batch the
canvas and the self-conditioning signal come from steps of the sampler with the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from canvas_decoder import CanvasConfig, accept_by_entropy, canvas_visibility, decode_canvas
from canvas_model import (
    CanvasModel,
    CanvasShape,
    load_canvas_model,
    save_canvas_model,
    shrink_canvas,
)
from model import additive_mask
from objective import MAX_TOKENS, Objective, Setting, TokenIds
from training_loop import weighted_cross_entropy

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

NUM_CANVASES = 2
BALANCE_WEIGHT = 0.01
#: Weight of the canvas rows behind the end of the answer.
FILLER_WEIGHT = 0.3
#: Weight of canvas rows that hold the right token already.
COPY_WEIGHT = 0.3
MAX_ROLLOUT = 2


def canvas_loss(
    model: CanvasModel,
    canvas: Tensor,
    signal: Tensor,
    context: Tensor,
    positions: Tensor,
    masks: tuple[Tensor, Tensor],
    targets: Tensor,
    weights: Tensor,
) -> Tensor:
    """Weighted cross entropy of the canvas rows and the balance of the routers."""
    logits, balance = model(canvas, signal, context, positions, *masks)
    return weighted_cross_entropy(logits, targets, weights) + BALANCE_WEIGHT * balance


@torch.no_grad()
def canvas_logits(
    model: CanvasModel,
    canvas: Tensor,
    signal: Tensor,
    context: Tensor,
    positions: Tensor,
    masks: tuple[Tensor, Tensor],
) -> Tensor:
    """Logits of the canvas rows."""
    logits: Tensor = model(canvas, signal, context, positions, *masks)[0]
    return logits


class DiffusionGemma(Objective):
    """Uniform-noise canvas denoising."""

    name = "diffusion_gemma"
    directory = "diffusion_gemma"
    block_size = 1  # an answer starts right behind its prompt
    max_noisy_len = 64
    peak_lr = 3e-3
    model: CanvasModel

    def __init__(self, ids: TokenIds, num_layers: int | None = None) -> None:
        shape = CanvasShape(vocab_size=ids.vocab_size, eos_token_id=ids.end_of_text)
        self.ids = ids
        self.model = CanvasModel(shape if num_layers is None else shrink_canvas(shape, num_layers))
        #: Steps of the sampler in training follow the published parameters.
        self.published = CanvasConfig(
            stop_ids=ids.stop_ids, canvas_length=shape.canvas_length, max_tokens=MAX_TOKENS
        )
        # Those of the checkpoint: a small model is less certain, so it is sharpened more.
        self.sampler = replace(
            self.published, max_denoising_steps=24, t_min=0.1, t_max=0.3, entropy_bound=0.02
        )
        self.canvas_loss: Callable[..., Tensor] = canvas_loss
        self.canvas_logits: Callable[..., Tensor] = canvas_logits

    def compile(self) -> None:
        self.canvas_loss = torch.compile(canvas_loss)
        self.canvas_logits = torch.compile(canvas_logits)

    def sampler_step(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Canvases and signals of the next step, each canvas at a random point of the schedule."""
        config, size = self.published, self.published.canvas_length
        batch, num_rows, vocab = logits.shape
        device = logits.device
        steps_left = 1 + torch.rand(batch, 1, 1, device=device) * config.max_denoising_steps
        tempered = logits / config.temperature(steps_left)
        log_p = tempered.log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1).view(-1, size)
        # Bounds around the sampler's: early in training few positions would be accepted.
        bound = 0.1 * 10.0 ** (1.5 * torch.rand(len(entropy), 1, device=device))
        accepted = accept_by_entropy(entropy, bound).view(batch, num_rows)
        uniform = torch.rand(tempered.shape, device=device).clamp(min=1e-9)
        drawn = (tempered - (-uniform.log()).log()).argmax(-1)
        noise = torch.randint(vocab, drawn.shape, device=device)
        return torch.where(accepted, drawn, noise), self.model.soft_signal(tempered)

    def make_rows(self, tokens: Tensor, prompt_len: Tensor, used_len: Tensor) -> dict[str, Any]:
        """Noisy canvases and one forward."""
        device, (batch, length) = tokens.device, tokens.shape
        size = self.sampler.canvas_length
        num_rows = NUM_CANVASES * size
        positions, full = canvas_visibility(prompt_len, NUM_CANVASES, size, length, None)
        window = self.model.shape.sliding_window
        _, sliding = canvas_visibility(prompt_len, NUM_CANVASES, size, length, window)
        filler = tokens.new_full((batch, num_rows), self.ids.end_of_text)
        canvas_positions = positions[:, :num_rows]
        targets = torch.cat([tokens, filler], dim=1).gather(1, canvas_positions)
        level = torch.rand(batch, NUM_CANVASES, device=device)
        level = torch.where(torch.rand_like(level) < 0.3, 1.0, level)
        level = level.repeat_interleave(size, dim=1)
        # Half of the canvases are right up to some position, as an answer is found from its left.
        offset = (torch.arange(num_rows, device=device) % size).float() / size
        chance = torch.rand(targets.shape, device=device)
        is_prefix = torch.rand(batch, 1, device=device) < 0.5
        is_noise = torch.where(is_prefix, offset >= 1.0 - level, chance < level)
        noise = torch.randint(self.ids.vocab_size, targets.shape, device=device)
        start = prompt_len[:, None] + torch.arange(num_rows, device=device) // size * size
        canvas = torch.where(is_noise, noise, targets)
        weights = torch.where(canvas_positions < used_len[:, None], 1.0, FILLER_WEIGHT)
        weights = weights * torch.where(canvas == targets, COPY_WEIGHT, 1.0)
        return {
            "canvas": canvas,
            "context": tokens,
            "positions": positions,
            "masks": (additive_mask(full), additive_mask(sliding)),
            "targets": targets,
            "weights": weights * (start < used_len[:, None]),
        }

    def compute_loss(self, tokens: Tensor, prompt_len: Tensor, used_len: Tensor) -> Tensor:
        rows = self.make_rows(tokens, prompt_len, used_len)
        canvas, half = rows["canvas"], len(tokens) // 2
        hidden = self.model.shape.hidden_size
        signal = torch.zeros(*canvas.shape, hidden, device=tokens.device)
        if half and self.uses_own_predictions:
            fixed = (
                rows["context"][:half],
                rows["positions"][:half],
                tuple(mask[:half] for mask in rows["masks"]),
            )
            own, own_signal = canvas[:half], signal[:half]
            with torch.no_grad():
                for _ in range(int(torch.randint(1, MAX_ROLLOUT + 1, ()))):
                    logits = self.canvas_logits(self.model, own, own_signal, *fixed)
                    own, own_signal = self.sampler_step(logits)
            canvas = torch.cat([own, canvas[half:]])
            signal = torch.cat([own_signal.to(signal.dtype), signal[half:]])
        return self.canvas_loss(
            self.model,
            canvas,
            signal,
            rows["context"],
            rows["positions"],
            rows["masks"],
            rows["targets"],
            rows["weights"],
        )

    def save(self, directory: Path) -> None:
        save_canvas_model(self.model, directory)

    def load(self, directory: Path) -> None:
        self.model.load_state_dict(load_canvas_model(directory).state_dict())

    def engine_defaults(self) -> dict[str, Any]:
        config = self.sampler
        return {
            "max_denoising_steps": config.max_denoising_steps,
            "t_min": config.t_min,
            "t_max": config.t_max,
            "entropy_bound": config.entropy_bound,
            "stability_threshold": config.stability_threshold,
            "confidence_threshold": config.confidence_threshold,
            "diffulex": {"decoding_strategy": "diffusion_gemma"},
        }

    def settings(self, device: torch.device) -> list[Setting]:
        published = {
            name: getattr(self.published, name)
            for name in ("max_denoising_steps", "t_min", "t_max", "entropy_bound")
        }
        changes: list[dict[str, Any]] = [
            {},
            published,
            {**published, "confidence_threshold": 0.05},
            {**published, "max_denoising_steps": 16},
            {"entropy_bound": 0.1},
            {"max_denoising_steps": 8},
        ]
        return [self.setting(device, change) for change in changes]

    def setting(self, device: torch.device, change: dict[str, Any]) -> Setting:
        """The canvas loop with changed sampler parameters."""
        config = CanvasConfig(**{**vars(self.sampler), **change})
        shown = {
            name: getattr(config, name)
            for name in (
                "max_denoising_steps",
                "t_min",
                "t_max",
                "entropy_bound",
                "stability_threshold",
                "confidence_threshold",
            )
        }
        return Setting(
            f"diffusion_gemma steps={config.max_denoising_steps} t={config.t_min:g}-{config.t_max:g} "
            f"bound={config.entropy_bound:g} confidence={config.confidence_threshold:g}",
            {"strategy": "diffusion_gemma", **shown},
            lambda prompts: decode_canvas(self.model, prompts, config, device=device),
        )
