# SPDX-License-Identifier: Apache-2.0
"""Gives every request to all workers and waits for all of them; the result comes from rank 0."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import queue
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import diffulex.errors
from diffulex.log import get_logger
from diffulex.omni import errors
from diffulex.omni.errors import (
    OmniError,
    RequestAborted,
    RequestTimeout,
    WorkerDeadError,
    WorkerError,
)
from diffulex.omni.loader import resolve_device
from diffulex.omni.message_queue import Kind, Message, MessageQueue, QueueHandle
from diffulex.omni.worker import DrawnCall, PipelineFacts, StepEvent
from diffulex.omni.worker_pool import WorkerPool
from diffulex.serving.backend_process import describe_exit
from diffulex.serving.zmq_queue import MessageDecodeError

if TYPE_CHECKING:
    from diffulex.omni.config import OmniDiffusionConfig
    from diffulex.omni.worker import OnStep, PipelineCall

__all__ = ["DiffusionOutput", "Scheduler", "get_scheduler"]

logger = get_logger(__name__)

#: Longest wait until the processes are looked at again.
_SLICE_S = 0.1
_SILENT_S = 30.0
_LEVELS = ("debug", "info", "warning", "error")


class DiffusionOutput(NamedTuple):
    """Images of each call, in order, and what its cache has done."""

    outputs: list[list[Any]]
    cache_stats: list[dict[str, Any] | None]


@dataclasses.dataclass(slots=True)
class _Running:
    """A call of a method while the workers are at it.

    Attributes:
        replies: by rank.
        failure: raised when all workers are done, instead of what they say.
        limit_s, limit_name, deadline: seconds it may take, by what, and when they have passed.
        moved: when a worker last made a step or replied, or all were told to stop.
        slowest: longest time between steps; None before the first.
        later: steps of other leaders that came while one was asked for a preview.
        steps: where each rank is.
        stepping: ranks that were last seen between the steps of a call, not before or after all of them.
        heard: when each rank last said anything.
    """

    seq: int
    on_step: OnStep | None = None
    request_ids: frozenset[str] = frozenset()
    limit_s: float = 0.0
    limit_name: str = "timeout"
    deadline: float | None = None
    replies: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    failure: BaseException | None = None
    is_stopping: bool = False
    moved: float = 0.0
    slowest: float | None = None
    later: deque[Message] = dataclasses.field(default_factory=deque)
    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    stepping: set[int] = dataclasses.field(default_factory=set)
    heard: dict[int, float] = dataclasses.field(default_factory=dict)

    def note(self, rank: int, is_stepping: bool) -> None:
        """Where a rank is."""
        (self.stepping.add if is_stepping else self.stepping.discard)(rank)


class Scheduler:
    """The workers of one engine and the queue to them; one call at a time, except for `abort`."""

    def __init__(self) -> None:
        self.state = "new"
        self.facts: PipelineFacts
        self._seq = itertools.count(1)
        #: Requests that are being drawn, and those of them that shall not be.
        self._drawing: frozenset[str] = frozenset()
        self._aborted: set[str] = set()
        self._running: _Running | None = None

    def initialize(self, config: OmniDiffusionConfig, directory: str) -> PipelineFacts:
        """Starts the workers and waits until all of them have loaded the model.

        Args:
            config: of the engine.
            directory: of the model, on this host.

        Raises:
            OmniError, ConfigError: what made a worker fail.
            WorkerDeadError: a worker died, or was not ready within `init_timeout_s`.
        """
        if self.state not in ("new", "closed"):
            raise RuntimeError(f"scheduler: expected a new or closed one, got a {self.state} one")
        self._config = config
        self._directory = directory
        self._world = config.parallel.world_size
        engine = config.engine
        self._queue = MessageQueue(self._world, engine.shm_threshold_bytes)
        try:
            threads = engine.cpu_threads_per_worker or (os.cpu_count() or 1) // self._world
            settings = _settings(config, directory, self._queue.export_handle())
            self._pool = WorkerPool(settings, max(1, threads))
            self.state = "ready"
            self.facts = self._wait_ready(engine.init_timeout_s)
        except BaseException:
            self.state = "closed"
            self._end()
            raise
        return self.facts

    def get_broadcast_handle(self) -> QueueHandle:
        """What a reader of the queue connects with."""
        return self._queue.export_handle()

    @property
    def pids(self) -> list[int]:
        """Process of each rank."""
        return self._pool.pids

    @property
    def step_age_s(self) -> float | None:
        """Seconds since a worker last made a step of the running call, or took it; None without one."""
        running = self._running
        return None if running is None else time.monotonic() - running.moved

    def death(self) -> WorkerDeadError | None:
        """Why the workers cannot draw any more, if so. Only looks, and may be called by any thread."""
        exited = self._pool.exited()
        # The state comes second: workers that are told to leave have not died.
        if self.state == "dead":
            known = self._death
            return WorkerDeadError(str(known), rank=known.rank, exitcode=known.exitcode)
        if self.state != "ready" or not exited:
            return None
        rank, code = exited[0]
        hint = " (possibly out of memory)" if code == -9 else ""
        return WorkerDeadError(
            f"worker {rank}: expected a running process, got one that {describe_exit(code)}{hint}",
            rank=rank,
            exitcode=code,
        )

    def check_alive(self) -> None:
        """Looks at the processes and ends all of them if one is gone; for the thread that draws.

        Raises:
            WorkerDeadError: one of them is gone, or was; the others have been ended.
        """
        if self.state not in ("ready", "dead"):
            raise RuntimeError(f"scheduler: expected a ready one, got a {self.state} one")
        error = self.death()
        if error is not None:
            if self.state == "ready":
                self._end_dead(error)
            raise error

    def add_req(
        self,
        calls: Sequence[PipelineCall],
        on_step: OnStep | None = None,
        timeout_s: float | None = None,
    ) -> DiffusionOutput:
        """Runs the calls on all workers.

        Raises:
            RequestAborted: the callback returned False, or `abort` named one of the requests.
            RequestTimeout: `timeout_s` or the engine's `request_timeout_s` has passed.
            WorkerError, OmniError: the workers could not do it; they stay usable.
            WorkerDeadError: a worker is gone or out of step.
        """
        ids = frozenset(name for call in calls for name in call.request_ids)
        self._drawing = ids
        limit, name = self._config.engine.request_timeout_s, "request_timeout_s"
        if timeout_s is not None and (limit is None or timeout_s < limit):
            limit, name = timeout_s, "timeout_s"
        kwargs = {
            "calls": [_as_dict(call) for call in calls],
            "is_watched": on_step is not None,
        }
        body = {"method": "generate", "output_rank": 0, "exec_all_ranks": True, "kwargs": kwargs}
        make_running = functools.partial(
            _Running, on_step=on_step, request_ids=ids, limit_name=name
        )
        try:
            replies = self._call(body, make_running, limit)
        finally:
            self._drawing = frozenset()
            self._aborted.clear()
        drawn = [DrawnCall(*item) for item in replies[0]["result"]]
        return DiffusionOutput([item.images for item in drawn], [item.cache for item in drawn])

    def run(
        self, calls: Sequence[PipelineCall], on_step: OnStep | None, timeout_s: float | None = None
    ) -> list[DrawnCall]:
        """Images of each call; as `add_req`."""
        output = self.add_req(calls, on_step, timeout_s)
        return [DrawnCall(*item) for item in zip(output.outputs, output.cache_stats)]

    def prompt_tokens(self, prompt: str, values: dict[str, Any]) -> tuple[int, int]:
        """Tokens of a prompt, and the most that the pipeline reads. Raises: as `add_req`."""
        count, most = self.collective_rpc(
            "prompt_tokens", args=(prompt, values), unique_reply_rank=0
        )
        return count, most

    def latents_shape(self, arguments: dict[str, Any]) -> tuple[int, ...]:
        """Shape of the latents of one image. Raises: as `add_req`."""
        shape = self.collective_rpc("latents_shape", args=(arguments,), unique_reply_rank=0)
        return tuple(shape)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Calls a method of the workers; the result of one rank, or of all as a list.

        Raises: as `add_req`.
        """
        body = {
            "method": method,
            "output_rank": unique_reply_rank,
            "exec_all_ranks": unique_reply_rank is None,
            "args": list(args),
            "kwargs": kwargs or {},
        }
        replies = self._call(body, _Running, timeout)
        results = [replies[rank]["result"] for rank in range(self._world)]
        return results if unique_reply_rank is None else results[unique_reply_rank]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stops the running calls at their next step if they draw one of these; from any thread."""
        self._aborted |= self._drawing & set(request_ids)

    def restart(self) -> PipelineFacts:
        """Ends what is left of the workers and starts new ones. Raises: as `initialize`."""
        self.close()
        try:
            return self.initialize(self._config, self._directory)
        except BaseException as error:
            self._death = WorkerDeadError(f"workers: expected them to start again, got: {error}")
            self.state = "dead"
            raise

    def close(self) -> None:
        """Ends the workers and removes what they shared. May be called again, in any state."""
        if self.state == "ready":
            self.state = "closing"
            try:
                self._queue.enqueue(Kind.SHUTDOWN)
                self._pool.stop(self._config.engine.shutdown_timeout_s)
            except ConnectionError:
                pass
        if self.state != "new":
            self.state = "closed"
            self._end()

    # Waiting.

    def _wait_ready(self, timeout_s: float) -> PipelineFacts:
        """Facts of rank 0 when all ranks are ready."""
        end = time.monotonic() + timeout_s
        facts: dict[int, dict[str, Any]] = {}
        while len(facts) < self._world:
            message = self._receive()
            if message is None and self._pool.exited():
                # Its last words may have come in between.
                message = self._receive()
            if message is None:
                self.check_alive()
                if time.monotonic() > end:
                    waiting = sorted(set(range(self._world)) - set(facts))
                    text = f"expected it within {timeout_s:g} s (init_timeout_s), got none"
                    self._die(f"worker {waiting[0]}: ready message: {text}", waiting[0], None)
            elif "error" in message.value:
                raise _as_error(message.value["error"], message.rank)
            else:
                facts[message.rank] = message.value["facts"]
        return PipelineFacts(**facts[0])

    def _receive(self) -> Message | None:
        """The next message, if one comes soon."""
        try:
            return self._queue.dequeue(_SLICE_S)
        except queue.Empty:
            return None
        except MessageDecodeError as error:
            logger.error("%s", error)
            return None

    def _call(
        self, body: dict[str, Any], make_running: Any, timeout_s: float | None
    ) -> dict[int, dict[str, Any]]:
        """Sends the call to all ranks and waits for all replies."""
        self.check_alive()
        running = make_running(next(self._seq))
        if timeout_s is not None:
            running.limit_s, running.deadline = timeout_s, time.monotonic() + timeout_s
        body.setdefault("args", [])
        try:
            self._queue.enqueue(Kind.RPC, body, seq=running.seq)
            self._wait_done(running)
        except ConnectionError as error:
            self.check_alive()
            self._die(f"workers: expected connected ones, got: {error}", 0, None)
        except (KeyboardInterrupt, SystemExit):
            self._abandon(running)
            raise
        if running.failure is not None:
            raise running.failure
        failed = {r: reply["error"] for r, reply in running.replies.items() if "error" in reply}
        if failed:
            # An error of one rank stops the others: the first that is no stop is the reason.
            rank = min(failed, key=lambda r: (failed[r]["kind"] == RequestAborted.__name__, r))
            raise _as_error(failed[rank], rank)
        replies: dict[int, dict[str, Any]] = running.replies
        return replies

    def _wait_done(self, running: _Running) -> None:
        running.moved = time.monotonic()
        running.heard = dict.fromkeys(range(self._world), running.moved)
        self._running = running
        try:
            while len(running.replies) < self._world:
                message = running.later.popleft() if running.later else self._next(running)
                if message is not None:
                    self._handle(message, running)
        finally:
            self._running = None

    def _next(self, running: _Running) -> Message | None:
        """The next message of the call, if one comes soon, after a look at all that may end it."""
        message = self._receive()
        self.check_alive()
        self._check_time(running)
        if running.request_ids & self._aborted and not running.is_stopping:
            self._stop(running, RequestAborted("request: expected to go on, got an abort"))
        return message if message is not None and message.seq == running.seq else None

    def _handle(self, message: Message, running: _Running) -> None:
        now = time.monotonic()
        running.heard[message.rank] = now
        if message.kind == Kind.DONE:
            running.replies[message.rank] = message.value
            running.moved = now
            if "error" in message.value and not running.is_stopping:
                self._stop(running, None)
        elif message.kind == Kind.HEARTBEAT:
            step = message.value["step"]
            running.note(message.rank, message.value["is_stepping"])
            if running.steps.get(message.rank) != step:
                running.steps[message.rank] = step
                if step:
                    running.slowest = max(running.slowest or 0.0, now - running.moved)
                running.moved = now
        elif message.kind == Kind.PROGRESS and "event" in message.value:
            running.slowest = max(running.slowest or 0.0, now - running.moved)
            event = message.value["event"]
            running.note(message.rank, event["step"] < event["num_steps"])
            self._answer(message, running)

    def _answer(self, message: Message, running: _Running) -> None:
        """Asks the callback whether the leader that made a step goes on."""
        answer = "stop"
        if not running.is_stopping and running.on_step is not None:
            preview = functools.partial(self._preview, message.rank, running)
            try:
                event = StepEvent(**message.value["event"], _preview=preview)
                answer = "stop" if running.on_step(event) is False else "go"
                if answer == "stop" and not running.is_stopping:
                    self._stop(running, None, but=message.rank)
            except WorkerDeadError:
                raise
            except BaseException as error:
                if not running.is_stopping:
                    self._stop(running, error, but=message.rank)
        running.moved = time.monotonic()
        self._queue.enqueue(Kind.ANSWER, answer, seq=running.seq, ranks=(message.rank,))

    def _preview(self, rank: int, running: _Running) -> list[Any]:
        self._queue.enqueue(Kind.ANSWER, "preview", seq=running.seq, ranks=(rank,))
        while not running.is_stopping:
            message = self._next(running)
            if message is None:
                continue
            if message.kind != Kind.PROGRESS:
                self._handle(message, running)
            elif message.rank != rank:
                running.later.append(message)
            elif "error" in message.value:
                raise _as_error(message.value["error"], rank)
            else:
                images: list[Any] = message.value["preview"]
                return images
        raise running.failure or RequestAborted(
            "preview: expected a request that goes on, got none"
        )

    def _stop(self, running: _Running, failure: BaseException | None, but: int = -1) -> None:
        """Stops all ranks at their next step, except for one that is answered anyway."""
        running.is_stopping = True
        running.failure = failure
        running.moved = time.monotonic()
        others = tuple(r for r in range(self._world) if r != but and r not in running.replies)
        self._queue.enqueue(Kind.ABORT, seq=running.seq, ranks=others)

    def _check_time(self, running: _Running) -> None:
        now, engine = time.monotonic(), self._config.engine
        if running.deadline is not None and now > running.deadline:
            if isinstance(running.failure, RequestTimeout):
                text = f"{running.failure}; the workers did not stop and were ended"
                self._end_dead(WorkerDeadError(text))
                raise RequestTimeout(text)
            self._stop(running, RequestTimeout.after(running.limit_s, running.limit_name))
            # A limit that a client sets ends its request, not the workers of all.
            is_own = running.limit_name == "timeout_s"
            running.deadline = None if is_own else now + engine.error_grace_s
        elif running.is_stopping and (
            running.deadline is None or not isinstance(running.failure, RequestTimeout)
        ):
            self._check_stop(running, now)
        for rank, heard in running.heard.items():
            if rank not in running.replies and now - heard > _SILENT_S:
                running.heard[rank] = now
                logger.warning("image worker %d: no sign of life for %g s", rank, _SILENT_S)

    def _check_stop(self, running: _Running, now: float) -> None:
        """Ends workers that were told to stop and go on for longer than their steps explain."""
        engine = self._config.engine
        said = [(r, v["error"]) for r, v in running.replies.items() if "error" in v]
        failed = [(r, error) for r, error in said if error["kind"] != RequestAborted.__name__]
        silent = sorted(set(range(self._world)) - set(running.replies))
        patience = engine.error_grace_s
        if not failed:
            # How long it takes to read the prompt, or to decode what was drawn, is not known.
            if running.slowest is not None and running.stepping.issuperset(silent):
                patience += 10 * running.slowest
            else:
                patience = engine.dist_timeout_s
        if now - running.moved <= patience:
            return
        if not failed:
            text = f"expected them to stop within {patience:.3g} s of being told to, got no end"
            self._die(f"workers {silent}: {text}", silent[0], None)
        rank, error = failed[0]
        text = f"expected the same course as workers {silent}, got {error['kind']}"
        self._die(f"worker {rank}: {text}: {error['message']}", rank, None)

    def _abandon(self, running: _Running) -> None:
        """The caller does not wait any more: the workers get a moment to stop."""
        end = time.monotonic() + self._config.engine.error_grace_s
        try:
            self._stop(running, None)
            while len(running.replies) < self._world:
                message = self._receive()
                if message is not None and message.seq == running.seq:
                    self._handle(message, running)
                self.check_alive()
                if time.monotonic() > end:
                    raise WorkerDeadError("workers: expected them to stop, got none that did")
        except (KeyboardInterrupt, OmniError, ConnectionError) as error:
            self._end_dead(WorkerDeadError(f"workers: ended with the caller ({error})"))

    # The end.

    def _die(self, text: str, rank: int, exitcode: int | None) -> NoReturn:
        error = WorkerDeadError(text, rank=rank, exitcode=exitcode)
        self._end_dead(error)
        raise error

    def _end_dead(self, error: WorkerDeadError) -> None:
        # Before the processes end: `death` reads both in other threads.
        self._death = error
        self.state = "dead"
        self._end()

    def _end(self) -> None:
        pool = getattr(self, "_pool", None)
        if pool is not None:
            pool.kill()
        self._queue.close()


def _settings(
    config: OmniDiffusionConfig, directory: str, handle: QueueHandle
) -> list[dict[str, Any]]:
    """What the process of each rank is told."""
    level = logging.getLevelName(get_logger().getEffectiveLevel()).lower()
    keywords = {**config.to_dict(), "model": directory, "revision": None}
    world = config.parallel.world_size
    device = keywords["device"] = resolve_device(config.model.device, world)
    return [
        {
            "config": keywords,
            "device": f"cuda:{rank}" if device == "cuda" else device,
            "handle": list(handle),
            "rank": rank,
            "world": world,
            "parent": os.getpid(),
            "log_level": level if level in _LEVELS else "warning",
        }
        for rank in range(world)
    ]


def _as_dict(call: PipelineCall) -> dict[str, Any]:
    return {item.name: getattr(call, item.name) for item in dataclasses.fields(call)}


def _as_error(described: dict[str, str], rank: int) -> Exception:
    """The error of a worker: of its class if that is one of the package's."""
    kind, text = described["kind"], described["message"]
    for module in (errors, diffulex.errors):
        found: Any = getattr(module, kind, None)
        if kind in module.__all__ and found not in (WorkerError, WorkerDeadError):
            made: Exception = found(text)
            return made
    return WorkerError(
        f"worker {rank}: expected no error, got {kind}: {text}",
        rank=rank,
        kind=kind,
        trace=described["trace"],
    )


@functools.cache
def get_scheduler() -> Scheduler:
    """A scheduler that this process shares; engines have their own."""
    return Scheduler()
