# SPDX-License-Identifier: Apache-2.0
"""The books of an engine: what each running request did, and what the run did.

Turns the events of the core into step outputs, and closed records into request outputs.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from diffulex.engine.metrics import RequestRecord, RunStats
from diffulex.engine.output import (
    BlockSnapshot,
    DenoiseSnapshot,
    RequestOutput,
    StepOutput,
    decode_token_ids_robust,
)
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.engine.model_runner import ModelRunner
    from diffulex.engine.tokenizer import Tokenizer

__all__ = ["Ledger"]

# AcceptFlag of include/diffulex/kernels/sampling.h.
_BAD_LOGITS = 32


class Ledger:
    """Records of running requests and totals of the run.

    `add` may be called from any thread; everything else belongs to the thread that steps.
    """

    def __init__(
        self,
        scheduler: _core.Scheduler,
        runner: ModelRunner,
        tokenizer: Tokenizer | None,
        mask_token_id: int,
    ) -> None:
        self.run_stats = RunStats()
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._mask_token_id = mask_token_id
        self._records: dict[int, RequestRecord] = {}
        self._snapshot_ids: set[int] = set()
        self._lock = threading.Lock()

    def add(
        self,
        request: _core.Request,
        token_ids: tuple[int, ...],
        max_tokens: int,
        has_snapshots: bool,
    ) -> int:
        """Hands a request to the scheduler and opens its record; returns its id."""
        # The step thread must not meet an id whose record does not exist yet.
        with self._lock:
            req_id = self._scheduler.add_request(request)
            self._records[req_id] = RequestRecord(
                req_id, token_ids, max_tokens, time.perf_counter()
            )
            if has_snapshots:
                self._snapshot_ids.add(req_id)
        return req_id

    def record(self, req_id: int) -> RequestRecord:
        """The open record of a request."""
        return self._records[req_id]

    def open_ids(self) -> set[int]:
        """Requests that are not finished."""
        with self._lock:
            return set(self._records)

    def close(self) -> None:
        """Drops every record; nothing can be booked afterwards."""
        with self._lock:
            self._records.clear()
            self._snapshot_ids.clear()
        del self._runner

    def start_step(self, req_ids: np.ndarray[Any, Any], now: float) -> None:
        """Ends the queueing time of requests that are run for the first time."""
        with self._lock:
            for req_id in req_ids:
                self._records[int(req_id)].start_step(now)

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
            results: dict[int, StepOutput] = {}
            for event in events.requests:
                results[event.req_id] = self._book_event(event, seconds)
            for finished in events.finished:
                req_id = finished.req_id
                error = _error_text(plan, output, finished)
                step = results.get(req_id, StepOutput(req_id))
                results[req_id] = self._finish(step, error)
            gone = [item.request_slot for item in events.finished]
            gone += [item.request_slot for item in events.preempted]
            self._runner.sampler.evict(gone)
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
        snapshot = None
        if event.req_id in self._snapshot_ids:
            snapshot = self._snapshot(event.req_id)
        return StepOutput(event.req_id, tuple(event.appended), event.new_tokens, snapshot=snapshot)

    def _book_prefill_writes(self, plan: _core.StepPlan, output: _core.SamplerOutput) -> None:
        # The first token behind a prompt that fills its last fast_dllm_v2 block.
        for index in np.flatnonzero(output.pending_next_token[: plan.num_reqs] >= 0):
            record = self._records[int(plan.req_ids[index])]
            record.prefill_positions.append(len(record.prompt_token_ids))
        num_blocks = plan.num_blocks
        if num_blocks == 0:
            return
        blocks, offsets = np.nonzero(output.write_ids[:num_blocks] >= 0)
        positions = plan.blk_start[blocks] + offsets
        req_ids = plan.req_ids[plan.blk_req[blocks]]
        for req_id, position in zip(req_ids, positions, strict=True):
            self._records[int(req_id)].prefill_positions.append(int(position))

    def _book_gauges(self) -> None:
        gauges, runner, stats = self._scheduler.stats(), self._runner, self.run_stats
        stats.num_pages = gauges.num_pages
        stats.peak_pages = max(stats.peak_pages, gauges.num_pages - gauges.num_free_pages)
        stats.num_graph_steps = runner.num_graph_steps
        stats.num_graph_fallbacks = runner.num_graph_fallbacks

    def _finish(self, step: StepOutput, error: str | None) -> StepOutput:
        result = self._scheduler.take_result(step.req_id)
        record = self._records.pop(step.req_id)
        self._snapshot_ids.discard(step.req_id)
        token_ids = tuple(result.output_ids)
        metrics = record.metrics(len(token_ids), result.num_cached_tokens, result.num_preemptions)
        output = RequestOutput(
            req_id=step.req_id,
            prompt_token_ids=record.prompt_token_ids,
            token_ids=token_ids,
            text=self._decode(token_ids),
            full_text=self._decode(record.prompt_token_ids + token_ids),
            completion_reason=str(result.finish_reason),
            metrics=metrics,
            is_auto_max_nfe=result.is_auto_nfe_cap,
            error=error,
        )
        return StepOutput(
            step.req_id,
            step.token_ids,
            step.new_tokens,
            is_finished=True,
            output=output,
            snapshot=step.snapshot,
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

    def _decode(self, token_ids: Sequence[int]) -> str:
        return (
            "" if self._tokenizer is None else decode_token_ids_robust(self._tokenizer, token_ids)
        )


def _error_text(
    plan: _core.StepPlan, output: _core.SamplerOutput, finished: _core.FinishedRequest
) -> str | None:
    """Why a request ended with reason `error`; None for every other reason."""
    if finished.finish_reason != _core.FinishReason.ERROR:
        return None
    num_blocks = plan.num_blocks
    req_ids = plan.req_ids[plan.blk_req[:num_blocks]]
    is_bad = (output.flags[:num_blocks] & _BAD_LOGITS) != 0
    bad = np.flatnonzero(is_bad & (req_ids == finished.req_id))
    if bad.size > 0:
        start = int(plan.blk_start[int(bad[0])])
        return (
            f"request {finished.req_id}: expected finite logits for the block at position {start},"
            " got a row without any"
        )
    return f"request {finished.req_id}: expected progress in every decode step, got none"
