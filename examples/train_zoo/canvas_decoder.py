# SPDX-License-Identifier: Apache-2.0
"""Reference decoder of diffusion_gemma: the canvas loop without a cache, batched over requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from model import additive_mask
from reference_decoder import Completion, run_requests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from canvas_model import CanvasModel


@dataclass(frozen=True)
class CanvasConfig:
    """Sampler parameters under their published names, and the limits of a request."""

    stop_ids: tuple[int, ...]
    canvas_length: int
    max_denoising_steps: int = 48
    t_min: float = 0.4
    t_max: float = 0.8
    entropy_bound: float = 0.1
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    max_tokens: int = 96
    seed: int = 0

    def temperature(self, steps_left: Tensor) -> Tensor:
        """Temperature of the step with ``steps_left`` (the current one included) to go."""
        span = self.t_max - self.t_min
        return self.t_min + span * steps_left / self.max_denoising_steps


def accept_by_entropy(entropy: Tensor, bound: float | Tensor) -> Tensor:
    """Positions whose predecessors in ascending order of entropy sum to at most ``bound``."""
    ordered, order = entropy.sort(dim=-1, stable=True)
    within = ordered.cumsum(-1) - ordered <= bound
    return torch.zeros_like(within).scatter(-1, order, within)


def canvas_visibility(
    prefix_len: Tensor, num_canvases: int, canvas_length: int, context_len: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Positions and visibility of the rows [canvases | context].

    prefix_len: [batch] committed length before the first canvas. A canvas row sees the context
    before its canvas (with a window only the last ``window`` - 1 positions of it) and its canvas; a
    context row is causal (with a window, it sees that many positions, itself included).
    """
    device, batch = prefix_len.device, prefix_len.shape[0]
    relative = torch.arange(num_canvases * canvas_length, device=device)
    canvas_pos = prefix_len[:, None] + relative
    context_pos = torch.arange(context_len, device=device).expand(batch, -1)
    which = relative // canvas_length
    start = prefix_len[:, None] + which * canvas_length
    canvas_to_canvas = (which[:, None] == which[None, :]).expand(batch, -1, -1)
    canvas_to_context = context_pos[:, None, :] < start[:, :, None]
    causal = context_pos[:, None, :] <= context_pos[:, :, None]
    if window is not None:
        canvas_to_context = canvas_to_context & (
            context_pos[:, None, :] >= start[:, :, None] - (window - 1)
        )
        causal = causal & (context_pos[:, :, None] - context_pos[:, None, :] < window)
    context_to_canvas = torch.zeros_like(canvas_to_context).transpose(1, 2)
    visible = torch.cat(
        [
            torch.cat([canvas_to_canvas, canvas_to_context], dim=2),
            torch.cat([context_to_canvas, causal], dim=2),
        ],
        dim=1,
    )
    return torch.cat([canvas_pos, context_pos], dim=1), visible


@dataclass
class CanvasRequest:
    """State of one request. ``tokens``: prompt and committed canvases."""

    config: CanvasConfig
    prompt: list[int]
    tokens: list[int] = field(init=False)
    #: Canvas of the running denoising; None before an encoder forward has made room for it.
    canvas: Tensor | None = None
    signal: Tensor | None = None
    last_argmax: list[int] | None = None
    run_length: int = 0
    steps_left: int = 0
    nfe: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def begin_step(self) -> None:
        """Nothing: the phase follows from ``canvas``."""

    def commit(self, canvas: list[int]) -> None:
        """Make the canvas final; the next forward encodes it."""
        self.tokens += canvas
        self.canvas = self.signal = self.last_argmax = None
        self.run_length = 0

    def completion(self) -> Completion | None:
        """The result if the request has ended, else None."""
        length = len(self.prompt)
        generated = self.tokens[length : length + self.config.max_tokens]
        for index, token in enumerate(generated):
            if token in self.config.stop_ids:
                return Completion(generated[:index], self.nfe, "eos_token_generated")
        if len(generated) < self.config.max_tokens:
            return None
        return Completion(generated, self.nfe, "max_new_tokens_reached")


@torch.no_grad()
def denoise(
    model: CanvasModel,
    running: list[CanvasRequest],
    config: CanvasConfig,
    generator: torch.Generator,
) -> None:
    """One decoder forward of every request and the sampler's step."""
    device, size, shape = generator.device, config.canvas_length, model.shape
    prefix = torch.tensor([len(request.tokens) for request in running], device=device)
    context_len = int(prefix.max())
    context = torch.tensor(
        [r.tokens + [0] * (context_len - len(r.tokens)) for r in running], device=device
    )
    positions, full = canvas_visibility(prefix, 1, size, context_len, None)
    _, sliding = canvas_visibility(prefix, 1, size, context_len, shape.sliding_window)
    canvas = torch.stack([r.canvas for r in running if r.canvas is not None])
    zero = torch.zeros(size, shape.hidden_size, device=device)
    signal = torch.stack([zero if r.signal is None else r.signal for r in running])
    logits, _ = model(
        canvas, signal, context, positions, additive_mask(full), additive_mask(sliding)
    )
    steps_left = torch.tensor([r.steps_left for r in running], device=device)
    tempered = logits / config.temperature(steps_left)[:, None, None]
    log_p = tempered.log_softmax(-1)
    probabilities = log_p.exp()
    entropy = -(probabilities * log_p).sum(-1)
    argmax = tempered.argmax(-1)
    flat = probabilities.flatten(0, 1)
    drawn = torch.multinomial(flat, 1, generator=generator).view_as(argmax)
    noise = torch.randint(shape.vocab_size, argmax.shape, device=device, generator=generator)
    following = torch.where(accept_by_entropy(entropy, config.entropy_bound), drawn, noise)
    signals = model.soft_signal(tempered)
    confident = (entropy.mean(-1) < config.confidence_threshold).tolist()
    argmax_rows = argmax.tolist()
    for row, request in enumerate(running):
        is_same = request.last_argmax == argmax_rows[row]
        request.run_length = request.run_length + 1 if is_same else 0
        is_stable = request.run_length >= config.stability_threshold
        if (is_stable and confident[row]) or request.steps_left == 1:
            request.commit(argmax_rows[row])
            continue
        request.canvas, request.signal = following[row], signals[row]
        request.last_argmax = argmax_rows[row]
        request.steps_left -= 1


def decode_canvas(
    model: CanvasModel,
    prompts: Sequence[list[int]],
    config: CanvasConfig,
    *,
    device: torch.device,
    max_batch: int = 1024,
) -> list[Completion]:
    """Decode all prompts; the random draws depend on the batch, unlike those of an engine."""
    generator = torch.Generator(device=device).manual_seed(config.seed)

    def step(running: list[CanvasRequest]) -> None:
        encoding = [request for request in running if request.canvas is None]
        denoising = [request for request in running if request.canvas is not None]
        if denoising:
            denoise(model, denoising, config, generator)
        for request in encoding:
            request.canvas = torch.randint(
                model.shape.vocab_size, (config.canvas_length,), device=device, generator=generator
            )
            request.steps_left = config.max_denoising_steps
        for request in running:
            request.nfe += 1

    return run_requests([CanvasRequest(config, list(p)) for p in prompts], step, max_batch)
