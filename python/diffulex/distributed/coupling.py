# SPDX-License-Identifier: Apache-2.0
"""Where a replica finds those with which it shares the experts; sent to processes that have imported
nothing yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from diffulex.config.config import Config

__all__ = ["Coupling"]


class Coupling(NamedTuple):
    """The place of one replica among those that share the experts.

    Attributes:
        replica: its number.
        store: of `diffulex.distributed.store.place_of`.
    """

    replica: int
    store: tuple[str, int, str]

    def rank(self, config: Config, own: int = 0) -> int:
        """The number of rank `own` of this replica among those of all."""
        return self.replica * config.parallel.tensor_parallel_size + own
