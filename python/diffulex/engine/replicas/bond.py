# SPDX-License-Identifier: Apache-2.0
"""What replicas have to do with each other: nothing, or everything."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Protocol, cast

from diffulex.engine.replicas.replica import end_replicas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffulex.engine.replicas.replica import Replica

__all__ = ["Bond", "CoupledBond", "NoBond"]

#: A replica that lost another one says so before the end of that one is seen.
_CAUSE_S = 1.0


class Bond(Protocol):
    """Asked by `ReplicaLoop` wherever it matters whether replicas share something."""

    def wake(self, replicas: Sequence[Replica]) -> None:
        """One of them has been sent a request."""

    def lost_with(self, replica: Replica, alive: Sequence[Replica]) -> Sequence[Replica]:
        """Those of `alive` that are lost when `replica`, one of them, is."""

    def cause(self, replica: Replica, how: str, alive: Sequence[Replica]) -> tuple[Replica, str]:
        """Which replica was lost first, and how it ended.

        Args:
            replica: it has lost another one, by its own account.
            how: that account.
            alive: all that are not known to be lost.
        """

    def end(self, replicas: Sequence[Replica]) -> None:
        """Ends all of them and waits until they have; those that are gone are left alone."""


class NoBond:
    """Replicas that share nothing: each runs and ends by itself. See `Bond`."""

    def wake(self, replicas: Sequence[Replica]) -> None:
        pass

    def lost_with(self, replica: Replica, alive: Sequence[Replica]) -> Sequence[Replica]:
        return [replica]

    def cause(self, replica: Replica, how: str, alive: Sequence[Replica]) -> tuple[Replica, str]:
        return replica, how

    def end(self, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            if replica.is_alive:
                replica.send(("exit",))
        end_replicas(replicas)


class CoupledBond:
    """Replicas that share the experts: they run and end together. See `Bond`."""

    def __init__(self) -> None:
        self._num_calls = 0

    def wake(self, replicas: Sequence[Replica]) -> None:
        self._num_calls += 1
        for replica in replicas:
            replica.send(("call", self._num_calls))

    def lost_with(self, replica: Replica, alive: Sequence[Replica]) -> Sequence[Replica]:
        return alive

    def cause(self, replica: Replica, how: str, alive: Sequence[Replica]) -> tuple[Replica, str]:
        others = {each.child.connection: each for each in alive if each is not replica}
        end = time.monotonic() + _CAUSE_S
        while others and (left := end - time.monotonic()) > 0:
            for source in wait(others, left):
                other = others[cast("Any", source)]
                try:
                    kind, *content = other.receive()
                except EOFError as gone:
                    return other, str(gone) or other.child.describe_end()
                if kind == "died":  # else nothing that is waited for any more
                    (name, text, _), is_hearsay = content
                    if not is_hearsay:
                        return other, f"failed: {name}: {text}"
                    del others[cast("Any", source)]
        return replica, how

    def end(self, replicas: Sequence[Replica]) -> None:
        # At once: one that leaves looks to the others as if it were lost.
        end_replicas(replicas, 0.0)
