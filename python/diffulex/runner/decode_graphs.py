# SPDX-License-Identifier: Apache-2.0
"""The shapes of decode steps, and the CUDA graphs of their forwards.

All strategies but one have a single number of rows per request. fast_dllm_v2 runs whole blocks or
sub-blocks. With several blocks in flight most of these rows may be void: steps of the host then hold
the real ones alone, one request after another, and are padded to a share of all rows.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.distributed.layout import Sizes
from diffulex.log import get_logger, warn_once
from diffulex.ops.comm import CollectiveAlgorithm, collective_plan
from diffulex.runner.step_graphs import NUM_WARMUPS, StepGraphs
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.runner.context_classes import ContextClasses

__all__ = [
    "Bucket",
    "DecodeGraphs",
    "ForwardGraphs",
    "decode_buckets",
    "graph_buckets",
    "max_graph_rows",
    "packed_row_counts",
    "packs_rows",
    "products_per_row",
]

logger = get_logger(__name__)

_SMALL_BUCKETS = (1, 2, 4, 8)
_BUCKET_STEP = 16
_MAX_BUCKET = 512
# Most rows of a step that ranks share as a graph; fewer where kernels cannot exchange so many.
_MAX_SHARED_ROWS = 1024
# Rows of packed steps: these eighths of all rows, in whole tiles of the products.
_PACKED_EIGHTHS = (2, 3, 4, 6)
_PACKED_STEP = 32


class Bucket(NamedTuple):
    """Shape of a padded decode step."""

    num_reqs: int
    rows_per_request: int
    max_context_len: int
    #: Rows of the step where requests have their real rows alone; 0: every request has all its rows.
    packed_rows: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of all requests."""
        return self.packed_rows or self.num_reqs * self.rows_per_request


