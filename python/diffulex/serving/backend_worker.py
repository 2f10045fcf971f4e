# SPDX-License-Identifier: Apache-2.0
"""The process that owns the engine: one thread, one engine, one loop."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from diffulex import errors
from diffulex.log import configure, get_logger
from diffulex.serving.heartbeat import HeartbeatThread, StepStatus
from diffulex.serving.job_tick import EngineDeadError
from diffulex.serving.zmq_queue import MessageDecodeError, ZmqPullQueue, ZmqPushQueue
from diffulex.wire import messages
from diffulex.wire.protocol import TEXT_CODEC
from diffulex.wire.wire_maps import ProtocolVersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from diffulex.serving.job_tick import JobEngine
    from diffulex.serving.queues import CommandSource, EventSink, ReadyReports
    from diffulex.wire.codec import JobCodec

__all__ = [
    "ENGINE_DEAD_STATUS",
    "SyncBackendWorker",
    "default_engine_factory",
    "run_sync_backend_worker",
]

logger = get_logger(__name__)

#: Exit status after a failed step.
ENGINE_DEAD_STATUS = 70

_IDLE_POLL_S = 1.0
_STATS_INTERVAL_S = 0.5
_MAX_COMMANDS = 4096
_MAX_REASON_CHARS = 500
_LINGER_S = 1.0
_PR_SET_PDEATHSIG = 1
# The kernel's signal comes when the parent's main thread ends; its other threads follow.
_PARENT_EXIT_S = 0.2

# Keyword arguments of the factory that are not the engine's.
_SERVING_KEYS = ("chat_template", "detokenize_snapshots")


def default_engine_factory(model: str, **engine_kwargs: Any) -> Any:
    """An engine that serves `model`; arguments of ServingEngine may be among its settings."""
    from diffulex.engine.engine import Diffulex  # noqa: PLC0415 (imports torch)
    from diffulex.serving.engine import ServingEngine  # noqa: PLC0415

    serving = {key: engine_kwargs.pop(key) for key in _SERVING_KEYS if key in engine_kwargs}
    start = time.perf_counter()
    engine = Diffulex(model, **engine_kwargs)
    return ServingEngine(engine, load_time_s=time.perf_counter() - start, **serving)


class SyncBackendWorker:
    """Feeds commands to an engine and sends back what happens.

    Args:
        model: name or directory of the checkpoint.
        engine_kwargs: settings of the engine.
        recv_frontend: commands.
        send_frontend: events.
        engine_factory: makes the engine; None: `default_engine_factory`.
        ready_queue: receives one report when the engine exists; None: no caller waits for it.
    """

    def __init__(
        self,
        model: str,
        engine_kwargs: Mapping[str, Any] | None,
        recv_frontend: CommandSource,
        send_frontend: EventSink,
        engine_factory: Callable[..., Any] | None = None,
        ready_queue: ReadyReports | None = None,
    ) -> None:
        self.model = model
        self.engine_kwargs = dict(engine_kwargs or {})
        self.recv_frontend = recv_frontend
        self.send_frontend = send_frontend
        self.engine_factory = engine_factory or default_engine_factory
        self.ready_queue = ready_queue
        self.engine: JobEngine[Any] | None = None
        self.shutdown_requested = False
        #: The shutdown was not asked for by a command.
        self.is_signalled = False
        self.status = StepStatus()
        self._drain_until: float | None = None
        self._stats_at = 0.0
        #: Jobs that have not ended: generations by rid.
        self._open: dict[str, set[int]] = {}

    @classmethod
    def from_zmq(
        cls,
        model: str,
        engine_kwargs: Mapping[str, Any] | None,
        command_addr: str,
        event_addr: str,
        ready_queue: ReadyReports | None = None,
        codec: JobCodec = TEXT_CODEC,
    ) -> SyncBackendWorker:
        """A worker connected to the sockets the frontend has bound."""
        return cls(
            model=model,
            engine_kwargs=engine_kwargs,
            recv_frontend=ZmqPullQueue(command_addr, create=False, decoder=codec.command_from_dict),
            send_frontend=ZmqPushQueue(event_addr, create=False, encoder=codec.event_to_dict),
            ready_queue=ready_queue,
        )

    # Life.

    def init_engine(self) -> None:
        """Builds the engine, once, and reports that it is ready."""
        if self.engine is not None:
            return
        engine: JobEngine[Any] = self.engine_factory(self.model, **self.engine_kwargs)
        self.engine = engine
        engine.uncounted = self.status.uncounted
        self._take_stats(engine)
        if self.ready_queue is not None:
            self.ready_queue.put({"status": "ready", "info": engine.serving_info()})

    def run_forever(self) -> None:
        """Serves until a shutdown is requested.

        Raises:
            EngineDeadError: a step failed; its requests have been told.
        """
        try:
            self.init_engine()
            while not self.shutdown_requested:
                self.normal_loop()
            # Here and not in the loop: a signal may come after its last look.
            self._fail_requests()
        finally:
            self.shutdown()

    def normal_loop(self) -> None:
        """One round: take commands, tick if there is anything to do, send events."""
        engine = self._engine()
        if self._drain_until is not None and engine.is_paused:
            engine.control("resume", None)  # what it holds is to end
        blocking = engine.is_finished() or engine.is_paused
        commands = self.process_input_commands(self.receive_commands(blocking))
        if commands or not engine.is_finished():
            self._tick(engine, commands)
        if self._drain_until is not None and (
            engine.is_finished() or time.monotonic() >= self._drain_until
        ):
            self.shutdown_requested = True

    def _engine(self) -> JobEngine[Any]:
        assert self.engine is not None
        return self.engine

    def _tick(self, engine: JobEngine[Any], commands: Sequence[messages.ServingCommand]) -> None:
        self.status.begin_step()
        try:
            events = engine.run_serving_tick(commands)
        except EngineDeadError as error:
            self.send_result([_dead(rid, str(error)) for rid in error.rids])
            raise
        finally:
            self.status.end_step()
        self._note_open(commands, events)
        if self._open and engine.is_finished() and not engine.is_paused:
            events = [*events, *self._lost()]
        self.send_result(events)
        if time.monotonic() - self._stats_at >= _STATS_INTERVAL_S:
            self._take_stats(engine)

    def _note_open(
        self,
        commands: Sequence[messages.ServingCommand],
        events: Sequence[messages.JobEvent | messages.ServingAck],
    ) -> None:
        for command in commands:
            if isinstance(command, messages.JobCommand):
                self._open.setdefault(command.rid, set()).add(command.generation)
            elif isinstance(command, messages.ServingAbort):
                self._open.pop(command.rid, None)
        for event in events:
            if isinstance(event, messages.JobEvent) and event.ends_job and event.rid in self._open:
                self._open[event.rid].discard(event.generation)
                if not self._open[event.rid]:
                    del self._open[event.rid]

    def _lost(self) -> list[messages.JobEvent]:
        """Errors for jobs that have not ended although the engine has nothing to do."""
        errors: list[messages.JobEvent] = []
        for rid, generations in self._open.items():
            text = f"request {rid}: internal error, the engine lost it"
            errors += [messages.ServingError(rid, text, generation=item) for item in generations]
        self._open.clear()
        return errors

    def _fail_requests(self) -> None:
        """Tells the requests that a shutdown cuts off."""
        text = "the server is shutting down"
        self.send_result(self._engine().fail_requests(text, "server_shutdown", 503))

    def _take_stats(self, engine: JobEngine[Any]) -> None:
        self._stats_at = time.monotonic()
        num_dropped = self.send_frontend.num_dropped
        self.status.stats = {**engine.serving_stats(), "events_dropped": num_dropped}

    def shutdown(self) -> None:
        """Releases engine and queues. Idempotent."""
        engine, self.engine = self.engine, None
        try:
            if engine is not None:
                engine.exit()
        except Exception:  # must not hide why the engine is given up
            logger.exception("the engine does not end as it should")
        finally:
            self.recv_frontend.stop()
            self.send_frontend.stop(linger_s=_LINGER_S)

    # Commands and events.

    def receive_commands(self, blocking: bool) -> list[messages.ServingCommand]:
        """Everything queued; if `blocking`, waits for the first, at most a second."""
        commands: list[messages.ServingCommand] = []
        if blocking:
            self.run_when_idle()
            self._take(commands, _IDLE_POLL_S)
        while len(commands) < _MAX_COMMANDS and not self.recv_frontend.empty():
            self._take(commands, 0.0)
        return commands

    def _take(self, commands: list[messages.ServingCommand], timeout_s: float) -> None:
        """Adds the next command; one that cannot be read is answered instead."""
        try:
            commands.append(self.recv_frontend.get(timeout_s))
        except queue.Empty:
            return
        except MessageDecodeError as error:
            self._refuse(error)

    def _refuse(self, error: MessageDecodeError) -> None:
        """Answers a command that cannot be read, if it says whom."""
        reason = str(error)[:_MAX_REASON_CHARS]  # it quotes what the command holds
        logger.warning("command dropped: %s", reason)
        data = error.data if isinstance(error.data, dict) else {}
        rid, op_id = data.get("rid"), data.get("op_id")
        is_newer = isinstance(error.__cause__, ProtocolVersionError)
        code = "protocol_version" if is_newer else "bad_command"
        if isinstance(rid, str):
            refusal = messages.ServingError(rid, reason, code, 400)
            generation = data.get("generation")
            refusal.generation = generation if isinstance(generation, int) else 0
            self.send_result([refusal])
        elif isinstance(op_id, str):
            self.send_result([messages.ServingAck(op_id, False, reason)])

    def process_input_commands(
        self, commands: Sequence[messages.ServingCommand]
    ) -> list[messages.ServingCommand]:
        """Takes out the shutdowns, and notes them."""
        others: list[messages.ServingCommand] = []
        for command in commands:
            if not isinstance(command, messages.ServingShutdown):
                others.append(command)
            elif command.mode == "drain":
                deadline_s = command.deadline_s if command.deadline_s is not None else float("inf")
                self._drain_until = time.monotonic() + deadline_s
            else:
                self.shutdown_requested = True
        return others

    def send_result(self, events: Sequence[messages.JobEvent | messages.ServingAck]) -> None:
        """Sends the events in order, those of requests in one message."""
        batch = [event for event in events if not isinstance(event, messages.ServingAck)]
        if len(batch) == 1:
            self.send_frontend.put(batch[0])
        elif batch:
            self.send_frontend.put(messages.ServingBatch(batch))
        for event in events:
            if isinstance(event, messages.ServingAck):
                self.send_frontend.put(event)

    def run_when_idle(self) -> None:
        """Called before a wait."""
        logger.debug("idle")
        if self.engine is not None:
            self._take_stats(self.engine)  # the last step before a pause counts


class _Parent:
    """The process that started this one."""

    def __init__(self, socket_directory: str | None) -> None:
        parent = multiprocessing.parent_process()
        self.pid = os.getppid() if parent is None or parent.pid is None else parent.pid
        self._socket_directory = socket_directory

    def tidy_if_gone(self, patience_s: float = 0.0) -> bool:
        """Whether it is gone, or is within this time; its directory of sockets is removed then."""
        end = time.monotonic() + patience_s
        while os.getppid() == self.pid and time.monotonic() < end:
            time.sleep(0.01)
        is_gone = os.getppid() != self.pid
        if is_gone and self._socket_directory is not None:
            shutil.rmtree(self._socket_directory, ignore_errors=True)
        return is_gone


def _dead(rid: str, message: str) -> messages.ServingError:
    return messages.ServingError(rid, message, "engine_dead", 500)


def run_sync_backend_worker(
    model: str,
    engine_kwargs: Mapping[str, Any] | None,
    command_addr: str,
    event_addr: str,
    ready_queue: ReadyReports | None = None,
    engine_factory: Callable[..., Any] | None = None,
    socket_directory: str | None = None,
    codec: JobCodec = TEXT_CODEC,
) -> None:
    """Target of the backend process; exits with `ENGINE_DEAD_STATUS` after a failed step.

    Args:
        model: as for the worker, like the next four.
        engine_kwargs: settings of the engine.
        command_addr: bound by the parent.
        event_addr: bound by the parent.
        ready_queue: receives one report.
        engine_factory: replaces the real engine; importable by name.
        socket_directory: the parent's; removed here when the parent could not do it itself.
        codec: of the jobs' messages.
    """
    # Ctrl-C reaches the whole process group: the frontend drains and says when to leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure()  # as the parent's environment says
    parent = _Parent(socket_directory)

    def leave_orphaned() -> None:
        parent.tidy_if_gone()
        _on_signal(worker, parent)

    _die_with_parent()
    if parent.tidy_if_gone():
        sys.exit(1)  # it died before the kernel knew
    try:
        worker = SyncBackendWorker.from_zmq(
            model, engine_kwargs, command_addr, event_addr, ready_queue, codec
        )
        if engine_factory is not None:
            worker.engine_factory = engine_factory
        signal.signal(signal.SIGTERM, lambda number, frame: _on_signal(worker, parent))
        beat = HeartbeatThread(event_addr, worker.status, parent.pid, leave_orphaned)
        beat.start()
        try:
            worker.run_forever()
        finally:
            beat.stop()
            # A frontend that lives says so with a command.
            parent.tidy_if_gone(_PARENT_EXIT_S if worker.is_signalled else 0.0)
    except KeyboardInterrupt:
        logger.info("interrupted")
    except Exception as error:
        if ready_queue is not None:
            text = traceback.format_exc()
            ready_queue.put({"status": "error", "error": _one_line(error), "traceback": text})
        if isinstance(error, errors.EngineDeadError):
            logger.error("%s", error)
            sys.exit(ENGINE_DEAD_STATUS)
        raise


def _on_signal(worker: SyncBackendWorker, parent: _Parent) -> None:
    """A shutdown that no command asked for."""
    worker.is_signalled = worker.shutdown_requested = True
    if worker.engine is None:
        # Still loading: no client has a request here.
        parent.tidy_if_gone(_PARENT_EXIT_S)
        os._exit(0)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _die_with_parent() -> None:
    """Has the kernel send SIGTERM when the parent dies."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
            logger.warning("prctl: %s", os.strerror(ctypes.get_errno()))
