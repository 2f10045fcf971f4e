# SPDX-License-Identifier: Apache-2.0
"""d2f: several noisy blocks in flight behind a fully visible prompt, in the LLaDA format.

Rows of one forward: the noisy answer, the clean answer, and the prompt. Prompt rows see the prompt
alone, all of it. As published, the answer's blocks start where the prompt ends and see all prompt
rows. ``D2FOnGrid`` starts them at multiples of the block size: answer rows begin at the block in
which the prompt ends and see the prompt rows of the full prompt blocks; the prompt tail is part of
the answer rows and follows their rule, as in an engine. Blocks, groups and noise are those of
``multitf``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from block_decoders import decode_d2f, first_block_start, prefix_full_rows
from model import additive_mask
from multitf import draw_groups, draw_noise
from objective import MAX_PROMPT, MAX_TOKENS, Setting, TokenIds, TransformerObjective
from reference_decoder import DecodingConfig
from transformer import Shape

if TYPE_CHECKING:
    from torch import Tensor

GROUP_SIZE_WEIGHTS = (0.4, 0.3, 0.2, 0.1)
NUM_FILLER_BLOCKS = 3
#: Share of sequences trained on the very first forward: all masks, and on the grid a prompt tail that
#: sees the prompt only.
FIRST_FORWARD_SHARE = 0.15
#: Buffer size and accept threshold of the judged settings, the model's own first.
JUDGED = ((4, 0.9), (1, 0.9), (2, 0.9), (4, 0.95), (4, 0.8), (4, 0.6), (4, 0.4))


class D2F(TransformerObjective):
    """Direct block-causal training with full prompt visibility, blocks from the prompt's end."""

    name = "d2f"
    on_grid: ClassVar[bool] = False
    is_shifted: ClassVar[bool] = False
    directory = "d2f_llada"
    model_type = "llada"
    block_size = 8
    max_noisy_len = 48

    def shape(self, ids: TokenIds) -> Shape:
        return Shape(
            vocab_size=ids.vocab_size,
            mask_token_id=ids.mask,
            eos_token_id=ids.end_of_text,
            block_size=self.block_size,
            rms_norm_eps=1e-5,
        )

    def make_rows(self, tokens: Tensor, prompt_len: Tensor, used_len: Tensor) -> dict[str, Tensor]:
        """Noise and one forward: rows, positions, visibility, targets, weights."""
        device, (batch, length) = tokens.device, tokens.shape
        size, num_rows = self.block_size, self.max_noisy_len
        num_blocks = num_rows // size
        start = first_block_start(prompt_len, size, self.on_grid)
        group = draw_groups(batch, num_blocks, GROUP_SIZE_WEIGHTS, device)
        noise = draw_noise(group)
        is_first = torch.rand(batch, device=device) < FIRST_FORWARD_SHARE
        noise = torch.where(is_first[:, None], 1.0, noise)

        relative = torch.arange(num_rows, device=device)
        positions = start[:, None] + relative
        filler = tokens.new_full((batch, num_rows), self.ids.end_of_text)
        clean = torch.cat([tokens, filler], dim=1).gather(1, positions)
        is_response = positions >= prompt_len[:, None]
        noise_of_row = noise.repeat_interleave(size, dim=1)
        is_masked = (torch.rand(clean.shape, device=device) < noise_of_row) & is_response
        end = start + (-(-(used_len - start) // size) + NUM_FILLER_BLOCKS) * size
        is_target = is_masked & (positions < end[:, None])
        noisy = clean.masked_fill(is_masked, self.ids.mask)

        # The last rows and their visibility are those of the decoder, for the clean answer.
        padded = torch.cat([tokens, filler], dim=1)[:, : max(length, MAX_PROMPT)]
        never = torch.zeros_like(is_first)
        _, decoder_positions, visible = prefix_full_rows(
            padded, prompt_len, start, size, MAX_PROMPT, never
        )
        keep = torch.cat([relative, padded.shape[1] + torch.arange(MAX_PROMPT, device=device)])
        context = visible[:, keep][:, :, keep]
        context_positions = decoder_positions[:, keep]
        context_tokens = torch.cat([clean, padded[:, :MAX_PROMPT]], dim=1)

        block = (relative // size).expand(batch, -1)
        row_group = group.repeat_interleave(size, dim=1)
        same_group = row_group[:, :, None] == row_group[:, None, :]
        to_noisy = same_group & (block[:, None, :] <= block[:, :, None])
        is_tail = ~is_response
        first_forward = is_first[:, None, None] & is_tail[:, :, None] & ~is_tail[:, None, :]
        to_noisy = to_noisy & ~first_forward
        to_clean = block[:, None, :] < row_group[:, :, None]
        to_prompt = context[:, :num_rows, num_rows:]  # the same for noisy and clean rows
        to_context = torch.cat([to_clean, to_prompt], dim=2)
        from_context = torch.zeros_like(to_context).transpose(1, 2)
        all_visible = torch.cat(
            [
                torch.cat([to_noisy, to_context], dim=2),
                torch.cat([from_context, context], dim=2),
            ],
            dim=1,
        )
        return {
            "tokens": torch.cat([noisy, context_tokens], dim=1),
            "positions": torch.cat([positions, context_positions], dim=1),
            "visible": all_visible,
            "targets": clean,
            "weights": is_target.float(),
            "group": group,
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
                "decoding_strategy": "d2f",
                "sampling_mode": "naive",
                "block_size": self.block_size,
                "buffer_size": 4,
                **({"d2f_block_grid": True} if self.on_grid else {}),
                "decoding_thresholds": {
                    "add_block_threshold": 0.1,
                    "semi_complete_threshold": 0.9,
                    "accept_threshold": 0.9,
                },
            }
        }

    def settings(self, device: torch.device) -> list[Setting]:
        own = [self.setting(device, *point, self.on_grid) for point in JUDGED]
        return [*own, self.setting(device, 4, 0.9, not self.on_grid)]

    def setting(
        self, device: torch.device, buffer_size: int, accept: float, on_grid: bool
    ) -> Setting:
        """The decoder at one buffer size, accept threshold and start of the blocks."""
        config = DecodingConfig(
            block_size=self.block_size,
            mask_token_id=self.ids.mask,
            stop_ids=self.ids.stop_ids,
            buffer_size=buffer_size,
            accept_threshold=accept,
            max_tokens=MAX_TOKENS,
            starts_at_prompt=not on_grid,
        )
        return Setting(
            f"d2f N={buffer_size} accept={accept:.2f} {'on the grid' if on_grid else 'from the prompt'}",
            {
                "strategy": "d2f",
                "buffer_size": buffer_size,
                "accept_threshold": accept,
                "d2f_block_grid": on_grid,
            },
            lambda prompts: decode_d2f(
                self.model,
                prompts,
                config,
                device=device,
                num_candidates=self.ids.vocab_size,
                is_shifted=self.is_shifted,
            ),
        )


class D2FOnGrid(D2F):
    """The same with blocks at multiples of the block size, for comparison."""

    name = "d2f_grid"
    on_grid = True
