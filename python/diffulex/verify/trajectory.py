# SPDX-License-Identifier: Apache-2.0
"""What a model was fed and answered in every forward of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from diffulex import Diffulex, SamplingParams
    from diffulex_ext import _core

__all__ = ["Forward", "Trajectory", "record"]


@dataclass(slots=True)
class Forward:
    """One forward of one request.

    Attributes:
        positions: of its rows.
        token_ids: of its rows.
        is_stored: whether keys and values of each row enter the cache.
        context: cached tokens before it.
        logits_rows: rows whose logits were asked for.
        logits: [rows, V] float32 on the CPU, as the model gave them; None: none were asked for.
    """

    positions: list[int]
    token_ids: list[int]
    is_stored: list[bool]
    context: int
    logits_rows: list[int]
    logits: torch.Tensor | None = None


@dataclass(slots=True)
class Trajectory:
    """All forwards of one request.

    Attributes:
        prompt: its token ids.
        forwards: in order.
        answer: the tokens that came of it, also those after its end.
    """

    prompt: list[int]
    forwards: list[Forward] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)

    def states(self) -> Iterator[tuple[Forward, list[int]]]:
        """Each forward with the tokens that it saw: those in the cache, then its own."""
        cached: dict[int, int] = {}
        for forward in self.forwards:
            rows = zip(forward.positions, forward.token_ids, forward.is_stored, strict=True)
            fed = list(rows)
            own = {position: token for position, token, _ in fed}
            seen = {**{p: t for p, t in cached.items() if p < forward.context}, **own}
            yield forward, [seen[position] for position in range(len(seen))]
            cached.update({position: token for position, token, stored in fed if stored})


class _Recorder:
    """Listens to the steps of an engine and to its head."""

    def __init__(self, model: Any) -> None:
        self.forwards: list[Forward] = []
        self._model = model
        self._compute = model.compute_logits

    def before_step(self, plan: _core.StepPlan) -> None:
        stop = int(plan.cu_seqlens_q[1])
        self.forwards.append(
            Forward(
                plan.positions[:stop].tolist(),
                plan.input_ids[:stop].tolist(),
                (plan.slot_mapping[:stop] >= 0).tolist(),
                int(plan.context_lens[0]),
                plan.logits_rows[: plan.num_logits_rows].tolist(),
            )
        )

    def after_step(self) -> None:
        """Nothing: the logits came with the step."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head of the model, whose result is kept."""
        logits: torch.Tensor = self._compute(hidden)
        if self.forwards:
            # A copy: samplers write into theirs.
            self.forwards[-1].logits = logits.detach().to("cpu", torch.float32, copy=True)
        return logits


def record(
    engine: Diffulex, executor: Any, model: Any, prompt: Sequence[int], params: SamplingParams
) -> Trajectory:
    """Decodes one prompt on an engine without graphs that does not run ahead."""
    recorder = _Recorder(model)
    executor.observer = recorder
    model.compute_logits = recorder.compute_logits
    try:
        output = engine.generate([list(prompt)], params, summary=False)[0]
    finally:
        executor.observer = None
        del model.compute_logits
    return Trajectory(list(prompt), recorder.forwards, list(output.generated_ids))
