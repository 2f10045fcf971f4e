# SPDX-License-Identifier: Apache-2.0
"""The loop of an engine that is several: stands where `StepLoop` stands, and runs nothing itself.

Requests wait here. A replica gets up to twice as many as it runs at a time, so that it never waits and
what is left at the end is spread. What it sends about each step goes to the owners of the requests, as
outputs of this process's own steps would.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, cast

from diffulex.distributed.executor import StepCounts
from diffulex.distributed.router import ReplicaState, Router, token_chunks
from diffulex.distributed.store import place_of
from diffulex.engine.interrupt import deferred_interrupt, uninterrupted
from diffulex.engine.metrics import RequestRecord, RunStats
from diffulex.engine.replicas.bond import CoupledBond, NoBond
from diffulex.engine.replicas.coupled import make_meeting_place
from diffulex.engine.replicas.replica import Replica, end_replicas, start_replicas
from diffulex.engine.replicas.requests import Admission, ReplicaRequest, plain_params
from diffulex.engine.routing import StepQueue, StepRouter
from diffulex.engine.template import split_masked_prompt
from diffulex.errors import EngineDeadError
from diffulex.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from diffulex.checkpoint.tokenizer import Tokenizer
    from diffulex.config.config import Config
    from diffulex.config.parse import Options
    from diffulex.config.sampling_params import SamplingParams
    from diffulex.engine.output import StepOutput
    from diffulex.engine.replicas.bond import Bond
    from diffulex_ext import _core

__all__ = ["ReplicaLedger", "ReplicaLoop"]

logger = get_logger(__name__)

#: Requests that a replica has at a time, in those that it runs.
_FED = 2
_POLL_S = 0.5


class ReplicaLedger:
    """The books: records of open requests and totals of the run, as `Ledger` has them.

    Args:
        loop: whose requests they are.
    """

    def __init__(self, loop: ReplicaLoop, num_replicas: int) -> None:
        self.run_stats = RunStats(num_replicas=num_replicas)
        self._loop = weakref.proxy(loop)
        self._on_block: Callable[[int], None] | None = None

    def record(self, req_id: int) -> RequestRecord:
        """The record of a request that is not finished; KeyError for every other."""
        return cast("RequestRecord", self._loop.open[req_id].record)

    def open_ids(self) -> set[int]:
        """Requests that are not finished."""
        return set(self._loop.open)

    def watch_buffer(self, req_id: int) -> None:
        """Adds snapshots to the step outputs of a request from now on; unknown ids are ignored."""
        self._loop.watch(req_id)

    def block_state(self, req_id: int) -> str:
        """Nothing: the replicas know it."""
        del req_id
        return ""

    @property
    def num_active_blocks(self) -> int:
        """Blocks that the last steps of all replicas denoised."""
        return sum(replica.num_active_blocks for replica in self._loop.replicas)

    @property
    def on_block(self) -> Callable[[int], None] | None:
        """Called with the forwards that a block was denoised in."""
        return self._on_block

    @on_block.setter
    def on_block(self, on_block: Callable[[int], None]) -> None:
        self._on_block = on_block
        for replica in self._loop.replicas:
            replica.send(("observe",))


class ReplicaLoop:
    """Several engines as one; the interface of `StepLoop`.

    `add`, `abort` and `has_unfinished` may be called from any thread; everything else belongs to
    one thread at a time. When the last replica is gone every call but `close` raises
    EngineDeadError.

    Args:
        config: of one replica, with the number of them.
        options: from which each replica makes its engine.
        tokenizer: of prompts and stop texts.

    Raises:
        DiffulexError: a replica cannot start; then none is left.
    """

    def __init__(self, config: Config, options: Options, tokenizer: Tokenizer) -> None:
        self.is_closed = self.is_paused = False
        #: That of each replica is not told.
        self.rank_skew_s: float | None = None
        #: Those of replicas cannot be changed.
        self.weights_failure: str | None = None
        self.router = StepRouter()
        #: NCCL asks it in the first exchange of the ranks, which may be that of the first step.
        self._store = make_meeting_place(config)
        self._bond: Bond = NoBond() if self._store is None else CoupledBond()
        place = None if self._store is None else place_of(self._store)
        self.replicas = start_replicas(config, options, place)
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _end_all, self.replicas, self._pid, self._bond)
        num_pages = min(replica.num_pages for replica in self.replicas)
        #: With the pages of the smallest replica.
        self.config = config.with_num_pages(num_pages)
        self.warm_up_s = max(replica.warm_up_s for replica in self.replicas)
        self.ledger = ReplicaLedger(self, len(self.replicas))
        #: Requests that are not finished, by id.
        self.open: dict[int, ReplicaRequest] = {}
        self._has_chunks = config.cache.enable_prefix_caching
        self._max_fed = _FED * config.scheduler.max_num_reqs
        self._admission = Admission(self.config, tokenizer)
        policy = config.parallel.data_parallel_policy
        capacity = num_pages * config.cache.page_size
        self._choice = Router(len(self.replicas), capacity, policy)
        self._waiting: deque[ReplicaRequest] = deque()
        self._lock = threading.RLock()
        self._is_stepping = threading.Lock()
        self._death: EngineDeadError | None = None
        #: What a step raised and no caller knows yet.
        self._failure: Exception | None = None
        devices = ", ".join(dict.fromkeys(replica.device for replica in self.replicas))
        logger.info("%d replicas on %s, %d pages each", len(self.replicas), devices, num_pages)

    def check_open(self) -> None:
        """RuntimeError after `close`, EngineDeadError without a replica."""
        if self.is_closed:
            raise RuntimeError("Diffulex: expected an open engine, got a closed one")
        if self._death is not None:
            raise self._death

    # Requests.

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
        token_ids, params = split_masked_prompt(token_ids, params, self.config)
        chunks = token_chunks(token_ids) if self._has_chunks else []
        with self._lock:
            req_id = self._admission.admit(token_ids, params)
            seeded = self._admission.seeded(req_id, plain_params(params))
            options = {"has_snapshots": has_snapshots, "has_text": has_text}
            record = self._admission.record(req_id, token_ids, params)
            request = ReplicaRequest(token_ids, seeded, options, chunks, queue, record)
            if queue is not None:
                self.router.claim(req_id, queue)
            self.open[req_id] = request
            self._waiting.append(request)
            self._feed()
        return req_id

    def abort(self, req_id: int) -> bool:
        """Ends a request at the next step of its replica; False for unknown or finished ids."""
        self.check_open()
        with self._lock:
            request = self.open.get(req_id)
            if request is None:
                return False
            if not request.is_aborted:
                request.is_aborted = True
                if request.ticket is None:
                    self._waiting.remove(request)
                    if request.num_losses:  # none has what its owner has seen
                        self._deliver(request.aborted())
                        return True
                    self._send(request, None)  # a replica makes its result, as of any other
                if request.ticket is not None:
                    self.replicas[request.ticket.replica].send(("abort", req_id))
            return True

    def abandon(self, req_ids: Iterable[int]) -> None:
        """Aborts requests whose caller is gone and, if nothing else runs, waits for their end."""
        if self.is_closed or self._death is not None:
            return
        gone = set(req_ids)
        self.router.abandon(gone)
        for req_id in gone:
            self.abort(req_id)
        while self.open and self.open.keys() <= gone:
            with self.exclusive(), deferred_interrupt():
                self._receive()
                self._failure = None  # of a request that nobody waits for

    def watch(self, req_id: int) -> None:
        """Adds snapshots to the step outputs of a request; unknown ids are ignored."""
        with self._lock:
            request = self.open.get(req_id)
            if request is not None:
                request.options["has_snapshots"] = True
                if request.ticket is not None:
                    self.replicas[request.ticket.replica].send(("watch", req_id))

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to return."""
        if self.is_closed:
            return False
        return bool(self.router.unclaimed) or bool(self.open)

    def _feed(self) -> None:
        """Sends what waits to replicas that have room."""
        while self._waiting:
            room = [
                replica.index
                for replica in self._alive()
                if self._choice.num_inflight(replica.index) < self._max_fed
            ]
            if not room:
                return
            self._send(self._waiting.popleft(), room)

    def _send(self, request: ReplicaRequest, among: Sequence[int] | None) -> None:
        num_tokens = len(request.token_ids)
        index = self._choice.choose(request.chunks, num_tokens, among)
        request.ticket = self._choice.sent(index, request.chunks, num_tokens)
        item = request.req_id, request.token_ids, request.params, request.options
        with uninterrupted():  # a replica that is told waits for the others
            try:
                self.replicas[index].send(("add", *item))
            except Exception as error:  # a parameter that does not pickle
                text = f"request {request.req_id}: cannot be sent: {type(error).__name__}: {error}"
                self._deliver(request.failed(text))
                return
            self._bond.wake(self.replicas)

    # Steps.

    def run(self) -> None:
        """Waits for a step of any replica; its outputs are in the queues of their owners afterwards.

        When a step fails its requests wait again in their replica, until the next call.

        Raises:
            EngineDeadError: the last replica is gone.
            Exception: what a step raised, by its type if that is known here.
            RuntimeError: another thread is in a step, or this one, in a callback.
        """
        self.check_open()
        with self.exclusive(), deferred_interrupt():
            while self.open and self._failure is None and not self._receive():
                pass
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    #: Replicas are not paused.
    check_running, run_or_wait = check_open, run

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

    def _alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_alive]

    def _receive(self) -> bool:
        """Takes what the replicas have sent, waiting a moment for it; whether there was anything."""
        if self._failure is None:
            for replica in self._alive():
                replica.go_on()
        sources = {replica.child.connection: replica for replica in self._alive()}
        found = wait(sources, _POLL_S)
        with self._lock:
            for connection in found:
                replica = sources[cast("Any", connection)]
                try:
                    self._take(replica, replica.receive())
                except EOFError as end:
                    self._lost(replica, str(end) or replica.child.describe_end())
            for replica in self._alive():
                if replica.child.has_ended:
                    self._lost(replica, replica.child.describe_end())
            self._feed()
        return bool(found)

    def _take(self, replica: Replica, message: Any) -> None:
        kind, *content = message
        if kind == "step":
            self._book(replica, *content)
        elif kind == "answer":
            replica.answered(*content)
        elif kind == "step_failed":
            replica.is_halted = True
            self._failure = replica.step_error(*content[0])
        elif kind == "refused":
            req_id, text = content
            self._deliver(self.open[req_id].failed(text))
        else:
            (name, text, _), is_hearsay = content
            how = f"failed: {name}: {text}"
            if is_hearsay:
                replica, how = self._bond.cause(replica, how, self._alive())
            self._lost(replica, how)

    def _book(
        self,
        replica: Replica,
        outputs: list[StepOutput],
        stats: RunStats,
        gauges: tuple[StepCounts, int, int],
        blocks: tuple[int, ...],
    ) -> None:
        replica.counts, replica.num_watched, replica.num_active_blocks = gauges
        self.ledger.run_stats.add(stats)
        is_decode, now = stats.decode_s > 0, time.perf_counter()
        for output in outputs:
            request = self.open.get(output.req_id)
            if request is None:  # failed here meanwhile
                continue
            if not request.has_begun:
                request.has_begun = True
                assert request.ticket is not None
                request.ticket = self._choice.started(request.ticket)
                request.record.start_step(now - stats.total_s)
            step = request.book(output, stats.total_s, is_decode)
            if step.is_finished and not output.is_finished:
                replica.send(("abort", output.req_id))
            self._deliver(step)
        if self.ledger.on_block is not None:
            for num_steps in blocks:
                self.ledger.on_block(num_steps)

    def _deliver(self, step: StepOutput) -> None:
        if step.is_finished:
            ticket = self.open.pop(step.req_id).ticket
            if ticket is not None:
                self._choice.finished(ticket)
        self.router.push([step])

    def _lost(self, replica: Replica, how: str) -> None:
        """Starts the requests of a replica again on the others.

        Raises:
            EngineDeadError: there are no others, or they cannot run without it.
        """
        if not replica.is_alive:
            return
        for gone in self._bond.lost_with(replica, self._alive()):
            gone.is_alive = False
            gone.num_watched = gone.num_active_blocks = 0
            end_replicas([gone], 0.0)
            self._choice.set_state(gone.index, ReplicaState.LOST)
        death = replica.death(how)
        if not self._alive():
            self._death = death
            raise death
        begun = [
            request
            for request in self.open.values()
            if request.ticket is not None and request.ticket.replica == replica.index
        ]
        again = [request for request in begun if request.can_begin_again]
        text = "replica %d died (pid %d, %s %s); %d requests start again on the others"
        logger.warning(text, replica.index, death.pid, death.device, how, len(again))
        for request in begun:
            assert request.ticket is not None
            self._choice.finished(request.ticket)
            request.ticket = None
            end = request.end_of_loss(str(death))
            if end is None:
                request.begin_again()
            else:
                self._deliver(end)
        self._waiting.extendleft(reversed(again))

    # Numbers.

    @property
    def counts(self) -> StepCounts:
        """How the decode steps of all replicas were run."""
        return StepCounts(*map(sum, zip(*(replica.counts for replica in self.replicas))))

    @property
    def num_watched(self) -> int:
        """Requests whose logits are looked at on the host."""
        return sum(replica.num_watched for replica in self.replicas)

    def stats(self) -> _core.SchedulerStats:
        """Counters of the schedulers, summed."""
        return cast("_core.SchedulerStats", _Sums(self._ask("stats")))

    def flush_prefix_cache(self) -> int:
        """Forgets cached prefixes that no request uses; returns how many pages that frees."""
        self._choice.forget()
        return sum(self._ask("flush_prefix_cache"))

    def _ask(self, what: str) -> list[Any]:
        """What each replica answers; outputs that come before go to their owners."""
        self.check_open()
        with self.exclusive(), deferred_interrupt():
            for replica in self._alive():
                replica.ask(what)
            while any(replica.answer is None for replica in self._alive()):
                self._receive()
            return [replica.answer for replica in self._alive()]

    def close(self) -> None:
        """Ends every request and every replica; idempotent. Inside `exclusive`.

        A first Ctrl-C waits until it is done; after a second one, another call goes on.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self.open.clear()
        self._waiting.clear()
        self.router.clear()
        try:
            with deferred_interrupt():
                _end_all(self.replicas, self._pid, self._bond)
                self._end.detach()
                self._store = None  # gives its port back
        except BaseException:
            self.is_closed = not self._end.alive
            raise


class _Sums:
    """Counters of several schedulers as one."""

    def __init__(self, parts: list[dict[str, int]]) -> None:
        for name in parts[0]:
            setattr(self, name, sum(part[name] for part in parts))


def _end_all(replicas: list[Replica], pid: int, bond: Bond) -> None:
    """Ends all of them, as `bond` says, and waits until they have.

    Args:
        replicas: those that are gone are left alone.
        pid: whose they are; in a fork of that process nothing happens.
        bond: between them.
    """
    if os.getpid() != pid:
        return
    bond.end(replicas)
    for replica in replicas:
        replica.is_alive = False
