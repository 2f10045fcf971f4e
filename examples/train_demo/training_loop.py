# SPDX-License-Identifier: Apache-2.0
"""The optimisation loop of the example models: AdamW, warm-up, cosine decay, progress lines."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import dataset

WEIGHT_DECAY = 0.05


@dataclass(frozen=True)
class LoopOptions:
    """Length and learning rate of a run; ``log_every`` steps share one progress line."""

    steps: int
    peak_lr: float
    warmup: int = 100
    log_every: int = 50
    label: str = ""
    #: Ends the run early: the decay then follows the time when that is further on than the steps.
    max_seconds: float = math.inf


def learning_rate(step: int, peak: float, warmup: int, progress: float) -> float:
    """Linear warm-up, then cosine to zero; ``progress`` is the finished share of the decay."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW; norms and biases are not decayed."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    is_cuda = parameters[0].is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=is_cuda)


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Cross entropy of ``logits`` [..., vocabulary], averaged with ``weights`` [...]."""
    losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    flat = weights.flatten().float()
    return (losses * flat).sum() / flat.sum().clamp(min=1.0)


def run_steps(
    model: nn.Module,
    batches: Iterable[dataset.Sequences],
    compute_loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    options: LoopOptions,
    after_step: Callable[[float], None] | None = None,
) -> list[float]:
    """Train until the batches, the steps or the seconds end; return the loss of each step.

    ``compute_loss`` is given the tokens, prompt lengths and used lengths of one batch,
    ``after_step`` the finished share of the run.
    """
    device = next(model.parameters()).device
    optimizer = make_optimizer(model, options.peak_lr)
    losses: list[Tensor] = []
    started = time.perf_counter()
    for step, sequences in enumerate(batches):
        elapsed = time.perf_counter() - started
        decay = (step - options.warmup) / max(1, options.steps - options.warmup)
        progress = max(decay, elapsed / options.max_seconds)
        if step >= options.steps or progress >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.peak_lr, options.warmup, progress)
        # Autocast keeps the weights in fp32; a matrix product reads them as bf16. Its cache would
        # hand the casts of a forward without gradients to the one with gradients.
        is_cuda = device.type == "cuda"
        with torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=is_cuda, cache_enabled=False
        ):
            loss = compute_loss(
                torch.from_numpy(sequences.tokens).to(device).long(),
                torch.from_numpy(sequences.prompt_len).to(device).long(),
                torch.from_numpy(sequences.used_len).to(device).long(),
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if after_step is not None:
            after_step(progress)
        losses.append(loss.detach())
        if (step + 1) % options.log_every == 0 or step in (0, 9):
            recent = torch.stack(losses[-options.log_every :]).mean().item()
            elapsed = time.perf_counter() - started
            remaining = elapsed / (step + 1) * (options.steps - step - 1)
            print(
                f"{options.label}step {step + 1}/{options.steps}  loss {recent:.4f}  "
                f"{1e3 * elapsed / (step + 1):.1f} ms/step  elapsed {elapsed:.0f} s  "
                f"remaining {min(remaining, options.max_seconds - elapsed):.0f} s",
                flush=True,
            )
    values: list[float] = torch.stack(losses).tolist()
    if not all(math.isfinite(value) for value in values):
        raise RuntimeError("run_steps: expected finite losses, got at least one NaN or infinity")
    return values
