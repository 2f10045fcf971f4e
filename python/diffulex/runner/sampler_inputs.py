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

    from diffulex.runner.batch import PlanViews, SamplerViews, StepShape
    from diffulex_ext import _core

__all__ = ["SamplerInputsBuilder"]


class SamplerInputsBuilder:
    """Builds the inputs of the sampler from the arrays of a step. Creates no device work.

    Args:
        options: decide which parts there are.
        outputs: where the sampler writes.
        signals: self-conditioning rows of all request slots, for models that have them.
    """

    def __init__(
        self, options: _core.EngineOptions, outputs: SamplerViews, signals: Tensor | None
    ) -> None:
        self._outputs = outputs
        self._signals = signals
        #: Rows are saved between steps: logits predict the next position.
        self.has_carry = bool(options.logits_shift)
        self._has_seeds = options.strategy == "fast_dllm_v2"
        self._is_rewriting = options.is_editing or options.strategy == "dmax"
        self._has_merges = options.token_merge_top_k > 0
        #: A request that draws is or was there: saved rows must hold logits from now on.
        self.has_sampled_requests = False

    def inputs(self, views: PlanViews, shape: StepShape, logits: Tensor) -> SamplerInputs:
        """Inputs over the used parts of the arrays."""
        n, num_blocks, out = shape.num_logits_rows, shape.num_blocks, self._outputs
        self.has_sampled_requests = self.has_sampled_requests or shape.any_sampled
        return SamplerInputs(
            logits=logits,
            inv_temperature=views.row_inv_temperature[:n] if shape.any_sampled else None,
            uniforms=views.row_uniforms[:n] if shape.any_sampled else None,
            tokens=views.blk_tokens[:num_blocks],
            row_index=views.blk_row_index[:num_blocks],
            editable_start=views.blk_editable_start[:num_blocks],
            valid_len=views.blk_valid_len[:num_blocks],
            gate=views.blk_force_top1[:num_blocks],
            accept_threshold=views.blk_accept_threshold[:num_blocks],
            open_steps=views.blk_open_steps[:num_blocks],
            total_steps=views.blk_total_steps[:num_blocks],
            write_ids=out.write_ids[:num_blocks],
            confidence=out.confidence[:num_blocks],
            masks_left=out.masks_left[:num_blocks],
            flags=out.flags[:num_blocks],
            same_token_ratio=out.same_token_ratio[:num_blocks] if self._is_rewriting else None,
            filters=self._filters(views, shape),
            carry=self._carry(views, shape),
            seeds=self._seeds(views, shape),
            edit=self._edit(views, num_blocks),
            merge=self._merge(num_blocks),
            canvas=self._canvas(views, num_blocks),
        )

    def skip(self) -> None:
        """A step without sampling: what the outputs of the last one say must not be read again."""
        if self._has_seeds:
            self._outputs.pending_next_token.fill_(-1)

    def _filters(self, views: PlanViews, shape: StepShape) -> RowFilters | None:
        n = shape.num_logits_rows
        if shape.num_filtered_rows == 0:
            return None
        return RowFilters(views.row_top_k[:n], views.row_top_p[:n], views.row_min_p[:n])

    def _carry(self, views: PlanViews, shape: StepShape) -> CarryArrays | None:
        if not self.has_carry:
            return None
        return CarryArrays(
            last_row_index=views.last_row_index[: shape.num_reqs],
            request_slots=views.request_slots[: shape.num_reqs],
            logits_source=views.logits_source[: shape.num_logits_rows],
            num_saved_sources=shape.num_saved_source_rows,
            has_sampled_requests=self.has_sampled_requests,
        )

    def _seeds(self, views: PlanViews, shape: StepShape) -> SeedArrays | None:
        if not self._has_seeds:
            return None
        num_reqs = shape.num_reqs
        return SeedArrays(views.seed_row[:num_reqs], self._outputs.pending_next_token[:num_reqs])

    def _edit(self, views: PlanViews, num_blocks: int) -> EditArrays | None:
        if views.blk_edit_threshold.numel() == 0:
            return None
        return EditArrays(
            views.blk_edit_threshold[:num_blocks], views.blk_post_edit_steps[:num_blocks]
        )

    def _merge(self, num_blocks: int) -> MergeArrays | None:
        if not self._has_merges:
            return None
        out = self._outputs
        return MergeArrays(
            valid=out.merge_valid[:num_blocks],
            topk_ids=out.merge_topk_ids[:num_blocks],
            topk_probs=out.merge_topk_probs[:num_blocks],
            residual=out.merge_residual[:num_blocks],
        )

    def _canvas(self, views: PlanViews, num_blocks: int) -> CanvasArrays | None:
        if self._signals is None:
            return None
        return CanvasArrays(
            prev_argmax=views.blk_prev_argmax[:num_blocks],
            stable_run=views.blk_stable_run[:num_blocks],
            steps_left=views.blk_steps_left[:num_blocks],
            renoise_ids=views.blk_renoise[:num_blocks],
            request_slots=views.blk_request_slot[:num_blocks],
            argmax=self._outputs.canvas_argmax[:num_blocks],
            signals=self._signals,
        )
