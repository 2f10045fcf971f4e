# SPDX-License-Identifier: Apache-2.0
"""Compares the plans a device made for itself with those of the scheduler (`check_run_ahead`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from diffulex.runner.batch import PlanViews
    from diffulex.runner.decode_graphs import Bucket, DecodeGraphs
    from diffulex_ext import _core

__all__ = ["PlanCheck", "PlanMismatchError"]

_ROWS = ("input_ids", "positions", "slot_mapping")
_MERGES = ("merge_mask", "merge_topk_ids", "merge_topk_probs", "merge_residual")
_BLOCKS = (
    "blk_editable_start",
    "blk_valid_len",
    "blk_force_top1",
    "blk_accept_threshold",
    "blk_total_steps",
    "blk_open_steps",
    "blk_post_edit_steps",
)
_CANVAS_ROWS = ("row_pass_kind", "row_self_cond")
_CANVAS_BLOCKS = (
    "blk_prev_argmax",
    "blk_stable_run",
    "blk_steps_left",
    "blk_renoise",
    "blk_request_slot",
)
_SAMPLED_ROWS = ("row_inv_temperature", "row_uniforms", "row_top_k", "row_top_p", "row_min_p")
_REQUESTS = ("context_lens", "mask_kinds")

_Arrays = dict[str, np.ndarray[Any, Any]]


class PlanMismatchError(RuntimeError):
    """The device planned a step otherwise than the scheduler."""


class PlanCheck:
    """Keeps what the device has before each step and compares it with the plan of that step."""

    def __init__(self, options: _core.EngineOptions) -> None:
        self._block_size = options.block_size
        self._buffer_size = options.buffer_size
        self._num_rows = options.block_size * options.buffer_size
        self._names = [*_SAMPLED_ROWS, *_REQUESTS, "valid_slices", "blk_row_index", "page_tables"]
        self._is_shifted = bool(options.logits_shift)
        if self._is_shifted:
            self._names += ["last_row_index", "logits_source"]
        self._has_dual_cache = options.strategy == "fast_dllm_v2"
        if self._has_dual_cache:
            self._names.append("seed_row")
        self._row_names, self._block_names = [*_ROWS], [*_BLOCKS, "blk_tokens"]
        if options.is_editing and options.strategy == "multi_bd":
            self._block_names.append("blk_edit_threshold")
        if options.token_merge_top_k > 0:
            self._row_names += _MERGES
        if options.strategy == "diffusion_gemma":
            self._row_names += _CANVAS_ROWS
            self._block_names += _CANVAS_BLOCKS
        self._names += [*self._row_names, *self._block_names]
        self._req_ids: list[int] = []
        # The context of the next step is a bound: only the device knows its mode.
        self._has_block_cache = self._has_dual_cache and options.fdv2_use_block_cache
        self._kept: dict[int, tuple[Bucket, _Arrays]] = {}
        # Requests of the plan compared last; fewer ones in the next ended meanwhile.
        self._num_live = 0
        #: Steps compared so far.
        self.num_compared = 0

    def enter(self, plan: _core.StepPlan) -> None:
        """From now on the device runs the requests of `plan`, in its order."""
        num_reqs = plan.num_reqs - plan.num_padded_reqs
        self._req_ids = [int(req_id) for req_id in plan.req_ids[:num_reqs]]
        self._num_live = num_reqs

    def keep(self, place: int, views: PlanViews, bucket: Bucket) -> None:
        """Copies the arrays of the step that is enqueued next, of this shape; waits for the device."""
        arrays = {name: getattr(views, name).detach().cpu().numpy().copy() for name in self._names}
        self._kept[place] = bucket, arrays

    def compare(self, plan: _core.StepPlan, place: int, graphs: DecodeGraphs) -> None:
        """Raises PlanMismatchError unless the step kept under `place` is that of `plan`."""
        bucket, device = self._kept.pop(place)
        self.num_compared += 1
        self._compare_shape(plan, bucket, graphs)
        seen = set()
        for index in range(plan.num_reqs - plan.num_padded_reqs):
            row = self._req_ids.index(int(plan.req_ids[index]))
            seen.add(row)
            self._compare_request(plan, device, index, row)
        for row in set(range(len(self._req_ids))) - seen:
            if device["valid_slices"][row] != row * self._num_rows:
                # The request was removed on the host only; the device's result is not used.
                continue
            blocks = slice(row * self._buffer_size, (row + 1) * self._buffer_size)
            rows = slice(row * self._num_rows, (row + 1) * self._num_rows)
            self._expect(plan, row, "blk_valid_len", device["blk_valid_len"][blocks], 0)
            self._expect(plan, row, "slot_mapping", device["slot_mapping"][rows], -1)

    def _compare_shape(self, plan: _core.StepPlan, bucket: Bucket, graphs: DecodeGraphs) -> None:
        """The shape is the one that the host finds; it may be larger in the step after one in which
        requests end."""
        num_live = plan.num_reqs - plan.num_padded_reqs
        has_ended, self._num_live = num_live < self._num_live, num_live
        wanted = graphs.bucket_of_rows(plan, self._num_rows)
        assert wanted is not None
        num_reqs, rows, bound = bucket
        if has_ended and num_reqs > wanted.num_reqs:
            least = graphs.bound(num_reqs, rows, plan.max_context_len)
            wanted = wanted._replace(num_reqs=num_reqs, max_context_len=least)
        if (has_ended or self._has_block_cache) and bound > wanted.max_context_len:
            wanted = wanted._replace(max_context_len=bound)
        self._expect(plan, 0, "bucket", bucket, wanted)

    def _compare_request(self, plan: _core.StepPlan, device: _Arrays, index: int, row: int) -> None:
        q = self._num_rows
        first = int(plan.cu_seqlens_q[index])
        num_rows = int(plan.cu_seqlens_q[index + 1]) - first  # Q, or fewer with a dual cache
        mine = slice(first, first + num_rows)
        theirs = slice(row * q, row * q + num_rows)
        padding = device["slot_mapping"][row * q + num_rows : (row + 1) * q]
        self._expect(plan, row, "slot_mapping", padding, -1)
        for name in self._row_names:
            self._expect(plan, row, name, device[name][theirs], getattr(plan, name)[mine])
        for name in _REQUESTS:
            self._expect(plan, row, name, device[name][row], getattr(plan, name)[index])
        # The device may have pages that only later steps need.
        pages, wanted = device["page_tables"][row], plan.page_tables[index]
        self._expect(plan, row, "page_tables", pages[wanted >= 0], wanted[wanted >= 0])
        num_valid = int(plan.valid_slices[index]) - first
        self._expect(plan, row, "valid_slices", device["valid_slices"][row] - row * q, num_valid)
        if self._is_shifted:
            self._compare_row(plan, device, "last_row_index", index, row)
        if self._has_dual_cache:
            self._compare_row(plan, device, "seed_row", index, row)
        blocks = np.flatnonzero(plan.blk_req[: plan.num_blocks] == index)
        places = set()
        for blk in blocks:
            offset = int(plan.blk_row0[blk]) - first
            if self._has_dual_cache:
                offset = int(plan.blk_start[blk]) % q  # D-blocks are aligned
            place = row * self._buffer_size + offset // self._block_size
            places.add(place)
            self._compare_block(plan, device, int(blk), place, first, row * q)
        own = range(row * self._buffer_size, (row + 1) * self._buffer_size)
        for place in set(own) - places:
            self._expect(plan, row, "blk_valid_len", device["blk_valid_len"][place], 0)

    def _compare_row(
        self, plan: _core.StepPlan, device: _Arrays, name: str, index: int, row: int
    ) -> None:
        """Compares a logits row of the request, -1 = none."""
        wanted = int(getattr(plan, name)[index])
        if wanted >= 0:
            offset = int(plan.logits_rows[wanted]) - int(plan.cu_seqlens_q[index])
            wanted = row * self._num_rows + offset
        self._expect(plan, row, name, device[name][row], wanted)

    def _compare_block(
        self,
        plan: _core.StepPlan,
        device: _Arrays,
        blk: int,
        place: int,
        first: int,
        device_first: int,
    ) -> None:
        for name in self._block_names:
            self._expect(plan, place, name, device[name][place], getattr(plan, name)[blk])
        rows, indices = device["blk_row_index"][place], plan.blk_row_index[blk]
        self._expect(plan, place, "blk_row_index", rows >= 0, indices >= 0)
        # A record that a slot keeps has the same number on both sides.
        is_record = indices >= plan.max_logits_rows
        self._expect(plan, place, "blk_row_index", rows[is_record], indices[is_record])
        used = np.flatnonzero((indices >= 0) & ~is_record)
        expected = plan.logits_rows[indices[used]] - first + device_first
        if self._is_shifted:
            source = plan.logits_source[indices[used]]
            self._expect(plan, place, "logits_source", device["logits_source"][rows[used]], source)
            # The last row of the request takes the logits of its slot.
            expected[source >= 0] = device_first + self._num_rows - 1
        self._expect(plan, place, "blk_row_index", rows[used], expected)
        for name in _SAMPLED_ROWS:
            have, want = device[name][rows[used]], getattr(plan, name)[indices[used]]
            self._expect(plan, place, name, have, want)

    def _expect(self, plan: _core.StepPlan, place: int, name: str, have: Any, want: Any) -> None:
        if not np.array_equal(have, np.broadcast_to(want, np.shape(have))):
            raise PlanMismatchError(
                f"check_run_ahead: {name}: expected {np.asarray(want).tolist()} in step"
                f" {plan.step_id}, got {np.asarray(have).tolist()} at {place} on the device"
            )
