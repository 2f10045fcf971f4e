# SPDX-License-Identifier: Apache-2.0
"""The clients' side of the two queues: one event stream per request.

What is requested is a job of any kind; the messages say what the frontend has to know of it.
"""

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
from diffulex.serving.event_reader import EventReader
from diffulex.serving.frontend_errors import (
    BackendUnavailable,
    ClientDisconnected,
    OperationFailed,
    RequestFailed,
)
from diffulex.serving.frontend_state import (
    FrontendLimits,
    FrontendReqState,
    ServerState,
    prepared,
    refusal_of,
)
from diffulex.serving.operations import PendingOperations
from diffulex.serving.zmq_queue import MessageDecodeError, ZmqAsyncPullQueue, ZmqAsyncPushQueue
from diffulex.wire import messages
from diffulex.wire.protocol import TEXT_CODEC

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from diffulex.serving.operations import Operation
    from diffulex.serving.queues import CommandSink, EventSource
    from diffulex.wire.codec import JobCodec

__all__ = [
    "BackendUnavailable",
    "ClientDisconnected",
    "FrontendLimits",
    "FrontendManager",
    "FrontendReqState",
    "OperationFailed",
    "RequestFailed",
    "ServerState",
    "reply_of",
]

logger = get_logger(__name__)

_COUNTERS = (
    *("events_dropped", "snapshots_coalesced", "messages_undecodable"),
    *("events_unknown", "aborts_sent"),
)
_HEARTBEAT_LIMIT_S = 10.0
#: Until a backend serves of which it is not known how long it takes.
_USUAL_LOAD_S = 10.0
_FLUSH_TIMEOUT_S = 1.0
_SHUTTING_DOWN = "the server is shutting down"


async def reply_of(stream: AsyncGenerator[Any, None], rid: str) -> Any:
    """The event that ends the stream of a request.

    Raises:
        RequestFailed: the request ended with an error.
        ClientDisconnected: the client went away.
    """
    try:
        async for event in stream:
            if isinstance(event, messages.ServingError):
                raise RequestFailed(event)
            if event.ends_job:
                return event
    finally:
        await stream.aclose()
    raise ClientDisconnected(f"request {rid}: its stream ended without a reply")


