# SPDX-License-Identifier: Apache-2.0
"""The step of an engine: schedule, execute, complete_step, then book and deliver.

A failed forward ends in cancel_step.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from diffulex.engine.interrupt import deferred_interrupt
from diffulex.engine.ledger import Ledger
from diffulex.engine.routing import StepQueue, StepRouter
from diffulex.engine.stop_tokens import special_stops
from diffulex.errors import OutOfPagesError
from diffulex.registry import AutoReq
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.config import Config
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.runner.model_runner import ModelRunner

__all__ = ["StepLoop"]


class StepLoop:
    """Runs steps and leaves their outputs with the owners of the requests.

    `add`, `abort` and `has_unfinished` may be called from any thread; everything else belongs to
    one thread at a time. After `close` every call but `close` and `has_unfinished` is an error.
    """

    def __init__(
        self,
        config: Config,
        scheduler: _core.Scheduler,
        runner: ModelRunner,
        tokenizer: Tokenizer | None,
    ) -> None:
        is_canvas = config.decoding.decoding_strategy == "diffusion_gemma"
        # A canvas has no masks: the id in the configuration is an ordinary token there.
        mask_token_id = -1 if is_canvas else config.model.mask_token_id
        self.ledger = Ledger(scheduler, runner, tokenizer, mask_token_id)
        self.router = StepRouter()
        self.is_closed = False
        self._is_canvas = is_canvas
        self._config = config
        self._scheduler = scheduler
        self._runner: ModelRunner | None = runner
        self._tokenizer = tokenizer
        self._is_stepping = threading.Lock()
        self._idle_output = _core.SamplerOutput(scheduler.options)
        #: Place of the result of the next step, if the device runs it already; see DecodeLoop.
        self._ahead: int | None = None

    def check_open(self) -> None:
        """RuntimeError after `close`."""
        if self.is_closed:
            raise RuntimeError("Diffulex: expected an open engine, got a closed one")

    def add(
        self,
        token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        has_snapshots: bool = False,
        queue: StepQueue | None = None,
    ) -> int:
        """Enqueues a request whose outputs go to `queue`, or to the callers of `step`."""
        self.check_open()
        strategy = self._config.decoding.decoding_strategy
        params, special = special_stops(self._tokenizer, params)
        has_saved_logits = self._is_drawing(params) or params.logprobs is not None
        if has_saved_logits and self._runner is not None:
            self._runner.expect_draws()
        request = AutoReq.create(strategy, token_ids, params, self._config)
        try:
            req_id = self.ledger.add(request, token_ids, params, has_snapshots, special)
        except _core.OutOfPagesError as error:
            raise OutOfPagesError(f"{error}; lower max_tokens or raise num_pages") from error
        if queue is not None:
            self.router.claim(req_id, queue)
        return req_id

    def _is_drawing(self, params: SamplingParams) -> bool:
        temperature = params.with_defaults(self._config.sampler).temperature
        return temperature is not None and temperature > 0

    def abort(self, req_id: int) -> bool:
        """Ends a request at the next step boundary; False for unknown or finished ids."""
        self.check_open()
        return self._scheduler.abort(req_id)

    def abandon(self, req_ids: Iterable[int]) -> None:
        """Aborts requests whose caller is gone and, if nothing else runs, frees them at once."""
        if self.is_closed:
            return
        gone = set(req_ids)
        self.router.abandon(gone)
        for req_id in gone:
            self._scheduler.abort(req_id)
        if self.ledger.open_ids() <= gone:
            self.run()

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to return."""
        if self.is_closed:
            return False
        return bool(self.router.unclaimed) or self._scheduler.has_unfinished()

    def run(self) -> None:
        """One step; its outputs are in the queues of their owners afterwards.

        A first Ctrl-C waits until they are, so that no result gets lost. When the forward fails its
        requests wait again.

        Raises:
            RuntimeError: another thread is in a step, or this one, in a callback.
        """
        self.check_open()
        with self.exclusive(), deferred_interrupt():
            self._run()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """A block in which no step runs; RuntimeError during one."""
        if not self._is_stepping.acquire(blocking=False):
            raise RuntimeError(
                "Diffulex: expected one thread at a time (the engine belongs to it), got a call"
                " during a step; add_request, abort and has_unfinished may come from any thread"
            )
        try:
            yield
        finally:
            self._is_stepping.release()

    def _run(self) -> None:
        runner, ledger = self._runner, self.ledger
        assert runner is not None
        plan = runner.next_plan()
        start = time.perf_counter()
        try:
            kind = self._schedule(plan)
            num_rows, num_reqs = plan.num_rows, plan.num_reqs
            if kind == _core.PlanKind.IDLE:
                output = self._idle_output
            else:
                ledger.start_step(plan.req_ids, start)
                output = self._execute(runner, plan)
            events = self._scheduler.complete_step(plan, output)
        except BaseException:
            # A second Ctrl-C may come before the step is scheduled or after it is complete. Only the
            # scheduler knows, and it refuses to cancel a plan that is not in flight.
            was_ahead, self._ahead = self._ahead is not None, None
            try:
                self._scheduler.cancel_step(plan)
            except ValueError:
                if was_ahead and self._is_canvas:
                    self._restart_canvases()
            raise
        if kind == _core.PlanKind.IDLE:
            self.router.push(ledger.book(plan, output, events, 0.0))
            return
        seconds = time.perf_counter() - start
        ledger.run_stats.add_step(seconds, kind == _core.PlanKind.DECODE, num_reqs, num_rows)
        self.router.push(ledger.book(plan, output, events, seconds))

    def _restart_canvases(self) -> None:
        """Restarts canvases whose step ran ahead and was given up: it has overwritten its own inputs.

        Steps of other strategies can be run again, since they leave their inputs as they are.
        """
        for req_id in self.ledger.open_ids():
            with contextlib.suppress(ValueError, KeyError):  # it does not run
                self._scheduler.preempt(req_id)

    def _schedule(self, plan: _core.StepPlan) -> _core.PlanKind:
        if self._ahead is not None:
            kind = self._scheduler.schedule_ahead(plan)
            if kind != _core.PlanKind.IDLE:
                return kind
            self._ahead = None  # all its requests ended
        return self._scheduler.schedule(plan)

    def _execute(self, runner: ModelRunner, plan: _core.StepPlan) -> _core.SamplerOutput:
        place, self._ahead = self._ahead, None
        if place is None:
            place = runner.start_loop(self._scheduler, plan)
        if place is None:
            return runner.execute(plan)
        self._ahead = runner.run_ahead(self._scheduler, plan)
        return runner.collect(self._scheduler, plan, place)

    def close(self) -> None:
        """Ends every request and lets go of the runner; idempotent. Inside `exclusive`."""
        if self.is_closed:
            return
        self._scheduler.release_all()
        self.is_closed = True
        self.ledger.close()
        self.router.clear()
        self._runner = None
