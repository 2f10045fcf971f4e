# SPDX-License-Identifier: Apache-2.0
"""The shapes of decode steps, and the CUDA graphs of their forwards.

All strategies but one have a single number of rows per request. fast_dllm_v2 runs whole blocks or
sub-blocks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.log import get_logger, warn_once
from diffulex.runner.step_graphs import StepGraphs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.runner.context_classes import ContextClasses
    from diffulex_ext import _core

__all__ = ["Bucket", "DecodeGraphs", "ForwardGraphs", "decode_buckets", "graph_buckets"]

logger = get_logger(__name__)

_SMALL_BUCKETS = (1, 2, 4, 8)
_BUCKET_STEP = 16
_MAX_BUCKET = 512


class Bucket(NamedTuple):
    """Shape of a padded decode step."""

    num_reqs: int
    rows_per_request: int
    max_context_len: int

    @property
    def num_rows(self) -> int:
        """Rows of all requests."""
        return self.num_reqs * self.rows_per_request


def graph_buckets(max_num_reqs: int) -> tuple[int, ...]:
    """Request counts that get a graph: 1, 2, 4, 8, multiples of 16, and the maximum itself."""
    cap = min(max_num_reqs, _MAX_BUCKET)
    counts = {*_SMALL_BUCKETS, *range(_BUCKET_STEP, cap + 1, _BUCKET_STEP), cap}
    return tuple(sorted(count for count in counts if count <= cap))


def decode_buckets(config: Config) -> dict[int, tuple[int, ...]]:
    """Rows of a request -> ascending request counts to which decode steps are padded."""
    decoding, scheduler = config.decoding, config.scheduler
    is_dual = decoding.decoding_strategy == "fast_dllm_v2"
    row_counts = {config.decode_rows}
    if is_dual and decoding.fdv2_use_block_cache:
        row_counts.add(decoding.block_size)
    buckets = {}
    for rows in sorted(row_counts, reverse=True):
        # Row budgets bound a decode batch as well: larger buckets could never be used.
        most = min(scheduler.max_num_reqs, max(scheduler.max_num_batched_tokens // rows, 1))
        if is_dual and decoding.fdv2_exact_graph_buckets:
            # Padding changes the shape of products, the shape the last bits, and those a token.
            buckets[rows] = tuple(range(1, min(most, _MAX_BUCKET) + 1))
        else:
            buckets[rows] = graph_buckets(most)
    return buckets


class DecodeGraphs:
    """Finds the bucket of a plan, and replays its forward if there are graphs.

    Without graphs, steps on CUDA are padded all the same: how kernels cut their work depends on the
    shape of the batch, and with it the last bits of a result.
    """

    def __init__(self, buckets: Mapping[int, tuple[int, ...]], classes: ContextClasses) -> None:
        self.buckets = dict(buckets)
        self.num_steps = 0
        self.num_fallbacks = 0
        self._classes = classes
        #: Graphs of forwards, where decode steps use graphs.
        self.forwards: ForwardGraphs | None = None

    def shapes(self) -> tuple[Bucket, ...]:
        """Every padded step, the largest first; of equal ones the longest context first."""
        return tuple(
            Bucket(num_reqs, rows, bound)
            for rows, counts in self.buckets.items()
            for num_reqs in reversed(counts)
            for bound in reversed(self._classes.bounds(num_reqs, rows))
        )

    def bucket_for(self, plan: _core.StepPlan) -> Bucket | None:
        """Shape a decode plan is padded to; None: run as it is."""
        if plan.kind.name != "DECODE":
            return None
        rows = plan.uniform_q_len
        counts = self.buckets.get(rows)
        if counts is not None:
            bucket = self.bucket_of_rows(plan, rows)
            if bucket is not None:
                return bucket
            reason = f"{plan.num_reqs} requests exceed the largest bucket {counts[-1]}"
        else:
            known = " or ".join(map(str, self.buckets))
            reason = f"requests have other than {known} rows"
        if self.forwards is not None:
            self._count_fallback(reason)
        return None

    def bucket_of_rows(self, plan: _core.StepPlan, rows: int) -> Bucket | None:
        """Shape of a decode plan whose requests are padded to `rows` rows each; None: none fits."""
        for num_reqs in self.buckets[rows]:
            if num_reqs >= plan.num_reqs:
                return Bucket(num_reqs, rows, self.bound(num_reqs, rows, plan.max_context_len))
        return None

    def bound(self, num_reqs: int, rows: int, context_len: int) -> int:
        """Bound on the context that a decode step of this shape is launched for."""
        return self._classes.bound(num_reqs, rows, context_len)

    def _count_fallback(self, reason: str) -> None:
        """A decode step runs without a graph although there are graphs."""
        self.num_fallbacks += 1
        warn_once(logger, f"graph fallback: {reason}", "eager decode step: %s", reason)

    def replay(self, bucket: Bucket) -> Tensor:
        """Hidden states of the bucket's rows; valid until the next replay."""
        assert self.forwards is not None
        self.num_steps += 1
        return self.forwards.replay(bucket)


class ForwardGraphs:
    """Graphs of forwards over the static arrays of a step, for samplers that run on their own.

    Args:
        config: names the device, the dtype and H.
        max_rows: rows of the largest bucket.
        fill: puts legal values into the static arrays of a step, for a bucket and smaller ones.
        forward: hidden states of a bucket from the static arrays of a step.
    """

    def __init__(
        self,
        config: Config,
        max_rows: int,
        fill: Callable[[Bucket], None],
        forward: Callable[[Bucket], Tensor],
    ) -> None:
        device = torch.device(config.model.device)
        self._graphs: StepGraphs[Bucket] = StepGraphs(device)
        self._fill, self._forward = fill, forward
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        hidden_size = config.model.spec.hidden_size
        self._hidden = torch.zeros(max_rows, hidden_size, dtype=dtype, device=device)

    @property
    def captured(self) -> tuple[Bucket, ...]:
        """Shapes that have a graph."""
        return self._graphs.keys

    def capture(self, shapes: tuple[Bucket, ...]) -> None:
        """Captures these shapes; nothing may be in flight. Others follow when they are needed."""
        start = time.perf_counter()
        for bucket in shapes:
            self._capture(bucket)
        seconds = time.perf_counter() - start
        logger.info("captured %d CUDA graphs of decode forwards in %.1f s", len(shapes), seconds)

    def prepare(self, bucket: Bucket) -> None:
        """Captures a shape that has no graph yet: before its arrays are filled, nothing in flight."""
        if bucket not in self._graphs:
            self._capture(bucket)

    def _capture(self, bucket: Bucket) -> None:
        hidden = self._hidden[: bucket.num_rows]
        self._graphs.capture(
            bucket, lambda: self._fill(bucket), lambda: _copy(hidden, self._forward(bucket))
        )

    def replay(self, bucket: Bucket) -> Tensor:
        """Hidden states of the bucket's rows; valid until the next replay."""
        self._graphs.replay(bucket)
        return self._hidden[: bucket.num_rows]


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
