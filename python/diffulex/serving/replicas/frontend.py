# SPDX-License-Identifier: Apache-2.0
"""One frontend over the frontends of several backends, the replicas of one engine.

A request goes to the replica that the router chooses and stays there. Where that replica is lost before
anything final was delivered, the request starts again elsewhere with the same seed; where something was,
it ends with an error that says so.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from diffulex.distributed.router import (
    NoReplicaError,
    ReplicaState,
    Router,
    text_chunks,
    token_chunks,
)
from diffulex.log import get_logger
from diffulex.serving.frontend import (
    ClientDisconnected,
    FrontendManager,
    OperationFailed,
    reply_of,
)
from diffulex.serving.frontend_state import FrontendLimits, ServerState, refusal_of
from diffulex.serving.replicas.report import merged_stats, replica_rows, router_stats
from diffulex.wire.messages import JobCommand, JobEvent, ServingError
from diffulex.wire.protocol import ChatInput, ServingGenerate

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence

    from diffulex.serving.replicas.group import ReplicaGroup

__all__ = ["ReplicaFrontend"]

logger = get_logger(__name__)

#: With these codes a replica ends requests that it can no longer serve.
_LOST = frozenset({"engine_dead", "engine_unresponsive"})
#: With these a replica refuses what was sent a moment too late.
_LATE = frozenset({"starting", "draining", "server_shutdown"})
#: How long a request that was lost waits for a replica that is ready.
_REPLACEMENT_S = 60.0
_POLL_S = 0.05


@dataclass
class _Open:
    """A request in flight; `num_tokens` as in `FrontendReqState`, `deadline` by time.monotonic."""

    num_tokens: int
    is_disconnected: Callable[[], Awaitable[bool]] | None = None
    deadline: float | None = None
    manager: FrontendManager | None = None
    is_aborted: bool = False
    is_sent: bool = False
    is_begun: bool = False
    has_results: bool = False

    def left_s(self) -> float | None:
        """Seconds until it must be complete; None: any number."""
        return None if self.deadline is None else max(0.001, self.deadline - time.monotonic())

    def is_late(self) -> bool:
        """Whether it had to be complete by now."""
        return self.deadline is not None and time.monotonic() >= self.deadline


class ReplicaFrontend:
    """A frontend over those of the replicas. Belongs to one event loop.

    Args:
        managers: one for each replica, without limits on what is in flight.
        policy: of the router.
        limits: of all replicas together.
        num_retries: how often a request may start again.
    """

    def __init__(
        self,
        managers: Sequence[FrontendManager],
        *,
        policy: str = "prefix",
        limits: FrontendLimits | None = None,
        num_retries: int = 2,
    ) -> None:
        self.managers = list(managers)
        self.model_id = self.managers[0].model_id
        self.tokenizer = self.managers[0].tokenizer
        self.limits = limits or FrontendLimits()
        self.router = Router(len(self.managers), 0, policy)
        self.info: dict[str, Any] = {}
        #: What starts and restarts the backends; None in tests of this class alone.
        self.group: ReplicaGroup | None = None
        #: Replicas that an operator has taken out.
        self.held: set[int] = set()
        self.num_retried = self.num_lost = 0
        self._num_retries = num_retries
        self._open: dict[str, _Open] = {}
        self._is_draining = self._is_stopped = False
        self._drain_task: asyncio.Task[None] | None = None
        for index, manager in enumerate(self.managers):
            if manager.info:
                self.replica_ready(index, manager.info)

    # Life.

    async def start(self) -> None:
        """Starts listening, once."""
        for manager in self.managers:
            await manager.start()

    async def stop(self) -> None:
        """Tells every backend to leave. Idempotent."""
        self._is_stopped = True
        await asyncio.gather(*(manager.stop() for manager in self.managers))

    def begin_drain(self, deadline_s: float) -> asyncio.Task[None]:
        """Accepts no requests any more; the task ends when none is left or the time is up."""
        if self._drain_task is None:
            self._is_draining = True
            drains = [manager.begin_drain(deadline_s) for manager in self.managers]
            self._drain_task = asyncio.create_task(_all(drains))
        return self._drain_task

    def replica_ready(self, index: int, info: Mapping[str, Any]) -> None:
        """A backend has said what it is; limits are those of the smallest one."""
        known = [dict(manager.info) for manager in self.managers if manager.info]
        known = known or [dict(info)]
        merged = dict(info)
        for name in ("num_pages", "max_model_len"):
            values = [other[name] for other in known if name in other]
            if values:
                merged[name] = min(values)
        count, ranks = len(self.managers), int(info.get("world_size", 1))
        merged["max_num_reqs"] = sum(int(other.get("max_num_reqs", 0)) for other in known)
        merged |= {"data_parallel_size": count, "world_size": count * ranks}
        self.info = merged
        self.router.set_state(index, ReplicaState.STARTING)  # nothing is cached in a new one
        self.router.resize(int(merged.get("num_pages", 0)) * int(merged.get("page_size", 0)))

    # State.

    @property
    def state(self) -> ServerState:
        """Ready if one replica is; else what describes them best."""
        if self._is_stopped:
            return ServerState.STOPPED
        if self._is_draining:
            return ServerState.DRAINING
        states = {
            ServerState.DRAINING if index in self.held else manager.state
            for index, manager in enumerate(self.managers)
        }
        order = (
            *(ServerState.READY, ServerState.STARTING, ServerState.STUCK, ServerState.UNRESPONSIVE),
            *(ServerState.DRAINING, ServerState.DEAD, ServerState.STOPPED),
        )
        return next(state for state in order if state in states)

    @property
    def is_healthy(self) -> bool:
        """Whether one replica serves."""
        return self.state is ServerState.READY

    @property
    def is_draining(self) -> bool:
        """Whether a drain of all replicas has begun."""
        return self._is_draining

    @property
    def degraded(self) -> list[int]:
        """Replicas that do not serve."""
        return [index for index in range(len(self.managers)) if not self.is_serving(index)]

    def is_serving(self, index: int) -> bool:
        """Whether a replica gets requests."""
        return index not in self.held and self.managers[index].is_healthy

    @property
    def heartbeat_age_s(self) -> float | None:
        """Of the newest heartbeat."""
        ages = [manager.heartbeat_age_s for manager in self.managers]
        return min((age for age in ages if age is not None), default=None)

    @property
    def num_inflight(self) -> int:
        """Requests between arrival and their last event."""
        return len(self._open)

    @property
    def retry_after_s(self) -> int:
        """When a refused client may try again: what the replica says that is free first."""
        return min(manager.retry_after_s for manager in self.managers)

    @property
    def counters(self) -> dict[str, int]:
        """Sums of all replicas."""
        totals: dict[str, int] = {}
        for manager in self.managers:
            for name, count in manager.counters.items():
                totals[name] = totals.get(name, 0) + count
        return totals

    @property
    def stats(self) -> dict[str, Any]:
        """What the backends report, each number with the label `replica`, and the router's own."""
        return merged_stats([manager.stats for manager in self.managers], router_stats(self))

    def rows(self) -> list[dict[str, Any]]:
        """The replicas, as `GET /replicas` shows them."""
        return replica_rows(self)

    def replica_state(self, index: int) -> str:
        """What a replica does, in a word."""
        return "draining" if index in self.held else self.managers[index].state.value

    @property
    def on_abort(self) -> Callable[[str, str], None] | None:
        """Called with (rid, reason) for every abort."""
        return self.managers[0].on_abort

    @on_abort.setter
    def on_abort(self, callback: Callable[[str, str], None] | None) -> None:
        for manager in self.managers:
            manager.on_abort = callback

    # Requests.

    def new_request_id(self) -> str:
        """A name no other request has."""
        return f"diffulex-{uuid.uuid4().hex}"

    def has_request(self, rid: str) -> bool:
        """Whether a request of this name is in flight."""
        return rid in self._open

    async def abort_request(self, rid: str) -> bool:
        """Ends a request; its stream ends with an error. False for unknown ones."""
        request = self._open.get(rid)
        if request is None or request.is_aborted:
            return False
        request.is_aborted = True
        if request.manager is not None:
            return await request.manager.abort_request(rid)
        self._tell_aborted(rid, "api")  # it waits for a replica
        return True

    def _tell_aborted(self, rid: str, reason: str) -> None:
        if self.on_abort is not None:
            self.on_abort(rid, reason)

    async def generate(
        self,
        command: JobCommand,
        *,
        is_disconnected: Callable[[], Awaitable[bool]] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """The event that ends the request; raises as `FrontendManager.generate`."""
        stream = self.generate_stream(command, is_disconnected=is_disconnected, timeout_s=timeout_s)
        return await reply_of(stream, command.rid)

    async def generate_stream(
        self,
        command: JobCommand,
        *,
        is_disconnected: Callable[[], Awaitable[bool]] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Any, None]:
        """The events of a request, as `FrontendManager.generate_stream` gives them."""
        most = self.limits.max_inflight(self.info)
        inflight: Any = self._open.values()
        refusal = refusal_of(command, self.state, self.limits, most, inflight)
        if refusal is not None:
            yield refusal
            return
        if command.rid in self._open:
            raise ValueError(f"rid: expected a new one, got {command.rid!r} again")
        limits = [limit for limit in (self.limits.request_timeout_s, timeout_s) if limit]
        deadline = time.monotonic() + min(limits) if limits else None
        request = self._open[command.rid] = _Open(command.size, is_disconnected, deadline)
        try:
            async with aclosing(self._attempts(command, request)) as events:
                async for event in events:
                    yield event
        finally:
            del self._open[command.rid]

    async def _attempts(self, command: JobCommand, request: _Open) -> AsyncGenerator[Any, None]:
        chunks, num_tokens = _prompt_of(command)
        for num_tries in range(self._num_retries + 1):
            wait_s = _REPLACEMENT_S if num_tries else 0.0
            index = await self._chosen(command.rid, request, chunks, num_tokens, wait_s)
            if index is None:
                break
            self.num_retried += request.is_sent
            request.manager, request.is_begun = self.managers[index], False
            ticket = self.router.sent(index, chunks, num_tokens)
            loss: ServingError | None = None
            stream = request.manager.generate_stream(
                command, is_disconnected=request.is_disconnected, timeout_s=request.left_s()
            )
            try:
                async with aclosing(stream):
                    async for event in stream:
                        if self._is_loss(event):
                            loss = event
                            # One that is refused has not been sent.
                            request.is_sent |= request.manager.has_request(command.rid)
                            break
                        if not request.is_begun:
                            request.is_begun, ticket = True, self.router.started(ticket)
                        request.has_results |= not (event.is_draft or event.ends_job)
                        yield event
            finally:
                request.manager = None
                self.router.finished(ticket)
            if loss is None:
                return
            logger.warning("request %s: replica %d: %s", command.rid, index, loss.message)
            if request.has_results:
                break
        error = _error_of(command.rid, request)
        self.num_lost += error.code == "replica_lost"
        if error.code == "request_timeout":
            self._tell_aborted(command.rid, "timeout")
        yield error

    def _is_loss(self, event: JobEvent) -> bool:
        if not isinstance(event, ServingError) or self._is_draining or self._is_stopped:
            return False
        return event.code in _LOST or event.code in _LATE

    async def _chosen(
        self, rid: str, request: _Open, chunks: Sequence[int], num_tokens: int, wait_s: float
    ) -> int | None:
        """A replica that is ready; None: there is none in this time, or the request is over.

        Raises:
            ClientDisconnected: the client went away.
        """
        end = time.monotonic() + wait_s
        while not (request.is_aborted or request.is_late()):
            self._tell_router()
            with suppress(NoReplicaError):
                return self.router.choose(chunks, num_tokens)
            if time.monotonic() >= end or self._is_draining or self._is_stopped:
                break
            if request.is_disconnected is not None and await request.is_disconnected():
                self._tell_aborted(rid, "disconnect")
                raise ClientDisconnected(f"request {rid}: the client went away")
            await asyncio.sleep(_POLL_S)
        return None

    def _tell_router(self) -> None:
        """Gives the router the states of the replicas. One that is stuck is better than none."""
        known = [manager.state for manager in self.managers]
        wanted = [
            ReplicaState.DRAINING if index in self.held else _ROUTED[state]
            for index, state in enumerate(known)
        ]
        if ReplicaState.READY not in wanted:
            for index, state in enumerate(known):
                if state is ServerState.STUCK and index not in self.held:
                    wanted[index] = ReplicaState.READY
        for index, routed in enumerate(wanted):
            if self.router.state(index) is not routed:
                self.router.set_state(index, routed)

    # Operations.

    async def flush_cache(self) -> dict[str, Any]:
        """Empties the prefix caches of all replicas that serve; raises as `FrontendManager` does."""
        self.router.forget()
        serving = [self.managers[i] for i in range(len(self.managers)) if self.is_serving(i)]
        answers = await asyncio.gather(*(manager.flush_cache() for manager in serving))
        return {"num_dropped_units": sum(int(a.get("num_dropped_units", 0)) for a in answers)}

    def __getattr__(self, name: str) -> Any:
        """Every further operation of a frontend: it needs a single replica."""
        if inspect.iscoroutinefunction(vars(FrontendManager).get(name)):
            return partial(_refuse, name, len(self.managers))
        raise AttributeError(f"ReplicaFrontend: expected a known attribute, got {name!r}")


_ROUTED = {
    ServerState.READY: ReplicaState.READY,
    ServerState.STARTING: ReplicaState.STARTING,
    ServerState.DRAINING: ReplicaState.DRAINING,
    ServerState.STUCK: ReplicaState.DRAINING,
    ServerState.UNRESPONSIVE: ReplicaState.DRAINING,
    ServerState.STOPPED: ReplicaState.LOST,
    ServerState.DEAD: ReplicaState.LOST,
}


async def _refuse(name: str, num_replicas: int, *arguments: object, **options: object) -> NoReturn:
    raise OperationFailed(f"{name}: expected data_parallel_size 1, got {num_replicas}")


async def _all(tasks: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*tasks)


def _error_of(rid: str, request: _Open) -> ServingError:
    """Why a request that no replica answers ends."""
    if request.is_aborted:
        return ServingError(rid, f"request {rid}: aborted", "aborted", 499)
    if request.is_late() and not request.has_results:
        text = f"request {rid}: not complete in time"
        return ServingError(rid, text, "request_timeout", 504, retryable=True)
    if not request.is_sent:
        return ServingError(rid, "no replica is ready", "starting", 503, retryable=True)
    text = "the replica that decoded the request is gone"
    if request.has_results:
        text += ", and part of the answer was delivered"
    return ServingError(rid, text, "replica_lost", 503, retryable=True)


def _prompt_of(command: JobCommand) -> tuple[list[int], int]:
    """Key chunks of a prompt for the router, and its tokens."""
    if not isinstance(command, ServingGenerate):
        return [], command.size
    num_tokens, value = command.size - command.sampling_params.max_tokens, command.input
    if isinstance(value, ChatInput):
        messages = (f"{item['role']}\n{item['content']}\n" for item in value.messages)
        return text_chunks("".join(messages)), num_tokens
    if isinstance(value.prompt, str):
        return text_chunks(value.prompt), num_tokens
    return token_chunks(value.prompt), num_tokens
