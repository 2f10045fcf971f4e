# SPDX-License-Identifier: Apache-2.0
"""One tick of an engine that serves: commands in, one step, events out.

Knows jobs, not what they make: an engine says how a command becomes a job and what its steps did, and
this module keeps names, order, timeouts and failures. Imports neither torch nor the compiled module.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from diffulex import errors
from diffulex.errors import OutOfPagesError, PromptError
from diffulex.log import get_logger
from diffulex.serving.admission import AdmissionError
from diffulex.wire import messages

__all__ = ["EngineDeadError", "JobEngine", "JobState", "ServingState"]

logger = get_logger(__name__)

AnyJob = TypeVar("AnyJob", bound="JobState")


class EngineDeadError(errors.EngineDeadError):
    """A step failed: the engine's state cannot be trusted. `rids` are the jobs it had."""

    def __init__(self, message: str, rids: Sequence[str]) -> None:
        super().__init__(message)
        self.rids = list(rids)


@dataclass
class JobState:
    """One accepted job.

    Attributes:
        command: what it was asked for.
        engine_req_id: the engine's name for it.
        first_step_at: when a step first took part in it; None while it waits.
    """

    command: messages.JobCommand
    engine_req_id: int
    added_at: float = field(default_factory=time.perf_counter, kw_only=True)
    first_step_at: float | None = field(default=None, kw_only=True)

    @property
    def rid(self) -> str:
        """The client's name for it."""
        return self.command.rid

    @property
    def is_waiting(self) -> bool:
        """Whether no step has run it yet."""
        return self.first_step_at is None


class ServingState(Generic[AnyJob]):
    """Accepted jobs by the engine's id, and the engine's ids by `rid`."""

    def __init__(self) -> None:
        self.requests: dict[int, AnyJob] = {}
        self._req_ids: dict[str, int] = {}

    def add(self, job: AnyJob) -> None:
        """Remembers a job."""
        self.requests[job.engine_req_id] = job
        self._req_ids[job.rid] = job.engine_req_id

    def find(self, rid: str) -> AnyJob | None:
        """The live job of this name."""
        req_id = self._req_ids.get(rid)
        return None if req_id is None else self.requests.get(req_id)

    def drop(self, job: AnyJob) -> None:
        """Forgets a job; nothing is sent about it any more."""
        self.requests.pop(job.engine_req_id, None)
        self._req_ids.pop(job.rid, None)

    def rids(self) -> list[str]:
        """Names of the live jobs, oldest first."""
        return [job.rid for job in self.requests.values()]


