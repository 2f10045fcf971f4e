# SPDX-License-Identifier: Apache-2.0
"""The books of an engine: what each running request did, and what the run did.

Turns the events of the core into step outputs, and closed records into request outputs.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from diffulex.checkpoint.detokenizer import robust_decode
from diffulex.engine.answer_text import AnswerText
from diffulex.engine.metrics import RequestRecord, RunStats
from diffulex.engine.output import BlockSnapshot, DenoiseSnapshot, RequestOutput, StepOutput
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diffulex.checkpoint.detokenizer import Decode
    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.runner.model_runner import ModelRunner

__all__ = ["Ledger"]

# AcceptFlag of include/diffulex/ops/sampling.h.
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
        self._model_stops = frozenset(scheduler.options.stop_token_ids)
        self._decoders: dict[bool, Decode] = {}
        if tokenizer is not None:
            self._decoders = {skip: robust_decode(tokenizer, skip) for skip in (False, True)}
        self._lock = threading.Lock()
        #: Blocks the last step denoised.
        self.num_active_blocks = 0
        #: Called with the forwards that a block was denoised in, when its KV enters the cache.
        self.on_block: Callable[[int], None] | None = None
        self._block_steps: dict[int, dict[int, int]] = {}

    def add(
        self,
        request: _core.Request,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        has_snapshots: bool,
        special_stops: Mapping[int, str],
    ) -> int:
        """Hands a request to the scheduler and opens its record; returns its id.

        Args:
            request: of the core.
            token_ids: its prompt.
            params: what it was asked for.
            has_snapshots: its step outputs carry the buffer.
            special_stops: stop texts that are stop ids of the request as well, by id.
        """
        if params.stop and self._tokenizer is None:
            raise ValueError("stop: expected an engine with a tokenizer, got one without")
        stops: list[int] = []
        if params.min_tokens > 0 and not params.ignore_eos:
            stops = [*request.sampling_params.stop_token_ids, *self._model_stops]
        # The step thread must not meet an id whose record does not exist yet.
        with self._lock:
            req_id = self._scheduler.add_request(request)
            record = RequestRecord(req_id, token_ids, params.max_tokens, time.perf_counter())
            record.stop_token_ids = frozenset(params.stop_token_ids)
            record.special_stops = special_stops
            record.decode = self._decoder(params)
            if params.stop:
                record.answer = AnswerText(
                    record.decode, params.stop, params.include_stop_str_in_output, params.min_tokens
                )
            self._records[req_id] = record
            if params.logprobs is not None or stops:
                self._runner.row_watch.add(
                    req_id, len(token_ids), params.logprobs, params.min_tokens, stops
                )
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
            self.num_active_blocks = 0 if events.kind == _core.PlanKind.IDLE else plan.num_blocks
            if self.on_block is not None:
                self._book_blocks(plan, events, self.on_block)
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
        token_ids, text = tuple(event.appended), None
        if record.answer is not None:
            token_ids, text = record.answer.push(token_ids)
            if record.answer.matched_stop is not None and not event.is_finished:
                self._scheduler.abort(event.req_id)
        logprobs = self._runner.row_watch.logprobs(
            event.req_id, record.num_delivered, len(token_ids)
        )
        record.num_delivered += len(token_ids)
        return StepOutput(
            event.req_id,
            token_ids,
            event.new_tokens,
            snapshot=snapshot,
            text=text,
            logprobs=logprobs,
        )

    def _book_prefill_writes(self, plan: _core.StepPlan, output: _core.SamplerOutput) -> None:
        # The first token after a prompt that fills its last fast_dllm_v2 block.
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
        gauges, runner, stats = self._scheduler.stats(), self._runner, self.run_stats
        stats.num_pages = gauges.num_pages
        stats.peak_pages = max(stats.peak_pages, gauges.num_pages - gauges.num_free_pages)
        stats.num_graph_steps = runner.num_graph_steps
        stats.num_graph_fallbacks = runner.num_graph_fallbacks

    def _finish(self, step: StepOutput, error: str | None) -> StepOutput:
        generated = self._generated(step.req_id)
        result = self._scheduler.take_result(step.req_id)
        record = self._records.pop(step.req_id)
        self._snapshot_ids.discard(step.req_id)
        token_ids, reason = tuple(result.output_ids), str(result.finish_reason)
        matched: str | int | None = None
        if reason == "eos_token_generated":
            matched = self._matched_stop(record, token_ids, generated)
        text = step.text
        if record.answer is not None:
            if isinstance(matched, str) and record.answer.is_including:
                record.answer.append(generated[len(token_ids)], matched)
            rest = record.answer.finish()
            step = dataclasses.replace(step, token_ids=step.token_ids + rest.token_ids)
            token_ids, text = tuple(record.answer.token_ids), (text or "") + rest.text
            matched = record.answer.matched_stop or matched
        full_text = self._decode(record, record.prompt_token_ids + token_ids)
        logprobs = self._runner.row_watch.logprobs(step.req_id, 0, len(token_ids))
        self._runner.row_watch.remove(step.req_id)
        output = RequestOutput(
            req_id=step.req_id,
            prompt_token_ids=record.prompt_token_ids,
            token_ids=token_ids,
            text=self._decode(record, token_ids) if record.answer is None else record.answer.text,
            full_text=full_text,
            completion_reason="stop" if isinstance(matched, str) else reason,
            metrics=record.metrics(
                len(token_ids), result.num_cached_tokens, result.num_preemptions
            ),
            is_auto_max_nfe=result.is_auto_nfe_cap,
            error=error,
            matched_stop=matched,
            generated_ids=generated,
            logprobs=logprobs or None,
        )
        fresh = len(step.token_ids)
        return dataclasses.replace(
            step,
            is_finished=True,
            output=output,
            text=text,
            logprobs=logprobs[len(token_ids) - fresh :],
        )

    def _generated(self, req_id: int) -> tuple[int, ...]:
        """Every position of the answer's blocks, also after its end, masks included."""
        request = self._scheduler.find_request(req_id)
        if request is None or request.limit_end == 0:
            return ()
        end = request.settled_end
        if self._mask_token_id >= 0:
            end = max(end, min(request.buffer.valid_end, request.limit_end))
        return tuple(request.tokens[request.prompt_len : end])

    def _matched_stop(
        self, record: RequestRecord, token_ids: Sequence[int], generated: Sequence[int]
    ) -> str | int | None:
        """The request's own stop that ended it; None for one of the model alone."""
        if len(generated) <= len(token_ids):
            return None
        stop_id = generated[len(token_ids)]
        if stop_id in record.special_stops:
            return record.special_stops[stop_id]
        return stop_id if stop_id in record.stop_token_ids else None

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

    def _decode(self, record: RequestRecord, token_ids: Sequence[int]) -> str:
        return "" if record.decode is None else record.decode(token_ids)


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
