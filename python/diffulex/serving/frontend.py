# SPDX-License-Identifier: Apache-2.0
"""The HTTP process's side of the two queues: one event stream per request."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
import uuid
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from diffulex.checkpoint.detokenizer import robust_decode
from diffulex.log import get_logger
from diffulex.serving.frontend_command import num_tokens, prepared, refusal_of
from diffulex.serving.frontend_errors import (
    BackendUnavailable,
    ClientDisconnected,
    OperationFailed,
    RequestFailed,
)
from diffulex.serving.frontend_state import FrontendLimits, FrontendReqState, ServerState
from diffulex.serving.zmq_queue import MessageDecodeError, ZmqAsyncPullQueue, ZmqAsyncPushQueue
from diffulex.wire.protocol import (
    ServingAbort,
    ServingAck,
    ServingBatch,
    ServingBufferSnapshot,
    ServingCommand,
    ServingError,
    ServingEvent,
    ServingFlushCache,
    ServingGenerate,
    ServingHeartbeat,
    ServingMessage,
    ServingProfileStart,
    ServingProfileStop,
    ServingReply,
    ServingShutdown,
    serving_command_to_dict,
    serving_event_from_dict,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

__all__ = [
    "BackendUnavailable",
    "ClientDisconnected",
    "FrontendLimits",
    "FrontendManager",
    "FrontendReqState",
    "OperationFailed",
    "RequestFailed",
    "ServerState",
]

logger = get_logger(__name__)

_COUNTERS = (
    *("events_dropped", "snapshots_coalesced", "messages_undecodable"),
    *("events_unknown", "aborts_sent"),
)
_HEARTBEAT_LIMIT_S = 10.0
_OPERATION_TIMEOUT_S = 30.0
#: Until a backend serves of which it is not known how long it takes.
_USUAL_LOAD_S = 10.0
_FLUSH_TIMEOUT_S = 1.0


class FrontendManager:
    """Sends commands and hands each request its events. Belongs to one event loop.

    Args:
        model_id: the name clients see.
        send_backend: commands; `async put(command)` and `stop()`.
        recv_backend: events; `async get()` and `stop()`.
        request_state_wait_timeout_s: how often a waiting request asks whether its client is there.
        tokenizer: makes the text of snapshots; None: the backend does.
        info: what the backend said when it was ready.
        limits: backpressure.
        step_timeout_s: a step longer than this is stuck; 0: never.
    """

    def __init__(
        self,
        *,
        model_id: str,
        send_backend: Any,
        recv_backend: Any,
        request_state_wait_timeout_s: float = 0.5,
        tokenizer: Any = None,
        info: Mapping[str, Any] | None = None,
        limits: FrontendLimits | None = None,
        step_timeout_s: float = 600.0,
    ) -> None:
        self.model_id = model_id
        self.send_backend = send_backend
        self.recv_backend = recv_backend
        self.request_state_wait_timeout_s = request_state_wait_timeout_s
        self.tokenizer = tokenizer
        self._decode = None if tokenizer is None else robust_decode(tokenizer, False)
        self.info: dict[str, Any] = dict(info or {})
        self.limits = limits or FrontendLimits()
        self.step_timeout_s = step_timeout_s
        self.rid_to_state: dict[str, FrontendReqState] = {}
        self.stats: dict[str, Any] = {}
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        #: Called with (rid, reason) for every abort; reason: disconnect, timeout, drain or api.
        self.on_abort: Callable[[str, str], None] | None = None
        self._phase = ServerState.READY
        self._drain_until = 0.0
        self._listen_task: asyncio.Task[None] | None = None
        self._send_task: asyncio.Task[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._outgoing: deque[ServingCommand] = deque()
        self._generations = itertools.count(1)
        self._has_outgoing = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._operations: dict[str, asyncio.Future[ServingAck]] = {}
        self._heartbeat: ServingHeartbeat | None = None
        self._heartbeat_at: float | None = None
        self._load_began = time.monotonic()
        self._load_s = _USUAL_LOAD_S

    @classmethod
    def from_zmq(
        cls, *, model_id: str, command_addr: str, event_addr: str, **options: Any
    ) -> FrontendManager:
        """A frontend that binds both addresses; `options` as in the constructor."""
        send = ZmqAsyncPushQueue(command_addr, create=True, encoder=serving_command_to_dict)
        try:
            receive = ZmqAsyncPullQueue(event_addr, create=True, decoder=serving_event_from_dict)
        except BaseException:
            send.stop()
            raise
        return cls(model_id=model_id, send_backend=send, recv_backend=receive, **options)

    # Life.

    async def start(self) -> None:
        """Starts listening, once."""
        if self._listen_task is None:
            self._listen_task = asyncio.create_task(self.listen(), name="diffulex-listen")
            self._listen_task.add_done_callback(self._listening_ended)
            self._send_task = asyncio.create_task(self._send(), name="diffulex-send")

    async def stop(self) -> None:
        """Tells the backend to leave, ends the tasks and closes the queues. Idempotent."""
        if self._phase is ServerState.STOPPED:
            return
        is_alive = self._phase is not ServerState.DEAD
        self._phase = ServerState.STOPPED
        self._fail_all(ServingError("", "the server is shutting down", "server_shutdown", 503))
        if is_alive and self._send_task is not None:
            self._post(ServingShutdown())
            await self._flush()
        for task in (self._drain_task, self._send_task, self._listen_task):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task
        self.send_backend.stop()
        self.recv_backend.stop()

    async def _flush(self) -> None:
        end = time.monotonic() + _FLUSH_TIMEOUT_S
        while self._outgoing and time.monotonic() < end:
            await asyncio.sleep(0.005)
        if self._outgoing:
            logger.warning("shutdown: the backend does not take commands")

    def _listening_ended(self, task: asyncio.Task[None]) -> None:
        if self._phase is not ServerState.STOPPED and not task.cancelled():
            self.backend_died(f"the event listener ended: {task.exception()!r}")

    # The state of the server.

    @property
    def state(self) -> ServerState:
        """The state, as far as the heartbeats tell."""
        if self._phase is not ServerState.READY or self._heartbeat_at is None:
            return self._phase
        if (self.heartbeat_age_s or 0.0) > _HEARTBEAT_LIMIT_S:
            return ServerState.UNRESPONSIVE
        is_stuck = self.step_timeout_s > 0 and self.step_running_s > self.step_timeout_s
        return ServerState.STUCK if is_stuck else ServerState.READY

    @property
    def is_healthy(self) -> bool:
        """Whether requests are accepted and served."""
        return self.state is ServerState.READY

    @property
    def heartbeat_age_s(self) -> float | None:
        """Seconds since the last heartbeat; None before the first."""
        return None if self._heartbeat_at is None else time.monotonic() - self._heartbeat_at

    @property
    def step_running_s(self) -> float:
        """How long the backend's step took when it was last heard of."""
        return 0.0 if self._heartbeat is None else self._heartbeat.step_running_s

    @property
    def step_seq(self) -> int:
        """Number of the backend's last step."""
        return 0 if self._heartbeat is None else self._heartbeat.step_seq

    @property
    def num_inflight(self) -> int:
        """Requests between arrival and their last event."""
        return len(self.rid_to_state)

    @property
    def is_draining(self) -> bool:
        """Whether a drain has begun, whatever became of the backend since."""
        return self._drain_task is not None

    @property
    def retry_after_s(self) -> int:
        """When a refused client may try again."""
        if self._phase is ServerState.DRAINING:
            return max(1, round(self._drain_until - time.monotonic()))
        if self._phase in (ServerState.STARTING, ServerState.DEAD):
            # As long as the last start took. One that takes longer is asked for again and again.
            return max(1, math.ceil(self._load_began + self._load_s - time.monotonic()))
        return 1

    def backend_starting(self) -> None:
        """A backend is loading: requests are refused until `backend_ready`."""
        self._phase = ServerState.STARTING
        self._load_began = time.monotonic()
        self._heartbeat = self._heartbeat_at = None

    def backend_ready(self, info: Mapping[str, Any]) -> None:
        """The backend serves."""
        self.info = dict(info)
        if self._phase is ServerState.STARTING:
            self._load_s = time.monotonic() - self._load_began
        if self._phase in (ServerState.STARTING, ServerState.READY):
            self._phase = ServerState.READY
            self._heartbeat_at = time.monotonic()

    def backend_died(self, reason: str) -> None:
        """The backend is gone: every request fails now, and later ones are refused."""
        if self._phase is ServerState.STOPPED:
            return
        logger.error("backend: %s", reason)
        self._phase = ServerState.DEAD
        self._load_began = time.monotonic()
        self._outgoing.clear()
        self._fail_all(ServingError("", f"the engine process is gone: {reason}", "engine_dead"))
        for operation in self._operations.values():
            if not operation.done():
                operation.set_exception(BackendUnavailable(reason))
        if self._send_task is not None:
            # It may wait to send a command that a later backend must not see.
            self._send_task.cancel()
            self._send_task = asyncio.create_task(self._send(), name="diffulex-send")

    def fail_unanswered(self) -> None:
        """Ends every request with an error, since it is unknown whether the backend goes on."""
        for rid in list(self.rid_to_state):
            text = "the engine process gives no sign of life"
            self._end(rid, ServingError(rid, text, "engine_unresponsive"), "unresponsive")

    def begin_drain(self, deadline_s: float) -> asyncio.Task[None]:
        """Accepts no requests any more; the task ends when none is left or the time is up.

        Requests that are left then end with `server_shutdown`.
        """
        if self._drain_task is None:
            if self._phase is not ServerState.DEAD:
                self._phase = ServerState.DRAINING
            self._drain_until = time.monotonic() + deadline_s
            self._drain_task = asyncio.create_task(self._drain(deadline_s))
        return self._drain_task

    async def _drain(self, deadline_s: float) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._is_idle.wait(), deadline_s)
            return
        for rid in list(self.rid_to_state):
            self._end(
                rid,
                ServingError(rid, "the server is shutting down", "server_shutdown", 503),
                "drain",
            )

    def _fail_all(self, error: ServingError) -> None:
        for rid, state in self.rid_to_state.items():
            state.append(dataclasses.replace(error, rid=rid))

    # Requests.

    def new_request_id(self) -> str:
        """A name no other request has."""
        return f"diffulex-{uuid.uuid4().hex}"

    def has_request(self, rid: str) -> bool:
        """Whether a request of this name is in flight."""
        return rid in self.rid_to_state

    def add_request_state(self, rid: str) -> FrontendReqState:
        """Opens the stream of a request; ValueError when it is open already."""
        if rid in self.rid_to_state:
            raise ValueError(f"rid: expected a new one, got {rid!r} again")
        state = FrontendReqState(rid, generation=next(self._generations))
        self.rid_to_state[rid] = state
        self._is_idle.clear()
        return state

    def discard_request_state(self, rid: str) -> None:
        """Closes the stream of a request; unknown ones are ignored."""
        state = self.rid_to_state.pop(rid, None)
        if state is not None:
            self.counters["snapshots_coalesced"] += state.num_coalesced
        if not self.rid_to_state:
            self._is_idle.set()

    async def generate(
        self,
        command: ServingGenerate,
        *,
        is_disconnected: Callable[[], Awaitable[bool]] | None = None,
        timeout_s: float | None = None,
    ) -> ServingReply:
        """The whole answer.

        Raises:
            RequestFailed: the request ended with an error.
            ClientDisconnected: the client went away.
            ValueError: the rid is in use.
        """
        stream = self.generate_stream(command, is_disconnected=is_disconnected, timeout_s=timeout_s)
        try:
            async for event in stream:
                if isinstance(event, ServingError):
                    raise RequestFailed(event)
                if isinstance(event, ServingReply):
                    return event
        finally:
            await stream.aclose()
        raise ClientDisconnected(f"request {command.rid}: its stream ended without a reply")

    async def generate_stream(
        self,
        command: ServingGenerate,
        *,
        is_disconnected: Callable[[], Awaitable[bool]] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[ServingEvent, None]:
        """The events of a request; the last one is its reply or an error.

        Closing the stream early aborts the request, as does `timeout_s`, which may only lower the
        server's own limit. A request that is refused has one event, an error.

        Raises:
            ClientDisconnected: the client went away.
            ValueError: the rid is in use.
        """
        most = self.limits.max_queue_size + int(self.info.get("max_num_reqs", 0))
        refusal = refusal_of(command, self.state, self.limits, most, self.rid_to_state.values())
        if refusal is not None:
            yield refusal
            return
        await self.start()
        state = self.add_request_state(command.rid)
        state.num_tokens = num_tokens(command)
        deadline = self._deadline(state, timeout_s)
        is_complete = False
        try:
            self._post(prepared(command, self.limits, state.generation))
            while not is_complete:
                try:
                    event = await self._next(state, is_disconnected, deadline)
                except asyncio.TimeoutError:
                    text = f"request {command.rid}: not complete in time"
                    error = ServingError(command.rid, text, "request_timeout", 504, True)
                    self._end(command.rid, error, "timeout")
                    continue
                is_complete = isinstance(event, (ServingReply, ServingError))
                yield self._with_text(event)
        finally:
            # Nothing here may wait: a cancelled response is cancelled again at every await.
            if not is_complete and not state.closed:
                self._abort(command.rid, "disconnect")
            self.discard_request_state(command.rid)

    async def wait_for_event(
        self, rid: str, *, is_disconnected: Callable[[], Awaitable[bool]] | None = None
    ) -> ServingEvent:
        """The next event of a request.

        Raises:
            ClientDisconnected: the client went away.
        """
        return await self._next(self.rid_to_state[rid], is_disconnected, None)

    async def abort_request(self, rid: str) -> bool:
        """Ends a request; its stream ends with an error. False for unknown ones."""
        return self._end(rid, ServingError(rid, f"request {rid}: aborted", "aborted", 499), "api")

    def _deadline(self, state: FrontendReqState, timeout_s: float | None) -> float | None:
        limits = [limit for limit in (self.limits.request_timeout_s, timeout_s) if limit]
        return state.created + min(limits) if limits else None

    async def _next(
        self,
        state: FrontendReqState,
        is_disconnected: Callable[[], Awaitable[bool]] | None,
        deadline: float | None,
    ) -> ServingEvent:
        """The next event; asyncio.TimeoutError at the deadline."""
        while True:
            await self._poll(state, is_disconnected)
            now = time.monotonic()
            pause = self._pause(state, now)
            if state.events and pause <= 0:
                event = state.pop()
                if isinstance(event, ServingBufferSnapshot):
                    state.last_snapshot_at = now
                return event
            if deadline is not None and now >= deadline and not state.closed:
                raise asyncio.TimeoutError
            wait_s = self.request_state_wait_timeout_s
            if deadline is not None:
                wait_s = max(0.0, min(wait_s, deadline - now))
            if state.events:
                await asyncio.sleep(min(wait_s, pause))
                continue
            # Not wait_for: a task per event costs more than everything else in here.
            timer = asyncio.get_running_loop().call_later(wait_s, state.event.set)
            try:
                await state.event.wait()
            finally:
                timer.cancel()
            if not state.events:
                state.event.clear()

    def _pause(self, state: FrontendReqState, now: float) -> float:
        """How long the only queued event, a snapshot, is to wait for a newer one."""
        interval = self.limits.denoise_min_interval_ms / 1000
        if interval <= 0 or len(state.events) != 1:
            return 0.0
        event = state.events[0]
        if not isinstance(event, ServingBufferSnapshot) or event.finished:
            return 0.0
        return state.last_snapshot_at + interval - now

    async def _poll(
        self, state: FrontendReqState, is_disconnected: Callable[[], Awaitable[bool]] | None
    ) -> None:
        """Asks whether the client is there, every so often, however fast events come."""
        now = time.monotonic()
        if is_disconnected is None or now - state.polled_at < self.request_state_wait_timeout_s:
            return
        state.polled_at = now
        if await is_disconnected():
            raise ClientDisconnected(f"request {state.rid}: the client went away")

    def _with_text(self, event: ServingEvent) -> ServingEvent:
        """Adds the text the backend left to us."""
        if isinstance(event, ServingBufferSnapshot) and event.text is None and self._decode:
            event.text = self._decode(event.token_ids)
        return event

    def _end(self, rid: str, error: ServingError, reason: str) -> bool:
        """Aborts a request and ends its stream with an error; False if it had ended already."""
        state = self.rid_to_state.get(rid)
        if state is None or state.closed:
            return False
        self._abort(rid, reason)
        state.append(error)
        return True

    def _abort(self, rid: str, reason: str) -> None:
        if self._phase in (ServerState.DEAD, ServerState.STOPPED):
            return
        self.counters["aborts_sent"] += 1
        self._post(ServingAbort(rid))
        if self.on_abort is not None:
            self.on_abort(rid, reason)

    # The queues.

    async def send_one(self, command: ServingCommand) -> None:
        """Queues a command after those that wait."""
        await self.start()
        self._post(command)

    def _post(self, command: ServingCommand) -> None:
        self._outgoing.append(command)
        self._has_outgoing.set()

    async def _send(self) -> None:
        while True:
            await self._has_outgoing.wait()
            while self._outgoing:
                command = self._outgoing[0]
                try:
                    await self.send_backend.put(command)
                except asyncio.CancelledError:
                    raise
                except Exception as error:
                    logger.exception("a command cannot be sent")
                    if isinstance(command, ServingGenerate):
                        refusal = ServingError(command.rid, str(error), "bad_command", 400)
                        self._deliver(dataclasses.replace(refusal, generation=command.generation))
                # A backend that died meanwhile has emptied the queue.
                if self._outgoing and self._outgoing[0] is command:
                    self._outgoing.popleft()
            self._has_outgoing.clear()

    async def listen(self) -> None:
        """Hands out what the backend sends, until cancelled."""
        while True:
            try:
                message: ServingMessage = await self.recv_backend.get()
            except MessageDecodeError as error:
                self.counters["messages_undecodable"] += 1
                logger.warning("message dropped: %s", error)
                continue
            try:
                self._receive(message)
            except Exception as error:  # a field of another kind than it should be
                self.counters["messages_undecodable"] += 1
                logger.warning("message dropped: %s: %r", type(message).__name__, error)

    def _receive(self, message: ServingMessage) -> None:
        if isinstance(message, ServingBatch):
            for event in message.events:
                self._deliver(event)
        elif isinstance(message, ServingHeartbeat):
            self.counters["events_dropped"] = int(message.stats.get("events_dropped", 0))
            self._heartbeat, self._heartbeat_at = message, time.monotonic()
            self.stats = message.stats
        elif isinstance(message, ServingAck):
            operation = self._operations.get(message.op_id)
            if operation is not None and not operation.done():
                operation.set_result(message)
        elif hasattr(message, "rid"):
            self._deliver(message)
        else:
            self.counters["events_unknown"] += 1
            logger.warning("message of an unknown kind dropped: %s", type(message).__name__)

    def _deliver(self, event: ServingEvent) -> None:
        state = self.rid_to_state.get(event.rid)
        if state is not None and event.generation in (0, state.generation):
            state.append(event)
        else:
            logger.debug("request %s: nobody waits for its event", event.rid)

    # Operations.

    async def start_profile(self, prefix: str | None = None) -> dict[str, Any]:
        """Starts the backend's profiler.

        Raises:
            OperationFailed: it is off or running.
            BackendUnavailable: there is no backend, or it does not answer.
        """
        return await self._operate(lambda op_id: ServingProfileStart(prefix, op_id))

    async def stop_profile(self) -> dict[str, Any]:
        """Stops the backend's profiler; raises as `start_profile`."""
        return await self._operate(ServingProfileStop)

    async def flush_cache(self) -> dict[str, Any]:
        """Empties the backend's prefix cache; raises as `start_profile`."""
        return await self._operate(ServingFlushCache)

    async def _operate(self, make_command: Callable[[str], ServingCommand]) -> dict[str, Any]:
        if self._phase not in (ServerState.READY, ServerState.DRAINING):
            raise BackendUnavailable(f"backend: expected one that is ready, got {self.state.value}")
        op_id = uuid.uuid4().hex
        future: asyncio.Future[ServingAck] = asyncio.get_running_loop().create_future()
        self._operations[op_id] = future
        try:
            await self.send_one(make_command(op_id))
            ack = await asyncio.wait_for(future, _OPERATION_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            raise BackendUnavailable("backend: no answer to an operation") from error
        finally:
            del self._operations[op_id]
        if not ack.ok:
            raise OperationFailed(ack.message)
        return dict(ack.data or {})