class JobEngine(ABC, Generic[AnyJob]):
    """An engine that serves: what a backend worker needs of it. Belongs to the thread that steps."""

    #: Entered for what may take any time and is no sign of a step that hangs.
    uncounted: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    _serving_state: ServingState[AnyJob] | None = None

    # What an engine does.

    @abstractmethod
    def admit(self, command: Any) -> AnyJob:
        """Enqueues what a command asks for.

        Raises:
            ValueError: the command asks for something that cannot be done; AdmissionError and
                PromptError say more about it.
            OutOfPagesError: the engine could never hold it.
        """

    @abstractmethod
    def step(self) -> Iterable[Any]:
        """One step; what it did to each job it took part in, each with the `req_id` of the job."""

    @abstractmethod
    def events_of(self, job: AnyJob, output: Any) -> list[messages.JobEvent]:
        """What the client is told of a step's output. After an event that `ends_job` no other follows."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Whether a step would have nothing to do."""

    @abstractmethod
    def abort_request(self, req_id: int) -> bool:
        """Ends a job at the next step boundary; False for unknown ones."""

    @abstractmethod
    def exit(self) -> None:
        """Releases the engine."""

    def start_profile(self, prefix: str | None = None) -> Mapping[str, Any]:
        """Starts a profiler; RuntimeError when it cannot."""
        raise RuntimeError("profiler: expected an engine that has one, got one without")

    def stop_profile(self) -> Mapping[str, Any]:
        """Stops the profiler; RuntimeError when it does not run."""
        raise RuntimeError("profiler: expected an engine that has one, got one without")

    def flush_cache(self) -> Mapping[str, Any]:
        """Drops what is cached for later jobs."""
        raise RuntimeError("cache: expected an engine that has one, got one without")

    def control(self, action: str, path: str | None) -> Mapping[str, Any]:
        """Pauses, resumes, or changes the weights; see `ServingControl`."""
        raise RuntimeError(f"{action}: expected an engine that can, got one that cannot")

    @property
    def is_paused(self) -> bool:
        """Whether jobs wait for a `resume`."""
        return False

    def serving_info(self) -> dict[str, Any]:
        """What the backend reports when it is ready."""
        return {}

    def serving_stats(self) -> dict[str, Any]:
        """Gauges and counters for heartbeats; called between steps."""
        return {}

    # The tick.

    def init_serving_state(self) -> ServingState[AnyJob]:
        """The state, made at the first call."""
        if self._serving_state is None:
            self._serving_state = ServingState()
        return self._serving_state

    def run_serving_tick(
        self, commands: Sequence[messages.ServingCommand]
    ) -> list[messages.JobEvent | messages.ServingAck]:
        """Applies the commands in order, runs at most one step, and returns what happened.

        Raises:
            EngineDeadError: the step failed.
            TypeError: a command that is none of an engine's, such as a shutdown.
        """
        events: list[messages.JobEvent | messages.ServingAck] = []
        for command in commands:
            event = self._apply(command)
            if event is not None:
                events.append(event)
        events.extend(self._expired())
        if not (self.is_finished() or self.is_paused):
            events.extend(self._run_step())
        return events

    def fail_requests(self, message: str, code: str, http_status: int) -> list[messages.JobEvent]:
        """Ends every live job with an error, for a shutdown."""
        return [
            self._failed(
                job, messages.ServingError(job.rid, message, code, http_status, retryable=True)
            )
            for job in list(self.init_serving_state().requests.values())
        ]

    def _apply(
        self, command: messages.ServingCommand
    ) -> messages.JobEvent | messages.ServingAck | None:
        if isinstance(command, messages.JobCommand):
            refusal = self._accept(command)
            return None if refusal is None else _of(command, refusal)
        if isinstance(command, messages.ServingAbort):
            job = self.init_serving_state().find(command.rid)
            if job is not None:
                self._end(job)
            return None
        if isinstance(command, messages.ServingProfileStart):
            return _operate(command.op_id, self.start_profile, command.profile_prefix)
        if isinstance(command, messages.ServingProfileStop):
            return _operate(command.op_id, self.stop_profile)
        if isinstance(command, messages.ServingFlushCache):
            return _operate(command.op_id, self.flush_cache)
        if isinstance(command, messages.ServingControl):
            with self.uncounted() if command.reads_files else contextlib.nullcontext():
                return _operate(command.op_id, self.control, command.action, command.path)
        raise TypeError(
            f"run_serving_tick: expected a command of an engine, got {type(command).__name__}"
        )

    # Jobs.

    def _accept(self, command: messages.JobCommand) -> messages.ServingError | None:
        """Admits a job; its failure is an answer."""
        serving, rid = self.init_serving_state(), command.rid
        try:
            if serving.find(rid) is not None:
                raise AdmissionError(f"rid: expected a new one, got {rid!r} again")
            serving.add(self.admit(command))
        except AdmissionError as error:
            return messages.ServingError(rid, str(error), error.code, 400, param=error.param)
        except ValueError as error:  # prompts and parameters
            param = "prompt" if isinstance(error, PromptError) else None
            return messages.ServingError(rid, str(error), "invalid_request", 400, param=param)
        except OutOfPagesError as error:
            return messages.ServingError(rid, str(error), "kv_capacity", 400, param="prompt")
        except Exception as error:
            logger.exception("request %s: cannot be added", rid)
            return messages.ServingError(rid, str(error) or type(error).__name__)
        return None

    def _end(self, job: AnyJob) -> None:
        self.init_serving_state().drop(job)
        self.abort_request(job.engine_req_id)

    def _failed(self, job: AnyJob, error: messages.ServingError) -> messages.ServingError:
        """Ends a job with an error."""
        self._end(job)
        return _of(job.command, error)

    def _expired(self) -> list[messages.JobEvent]:
        """Ends the jobs that waited too long for their first step."""
        now = time.perf_counter()
        late = [
            (job, limit)
            for job in self.init_serving_state().requests.values()
            if (limit := job.command.queue_timeout_s) is not None
            and job.is_waiting
            and now - job.added_at > limit
        ]
        events: list[messages.JobEvent] = []
        for job, limit in late:
            text = f"request {job.rid}: not scheduled within {limit} s"
            error = messages.ServingError(job.rid, text, "queue_timeout", 503, retryable=True)
            events.append(self._failed(job, error))
        return events

    # Steps.

    def _run_step(self) -> list[messages.JobEvent]:
        serving, start = self.init_serving_state(), time.perf_counter()
        try:
            outputs = list(self.step())  # one that is a generator fails in here as well
        except Exception as error:
            logger.exception("a step failed")
            raise EngineDeadError(
                f"engine step failed: {error or type(error).__name__}", serving.rids()
            ) from error
        events: list[messages.JobEvent] = []
        for output in outputs:
            job = serving.requests.get(output.req_id)
            if job is None:
                continue
            if job.first_step_at is None:
                job.first_step_at = start
            try:
                made = self.events_of(job, output)
            except Exception as error:
                logger.exception("request %s: its events cannot be made", job.rid)
                made = [
                    self._failed(
                        job, messages.ServingError(job.rid, f"{type(error).__name__}: {error}")
                    )
                ]
            if made and made[-1].ends_job:
                serving.drop(job)
            events.extend(_of(job.command, event) for event in made)
        return events


AnyEvent = TypeVar("AnyEvent", bound=messages.JobEvent)


def _of(command: messages.JobCommand, event: AnyEvent) -> AnyEvent:
    """The event, marked as one of this admission."""
    event.generation = command.generation
    return event


def _operate(
    op_id: str | None, operation: Callable[..., Mapping[str, Any]], *arguments: Any
) -> messages.ServingAck | None:
    """Calls a method of the engine; its failure is an answer."""
    try:
        data = dict(operation(*arguments))
    except Exception as error:
        logger.warning("%s: %s", operation.__name__, error)
        return None if op_id is None else messages.ServingAck(op_id, False, str(error))
    return None if op_id is None else messages.ServingAck(op_id, True, "", data)
