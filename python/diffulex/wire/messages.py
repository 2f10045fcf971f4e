# SPDX-License-Identifier: Apache-2.0
"""What a frontend and a backend say to each other whatever the jobs are.

A kind of job has a command that starts it, derived from JobCommand, and the events it sends, derived
from JobEvent; ServingError ends a job of any kind. The texts of diffulex are such a kind, in protocol.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from typing_extensions import Self

__all__ = [
    "ControlAction",
    "JobCommand",
    "JobEvent",
    "ServingAbort",
    "ServingAck",
    "ServingBatch",
    "ServingCommand",
    "ServingControl",
    "ServingError",
    "ServingFlushCache",
    "ServingHeartbeat",
    "ServingMessage",
    "ServingProfileStart",
    "ServingProfileStop",
    "ServingShutdown",
    "public_map",
]


class Tagged:
    """Classes with a `rid` also call it `request_id`."""

    rid: str

    @property
    def request_id(self) -> str:
        """The same as `rid`."""
        return self.rid


class JobCommand(Tagged):
    """Base of the commands that start a job; a dataclass with at least these fields.

    Attributes:
        generation: of the sender, one per admission; the job's events carry it, so that those of an
            aborted job do not reach a later one of the same `rid`. 0: there is none.
        queue_timeout_s: fail the job when it has not been run for so long; None: never.
    """

    generation: int
    queue_timeout_s: float | None

    @property
    def size(self) -> int:
        """What it counts of the work that may be in flight."""
        return 0

    def sendable(self) -> Self:
        """The command without what the wire cannot hold."""
        return self

    def pack(self, data: dict[str, Any]) -> None:
        """Replaces fields of its map by what msgpack can hold."""

    @classmethod
    def unpack(cls, arguments: dict[str, Any]) -> None:
        """Undoes `pack`; ValueError for content of another kind."""


class JobEvent(Tagged):
    """Base of the events of a job; a dataclass with at least these fields."""

    generation: int
    #: Nothing follows for its `rid`.
    ends_job: ClassVar[bool] = False
    #: Later ones of the job replace it: one that is not read in time may be left out.
    is_draft: ClassVar[bool] = False

    @property
    def is_urgent(self) -> bool:
        """Whether it must not wait for a newer one."""
        return not self.is_draft

    def merged(self, newer: Any) -> JobEvent | None:
        """One event that says what this one and a newer one say; None where there is none."""
        return None

    def completed(self, decode: Callable[[Sequence[int]], str] | None) -> None:
        """Adds what the backend left to the frontend."""


def public_map(event: Any, name: str | None, base: tuple[str, ...]) -> dict[str, Any]:
    """The map `/generate` shows: `event`, `id`, the base fields, then what is set beyond them."""
    shown: dict[str, Any] = {} if name is None else {"event": name}
    shown["id"] = event.rid
    for key in base:
        shown[key] = getattr(event, key)
    for item in dataclasses.fields(event):
        value = getattr(event, item.name)
        if item.name not in ("rid", "finished", "generation", *base) and value is not None:
            shown[item.name] = value
    return shown


# Commands of any job.


@dataclass
class ServingAbort(Tagged):
    """End a request; nothing about it is sent any more. Unknown ids are ignored."""

    rid: str


@dataclass
class ServingShutdown:
    """End the backend: at once, or (`drain`) when its requests are done or the deadline passed."""

    mode: Literal["abort", "drain"] = "abort"
    deadline_s: float | None = None


@dataclass
class ServingProfileStart:
    """Start the profiler; answered by `ServingAck` when it has an `op_id`."""

    profile_prefix: str | None = None
    op_id: str | None = None


@dataclass
class ServingProfileStop:
    """Stop the profiler; answered by `ServingAck` when it has an `op_id`."""

    op_id: str | None = None


@dataclass
class ServingFlushCache:
    """Drop the pages of the prefix cache that no request uses; answered by `ServingAck`."""

    op_id: str


ControlAction: TypeAlias = Literal["pause", "resume", "update_weights", "load_lora", "unload_lora"]


@dataclass
class ServingControl:
    """Do something to the engine between two steps; answered by `ServingAck`.

    Attributes:
        path: of what `update_weights` and `load_lora` read, on the backend's disks.
    """

    action: ControlAction
    op_id: str
    path: str | None = None

    @property
    def reads_files(self) -> bool:
        """Whether it takes as long as the disks need."""
        return self.action in ("update_weights", "load_lora")


ServingCommand: TypeAlias = (
    JobCommand
    | ServingAbort
    | ServingShutdown
    | ServingProfileStart
    | ServingProfileStop
    | ServingFlushCache
    | ServingControl
)


# Events of any job.


@dataclass
class ServingError(JobEvent):
    """A request failed; nothing follows for its `rid`.

    Attributes:
        param: the request field that caused it, where there is one.
    """

    ends_job: ClassVar[bool] = True

    rid: str
    message: str
    code: str = "engine_error"
    http_status: int = 500
    retryable: bool = False
    param: str | None = None
    generation: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A frame of `/generate`."""
        return public_map(self, "error", ("message",))


@dataclass
class ServingBatch:
    """All events of one tick, in order."""

    events: list[Any]


@dataclass
class ServingHeartbeat:
    """Sent every second: that the backend lives, and its gauges.

    Attributes:
        ts: Unix time.
        step_seq: number of steps so far.
        step_running_s: how long the step in progress has taken so far; 0 when there is none.
        stats: gauges and counters by name, see docs/metrics.md.
    """

    ts: float
    step_seq: int = 0
    step_running_s: float = 0.0
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass
class ServingAck:
    """The answer to an operation that generates nothing."""

    op_id: str
    ok: bool
    message: str = ""
    data: dict[str, Any] | None = None


#: Everything a backend may send.
ServingMessage: TypeAlias = JobEvent | ServingBatch | ServingHeartbeat | ServingAck
