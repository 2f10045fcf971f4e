# SPDX-License-Identifier: Apache-2.0
"""A cache that computes every step and records what TeaCache would have compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from diffulex.omni.cache.base import (
    Branch,
    CacheBackend,
    CacheSummary,
    Course,
    Streams,
    relative_change,
)
from diffulex.omni.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    import torch

    from diffulex.omni.groups import RankGroups
    from diffulex.omni.registry import PipelineSpec

__all__ = ["RecordingBackend"]


class _Recorder(Branch):
    """Pairs of changes: of the indicator, and of what the blocks add to the image."""

    def __init__(
        self,
        course: Course,
        groups: RankGroups | None,
        *,
        indicator: Callable[[Any, Mapping[str, Any]], torch.Tensor],
    ) -> None:
        super().__init__(course, groups)
        self._indicator = indicator
        self._before: torch.Tensor | None = None
        self._residual: torch.Tensor | None = None
        self._change: float | None = None
        self.pairs: list[tuple[float, float]] = []

    def decide(
        self, block: Any, arguments: Mapping[str, Any], start: torch.Tensor, streams: Streams
    ) -> bool:
        before, self._before = self._before, self._indicator(block, arguments)
        is_alike = before is not None and before.shape == self._before.shape
        self._change = relative_change(self._before, before, self.groups) if is_alike else None  # type: ignore[arg-type]
        return False

    def keep(self, residual: Streams) -> None:
        before, self._residual = self._residual, residual.image
        if before is None or self._change is None:
            return
        change = relative_change(residual.image, before, self.groups)
        if change is not None:
            self.pairs.append((self._change, change))

    def recall(self) -> Streams:
        raise AssertionError


class RecordingBackend(CacheBackend):
    """Over all blocks; the summary of a branch has its `pairs`."""

    def middle(self, num_blocks: int) -> tuple[int, int]:
        return 0, num_blocks

    def branch_maker(
        self, spec: PipelineSpec, transformer: Any, *, is_alone: bool
    ) -> Callable[[Course, RankGroups | None], Branch]:
        if spec.tea_cache is None:
            raise UnsupportedFeatureError(
                f"--fit-teacache: expected a pipeline with an indicator, got {spec.name}"
            )
        return partial(_Recorder, indicator=spec.tea_cache.indicator)

    def summary(self) -> CacheSummary:
        found = super().summary()
        for label, name, branch in self.branches():
            assert isinstance(branch, _Recorder)
            found[label][name]["pairs"] = list(branch.pairs)
        return found
