# SPDX-License-Identifier: Apache-2.0
"""The four ends of the two queues between a frontend and a backend.

    frontend   CommandSink ──> CommandSource   backend
               EventSource <── EventSink

Those of zmq_queue connect two processes, those of inproc an event loop and a thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from diffulex.wire.messages import ServingCommand, ServingMessage

__all__ = ["CommandSink", "CommandSource", "EventSink", "EventSource", "ReadyReports"]


class CommandSink(Protocol):
    """Where a frontend puts commands."""

    async def put(self, command: ServingCommand, /) -> None:
        """Sends the command; may wait until there is a backend."""

    def stop(self) -> None:
        """Closes this end. Idempotent."""


class EventSource(Protocol):
    """Where a frontend gets events."""

    async def get(self) -> ServingMessage:
        """The next message; MessageDecodeError for one that cannot be read."""

    def stop(self) -> None:
        """Closes this end. Idempotent."""


class CommandSource(Protocol):
    """Where a backend gets commands."""

    def get(self, timeout_s: float | None = None) -> ServingCommand:
        """The next command; waits for it.

        Args:
            timeout_s: longest wait; 0: none; None: until a command comes.

        Raises:
            queue.Empty: none came within `timeout_s`.
            MessageDecodeError: the message cannot be read.
        """

    def empty(self) -> bool:
        """Whether `get` would wait.

        Commands may be taken back: after False, only `get(0)` is sure not to wait.
        """

    def stop(self) -> None:
        """Closes this end. Idempotent."""


class EventSink(Protocol):
    """Where a backend puts events; `put` never waits."""

    @property
    def num_dropped(self) -> int:
        """Messages that could not be sent."""

    def put(self, message: ServingMessage, /) -> None:
        """Sends the message."""

    def stop(self, linger_s: float = 0.0) -> None:
        """Closes this end; what is not sent by then gets `linger_s`. Idempotent."""


class ReadyReports(Protocol):
    """Who waits for a backend to be ready."""

    def put(self, report: dict[str, Any], /) -> None:
        """Takes the report: `status`, and `info` or `error`."""
