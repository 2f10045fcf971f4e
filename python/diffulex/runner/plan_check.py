# SPDX-License-Identifier: Apache-2.0
"""Compares the plans a device made for itself with those of the scheduler (`check_run_ahead`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from diffulex_ext import _core

if TYPE_CHECKING:
    from diffulex.runner.batch import ArenaViews
    from diffulex.runner.decode_graphs import Bucket, DecodeGraphs
    from diffulex.runner.loop_steps import StepVariant
    from diffulex.strategies.traits import StrategyTraits

__all__ = ["PlanCheck", "PlanMismatchError"]

#: Where the scheduler put rows and blocks in its plan: the device has other places.
_PLACES = frozenset(("blk_req", "blk_id", "blk_start", "blk_row0", "blk_prev_row"))
#: What no step on the device reads or writes: it is in the request that the device keeps.
_UNUSED = frozenset(
    ("row_mode", "prefix_lens", "padded_prefix_lens", "req_ids", "request_slots", "blk_step")
)
#: First dimensions of the arrays that are compared; ends of requests are places.
_EXTENTS = ("rows", "reqs", "blocks", "logits_rows")
#: Such places, their indices, and page tables: translated before they are compared.
_TRANSLATED = frozenset(
    (
        *("valid_slices", "last_row_index", "seed_row", "page_tables"),
        *("blk_row_index", "logits_source", "logits_rows"),
    )
)

_Arrays = dict[str, np.ndarray[Any, Any]]


class _Rows:
    """Where the requests of a step have their rows.

    Args:
        starts: [R + 1], of the requests one after another, and their end.
        head_rows: of the head of a packed step; 0: every request has all of its rows.
    """

    def __init__(self, starts: np.ndarray[Any, Any], head_rows: int) -> None:
        self._starts = starts
        self.head_rows, self.is_packed = head_rows, head_rows > 0
        self.end = int(starts[-1])

    def first(self, row: int) -> int:
        """The first row of the request."""
        return int(self._starts[row])

    def num_rows(self, row: int) -> int:
        """How many it has."""
        return int(self._starts[row + 1] - self._starts[row])


class PlanMismatchError(RuntimeError):
    """The device planned a step otherwise than the scheduler."""


class PlanCheck:
    """Keeps what the device has before each step and compares it with the plan of that step."""

    def __init__(self, options: _core.EngineOptions, traits: StrategyTraits) -> None:
        self._block_size = options.block_size
        self._buffer_size = options.buffer_size
        self._num_rows = options.block_size * options.buffer_size
        self._is_shifted = bool(options.logits_shift)
        self._has_dual_cache = traits.has_dual_cache
        left_out = _PLACES | _UNUSED
        if not traits.has_canvas:
            left_out |= {"blk_request_slot"}  # of the draws of a canvas
        fields = [
            f for f in _core.StepPlan(options).fields() if f.nbytes and f.name not in left_out
        ]
        #: Arrays that are compared value by value, by their first dimension.
        self._equal: dict[str, list[str]] = {}
        for field in fields:
            if field.name not in _TRANSLATED:
                self._equal.setdefault(field.extent, []).append(field.name)
        self._names = [field.name for field in fields if field.extent in _EXTENTS]
        self._req_ids: list[int] = []
        # The context of the next step is a bound: only the device knows its mode.
        self._has_block_cache = self._has_dual_cache and options.fdv2_use_block_cache
        self._kept: dict[int, tuple[Bucket, _Arrays, _Rows]] = {}
        # Requests of the plan compared last; fewer ones in the next ended meanwhile.
        self._num_live = 0
        #: Steps compared so far.
        self.num_compared = 0

    def enter(self, plan: _core.StepPlan) -> None:
        """From now on the device runs the requests of `plan`, in its order."""
        num_reqs = plan.num_reqs - plan.num_padded_reqs
        self._req_ids = [int(req_id) for req_id in plan.req_ids[:num_reqs]]
        self._num_live = num_reqs

    def keep(self, place: int, views: ArenaViews, variant: StepVariant) -> None:
        """Copies the arrays of the step that is enqueued next; waits for the device."""
        arrays = {name: getattr(views, name).detach().cpu().numpy().copy() for name in self._names}
        num_reqs, head_rows = variant.bucket.num_reqs, variant.head_rows
        starts = np.arange(num_reqs + 1) * self._num_rows
        if head_rows:
            starts = views.cu_seqlens_q.detach().cpu().numpy()[: num_reqs + 1].copy()
        self._kept[place] = variant.bucket, arrays, _Rows(starts, head_rows)

    def compare(self, plan: _core.StepPlan, place: int, graphs: DecodeGraphs) -> None:
        """Raises PlanMismatchError unless the step kept under `place` is that of `plan`."""
        bucket, device, layout = self._kept.pop(place)
        self.num_compared += 1
        self._compare_shape(plan, bucket, graphs)
        void = device["slot_mapping"][layout.end : bucket.num_rows]
        self._expect(plan, 0, "slot_mapping", void, -1)
        self._expect(plan, 0, "cu_seqlens_q", layout.end <= bucket.num_rows, True)
        seen = set()
        for index in range(plan.num_reqs - plan.num_padded_reqs):
            row = self._req_ids.index(int(plan.req_ids[index]))
            seen.add(row)
            self._compare_request(plan, device, index, row, layout)
        for row in set(range(len(self._req_ids))) - seen:
            if device["valid_slices"][row] != layout.first(row):
                # The request was removed on the host only; the device's result is not used.
                continue
            blocks = slice(row * self._buffer_size, (row + 1) * self._buffer_size)
            rows = slice(layout.first(row), layout.first(row) + layout.num_rows(row))
            self._expect(plan, row, "blk_valid_len", device["blk_valid_len"][blocks], 0)
            self._expect(plan, row, "slot_mapping", device["slot_mapping"][rows], -1)

    def _compare_shape(self, plan: _core.StepPlan, bucket: Bucket, graphs: DecodeGraphs) -> None:
        """The shape is the one that the host finds; it may be larger in the step after one in which
        requests end."""
        num_live = plan.num_reqs - plan.num_padded_reqs
        has_ended, self._num_live = num_live < self._num_live, num_live
        wanted = graphs.bucket_of_rows(plan, self._num_rows)
        assert wanted is not None
        num_reqs, rows, bound, packed_rows = bucket
        # Void rows of requests that the host alone has removed may be what makes it larger.
        wanted = wanted._replace(packed_rows=packed_rows)
        if has_ended and num_reqs > wanted.num_reqs:
            least = graphs.bound(num_reqs, rows, plan.max_context_len)
            wanted = wanted._replace(num_reqs=num_reqs, max_context_len=least)
        if (has_ended or self._has_block_cache) and bound > wanted.max_context_len:
            wanted = wanted._replace(max_context_len=bound)
        self._expect(plan, 0, "bucket", bucket, wanted)

    def _compare_request(
        self, plan: _core.StepPlan, device: _Arrays, index: int, row: int, layout: _Rows
    ) -> None:
        q = self._num_rows
        first, begin = int(plan.cu_seqlens_q[index]), layout.first(row)
        num_rows = int(plan.cu_seqlens_q[index + 1]) - first  # Q, or fewer with a dual cache
        mine = slice(first, first + num_rows)
        theirs = slice(begin, begin + num_rows)
        padding = device["slot_mapping"][begin + num_rows : begin + layout.num_rows(row)]
        self._expect(plan, row, "slot_mapping", padding, -1)
        if layout.is_packed:
            self._expect(plan, row, "cu_seqlens_q", layout.num_rows(row), num_rows)
        for name in self._equal["rows"]:
            self._expect(plan, row, name, device[name][theirs], getattr(plan, name)[mine])
        for name in self._equal["reqs"]:
            self._expect(plan, row, name, device[name][row], getattr(plan, name)[index])
        # The device may have pages that only later steps need.
        pages, wanted = device["page_tables"][row], plan.page_tables[index]
        self._expect(plan, row, "page_tables", pages[wanted >= 0], wanted[wanted >= 0])
        num_valid = int(plan.valid_slices[index]) - first
        self._expect(plan, row, "valid_slices", device["valid_slices"][row] - begin, num_valid)
        if self._is_shifted:
            self._compare_row(plan, device, "last_row_index", index, row, layout)
        if self._has_dual_cache:
            self._compare_row(plan, device, "seed_row", index, row, layout)
        blocks = np.flatnonzero(plan.blk_req[: plan.num_blocks] == index)
        places = set()
        for blk in blocks:
            offset = int(plan.blk_row0[blk]) - first
            if self._has_dual_cache:
                offset = int(plan.blk_start[blk]) % q  # D-blocks are aligned
            place = row * self._buffer_size + offset // self._block_size
            places.add(place)
            self._compare_block(plan, device, int(blk), place, first, layout)
        own = range(row * self._buffer_size, (row + 1) * self._buffer_size)
        for place in set(own) - places:
            self._expect(plan, row, "blk_valid_len", device["blk_valid_len"][place], 0)
        if not self._has_dual_cache:  # whose rows without a reader repeat another
            self._compare_readers(plan, device, own, row, layout)

    def _compare_readers(
        self, plan: _core.StepPlan, device: _Arrays, own: range, row: int, layout: _Rows
    ) -> None:
        """Logits rows are those that something reads: alone, one after another, if steps are packed."""
        read = device["blk_row_index"][own]
        read = np.append(read, device["last_row_index"][row] if self._is_shifted else -1)
        read = np.unique(read[(read >= 0) & (read < plan.max_logits_rows)])
        if layout.is_packed:
            dense = np.arange(len(read)) + (read[0] if len(read) else 0)
            self._expect(plan, row, "blk_row_index", read, dense)
            self._expect(plan, row, "head_rows", read[-1:] < layout.head_rows, True)
            return
        rows = np.arange(layout.first(row), layout.first(row) + layout.num_rows(row))
        wanted = np.where(np.isin(rows, read), rows, -1)
        self._expect(plan, row, "logits_rows", device["logits_rows"][rows], wanted)

    def _compare_row(
        self,
        plan: _core.StepPlan,
        device: _Arrays,
        name: str,
        index: int,
        row: int,
        layout: _Rows,
    ) -> None:
        """Compares a logits row of the request, -1 = none."""
        wanted = int(getattr(plan, name)[index])
        if wanted < 0:
            self._expect(plan, row, name, device[name][row], wanted)
            return
        offset = int(plan.logits_rows[wanted]) - int(plan.cu_seqlens_q[index])
        self._compare_logits(plan, device, name, row, device[name][row], 0, offset, layout)

    def _compare_logits(
        self,
        plan: _core.StepPlan,
        device: _Arrays,
        name: str,
        row: int,
        have: Any,
        rel: Any,
        offset: Any,
        layout: _Rows,
    ) -> None:
        """Compares logits rows `have` of the request with those of its rows `offset`: there they are
        themselves, with a dual cache entries `rel` of the request, and in packed steps anywhere."""
        hidden = layout.first(row) + offset
        if not layout.is_packed:
            wanted = row * self._block_size + rel if self._has_dual_cache else hidden
            self._expect(plan, row, name, have, wanted)
        self._expect(plan, row, "logits_rows", device["logits_rows"][have], hidden)

    def _compare_block(
        self,
        plan: _core.StepPlan,
        device: _Arrays,
        blk: int,
        place: int,
        first: int,
        layout: _Rows,
    ) -> None:
        for name in self._equal["blocks"]:
            self._expect(plan, place, name, device[name][place], getattr(plan, name)[blk])
        rows, indices = device["blk_row_index"][place], plan.blk_row_index[blk]
        self._expect(plan, place, "blk_row_index", rows >= 0, indices >= 0)
        # A record that a slot keeps has the same number on both sides.
        is_record = indices >= plan.max_logits_rows
        self._expect(plan, place, "blk_row_index", rows[is_record], indices[is_record])
        used = np.flatnonzero((indices >= 0) & ~is_record)
        offset = plan.logits_rows[indices[used]] - first
        if self._is_shifted:
            source = plan.logits_source[indices[used]]
            self._expect(plan, place, "logits_source", device["logits_source"][rows[used]], source)
            # The last row of the request takes the logits of its slot, or its first if it runs fewer.
            last, num_rows = self._num_rows - 1, layout.num_rows(place // self._buffer_size)
            offset[source >= 0] = last if num_rows > last else 0
        row = place // self._buffer_size
        self._compare_logits(plan, device, "blk_row_index", row, rows[used], used, offset, layout)
        for name in self._equal["logits_rows"]:
            have, want = device[name][rows[used]], getattr(plan, name)[indices[used]]
            self._expect(plan, place, name, have, want)

    def _expect(self, plan: _core.StepPlan, place: int, name: str, have: Any, want: Any) -> None:
        if not np.array_equal(have, np.broadcast_to(want, np.shape(have))):
            raise PlanMismatchError(
                f"check_run_ahead: {name}: expected {np.asarray(want).tolist()} in step"
                f" {plan.step_id}, got {np.asarray(have).tolist()} at {place} on the device"
            )
