# SPDX-License-Identifier: Apache-2.0
"""The executor of an engine whose model several processes share. Its own process is the first rank."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from diffulex.distributed.arenas import SharedArenas
from diffulex.distributed.gloo_comm import GlooComm, PeerError, make_store
from diffulex.distributed.group import WorkerGroup
from diffulex.distributed.layout import Sizes, replica_environment
from diffulex.distributed.legality import check_model_class
from diffulex.engine.ranks.follower import decisions
from diffulex.engine.ranks.step_header import StepHeader
from diffulex.engine.ranks.worker import checkpoint_digest, versions
from diffulex.errors import ConfigError
from diffulex.log import get_logger, log_settings
from diffulex.registry import AutoModelForDiffusionLM
from diffulex.runner.batch import StepBuffers
from diffulex.runner.local_executor import LocalExecutor
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from diffulex.config.config import Config
    from diffulex.distributed.comm import Comm
    from diffulex.distributed.executor import Prepared, Watch
    from diffulex.errors import DiffulexError
    from diffulex.likelihood.rows import ScoreBatch, Scored

__all__ = ["Followers", "GroupExecutor", "make_executor"]

logger = get_logger(__name__)

_TARGET = "diffulex.engine.ranks.worker:run_worker"
#: A process that imports torch on a loaded host has been seen to take half a minute.
_HELLO_S = 120.0


def make_executor(config: Config, model_name: str) -> LocalExecutor:
    """What runs the steps of an engine that loads its checkpoint; starts the other ranks.

    Args:
        config: the resolved configuration.
        model_name: in the registry of models.

    Raises:
        ConfigError: no rank can have a part of the model.
    """
    sizes = Sizes.of_engine(config.parallel)
    if sizes.world == 1:
        return LocalExecutor()
    check_model_class(model_name, AutoModelForDiffusionLM.get(model_name), sizes)
    return GroupExecutor(ProcessFollowers(config, model_name))


class Followers(Protocol):
    """The ranks other than the first."""

    @property
    def death(self) -> DiffulexError | None:
        """Why they are gone; None: they are there."""

    def connect(self) -> Comm:
        """The exchange with them, once they have their parts of the model."""

    def num_pages(self) -> list[int]:
        """Pages that each of them has memory for."""

    def arenas(self, num_pages: int, num_bytes: int) -> SharedArenas:
        """Lets them allocate what steps need; memory for plans that all ranks have."""

    def started(self) -> None:
        """Waits until they are ready for steps."""

    def execute(self, header: StepHeader) -> None:
        """Tells them of a step."""

    def decided(self) -> list[bytes]:
        """What each of them has decided in the last step; see `decisions`."""

    def disagree(self, rank: int, text: str) -> NoReturn:
        """One of them has decided something else."""

    def evict(self, request_slots: Sequence[int]) -> None:
        """Requests left these slots."""

    def fail(self, error: BaseException, what: str) -> NoReturn:
        """This rank has failed, and with it all; raises the cause."""

    def close(self) -> None:
        """Ends them; idempotent."""


class ProcessFollowers:
    """Processes, which load their parts of the checkpoint from the moment this is made."""

    def __init__(self, config: Config, model_name: str) -> None:
        parallel, sizes = config.parallel, Sizes.of_engine(config.parallel)
        size = sizes.world
        self._timeout_s = float(parallel.distributed_timeout_seconds)
        self._limit = f"{self._timeout_s:g} s (distributed_timeout_seconds)"
        self._collective_s = parallel.collective_timeout_seconds
        self._comm: GlooComm | None = None
        self._model_dir = config.model.model_dir
        #: Those of the plans, for ranks that cannot map them.
        self._arenas: SharedArenas | None = None
        environment = replica_environment(sizes)
        self._group = WorkerGroup(_TARGET, size, config.model.device, environment)
        logs = log_settings()
        self._group.send_each([(rank, logs) for rank in range(1, size)])
        self._group.send_each([("load", config, model_name, rank) for rank in range(1, size)])

    @property
    def death(self) -> DiffulexError | None:
        return self._group.death

    def _replies(self, what: str) -> list[Any]:
        return self._group.replies(what, self._timeout_s, self._limit)

    def connect(self) -> Comm:
        group, own = self._group, versions()
        for rank, theirs in enumerate(group.replies("start", _HELLO_S, f"{_HELLO_S:g} s"), 1):
            if theirs != own:
                raise ConfigError(f"rank {rank}: expected {own} as rank 0 has, got {theirs}")
        own = checkpoint_digest(self._model_dir)
        for rank, theirs in enumerate(self._replies("load its weights"), 1):
            if theirs != own:
                raise ConfigError(
                    f"rank {rank}: expected the checkpoint of rank 0 (sha256 {own}), got {theirs}"
                )
        store = make_store(group.size, group.host)
        group.send(("connect", (group.host, store.port)))
        limits = self._timeout_s, float(self._collective_s)
        arguments = 0, group.size, store, *limits, group.host
        self._comm = comm = self._unless_dead(lambda: GlooComm(*arguments))
        return comm

    def _unless_dead(self, make: Callable[[], GlooComm]) -> GlooComm:
        """What `make` returns, which would wait for ranks that have died."""
        made: deque[GlooComm | BaseException] = deque()

        def run() -> None:
            try:
                made.append(make())
            except BaseException as error:
                made.append(error)

        thread = threading.Thread(target=run, name="diffulex-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            self._group.check()
            thread.join(0.02)
        result = made[0]
        if isinstance(result, BaseException):
            self._group.fail(result, "the connection of the ranks", is_hearsay=True)
        return result

    def num_pages(self) -> list[int]:
        self._group.send(("measure",))
        return self._replies("measure its memory")

    def arenas(self, num_pages: int, num_bytes: int) -> SharedArenas:
        count = StepBuffers.num_plans
        handle = SharedArenas.create(num_bytes, count)
        if self._group.shares_memory:
            self._group.send(("start", num_pages, num_bytes, count), handle)
            return SharedArenas(num_bytes, count, handle)
        self._group.send(("start_apart", num_pages, num_bytes, count))
        self._arenas = SharedArenas(num_bytes, count, handle)
        return self._arenas

    def started(self) -> None:
        self._replies("prepare its steps")
        self._group.started()

    def execute(self, header: StepHeader) -> None:
        self._group.check()
        message = header.pack()
        if self._arenas is not None:
            arena = self._arenas.tensors[header.arena]
            message += arena[: header.num_bytes].numpy().tobytes()
        self._group.send(message)

    def decided(self) -> list[bytes]:
        return self._replies("answer")

    def disagree(self, rank: int, text: str) -> NoReturn:
        self._group.disagree(rank, text)

    def evict(self, request_slots: Sequence[int]) -> None:
        self._group.send(("evict", list(request_slots)))

    def fail(self, error: BaseException, what: str) -> NoReturn:
        self._group.fail(error, what, is_hearsay=isinstance(error, PeerError))

    def close(self) -> None:
        comm, self._comm = self._comm, None
        self._group.close(("exit",))
        if comm is not None:
            comm.close()


class GroupExecutor(LocalExecutor):
    """See `diffulex.distributed.executor.Executor`. Each rank has a part of the model; this process is
    the first one and the only one with a scheduler.

    Args:
        followers: the other ranks.
    """

    def __init__(self, followers: Followers) -> None:
        super().__init__()
        self._followers = followers
        self._is_checked = False
        self._num_steps = 0
        self._has_draws = False
        #: What other threads want of the rows that are looked at; from one step to the next all ranks
        #: must know the same.
        self._wanted: deque[Callable[[], None]] = deque()

    @property
    def death(self) -> DiffulexError | None:
        return self._followers.death

    def load(self, config: Config, model: Any) -> None:
        self._is_checked = config.parallel.check_ranks
        model.comm = self._followers.connect()
        try:
            super().load(config, model)
        except PeerError as error:
            self._followers.fail(error, "the connection of the ranks")

    def num_pages(self) -> int:
        every = [super().num_pages(), *self._followers.num_pages()]
        if min(every) < every[0]:
            rank = every.index(min(every))
            logger.info(
                "pages: %d (rank %d limits: rank 0 could hold %d)", *(min(every), rank, every[0])
            )
        return min(every)

    def start(self, config: Config, scheduler: _core.Scheduler) -> Prepared:
        num_bytes = _core.StepPlan.arena_bytes(scheduler.options)
        self._arenas = self._followers.arenas(config.cache.num_pages, num_bytes).tensors
        prepared = super().start(config, scheduler)
        self._followers.started()
        return prepared

    def expect_draws(self) -> None:
        self._has_draws = True  # the header of the next step tells every rank

    def watch(self, req_id: int, watch: Watch) -> None:
        self._wanted.append(lambda: super(GroupExecutor, self).watch(req_id, watch))

    def unwatch(self, req_id: int) -> None:
        self._wanted.append(lambda: super(GroupExecutor, self).unwatch(req_id))

    def execute(self, plan: _core.StepPlan) -> None:
        while self._wanted:
            self._wanted.popleft()()
        runner, self._num_steps = self.runner, self._num_steps + 1
        header = StepHeader.of(
            plan,
            arena=runner.step_buffers.staged,
            step=self._num_steps,
            has_draws=self._has_draws,
            is_watched=runner.row_watch.is_active,
        )
        if header.has_draws:
            runner.expect_draws()
        self._followers.execute(header)
        try:
            super().execute(plan)
        except BaseException as error:
            self._followers.fail(error, f"step {self._num_steps}")

    def collect(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        output = super().collect(plan)
        if self._is_checked:
            own = decisions(output, plan.num_blocks)
            for rank, theirs in enumerate(self._followers.decided(), 1):
                if theirs != own:
                    text = _difference(plan, output, theirs)
                    self._followers.disagree(
                        rank,
                        f"ranks disagree: step {self._num_steps}, rank {rank} decided other tokens than"
                        f" rank 0 (first difference: {text})",
                    )
        return output

    def evict(self, request_slots: Sequence[int]) -> None:
        super().evict(request_slots)
        self._followers.evict(request_slots)

    def score(self, batch: ScoreBatch) -> Scored:
        self._refuse("score")

    def update_weights(self, new: object, begin: Callable[[], None]) -> int:
        self._refuse("update_weights")

    def load_adapter(self, directory: Path, begin: Callable[[], None]) -> int:
        self._refuse("load_lora")

    def unload_adapter(self, begin: Callable[[], None]) -> int:
        self._refuse("unload_lora")

    def _refuse(self, name: str) -> NoReturn:
        """The other ranks would have to do it as well, which they are not told yet."""
        sizes = Sizes.of_engine(self.runner.config.parallel)
        raise ConfigError(f"{name}: expected {sizes.limiting_key} 1, got {sizes.world}")

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._followers.close()


def _difference(plan: _core.StepPlan, output: _core.SamplerOutput, theirs: bytes) -> str:
    """Where the decisions of another rank begin to differ."""
    own = output.write_ids[: plan.num_blocks]
    other = np.frombuffer(theirs, own.dtype, own.size).reshape(own.shape)
    places = np.argwhere(own != other)
    if len(places) == 0:
        return "flags of a block"
    block, index = places[0]
    req_id = plan.req_ids[plan.blk_req[block]]
    return f"request {req_id}, position {plan.blk_start[block] + index}"
