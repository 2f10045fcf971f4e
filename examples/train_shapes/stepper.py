# SPDX-License-Identifier: Apache-2.0
"""A training step that runs as one CUDA graph, for as many seconds as it is given."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

_WARMUP_SHARE = 0.03
_LEAST_RATE = 0.02
_NUM_EAGER_STEPS = 4
_SYNCHRONIZE_EVERY = 25


def rate_at(share: float) -> float:
    """Learning rate, relative to the highest, after a share of the time: warm-up, then cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return min(1.0, share / _WARMUP_SHARE) * (cosine * (1 - _LEAST_RATE) + _LEAST_RATE)


class Stepper:
    """AdamW over `loss_fn`, captured as a whole on CUDA; small models are bound by launches.

    Args:
        parameters: what is trained.
        rate: highest learning rate.
        loss_fn: draws its own batch, without a host synchronisation.
        after: called at the end of every step, inside the graph.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        rate: float,
        loss_fn: Callable[[], torch.Tensor],
        *,
        weight_decay: float = 0.01,
        after: Callable[[], None] | None = None,
    ) -> None:
        device = parameters[0].device
        self._is_cuda = device.type == "cuda"
        self._parameters = parameters
        self._rate = rate
        self._loss_fn = loss_fn
        self._after = after
        self._graph: torch.cuda.CUDAGraph | None = None
        self._optimizer = torch.optim.AdamW(
            parameters,
            lr=torch.tensor(rate, device=device),
            betas=(0.9, 0.95),
            weight_decay=weight_decay,
            fused=True if self._is_cuda else None,
            capturable=self._is_cuda,
        )
        #: Running mean of the loss, on the device.
        self.loss = torch.zeros((), device=device)
        self.num_steps = 0

    def run(self, seconds: float, name: str, log: Callable[[str], None], every: int = 1000) -> None:
        """Trains for so long; the first step is not counted, it may be a capture."""
        if self._is_cuda:
            self._capture()
        else:
            self._step()
        start = time.monotonic()
        self.num_steps = 0
        while (share := (time.monotonic() - start) / seconds) < 1:
            for group in self._optimizer.param_groups:
                group["lr"].fill_(self._rate * rate_at(share))
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()
            self.num_steps += 1
            # Launches run ahead of the device; the clock must not.
            if self._is_cuda and self.num_steps % _SYNCHRONIZE_EVERY == 0:
                torch.cuda.synchronize()
            if self.num_steps % every == 0:
                log(f"{name} {self.num_steps}: loss {self.loss.item():.4f}")
        milliseconds = 1e3 * seconds / max(1, self.num_steps)
        log(
            f"{name}: {self.num_steps} steps, {milliseconds:.1f} ms each, loss {self.loss.item():.4f}"
        )

    def _step(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._loss_fn()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0, foreach=True)
        self._optimizer.step()
        with torch.no_grad():
            self.loss.lerp_(loss.detach().float(), 0.02)
            if self._after is not None:
                self._after()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_NUM_EAGER_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()
