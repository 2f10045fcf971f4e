# SPDX-License-Identifier: Apache-2.0
"""Decode steps that the device plans itself, so that it never waits for the host.

    host     schedule k | start | launch k + 1 | wait for k, complete it | adopt k + 1 | launch k + 2
    device                 step k, plan of k + 1 | step k + 1, plan of k + 2 | ...

A step is one sequence of launches over static arrays: forward, head, sampler, `advance_decode`. The
last one applies the sampler's decisions by the rules of the core and writes the arrays of the next
step, so that the host only enqueues. The scheduler stays the authority: it completes every step
from the sampler's output, which comes back in one copy, one step late at most.

Symbols: R requests (dummies included), Q rows each, N blocks of B positions, T = R Q.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from diffulex.log import get_logger
from diffulex.runner.batch import (
    StepShape,
    arena_tensors,
    device_memory,
    host_memory,
    new_event,
)
from diffulex.runner.decode_graphs import Bucket
from diffulex.runner.model_call import head_logits
from diffulex.runner.plan_check import PlanCheck
from diffulex.runner.step_graphs import StepGraphs
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.config.table import SamplerConfig
    from diffulex.runner.batch import PlanViews, StepBuffers
    from diffulex.runner.decode_graphs import DecodeGraphs
    from diffulex.runner.sampler_inputs import SamplerInputsBuilder

__all__ = ["DecodeLoop", "StepVariant", "has_graph_of_logits"]

logger = get_logger(__name__)

# The result of one step is read while the next one runs.
_NUM_OUTPUTS = 2
# A graph keeps its logits; larger steps run without one, and their launches vanish beside the work.
_MAX_GRAPH_LOGITS_BYTES = 1 << 30


def has_graph_of_logits(config: Config, bucket: Bucket) -> bool:
    """Whether a step of this shape, its logits included, may be a graph."""
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    num_bytes = bucket.num_rows * config.model.spec.vocab_size * dtype.itemsize
    return num_bytes <= _MAX_GRAPH_LOGITS_BYTES


def _narrows_draws(sampler: SamplerConfig) -> bool:
    """Whether a request that draws with default settings draws from a part of the vocabulary."""
    top_p = 1.0 if sampler.top_p is None else sampler.top_p
    return (sampler.top_k or 0) > 0 or top_p < 1.0 or (sampler.min_p or 0.0) > 0.0


class StepVariant(NamedTuple):
    """What a captured step depends on beside the arrays it reads."""

    bucket: Bucket
    is_drawn: bool  # a request draws its tokens
    is_filtered: bool  # and one narrows its draws


class _Output:
    """One place of the ring of results."""

    def __init__(self, options: _core.EngineOptions, *, is_cuda: bool) -> None:
        num_bytes = _core.SamplerOutput.arena_bytes(options)
        self.host = host_memory(num_bytes, is_cuda)
        self.output = _core.SamplerOutput(options, self.host.data_ptr(), num_bytes)
        self.copied = new_event() if is_cuda else None


class DecodeLoop:
    """Runs decode steps one after another without waiting for the host.

    Args:
        config: of the engine.
        options: of the scheduler.
        model: for `compute_logits`.
        sampler: writes its decisions to the arrays of `buffers`.
        buffers: arrays of the steps, with a mirror.
        builder: of the inputs of the sampler.
        graphs: decides what a step is padded to.
        forward: hidden states [T, H] of a padded step from the arrays of `buffers`.
    """

    def __init__(
        self,
        config: Config,
        options: _core.EngineOptions,
        model: Any,
        sampler: Any,
        buffers: StepBuffers,
        builder: SamplerInputsBuilder,
        graphs: DecodeGraphs,
        forward: Callable[[Bucket], Tensor],
    ) -> None:
        device = buffers.device
        is_cuda = device.type == "cuda"
        self._config, self._options = config, options
        self._model, self._sampler, self._inputs_builder = model, sampler, builder
        self._buffers, self._graphs, self._forward = buffers, graphs, forward
        self._num_rows = config.decode_rows
        # Modes of a dual cache take turns, and only the device knows which one is next: every request
        # has the rows of the longest.
        self._has_dual_cache = options.strategy == "fast_dllm_v2"
        self._has_canvas = options.strategy == "diffusion_gemma"
        ends = torch.arange(options.max_num_reqs + 1, dtype=torch.int32, device=device)
        self._uniform_ends = ends * self._num_rows
        # As StepPlan.saved_row has it: after the records of the largest step.
        self._first_saved_row = buffers.max_logits_rows if builder.has_carry else 0
        num_bytes = _core.DecodeBatch.arena_bytes(options)
        self._host = host_memory(num_bytes, is_cuda)
        self._batch = _core.DecodeBatch(options, self._host.data_ptr(), num_bytes)
        arrays = arena_tensors(self._host, self._batch.fields())
        staged = {name: array for name, array in arrays.items() if array.numel() > 0}
        state = arena_tensors(device_memory(num_bytes, device), self._batch.fields())
        self._staged_pages = staged.pop("page_tables")
        # The sampler reads it, and the rules replace it.
        state["prev_argmax"] = buffers.views.blk_prev_argmax
        self._staged = staged
        self._state = state
        self._uploaded = new_event() if is_cuda else None
        self._outputs = [_Output(options, is_cuda=is_cuda) for _ in range(_NUM_OUTPUTS)]
        self._next_output = 0
        self._variant = StepVariant(Bucket(0, 0, 0), is_drawn=False, is_filtered=False)
        self._step_graphs: StepGraphs[StepVariant] | None = None
        self._device = device
        self._check = PlanCheck(options) if config.kernel.check_run_ahead else None
        #: Whether the step after the one that `start` enqueued may run; asked early, for its pages.
        self._verdict: _core.RunAhead | None = None
        #: Steps that replayed a graph.
        self.num_graph_steps = 0
        #: Steps that were enqueued before the previous step was complete.
        self.num_ahead_steps = 0

    @property
    def graph_buckets(self) -> tuple[int, ...]:
        """Request counts that have a CUDA graph."""
        graphs = self._step_graphs
        return () if graphs is None else tuple(sorted({v.bucket.num_reqs for v in graphs.keys}))

    def takes(self, scheduler: _core.Scheduler, plan: _core.StepPlan) -> bool:
        """Whether the plan in flight is a step for this loop."""
        return self._bucket_for(plan) is not None and scheduler.can_run_ahead(plan)

    def _bucket_for(self, plan: _core.StepPlan) -> Bucket | None:
        if plan.kind != _core.PlanKind.DECODE:
            return None
        if plan.uniform_q_len != self._num_rows and not self._has_dual_cache:
            return None
        return self._graphs.bucket_of_rows(plan, self._num_rows)

    def start(self, scheduler: _core.Scheduler, plan: _core.StepPlan) -> int:
        """Hands the plan in flight to the device and enqueues its step; returns its result's place."""
        bucket = self._bucket_for(plan)
        assert bucket is not None
        self._await_uploads()
        scheduler.start_run_ahead(plan, self._batch)
        self._variant = StepVariant(bucket, self._batch.any_drawn, self._batch.any_filtered)
        self._prepare_variant()
        if not self._has_dual_cache:
            plan.pad_requests(bucket.num_reqs)
        self._verdict = scheduler.reserve_ahead(self._batch)
        self._buffers.upload()
        if self._has_dual_cache:
            ends = self._uniform_ends[: bucket.num_reqs + 1]
            self._buffers.views.cu_seqlens_q[: bucket.num_reqs + 1].copy_(ends)
        self._upload_pages(self._verdict)
        for name, host in self._staged.items():
            self._state[name][: bucket.num_reqs].copy_(host[: bucket.num_reqs], non_blocking=True)
        self._record_uploads()
        self._advance(bucket, is_entry=True)
        if self._check is not None:
            self._check.enter(plan)
        return self._launch()

    def run_ahead(self, scheduler: _core.Scheduler, plan: _core.StepPlan) -> int | None:
        """Enqueues the next step, if that is allowed; returns the place of its result."""
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            if self._has_smaller_bucket(plan):
                return None
            self._await_uploads()
            verdict = scheduler.reserve_ahead(self._batch)
            self._upload_pages(verdict)
            self._record_uploads()
        if verdict == _core.RunAhead.STOP:
            return None
        variant = self._variant_ahead(scheduler)
        if self._is_capturing(variant):
            return None  # `start` captures it, with nothing in flight
        self._variant = variant
        self.num_ahead_steps += 1
        return self._launch()

    def _variant_ahead(self, scheduler: _core.Scheduler) -> StepVariant:
        """The variant of the next step, whose context length the host knows already.

        Scheduling on the host gives the same one, unless requests end in the step in flight: then the
        batch is smaller, and its bound may be too. With a block cache the bound may be that of the
        next mode.
        """
        num_reqs, rows, _ = self._variant.bucket
        bound = self._graphs.bound(num_reqs, rows, scheduler.context_len_ahead())
        return self._variant._replace(bucket=Bucket(num_reqs, rows, bound))

    def _upload_pages(self, verdict: _core.RunAhead) -> None:
        if verdict == _core.RunAhead.GO_NEW_PAGES:
            size = self._batch.size
            pages = self._buffers.views.page_tables
            pages[:size].copy_(self._staged_pages[:size], non_blocking=True)

    def _await_uploads(self) -> None:
        """Waits until the staged arrays are no longer read.

        Usually that is the case already, since the step before the copies is complete. Only a step
        that failed was never waited for.
        """
        if self._uploaded is not None:
            self._uploaded.synchronize()

    def _record_uploads(self) -> None:
        if self._uploaded is not None:
            self._uploaded.record()

    def collect(
        self, scheduler: _core.Scheduler, plan: _core.StepPlan, place: int
    ) -> _core.SamplerOutput:
        """The output of the plan in flight, whose result has `place`; waits for it."""
        result = self._outputs[place]
        if result.copied is not None:
            result.copied.synchronize()
        if self._check is not None:
            self._check.compare(plan, place, self._graphs)
        scheduler.collect_output(plan, result.output, self._buffers.output)
        return self._buffers.output

    def capture(self, fill: Callable[[Bucket], None]) -> None:
        """Captures the steps of all shapes: greedy ones, and those of a request that only has the
        defaults of the configuration. Others follow when they are first needed.

        Args:
            fill: puts legal values into the arrays of a step.
        """
        self._fill = fill
        self._step_graphs = StepGraphs(self._device)
        start = time.perf_counter()
        kinds = [(self._has_canvas, False)]  # canvases always draw
        if not self._has_canvas and self._config.sampler.temperature:
            kinds.append((True, _narrows_draws(self._config.sampler)))
        for bucket in self._graphs.shapes():
            if bucket.rows_per_request != self._num_rows:
                continue  # a shape of the host's loop
            for is_drawn, is_filtered in kinds:
                variant = StepVariant(bucket, is_drawn, is_filtered)
                if self._is_capturing(variant):
                    self._capture(variant)
        seconds = time.perf_counter() - start
        logger.info("captured %d CUDA graphs in %.1f s", len(self._step_graphs.keys), seconds)

    def _is_capturing(self, variant: StepVariant) -> bool:
        """Whether the variant gets a graph that it has not yet."""
        if self._step_graphs is None or variant in self._step_graphs:
            return False
        return has_graph_of_logits(self._config, variant.bucket)

    def _capture(self, variant: StepVariant) -> None:
        assert self._step_graphs is not None

        def fill() -> None:
            self._fill(variant.bucket)
            # Requests that do not run: the rules then change nothing. Nor does the sampler what it
            # keeps of others.
            self._state["requests"].zero_()
            self._buffers.views.blk_row_index.fill_(-1)
            self._buffers.views.blk_valid_len.zero_()

        self._step_graphs.capture(variant, fill, lambda: self._enqueue(variant))

    def _prepare_variant(self) -> None:
        """Captures a variant that is needed for the first time; the device is idle now."""
        if self._is_capturing(self._variant):
            self._capture(self._variant)

    def _has_smaller_bucket(self, plan: _core.StepPlan) -> bool:
        num_reqs = plan.num_reqs - plan.num_padded_reqs
        return any(
            num_reqs <= count < self._variant.bucket.num_reqs
            for count in self._graphs.buckets[self._num_rows]
        )

    def _launch(self) -> int:
        place = self._next_output
        self._next_output = (place + 1) % _NUM_OUTPUTS
        if self._check is not None:
            self._check.keep(place, self._buffers.views, self._variant.bucket)
        graphs, variant = self._step_graphs, self._variant
        if graphs is not None and variant in graphs:
            graphs.replay(variant)
            self.num_graph_steps += 1
        else:
            self._enqueue(variant)
        result = self._outputs[place]
        result.host.copy_(self._buffers.output_device, non_blocking=True)
        if result.copied is not None:
            result.copied.record()
        return place

    def _enqueue(self, variant: StepVariant) -> None:
        bucket = variant.bucket
        num_reqs, num_rows = bucket.num_reqs, bucket.num_rows
        logits = head_logits(self._model, self._forward(bucket))
        shape = StepShape(
            num_rows=num_rows,
            num_reqs=num_reqs,
            num_blocks=num_reqs * self._options.buffer_size,
            num_logits_rows=num_rows,
            any_sampled=variant.is_drawn,
            num_filtered_rows=num_rows if variant.is_filtered else 0,
            num_saved_source_rows=num_reqs
            if variant.is_drawn and self._inputs_builder.has_carry
            else 0,
        )
        self._sampler(self._inputs_builder.inputs(self._buffers.views, shape, logits))
        self._advance(bucket, is_entry=False)

    def _advance(self, bucket: Bucket, *, is_entry: bool) -> None:
        views, out = self._buffers.views, self._buffers.sampler
        num_reqs, rows = bucket.num_reqs, bucket.num_rows
        blocks = num_reqs * self._options.buffer_size
        has_edits = views.blk_edit_threshold.numel() > 0
        has_carry, has_dual = self._inputs_builder.has_carry, self._has_dual_cache
        torch.ops.diffulex.advance_decode(
            self._state["requests"][:num_reqs],
            self._state["windows"][:num_reqs],
            views.page_tables[:num_reqs],
            out.write_ids[:blocks],
            out.flags[:blocks],
            out.same_token_ratio[:blocks],
            views.input_ids[:rows],
            views.positions[:rows],
            views.slot_mapping[:rows],
            views.context_lens[:num_reqs],
            views.valid_slices[:num_reqs],
            views.blk_tokens[:blocks],
            views.blk_row_index[:blocks],
            views.blk_editable_start[:blocks],
            views.blk_valid_len[:blocks],
            views.blk_force_top1[:blocks],
            views.blk_accept_threshold[:blocks],
            views.blk_edit_threshold[:blocks] if has_edits else None,
            views.blk_open_steps[:blocks],
            views.blk_total_steps[:blocks],
            views.blk_post_edit_steps[:blocks],
            views.row_inv_temperature[:rows],
            views.row_uniforms[:rows],
            views.row_top_k[:rows],
            views.row_top_p[:rows],
            views.row_min_p[:rows],
            *self._merge_arrays(views, rows, blocks),
            views.last_row_index[:num_reqs] if has_carry else None,
            views.logits_source[:rows] if has_carry else None,
            out.pending_next_token[:num_reqs] if has_dual else None,
            views.seed_row[:num_reqs] if has_dual else None,
            views.mask_kinds[:num_reqs] if has_dual or self._has_canvas else None,
            *self._canvas_arrays(views, rows, blocks),
            page_size=self._config.cache.page_size,
            first_saved_row=self._first_saved_row,
            masked_rows_only=self._options.masked_rows_only,
            has_block_cache=self._options.fdv2_use_block_cache,
            is_entry=is_entry,
        )

    def _canvas_arrays(self, views: PlanViews, rows: int, blocks: int) -> tuple[Tensor | None, ...]:
        if not self._has_canvas:
            return (None,) * 8
        return (
            views.blk_prev_argmax[:blocks],
            self._buffers.sampler.canvas_argmax[:blocks],
            views.blk_stable_run[:blocks],
            views.blk_steps_left[:blocks],
            views.blk_renoise[:blocks],
            views.blk_request_slot[:blocks],
            views.row_pass_kind[:rows],
            views.row_self_cond[:rows],
        )

    def _merge_arrays(self, views: PlanViews, rows: int, blocks: int) -> tuple[Tensor | None, ...]:
        out = self._buffers.sampler
        if out.merge_valid.numel() == 0:
            return (None,) * 8
        return (
            out.merge_valid[:blocks],
            out.merge_topk_ids[:blocks],
            out.merge_topk_probs[:blocks],
            out.merge_residual[:blocks],
            views.merge_mask[:rows],
            views.merge_topk_ids[:rows],
            views.merge_topk_probs[:rows],
            views.merge_residual[:rows],
        )
