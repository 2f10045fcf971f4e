# SPDX-License-Identifier: Apache-2.0
"""DMax: masks are filled from the left, all other tokens follow the model in every step.

Every decided position also gets a descriptor of the mixed embedding its next step starts from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffulex.samplers.base import RULE_KEYS, FilterOrder, RowSampler
from diffulex.samplers.row_stage import RowStage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from diffulex.config.types import ConfigTree
    from diffulex.samplers.inputs import SamplerInputs

__all__ = ["Llada2DmaxSampler"]


class Llada2DmaxSampler(RowSampler):
    """Leftmost-prefix rule, full refresh, descriptors of the `token_merge_top_k` candidates."""

    filter_order = FilterOrder.TOP_K_FIRST
    is_capturable = True
    family_defaults: ClassVar[Mapping[str, Any]] = {
        "accept_threshold": 0.5,
        "acceptance_rule": "leftmost_prefix",
        "block_size": 32,
        "buffer_size": 1,
        "confidence_space": "raw",
        "decoding_strategy": "dmax",
        "sampling_mode": "edit",
        "temperature": 0.0,
    }
    unused_keys = RULE_KEYS | {
        "confidence_space",
        "confidence_type",
        "max_post_edit_steps",
        "penalty_lambda",
    }

    def __init__(self, config: ConfigTree) -> None:
        decoding = config.decoding
        # The argmax and its probability are part of the rule, merging or not.
        top_k = decoding.token_merge_top_k if decoding.token_merge_weight > 0 else 1
        super().__init__(config, RowStage(config, filter_order=self.filter_order, top_k=top_k))
        self._fast_path = decoding.dmax_sampler_fast_path

    def __call__(self, inputs: SamplerInputs) -> None:
        merge = inputs.merge
        records = self.rows.run(inputs)
        if inputs.tokens.size(0) == 0:
            return
        gate, open_steps = self.gate(inputs)
        topk_ids, topk_probs = records.topk_ids, records.topk_probs
        assert topk_ids is not None
        argmax_ids = None
        if inputs.inv_temperature is not None:
            argmax_ids = topk_ids[:, 0].contiguous()
        torch.ops.diffulex.accept_dmax(
            inputs.tokens,
            inputs.row_index,
            inputs.editable_start,
            inputs.valid_len,
            gate,
            inputs.accept_threshold,
            open_steps,
            records.ids,
            records.stats,
            argmax_ids,
            topk_ids,
            topk_probs,
            inputs.write_ids,
            inputs.confidence,
            inputs.masks_left,
            inputs.flags,
            inputs.same_token_ratio,
            None if merge is None else merge.valid,
            None if merge is None else merge.topk_ids,
            None if merge is None else merge.topk_probs,
            None if merge is None else merge.residual,
            mask_token_id=self._mask_token_id,
            fast_path=self._fast_path,
        )
