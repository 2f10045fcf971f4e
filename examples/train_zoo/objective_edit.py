# SPDX-License-Identifier: Apache-2.0
"""edit: mask-to-token and token-to-token noise, in the LLaDA2 format with routed experts.

Groups, masks and visibility are those of ``multitf``. On top of the masks, some answer tokens of the
noisy copy are wrong: random ones, and for half of the batch what the model itself would have
accepted at a low threshold. The model has to name the right token everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from block_decoders import EditingConfig, EditRequest, decode_editing
from multitf import MultiTFBatch, MultiTFSpec, make_batch
from objective import MAX_TOKENS, Setting, TokenIds, TransformerObjective
from reference_decoder import DecodingConfig, decode
from transformer import MoEShape, Shape

if TYPE_CHECKING:
    from torch import Tensor

#: Weight of tokens that are right already, against 1 for masks and wrong tokens.
COPY_WEIGHT = 0.2
MAX_WRONG_SHARE = 0.25


def llada2_shape(ids: TokenIds, block_size: int) -> Shape:
    """Shape of both LLaDA2 models of the zoo."""
    return Shape(
        vocab_size=ids.vocab_size,
        mask_token_id=ids.mask,
        eos_token_id=ids.end_of_text,
        block_size=block_size,
        num_hidden_layers=5,
        rotary_dim=32,
        qk_norm=True,
        moe=MoEShape(),
    )


class LLaDA2Objective(TransformerObjective):
    """What edit and dmax share: the format, the rows, and multi_bd as the point of comparison."""

    model_type = "llada2_moe"
    block_size = 32
    max_noisy_len = 96

    def __init__(self, ids: TokenIds, num_layers: int | None = None) -> None:
        super().__init__(ids, num_layers)
        self.spec = MultiTFSpec(
            block_size=self.block_size,
            noisy_len=self.max_noisy_len,
            mask_token_id=ids.mask,
            filler_token_id=ids.end_of_text,
            group_size_weights=(0.65, 0.35),
            num_filler_blocks=0,
        )

    @property
    def prefix_share(self) -> float:
        """Share of each batch whose masks stand behind a prefix of right tokens."""
        return 0.5

    def shape(self, ids: TokenIds) -> Shape:
        return llada2_shape(ids, self.block_size)

    def draw_batch(
        self, tokens: Tensor, prompt_len: Tensor, used_len: Tensor
    ) -> tuple[MultiTFBatch, Tensor, Tensor]:
        """Rows of ``multitf``, the noisy tokens, and which of them are answer positions.

        The noisy blocks of the first ``prefix_share`` of the batch hold right tokens up to some
        position and masks behind it. In a block of 32 random masks leave too much in sight: a result stands in
        the next line again, so that it is copied and never computed.
        """
        batch = make_batch(tokens, prompt_len, used_len, self.spec)
        num_rows, num_prefix = self.spec.noisy_len, int(self.prefix_share * len(tokens))
        positions = batch.positions[:, :num_rows]
        end = -(-used_len // self.block_size) * self.block_size
        inside = (positions >= prompt_len[:, None]) & (positions < end[:, None])
        noisy = batch.tokens[:, :num_rows]
        prefix = self.draw_prefix(batch, inside)
        return batch, torch.cat([prefix[:num_prefix], noisy[num_prefix:]]), inside

    def draw_prefix(self, batch: MultiTFBatch, inside: Tensor) -> Tensor:
        """Noisy tokens with right tokens up to some position of every block, then masks."""
        size, num_rows = self.block_size, self.spec.noisy_len
        # A third of the groups begins empty; later blocks of a group are filled less (``noise``).
        filled = 1.0 - batch.noise
        filled = filled * (torch.rand(len(filled), 1, device=filled.device) > 1 / 3)
        offset = (batch.positions[:, :num_rows] % size).float() / size
        is_mask = inside & (offset >= filled.repeat_interleave(size, dim=1))
        is_mask = is_mask | (~inside & (batch.tokens[:, :num_rows] == self.ids.mask))
        return batch.targets.masked_fill(is_mask, self.ids.mask)

    def multi_bd(self, device: torch.device, buffer_size: int, accept: float) -> Setting:
        """The same model without edits."""
        config = DecodingConfig(
            block_size=self.block_size,
            mask_token_id=self.ids.mask,
            stop_ids=self.ids.stop_ids,
            buffer_size=buffer_size,
            accept_threshold=accept,
            max_tokens=MAX_TOKENS,
        )
        return Setting(
            f"multi_bd N={buffer_size} accept={accept:.2f}",
            {"strategy": "multi_bd", "buffer_size": buffer_size, "accept_threshold": accept},
            lambda prompts: decode(
                _WithConfig(self.model),  # type: ignore[arg-type]
                prompts,
                config,
                device=device,
                num_candidates=self.ids.vocab_size,
            ),
        )


class _WithConfig:
    """Gives a ``Transformer`` the attribute under which the demo's decoder looks for its shape."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.shape

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, positions, mask)
        return logits