def max_graph_rows(config: Config) -> int | None:
    """Most rows of a step whose exchanges between ranks all go by kernels, as graphs need it.

    None where there is one rank.
    """
    num_ranks = Sizes.of_engine(config.parallel).world
    if num_ranks == 1:
        return None
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    # Models of canvases add up both branches of a layer at once.
    branches = 2 if config.decoding.traits.has_canvas else 1
    row_bytes = branches * config.model.spec.hidden_size * dtype.itemsize
    # The chosen id and eight statistics, and of each candidate its id and probability.
    record_words = 2 + 8 + 3 * config.decoding.token_merge_top_k
    rows = min(_MAX_SHARED_ROWS, _core.MAX_RECORD_BYTES // (4 * record_words))
    while collective_plan(num_ranks, rows * row_bytes) == CollectiveAlgorithm.LIBRARY:
        rows //= 2
    return rows


def products_per_row(config: Config) -> int:
    """Weights of a rank that a row is multiplied by there, about: what rows cost that are not left out."""
    return config.model.spec.products_per_row // Sizes.of_engine(config.parallel).world


def packs_rows(config: Config) -> bool:
    """Whether steps of the host leave out rows of blocks that are not open yet."""
    decoding = config.decoding
    return decoding.buffer_size > 1 and not decoding.traits.has_dual_cache


@functools.cache
def packed_row_counts(num_rows: int) -> tuple[int, ...]:
    """Ascending row counts to which packed steps are padded that could have `num_rows` rows."""
    unit = 8 * _PACKED_STEP
    counts = {-(-num_rows * eighths // unit) * _PACKED_STEP for eighths in _PACKED_EIGHTHS}
    return tuple(sorted(count for count in counts if count < num_rows))


def graph_buckets(max_num_reqs: int) -> tuple[int, ...]:
    """Request counts that get a graph: 1, 2, 4, 8, multiples of 16, and the maximum itself."""
    cap = min(max_num_reqs, _MAX_BUCKET)
    counts = {*_SMALL_BUCKETS, *range(_BUCKET_STEP, cap + 1, _BUCKET_STEP), cap}
    return tuple(sorted(count for count in counts if count <= cap))


def decode_buckets(config: Config) -> dict[int, tuple[int, ...]]:
    """Rows of a request -> ascending request counts to which decode steps are padded."""
    decoding, scheduler = config.decoding, config.scheduler
    is_dual = decoding.traits.has_dual_cache
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

    Args:
        buckets: rows of a request -> request counts.
        classes: bounds on the context.
        is_packed: decode plans hold real rows alone.
        is_strict: a decode step that no graph fits is a RuntimeError.
        max_rows: most rows of a step that may be a graph; None: any.
    """

    def __init__(
        self,
        buckets: Mapping[int, tuple[int, ...]],
        classes: ContextClasses,
        *,
        is_packed: bool = False,
        is_strict: bool = False,
        max_rows: int | None = None,
    ) -> None:
        self._max_rows = max_rows
        #: What the next plan was padded to, where that is decided already.
        self._padded: tuple[Bucket | None] | None = None
        self.is_packed, self.is_strict = is_packed, is_strict
        self.buckets = dict(buckets)
        self.num_steps = 0
        self.num_fallbacks = 0
        self._classes = classes
        #: Graphs of forwards, where decode steps use graphs.
        self.forwards: ForwardGraphs | None = None

    def shapes(self) -> tuple[Bucket, ...]:
        """Every padded step, the largest first; of equal ones the longest context first."""
        shapes = [
            Bucket(num_reqs, rows, bound, packed)
            for rows, counts in self.buckets.items()
            for num_reqs in reversed(counts)
            for packed in (0, *self.packed_counts(num_reqs * rows))
            for bound in reversed(self._classes.bounds(num_reqs, rows))
        ]
        return tuple(sorted(shapes, key=lambda bucket: -bucket.num_rows))

    def packed_counts(self, num_rows: int) -> tuple[int, ...]:
        """Ascending row counts of packed steps that could have `num_rows` rows, fewer than these."""
        return packed_row_counts(num_rows) if self.is_packed else ()

    def captured_shapes(self) -> tuple[Bucket, ...]:
        """Those of `shapes` that may be a graph."""
        return tuple(shape for shape in self.shapes() if self.can_capture(shape))

    def can_capture(self, bucket: Bucket) -> bool:
        """Whether all that the ranks exchange in a step of this shape may be part of a graph."""
        return self._max_rows is None or bucket.num_rows <= self._max_rows

    def forwards_of(self, bucket: Bucket | None) -> ForwardGraphs | None:
        """The graphs of forwards, if a plan that was padded so has one."""
        return self.forwards if bucket is not None and self.can_capture(bucket) else None

    def pad(self, plan: _core.StepPlan) -> Bucket | None:
        """Pads a plan as its step wants it; None: it stays as it is. `take_padded` knows then."""
        bucket = self.bucket_for(plan)
        if bucket is not None:
            plan.pad(bucket.num_reqs, bucket.num_rows)
        self._padded = (bucket,)
        return bucket

    def is_padded(self, bucket: Bucket | None) -> None:
        """Another rank has padded the next plan so."""
        self._padded = (bucket,)

    def take_padded(self, plan: _core.StepPlan) -> Bucket | None:
        """What the plan of the next step is padded to, which happens now if it has not yet."""
        if self._padded is None:
            self.pad(plan)
        assert self._padded is not None
        (bucket,), self._padded = self._padded, None
        return bucket

    def bucket_for(self, plan: _core.StepPlan) -> Bucket | None:
        """Shape a decode plan is padded to; None: run as it is."""
        if plan.kind.name != "DECODE":
            return None
        rows = self._rows_of(plan)
        counts = self.buckets.get(rows)
        if counts is not None:
            bucket = self.bucket_of_rows(plan, rows)
            if bucket is not None:
                return self._packed(bucket, plan)
            reason = f"{plan.num_reqs} requests exceed the largest bucket {counts[-1]}"
        else:
            known = " or ".join(map(str, self.buckets))
            reason = f"requests have other than {known} rows"
        if self.forwards is not None:
            self._count_fallback(reason)
        return None

    def _rows_of(self, plan: _core.StepPlan) -> int:
        """Rows for which the requests of a decode plan have room; 0: there is no such shape."""
        if not self.is_packed:
            return plan.uniform_q_len
        return next((rows for rows in self.buckets if plan.max_seqlen_q <= rows), 0)

    def _packed(self, bucket: Bucket, plan: _core.StepPlan) -> Bucket:
        counts = self.packed_counts(bucket.num_rows)
        return bucket._replace(packed_rows=next((n for n in counts if n >= plan.num_rows), 0))

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
        if self.is_strict:
            raise RuntimeError(
                f"require_fast_paths: expected a graph for every decode step, {reason}"
            )
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
        largest: the bucket of the most rows.
        fill: puts legal values into the static arrays of a step, for a bucket and smaller ones.
        forward: hidden states of a bucket from the static arrays of a step.
    """

    def __init__(
        self,
        config: Config,
        largest: Bucket,
        fill: Callable[[Bucket], None],
        forward: Callable[[Bucket], Tensor],
    ) -> None:
        device = torch.device(config.model.device)
        self._graphs: StepGraphs[Bucket] = StepGraphs(device)
        self._largest, self._fill, self._forward = largest, fill, forward
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        hidden_size = config.model.spec.hidden_size
        self._hidden = torch.zeros(largest.num_rows, hidden_size, dtype=dtype, device=device)

    @property
    def captured(self) -> tuple[Bucket, ...]:
        """Shapes that have a graph."""
        return self._graphs.keys

    @property
    def num_captured(self) -> int:
        """How many those are."""
        return len(self._graphs)

    @property
    def hidden(self) -> Tensor:
        """Where replays leave their rows: [most rows, H]."""
        return self._hidden

    def __contains__(self, bucket: Bucket) -> bool:
        return bucket in self._graphs

    def capture(self, shapes: tuple[Bucket, ...]) -> None:
        """Captures these shapes, and the largest of all first; nothing may be in flight. Others follow
        when they are needed."""
        start = time.perf_counter()
        for bucket in shapes:
            self.prepare(bucket)
        seconds = time.perf_counter() - start
        logger.info("captured %d CUDA graphs of decode forwards in %.1f s", len(shapes), seconds)

    def prepare(self, bucket: Bucket) -> None:
        """Captures a shape that has no graph yet: before its arrays are filled, nothing in flight.

        The first one is the largest, whatever is needed: the others share its memory, in any order.
        """
        if bucket not in self._graphs:
            if not self._graphs and bucket != self._largest:
                self._capture(self._largest)
            self._capture(bucket)

    def _capture(self, bucket: Bucket) -> None:
        hidden = self._hidden[: bucket.num_rows]
        # What the stream has of libraries it has since the first one.
        num_warmups = 1 if self._graphs.keys else NUM_WARMUPS
        self._graphs.capture(
            bucket,
            lambda: self._fill(bucket),
            lambda: _copy(hidden, self._forward(bucket)),
            num_warmups,
        )

    def replay(self, bucket: Bucket) -> Tensor:
        """Hidden states of the bucket's rows; valid until the next replay."""
        self._graphs.replay(bucket)
        return self._hidden[: bucket.num_rows]


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
