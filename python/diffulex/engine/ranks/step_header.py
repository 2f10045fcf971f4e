# SPDX-License-Identifier: Apache-2.0
"""What the other ranks are told of a step beside its arrays, which lie in memory that all of them map."""

from __future__ import annotations

import struct
from typing import NamedTuple

from diffulex.runner.decode_graphs import Bucket
from diffulex_ext import _core

__all__ = ["HEADER_BYTES", "StepHeader", "is_looked_at"]

_LAYOUT = struct.Struct("<6B2H2xQ11I")
#: Of a message; the arrays follow where the ranks do not share memory.
HEADER_BYTES = _LAYOUT.size


#: Looking at a step costs a message of each rank.
_LOOK_EVERY = 64


def is_looked_at(number: int) -> bool:
    """Whether ranks tell when they begin the step of this number, counted by what they are told."""
    return number % _LOOK_EVERY == 0


class StepHeader(NamedTuple):
    """Sizes of a filled plan, under the names that it has for them; stands for it on other ranks.

    Attributes:
        arena: which of the shared arenas has the arrays.
        kind_index: of `kind`.
        any_sampled: as in the plan, like the numbers below.
        has_draws: a request that draws is there or was; saved rows hold logits.
        is_watched: the first rank looks at whole rows of logits.
        padded_reqs: of the bucket that the plan was padded to; 0: it was not.
        padded_rows: rows of a request there.
        step: its number, for messages.
        num_bytes: of the arena that hold the arrays.
    """

    arena: int
    kind_index: int
    any_sampled: bool
    any_penalised: bool
    has_draws: bool
    is_watched: bool
    padded_reqs: int
    padded_rows: int
    step: int
    num_bytes: int
    num_rows: int
    num_reqs: int
    num_blocks: int
    num_logits_rows: int
    num_filtered_rows: int
    num_saved_source_rows: int
    max_seqlen_q: int
    max_context_len: int
    padded_context_len: int
    packed_rows: int

    @classmethod
    def of(
        cls,
        plan: _core.StepPlan,
        bucket: Bucket | None,
        *,
        arena: int,
        step: int,
        has_draws: bool,
        is_watched: bool,
    ) -> StepHeader:
        """The header of a filled plan that was padded to `bucket`."""
        reqs, rows, context_len, packed_rows = bucket or (0, 0, 0, 0)
        return cls(
            arena,
            int(plan.kind),
            plan.any_sampled,
            plan.any_penalised,
            has_draws,
            is_watched,
            reqs,
            rows,
            step,
            plan.used_bytes(),
            *(plan.num_rows, plan.num_reqs, plan.num_blocks, plan.num_logits_rows),
            *(plan.num_filtered_rows, plan.num_saved_source_rows),
            *(plan.max_seqlen_q, plan.max_context_len, context_len, packed_rows),
        )

    @property
    def bucket(self) -> Bucket | None:
        """What the plan was padded to; None: it stayed as it was."""
        if self.padded_reqs == 0:
            return None
        return Bucket(self.padded_reqs, self.padded_rows, self.padded_context_len, self.packed_rows)

    @property
    def kind(self) -> _core.PlanKind:
        """Of the plan."""
        return _core.PlanKind(self.kind_index)

    def pack(self) -> bytes:
        """Its message."""
        return _LAYOUT.pack(*self)

    @classmethod
    def unpack(cls, message: bytes) -> StepHeader:
        """The header at the beginning of a message."""
        values = _LAYOUT.unpack_from(message)
        return cls(*values[:2], *map(bool, values[2:6]), *values[6:])
