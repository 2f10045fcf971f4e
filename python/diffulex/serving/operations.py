# SPDX-License-Identifier: Apache-2.0
"""Operations of the backend that are no request: profiles, the prefix cache, pauses, weights."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from diffulex.serving.frontend_errors import BackendUnavailable
from diffulex.wire.messages import (
    ServingControl,
    ServingFlushCache,
    ServingProfileStart,
    ServingProfileStop,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from diffulex.wire.messages import ServingAck

__all__ = ["Operation", "PendingOperations"]

Operation = ServingProfileStart | ServingProfileStop | ServingFlushCache | ServingControl


class PendingOperations:
    """Who waits for which answer. Belongs to one event loop.

    Args:
        timeout_s: longest wait for an answer; None: for ever, as for weights, which are read from disks.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._futures: dict[str, asyncio.Future[ServingAck]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    async def answer_to(
        self, command: Operation, send: Callable[[Operation], Awaitable[None]]
    ) -> ServingAck:
        """The answer to an operation, which `send` sends.

        Raises:
            BackendUnavailable: the backend does not answer.
            ValueError: the `op_id` is in use.
        """
        op_id = command.op_id
        assert op_id is not None
        if op_id in self._futures:
            raise ValueError(f"op_id: expected a new one, got {op_id!r} again")
        is_long = isinstance(command, ServingControl) and command.reads_files
        timeout_s = None if is_long else self._timeout_s
        future: asyncio.Future[ServingAck] = asyncio.get_running_loop().create_future()
        self._futures[op_id] = future
        try:
            await send(command)
            return await asyncio.wait_for(future, timeout_s)
        except asyncio.TimeoutError as error:
            raise BackendUnavailable("backend: no answer to an operation") from error
        finally:
            del self._futures[op_id]

    def answered(self, ack: ServingAck) -> None:
        """The backend has answered; answers that are not awaited any more are ignored."""
        future = self._futures.get(ack.op_id)
        if future is not None and not future.done():
            future.set_result(ack)

    def fail(self, reason: str) -> None:
        """Every operation that waits ends with BackendUnavailable."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(BackendUnavailable(reason))
