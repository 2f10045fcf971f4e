# SPDX-License-Identifier: Apache-2.0
"""DBCache: the first blocks always run, and how much their residual changes says whether the rest does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from diffulex.omni.cache.base import Branch, CacheBackend, Course, Streams, relative_change
from diffulex.omni.cache.scm import scm_mask
from diffulex.omni.cache.taylorseer import TaylorSeer
from diffulex.omni.errors import RequestError, UnsupportedFeatureError

if TYPE_CHECKING:
    import torch

    from diffulex.omni.config_table import DiffusionCacheConfig
    from diffulex.omni.groups import RankGroups
    from diffulex.omni.registry import PipelineSpec

__all__ = ["DBCacheBackend", "DBCacheBranch"]


class DBCacheBranch(Branch):
    """Decides by warm-up, mask, counts and threshold, in this order.

    Args:
        config: the settings.
    """

    def __init__(
        self,
        course: Course,
        groups: RankGroups | None,
        *,
        config: DiffusionCacheConfig,
    ) -> None:
        super().__init__(course, groups)
        self._config = config
        self._mask = self._make_mask()
        most = config.max_warmup_steps
        if self._mask is not None:
            most = min(most, len(list(takewhile(bool, self._mask))))
        self._warm_up = range(0, most, config.warmup_interval)
        order = config.taylorseer_order if config.enable_taylorseer else 0
        self._image, self._text = TaylorSeer(order), TaylorSeer(order)
        self._residual: torch.Tensor | None = None
        self._before: torch.Tensor | None = None
        self._run = 0
        self._sum = 0.0

    def _make_mask(self) -> Sequence[int] | None:
        given, policy = self._config.scm_steps_mask, self._config.scm_steps_mask_policy
        first, count, total = self.course
        if given is None:
            return None if policy is None else scm_mask(policy, count)
        if len(given) != total:
            raise RequestError(
                f"scm_steps_mask: expected one value for each of {total} steps, got {len(given)}"
            )
        return given[first : first + count]

    def decide(
        self, block: Any, arguments: Mapping[str, Any], start: torch.Tensor, streams: Streams
    ) -> bool:
        self._residual = streams.image - start
        is_skipped = self._recall_fits(streams) and self._is_close(self._residual)
        if is_skipped:
            self._run += 1
        else:
            self._run, self._before = 0, self._residual
        return is_skipped

    def _recall_fits(self, streams: Streams) -> bool:
        image = self._image.last
        return image is not None and streams.takes(Streams(image, self._text.last))

    def _is_close(self, residual: torch.Tensor) -> bool:
        """The first rule that holds; there is something to recall."""
        config = self._config
        if self.step in self._warm_up or (self._mask is not None and self._mask[self.step]):
            return False
        if self._mask is not None and config.scm_steps_policy == "static":
            return True
        if self._is_used_up():
            return False
        threshold = config.residual_diff_threshold
        if threshold <= 0 or threshold >= 1:
            return threshold >= 1
        return self._change(residual) < threshold

    def _is_used_up(self) -> bool:
        """Whether as much as is allowed has been skipped, or has changed."""
        config = self._config
        most = config.max_accumulated_residual_diff_threshold
        return (
            0 <= config.max_cached_steps <= len(self.cached)
            or 0 <= config.max_continuous_cached_steps <= self._run
            or (most is not None and self._sum >= most)
        )

    def _change(self, residual: torch.Tensor) -> float:
        if self._before is None or self._before.shape != residual.shape:
            return float("inf")
        change = relative_change(residual, self._before, self.groups)
        if change is None:
            return float("inf")
        self.diffs[str(self.step)] = change
        self._sum += change
        return change

    def keep(self, residual: Streams) -> None:
        self._image.keep(residual.image, self.step)
        if residual.text is not None:
            self._text.keep(residual.text, self.step)

    def recall(self) -> Streams:
        text = None if self._text.last is None else self._text.at(self.step)
        return Streams(self._image.at(self.step), text)


class DBCacheBackend(CacheBackend):
    """DBCache, with step masks and TaylorSeer where they are configured."""

    def block_lists(
        self, spec: PipelineSpec, name: str, transformer: Any
    ) -> Sequence[tuple[str, Sequence[Any]]]:
        joined = super().block_lists(spec, name, transformer)
        if self.config.block_groups == "joined" or len(spec.block_lists) == 1:
            return joined
        return [(f"{name}.{lst}", list(getattr(transformer, lst))) for lst in spec.block_lists]

    def middle(self, num_blocks: int) -> tuple[int, int]:
        first, last = self.config.Fn_compute_blocks, self.config.Bn_compute_blocks
        if first + last > num_blocks - 1:
            raise UnsupportedFeatureError(
                f"Fn_compute_blocks + Bn_compute_blocks: expected at most {num_blocks - 1} for"
                f" {num_blocks} blocks, got {first + last}"
            )
        return first, num_blocks - last

    def branch_maker(
        self, spec: PipelineSpec, transformer: Any, *, is_alone: bool
    ) -> Callable[[Course, RankGroups | None], Branch]:
        return partial(DBCacheBranch, config=self.config)
