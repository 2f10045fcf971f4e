# SPDX-License-Identifier: Apache-2.0
"""Rows kept between steps, for models whose logits row of a position predicts the next one.

The first open position after the cache is predicted by a row that the step no longer computes. A
greedy request needs its record only, which is kept after the records of the step; a request that
draws needs the logits themselves, because every step draws anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.samplers.inputs import CarryArrays

__all__ = ["SavedRows"]


class SavedRows:
    """One saved row per request slot: its record, and its logits once a request draws.

    Args:
        first_record: index of the record of slot 0; those of the step come before it.
        max_num_reqs: number of slots. One more place takes what is not to be saved.
    """

    def __init__(self, first_record: int, max_num_reqs: int, device: torch.device) -> None:
        self.first_record = first_record
        self.num_records = first_record + max_num_reqs + 1
        self._max_num_reqs = max_num_reqs
        self._device = device
        #: [max_num_reqs + 1, V]; None while no request has drawn its tokens.
        self.logits: Tensor | None = None

    def sources(
        self, carry: CarryArrays, logits: Tensor, rows: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """(extra logits rows, source of every row) as `token_stats` takes them; None: as it is. Rows
        that are not saved ones come from `rows`."""
        if carry.has_sampled_requests:
            self._allocate_logits(logits)
        if carry.num_saved_sources == 0 or self.logits is None:
            return None, rows
        num_rows = logits.size(0)
        if rows is None:
            rows = torch.arange(num_rows, dtype=torch.int32, device=self._device)
        source = carry.logits_source
        return self.logits, torch.where(source >= 0, source + num_rows, rows)

    def save(self, carry: CarryArrays, logits: Tensor, ids: Tensor, stats: Tensor) -> None:
        """Copies the last row of every request that has one to the place of its slot."""
        last = carry.last_row_index
        if logits.size(0) == 0 or last.numel() == 0:
            return
        source = last.clamp(min=0).long()
        place = torch.where(last >= 0, carry.request_slots, self._max_num_reqs).long()
        records = place + self.first_record
        ids.index_copy_(0, records, ids.index_select(0, source))
        stats.index_copy_(0, records, stats.index_select(0, source))
        if self.logits is not None:
            self.logits.index_copy_(0, place, logits.index_select(0, source))

    def _allocate_logits(self, like: Tensor) -> None:
        if self.logits is None:
            self.logits = like.new_zeros(self._max_num_reqs + 1, like.size(1))
