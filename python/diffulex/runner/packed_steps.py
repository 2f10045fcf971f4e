# SPDX-License-Identifier: Apache-2.0
"""Steps of the decode loop that hold the valid rows of their requests alone.

Only the device knows how many rows its next step has. `advance_decode` counts them, a copy brings the
counts to the host, and the host launches the step for a count at least as large. The device waits for
that launch, so that steps are packed where it loses less than the void rows would cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.log import get_logger
from diffulex.runner.batch import host_memory, new_event
from diffulex.runner.decode_graphs import Bucket
from diffulex.runner.row_share import LOOP_LIMITS, RowShare

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.runner.decode_graphs import DecodeGraphs, ForwardGraphs
    from diffulex.runner.loop_steps import StepVariant
    from diffulex_ext import _core

__all__ = ["PackedSteps", "head_row_counts"]

logger = get_logger(__name__)

_LEAST_HEAD_ROWS = 64
#: Forwards that are captured at the start at most: a fifth of a second and a few MiB each.
_MAX_FORWARDS = 64


def head_row_counts(num_rows: int) -> tuple[int, ...]:
    """Ascending row counts of the head of packed steps that could have `num_rows` rows."""
    counts = []
    count = _LEAST_HEAD_ROWS
    while count < num_rows:
        counts.append(count)
        count *= 2
    return (*counts, num_rows)


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
        self._graphs = graphs
        self._share = RowShare(config.decode_rows, config.model.spec.products_per_row, LOOP_LIMITS)
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
        """Whether a step of this shape is to be packed; `plan`, unpadded, is the last one."""
        return self._share.is_low(plan) and self._pays(bucket) and self._has_forward(bucket)

    def _pays(self, bucket: Bucket) -> bool:
        """Whether it ever can be worth it for steps of this shape."""
        num_rows = bucket.num_rows
        least = min(self._graphs.packed_counts(num_rows), default=num_rows)
        return self._share.is_worth(num_rows, num_rows - least)

    def _has_forward(self, bucket: Bucket) -> bool:
        forwards = self._graphs.forwards
        return forwards is None or bucket in forwards

    def count(self) -> None:
        """Copies the counts of the step that was planned last to the host, behind its plan."""
        self._host.copy_(self._device, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def counted(self, variant: StepVariant) -> StepVariant:
        """The variant that holds the rows which the device has counted; waits for it."""
        if self._copied is not None:
            self._copied.synchronize()
        bucket = self._whole(variant.bucket)
        num_rows = int(self._rows[: bucket.num_reqs].sum())
        num_logits = int(self._logits[: bucket.num_reqs].sum())
        head_rows = next(n for n in head_row_counts(bucket.num_rows) if n >= num_logits)
        return variant._replace(bucket=self._packed(bucket, num_rows), head_rows=head_rows)

    def _whole(self, bucket: Bucket) -> Bucket:
        return bucket._replace(packed_rows=0)

    def _packed(self, bucket: Bucket, num_rows: int) -> Bucket:
        """The least shape with a forward that holds so many rows."""
        counts = [n for n in self._graphs.packed_counts(bucket.num_rows) if n >= num_rows]
        shapes = [*(bucket._replace(packed_rows=count) for count in counts), bucket]
        return next(shape for shape in shapes if self._has_forward(shape))

    def heads(self, variant: StepVariant) -> tuple[StepVariant, ...]:
        """Everything behind the forward that packed steps of this variant might need, the largest first."""
        bucket = self._whole(variant.bucket)
        counts = head_row_counts(bucket.num_rows)
        return tuple(variant._replace(bucket=bucket, head_rows=n) for n in reversed(counts))

    def capture(self, forwards: ForwardGraphs, *, is_strict: bool) -> tuple[Bucket, ...]:
        """Captures the forwards of packed steps; returns the shapes whose steps may be packed.

        Where one fails, those of its shape are not packed, unless `is_strict`.
        """
        shapes = [b for b in self._graphs.captured_shapes() if self._pays(self._whole(b))]
        if len(shapes) > _MAX_FORWARDS:
            shapes = [b for b in shapes if self._is_coarse(b)]
        try:
            forwards.capture(tuple(shapes[:_MAX_FORWARDS]))
        except RuntimeError as error:
            if is_strict:
                raise
            logger.warning("steps of the device are packed in part: %s", error)
        return tuple(b for b in shapes if not b.packed_rows and b in forwards)

    def _is_coarse(self, bucket: Bucket) -> bool:
        """Whether every other of the row counts has this one."""
        counts = self._graphs.packed_counts(self._whole(bucket).num_rows)
        return bucket.packed_rows == 0 or bucket.packed_rows in counts[::2]
