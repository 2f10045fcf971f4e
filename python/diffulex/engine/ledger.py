# SPDX-License-Identifier: Apache-2.0
"""The books of an engine: what each running request did, and what the run did.

Turns the events of the core into step outputs, and closed records into request outputs.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from diffulex.checkpoint.detokenizer import robust_decode
from diffulex.distributed.executor import Watch
from diffulex.engine.answers import RequestEnd, close, deliver, open_record
from diffulex.engine.metrics import RequestRecord, RunStats
from diffulex.engine.output import BlockSnapshot, DenoiseSnapshot, StepOutput
from diffulex.ops.sampling import AcceptFlag
from diffulex.trace.trajectory import TraceRecorder
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from diffulex.checkpoint.detokenizer import Decode
    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.distributed.executor import Executor
    from diffulex.engine.answers import LogprobsOf

__all__ = ["Ledger"]


class Ledger:
    """Records of running requests and totals of the run.

    `add` may be called from any thread; everything else belongs to the thread that steps.
    """

    def __init__(
        self,
        scheduler: _core.Scheduler,
        executor: Executor,
        tokenizer: Tokenizer | None,
        mask_token_id: int,
    ) -> None:
        self.run_stats = RunStats()
        self._scheduler = scheduler
        self._executor = executor
        self._tokenizer = tokenizer
        self._mask_token_id = mask_token_id
        self._records: dict[int, RequestRecord] = {}
        self._snapshot_ids: set[int] = set()
        #: Requests whose answer is over, until the scheduler has let them go.
        self._settling: set[int] = set()
        self._model_stops = frozenset(scheduler.options.stop_token_ids)
        self._decoders: dict[bool, Decode] = {}
        if tokenizer is not None:
            self._decoders = {skip: robust_decode(tokenizer, skip) for skip in (False, True)}
        self._lock = threading.Lock()
        #: Blocks the last step denoised.
        self.num_active_blocks = 0
        #: Pages in use after the last step.
        self.num_used_pages = 0
        #: Called with the forwards that a block was denoised in, when its KV enters the cache.
        self.on_block: Callable[[int], None] | None = None
        self._block_steps: dict[int, dict[int, int]] = {}

    def add(
        self,
        request: _core.Request,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        special_stops: Mapping[int, str],
        *,
        has_snapshots: bool,
        has_text: bool,
    ) -> int:
        """Hands a request to the scheduler and opens its record; returns its id.

        Args:
            request: of the core.
            token_ids: its prompt.
            params: what it was asked for.
            special_stops: stop texts that are stop ids of the request as well, by id.
            has_snapshots: its step outputs carry the buffer.
            has_text: its step outputs carry text.
        """
        if params.stop and self._tokenizer is None:
            raise ValueError("stop: expected an engine with a tokenizer, got one without")
        stops: list[int] = []
        if params.min_tokens > 0 and not params.ignore_eos:
            stops = [*request.sampling_params.stop_token_ids, *self._model_stops]
        # The step thread must not meet an id whose record does not exist yet.
        with self._lock:
            req_id = self._scheduler.add_request(request)
            record = open_record(
                *(req_id, token_ids, params, self._decoder(params), special_stops),
                has_text=has_text,
                added_at=time.perf_counter(),
            )
            self._records[req_id] = record
            if params.return_trajectory != "none":
                level = params.return_trajectory
                record.trace = TraceRecorder(level, len(token_ids), self._mask_token_id)
            if params.logprobs is not None or stops:
                watch = Watch(len(token_ids), params.logprobs, params.min_tokens, stops)
                self._executor.watch(req_id, watch)
            if has_snapshots:
                self._snapshot_ids.add(req_id)
        return req_id

    def record(self, req_id: int) -> RequestRecord:
        """The open record of a request."""
        return self._records[req_id]

    def watch_buffer(self, req_id: int) -> None:
        """Adds snapshots to the step outputs of a request from now on; unknown ids are ignored."""
        with self._lock:
            if req_id in self._records:
                self._snapshot_ids.add(req_id)

    @property
    def is_settling(self) -> bool:
        """Whether the scheduler holds requests whose answers are over, and no other ones."""
        return bool(self._settling) and not self._records

    def open_ids(self) -> set[int]:
        """Requests that are not finished."""
        with self._lock:
            return set(self._records)

    def close(self) -> None:
        """Drops every record; nothing can be booked afterwards."""
        with self._lock:
            self._records.clear()
            self._snapshot_ids.clear()
            self._settling.clear()

    def start_step(self, req_ids: np.ndarray[Any, Any], now: float) -> None:
        """Ends the queueing time of requests that are run for the first time."""
        with self._lock:
            for req_id in req_ids:
                # A step that ran ahead may have requests whose answers are over.
                record = self._records.get(int(req_id))
                if record is not None:
                    record.start_step(now)

    def book(
        self,
        plan: _core.StepPlan,
        output: _core.SamplerOutput,
        events: _core.StepEvents,
        seconds: float,
    ) -> list[StepOutput]:
        """Books a completed step and turns its events into outputs."""
        with self._lock:
            if events.kind == _core.PlanKind.PREFILL:
                self._book_prefill_writes(plan, output)
            self.num_active_blocks = 0 if events.kind == _core.PlanKind.IDLE else plan.num_blocks
            if self.on_block is not None:
                self._book_blocks(plan, events, self.on_block)
            results: dict[int, StepOutput] = {}
            for event in events.requests:
                if event.req_id not in self._settling:
                    results[event.req_id] = self._book_event(event, seconds)
            for finished in events.finished:
                req_id = finished.req_id
                if req_id in self._settling:
                    self._settle(req_id)
                    continue
                error = _error_text(plan, output, finished)
                step = results.get(req_id, StepOutput(req_id))
                results[req_id] = self._finish(step, error)
            gone = [item.request_slot for item in events.finished]
            gone += [item.request_slot for item in events.preempted]
            if gone:
                self._executor.evict(gone)
            self._book_gauges()
        return list(results.values())

    def _book_event(self, event: _core.RequestEvent, seconds: float) -> StepOutput:
        record = self._records[event.req_id]
        record.status = "PREFILLING" if event.is_prefill else "DECODING"
        record.add_step(seconds, not event.is_prefill, event.new_tokens, event.appended)
        stats = self.run_stats
        stats.decided_tokens += event.new_tokens
        stats.committed_tokens += len(event.appended)
        if not event.is_prefill:
            stats.decode_tokens += event.new_tokens
        if record.trace is not None:
            record.trace.add_step(
                self._scheduler.snapshot(event.req_id),
                event.appended,
                seconds=seconds,
                is_prefill=event.is_prefill,
                new_tokens=event.new_tokens,
            )
        snapshot = None
        if event.req_id in self._snapshot_ids:
            snapshot = self._snapshot(event.req_id)
        step = deliver(
            record, event.appended, event.new_tokens, snapshot, self._logprobs_of(event.req_id)
        )
        return self._cut(step) if record.is_over and not event.is_finished else step

    def _book_prefill_writes(self, plan: _core.StepPlan, output: _core.SamplerOutput) -> None:
        # The first token after a prompt that fills its last fast_dllm_v2 block.
        first = plan.num_decode_reqs
        for index in np.flatnonzero(output.pending_next_token[first : plan.num_reqs] >= 0):
            record = self._records[int(plan.req_ids[first + index])]
            record.prefill_positions.append(len(record.prompt_token_ids))
        first_block, num_blocks = plan.first_block(first), plan.num_blocks
        if num_blocks == first_block:
            return
        blocks, offsets = np.nonzero(output.write_ids[first_block:num_blocks] >= 0)
        blocks += first_block
        positions = plan.blk_start[blocks] + offsets
        req_ids = plan.req_ids[plan.blk_req[blocks]]
        for req_id, position in zip(req_ids, positions, strict=True):
            self._records[int(req_id)].prefill_positions.append(int(position))

    def _book_blocks(
        self, plan: _core.StepPlan, events: _core.StepEvents, on_block: Callable[[int], None]
    ) -> None:
        known, count = self._block_steps, self.num_active_blocks
        if count > 0:
            req_ids = plan.req_ids[plan.blk_req[:count]].tolist()
            block_ids, steps = plan.blk_id[:count].tolist(), plan.blk_total_steps[:count].tolist()
            for req_id, block_id, num_steps in zip(req_ids, block_ids, steps, strict=True):
                known.setdefault(req_id, {})[block_id] = num_steps
        for block in events.committed:
            num_steps = known.get(block.req_id, {}).pop(block.block_id, 0)
            if num_steps > 0:  # prompt blocks are never denoised
                on_block(num_steps)
        for finished in events.finished:
            known.pop(finished.req_id, None)

    def _book_gauges(self) -> None:
        gauges, counts, stats = self._scheduler.stats(), self._executor.counts, self.run_stats
        self.num_used_pages = gauges.num_pages - gauges.num_free_pages
        stats.num_pages = gauges.num_pages
        stats.peak_pages = max(stats.peak_pages, self.num_used_pages)
        stats.num_graph_steps = counts.graph
        stats.num_graph_fallbacks = counts.graph_fallbacks
        stats.num_graphs = counts.captured

    def _finish(self, step: StepOutput, error: str | None) -> StepOutput:
        """The last output of a request that the scheduler has ended."""
        generated = self._generated(step.req_id)
        result = self._scheduler.take_result(step.req_id)
        end = RequestEnd(
            tuple(result.output_ids),
            str(result.finish_reason),
            generated,
            result.num_cached_tokens,
            result.num_preemptions,
            result.is_auto_nfe_cap,
            error,
        )
        step = self._close(step, end)
        self._executor.unwatch(step.req_id)
        return step

    def _cut(self, step: StepOutput) -> StepOutput:
        """The last output of a request whose answer is over, though the scheduler would go on."""
        req_id = step.req_id
        request = self._scheduler.find_request(req_id)
        assert request is not None
        counts = request.num_cached_tokens, request.num_preemptions
        end = RequestEnd((), "stop", self._generated(req_id), *counts)
        self._scheduler.abort(req_id)
        self._settling.add(req_id)
        self._records[req_id].is_cut = True
        return self._close(step, end)

    def _settle(self, req_id: int) -> None:
        """The scheduler has let go of a request that was cut."""
        self._settling.discard(req_id)
        self._scheduler.take_result(req_id)
        self._executor.unwatch(req_id)

    def _close(self, step: StepOutput, end: RequestEnd) -> StepOutput:
        self._snapshot_ids.discard(step.req_id)
        record = self._records.pop(step.req_id)
        return close(record, step, end, self._logprobs_of(step.req_id))

    def _logprobs_of(self, req_id: int) -> LogprobsOf:
        return partial(self._executor.logprobs, req_id)

    def _generated(self, req_id: int) -> tuple[int, ...]:
        """Every position of the answer's blocks, also after its end, masks included."""
        request = self._scheduler.find_request(req_id)
        if request is None or request.limit_end == 0:
            return ()
        end = request.settled_end
        if self._mask_token_id >= 0:
            end = max(end, min(request.buffer.valid_end, request.limit_end))
        return tuple(request.tokens[request.prompt_len : end])

    def block_state(self, req_id: int) -> str:
        """Open blocks of a request, such as ``b3/8 act=2 mask=17/64``; empty if there are none."""
        record = self._records.get(req_id)
        blocks = () if record is None else self._snapshot(req_id).blocks
        if record is None or not blocks:
            return ""
        start, size = blocks[0].start, len(blocks[0].token_ids)
        first = -(-(start - len(record.prompt_token_ids)) // size) + 1
        end = len(record.prompt_token_ids) + record.max_tokens
        num_active = sum(block.status == "ACTIVE" for block in blocks)
        num_masks = sum(block.token_ids.count(self._mask_token_id) for block in blocks)
        return (
            f"b{first}/{first + (end - 1 - start) // size} act={num_active}"
            f" mask={num_masks}/{size * len(blocks)}"
        )

    def _snapshot(self, req_id: int) -> DenoiseSnapshot:
        state = self._scheduler.snapshot(req_id)
        blocks = (
            BlockSnapshot(
                block_id=block.block_id,
                start=block.start,
                status=str(block.status),
                token_ids=tuple(block.tokens),
                newly_written=tuple(block.newly_written),
                confidences=tuple(block.confidences),
            )
            for block in state.blocks
        )
        return DenoiseSnapshot(
            req_id=req_id,
            mask_token_id=self._mask_token_id,
            prompt_len=len(self._records[req_id].prompt_token_ids),
            token_ids=tuple(state.output_ids),
            blocks=tuple(blocks),
        )

    def _decoder(self, params: SamplingParams) -> Decode | None:
        if self._tokenizer is None:
            return None
        return self._decoders[params.skip_special_tokens is not False]


def _error_text(
    plan: _core.StepPlan, output: _core.SamplerOutput, finished: _core.FinishedRequest
) -> str | None:
    """Why a request ended with reason `error`; None for every other reason."""
    if finished.finish_reason != _core.FinishReason.ERROR:
        return None
    num_blocks = plan.num_blocks
    req_ids = plan.req_ids[plan.blk_req[:num_blocks]]
    is_bad = (output.flags[:num_blocks] & AcceptFlag.BAD_LOGITS) != 0
    bad = np.flatnonzero(is_bad & (req_ids == finished.req_id))
    if bad.size > 0:
        start = int(plan.blk_start[int(bad[0])])
        return (
            f"request {finished.req_id}: expected finite logits for the block at position {start},"
            " got a row without any"
        )
    return f"request {finished.req_id}: expected progress in every decode step, got none"
