# SPDX-License-Identifier: Apache-2.0
"""Acceptance of the samplers that rewrite decoded positions.

Symbols: R statistics rows, Nb blocks of B <= 1024 positions. Editable positions of a block are those
in [editable_start, valid_len). A block in which one of them has no row takes no writes
(`AcceptFlag.SKIPPED`); a row without a finite candidate proposes nothing (`AcceptFlag.BAD_LOGITS`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.ops.sampling import ConfidenceKind

if TYPE_CHECKING:
    from torch import Tensor


class EditResult(NamedTuple):
    """Result of `accept_edit`."""

    write_ids: Tensor
    """[Nb, B] int64, -1 = unchanged."""
    confidence: Tensor
    """[Nb, B] float32, probability of the proposal at editable positions, else 0."""
    masks_left: Tensor
    """[Nb] int32, open positions after the writes."""
    flags: Tensor
    """[Nb] int32, AcceptFlag bits."""
    same_token_ratio: Tensor
    """[Nb] float32, share of the decoded positions whose proposal is their token, 1 without any."""


class DmaxResult(NamedTuple):
    """Result of `accept_dmax`; the merge fields are None without `merge_top_k`."""

    write_ids: Tensor
    """[Nb, B] int64, -1 = unchanged."""
    confidence: Tensor
    """[Nb, B] float32, probability of the proposal at editable positions, else 0."""
    masks_left: Tensor
    """[Nb] int32, open positions after the writes."""
    flags: Tensor
    """[Nb] int32, AcceptFlag bits."""
    same_token_ratio: Tensor
    """[Nb] float32, share of the decoded positions whose proposal is their token, 1 without any."""
    merge_valid: Tensor | None
    """[Nb, B] uint8, 1 = the position has a descriptor."""
    merge_ids: Tensor | None
    """[Nb, B, K] int64, the mask token where there is none."""
    merge_probs: Tensor | None
    """[Nb, B, K] float32, 0 where there is none."""
    merge_residual: Tensor | None
    """[Nb, B] float32, weight of the mask embedding."""


class GemmaResult(NamedTuple):
    """Result of `accept_gemma`."""

    write_ids: Tensor
    """[Nb, B] int64, the next canvas; -1 past valid_len and in blocks that take no writes."""
    argmax: Tensor
    """[Nb, B] int64, the argmax canvas; -1 past valid_len."""
    confidence: Tensor
    """[Nb, B] float32, probability of the draw, or of the argmax once converged."""
    flags: Tensor
    """[Nb] int32, AcceptFlag bits: CONVERGED, ALL_CONFIDENT (mean entropy below the threshold), ..."""


def _grid(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tokens.shape, dtype=dtype, device=tokens.device)


def _vector(tokens: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tokens.shape[0], dtype=dtype, device=tokens.device)


@torch.no_grad()
def accept_edit(
    tokens: Tensor,
    row_index: Tensor,
    editable_start: Tensor,
    gate: Tensor,
    accept_threshold: Tensor,
    edit_threshold: Tensor,
    open_steps: Tensor,
    post_edit_steps: Tensor,
    ids: Tensor,
    stats: Tensor,
    *,
    mask_token_id: int,
    max_post_edit_steps: int,
    valid_len: Tensor | None = None,
    confidence_kind: int = ConfidenceKind.MAX_PROB,
    raw_confidence: bool = True,
    out: EditResult | None = None,
) -> EditResult:
    """Fills masks and rewrites decoded positions, all at once.

    Masks take their proposal above `accept_threshold`, the best one at least when the gate is open.
    Decoded positions take a different proposal above `edit_threshold`.

    Args:
        tokens: [Nb, B] int64 current content.
        row_index: [Nb, B] int32 rows of `ids` and `stats`, -1 = no row this step.
        editable_start: [Nb] int32, first writable position.
        gate: [Nb] uint8, 1 = the best position may be forced.
        accept_threshold: [Nb] float32, of masks.
        edit_threshold: [Nb] float32, of decoded positions.
        open_steps: [Nb] int32, earlier sampler steps with an open gate.
        post_edit_steps: [Nb] int32, earlier sampler steps that began without a mask.
        valid_len: [Nb] int32 end of the block's content; None = B, 0 = padding entry.
        max_post_edit_steps: mask-free steps after which the block commits; B more open steps than
            that force all masks (`AcceptFlag.TIMED_OUT`).
        raw_confidence: compare the probability at temperature 1.
        out: tensors to fill; None allocates them.
    """
    if out is None:
        out = EditResult(
            _grid(tokens, torch.int64),
            _grid(tokens, torch.float32),
            _vector(tokens, torch.int32),
            _vector(tokens, torch.int32),
            _vector(tokens, torch.float32),
        )
    torch.ops.diffulex.accept_edit(
        tokens,
        row_index,
        editable_start,
        valid_len,
        gate,
        accept_threshold,
        edit_threshold,
        open_steps,
        post_edit_steps,
        ids,
        stats,
        *out,
        mask_token_id=mask_token_id,
        max_post_edit_steps=max_post_edit_steps,
        confidence_kind=int(confidence_kind),
        raw_confidence=raw_confidence,
    )
    return out


@torch.no_grad()
def accept_dmax(
    tokens: Tensor,
    row_index: Tensor,
    editable_start: Tensor,
    gate: Tensor,
    accept_threshold: Tensor,
    open_steps: Tensor,
    ids: Tensor,
    stats: Tensor,
    *,
    mask_token_id: int,
    valid_len: Tensor | None = None,
    argmax_ids: Tensor | None = None,
    topk_ids: Tensor | None = None,
    topk_probs: Tensor | None = None,
    merge_top_k: int = 0,
    fast_path: bool = False,
    out: DmaxResult | None = None,
) -> DmaxResult:
    """Decodes masks left to right and refreshes every decoded position.

    Masks take their proposal from the left while its probability at temperature 1 reaches
    `accept_threshold`, the first one at least when the gate is open. At the B-th open step all masks
    are filled (`AcceptFlag.TIMED_OUT`).

    Args:
        tokens: [Nb, B] int64 current content.
        row_index: [Nb, B] int32 rows of the row arrays, -1 = no row this step.
        editable_start: [Nb] int32, first writable position.
        gate: [Nb] uint8, 1 = the first mask may be forced.
        accept_threshold: [Nb] float32.
        open_steps: [Nb] int32, earlier sampler steps with an open gate.
        valid_len: [Nb] int32 end of the block's content; None = B, 0 = padding entry.
        argmax_ids: [R] int64, the argmax where it is not `topk_ids[:, 0]`; needs `topk_ids`.
        topk_ids: [R, Kt] int64 candidates, descending, with `topk_probs` [R, Kt] float32 at
            temperature 1 (of a greedy `token_stats` call). None = the proposals are the argmax.
        merge_top_k: K, entries of each merge descriptor; 0 = no descriptors.
        fast_path: decoded positions count as certain, their descriptor is the token alone.
        out: tensors to fill; None allocates them.
    """
    if out is None:
        shape = (*tokens.shape, merge_top_k)
        device = tokens.device
        out = DmaxResult(
            _grid(tokens, torch.int64),
            _grid(tokens, torch.float32),
            _vector(tokens, torch.int32),
            _vector(tokens, torch.int32),
            _vector(tokens, torch.float32),
            _grid(tokens, torch.uint8) if merge_top_k else None,
            torch.empty(shape, dtype=torch.int64, device=device) if merge_top_k else None,
            torch.empty(shape, dtype=torch.float32, device=device) if merge_top_k else None,
            _grid(tokens, torch.float32) if merge_top_k else None,
        )
    torch.ops.diffulex.accept_dmax(
        tokens,
        row_index,
        editable_start,
        valid_len,
        gate,
        accept_threshold,
        open_steps,
        ids,
        stats,
        argmax_ids,
        topk_ids,
        topk_probs,
        *out,
        mask_token_id=mask_token_id,
        fast_path=fast_path,
    )
    return out


@torch.no_grad()
def accept_gemma(
    tokens: Tensor,
    row_index: Tensor,
    prev_argmax: Tensor,
    stable_run: Tensor,
    steps_left: Tensor,
    renoise_ids: Tensor,
    ids: Tensor,
    stats: Tensor,
    argmax_ids: Tensor,
    *,
    entropy_bound: float,
    stability_threshold: int,
    confidence_threshold: float,
    valid_len: Tensor | None = None,
    out: GemmaResult | None = None,
) -> GemmaResult:
    """One denoise step of canvases without mask token.

    The draws of lowest entropy stay while the entropies before them sum to at most `entropy_bound`;
    every other position takes its random id. The canvas converges, and becomes its argmax, when the
    argmax canvas was the same `stability_threshold` steps before and the mean entropy is below
    `confidence_threshold`, or at the last step.

    Args:
        tokens: [Nb, B] int64 current canvas.
        row_index: [Nb, B] int32 rows of the row arrays, -1 = no row this step.
        prev_argmax: [Nb, B] int64 argmax canvas of the previous step.
        stable_run: [Nb] int32 equal argmax canvases in a row so far, -1 = no previous one.
        steps_left: [Nb] int32, N at the first step, 1 at the last.
        renoise_ids: [Nb, B] int64 random ids.
        ids: [R] int64 draws, `stats` [R, 8] at the temperature of the step.
        argmax_ids: [R] int64, for example `topk_ids[:, 0]`.
        valid_len: [Nb] int32 end of the canvas; None = B, 0 = padding entry.
        out: tensors to fill; None allocates them.
    """
    if out is None:
        out = GemmaResult(
            _grid(tokens, torch.int64),
            _grid(tokens, torch.int64),
            _grid(tokens, torch.float32),
            _vector(tokens, torch.int32),
        )
    torch.ops.diffulex.accept_gemma(
        tokens,
        row_index,
        valid_len,
        prev_argmax,
        stable_run,
        steps_left,
        renoise_ids,
        ids,
        stats,
        argmax_ids,
        *out,
        entropy_bound=entropy_bound,
        stability_threshold=stability_threshold,
        confidence_threshold=confidence_threshold,
    )
    return out