class Edit(LLaDA2Objective):
    """Mask-to-token and token-to-token training."""

    name = "edit"
    directory = "edit_llada2"

    def corrupt(self, noisy: Tensor, clean: Tensor, inside: Tensor) -> Tensor:
        """Replace some visible answer tokens by wrong ones: any token, an answer token, a digit."""
        device, shape = noisy.device, noisy.shape
        share = MAX_WRONG_SHARE * torch.rand(shape[0], 1, device=device)
        share = share * (torch.rand_like(share) < 0.7)
        is_wrong = (torch.rand(shape, device=device) < share) & inside & (noisy != self.ids.mask)
        any_token = torch.randint(self.ids.mask, shape, device=device)
        shuffled = clean.gather(1, torch.rand(shape, device=device).argsort(1))
        digits = torch.tensor(self.ids.digits, device=device)
        digit = digits[torch.randint(len(self.ids.digits), shape, device=device)]
        kind = torch.randint(4, shape, device=device)
        wrong = torch.where(kind == 0, any_token, torch.where(kind == 1, shuffled, digit))
        # Digits are mostly taken for digits: a wrong operator or line end is easily seen.
        wrong = torch.where(torch.isin(clean, digits), wrong, torch.where(kind < 2, wrong, clean))
        return torch.where(is_wrong, wrong, noisy)

    def accept_own(self, batch: MultiTFBatch, noisy: Tensor) -> Tensor:
        """One step of the threshold decoder: masks filled with the model's own best tokens."""
        num_rows = self.spec.noisy_len
        tokens = torch.cat([noisy, batch.tokens[:, num_rows:]], dim=1)
        ids, p = self.guess(self.model, tokens, batch.positions, batch.mask, num_rows)
        threshold = 0.2 + 0.5 * torch.rand(noisy.shape[0], 1, device=noisy.device)
        return torch.where((noisy == self.ids.mask) & (p > threshold), ids, noisy)

    def compute_loss(self, tokens: Tensor, prompt_len: Tensor, used_len: Tensor) -> Tensor:
        batch, noisy, inside = self.draw_batch(tokens, prompt_len, used_len)
        num_rows, num_own = self.spec.noisy_len, len(tokens) // 2
        noisy = self.corrupt(noisy, batch.targets, inside)
        if num_own and self.uses_own_predictions:
            # A quarter of the batch from each kind of noise.
            own = slice(num_own // 2, num_own // 2 + num_own)
            part = MultiTFBatch(*(value[own] for value in vars(batch).values()))
            filled = self.accept_own(part, noisy[own])
            noisy = torch.cat([noisy[: own.start], filled, noisy[own.stop :]])
        to_name = (noisy == self.ids.mask) | (noisy != batch.targets)
        weights = torch.where(to_name, 1.0, COPY_WEIGHT) * inside
        rows = torch.cat([noisy, batch.tokens[:, num_rows:]], dim=1)
        return self.weighted_loss(
            self.model, rows, batch.positions, batch.mask, batch.targets, weights
        )

    def engine_defaults(self) -> dict[str, Any]:
        return {
            "diffulex": {
                "decoding_strategy": "multi_bd",
                "sampling_mode": "edit",
                "block_size": self.block_size,
                "buffer_size": 1,
                "max_post_edit_steps": 16,
                "decoding_thresholds": {
                    "add_block_threshold": 0.1,
                    "semi_complete_threshold": 0.9,
                    "accept_threshold": 0.5,
                    "edit_threshold": 0.5,
                },
            }
        }

    def settings(self, device: torch.device) -> list[Setting]:
        points = [(1, 0.5), (1, 0.7), (1, 0.3), (1, 0.9), (2, 0.5), (2, 0.7)]
        plain = [(1, 0.5), (1, 0.7), (1, 0.3), (1, 0.95), (2, 0.5), (2, 0.7)]
        return [self.setting(device, *point) for point in points] + [
            self.multi_bd(device, *point) for point in plain
        ]

    def setting(
        self, device: torch.device, buffer_size: int, accept: float, edit: float = 0.5
    ) -> Setting:
        """The edit sampler at one buffer size and accept threshold."""
        config = EditingConfig(
            block_size=self.block_size,
            mask_token_id=self.ids.mask,
            stop_ids=self.ids.stop_ids,
            buffer_size=buffer_size,
            accept_threshold=accept,
            edit_threshold=edit,
            max_tokens=MAX_TOKENS,
        )
        return Setting(
            f"edit N={buffer_size} accept={accept:.2f} edit={edit:.2f}",
            {
                "strategy": "edit",
                "buffer_size": buffer_size,
                "accept_threshold": accept,
                "edit_threshold": edit,
            },
            lambda prompts: decode_editing(
                self.model,
                prompts,
                config,
                EditRequest,
                device=device,
                num_candidates=self.ids.vocab_size,
            ),
        )
