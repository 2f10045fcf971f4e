# SPDX-License-Identifier: Apache-2.0
"""What the sampler gets of a step: views of the plan and of the output, as its parts need them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.samplers.inputs import (
    CanvasArrays,
    CarryArrays,
    EditArrays,
    MergeArrays,
    RowFilters,
    SamplerInputs,
    SeedArrays,
)

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.runner.batch import ArenaViews, StepShape
    from diffulex.strategies.traits import StrategyTraits
    from diffulex_ext import _core

__all__ = ["SamplerInputsBuilder"]


class SamplerInputsBuilder:
    """Builds the inputs of the sampler from the arrays of a step. Creates no device work.

    Args:
        options: decide which parts there are.
        traits: of the strategy whose state machine the core runs; they decide it too.
        outputs: where the sampler writes.
        signals: self-conditioning rows of all request slots, for models that have them.
    """

    def __init__(
        self,
        options: _core.EngineOptions,
        traits: StrategyTraits,
        outputs: ArenaViews,
        signals: Tensor | None,
    ) -> None:
        self._outputs = outputs
        self._signals = signals
        #: Rows are saved between steps: logits predict the next position.
        self.has_carry = bool(options.logits_shift)
        self._has_seeds = traits.has_dual_cache
        self._is_rewriting = options.is_editing or traits.rewrites_tokens
        self._has_merges = options.token_merge_top_k > 0
        #: A request that draws is or was there: saved rows must hold logits from now on.
        self.has_sampled_requests = False

    def inputs(
        self, views: ArenaViews, shape: StepShape, logits: Tensor, rows: Tensor | None = None
    ) -> SamplerInputs:
        """Inputs over the used parts of the arrays; `rows` as in `SamplerInputs`."""
        n, num_blocks, out = shape.num_logits_rows, shape.num_blocks, self._outputs
        self.has_sampled_requests = self.has_sampled_requests or shape.any_sampled
        return SamplerInputs(
            logits=logits,
            rows=rows,
            inv_temperature=views.first("row_inv_temperature", n) if shape.any_sampled else None,
            uniforms=views.first("row_uniforms", n) if shape.any_sampled else None,
            tokens=views.first("blk_tokens", num_blocks),
            row_index=views.first("blk_row_index", num_blocks),
            editable_start=views.first("blk_editable_start", num_blocks),
            valid_len=views.first("blk_valid_len", num_blocks),
            gate=views.first("blk_force_top1", num_blocks),
            accept_threshold=views.first("blk_accept_threshold", num_blocks),
            open_steps=views.first("blk_open_steps", num_blocks),
            total_steps=views.first("blk_total_steps", num_blocks),
            write_ids=out.first("write_ids", num_blocks),
            confidence=out.first("confidence", num_blocks),
            masks_left=out.first("masks_left", num_blocks),
            flags=out.first("flags", num_blocks),
            same_token_ratio=out.first("same_token_ratio", num_blocks)
            if self._is_rewriting
            else None,
            filters=self._filters(views, shape),
            carry=self._carry(views, shape),
            seeds=self._seeds(views, shape),
            edit=self._edit(views, shape),
            merge=self._merge(num_blocks),
            canvas=self._canvas(views, num_blocks),
        )

    def skip(self) -> None:
        """A step without sampling: what the outputs of the last one say must not be read again."""
        if self._has_seeds:
            self._outputs.pending_next_token.fill_(-1)

    def _filters(self, views: ArenaViews, shape: StepShape) -> RowFilters | None:
        n = shape.num_logits_rows
        if shape.num_filtered_rows == 0:
            return None
        return RowFilters(
            views.first("row_top_k", n), views.first("row_top_p", n), views.first("row_min_p", n)
        )

    def _carry(self, views: ArenaViews, shape: StepShape) -> CarryArrays | None:
        if not self.has_carry:
            return None
        return CarryArrays(
            last_row_index=views.first("last_row_index", shape.num_reqs),
            request_slots=views.first("request_slots", shape.num_reqs),
            logits_source=views.first("logits_source", shape.num_logits_rows),
            num_saved_sources=shape.num_saved_source_rows,
            has_sampled_requests=self.has_sampled_requests,
        )

    def _seeds(self, views: ArenaViews, shape: StepShape) -> SeedArrays | None:
        if not self._has_seeds:
            return None
        num_reqs = shape.num_reqs
        return SeedArrays(
            views.first("seed_row", num_reqs), self._outputs.first("pending_next_token", num_reqs)
        )

    def _edit(self, views: ArenaViews, shape: StepShape) -> EditArrays | None:
        num_blocks = shape.num_blocks
        if views.blk_edit_threshold.numel() == 0:
            return None
        return EditArrays(
            views.first("blk_edit_threshold", num_blocks),
            views.first("blk_post_edit_steps", num_blocks),
            views.first("blk_max_post_edit_steps", num_blocks),
            views.first("blk_penalty", num_blocks) if shape.any_penalised else None,
        )

    def _merge(self, num_blocks: int) -> MergeArrays | None:
        if not self._has_merges:
            return None
        out = self._outputs
        return MergeArrays(
            valid=out.first("merge_valid", num_blocks),
            topk_ids=out.first("merge_topk_ids", num_blocks),
            topk_probs=out.first("merge_topk_probs", num_blocks),
            residual=out.first("merge_residual", num_blocks),
        )

    def _canvas(self, views: ArenaViews, num_blocks: int) -> CanvasArrays | None:
        if self._signals is None:
            return None
        return CanvasArrays(
            prev_argmax=views.first("blk_prev_argmax", num_blocks),
            stable_run=views.first("blk_stable_run", num_blocks),
            steps_left=views.first("blk_steps_left", num_blocks),
            renoise_ids=views.first("blk_renoise", num_blocks),
            request_slots=views.first("blk_request_slot", num_blocks),
            argmax=self._outputs.first("canvas_argmax", num_blocks),
            signals=self._signals,
        )
