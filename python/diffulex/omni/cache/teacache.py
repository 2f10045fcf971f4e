# SPDX-License-Identifier: Apache-2.0
"""TeaCache: a polynomial of how much the input of the first block changes says when to compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from diffulex.omni.cache.base import Branch, CacheBackend, Course, Streams, relative_change
from diffulex.omni.cache.tea_settings import tea_settings

if TYPE_CHECKING:
    import torch

    from diffulex.omni.groups import RankGroups
    from diffulex.omni.registry import PipelineSpec, TeaCacheSpec

__all__ = ["TeaCacheBackend", "TeaCacheBranch", "polynomial"]


def polynomial(coefficients: Sequence[float], value: float) -> float:
    """Its value; the coefficient of the highest power comes first."""
    result = 0.0
    for coefficient in coefficients:
        result = result * value + coefficient
    return result


class TeaCacheBranch(Branch):
    """Adds up estimated changes and computes when they reach the threshold.

    Args:
        indicator: what is compared, from the first block and its arguments.
        first_steps: steps that are computed whatever changes; so is the last one.
    """

    def __init__(
        self,
        course: Course,
        groups: RankGroups | None,
        *,
        indicator: Callable[[Any, Mapping[str, Any]], torch.Tensor],
        coefficients: Sequence[float],
        threshold: float,
        first_steps: int,
    ) -> None:
        super().__init__(course, groups)
        self._indicator = indicator
        self._coefficients = coefficients
        self._threshold = threshold
        self._first_steps = first_steps
        self._sum = 0.0
        self._before: torch.Tensor | None = None
        self._residual: Streams | None = None

    def decide(
        self, block: Any, arguments: Mapping[str, Any], start: torch.Tensor, streams: Streams
    ) -> bool:
        before, self._before = self._before, self._indicator(block, arguments)
        is_skipped = self._adds_up(before, self._before, streams)
        if not is_skipped:
            self._sum = 0.0
        return is_skipped

    def _adds_up(self, before: torch.Tensor | None, now: torch.Tensor, streams: Streams) -> bool:
        """Whether the sum stays below the threshold."""
        is_forced = self.step < self._first_steps or self.step == self.course.own - 1
        if is_forced or self._residual is None or not streams.takes(self._residual):
            return False
        if before is None or before.shape != now.shape:
            return False
        change = relative_change(now, before, self.groups)
        if change is None:
            return False
        estimate = abs(polynomial(self._coefficients, change))
        self.diffs[str(self.step)] = estimate
        self._sum += estimate
        return self._sum < self._threshold

    def keep(self, residual: Streams) -> None:
        # The text is not read after the last block.
        self._residual = Streams(residual.image, None)

    def recall(self) -> Streams:
        assert self._residual is not None
        return self._residual


class TeaCacheBackend(CacheBackend):
    """TeaCache over all blocks of a transformer."""

    def middle(self, num_blocks: int) -> tuple[int, int]:
        return 0, num_blocks

    def branch_maker(
        self, spec: PipelineSpec, transformer: Any, *, is_alone: bool
    ) -> Callable[[Course, RankGroups | None], Branch]:
        settings = tea_settings(self.config, spec, dict(transformer.config), is_alone=is_alone)
        tea: TeaCacheSpec = settings.spec
        return partial(
            TeaCacheBranch,
            indicator=tea.indicator,
            coefficients=settings.coefficients,
            threshold=settings.threshold,
            first_steps=max(1, tea.first_steps),
        )
