# SPDX-License-Identifier: Apache-2.0
"""What a step of the decode loop depends on, and what the ranks of an engine tell of it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from diffulex.runner.decode_graphs import Bucket

__all__ = ["LoopEntry", "LoopListener", "LoopStep", "StepVariant"]


class StepVariant(NamedTuple):
    """What a captured step depends on beside the arrays it reads."""

    bucket: Bucket
    is_drawn: bool  # a request draws its tokens
    is_filtered: bool  # and one narrows its draws
    is_penalised: bool = False  # a request has a penalty
    #: Rows of the head of a packed step; 0: requests have all of their rows, and the head most of them.
    head_rows: int = 0

    @property
    def key(self) -> StepVariant:
        """What its graph is captured for: of a packed step, all that follows the forward."""
        if self.head_rows == 0:
            return self
        return self._replace(bucket=Bucket(self.bucket.num_reqs, self.bucket.rows_per_request, 0))


class LoopEntry(NamedTuple):
    """What other ranks are told when the device begins to plan its steps."""

    variant: StepVariant
    arena: int  # that has the plan
    used_bytes: int  # of it
    row_starts: bytes  # int32 [R + 1]: where requests begin in the plan
    num_page_rows: int  # page tables that are newer than those of the plan
    batch: bytes  # the arrays of the requests
    is_packed: bool  # its steps hold valid rows alone


class LoopStep(NamedTuple):
    """What other ranks are told of each further step."""

    variant: StepVariant
    pages: bytes  # int32 page tables, of as many requests as changed; empty: they have not


class LoopListener(Protocol):
    """Told of every step of a loop before this rank enqueues it."""

    def entered(self, entry: LoopEntry) -> None:
        """The loop begins."""

    def went_on(self, step: LoopStep) -> None:
        """Another step follows the one in flight."""
