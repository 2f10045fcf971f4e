# SPDX-License-Identifier: Apache-2.0
"""TaylorSeer: what a value becomes at a step that is not computed, from its backward differences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["TaylorSeer"]


class TaylorSeer:
    """One value over the steps.

    Args:
        order: differences that are formed; 0 repeats the last value.
    """

    def __init__(self, order: int) -> None:
        self._order = order
        self._step = 0
        self._terms: list[torch.Tensor] = []

    @property
    def last(self) -> torch.Tensor | None:
        """What was computed last, if anything was."""
        return self._terms[0] if self._terms else None

    def keep(self, value: torch.Tensor, step: int) -> None:
        """Takes what was computed at a step.

        Differences are divided by the steps since the last computed one, so a line is continued exactly
        over any gap; a curve of a higher order is not.
        """
        before, width = self._terms, step - self._step
        terms = [value]
        for known in before[: self._order]:
            if known.shape != value.shape:
                break
            terms.append((terms[-1] - known) / width)
        self._terms, self._step = terms, step

    def at(self, step: int) -> torch.Tensor:
        """The value at a later step; there must be a computed one."""
        distance = step - self._step
        value = self._terms[0]
        for power, term in enumerate(self._terms[1:], 1):
            value = value + term * (distance**power / math.factorial(power))
        return value
