# SPDX-License-Identifier: Apache-2.0
"""What code outside a strategy's own files asks about a decoding strategy."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StrategyTraits"]


@dataclass(frozen=True, slots=True)
class StrategyTraits:
    """Properties of a strategy. A strategy that names none fills no masks but its own way, and its
    decode steps can run ahead.

    Attributes:
        fills_masks: it decodes every family whose sampler fills masks.
        has_prefix_full: prompts are bidirectional as a whole.
        has_canvas: it has no masks: a canvas of ordinary tokens, which starts where the prompt ends,
            is denoised as a whole.
        has_dual_cache: a block is `buffer_size` sub-blocks of `block_size` tokens that see each other.
            Decode steps run the block or one sub-block, shift logits inside of the block, and predict the
            first token of the next one.
        rewrites_tokens: a step may replace tokens that an earlier one decided, in every sampling mode.
        merges_embeddings: positions are fed back as mixes of embeddings.
        feeds_back: a step reads floating-point results of the one before, last bits included.
        draws_at_zero: tokens are drawn at temperature 0 as well, so that seeds matter there.
        can_run_ahead: the device can plan its decode steps.
        is_exportable: a step is tokens, positions and one interval of visible keys per row, which is
            what an exported program takes.
    """

    fills_masks: bool = False
    has_prefix_full: bool = False
    has_canvas: bool = False
    has_dual_cache: bool = False
    rewrites_tokens: bool = False
    merges_embeddings: bool = False
    feeds_back: bool = False
    draws_at_zero: bool = False
    can_run_ahead: bool = True
    is_exportable: bool = False

    @property
    def area(self) -> str:
        """What scopes of its steps are called after: `multi_block` unless it differs from that."""
        if self.has_canvas:
            return "diffusion_gemma"
        if self.has_dual_cache:
            return "fast_dllm_v2"
        return "token_merge" if self.merges_embeddings else "multi_block"
