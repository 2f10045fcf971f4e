# SPDX-License-Identifier: Apache-2.0
"""diffusion_gemma: canvases denoised by transformers' own model, decided by the rules alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from brute_force.draws import INIT_STREAM, RENOISE_STREAM, uniform
from brute_force.proposals import softmax
from brute_force.request_run import RequestRun
from brute_force.settings import LOGIT_ERROR, RequestSettings, Settings

#: (canvas, tokens to encode first or None, tempered logits of the step before or None) -> logits.
Denoise = Callable[[list[int], list[int] | None, torch.Tensor | None], torch.Tensor]


@dataclass
class CanvasSettings:
    """The schedule and the bounds."""

    vocab_size: int
    max_denoising_steps: int = 48
    t_min: float = 0.4
    t_max: float = 0.8
    entropy_bound: float = 0.1
    stability_threshold: int = 1
    confidence_threshold: float = 0.005


class CanvasRun(RequestRun):
    """Encodes the prompt, then denoises canvas after canvas."""

    def __init__(
        self,
        denoise: Denoise,
        settings: Settings,
        canvas: CanvasSettings,
        prompt: list[int],
        request: RequestSettings,
        noise: np.random.Generator | None = None,
    ) -> None:
        super().__init__(settings, prompt, request)
        self.denoise, self.rules, self.noise = denoise, canvas, noise
        self.to_encode: list[int] | None = list(prompt)
        self.is_encoded = False
        self.start = self.prompt_len
        self._open_canvas()

    def _open_canvas(self) -> None:
        size = min(self.settings.block_size, self.settings.max_model_len - self.start)
        self.canvas = [self._random_id(self.start + i, 0, INIT_STREAM) for i in range(size)]
        self.steps_done = 0
        self.argmaxes: list[list[int]] = []
        self.signal: torch.Tensor | None = None

    def _random_id(self, position: int, step: int, stream: int) -> int:
        return int(uniform(self.request.seed, position, step, stream) * self.rules.vocab_size)

    def step(self) -> None:
        self.nfe += 1
        if not self.is_encoded:
            # The model below encodes together with the next denoising step.
            self.is_encoded = True
            self.decided.append(0)
            return
        before = len(self.tokens)
        self._denoise_once()
        self.decided.append(len(self.tokens) - before)

    def _denoise_once(self) -> None:
        rules = self.rules
        left = rules.max_denoising_steps - self.steps_done
        temperature = rules.t_min + (rules.t_max - rules.t_min) * left / rules.max_denoising_steps
        logits = self.denoise(self.canvas, self.to_encode, self.signal)
        self.to_encode = None
        if self.noise is not None:
            error = self.noise.normal(scale=LOGIT_ERROR / 10, size=tuple(logits.shape))
            logits = logits + torch.from_numpy(error).to(logits.dtype)
        tempered = logits / temperature
        distributions = [softmax(row) for row in tempered.double().numpy()]
        argmax = [int(np.argmax(row)) for row in logits.numpy()]
        entropies = [float(-(p * np.log(np.maximum(p, 1e-300))).sum()) for p in distributions]
        accepted, total = set(), 0.0
        for i in sorted(range(len(entropies)), key=lambda i: (entropies[i], i)):
            if total > rules.entropy_bound:
                break
            accepted.add(i)
            total += entropies[i]
        same = [a == argmax for a in self.argmaxes[::-1]]
        run = same.index(False) if False in same else len(same)
        is_stable = run >= rules.stability_threshold
        is_confident = float(np.mean(entropies)) < rules.confidence_threshold
        self.argmaxes.append(argmax)
        self.signal = tempered
        if (is_stable and is_confident) or left == 1:
            self._commit(argmax)
            return
        for i, p in enumerate(distributions):
            position = self.start + i
            if i in accepted:
                cumulative = np.cumsum(p)
                draw = uniform(self.request.seed, position, self.steps_done)
                above = np.flatnonzero(cumulative > draw * cumulative[-1])
                self.canvas[i] = int(above[0]) if len(above) else len(p) - 1
            else:
                self.canvas[i] = self._random_id(position, self.steps_done, RENOISE_STREAM)
        self.steps_done += 1

    def _commit(self, argmax: list[int]) -> None:
        end = min(self.start + len(argmax), self.limit)
        self.tokens.update(zip(range(self.start, end), argmax, strict=False))
        self.to_encode, self.is_encoded = argmax, False
        self.start += len(argmax)
        if self.start < self.limit:
            self._open_canvas()