class FrontendManager:
    """Sends commands and hands each request its events. Belongs to one event loop.

    Args:
        model_id: the name clients see.
        send_backend: commands.
        recv_backend: events.
        request_state_wait_timeout_s: how often a waiting request asks whether its client is there.
        tokenizer: makes the texts that the backend leaves out; None: it leaves out none.
        info: what the backend said when it was ready.
        limits: backpressure.
        step_timeout_s: a step longer than this is stuck; 0: never.
        operation_timeout_s: how long an operation may go unanswered; None: for ever.
    """

    def __init__(
        self,
        *,
        model_id: str,
        send_backend: CommandSink,
        recv_backend: EventSource,
        request_state_wait_timeout_s: float = 0.5,
        tokenizer: Any = None,
        info: Mapping[str, Any] | None = None,
        limits: FrontendLimits | None = None,
        step_timeout_s: float = 600.0,
        operation_timeout_s: float | None = 30.0,
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
        #: Replicas that do not serve: there is one backend, whose state is all there is to say.
        self.degraded: list[int] = []
        #: Called with (rid, reason) for every abort; reason: disconnect, timeout, drain or api.
        self.on_abort: Callable[[str, str], None] | None = None
        self._phase = ServerState.READY
        self._drain_until = 0.0
        self._listen_task: asyncio.Task[None] | None = None
        self._send_task: asyncio.Task[None] | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._outgoing: deque[messages.ServingCommand] = deque()
        self._generations = itertools.count(1)
        self._has_outgoing = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._operations = PendingOperations(operation_timeout_s)
        self._heartbeat: messages.ServingHeartbeat | None = None
        self._heartbeat_at: float | None = None
        self._load_began = time.monotonic()
        self._load_s = _USUAL_LOAD_S

    @classmethod
    def from_zmq(
        cls,
        *,
        model_id: str,
        command_addr: str,
        event_addr: str,
        codec: JobCodec = TEXT_CODEC,
        **options: Any,
    ) -> FrontendManager:
        """A frontend that binds both addresses; `options` as in the constructor."""
        send = ZmqAsyncPushQueue(command_addr, create=True, encoder=codec.command_to_dict)
        try:
            receive = ZmqAsyncPullQueue(event_addr, create=True, decoder=codec.event_from_dict)
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
        self._fail_all(messages.ServingError("", _SHUTTING_DOWN, "server_shutdown", 503))
        self._operations.fail(_SHUTTING_DOWN)
        if is_alive and self._send_task is not None:
            self._post(messages.ServingShutdown())
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
        """How long the backend's step took by its last heartbeat."""
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
    def num_operations(self) -> int:
        """Operations that are not answered."""
        return len(self._operations)

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
        self._fail_all(
            messages.ServingError("", f"the engine process is gone: {reason}", "engine_dead")
        )
        self._operations.fail(reason)
        if self._send_task is not None:
            # It may wait to send a command that a later backend must not see.
            self._send_task.cancel()
            self._send_task = asyncio.create_task(self._send(), name="diffulex-send")

    def fail_unanswered(self) -> None:
        """Ends every request with an error, since it is unknown whether the backend goes on."""
        for rid in list(self.rid_to_state):
            text = "the engine process gives no sign of life"
            self._end(rid, messages.ServingError(rid, text, "engine_unresponsive"), "unresponsive")

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
                messages.ServingError(rid, _SHUTTING_DOWN, "server_shutdown", 503),
                "drain",
            )

    def _fail_all(self, error: messages.ServingError) -> None:
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
        command: messages.JobCommand,
        *,
        is_disconnected: Callable[[], Awaitable[bool]] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """The event that ends the request: for a generation its reply.

        Raises:
            RequestFailed: the request ended with an error.
            ClientDisconnected: the client went away.
            ValueError: the rid is in use.
        """
        stream = self.generate_stream(command, is_disconnected=is_disconnected, timeout_s=timeout_s)
        return await reply_of(stream, command.rid)

    async def generate_stream(
        self,
        command: messages.JobCommand,
        *,
        is_disconnected: Callable[[], Awaitable[bool]] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Any, None]:
        """The events of a request; the last one is its reply or an error.

        Closing the stream early aborts the request, as does `timeout_s`, which may only lower the
        server's own limit. A request that is refused has one event, an error.

        Raises:
            ClientDisconnected: the client went away.
            ValueError: the rid is in use.
        """
        most, inflight = self.limits.max_inflight(self.info), self.rid_to_state.values()
        refusal = refusal_of(command, self.state, self.limits, most, inflight)
        if refusal is not None:
            yield refusal
            return
        await self.start()
        state = self.add_request_state(command.rid)
        state.num_tokens = command.size
        reader = self._reader(state, is_disconnected, self._deadline(state, timeout_s))
        is_complete = False
        try:
            self._post(prepared(command, self.limits, state.generation))
            while not is_complete:
                try:
                    event = await reader.next()
                except asyncio.TimeoutError:
                    text = f"request {command.rid}: not complete in time"
                    error = messages.ServingError(command.rid, text, "request_timeout", 504, True)
                    self._end(command.rid, error, "timeout")
                    continue
                is_complete = event.ends_job
                event.completed(self._decode)
                yield event
        finally:
            # Nothing here may wait: a cancelled response is cancelled again at every await.
            if not is_complete and not state.closed:
                self._abort(command.rid, "disconnect")
            self.discard_request_state(command.rid)

    async def wait_for_event(
        self, rid: str, *, is_disconnected: Callable[[], Awaitable[bool]] | None = None
    ) -> messages.JobEvent:
        """The next event of a request.

        Raises:
            ClientDisconnected: the client went away.
        """
        return await self._reader(self.rid_to_state[rid], is_disconnected).next()

    async def abort_request(self, rid: str) -> bool:
        """Ends a request; its stream ends with an error. False for unknown ones."""
        return self._end(
            rid, messages.ServingError(rid, f"request {rid}: aborted", "aborted", 499), "api"
        )

    def _deadline(self, state: FrontendReqState, timeout_s: float | None) -> float | None:
        limits = [limit for limit in (self.limits.request_timeout_s, timeout_s) if limit]
        return state.created + min(limits) if limits else None

    def _reader(
        self,
        state: FrontendReqState,
        is_disconnected: Callable[[], Awaitable[bool]] | None,
        deadline: float | None = None,
    ) -> EventReader:
        poll_s, interval_s = self.request_state_wait_timeout_s, self.limits.denoise_min_interval_ms
        return EventReader(state, is_disconnected, poll_s, interval_s / 1000, deadline)

    def _end(self, rid: str, error: messages.ServingError, reason: str) -> bool:
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
        self._post(messages.ServingAbort(rid))
        if self.on_abort is not None:
            self.on_abort(rid, reason)

    # The queues.

    async def send_one(self, command: messages.ServingCommand) -> None:
        """Queues a command after those that wait."""
        await self.start()
        self._post(command)

    def _post(self, command: messages.ServingCommand) -> None:
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
                    if isinstance(command, messages.JobCommand):
                        refusal = messages.ServingError(command.rid, str(error), "bad_command", 400)
                        refusal.generation = command.generation
                        self._deliver(refusal)
                # A backend that died meanwhile has emptied the queue.
                if self._outgoing and self._outgoing[0] is command:
                    self._outgoing.popleft()
            self._has_outgoing.clear()

    async def listen(self) -> None:
        """Hands out what the backend sends, until cancelled."""
        while True:
            try:
                message: messages.ServingMessage = await self.recv_backend.get()
            except MessageDecodeError as error:
                self.counters["messages_undecodable"] += 1
                logger.warning("message dropped: %s", error)
                continue
            try:
                self._receive(message)
            except Exception as error:  # a field of another kind than it should be
                self.counters["messages_undecodable"] += 1
                logger.warning("message dropped: %s: %r", type(message).__name__, error)

    def _receive(self, message: object) -> None:
        if isinstance(message, messages.ServingBatch):
            for event in message.events:
                self._deliver(event)
        elif isinstance(message, messages.ServingHeartbeat):
            self.counters["events_dropped"] = int(message.stats.get("events_dropped", 0))
            self._heartbeat, self._heartbeat_at = message, time.monotonic()
            self.stats = message.stats
        elif isinstance(message, messages.ServingAck):
            self._operations.answered(message)
        elif isinstance(message, messages.JobEvent):
            self._deliver(message)
        else:
            self.counters["events_unknown"] += 1
            logger.warning("message of an unknown kind dropped: %s", type(message).__name__)

    def _deliver(self, event: messages.JobEvent) -> None:
        state = self.rid_to_state.get(event.rid)
        if state is not None and event.generation in (0, state.generation):
            state.append(event)
        else:
            logger.debug("request %s: no caller waits for its event", event.rid)

    # Operations.

    async def start_profile(self, prefix: str | None = None) -> dict[str, Any]:
        """Starts the backend's profiler.

        Raises:
            OperationFailed: it is off or running.
            BackendUnavailable: there is no backend, or it does not answer.
        """
        return await self._operate(lambda op_id: messages.ServingProfileStart(prefix, op_id))

    async def stop_profile(self) -> dict[str, Any]:
        """Stops the backend's profiler; raises as `start_profile`."""
        return await self._operate(messages.ServingProfileStop)

    async def flush_cache(self) -> dict[str, Any]:
        """Empties the backend's prefix cache; raises as `start_profile`."""
        return await self._operate(messages.ServingFlushCache)

    async def control(
        self, action: messages.ControlAction, path: str | None = None
    ) -> dict[str, Any]:
        """Pauses or resumes the backend, or changes its weights; raises as `start_profile`.

        Args:
            action: what to do, see `ServingControl`.
            path: of new weights or of an adapter, on the backend's disks.
        """
        return await self._operate(lambda op_id: messages.ServingControl(action, op_id, path))

    async def _operate(self, make_command: Callable[[str], Operation]) -> dict[str, Any]:
        ack = await self.operate(make_command(uuid.uuid4().hex))
        if not ack.ok:
            raise OperationFailed(ack.message)
        return dict(ack.data or {})

    async def operate(self, command: Operation) -> messages.ServingAck:
        """The backend's answer to an operation, whose command has an `op_id`.

        Raises:
            BackendUnavailable: there is no backend, or it does not answer.
            ValueError: the `op_id` is in use.
        """
        if self._phase not in (ServerState.READY, ServerState.DRAINING):
            raise BackendUnavailable(f"backend: expected one that is ready, got {self.state.value}")
        return await self._operations.answer_to(command, self.send_one)
