# SPDX-License-Identifier: Apache-2.0
"""The step of an engine: schedule, execute, complete_step, then book and deliver.

A failed forward ends in cancel_step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from diffulex.engine.answer_text import special_stops
from diffulex.engine.interrupt import deferred_interrupt
from diffulex.engine.routing import StepQueue, StepRouter
from diffulex.engine.template import split_masked_prompt
from diffulex.errors import OutOfPagesError, SamplingParamsError
from diffulex.log import PROMPT_CHARS, get_logger, prompt_to_log
from diffulex.profiling.scopes import Stage
from diffulex.registry import AutoReq
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.config import Config
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.distributed.executor import Executor, StepCounts
    from diffulex.engine.ledger import Ledger
    from diffulex.profiling.ring import StepRing

__all__ = ["StepLoop"]

logger = get_logger(__name__)
#: Ids of a prompt that are decoded for the log: a character takes at most four of them.
_LOGGED_IDS = 4 * PROMPT_CHARS

#: During a pause a caller that waits looks so often for Ctrl-C.
_RESUME_POLL_S = 0.2


class StepLoop:
    """Runs steps and leaves their outputs with the owners of the requests.

    `add`, `abort` and `has_unfinished` may be called from any thread; everything else belongs to
    one thread at a time. After `close` every call but `close` and `has_unfinished` is an error.
    """

    def __init__(
        self,
        config: Config,
        scheduler: _core.Scheduler,
        executor: Executor,
        ledger: Ledger,
        tokenizer: Tokenizer | None,
        ring: StepRing | None = None,
    ) -> None:
        self.ledger = ledger
        #: Keeps a record of every step; None: no records.
        self.ring = ring
        self.router = StepRouter()
        self.is_closed = False
        #: No step runs until it is False again; requests are accepted and wait.
        self.is_paused = False
        self._is_canvas = config.decoding.traits.has_canvas
        self._config = config
        self._scheduler = scheduler
        self._executor = executor
        self._tokenizer = tokenizer
        #: Guards `_stepper`, the thread in a step or in another exclusive block, and `is_paused`.
        self._turn = threading.Condition()
        self._stepper: int | None = None
        self._idle_output = _core.SamplerOutput(scheduler.options)

    def check_open(self) -> None:
        """RuntimeError after `close`, EngineDeadError when a rank is gone."""
        if self.is_closed:
            raise RuntimeError("Diffulex: expected an open engine, got a closed one")
        death = self._executor.death
        if death is not None:
            raise death

    @property
    def weights_failure(self) -> str | None:
        """What left the weights a mixture of old and new ones; None: they are whole."""
        return self._executor.weights_failure

    def check_weights(self) -> None:
        """RuntimeError when the weights are a mixture."""
        failure = self.weights_failure
        if failure is not None:
            raise RuntimeError(
                f"Diffulex: expected whole weights, got some old and some new ({failure});"
                " update_weights with all of them, or unload_lora after load_lora, mends it"
            )

    def add(
        self,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        has_snapshots: bool = False,
        has_text: bool = False,
        queue: StepQueue | None = None,
    ) -> int:
        """Enqueues a request whose outputs go to `queue`, or to the callers of `step`."""
        self.check_open()
        strategy = self._config.decoding.decoding_strategy
        token_ids, params = split_masked_prompt(token_ids, params, self._config)
        params, special = special_stops(self._tokenizer, params)
        has_saved_logits = self._is_drawing(params) or params.logprobs is not None
        if has_saved_logits:
            self._executor.expect_draws()
        request = AutoReq.create(strategy, token_ids, params, self._config)
        prompt = prompt_to_log(logger, lambda: self._text(token_ids[:_LOGGED_IDS]))
        try:
            req_id = self.ledger.add(
                *(request, token_ids, params, special),
                has_snapshots=has_snapshots,
                has_text=has_text,
            )
        except _core.OutOfPagesError as error:
            raise OutOfPagesError(f"{error}; lower max_tokens or raise num_pages") from error
        except (IndexError, NotImplementedError, ValueError) as error:
            raise SamplingParamsError(str(error)) from error
        if prompt is not None:
            logger.debug("request %d: prompt=%r", req_id, prompt)
        if queue is not None:
            self.router.claim(req_id, queue)
        return req_id

    def _text(self, token_ids: tuple[int, ...]) -> object:
        return token_ids if self._tokenizer is None else self._tokenizer.decode(token_ids, False)

    def _is_drawing(self, params: SamplingParams) -> bool:
        temperature = params.with_defaults(self._config.sampler).temperature
        return temperature is not None and temperature > 0

    def abort(self, req_id: int) -> bool:
        """Ends a request at the next step boundary; False for unknown or finished ids."""
        self.check_open()
        return self._scheduler.abort(req_id)

    @property
    def counts(self) -> StepCounts:
        """How the decode steps so far were run."""
        return self._executor.counts

    @property
    def num_watched(self) -> int:
        """Requests whose logits are looked at on the host."""
        return self._executor.num_watched

    @property
    def rank_skew_s(self) -> float | None:
        """See `Executor.rank_skew_s`."""
        return self._executor.rank_skew_s

    def stats(self) -> _core.SchedulerStats:
        """Counters of the scheduler."""
        return self._scheduler.stats()

    def flush_prefix_cache(self) -> int:
        """Forgets cached prefixes that no request uses; returns how many pages that frees."""
        return self._scheduler.flush_prefix_cache()

    def abandon(self, req_ids: Iterable[int]) -> None:
        """Aborts requests whose caller is gone and, if nothing else runs, frees them at once."""
        if self.is_closed or self._executor.death is not None:
            return
        gone = set(req_ids)
        self.router.abandon(gone)
        for req_id in gone:
            self._scheduler.abort(req_id)
        is_halted = self.is_paused or self.weights_failure is not None
        if self.ledger.open_ids() <= gone and not is_halted:
            self.run()

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to return."""
        if self.is_closed:
            return False
        has_own = bool(self.router.unclaimed) or self._scheduler.has_unfinished()
        return has_own or self._executor.is_called

    def run(self) -> None:
        """One step; its outputs are in the queues of their owners afterwards.

        A first Ctrl-C waits until they are, so that no result gets lost. When the forward fails its
        requests wait again.

        Raises:
            RuntimeError: another thread is in a step, or this one, in a callback; or the engine is
                paused, or its weights are a mixture.
        """
        self.check_running()
        if not self.run_or_wait(0.0):
            self.check_running()

    def check_running(self) -> None:
        """RuntimeError after `close` and during a pause."""
        self.check_open()
        if self.is_paused:
            raise RuntimeError(
                "Diffulex: expected an engine that runs, got a paused one (resume())"
            )

    def run_or_wait(self, seconds: float = _RESUME_POLL_S) -> bool:
        """Like `run`, but during a pause waits for its end, at most so long; whether there was a step."""
        self.check_open()
        with deferred_interrupt():
            with self._turn:
                self._turn.wait_for(lambda: self.is_closed or not self.is_paused, seconds)
                self.check_open()
                if self.is_paused:
                    return False
                self._take_turn()
            with self._own_turn():
                self._run_whole()
        return True

    def pause(self, *, wait: bool) -> None:
        """Lets no further step begin, and waits for one that another thread runs."""
        with self._turn:
            self.check_open()
            self.is_paused = True
            if wait:
                free = (None, threading.get_ident())
                self._turn.wait_for(lambda: self._stepper in free)

    def resume(self) -> None:
        """Lets steps run again."""
        with self._turn:
            self.check_open()
            self.is_paused = False
            self._turn.notify_all()

    def _run_whole(self) -> None:
        self.check_weights()
        num_steps = self.ledger.run_stats.num_steps
        kind = self._run()
        if self.ledger.is_settling:
            self._run()  # without a forward: gives their pages back
        if kind == _core.PlanKind.IDLE:
            self._executor.rest(has_more=self._scheduler.has_unfinished())
        observer = self._executor.observer
        if observer is not None and self.ledger.run_stats.num_steps > num_steps:
            observer.after_step()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """A block in which no step runs; RuntimeError during one."""
        with self._turn:
            self._take_turn()
        with self._own_turn():
            yield

    def _take_turn(self) -> None:
        if self._stepper is not None:
            raise RuntimeError(
                "Diffulex: expected one thread at a time (the engine belongs to it), got a call"
                " during a step; add_request, abort and has_unfinished may come from any thread"
            )
        self._stepper = threading.get_ident()

    @contextlib.contextmanager
    def _own_turn(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._turn:
                self._stepper = None
                self._turn.notify_all()

    @contextlib.contextmanager
    def new_weights(self) -> Iterator[Callable[[], None]]:
        """A block between two steps that changes the weights.

        What it yields has to be called before the first of them is written. From then on requests keep
        their tokens alone: their keys and values, and those of cached prefixes, are dropped and
        computed again; canvases start again. A block that is refused before changes nothing.
        """
        self.check_open()
        with self.exclusive(), deferred_interrupt():
            has_begun = False

            def begin() -> None:
                nonlocal has_begun
                has_begun = True
                # It reads the weights, and may have overwritten its own inputs.
                self._executor.forget_ahead()

            try:
                yield begin
            finally:
                if has_begun:
                    self._preempt_all()
                    self._scheduler.flush_prefix_cache()

    def _preempt_all(self) -> None:
        """Lets every running request wait, the oldest at the head."""
        for req_id in reversed(self._scheduler.running_ids()):
            self._scheduler.preempt(req_id)

    def _run(self) -> _core.PlanKind:
        executor, ledger = self._executor, self.ledger
        plan = executor.next_plan()
        start = time.perf_counter()
        times = executor.times
        if times is not None:
            times.start(start)
        try:
            kind = self._schedule(plan)
            if times is not None:
                times.scheduled = time.perf_counter()
            num_rows, num_reqs, num_decode = plan.num_rows, plan.num_reqs, plan.num_decode_reqs
            if kind == _core.PlanKind.IDLE:
                output = self._idle_output
            else:
                ledger.start_step(plan.req_ids, start)
                output = self._forward(plan)
                if times is not None:
                    times.collected = time.perf_counter()
            events = self._complete(plan, output)
        except BaseException:
            # A second Ctrl-C may come before the step is scheduled or after it is complete. Only the
            # scheduler knows, and it refuses to cancel a plan that is not in flight.
            was_ahead = executor.forget_ahead()
            try:
                self._scheduler.cancel_step(plan)
            except ValueError:
                # Steps of other strategies leave their inputs as they are, and can be run again.
                if was_ahead and self._is_canvas:
                    with contextlib.suppress(ValueError):  # another plan is in flight
                        self._preempt_all()
            raise
        if kind == _core.PlanKind.IDLE:
            self.router.push(ledger.book(plan, output, events, 0.0))
            return kind
        seconds = time.perf_counter() - start
        stats = ledger.run_stats
        num_prefill_rows = (
            num_rows - int(plan.cu_seqlens_q[num_decode]) if num_decode < num_reqs else 0
        )
        stats.add_step(seconds, num_reqs, num_rows, num_prefill_rows)
        decided = stats.decided_tokens
        self.router.push(ledger.book(plan, output, events, seconds))
        if times is not None and self.ring is not None:
            self.ring.add(
                *(times, time.perf_counter(), num_reqs - num_decode, num_decode, num_rows),
                *(ledger.num_used_pages, stats.decided_tokens - decided),
                *(len(events.committed), len(events.preempted)),
            )
        return kind

    def _forward(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        self._executor.execute(plan)
        return self._executor.collect(plan)

    def _complete(self, plan: _core.StepPlan, output: _core.SamplerOutput) -> _core.StepEvents:
        return self._scheduler.complete_step(plan, output)

    def stages(self) -> list[Stage]:
        """Stages of a step here and in the ledger."""
        own = {
            "_run": "step",
            "add": "add_request",
            "_schedule": "scheduler_schedule",
            "_forward": "model_runner_run",
            "_complete": "scheduler_postprocess",
        }
        booked = {
            "add": "scheduler_add",
            "start_step": "prepare_reqs_for_execution",
            "book": "record_outputs",
            "_close": "convert_outputs_to_text",
        }
        return [
            *(Stage(self, method, "engine", name) for method, name in own.items()),
            *(Stage(self.ledger, method, "engine", name) for method, name in booked.items()),
        ]

    def _schedule(self, plan: _core.StepPlan) -> _core.PlanKind:
        if self._executor.is_ahead:
            kind = self._scheduler.schedule_ahead(plan)
            if kind != _core.PlanKind.IDLE:
                return kind
            self._executor.forget_ahead()  # all its requests ended
        return self._scheduler.schedule(plan)

    def close(self) -> None:
        """Ends every request and closes the executor; idempotent. Inside `exclusive`."""
        if self.is_closed:
            return
        self._scheduler.release_all()
        self.is_closed = True
        self.ledger.close()
        self.router.clear()
        try:
            self._executor.close()
        finally:
            if self.ring is not None:
                self.ring.close()
