# SPDX-License-Identifier: Apache-2.0
"""fast_dllm_v2: shifted logits in blocks of 32, complementary masks, and stale block caches.

Rows of one forward: the noisy blocks, one sub-block of each noisy block, and the clean sequence.
A noisy block sees itself and the clean blocks before it. The sub-block rows are what a refinement
forward computes: fewer masks than in the noisy block, whose rows stand for the stale block cache.
Row ``i`` predicts position ``i + 1`` of its block; the clean row at the end of a block predicts the
first token of the next one, which is therefore never masked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dual_cache_decoder import DualCacheConfig, decode_dual_cache, dual_cache_rows
from model import additive_mask
from objective import MAX_TOKENS, Setting, TokenIds, TransformerObjective
from transformer import Shape

if TYPE_CHECKING:
    from torch import Tensor

SUB_BLOCK = 8
#: Weight of masks that a decoder does not fill from these rows.
OFF_TASK_WEIGHT = 0.1


class FastDLLMv2(TransformerObjective):
    """Sub-block states of the decoder for half of the rows, complementary masks for the rest."""

    name = "fast_dllm_v2"
    directory = "fast_dllm_v2"
    model_type = "Fast_dLLM_Qwen"
    block_size = 32
    max_noisy_len = 96
    length = 128

    def shape(self, ids: TokenIds) -> Shape:
        return Shape(
            vocab_size=ids.vocab_size,
            mask_token_id=ids.mask,
            eos_token_id=ids.end_of_text,
            block_size=self.block_size,
            qkv_bias=True,
        )

    def draw_masks(
        self, positions: Tensor, prompt_len: Tensor, used_len: Tensor, complement: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Masks and weights of the noisy rows and of the sub-block rows, and the sub-blocks.

        complement: [batch] 0 for sub-block states, 1 for a random mask, 2 for the complement of the
        mask of the sequence a quarter of the batch before. Returns (masked, weights) [batch, rows],
        (masked, weights) [batch, blocks, SUB_BLOCK] packed in one tensor, and sub [batch, blocks].
        """
        device, (batch, num_rows) = positions.device, positions.shape
        size, num_sub = self.block_size, self.block_size // SUB_BLOCK
        num_blocks = num_rows // size
        start = positions[:, ::size]  # [batch, blocks]
        # A sub-block that holds answer tokens: from the one of the prompt's end to the answer's end.
        first = (prompt_len[:, None] - start).clamp(min=0, max=size - 1) // SUB_BLOCK
        last = (used_len[:, None] - 1 - start).clamp(min=0, max=size - 1) // SUB_BLOCK
        span = (last - first + 1).clamp(min=1)
        draw = torch.rand(batch, num_blocks, device=device)
        sub = torch.minimum(first + (draw * span).long(), torch.full_like(first, num_sub - 1))
        sub_of_row = (torch.arange(num_rows, device=device) % size) // SUB_BLOCK
        current = sub.repeat_interleave(size, dim=1)
        is_seed = positions % size == 0
        may_mask = (positions >= prompt_len[:, None]) & ~is_seed

        # Half of the blocks are just opened (all masks), a quarter has its first token open.
        kind = torch.rand(batch, num_blocks, device=device).repeat_interleave(size, dim=1)
        ratio = torch.rand(batch, num_blocks, device=device).repeat_interleave(size, dim=1)
        ratio = torch.where(kind < 0.5, 1.0, ratio)
        chance = torch.rand(batch, num_rows, device=device)
        is_head = positions % SUB_BLOCK == 0
        in_current = (chance < ratio) | (is_head & (kind < 0.75))
        state = (sub_of_row > current) | ((sub_of_row == current) & in_current)
        level = torch.rand(batch, num_blocks, device=device).repeat_interleave(size, dim=1)
        random_mask = chance < level
        quarter = batch // 4
        other = torch.cat([random_mask[-quarter:], random_mask[:-quarter]]) if quarter else state
        mode = complement[:, None]
        masked = torch.where(mode == 0, state, torch.where(mode == 1, random_mask, ~other))
        masked = masked & may_mask
        on_task = (sub_of_row == current) | (mode > 0)
        near_end = positions < (-(-used_len // SUB_BLOCK) * SUB_BLOCK)[:, None]
        weights = torch.where(on_task & near_end, 1.0, OFF_TASK_WEIGHT) * masked

        rows = (sub[..., None] * SUB_BLOCK + torch.arange(SUB_BLOCK, device=device)).flatten(1)
        rows = rows + torch.arange(num_blocks, device=device).repeat_interleave(SUB_BLOCK) * size
        kept = torch.rand(batch, num_blocks, device=device).repeat_interleave(SUB_BLOCK, dim=1)
        sub_masked = masked.gather(1, rows)
        sub_masked &= torch.rand(rows.shape, device=device) < kept
        sub_masked &= positions.gather(1, rows) % SUB_BLOCK != 0
        sub_weights = near_end.gather(1, rows) * sub_masked
        return masked, weights, torch.stack([sub_masked.float(), sub_weights.float()]), sub

    def make_rows(self, tokens: Tensor, prompt_len: Tensor, used_len: Tensor) -> dict[str, Tensor]:
        """Noise and one forward; the second half of the batch holds the complementary pairs."""
        device, (batch, length) = tokens.device, tokens.shape
        size, num_rows = self.block_size, self.max_noisy_len
        half, quarter = batch // 2, batch // 4
        order = torch.arange(batch, device=device)
        complement = torch.zeros_like(order)
        if quarter:
            complement[half : half + quarter] = 1
            complement[half + quarter : half + 2 * quarter] = 2
            order[half + quarter : half + 2 * quarter] = order[half : half + quarter]
        tokens, prompt_len, used_len = tokens[order], prompt_len[order], used_len[order]

        base = prompt_len // size * size
        positions = base[:, None] + torch.arange(num_rows, device=device)
        filler = tokens.new_full((batch, num_rows + 1), self.ids.end_of_text)
        padded = torch.cat([tokens, filler], dim=1)
        masked, weights, sub_state, sub = self.draw_masks(
            positions, prompt_len, used_len, complement
        )
        sub_masked = sub_state[0].bool()
        blocks = positions[:, ::size]
        sub_start = blocks + sub * SUB_BLOCK
        all_positions, visible = dual_cache_rows(
            base, sub_start, num_rows // size, size, SUB_BLOCK, length
        )
        clean = padded.gather(1, all_positions)
        num_sub_rows = sub_masked.shape[1]
        is_masked = torch.cat([masked, sub_masked, masked.new_zeros(batch, length)], dim=1)
        # Row i predicts the next row's token when that is masked; clean rows predict seeds.
        none = weights.new_zeros(batch, 1)
        noisy_weights = torch.cat([weights[:, 1:], none], dim=1)
        sub_weights = torch.cat([sub_state[1][:, 1:], none], dim=1)
        clean_positions = torch.arange(length, device=device).expand(batch, -1)
        is_seed = (clean_positions + 1) % size == 0
        is_seed &= (clean_positions + 1 >= prompt_len[:, None]) & (
            clean_positions + 1 < used_len[:, None]
        )
        return {
            "tokens": clean.masked_fill(is_masked, self.ids.mask),
            "positions": all_positions,
            "visible": visible,
            "targets": padded.gather(1, all_positions + 1),
            "weights": torch.cat([noisy_weights, sub_weights, is_seed.float()], dim=1),
            "num_sub_rows": torch.tensor(num_sub_rows),
        }

    def compute_loss(self, tokens: Tensor, prompt_len: Tensor, used_len: Tensor) -> Tensor:
        rows = self.make_rows(tokens, prompt_len, used_len)
        return self.weighted_loss(
            self.model,
            rows["tokens"],
            rows["positions"],
            additive_mask(rows["visible"]),
            rows["targets"],
            rows["weights"],
        )

    def engine_defaults(self) -> dict[str, Any]:
        return {
            "diffulex": {
                "decoding_strategy": "fast_dllm_v2",
                "sampling_mode": "naive",
                "block_size": SUB_BLOCK,
                "buffer_size": self.block_size // SUB_BLOCK,
                "fdv2_use_block_cache": True,
                "decoding_thresholds": {"accept_threshold": 0.9},
            }
        }

    def settings(self, device: torch.device) -> list[Setting]:
        grid = [(0.9, True), (0.9, False), (0.95, True), (0.7, True), (0.5, True), (1.0, True)]
        return [self.setting(device, *point) for point in grid]

    def setting(self, device: torch.device, accept: float, use_block_cache: bool) -> Setting:
        """The decoder at one accept threshold, with or without the block cache."""
        config = DualCacheConfig(
            sub_block=SUB_BLOCK,
            num_sub_blocks=self.block_size // SUB_BLOCK,
            mask_token_id=self.ids.mask,
            stop_ids=self.ids.stop_ids,
            accept_threshold=accept,
            use_block_cache=use_block_cache,
            max_tokens=MAX_TOKENS,
        )
        return Setting(
            f"fast_dllm_v2 accept={accept:.2f} block cache {'on' if use_block_cache else 'off'}",
            {
                "strategy": "fast_dllm_v2",
                "buffer_size": config.num_sub_blocks,
                "accept_threshold": accept,
                "fdv2_use_block_cache": use_block_cache,
            },
            lambda prompts: decode_dual_cache(
                self.model, prompts, config, device=device, num_candidates=self.ids.vocab_size
            ),
        )
