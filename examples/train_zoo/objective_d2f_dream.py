# SPDX-License-Identifier: Apache-2.0
"""d2f in the Dream format: the row of a position predicts the next position.

The rows are those of ``D2F``. What a noisy row predicts is masked in the row after it; the first
position of a group of blocks is predicted by the clean row before it, as a decoder keeps that row
from the forward in which the block before was stored, and the first position of the answer by the
last row of the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from model import additive_mask
from objective import MAX_PROMPT
from objective_d2f import D2F, JUDGED, NUM_FILLER_BLOCKS

if TYPE_CHECKING:
    from torch import Tensor

    from objective import Setting, TokenIds
    from transformer import Shape


class D2FDream(D2F):
    """Direct block-causal training with full prompt visibility and shifted logits."""

    name = "d2f_dream"
    directory = "d2f_dream"
    model_type = "Dream"
    is_shifted: ClassVar[bool] = True

    def shape(self, ids: TokenIds) -> Shape:
        return replace(super().shape(ids), rms_norm_eps=1e-6, qkv_bias=True)

    def shifted_targets(
        self, rows: dict[str, Tensor], tokens: Tensor, prompt_len: Tensor, used_len: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Targets and weights [batch, rows] of all rows: noisy answer, clean answer, prompt."""
        size, num_rows = self.block_size, self.max_noisy_len
        device = tokens.device
        targets, weights, group = rows["targets"], rows["weights"], rows["group"]
        relative = torch.arange(num_rows, device=device)
        end = -(-(used_len - prompt_len) // size) + NUM_FILLER_BLOCKS
        starts_group = group == torch.arange(group.shape[1], device=device)
        # By the position that is predicted; the row is the one before it.
        is_first_of_group = starts_group.repeat_interleave(size, dim=1) & (relative % size == 0)
        from_noisy = weights * ~is_first_of_group
        from_clean = is_first_of_group & (relative[None] < end[:, None] * size)
        is_last_of_prompt = torch.arange(MAX_PROMPT, device=device) == prompt_len[:, None] - 1

        none = weights.new_zeros(len(weights), 1)
        following = torch.cat([targets[:, 1:], targets[:, -1:]], dim=1)
        first = targets[:, :1].expand(-1, MAX_PROMPT)
        return (
            torch.cat([following, following, first], dim=1),
            torch.cat([from_noisy[:, 1:], none, from_clean[:, 1:], none, is_last_of_prompt], dim=1),
        )

    def compute_loss(self, tokens: Tensor, prompt_len: Tensor, used_len: Tensor) -> Tensor:
        rows = self.make_rows(tokens, prompt_len, used_len)
        targets, weights = self.shifted_targets(rows, tokens, prompt_len, used_len)
        return self.weighted_loss(
            self.model,
            rows["tokens"],
            rows["positions"],
            additive_mask(rows["visible"]),
            targets,
            weights,
        )

    def settings(self, device: torch.device) -> list[Setting]:
        return [self.setting(device, *point, on_grid=False) for point in JUDGED]
