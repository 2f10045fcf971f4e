# SPDX-License-Identifier: Apache-2.0
"""Forwards that decide nothing: tokens in, log-probabilities of tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ScoreBatch", "ScoreRows", "Scored"]


class ScoreRows(NamedTuple):
    """Rows of one sequence in a forward.

    Attributes:
        token_ids: of the rows.
        queries: rows, and the token each of them is asked about.
        start: position of the first row.
        prefix: place in the batch of stored rows, of which those before `start` are seen; -1: none.
        is_stored: later rows of the batch may see them.
        unprompted: the same rows without the prompt, for guidance.
    """

    token_ids: Sequence[int]
    queries: Sequence[tuple[int, int]] = ()
    start: int = 0
    prefix: int = -1
    is_stored: bool = False
    unprompted: Sequence[int] | None = None


class ScoreBatch(NamedTuple):
    """Rows that are run together as far as memory allows; stored ones come first.

    Attributes:
        rows: one entry per sequence.
        block_grid: rows see the blocks of this size before theirs, and their own; 0: rows see all.
        guidance: scale with which logits move away from those of the unprompted rows.
        wants_best: also the likeliest token of every query.
    """

    rows: Sequence[ScoreRows]
    block_grid: int
    guidance: float = 0.0
    wants_best: bool = False


class Scored(NamedTuple):
    """Answers to the queries of a batch, in their order.

    Attributes:
        logprobs: float32 [Q], of the tokens that were asked about.
        best_ids: int64 [Q], the likeliest tokens; empty where they were not wanted.
        best_logprobs: float32 [Q], theirs.
        num_forwards: calls of the model.
    """

    logprobs: NDArray[np.float32]
    best_ids: NDArray[np.int64]
    best_logprobs: NDArray[np.float32]
    num_forwards: int
