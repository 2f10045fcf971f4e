# SPDX-License-Identifier: Apache-2.0
"""dmax: trained on its own predictions, with soft inputs, in the LLaDA2 format.

First stage: half of each batch is plain mask noise. The other half starts from a prefix of right
tokens in every noisy block and, once the model has learnt something, takes one to three steps of the
dmax sampler with its own predictions: leftmost-prefix filling, full refresh, inputs merged from the
predicted token and the mask. The loss then asks for the right token at every answer position, filled
or not. Second stage: three quarters of the batch take up to five such steps, the rest none; random
masks no longer occur.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from block_decoders import DMaxRequest, EditingConfig, decode_editing
from multitf import MultiTFBatch
from objective import MAX_TOKENS, Setting, SoftInputs
from objective_edit import COPY_WEIGHT, LLaDA2Objective

if TYPE_CHECKING:
    from torch import Tensor

#: Number of sampler steps before the training step, drawn uniformly.
ROLLOUTS = (1, 2, 3)
SECOND_STAGE_ROLLOUTS = (1, 1, 2, 2, 3, 5)
MAX_THRESHOLD = 0.9


def fill_leftmost(
    is_mask: Tensor, probability: Tensor, threshold: Tensor, block_size: int
) -> Tensor:
    """Masks that the leftmost-prefix rule accepts in each block; at least the first one.

    is_mask, probability: [batch, rows]; threshold: [batch, 1].
    """
    shape = is_mask.shape
    blocks = is_mask.view(shape[0], -1, block_size)
    rank = blocks.cumsum(-1)  # 1 at the first mask of the block
    failing = blocks & (probability < threshold).view(blocks.shape) & (rank > 1)
    accepted = blocks & (failing.cumsum(-1) == 0)
    # A first mask below the threshold is accepted alone.
    first_fails = blocks & (rank == 1) & (probability < threshold).view(blocks.shape)
    alone = first_fails.any(-1, keepdim=True)
    return torch.where(alone, blocks & (rank == 1), accepted).view(shape)


class DMax(LLaDA2Objective):
    """On-policy training with merged embeddings."""

    name = "dmax"
    directory = "dmax_llada2"

    @property
    def prefix_share(self) -> float:
        return 1.0 if self.is_second_stage else 0.5

    @torch.no_grad()
    def roll_out(
        self, batch: MultiTFBatch, noisy: Tensor, inside: Tensor, num_steps: int
    ) -> tuple[Tensor, SoftInputs]:
        """Steps of the sampler at a random accept threshold: tokens and merged inputs."""
        num_rows, soft = self.spec.noisy_len, SoftInputs.none(noisy)
        threshold = MAX_THRESHOLD * torch.rand(len(noisy), 1, device=noisy.device)
        for _ in range(num_steps):
            rows = torch.cat([noisy, batch.tokens[:, num_rows:]], dim=1)
            ids, p = self.guess(self.model, rows, batch.positions, batch.mask, num_rows, soft)
            is_mask = (noisy == self.ids.mask) & inside
            accepted = fill_leftmost(is_mask, p, threshold, self.block_size)
            is_written = accepted | (inside & (noisy != self.ids.mask))
            noisy = torch.where(is_written, ids, noisy)
            soft = SoftInputs(torch.where(is_written, ids, -1), torch.where(is_written, p, 0.0))
        return noisy, soft

    def compute_loss(self, tokens: Tensor, prompt_len: Tensor, used_len: Tensor) -> Tensor:
        batch, noisy, inside = self.draw_batch(tokens, prompt_len, used_len)
        rollouts = SECOND_STAGE_ROLLOUTS if self.is_second_stage else ROLLOUTS
        num_own = int((0.75 if self.is_second_stage else 0.5) * len(tokens))
        num_rows = self.spec.noisy_len
        soft = SoftInputs.none(noisy)
        if num_own and self.uses_own_predictions:
            part = MultiTFBatch(*(value[:num_own] for value in vars(batch).values()))
            num_steps = rollouts[int(torch.randint(len(rollouts), ()))]
            own, own_soft = self.roll_out(part, noisy[:num_own], inside[:num_own], num_steps)
            noisy = torch.cat([own, noisy[num_own:]])
            soft = SoftInputs(
                torch.cat([own_soft.ids, soft.ids[num_own:]]),
                torch.cat([own_soft.probabilities, soft.probabilities[num_own:]]),
            )
        rows = torch.cat([noisy, batch.tokens[:, num_rows:]], dim=1)
        to_name = (noisy == self.ids.mask) | (noisy != batch.targets)
        weights = torch.where(to_name, 1.0, COPY_WEIGHT) * inside
        return self.weighted_loss(
            self.model, rows, batch.positions, batch.mask, batch.targets, weights, soft
        )

    def engine_defaults(self) -> dict[str, Any]:
        return {
            "diffulex": {
                "decoding_strategy": "dmax",
                "sampling_mode": "edit",
                "block_size": self.block_size,
                "buffer_size": 2,
                "token_merge_mode": "dmax_topk",
                "token_merge_top_k": 1,
                "token_merge_renormalize": True,
                "token_merge_weight": 1.0,
                "decoding_thresholds": {
                    "add_block_threshold": 0.1,
                    "semi_complete_threshold": 0.9,
                    "accept_threshold": 0.5,
                    "token_stability_threshold": 0.5,
                },
            }
        }

    def settings(self, device: torch.device) -> list[Setting]:
        points = [(2, 0.5), (1, 0.5), (2, 0.0), (1, 0.0), (1, 0.8)]
        plain = [(1, tau) for tau in (0.99, 0.97, 0.95, 0.9, 0.8, 0.7, 0.5)]
        plain += [(2, tau) for tau in (0.99, 0.97, 0.95, 0.9, 0.7)]
        return [self.setting(device, *point) for point in points] + [
            self.multi_bd(device, *point) for point in plain
        ]

    def setting(self, device: torch.device, buffer_size: int, accept: float) -> Setting:
        """The dmax sampler at one buffer size and accept threshold."""
        config = EditingConfig(
            block_size=self.block_size,
            mask_token_id=self.ids.mask,
            stop_ids=self.ids.stop_ids,
            buffer_size=buffer_size,
            accept_threshold=accept,
            token_stability_threshold=0.5,
            max_tokens=MAX_TOKENS,
        )
        return Setting(
            f"dmax N={buffer_size} accept={accept:.2f}",
            {"strategy": "dmax", "buffer_size": buffer_size, "accept_threshold": accept},
            lambda prompts: decode_editing(
                self.model,
                prompts,
                config,
                DMaxRequest,
                device=device,
                num_candidates=self.ids.vocab_size,
            ),
        )
