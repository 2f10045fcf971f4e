# SPDX-License-Identifier: Apache-2.0
"""Decode steps that the device plans itself, so that it never waits for the host.

    host     schedule k | start | launch k + 1 | wait for k, complete it | adopt k + 1 | launch k + 2
    device                 step k, plan of k + 1 | step k + 1, plan of k + 2 | ...

A step is one sequence of launches over static arrays: forward, head, sampler, `advance_decode`. The
last one applies the sampler's decisions by the rules of the core and writes the arrays of the next
step, so that the host only enqueues. The scheduler stays the authority: it completes every step
from the sampler's output, which comes back in one copy, one step late at most.

Symbols: R requests (dummies included), Q rows each, N blocks of B positions, T = R Q; n logits rows.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diffulex.distributed.layout import Sizes
from diffulex.log import get_logger
from diffulex.profiling.scopes import Stage
from diffulex.runner.batch import (
    ArenaViews,
    StepShape,
    device_memory,
    host_memory,
    new_event,
)
from diffulex.runner.decode_graphs import Bucket, products_per_row
from diffulex.runner.loop_steps import LoopEntry, LoopListener, LoopStep, StepVariant
from diffulex.runner.model_call import head_logits
from diffulex.runner.packed_steps import PackedSteps
from diffulex.runner.plan_check import PlanCheck
from diffulex.runner.row_share import HOST_LIMITS, RowShare
from diffulex.runner.step_graphs import NUM_WARMUPS, StepGraphs
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.config.table import SamplerConfig
    from diffulex.runner.batch import StepBuffers
    from diffulex.runner.decode_graphs import DecodeGraphs
    from diffulex.runner.sampler_inputs import SamplerInputsBuilder
    from diffulex.strategies.traits import StrategyTraits

__all__ = ["DecodeLoop", "has_graph_of_logits", "num_loop_logits"]

logger = get_logger(__name__)

# The result of one step is read while the next one runs.
_NUM_OUTPUTS = 2
_MERGE_ROWS = ("merge_mask", "merge_topk_ids", "merge_topk_probs", "merge_residual")
# A graph keeps its logits; larger steps run without one, and their launches vanish beside the work.
_MAX_GRAPH_LOGITS_BYTES = 1 << 30


def num_loop_logits(config: Config, bucket: Bucket) -> int:
    """Rows of a step of this shape that the head takes on the device, which alone knows how many it
    samples: all that it might."""
    return bucket.packed_rows or bucket.num_reqs * config.decode_logits_rows


def has_graph_of_logits(config: Config, bucket: Bucket) -> bool:
    """Whether a step of this shape, its logits included, may be a graph."""
    return _has_graph_of_rows(config, num_loop_logits(config, bucket))


def _has_graph_of_rows(config: Config, num_logits: int) -> bool:
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    num_bytes = num_logits * config.model.spec.vocab_size * dtype.itemsize
    return num_bytes <= _MAX_GRAPH_LOGITS_BYTES


def _narrows_draws(sampler: SamplerConfig) -> bool:
    """Whether a request that draws with default settings draws from a part of the vocabulary."""
    top_p = 1.0 if sampler.top_p is None else sampler.top_p
    return (sampler.top_k or 0) > 0 or top_p < 1.0 or (sampler.min_p or 0.0) > 0.0


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
        traits: of the strategy whose state machine the core runs.
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
        traits: StrategyTraits,
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
        self._has_dual_cache, self._has_canvas = traits.has_dual_cache, traits.has_canvas
        ends = torch.arange(options.max_num_reqs + 1, dtype=torch.int32, device=device)
        self._uniform_ends = ends * self._num_rows
        # The host's plans hold fewer rows than the device's; see _spread_rows.
        self._is_ragged = self._has_dual_cache or graphs.is_packed
        self._layout = _core.plan_layout(options)
        num_bytes = _core.DecodeBatch.arena_bytes(options)
        self._host = host_memory(num_bytes, is_cuda)
        self._batch = _core.DecodeBatch(options, self._host.data_ptr(), num_bytes)
        self._state = device_memory(num_bytes, device)
        staged = ArenaViews(self._host, self._batch.fields())
        state = ArenaViews(self._state, self._batch.fields())
        self._requests, self._staged_pages = state.requests, staged.page_tables
        # What a step starts with beside its pages, and where the device has it.
        self._uploads = [(staged.requests, state.requests), (staged.windows, state.windows)]
        if self._has_canvas:
            # The sampler reads it, and the rules replace it.
            self._uploads.append((staged.prev_argmax, buffers.views.blk_prev_argmax))
        self._uploaded = new_event() if is_cuda else None
        self._outputs = [_Output(options, is_cuda=is_cuda) for _ in range(_NUM_OUTPUTS)]
        self._next_output = 0
        #: Requests of the graph that made the result of each place; -1: none did.
        self._graph_buckets = [-1] * _NUM_OUTPUTS
        self._num_blocks = [0] * _NUM_OUTPUTS
        self._variant = StepVariant(Bucket(0, 0, 0), is_drawn=False, is_filtered=False)
        self._step_graphs: StepGraphs[StepVariant] | None = None
        self._device = device
        self._check = PlanCheck(options, traits) if config.kernel.check_run_ahead else None
        #: Whether the step after the one that `start` enqueued may run; asked early, for its pages.
        self._verdict: _core.RunAhead | None = None
        #: Told of the steps; None: there are no other ranks.
        self.listener: LoopListener | None = None
        self._has_ranks = Sizes.of_engine(config.parallel).world > 1
        #: None: only the host packs.
        self._packed: PackedSteps | None = None
        if graphs.is_packed:
            self._packed = PackedSteps(config, graphs, self._batch.fields(), self._state)
        self._host_share: RowShare | None = None
        if graphs.is_packed and config.kernel.run_ahead == "auto":
            products = products_per_row(config)
            self._host_share = RowShare(self._num_rows, products, HOST_LIMITS)
        #: Launches the steps in flight, where they hold valid rows alone.
        self._packing: PackedSteps | None = None
        #: What follows the forward of packed steps, where there was no memory to capture it.
        self._uncaptured: set[StepVariant] = set()
        #: Steps that replayed a graph.
        self.num_graph_steps = 0
        #: Steps that were enqueued before the host had completed the previous one.
        self.num_ahead_steps = 0
        #: Steps that held valid rows alone.
        self.num_packed_steps = 0

    @property
    def _is_strict(self) -> bool:
        """Whether a graph without memory is an error: ranks would all have to do without it."""
        return self._graphs.is_strict or self._has_ranks

    @property
    def graph_buckets(self) -> tuple[int, ...]:
        """Request counts that have a CUDA graph."""
        graphs = self._step_graphs
        return () if graphs is None else tuple(sorted({v.bucket.num_reqs for v in graphs.keys}))

    @property
    def num_graphs(self) -> int:
        """Graphs that are captured."""
        return 0 if self._step_graphs is None else len(self._step_graphs)

    @property
    def arrays(self) -> object:
        """Tensors of the loop beside those of the step buffers."""
        packed = None if self._packed is None else self._packed.arrays
        outputs = [o.host for o in self._outputs]
        return self._host, self._state, self._uniform_ends, outputs, packed

    def graph_bucket(self, place: int) -> int:
        """Requests of the graph that made the result of a place; -1: no graph did."""
        return self._graph_buckets[place]

    def takes(self, scheduler: _core.Scheduler, plan: _core.StepPlan) -> bool:
        """Whether the plan in flight is a step for this loop."""
        bucket = self._bucket_for(plan)
        return (
            bucket is not None
            and not self._leaves_to_the_host(plan, bucket)
            and scheduler.can_run_ahead(plan)
        )

    def _leaves_to_the_host(self, plan: _core.StepPlan, bucket: Bucket) -> bool:
        """Whether the steps around `plan` are so empty that the host had better pack them, where the
        device does not."""
        share = self._host_share
        return share is not None and share.is_low(plan) and not self._wants_packed(plan, bucket)

    def _wants_packed(self, plan: _core.StepPlan, bucket: Bucket) -> bool:
        """Whether a step of this shape behind `plan`, or of it, is to hold valid rows alone."""
        return self._packed is not None and self._packed.wants(plan, bucket)

    def _bucket_for(self, plan: _core.StepPlan) -> Bucket | None:
        if plan.kind != _core.PlanKind.DECODE:
            return None
        if plan.uniform_q_len != self._num_rows and not self._is_ragged:
            return None
        return self._graphs.bucket_of_rows(plan, self._num_rows)

    def start(self, scheduler: _core.Scheduler, plan: _core.StepPlan) -> int:
        """Hands the plan in flight to the device and enqueues its step; returns its result's place."""
        bucket = self._bucket_for(plan)
        assert bucket is not None
        self._packing = self._packed if self._wants_packed(plan, bucket) else None
        self._await_uploads()
        scheduler.start_run_ahead(plan, self._batch)
        batch = self._batch
        variant = StepVariant(bucket, batch.any_drawn, batch.any_filtered, batch.any_penalised)
        self._verdict = scheduler.reserve_ahead(self._batch)
        row_starts = np.asarray(plan.cu_seqlens_q)
        num_page_rows = self._num_page_rows(self._verdict)
        if self.listener is not None:
            used_bytes = plan.used_bytes()
            arrays = self._host.numpy().tobytes()
            starts = row_starts.astype(np.int32).tobytes()
            self.listener.entered(
                LoopEntry(
                    variant,
                    self._buffers.staged,
                    used_bytes,
                    starts,
                    num_page_rows,
                    arrays,
                    self._packing is not None,
                )
            )
        self._enter(variant, row_starts, num_page_rows)
        if self._check is not None:
            self._check.enter(plan)
        return self._launch()

    def _enter(
        self, variant: StepVariant, row_starts: np.ndarray[Any, Any], num_page_rows: int
    ) -> None:
        """Moves the plan that is staged and the arrays of its requests to the device."""
        bucket = variant.bucket
        self._variant = variant
        self._prepare_variant()
        self._buffers.upload()
        if self._packing is None:
            self._spread_rows(row_starts, bucket)
        self._upload_pages(num_page_rows)
        for host, device in self._uploads:
            device[: bucket.num_reqs].copy_(host[: bucket.num_reqs], non_blocking=True)
        self._record_uploads()
        self._advance(bucket, is_entry=True, is_packed=self._packing is not None)
        if self._packing is not None:
            self._packing.fetch_counts()

    def follow(self, told: LoopEntry | LoopStep) -> int:
        """Enqueues a step of which another rank has told; returns its result's place."""
        if isinstance(told, LoopEntry):
            self._await_uploads()
            self._host.copy_(torch.frombuffer(bytearray(told.batch), dtype=torch.uint8))
            self._buffers.stage(told.arena, told.used_bytes)
            self._packing = self._packed if told.is_packed else None
            self._enter(told.variant, np.frombuffer(told.row_starts, np.int32), told.num_page_rows)
        else:
            if told.pages:
                self._await_uploads()
                pages = torch.frombuffer(bytearray(told.pages), dtype=torch.int32)
                pages = pages.view(-1, self._staged_pages.size(1))
                self._staged_pages[: len(pages)].copy_(pages)
                self._upload_pages(len(pages))
                self._record_uploads()
            self._variant = told.variant
        return self._launch()

    def decided(self, place: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Ids and flags of the blocks of a step that the loop runs under `place`; waits for it."""
        self.await_result(place)
        output = self._outputs[place].output
        num_blocks = self._num_blocks[place]
        return output.write_ids[:num_blocks], output.flags[:num_blocks]

    def run_ahead(self, scheduler: _core.Scheduler, plan: _core.StepPlan) -> int | None:
        """Enqueues the next step, if that is allowed; returns the place of its result."""
        verdict, self._verdict = self._verdict, None
        num_page_rows = 0
        variant = self._variant_ahead(scheduler)
        if self._leaves_to_the_host(plan, variant.bucket):
            return None
        if self._wants_packed(plan, variant.bucket) != (self._packing is not None):
            return None  # `start` changes that
        if verdict is None:
            if self._has_smaller_bucket(plan):
                return None
            self._await_uploads()
            verdict = scheduler.reserve_ahead(self._batch)
            num_page_rows = self._num_page_rows(verdict)
            self._upload_pages(num_page_rows)
            self._record_uploads()
        if verdict == _core.RunAhead.STOP:
            return None
        if self._packing is None and self._is_capturing(variant):
            return None  # `start` captures it, with nothing in flight
        self._variant = variant
        if self.listener is not None:
            pages = self._staged_pages[:num_page_rows].numpy().tobytes()
            self.listener.went_on(LoopStep(variant, pages))
        self.num_ahead_steps += 1
        return self._launch()

    def _spread_rows(self, starts: np.ndarray[Any, Any], bucket: Bucket) -> None:
        """Gives every request room for all of its rows. The entry writes these anew, but for merge
        descriptors, which only the sampler makes: they move from where the host has packed them."""
        views = self._buffers.views
        views.cu_seqlens_q[: bucket.num_reqs + 1].copy_(self._uniform_ends[: bucket.num_reqs + 1])
        if self._options.token_merge_top_k == 0:
            return
        num_rows = int(starts[-1])
        first_rows = np.arange(len(starts) - 1) * self._num_rows - starts[:-1]
        rows = np.arange(num_rows) + np.repeat(first_rows, np.diff(starts))
        places = torch.from_numpy(rows).to(self._buffers.device)
        packed = {name: getattr(views, name)[:num_rows].clone() for name in _MERGE_ROWS}
        views.merge_mask[: bucket.num_rows].zero_()
        for name, values in packed.items():
            getattr(views, name)[places] = values

    def _variant_ahead(self, scheduler: _core.Scheduler) -> StepVariant:
        """The variant of the next step, whose context length the host knows already.

        Scheduling on the host gives the same one, unless requests end in the step in flight: then the
        batch is smaller, and its bound may be too. With a block cache the bound may be that of the
        next mode.
        """
        bucket = self._variant.bucket
        bound = self._graphs.bound(
            bucket.num_reqs, bucket.rows_per_request, scheduler.context_len_ahead()
        )
        return self._variant._replace(bucket=bucket._replace(max_context_len=bound, packed_rows=0))

    def _num_page_rows(self, verdict: _core.RunAhead) -> int:
        """Requests whose page tables have changed."""
        return self._batch.size if verdict == _core.RunAhead.GO_NEW_PAGES else 0

    def _upload_pages(self, num_rows: int) -> None:
        if num_rows > 0:
            pages = self._buffers.views.page_tables
            pages[:num_rows].copy_(self._staged_pages[:num_rows], non_blocking=True)

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
        self.await_result(place)
        if self._check is not None:
            self._check.compare(plan, place, self._graphs)
        scheduler.collect_output(plan, result.output, self._buffers.output)
        return self._buffers.output

    def await_result(self, place: int) -> None:
        """Waits until the result of a place is there."""
        copied = self._outputs[place].copied
        if copied is not None:
            copied.synchronize()

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
        is_penalised = self._options.is_editing and self._options.penalty_lambda > 0
        for bucket in self._graphs.shapes():
            if bucket.num_rows != bucket.num_reqs * self._num_rows:
                continue  # a shape of the host's loop, or of forwards alone
            for is_drawn, is_filtered in kinds:
                variant = StepVariant(bucket, is_drawn, is_filtered, is_penalised)
                if self._is_capturing(variant):
                    self._capture(variant)
        forwards = self._graphs.forwards
        if self._packed is not None and forwards is not None:
            for bucket in self._packed.capture(forwards, is_strict=self._is_strict):
                for is_drawn, is_filtered in kinds:
                    variant = StepVariant(bucket, is_drawn, is_filtered, is_penalised)
                    self._capture_heads(self._packed.heads(variant))
        seconds = time.perf_counter() - start
        logger.info("captured %d CUDA graphs in %.1f s", len(self._step_graphs), seconds)

    def _is_capturing(self, variant: StepVariant) -> bool:
        """Whether the variant gets a graph that it has not yet."""
        graphs, key = self._step_graphs, variant.key
        if graphs is None or key in graphs or key in self._uncaptured:
            return False
        if self._has_ranks and variant.is_drawn:
            return False  # draws take whole rows, which ranks exchange outside of graphs
        if not self._graphs.can_capture(variant.bucket):
            return False
        return _has_graph_of_rows(self._config, self._num_logits(variant))

    def _num_logits(self, variant: StepVariant) -> int:
        return variant.head_rows or num_loop_logits(self._config, variant.bucket)

    def _capture(self, variant: StepVariant) -> None:
        assert self._step_graphs is not None

        def fill() -> None:
            self._fill(variant.bucket)
            # Requests that do not run: the rules then change nothing. Nor does the sampler what it
            # keeps of others.
            self._requests.zero_()
            self._buffers.views.logits_rows.zero_()
            self._buffers.views.blk_row_index.fill_(-1)
            self._buffers.views.blk_valid_len.zero_()

        run, num_warmups = functools.partial(self._enqueue, variant), NUM_WARMUPS
        if variant.head_rows:
            forwards = self._graphs.forwards
            assert forwards is not None
            run = functools.partial(self._decide, variant, forwards.hidden)
            num_warmups = 1 if len(self._step_graphs) else NUM_WARMUPS
        self._step_graphs.capture(variant.key, fill, run, num_warmups)

    def _capture_heads(self, heads: Iterable[StepVariant]) -> None:
        """Captures what follows the forwards of packed steps; nothing is in flight. Where there is no
        memory for a graph, it runs without."""
        for variant in heads:
            if not self._is_capturing(variant):
                continue
            try:
                self._capture(variant)
            except torch.OutOfMemoryError as error:
                if self._is_strict:
                    raise
                self._uncaptured.add(variant.key)
                logger.warning("no graph of %s: %s", variant.key, error)

    def _prepare_variant(self) -> None:
        """Captures a variant that is needed for the first time; the device is idle now."""
        if self._packing is not None:
            self._capture_heads(self._packing.heads(self._variant))
        elif self._is_capturing(self._variant):
            self._capture(self._variant)

    def _has_smaller_bucket(self, plan: _core.StepPlan) -> bool:
        num_reqs = plan.num_reqs - plan.num_padded_reqs
        return any(
            num_reqs <= count < self._variant.bucket.num_reqs
            for count in self._graphs.buckets[self._num_rows]
        )

    def _launch(self) -> int:
        if self._packing is not None:
            self._variant = self._packing.fitted(self._variant)
            self.num_packed_steps += 1
        place = self._next_output
        self._next_output = (place + 1) % _NUM_OUTPUTS
        variant, num_reqs = self._variant, self._variant.bucket.num_reqs
        self._num_blocks[place] = num_reqs * self._options.buffer_size
        if self._check is not None:
            self._check.keep(place, self._buffers.views, variant)
        graphs, key = self._step_graphs, variant.key
        if graphs is not None and key in graphs:
            self._replay(graphs, variant, key)
            self._graph_buckets[place] = num_reqs
        else:
            self._enqueue(variant)
            self._graph_buckets[place] = -1
        if self._packing is not None:
            self._packing.fetch_counts()
        result = self._outputs[place]
        result.host.copy_(self._buffers.output_device, non_blocking=True)
        if result.copied is not None:
            result.copied.record()
        return place

    def _replay(
        self, graphs: StepGraphs[StepVariant], variant: StepVariant, key: StepVariant
    ) -> None:
        if variant.head_rows:
            self._hidden_of(variant)
        graphs.replay(key)
        self.num_graph_steps += 1

    def stages(self, area: str, graph: str) -> list[Stage]:
        """Stages of the steps it runs.

        Args:
            area: of the strategy.
            graph: what the replay of a graph is called there.
        """
        names = {
            "_launch": "model_forward",
            "_enqueue": "eager_decode",
            "_replay": graph,
            "collect": "wait_for_output",
        }
        return [Stage(self, method, area, name) for method, name in names.items()]

    def _enqueue(self, variant: StepVariant) -> None:
        self._decide(variant, self._hidden_of(variant))

    def _hidden_of(self, variant: StepVariant) -> Tensor:
        """Hidden states of the rows; those of a packed step have a graph of their own."""
        forwards, bucket = self._graphs.forwards, variant.bucket
        if variant.head_rows and forwards is not None and bucket in forwards:
            return forwards.replay(bucket)
        return self._forward(bucket)

    def _decide(self, variant: StepVariant, hidden: Tensor) -> None:
        """The step behind its forward: head, sampler, and the plan of the next one."""
        bucket, views = variant.bucket, self._buffers.views
        num_reqs, num_rows = bucket.num_reqs, bucket.num_rows
        num_logits = self._num_logits(variant)
        rows: Tensor | None = views.first("logits_rows", num_logits)
        if variant.head_rows or num_logits < num_rows:
            assert rows is not None
            hidden, rows = hidden.index_select(0, rows), None
        logits = head_logits(self._model, hidden)
        shape = StepShape(
            num_rows=num_rows,
            num_reqs=num_reqs,
            num_blocks=num_reqs * self._options.buffer_size,
            num_logits_rows=num_logits,
            any_sampled=variant.is_drawn,
            num_filtered_rows=num_logits if variant.is_filtered else 0,
            num_saved_source_rows=num_reqs
            if variant.is_drawn and self._inputs_builder.has_carry
            else 0,
            any_penalised=variant.is_penalised,
        )
        self._sampler(self._inputs_builder.inputs(views, shape, logits, rows))
        self._advance(bucket, is_entry=False, is_packed=variant.head_rows > 0)

    def _advance(self, bucket: Bucket, *, is_entry: bool, is_packed: bool) -> None:
        assert self._buffers.plan_device is not None  # there is a mirror
        torch.ops.diffulex.advance_decode(
            self._buffers.plan_device,
            self._buffers.output_device,
            self._state,
            layout=self._layout,
            num_reqs=bucket.num_reqs,
            masked_rows_only=self._options.masked_rows_only,
            has_block_cache=self._options.fdv2_use_block_cache,
            is_entry=is_entry,
            packs_rows=is_packed,
        )
