# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.1: masks are filled and tokens that no longer convince are overwritten (M2T and T2T)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffulex.samplers.base import CONFIDENCE_KINDS, RULE_KEYS, FilterOrder, RowSampler
from diffulex.samplers.row_stage import RowPenalties, RowStage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from diffulex.config.types import ConfigTree
    from diffulex.samplers.inputs import SamplerInputs

__all__ = ["Llada2EditSampler"]


class Llada2EditSampler(RowSampler):
    """Threshold rule on masks, edits above `edit_threshold`, bounded steps after filling."""

    filter_order = FilterOrder.TOP_K_FIRST
    is_capturable = True
    #: The quality mode of the published model.
    family_defaults: ClassVar[Mapping[str, Any]] = {
        "accept_threshold": 0.7,
        "acceptance_rule": "threshold",
        "block_size": 32,
        "buffer_size": 1,
        "confidence_space": "raw",
        "edit_threshold": 0.5,
        "sampling_mode": "edit",
        "temperature": 0.0,
    }
    unused_keys = RULE_KEYS

    def __init__(self, config: ConfigTree) -> None:
        space = config.sampler.confidence_space
        stage = RowStage(config, filter_order=self.filter_order, is_tempered=space == "tempered")
        super().__init__(config, stage)
        self._confidence_kind = CONFIDENCE_KINDS[config.sampler.confidence_type]
        self._is_raw = space == "raw"

    def __call__(self, inputs: SamplerInputs) -> None:
        edit = inputs.edit
        assert edit is not None
        penalties = None if edit.penalty is None else self._penalties(inputs, edit.penalty)
        records = self.rows.run(inputs, penalties)
        if inputs.tokens.size(0) == 0:
            return
        gate, open_steps = self.gate(inputs)
        torch.ops.diffulex.accept_edit(
            inputs.tokens,
            inputs.row_index,
            inputs.editable_start,
            inputs.valid_len,
            gate,
            inputs.accept_threshold,
            edit.edit_threshold,
            open_steps,
            edit.post_edit_steps,
            edit.max_post_edit_steps,
            records.ids,
            records.stats,
            inputs.write_ids,
            inputs.confidence,
            inputs.masks_left,
            inputs.flags,
            inputs.same_token_ratio,
            mask_token_id=self._mask_token_id,
            confidence_kind=self._confidence_kind,
            raw_confidence=self._is_raw,
        )

    def _penalties(self, inputs: SamplerInputs, amounts: Tensor) -> RowPenalties:
        """What each row takes from the token before it in its block: nothing at the first row, after
        a mask and where `amounts` [Nb] is 0."""
        tokens, num_rows = inputs.tokens, inputs.logits.size(0)
        before = tokens.roll(1, dims=1)
        is_free = (before == self._mask_token_id) | (amounts == 0)[:, None]
        before = before.masked_fill(is_free, -1)
        before[:, 0] = -1
        # One more place takes the positions without a row.
        ids = tokens.new_full((num_rows + 1,), -1)
        values = amounts.new_zeros(num_rows + 1)
        place = torch.where(inputs.row_index >= 0, inputs.row_index, num_rows).long().flatten()
        ids.scatter_(0, place, before.flatten())
        values.scatter_(0, place, amounts[:, None].expand_as(tokens).flatten())
        return RowPenalties(ids[:num_rows], values[:num_rows])
