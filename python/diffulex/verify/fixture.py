# SPDX-License-Identifier: Apache-2.0
"""Recorded answers of a checkpoint: prompts, the first logits after each, the tokens that followed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from diffulex.errors import CheckpointError
from diffulex.verify.numbers import check_same, distance, tolerance
from diffulex.verify.report import RuleError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from diffulex.config.config import Config
    from diffulex.verify.trajectory import Trajectory

__all__ = ["FILE_NAME", "Fixture", "check_fixture"]

#: Looked for beside the weights.
FILE_NAME = "diffulex_verify.safetensors"


@dataclass(frozen=True, slots=True)
class Fixture:
    """What a checkpoint answered where it was trusted.

    Attributes:
        prompts: token ids.
        logits: [rows, V] of the first block after each prompt, which is all masks but for the prompt's
            own tokens in it.
        answers: tokens of greedy decoding, one block at a time.
    """

    prompts: list[list[int]]
    logits: list[torch.Tensor]
    answers: list[list[int]]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Fixture:
        """What was just decoded."""
        first = [
            next(f.logits for f in trajectory.forwards if f.logits is not None)
            for trajectory in trajectories
        ]
        prompts = [trajectory.prompt for trajectory in trajectories]
        return cls(prompts, first, [trajectory.answer for trajectory in trajectories])

    def save(self, path: Path) -> None:
        """Writes one safetensors file: `<n>.prompt`, `<n>.logits`, `<n>.answer`."""
        tensors = {}
        for index, (prompt, logits, answer) in enumerate(
            zip(self.prompts, self.logits, self.answers, strict=True)
        ):
            tensors[f"{index}.prompt"] = torch.tensor(prompt)
            tensors[f"{index}.logits"] = logits.contiguous()
            tensors[f"{index}.answer"] = torch.tensor(answer)
        save_file(tensors, path)

    @classmethod
    def load(cls, path: Path) -> Fixture:
        """Reads what `save` wrote; CheckpointError for anything else."""
        try:
            tensors = load_file(path)
            count = len(tensors) // 3
            return cls(
                [tensors[f"{index}.prompt"].tolist() for index in range(count)],
                [tensors[f"{index}.logits"].float() for index in range(count)],
                [tensors[f"{index}.answer"].tolist() for index in range(count)],
            )
        except (OSError, SafetensorError, KeyError) as error:
            raise CheckpointError(
                f"fixture: {path}: expected a file of `diffulex verify --record`, got {error}"
            ) from error


def check_fixture(config: Config, trajectories: Sequence[Trajectory], fixture: Fixture) -> str:
    """The first logits after each prompt and the answers are the recorded ones."""
    kind, most = tolerance(config)
    now = Fixture.of(trajectories)
    worst = max(
        distance(kind, got, expected)
        for got, expected in zip(now.logits, fixture.logits, strict=True)
    )
    if not worst <= most:
        raise RuleError(
            f"expected a {kind} of at most {most:g} to the recorded logits, got {worst:.3g}"
        )
    if config.model.dtype != "float32":
        return f"{kind} {worst:.2g} of the logits (tokens are compared in float32)"
    same = check_same("as recorded", now.answers, fixture.answers)
    return f"{kind} {worst:.2g} of the logits, {same}"
