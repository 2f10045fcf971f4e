# SPDX-License-Identifier: Apache-2.0
"""The executor of one rank: its worker lives in this process and is called directly."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from diffulex.distributed.executor import Prepared, StepCounts
from diffulex.profiling.scopes import Stage
from diffulex.registry import AutoModelRunner
from diffulex.update.live_weights import LiveWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from diffulex.config.config import Config
    from diffulex.distributed.executor import StepObserver, TokenLogprob, Watch
    from diffulex.errors import DiffulexError
    from diffulex.likelihood.rows import ScoreBatch, Scored
    from diffulex.profiling.memory import MemoryReport
    from diffulex.profiling.profiler import Recorded
    from diffulex.profiling.ring import StepTimes
    from diffulex.runner.model_runner import ModelRunner
    from diffulex_ext import _core

__all__ = ["LocalExecutor"]


class LocalExecutor:
    """See `diffulex.distributed.executor.Executor`."""

    #: Memory for plans that other ranks have as well; None: there are none.
    _arenas: Sequence[torch.Tensor] | None = None

    def __init__(self) -> None:
        self.observer: StepObserver | None = None
        self.times: StepTimes | None = None
        self._runner: ModelRunner | None = None
        self._weights: LiveWeights | None = None
        self._scheduler: _core.Scheduler | None = None
        #: Output of the step in flight, or the place where the decode loop will put it.
        self._output: _core.SamplerOutput | int | None = None
        #: Place of the result of the next step, if the device runs it already; see DecodeLoop.
        self._ahead: int | None = None
        self._last_counts = StepCounts()

    @property
    def death(self) -> DiffulexError | None:
        return None  # a failed step leaves it as it was

    def check(self) -> None:
        """Raises `death`, if there is one."""
        if self.death is not None:
            raise self.death

    def on_death(self, call: Callable[[DiffulexError], None]) -> None:
        del call  # there is none

    @property
    def rank_skew_s(self) -> float | None:
        return None

    @property
    def runner(self) -> ModelRunner:
        """The worker; RuntimeError before `load` and after `close`."""
        if self._runner is None:
            raise RuntimeError(
                "LocalExecutor: expected load() before and no close(), got no worker"
            )
        return self._runner

    def load(self, config: Config, model: Any) -> None:
        self._runner = AutoModelRunner.get(config.decoding.decoding_strategy)(config, model)
        self._weights = LiveWeights(config, model)
        self._runner.times = self.times

    def num_pages(self) -> int:
        return self.runner.decide_num_pages()

    def start(self, config: Config, scheduler: _core.Scheduler) -> Prepared:
        self._scheduler = scheduler
        runner = self.runner
        runner.prepare(config, scheduler.options, self._arenas)
        return Prepared(
            runner.kv_cache.nbytes,
            runner.graph_buckets,
            runner.no_graph_reason or "",
            runner.capture_s,
            tuple(runner.kernel_choices()),
        )

    def memory(self) -> MemoryReport:
        return self.runner.memory()

    def expect_draws(self) -> None:
        if self._runner is not None:
            self._runner.expect_draws()

    def next_plan(self) -> _core.StepPlan:
        return self.runner.next_plan()

    @property
    def is_ahead(self) -> bool:
        return self._ahead is not None

    def execute(self, plan: _core.StepPlan) -> None:
        runner, scheduler = self._runner, self._scheduler
        assert runner is not None
        assert scheduler is not None
        if self.observer is not None:
            self.observer.before_step(plan)
        place, self._ahead = self._ahead, None
        if place is None:
            place = runner.start_loop(scheduler, plan)
        if place is None:
            self._output = self._execute(plan)
        else:
            self._output = place
            self._ahead = runner.run_ahead(scheduler, plan)

    def _execute(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        """Runs a step that the host has planned."""
        return self.runner.execute(plan)

    def collect(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        output, self._output = self._output, None
        if output is None:
            raise RuntimeError("LocalExecutor.collect: expected execute() before, got no step")
        if isinstance(output, int):
            assert self._scheduler is not None
            output = self.runner.collect(self._scheduler, plan, output)
        return output

    def call(self, number: int) -> None:
        del number  # it makes its forwards alone

    @property
    def is_called(self) -> bool:
        return False

    def rest(self, *, has_more: bool) -> None:
        del has_more  # as `call`

    @property
    def counts(self) -> StepCounts:
        self._save_counts()
        return self._last_counts

    def _save_counts(self) -> None:
        """Those of the worker outlive it."""
        runner = self._runner
        if runner is not None:
            self._last_counts = StepCounts(
                runner.num_graph_steps,
                runner.num_graph_fallbacks,
                runner.num_ahead_steps,
                runner.num_graphs,
            )

    def stages(self) -> list[Stage]:
        return [Stage(self, "evict", "engine", "evict_sampler_state"), *self.runner.stages()]

    def start_recording(self, name: str) -> None:
        del name  # there are no other ranks

    def stop_recording(self) -> Sequence[Recorded]:
        return ()

    def evict(self, request_slots: Sequence[int]) -> None:
        self.runner.sampler.evict(request_slots)

    def watch(self, req_id: int, watch: Watch) -> None:
        self.runner.row_watch.add(req_id, watch)

    def unwatch(self, req_id: int) -> None:
        self.runner.row_watch.remove(req_id)

    @property
    def num_watched(self) -> int:
        return 0 if self._runner is None else self._runner.row_watch.num_requests

    def logprobs(self, req_id: int, begin: int, count: int) -> tuple[TokenLogprob, ...]:
        return self.runner.row_watch.logprobs(req_id, begin, count)

    def score(self, batch: ScoreBatch) -> Scored:
        return self.runner.score(batch)

    def forget_ahead(self) -> bool:
        was_ahead, self._ahead, self._output = self._ahead is not None, None, None
        return was_ahead

    def update_weights(
        self, new: Mapping[str, torch.Tensor] | Path, begin: Callable[[], None]
    ) -> int:
        return self._live_weights.update(new, begin)

    def load_adapter(self, directory: Path, begin: Callable[[], None]) -> int:
        return self._live_weights.load_adapter(directory, begin)

    def unload_adapter(self, begin: Callable[[], None]) -> int:
        return self._live_weights.unload_adapter(begin)

    @property
    def weights_failure(self) -> str | None:
        return None if self._weights is None else self._weights.failure

    @property
    def _live_weights(self) -> LiveWeights:
        _ = self.runner  # RuntimeError before `load` and after `close`
        assert self._weights is not None
        return self._weights

    def close(self) -> None:
        self._save_counts()
        runner, self._runner = self._runner, None
        self._weights = None
        self._scheduler = self._output = self._ahead = None
        if runner is not None and runner.device.type == "cuda":
            # The device may be a step ahead. If it has failed, the step that failed has said so.
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(runner.device)
