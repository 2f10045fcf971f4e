# SPDX-License-Identifier: Apache-2.0
"""Jobs that are no texts: pictures, painted a line per step. Importable by name in a child process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from diffulex.serving.job_tick import JobEngine, JobState
from diffulex.wire.codec import JobCodec
from diffulex.wire.messages import JobCommand, JobEvent


@dataclass
class Paint(JobCommand):
    """Paint so many lines of a grey."""

    rid: str
    grey: int
    num_lines: int = 4
    queue_timeout_s: float | None = None
    generation: int = 0

    @property
    def size(self) -> int:
        return self.num_lines


@dataclass
class Lines(JobEvent):
    """What is painted so far."""

    is_draft: ClassVar[bool] = True

    rid: str
    pixels: bytes
    generation: int = 0

    def merged(self, newer: Any) -> Lines | None:
        return newer if isinstance(newer, Lines) else None


@dataclass
class Picture(JobEvent):
    """The whole picture."""

    ends_job: ClassVar[bool] = True

    rid: str
    pixels: bytes
    generation: int = 0


PICTURES = JobCodec(
    commands={"paint": (Paint, ("rid", "grey"))},
    events={"lines": (Lines, ("rid", "pixels")), "picture": (Picture, ("rid", "pixels"))},
)


@dataclass(frozen=True)
class Painted:
    req_id: int
    pixels: bytes


class Painter(JobEngine[JobState]):
    """Every step paints a line of every picture."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.pictures: dict[int, tuple[Paint, bytes]] = {}
        self.num_added = 0
        self.exited = False

    def admit(self, command: Paint) -> JobState:
        if not 0 <= command.grey < 256:
            raise ValueError(f"grey: expected 0 to 255, got {command.grey}")
        self.num_added += 1
        self.pictures[self.num_added] = command, b""
        return JobState(command, self.num_added)

    def step(self) -> list[Painted]:
        done = []
        for req_id, (command, pixels) in self.pictures.items():
            self.pictures[req_id] = command, pixels + bytes([command.grey])
            done.append(Painted(req_id, self.pictures[req_id][1]))
        return done

    def events_of(self, job: JobState, output: Painted) -> list[JobEvent]:
        command, pixels = self.pictures[output.req_id]
        if len(pixels) < command.num_lines:
            return [Lines(job.rid, pixels)]
        del self.pictures[output.req_id]
        return [Picture(job.rid, pixels)]

    def is_finished(self) -> bool:
        return not self.pictures

    def abort_request(self, req_id: int) -> bool:
        return self.pictures.pop(req_id, None) is not None

    def exit(self) -> None:
        self.exited = True

    def serving_info(self) -> dict[str, Any]:
        return {"max_num_reqs": 2}
