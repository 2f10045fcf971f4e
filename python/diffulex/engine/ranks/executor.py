# SPDX-License-Identifier: Apache-2.0
"""The executor of an engine whose model several processes share. Its own process is the first rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from diffulex.distributed.arenas import SharedArenas
from diffulex.distributed.cuda_comm import CudaComm
from diffulex.distributed.gloo_comm import GlooComm
from diffulex.distributed.group import WorkerGroup
from diffulex.distributed.layout import Sizes, describe_ranks, replica_environment
from diffulex.distributed.legality import check_model_class
from diffulex.distributed.start import rank_starter
from diffulex.distributed.store import PeerError, make_store, place_of
from diffulex.engine.interrupt import deferred_interrupt
from diffulex.engine.ranks.follower import HiddenDigest, decisions
from diffulex.engine.ranks.step_header import StepHeader, is_looked_at
from diffulex.engine.ranks.worker import checkpoint_digest, make_comm, versions
from diffulex.engine.replicas.coupled import CoupledExecutor, connect_rows
from diffulex.errors import ConfigError, DiffulexError
from diffulex.log import get_logger, log_settings
from diffulex.profiling.profiler import Recorded
from diffulex.registry import AutoModelForDiffusionLM
from diffulex.runner.batch import StepBuffers
from diffulex.runner.local_executor import LocalExecutor
from diffulex.runner.loop_steps import LoopEntry
from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from diffulex.config.config import Config
    from diffulex.distributed.comm import Comm
    from diffulex.distributed.coupling import Coupling
    from diffulex.distributed.executor import Prepared, Watch
    from diffulex.likelihood.rows import ScoreBatch, Scored
    from diffulex.runner.loop_steps import LoopStep

__all__ = ["CoupledGroupExecutor", "Followers", "GroupExecutor", "make_executor"]

logger = get_logger(__name__)

_TARGET = "diffulex.engine.ranks.worker:run_worker"
#: A process that imports torch on a loaded host has been seen to take half a minute.
_HELLO_S = 120.0


def make_executor(
    config: Config, model_name: str, coupling: Coupling | None = None
) -> LocalExecutor:
    """What runs the steps of an engine that loads its checkpoint; starts the other ranks.

    Args:
        config: the resolved configuration.
        model_name: in the registry of models.
        coupling: other replicas share their experts with this one, and start at the same time.

    Raises:
        ConfigError: no rank can have a part of the model.
    """
    sizes = Sizes.of_engine(config.parallel)
    if sizes.world > 1:
        check_model_class(model_name, AutoModelForDiffusionLM.get(model_name), sizes)
        followers = ProcessFollowers(config, model_name, coupling)
        if coupling is None:
            return GroupExecutor(followers)
        return CoupledGroupExecutor(
            connect_rows(coupling, config), coupling.rank(config), followers
        )
    if coupling is None:
        return LocalExecutor()
    return CoupledExecutor(connect_rows(coupling, config), coupling.rank(config))


class Followers(Protocol):
    """The ranks other than the first."""

    @property
    def death(self) -> DiffulexError | None:
        """Why they are gone; None: they are there."""

    @property
    def skew_s(self) -> float | None:
        """As `rank_skew_s` in `diffulex.distributed.executor.Executor`."""

    def connect(self) -> Comm:
        """The exchange with them, once they have their parts of the model."""

    def measure(self) -> None:
        """Lets them find how many pages they have memory for, while this rank does the same."""

    def num_pages(self) -> list[int]:
        """What each of them has found."""

    def arenas(self, num_pages: int, num_bytes: int) -> SharedArenas:
        """Lets them allocate what steps need; memory for plans that all ranks have."""

    def started(self) -> None:
        """Waits until they are ready for steps."""

    def execute(self, header: StepHeader) -> None:
        """Tells them of a step."""

    def follow(self, told: LoopEntry | LoopStep) -> None:
        """Tells them of a step that the device has planned."""

    def check(self) -> None:
        """Raises why they are gone, or why what they exchanged with this rank is void."""

    def decided(self) -> list[bytes]:
        """What each of them has decided in the oldest step not asked for yet; see `decisions`."""

    def disagree(self, rank: int, text: str) -> NoReturn:
        """One of them has decided something else."""

    def start_recording(self, name: str) -> None:
        """See `diffulex.profiling.profiler.OtherRanks`."""

    def stop_recording(self) -> Sequence[Recorded]:
        """See `diffulex.profiling.profiler.OtherRanks`."""

    def evict(self, request_slots: Sequence[int]) -> None:
        """Requests left these slots."""

    def expect(self, counts: Sequence[int]) -> None:
        """Tells them how many rows each of the replicas that share the experts has in the next step."""

    def take_part(self, counts: Sequence[int]) -> None:
        """Tells them of a forward in which other replicas have rows, so many, and this one none."""

    def on_death(self, call: Callable[[DiffulexError], None]) -> None:
        """As in `diffulex.distributed.executor.Executor`."""

    def fail(self, error: BaseException, what: str) -> NoReturn:
        """This rank has failed, and with it all; raises the cause."""

    def close(self) -> None:
        """Ends them; idempotent."""


class ProcessFollowers:
    """Processes, which load their parts of the checkpoint from the moment this is made."""

    def __init__(self, config: Config, model_name: str, coupling: Coupling | None = None) -> None:
        parallel, sizes = config.parallel, Sizes.of_engine(config.parallel)
        size = sizes.world
        self._timeout_s = float(parallel.distributed_timeout_seconds)
        self._limit = f"{self._timeout_s:g} s (distributed_timeout_seconds)"
        self._parallel, self._device = parallel, config.model.device
        self._comm: GlooComm | CudaComm | None = None
        self._model_dir = config.model.model_dir
        self._num_told = 0
        #: Of the step that was last looked at.
        self._told_at: float | None = None
        self._skew_s: float | None = None
        #: What was decided in steps that run ahead, and came before the end of a recording.
        self._early: deque[list[bytes]] = deque()
        #: Those of the plans, for ranks that cannot map them.
        self._arenas: SharedArenas | None = None
        environment = replica_environment(sizes)
        first = 0 if coupling is None else coupling.rank(config)
        configs = [config.of_rank(first + rank) for rank in range(1, size)]
        devices = [own.model.device for own in configs]
        self._store = make_store(size, rank_starter().host, parallel)
        self._group = WorkerGroup(_TARGET, size, devices, environment)
        logs = log_settings()
        self._group.send_each([(rank, logs) for rank in range(1, size)])
        self._group.send_each(
            [("load", own, model_name, rank, coupling) for rank, own in enumerate(configs, 1)]
        )

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
        # The thread that connects must not hold the store: its port is free as soon as this is closed.
        where = self._parallel, self._device, 0, place_of(self._store), group.host
        group.send(("connect", where[3]))
        self._comm = comm = self._unless_dead(lambda: make_comm(*where))
        if isinstance(comm, CudaComm):
            group.on_death(_leaving(comm))
            group.check()  # it may have died before it knew whom to tell
        return comm

    def on_death(self, call: Callable[[DiffulexError], None]) -> None:
        self._group.on_death(_leaving(self._comm, call))
        if self.death is not None:  # it may have been too early for that
            call(self.death)

    def _unless_dead(self, make: Callable[[], GlooComm | CudaComm]) -> GlooComm | CudaComm:
        """What `make` returns, which would wait for ranks that have died."""
        made: deque[GlooComm | CudaComm | BaseException] = deque()

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
        if isinstance(result, ConfigError):
            raise result
        if isinstance(result, BaseException):
            self._group.fail(result, "the connection of the ranks", is_hearsay=True)
        return result

    def measure(self) -> None:
        self._group.send(("measure",))

    def num_pages(self) -> list[int]:
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

    @property
    def skew_s(self) -> float | None:
        skew = None if self._told_at is None else self._group.skew_s(self._told_at)
        if skew is not None:
            self._skew_s = skew
        return self._skew_s

    def _tell(self) -> None:
        """They are told of a step."""
        if is_looked_at(self._num_told):
            self._skew_s = self.skew_s  # of the step before this one
            self._told_at = time.monotonic()
        self._num_told += 1

    def execute(self, header: StepHeader) -> None:
        self._group.check()
        self._tell()
        self._group.send(header.pack() + self._unshared(header.arena, header.num_bytes))

    def _unshared(self, arena: int, num_bytes: int) -> bytes:
        """What ranks that cannot map the arenas must be sent of one."""
        if self._arenas is None:
            return b""
        return self._arenas.tensors[arena][:num_bytes].numpy().tobytes()

    def follow(self, told: LoopEntry | LoopStep) -> None:
        self._group.check()
        self._tell()
        arrays = b""
        if isinstance(told, LoopEntry):
            arrays = self._unshared(told.arena, told.used_bytes)
        self._group.send(("follow", told, arrays))

    def check(self) -> None:
        self._group.check()
        if isinstance(self._comm, CudaComm):
            self._comm.check()

    def decided(self) -> list[bytes]:
        return self._early.popleft() if self._early else self._replies("answer")

    def start_recording(self, name: str) -> None:
        self._group.send(("start_recording", name))

    def stop_recording(self) -> Sequence[Recorded]:
        with deferred_interrupt():  # the answers would be taken for those to something else
            self._group.send(("stop_recording",))
            while True:
                try:
                    answers = self._replies("write its recording")
                except DiffulexError as error:  # which the next step will raise
                    return [Recorded(error=str(error))]
                if isinstance(answers[0], Recorded):
                    return answers
                self._early.append(answers)

    def disagree(self, rank: int, text: str) -> NoReturn:
        self._group.disagree(rank, text)

    def evict(self, request_slots: Sequence[int]) -> None:
        self._group.send(("evict", list(request_slots)))

    def expect(self, counts: Sequence[int]) -> None:
        self._group.send(("expect", tuple(counts)))

    def take_part(self, counts: Sequence[int]) -> None:
        self._group.check()
        self._group.send(("take_part", tuple(counts)))

    def fail(self, error: BaseException, what: str) -> NoReturn:
        self._group.fail(error, what, is_hearsay=isinstance(error, PeerError))

    def close(self) -> None:
        comm, self._comm = self._comm, None
        self._group.on_death(None)
        try:
            self._group.close(("exit",))
            if comm is not None:
                comm.close()
        finally:
            self._store = None  # gives its port back


def _leaving(
    comm: GlooComm | CudaComm | None, call: Callable[[DiffulexError], None] | None = None
) -> Callable[[DiffulexError], None]:
    """What is done when the group dies; keeps nothing of the group alive."""

    def leave(error: DiffulexError) -> None:
        if isinstance(comm, CudaComm):
            comm.abort()
        if call is not None:
            call(error)

    return leave


class GroupExecutor(LocalExecutor):
    """See `diffulex.distributed.executor.Executor`. Each rank has a part of the model; this process is
    the first one and the only one with a scheduler.

    Args:
        followers: the other ranks.
    """

    def __init__(self, followers: Followers) -> None:
        super().__init__()
        self._followers, self._begin = followers, time.perf_counter()
        self._is_checked = False
        self._digest: HiddenDigest | None = None
        self._num_steps = 0
        self._has_draws = False
        #: What other threads want of the rows that are looked at; from one step to the next all ranks
        #: must know the same.
        self._wanted: deque[Callable[[], None]] = deque()

    @property
    def death(self) -> DiffulexError | None:
        return self._followers.death

    @property
    def rank_skew_s(self) -> float | None:
        return self._followers.skew_s

    def on_death(self, call: Callable[[DiffulexError], None]) -> None:
        self._followers.on_death(call)

    def load(self, config: Config, model: Any) -> None:
        self._is_checked = config.parallel.check_ranks
        model.comm = self._followers.connect()
        try:
            super().load(config, model)
        except PeerError as error:
            self._followers.fail(error, "the connection of the ranks")
        if self._is_checked:
            self._digest = HiddenDigest(self.runner)

    def num_pages(self) -> int:
        self._followers.measure()
        try:
            own = super().num_pages()
        except PeerError as error:
            self._followers.fail(error, "the measurement of memory")
        every = [own, *self._followers.num_pages()]
        if min(every) < every[0]:
            rank = every.index(min(every))
            logger.info(
                "pages: %d (rank %d limits: rank 0 could hold %d)", *(min(every), rank, every[0])
            )
        return min(every)

    def start(self, config: Config, scheduler: _core.Scheduler) -> Prepared:
        num_bytes = _core.StepPlan.arena_bytes(scheduler.options)
        self._arenas = self._followers.arenas(config.cache.num_pages, num_bytes).tensors
        try:
            prepared = super().start(config, scheduler)
        except PeerError as error:
            self._followers.fail(error, "the preparation of steps")
        if self.runner.loop is not None:
            self.runner.loop.listener = _Teller(self._followers)
        self._followers.started()
        return prepared._replace(ranks=self._ranks_text(config))

    def _ranks_text(self, config: Config) -> str:
        parallel, device = config.parallel, config.model.device
        sizes, ranks = Sizes.of_engine(parallel), describe_ranks(parallel, device)["ranks"]
        own = next((rank["replica"] for rank in ranks if rank["device"] == device), 0)
        devices = dict.fromkeys(rank["device"] for rank in ranks if rank["replica"] == own)
        kind = "TP" if sizes.tensor > 1 else "EP"
        how = self.runner.model.comm.no_capture_reason or "they exchange through peer memory"
        slow = "; on a CPU slower than one process" if device == "cpu" else ""
        seconds = time.perf_counter() - self._begin
        names = ", ".join(devices)
        return f"{kind} {sizes.world} on {names}, workers ready in {seconds:.1f} s; {how}{slow}"

    def expect_draws(self) -> None:
        self._has_draws = True  # the header of the next step tells every rank

    def watch(self, req_id: int, watch: Watch) -> None:
        self._wanted.append(lambda: super(GroupExecutor, self).watch(req_id, watch))

    def unwatch(self, req_id: int) -> None:
        self._wanted.append(lambda: super(GroupExecutor, self).unwatch(req_id))

    def execute(self, plan: _core.StepPlan) -> None:
        while self._wanted:
            self._wanted.popleft()()
        self._num_steps += 1
        try:
            super().execute(plan)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> NoReturn:
        if error is self._followers.death:
            raise error
        self._followers.fail(error, f"step {self._num_steps}")

    def _execute(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        runner = self.runner
        header = StepHeader.of(
            plan,
            runner.graphs.pad(plan) if runner.device.type == "cuda" else None,
            arena=runner.step_buffers.staged,
            step=self._num_steps,
            has_draws=self._has_draws,
            is_watched=runner.row_watch.is_active,
        )
        if header.has_draws:
            runner.expect_draws()
        self._followers.execute(header)
        return super()._execute(plan)

    def collect(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        output, loop = self._output, self.runner.loop
        if isinstance(output, int):
            assert loop is not None
            ids, flags = loop.decided(output)
        elif output is not None:
            ids, flags = output.write_ids[: plan.num_blocks], output.flags[: plan.num_blocks]
        try:
            self._followers.check()  # before anything is made of it
        except DiffulexError as error:
            self._fail(error)
        own = decisions(ids, flags) if self._is_checked and output is not None else b""
        size = len(own)
        if self._digest is not None:
            own += self._digest.take()
        output = super().collect(plan)
        if self._is_checked:
            for rank, theirs in enumerate(self._followers.decided(), 1):
                if theirs != own:
                    what = "has other hidden states than rank 0"
                    if theirs[:size] != own[:size]:
                        place = _difference(plan, ids, theirs)
                        what = f"decided other tokens than rank 0 (first difference: {place})"
                    where = f"step {self._num_steps}, rank {rank}"
                    self._followers.disagree(rank, f"ranks disagree: {where} {what}")
        return output

    def forget_ahead(self) -> bool:
        was_ahead = super().forget_ahead()
        if was_ahead and self._is_checked and self.death is None:
            self._followers.decided()  # of a step that nothing is made of
        return was_ahead

    def start_recording(self, name: str) -> None:
        self._followers.start_recording(name)

    def stop_recording(self) -> Sequence[Recorded]:
        return self._followers.stop_recording()

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


class CoupledGroupExecutor(CoupledExecutor, GroupExecutor):
    """See `diffulex.distributed.executor.Executor`: a replica of several ranks that shares the experts with
    others. Its first rank agrees with theirs, and tells its followers."""

    def _agree(self, num_rows: int, *, has_more: bool) -> tuple[int, ...]:
        self._followers.check()
        try:
            return super()._agree(num_rows, has_more=has_more)
        except PeerError as error:
            self._fail(error)

    def collect(self, plan: _core.StepPlan) -> _core.SamplerOutput:
        try:
            return super().collect(plan)
        except PeerError as error:
            self._fail(error)

    def _expect(self, counts: Sequence[int]) -> None:
        self._followers.expect(counts)
        super()._expect(counts)

    def _enter(self, counts: Sequence[int]) -> None:
        self._followers.take_part(counts)
        try:
            super()._enter(counts)
        except BaseException as error:
            self._fail(error)


class _Teller:
    """See `diffulex.runner.loop_steps.LoopListener`."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers

    def entered(self, entry: LoopEntry) -> None:
        self._followers.follow(entry)

    def went_on(self, step: LoopStep) -> None:
        self._followers.follow(step)


def _difference(plan: _core.StepPlan, own: np.ndarray[Any, Any], theirs: bytes) -> str:
    """Where the decisions of another rank begin to differ."""
    other = np.frombuffer(theirs, own.dtype, own.size).reshape(own.shape)
    places = np.argwhere(own != other)
    if len(places) == 0:
        return "flags of a block"
    block, index = places[0]
    if block >= plan.num_blocks:
        return f"block {block} of the device"
    req_id = plan.req_ids[plan.blk_req[block]]
    return f"request {req_id}, position {plan.blk_start[block] + index}"
