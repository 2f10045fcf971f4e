# SPDX-License-Identifier: Apache-2.0
"""Diffulex: requests in, tokens out.

The only code that sees scheduler, runner and tokenizer together. A step is
schedule -> execute -> complete_step; a failed forward ends in cancel_step.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from diffulex.config import Config, read_model_facts
from diffulex.engine.interrupt import InterruptGuard
from diffulex.engine.metrics import RequestRecord, RunStats
from diffulex.engine.output import (
    BlockSnapshot,
    DenoiseSnapshot,
    GenerationOutputs,
    RequestOutput,
    StepOutput,
    StreamEvent,
    decode_token_ids_robust,
)
from diffulex.engine.progress import Progress, ProgressInfo, adding_bar
from diffulex.engine.prompt import Prompt, encode_prompt, split_prompts, spread_params
from diffulex.engine.startup import log_startup
from diffulex.logging import get_logger
from diffulex.registry import AutoModelRunner, AutoReq, AutoScheduler
from diffulex.sampling_params import SamplingParams
from diffulex_ext import _core

if TYPE_CHECKING:
    from types import TracebackType

    from diffulex.engine.model_runner import ModelRunner
    from diffulex.engine.tokenizer import IncrementalDecoder, Tokenizer

__all__ = ["Diffulex"]

logger = get_logger(__name__)

StreamMode = Literal["block_append", "denoise"]

# AcceptFlag of include/diffulex/kernels/sampling.h.
_BAD_LOGITS = 32


class Diffulex:
    """An engine over one model.

    Args:
        model: `demo` (bundled), a checkpoint directory or a hub id.
        show_progress: a bar while weights load, on a terminal.
        settings: keys of docs/configuration.md.

    Raises:
        ConfigError: bad settings.
        CheckpointError: the model cannot be found or read.

    `add_request`, `abort` and `has_unfinished` may be called from any thread; everything else
    belongs to one thread at a time.
    """

    def __init__(
        self, model: str = "demo", *, show_progress: bool = False, **settings: Any
    ) -> None:
        from diffulex.model.auto_model import load_model  # noqa: PLC0415

        facts = read_model_facts(model, settings)
        config = Config.resolve(model, facts, settings)
        module = load_model(
            facts.model_name,
            facts.spec,
            facts.model_dir,
            getattr(torch, config.model.dtype),
            config.model.device,
            progress=show_progress and sys.stderr.isatty(),
        )
        self._assemble(config, module, facts.tokenizer)

    @classmethod
    def from_components(cls, config: Config, model: Any, tokenizer: Tokenizer | None) -> Diffulex:
        """An engine over a model that exists already, for example with random weights.

        Without a tokenizer prompts are token ids and texts are empty.
        """
        engine = cls.__new__(cls)
        engine._assemble(config, model, tokenizer)
        return engine

    def _assemble(self, config: Config, model: Any, tokenizer: Tokenizer | None) -> None:
        strategy = config.decoding.decoding_strategy
        self._is_closed = False
        self._lock = threading.Lock()
        self._records: dict[int, RequestRecord] = {}
        self._snapshot_ids: set[int] = set()
        self._held: list[StepOutput] = []
        self.run_stats = RunStats()
        self._tokenizer = tokenizer
        runner: ModelRunner = AutoModelRunner.get(strategy)(config, model)
        if config.cache.num_pages == -1:
            config = config.with_num_pages(runner.decide_num_pages())
        self._scheduler: _core.Scheduler = AutoScheduler.create(strategy, config)
        options = self._scheduler.options
        runner.prepare(config, options)
        self.config = config
        self._runner = runner
        self._idle_output = _core.SamplerOutput(options)
        log_startup(config, runner)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; RuntimeError for an engine built without one."""
        if self._tokenizer is None:
            raise RuntimeError(
                "Diffulex.tokenizer: expected a tokenizer, got an engine without one"
            )
        return self._tokenizer

    # Requests and steps.

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        has_snapshots: bool = False,
    ) -> int:
        """Enqueues a prompt (text, token ids or chat messages) and returns its request id.

        Raises:
            PromptError: the prompt is empty, too long or has ids outside the vocabulary.
            OutOfPagesError: the page pool could never hold the request.
        """
        self._check_open()
        token_ids = self._encode(prompt, use_chat_template=False)
        return self._add(token_ids, sampling_params or SamplingParams(), has_snapshots)

    def abort(self, req_id: int) -> bool:
        """Ends a request at the next step boundary; False for unknown or finished ids."""
        self._check_open()
        return self._scheduler.abort(req_id)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return not self._is_closed and (bool(self._held) or self._scheduler.has_unfinished())

    def step(self) -> list[StepOutput]:
        """One forward over the requests the scheduler picks; one entry per request touched.

        A failure of the forward is raised here; its requests wait again and the engine stays
        usable.
        """
        self._check_open()
        if self._held:
            held, self._held = self._held, []
            return held
        return self._run_step()

    def stats(self) -> _core.SchedulerStats:
        """Counters of the scheduler."""
        self._check_open()
        return self._scheduler.stats()

    def _run_step(self) -> list[StepOutput]:
        plan = self._runner.next_plan()
        start = time.perf_counter()
        kind = self._scheduler.schedule(plan)
        if kind == _core.PlanKind.IDLE:
            events = self._scheduler.complete_step(plan, self._idle_output)
            return self._publish(plan, self._idle_output, events, 0.0)
        num_rows, num_reqs = plan.num_rows, plan.num_reqs
        self._start_records(plan.req_ids, start)
        try:
            output = self._runner.execute(plan)
            events = self._scheduler.complete_step(plan, output)
        except BaseException:
            self._scheduler.cancel_step(plan)
            raise
        seconds = time.perf_counter() - start
        self.run_stats.add_step(seconds, kind == _core.PlanKind.DECODE, num_reqs, num_rows)
        return self._publish(plan, output, events, seconds)

    def _add(
        self, token_ids: tuple[int, ...], params: SamplingParams, has_snapshots: bool = False
    ) -> int:
        strategy = self.config.decoding.decoding_strategy
        request = AutoReq.create(strategy, token_ids, params, self.config)
        # The step thread must not meet an id whose record does not exist yet.
        with self._lock:
            req_id = self._scheduler.add_request(request)
            self._records[req_id] = RequestRecord(
                req_id, token_ids, params.max_tokens, time.perf_counter()
            )
            if has_snapshots:
                self._snapshot_ids.add(req_id)
        return req_id

    def _start_records(self, req_ids: np.ndarray[Any, Any], now: float) -> None:
        with self._lock:
            for req_id in req_ids:
                self._records[int(req_id)].start_step(now)

    def _publish(
        self,
        plan: _core.StepPlan,
        output: _core.SamplerOutput,
        events: _core.StepEvents,
        seconds: float,
    ) -> list[StepOutput]:
        """Books a step and turns its events into outputs."""
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
            self._runner.sampler.evict([item.request_slot for item in events.finished])
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
            mask_token_id=self.config.model.mask_token_id,
            prompt_len=len(self._records[req_id].prompt_token_ids),
            token_ids=tuple(state.output_ids),
            blocks=tuple(blocks),
        )

    # Whole generations.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        progress_log_interval: float = 5.0,
        *,
        summary: bool = True,
        use_chat_template: bool = False,
        stream_callback: Callable[[StreamEvent], None] | None = None,
        on_progress: Callable[[ProgressInfo], None] | None = None,
        on_interrupt: Literal["raise", "return"] = "raise",
    ) -> GenerationOutputs:
        """Decodes every prompt to its end and returns the results in prompt order.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all prompts, or one each.
            use_tqdm: bars instead of log lines, when stderr is a terminal.
            progress_log_interval: seconds between log lines; 0 for none.
            summary: log the summary block at the end.
            use_chat_template: treat each text as a user message.
            stream_callback: receives the appended text of every request as it becomes final.
            on_progress: receives the numbers of each progress report.
            on_interrupt: after Ctrl-C, `raise` KeyboardInterrupt or `return` what there is.

        Raises:
            PromptError: a prompt cannot be served; then none was started.
        """
        self._check_open()
        if on_interrupt not in ("raise", "return"):
            raise ValueError(f"on_interrupt: expected raise or return, got {on_interrupt!r}")
        encoded = [self._encode(p, use_chat_template) for p in split_prompts(prompts)]
        params = spread_params(sampling_params, len(encoded))
        start, run = time.perf_counter(), RunStats()
        graph_counts = self._runner.num_graph_steps, self._runner.num_graph_fallbacks
        lifetime, self.run_stats = self.run_stats, run
        try:
            outputs = self._generate(
                list(zip(encoded, params, strict=True)),
                lambda records: Progress(
                    records, run, use_tqdm, progress_log_interval, on_progress
                ),
                stream_callback,
                is_raising=on_interrupt == "raise",
                use_tqdm=use_tqdm,
            )
        finally:
            run.num_graph_steps = self._runner.num_graph_steps - graph_counts[0]
            run.num_graph_fallbacks = self._runner.num_graph_fallbacks - graph_counts[1]
            run.wall_s = time.perf_counter() - start
            self.run_stats = lifetime.merged(run)
        result = GenerationOutputs(outputs, run)
        if summary:
            result.log_summary()
        return result

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        **options: Any,
    ) -> RequestOutput:
        """The assistant's answer to a conversation; `options` as in `generate`."""
        self._check_open()
        token_ids = self._encode(messages, use_chat_template=True)
        return self.generate([token_ids], sampling_params, **options)[0]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        mode: StreamMode = "block_append",
        *,
        use_chat_template: bool = False,
    ) -> Iterator[StreamEvent]:
        """Decodes one prompt and yields what happens; closing the iterator aborts the request.

        `block_append` yields text that can no longer change, and its pieces together equal the
        final text. `denoise` yields one event per step, with a snapshot of the blocks.

        Raises:
            PromptError: the prompt cannot be served.
        """
        self._check_open()
        if mode not in ("block_append", "denoise"):
            raise ValueError(f"mode: expected block_append or denoise, got {mode!r}")
        token_ids = self._encode(prompt, use_chat_template)
        params = sampling_params or SamplingParams()
        return self._stream(token_ids, params, mode == "denoise")

    def _stream(
        self, token_ids: tuple[int, ...], params: SamplingParams, has_snapshots: bool
    ) -> Iterator[StreamEvent]:
        req_id = self._add(token_ids, params, has_snapshots)
        text = _TextStream(self._tokenizer)
        is_finished = False
        try:
            while not is_finished:
                for step in self._run_step():
                    if step.req_id != req_id:
                        self._held.append(step)
                        continue
                    is_finished = step.is_finished
                    event = text.event(step)
                    if event.text or event.snapshot is not None or is_finished:
                        yield event
        finally:
            if not is_finished:
                self._abandon({req_id})

    def _generate(
        self,
        work: list[tuple[tuple[int, ...], SamplingParams]],
        make_progress: Callable[[list[RequestRecord]], Progress],
        stream_callback: Callable[[StreamEvent], None] | None,
        *,
        is_raising: bool,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        order: list[int] = []
        done: dict[int, RequestOutput] = {}
        texts: dict[int, _TextStream] = {}
        progress: Progress | None = None
        with InterruptGuard() as guard:
            try:
                order.extend(self._add(*item) for item in adding_bar(work, use_tqdm))
                if stream_callback is not None:
                    texts = {req_id: _TextStream(self._tokenizer) for req_id in order}
                own = set(order)
                progress = make_progress([self._records[req_id] for req_id in order])
                while len(done) < len(order):
                    if guard.is_interrupted:
                        if is_raising:
                            raise KeyboardInterrupt
                        self._abort_all(set(order) - set(done))
                    start = time.perf_counter()
                    steps = self._run_step()
                    seconds = time.perf_counter() - start
                    for step in steps:
                        if step.req_id not in own:
                            self._held.append(step)
                            continue
                        if stream_callback is not None:
                            event = texts[step.req_id].event(step)
                            if event.text or event.is_finished:
                                stream_callback(event)
                        if step.output is not None:
                            done[step.req_id] = step.output
                            progress.finished(step.output)
                    progress.step(seconds)
            except BaseException:
                self._abandon(set(order) - set(done))
                raise
            finally:
                if progress is not None:
                    progress.close()
        return [done[req_id] for req_id in order]

    def _abandon(self, req_ids: set[int]) -> None:
        """Aborts requests whose caller is gone and, if nothing else runs, frees them at once."""
        if self._is_closed:
            return
        self._abort_all(req_ids)
        if set(self._records) <= req_ids:
            self._run_step()

    def _abort_all(self, req_ids: set[int]) -> None:
        for req_id in req_ids:
            self._scheduler.abort(req_id)

    # Life cycle.

    def close(self) -> None:
        """Ends every request and releases the memory. Idempotent."""
        if self._is_closed:
            return
        self._scheduler.release_all()
        self._is_closed = True
        self._records.clear()
        self._held.clear()
        del self._runner
        if self.config.model.device.startswith("cuda"):
            torch.cuda.empty_cache()

    def __enter__(self) -> Diffulex:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("Diffulex: expected an open engine, got a closed one")

    def _encode(self, prompt: Prompt, use_chat_template: bool) -> tuple[int, ...]:
        return encode_prompt(prompt, self.config, self._tokenizer, use_chat_template)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return (
            "" if self._tokenizer is None else decode_token_ids_robust(self._tokenizer, token_ids)
        )


class _TextStream:
    """Text of one request as it becomes final."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._decoder: IncrementalDecoder | None = (
            None if tokenizer is None else tokenizer.incremental_decoder()
        )

    def event(self, step: StepOutput) -> StreamEvent:
        """The stream item of a step; the last one flushes."""
        text = ""
        if self._decoder is not None:
            text = self._decoder.push(step.token_ids) if step.token_ids else ""
            if step.is_finished:
                text += self._decoder.flush()
        return StreamEvent(step.req_id, text, step.token_ids, step.snapshot, step.output)


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
