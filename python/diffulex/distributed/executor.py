# SPDX-License-Identifier: Apache-2.0
"""The seam between the step loop and the workers that run a step.

A step loop knows plans, outputs and this interface. Behind it stand one worker in this process
(`diffulex.runner.local_executor`) or one per rank: what has to reach each of them is the arena of the
plan, and what comes back is the output of the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from diffulex.config.config import Config
    from diffulex.errors import DiffulexError
    from diffulex.likelihood.rows import ScoreBatch, Scored
    from diffulex.profiling.kernel_choices import KernelChoice
    from diffulex.profiling.memory import MemoryReport
    from diffulex.profiling.profiler import Recorded
    from diffulex.profiling.ring import StepTimes
    from diffulex.profiling.scopes import Stage
    from diffulex_ext import _core

__all__ = ["Executor", "Prepared", "StepCounts", "StepObserver", "TokenLogprob", "Watch"]


class Prepared(NamedTuple):
    """What a rank has allocated for the steps.

    Attributes:
        kv_cache_bytes: of one rank.
        graph_buckets: request counts that have a CUDA graph.
        no_graphs: why there are no graphs; empty where there are.
        capture_s: seconds that their capture took.
        kernels: which kernel each op takes.
        ranks: how many share the model, where, and what they exchange through; empty: one has all of it.
    """

    kv_cache_bytes: int
    graph_buckets: tuple[int, ...]
    no_graphs: str = ""
    capture_s: float = 0.0
    kernels: tuple[KernelChoice, ...] = ()
    ranks: str = ""


class StepCounts(NamedTuple):
    """How the decode steps so far were run."""

    #: They replayed a graph.
    graph: int = 0
    #: No graph fitted them.
    graph_fallbacks: int = 0
    #: The device began them before the host had completed the previous one.
    ahead: int = 0
    #: Graphs that are captured.
    captured: int = 0


class Watch(NamedTuple):
    """What a request wants of its logits rows.

    Attributes:
        prompt_len: its prompt tokens.
        num_top: alternatives to record beside each token; None: no log-probabilities.
        min_tokens: so many generated tokens are none of the `stop_ids`.
        stop_ids: ids that would end the request.
    """

    prompt_len: int
    num_top: int | None
    min_tokens: int
    stop_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one position in the step in which its token took its final value."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest (id, logprob), best first
    step: int  # forwards of the request until then, this one included
    confidence: float


class StepObserver(Protocol):
    """Told of every step that is executed, on the thread of the step loop."""

    def before_step(self, plan: _core.StepPlan) -> None:
        """The plan is filled, and nothing of it runs yet unless it ran ahead."""

    def after_step(self) -> None:
        """The step is complete and booked. An exception is raised to whoever asked for the step."""


class Executor(Protocol):
    """Runs the steps of one engine on its ranks.

    Order of use: `load`, `num_pages` if the configuration leaves it open, `start`, then per step
    `next_plan`, (the scheduler fills it), `execute`, `collect`. `close` may come at any time.
    """

    #: A profiler or a measurement that listens to the steps; None: there is none.
    observer: StepObserver | None
    #: Receives when the stages of a step began; None: nobody keeps records. Set before `load`.
    times: StepTimes | None

    def load(self, config: Config, model: Any) -> None:
        """Makes the worker of every rank over its part of the model.

        Raises:
            ConfigError: the settings do not suit the model or the device.
        """

    def num_pages(self) -> int:
        """Pages that every rank has memory for.

        Raises:
            ConfigError: they could not hold one request of max_model_len.
        """

    def start(self, config: Config, scheduler: _core.Scheduler) -> Prepared:
        """Allocates what the steps need; `config` has the number of pages."""

    def memory(self) -> MemoryReport:
        """Where the memory of the first rank is. Between steps, from `start` to `close`."""

    def expect_draws(self) -> None:
        """Announces a request that draws its tokens; before its first step, from any thread."""

    def next_plan(self) -> _core.StepPlan:
        """The plan for the scheduler to fill; its arena is what the ranks read."""

    @property
    def is_ahead(self) -> bool:
        """Whether the device runs the next step already: the scheduler must schedule that one."""

    def execute(self, plan: _core.StepPlan) -> None:
        """Gives the step of the plan in flight to the ranks, and perhaps the next one after it."""

    def collect(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        """The output of the step that `execute` was called with; waits for it."""

    def call(self, number: int) -> None:
        """Another engine with which this one makes its forwards has a request, or this one will have; see
        `diffulex.distributed.lockstep`."""

    @property
    def is_called(self) -> bool:
        """Whether other engines wait for `execute` or `rest`."""

    def rest(self, *, has_more: bool) -> None:
        """A step of this engine for which nothing is planned: others may have one.

        Args:
            has_more: there are requests.
        """

    @property
    def counts(self) -> StepCounts:
        """Decode steps since `load`; after `close`, those until then."""

    def stages(self) -> Sequence[Stage]:
        """Methods of the workers in this process that scopes may stand around."""

    def start_recording(self, name: str) -> None:
        """See `diffulex.profiling.profiler.OtherRanks`; between steps, like the next one."""

    def stop_recording(self) -> Sequence[Recorded]:
        """See `diffulex.profiling.profiler.OtherRanks`."""

    def evict(self, request_slots: Sequence[int]) -> None:
        """Drops what samplers keep of requests that left these slots."""

    def watch(self, req_id: int, watch: Watch) -> None:
        """Looks at the logits rows of a request until `unwatch`; from any thread."""

    def unwatch(self, req_id: int) -> None:
        """Ends `watch`; unknown requests are ignored."""

    @property
    def num_watched(self) -> int:
        """Requests that are watched: each costs every step a wait for the device."""

    def logprobs(self, req_id: int, begin: int, count: int) -> tuple[TokenLogprob, ...]:
        """Records of `count` generated tokens from index `begin` on; empty where none are wanted."""

    def score(self, batch: ScoreBatch) -> Scored:
        """Runs forwards that no scheduler plans; between steps.

        Raises:
            ConfigError: the model is a program that keeps its own cache.
        """

    def forget_ahead(self) -> bool:
        """Gives up a step that runs ahead, if there is one; returns whether there was."""

    def update_weights(
        self, new: Mapping[str, torch.Tensor] | Path, begin: Callable[[], None]
    ) -> int:
        """Replaces weights of every rank by tensors or a checkpoint; returns how many.

        Between two steps, like the next two. They call `begin` when everything is checked, before the
        first weight is written; nothing may run ahead then. Keys and values of the old weights stay in
        the cache.

        Raises:
            CheckpointError: they do not suit the model. Nothing is changed.
            ConfigError: the weights of this engine cannot be replaced.
        """

    def load_adapter(self, directory: Path, begin: Callable[[], None]) -> int:
        """Merges an adapter into the weights, in place of the one before; raises as `update_weights`."""

    def unload_adapter(self, begin: Callable[[], None]) -> int:
        """Takes the adapter out of the weights; ConfigError without one."""

    @property
    def weights_failure(self) -> str | None:
        """What left the weights a mixture of old and new ones; None: they are whole."""

    @property
    def rank_skew_s(self) -> float | None:
        """How long after it was told of a step the last rank began it, in the step that was last looked
        at; None: there are no other ranks, or their clocks are others."""

    @property
    def death(self) -> DiffulexError | None:
        """Why no step will ever run again; None: steps do."""

    def on_death(self, call: Callable[[DiffulexError], None]) -> None:
        """Has `death` told as soon as it is known, also while nothing runs, from any thread; after `load`."""

    def close(self) -> None:
        """Waits for the device and lets go of every worker; idempotent."""
