# SPDX-License-Identifier: Apache-2.0
"""Steps of the decode loop that hold the valid rows of their requests alone.

Only the device knows how many rows its next step has. `advance_decode` counts them, a copy brings the
counts to the host, and the host launches the step for a count at least as large. The device waits for
that launch, so that steps are packed where it loses less than the void rows would cost. Ranks have the
same counts: each of them launches for its own.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from typing import TYPE_CHECKING

import torch

from diffulex.log import get_logger
from diffulex.runner.batch import host_memory, new_event
from diffulex.runner.decode_graphs import Bucket, products_per_row
from diffulex.runner.row_share import LOOP_LIMITS, RowShare

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.runner.decode_graphs import DecodeGraphs, ForwardGraphs
    from diffulex.runner.loop_steps import StepVariant
    from diffulex_ext import _core

__all__ = ["PackedSteps", "head_row_counts", "num_head_graphs"]

logger = get_logger(__name__)

_LEAST_HEAD_ROWS = 64
#: Forwards that are captured at the start at most: a tenth of a second and a few MiB each.
_MAX_FORWARDS = 64


@functools.cache
def head_row_counts(num_rows: int) -> tuple[int, ...]:
    """Ascending row counts of the head of packed steps that could have `num_rows` rows."""
    counts = []
    count = _LEAST_HEAD_ROWS
    while count < num_rows:
        counts.append(count)
        count *= 2
    return (*counts, num_rows)


def num_head_graphs(config: Config, graphs: DecodeGraphs) -> int:
    """Graphs of what follows the forward of packed steps, of one kind of draws."""
    if not graphs.is_packed:
        return 0
    shapes = _captured(_paying(config, graphs), graphs)
    totals = {(b.num_reqs, b.rows_per_request) for b in shapes}
    return sum(len(head_row_counts(num_reqs * rows)) for num_reqs, rows in totals)


def _paying(config: Config, graphs: DecodeGraphs) -> list[Bucket]:
    """Shapes that may be graphs and whose steps can be worth packing, the largest first."""
    products = products_per_row(config)

    def pays(bucket: Bucket) -> bool:
        num_rows = _whole(bucket).num_rows
        least = min(graphs.packed_counts(num_rows), default=num_rows)
        return LOOP_LIMITS.is_worth(num_rows, (num_rows - least) * products)

    return [bucket for bucket in graphs.captured_shapes() if pays(bucket)]


def _captured(shapes: list[Bucket], graphs: DecodeGraphs) -> list[Bucket]:
    """Those of `shapes` that are captured at the start: of too many every other row count, and those
    of the fewest requests, which are the usual ones."""
    if len(shapes) <= _MAX_FORWARDS:
        return shapes
    kinds: dict[Bucket, list[Bucket]] = {}
    for bucket in shapes:
        counts = graphs.packed_counts(_whole(bucket).num_rows)
        if bucket.packed_rows == 0 or bucket.packed_rows in counts[::2]:
            kinds.setdefault(_whole(bucket), []).append(bucket)
    captured: set[Bucket] = set()
    for whole in sorted(kinds, key=lambda bucket: (bucket.num_rows, bucket.max_context_len)):
        if len(captured) + len(kinds[whole]) > _MAX_FORWARDS:
            break
        captured.update(kinds[whole])
    return [bucket for bucket in shapes if bucket in captured]


def _whole(bucket: Bucket) -> Bucket:
    return bucket._replace(packed_rows=0)


class PackedSteps:
    """Decides which steps are packed, and for how many rows they are launched.

    Args:
        config: of the engine.
        graphs: decides what a step is padded to.
        fields: places of the arrays of a decode batch.
        state: its memory on the device.
    """

    def __init__(
        self,
        config: Config,
        graphs: DecodeGraphs,
        fields: list[_core.ArenaField],
        state: Tensor,
    ) -> None:
        self._config, self._graphs = config, graphs
        products = products_per_row(config)
        self._products_per_row = products
        self._share = RowShare(config.decode_rows, products, LOOP_LIMITS)
        #: Ascending shapes of packed steps, the whole one last, which is the key.
        self._ladders: dict[Bucket, tuple[Bucket, ...]] = {}
        places = {field.name: field for field in fields}
        rows, logits = places["num_rows"], places["num_logits_rows"]
        # They are neighbours: one copy brings both.
        end = logits.offset + logits.nbytes
        self._device = state[rows.offset : end]
        is_cuda = state.is_cuda
        self._host = host_memory(end - rows.offset, is_cuda)
        self._rows = self._host[: rows.nbytes].view(torch.int32).numpy()
        self._logits = self._host[logits.offset - rows.offset :].view(torch.int32).numpy()
        self._copied = new_event() if is_cuda else None

    @property
    def arrays(self) -> object:
        """Its memory on the host."""
        return self._host

    def wants(self, plan: _core.StepPlan, bucket: Bucket) -> bool:
        """Whether a step of this whole shape is to be packed; `plan`, unpadded, is the last one."""
        return self._share.is_low(plan) and self._pays(bucket)

    def _pays(self, bucket: Bucket) -> bool:
        """Whether it ever can be worth it for steps of this shape; only with a forward for all rows."""
        shapes = self._shapes(bucket)
        if not shapes or shapes[-1] != bucket:
            return False
        num_void = bucket.num_rows - shapes[0].num_rows
        return LOOP_LIMITS.is_worth(bucket.num_rows, num_void * self._products_per_row)

    def _shapes(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """Ascending shapes that steps of this whole one may be launched for."""
        ladder = self._ladders.get(bucket)
        if ladder is None:
            counts = self._graphs.packed_counts(bucket.num_rows)
            ladder = (*(bucket._replace(packed_rows=count) for count in counts), bucket)
            self._ladders[bucket] = ladder
        forwards = self._graphs.forwards
        return ladder if forwards is None else tuple(b for b in ladder if b in forwards)

    def fetch_counts(self) -> None:
        """Copies the counts of the step that was planned last to the host, behind its plan."""
        self._host.copy_(self._device, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def fitted(self, variant: StepVariant) -> StepVariant:
        """The variant for as many rows as the device has counted, of a whole one; waits for it."""
        bucket = variant.bucket
        shapes, heads = self._shapes(bucket), head_row_counts(bucket.num_rows)
        rows, logits = self._rows[: bucket.num_reqs], self._logits[: bucket.num_reqs]
        if self._copied is not None:
            self._copied.synchronize()
        # The device is idle from here on to the launch.
        num_rows = int(rows.sum())
        shape = next(shape for shape in shapes if shape.num_rows >= num_rows)
        head_rows = heads[bisect_left(heads, int(logits.sum()))]
        return variant._replace(bucket=shape, head_rows=head_rows)

    def heads(self, variant: StepVariant) -> tuple[StepVariant, ...]:
        """Everything behind the forward that packed steps of this whole variant might need, the largest
        first."""
        counts = head_row_counts(variant.bucket.num_rows)
        return tuple(variant._replace(head_rows=count) for count in reversed(counts))

    def capture(self, forwards: ForwardGraphs, *, is_strict: bool) -> tuple[Bucket, ...]:
        """Captures the forwards of packed steps; returns the whole shapes whose steps may be packed.

        Where there is no memory for one, those of its shape are not packed, unless `is_strict`.
        """
        paying = _paying(self._config, self._graphs)
        shapes = _captured(paying, self._graphs)
        if len(shapes) < len(paying):
            logger.info("no graph of %d forwards of packed steps", len(paying) - len(shapes))
        try:
            forwards.capture(tuple(shapes))
        except torch.OutOfMemoryError as error:
            if is_strict:
                raise
            logger.warning("steps of the device are packed in part: %s", error)
        return tuple(b for b in shapes if not b.packed_rows and b in forwards)
