# SPDX-License-Identifier: Apache-2.0
"""Records of logits rows whose columns several ranks have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from diffulex.distributed.comm import LOCAL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diffulex.distributed.comm import Comm

__all__ = ["Records", "SharedHead"]


class Records(NamedTuple):
    """Outputs of `token_stats` for R rows; K candidates, or none."""

    ids: Tensor  # [R] int64
    stats: Tensor  # [R, 8] float32
    topk_ids: Tensor | None  # [R, K] int64
    topk_probs: Tensor | None  # [R, K] float32

    @property
    def fields(self) -> list[Tensor]:
        """Those that are there, as [R, ..]."""
        return [self.ids[:, None], *(field for field in self[1:] if field is not None)]

    def like(self) -> Records:
        """Memory for as many."""
        topk_ids, topk_probs = (
            None if field is None else torch.empty_like(field) for field in self[2:]
        )
        return Records(
            torch.empty_like(self.ids), torch.empty_like(self.stats), topk_ids, topk_probs
        )


class SharedHead:
    """The exchange of the ranks that have a part of the vocabulary each.

    Args:
        comm: with the other ranks.
        widths: columns of the logits of each rank; one number: each has all of them.
    """

    def __init__(self, comm: Comm, widths: Sequence[int]) -> None:
        self._comm = comm
        self._widths = tuple(widths)
        #: Token id of this rank's first column.
        self.vocab_start = sum(widths[: comm.rank]) if len(widths) > 1 else 0

    @classmethod
    def of(cls, model: Any) -> SharedHead | None:
        """That of a model, whose ranks all ask for it; None where one rank has all columns."""
        comm: Comm = getattr(model, "comm", LOCAL)
        if comm.size == 1:
            return None
        ids: range = model.vocabulary
        every = torch.empty(comm.size, 1, 2, dtype=torch.int32)
        comm.gather_records(torch.tensor([[ids.start, len(ids)]], dtype=torch.int32), every)
        starts, widths = every.flatten(0, 1).T.tolist()
        # Ranks that share the experts alone have the whole head.
        return cls(comm, widths if any(starts) else widths[:1])

    @property
    def num_ranks(self) -> int:
        """Ranks there are."""
        return self._comm.size

    def is_whole(self, logits: Tensor) -> bool:
        """Whether rows have the columns of all ranks."""
        return logits.size(1) == sum(self._widths)

    def send_first(self, logits: Tensor) -> None:
        """Rows that all ranks have become those of the first."""
        if self._comm.rank > 0:
            logits.zero_()
        self._comm.all_reduce_(logits)

    def whole_rows(self, logits: Tensor) -> Tensor:
        """All columns [n, V] of rows of which this rank has some [n, V_t]."""
        if self.is_whole(logits):
            return logits
        return self._comm.gather_columns(logits, self._widths)

    def sum_(self, partial: Tensor) -> None:
        """Partial sums over the columns of each rank become their sum, on all ranks."""
        self._comm.all_reduce_(partial)

    def merge(self, part: Records, out: Records) -> None:
        """Merges the partial records of all ranks, in rank order, so that all ranks have the same."""
        words = torch.cat([field.view(torch.int32) for field in part.fields], dim=1)
        every = words.new_empty(self._comm.size, *words.shape)
        self._comm.gather_records(words, every)
        widths = [field.view(torch.int32).size(1) for field in part.fields]
        columns = [
            words_of.contiguous().view(field.dtype)
            for words_of, field in zip(every.split_with_sizes(widths, 2), part.fields, strict=True)
        ]
        ids, stats, *candidates = columns
        topk_ids, topk_values = candidates or (None, None)
        torch.ops.diffulex.merge_token_stats(ids[:, :, 0], stats, topk_ids, topk_values, *out)
