# SPDX-License-Identifier: Apache-2.0
"""Who receives what a step did.

Every step serves all running requests, no matter which call asked for it: a stream may be open while another
stream, a `generate` call or `step` runs the engine. Outputs therefore go to the queue of the
request's owner first, and each owner reads its own queue before it asks for another step.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from diffulex.engine.output import StepOutput

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["StepQueue", "StepRouter", "take_all"]


class StepQueue(deque[StepOutput]):
    """Outputs in the order of their steps, waiting for one owner."""

    #: The owner shows outputs as they come; otherwise it wants the last one of each request alone.
    is_shown = True


def take_all(queue: StepQueue) -> list[StepOutput]:
    """Empties the queue; the oldest output comes first."""
    taken = []
    while queue:
        taken.append(queue.popleft())
    return taken


class StepRouter:
    """Hands step outputs to the owners of their requests.

    A claimed request has a queue, which several requests may share. Unclaimed requests belong to
    the callers of `step`. Outputs of an abandoned request are dropped.
    """

    def __init__(self) -> None:
        self.unclaimed = StepQueue()
        self._queues: dict[int, StepQueue] = {}
        self._abandoned: set[int] = set()

    def claim(self, req_id: int, queue: StepQueue) -> None:
        """Sends everything about the request to `queue` until it is finished."""
        self._queues[req_id] = queue

    def abandon(self, req_ids: Iterable[int]) -> None:
        """Drops what is still to come of requests whose owner is gone."""
        for req_id in req_ids:
            if self._queues.pop(req_id, None) is not None:
                self._abandoned.add(req_id)

    def push(self, outputs: Iterable[StepOutput]) -> None:
        """Delivers the outputs of one step; the last one of a request ends its route."""
        for output in outputs:
            req_id = output.req_id
            if req_id in self._abandoned:
                if output.is_finished:
                    self._abandoned.discard(req_id)
                continue
            self._queues.get(req_id, self.unclaimed).append(output)
            if output.is_finished:
                self._queues.pop(req_id, None)

    def clear(self) -> None:
        """Forgets every request."""
        self.unclaimed.clear()
        self._queues.clear()
        self._abandoned.clear()
