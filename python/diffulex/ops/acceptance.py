# SPDX-License-Identifier: Apache-2.0
"""Acceptance: which positions of a block take their proposal, and which are rewritten.

Symbols: R statistics rows, Nb blocks of B <= 1024 positions. Editable positions of a block are those
in [editable_start, valid_len). A block in which one of them has no row takes no writes
(`AcceptFlag.SKIPPED`); a row without a finite candidate proposes nothing (`AcceptFlag.BAD_LOGITS`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.ops.fakes import FLOAT32, INT32, INT64, UINT8, FakeArguments, fake
from diffulex.ops.sampling import AcceptRule, ConfidenceKind, StatsColumn

if TYPE_CHECKING:
    from torch import Tensor


class AcceptResult(NamedTuple):
    """Result of `accept_mask_fill`."""

    write_ids: Tensor
    """[Nb, B] int64, -1 = unchanged."""
    confidence: Tensor
    """[Nb, B] float32, probability of the proposal at open positions, else 0."""
    masks_left: Tensor
    """[Nb] int32, open positions after the writes."""
    flags: Tensor
    """[Nb] int32, AcceptFlag bits."""


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
def accept_mask_fill(
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
    rule: int = AcceptRule.THRESHOLD,
    confidence_kind: int = ConfidenceKind.MAX_PROB,
    raw_confidence: bool = False,
    denoising_steps: int = 0,
    force_accept_last_step: bool = False,
    factor: float = 1.0,
    entropy_bound: float = 0.0,
    low_threshold: float = 0.0,
    out: AcceptResult | None = None,
) -> AcceptResult:
    """Decides which masked positions of each block take their proposal.

    Args:
        tokens: [Nb, B] int64 current content.
        row_index: [Nb, B] int32 rows of `ids` and `stats`, -1 = no row this step.
        editable_start: [Nb] int32, first writable position.
        gate: [Nb] uint8, 1 = positions may be accepted without passing the threshold.
        accept_threshold: [Nb] float32.
        open_steps: [Nb] int32, earlier sampler steps with an open gate.
        valid_len: [Nb] int32 end of the block's content; None = B, 0 = padding entry.
        denoising_steps: S of the schedule; 0 = B.
        low_threshold: of the best position of each run of masks under HIERARCHY.
        out: tensors to fill; None allocates them.
    """
    if out is None:
        num_blocks = tokens.shape[0]
        out = AcceptResult(
            torch.empty(tokens.shape, dtype=torch.int64, device=tokens.device),
            torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device),
            torch.empty(num_blocks, dtype=torch.int32, device=tokens.device),
            torch.empty(num_blocks, dtype=torch.int32, device=tokens.device),
        )
    torch.ops.diffulex.accept_mask_fill(
        tokens,
        row_index,
        editable_start,
        valid_len,
        gate,
        accept_threshold,
        open_steps,
        ids,
        stats,
        *out,
        mask_token_id=mask_token_id,
        rule=int(rule),
        confidence_kind=int(confidence_kind),
        raw_confidence=raw_confidence,
        denoising_steps=denoising_steps,
        force_accept_last_step=force_accept_last_step,
        factor=factor,
        entropy_bound=entropy_bound,
        low_threshold=low_threshold,
    )
    return out


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
    max_post_edit_steps: Tensor,
    ids: Tensor,
    stats: Tensor,
    *,
    mask_token_id: int,
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
        max_post_edit_steps: [Nb] int32, mask-free steps after which the block commits; B more open
            steps than that force all masks (`AcceptFlag.TIMED_OUT`).
        valid_len: [Nb] int32 end of the block's content; None = B, 0 = padding entry.
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
        max_post_edit_steps,
        ids,
        stats,
        *out,
        mask_token_id=mask_token_id,
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


_MAX_POSITIONS = 1024
#: What the ops take and give for each block, [Nb], and for each position, [Nb, B].
_OF_BLOCKS = {
    "accept_threshold": FLOAT32,
    "edit_threshold": FLOAT32,
    "editable_start": INT32,
    "flags": INT32,
    "gate": UINT8,
    "masks_left": INT32,
    "max_post_edit_steps": INT32,
    "open_steps": INT32,
    "post_edit_steps": INT32,
    "same_token_ratio": FLOAT32,
    "stable_run": INT32,
    "steps_left": INT32,
    "valid_len": INT32,
}
_OF_POSITIONS = {
    "argmax": INT64,
    "confidence": FLOAT32,
    "prev_argmax": INT64,
    "renoise_ids": INT64,
    "row_index": INT32,
    "write_ids": INT64,
}


def _check_blocks(
    arguments: FakeArguments, tokens: Tensor, ids: Tensor, *, is_any_size: bool = False
) -> None:
    arguments.check("tokens", INT64, (None, None))
    if not is_any_size:
        block_size = tokens.shape[1]
        expected = f"blocks of 1 to {_MAX_POSITIONS} positions"
        arguments.require("tokens", block_size >= 1, expected, list(tokens.shape))
        arguments.require("tokens", block_size <= _MAX_POSITIONS, expected, list(tokens.shape))
    arguments.check_each(_OF_BLOCKS, (tokens.shape[0],))
    arguments.check_each(_OF_POSITIONS, tokens.shape)
    arguments.check("ids", INT64, (None,))
    arguments.check("stats", FLOAT32, (ids.shape[0], len(StatsColumn)))


@fake("accept_mask_fill")
def _accept_mask_fill(arguments: FakeArguments, tokens: Tensor, ids: Tensor) -> None:
    _check_blocks(arguments, tokens, ids, is_any_size=True)
    arguments.choice("rule", 8)
    arguments.choice("confidence_kind", 2)
    arguments.at_least("denoising_steps", 0)


@fake("accept_edit")
def _accept_edit(arguments: FakeArguments, tokens: Tensor, ids: Tensor) -> None:
    _check_blocks(arguments, tokens, ids)
    arguments.at_least("mask_token_id", 0)
    arguments.choice("confidence_kind", 2)


@fake("accept_dmax")
def _accept_dmax(
    arguments: FakeArguments,
    tokens: Tensor,
    ids: Tensor,
    argmax_ids: Tensor | None,
    topk_ids: Tensor | None,
    merge_valid: Tensor | None,
    merge_ids: Tensor | None,
) -> None:
    _check_blocks(arguments, tokens, ids)
    arguments.paired("topk_probs", "topk_ids", topk_ids is not None)
    arguments.check("argmax_ids", INT64, (ids.shape[0],))
    if argmax_ids is not None:
        arguments.require("topk_ids", topk_ids is not None, "a tensor with argmax_ids", "none")
    listed = 1
    if topk_ids is not None:
        arguments.check("topk_ids", INT64, (ids.shape[0], None))
        listed = topk_ids.shape[1]
        arguments.require("topk_ids", listed >= 1, "at least one column", list(topk_ids.shape))
        arguments.check("topk_probs", FLOAT32, topk_ids.shape)
    has_merge = merge_valid is not None
    arguments.check("merge_valid", UINT8, tokens.shape)
    arguments.paired("merge_ids", "merge_valid", has_merge)
    arguments.paired("merge_probs", "merge_valid", has_merge)
    arguments.paired("merge_residual", "merge_valid", has_merge)
    if merge_ids is not None:
        arguments.check("merge_ids", INT64, (*tokens.shape, None))
        count = merge_ids.shape[2]
        expected = f"1 to {listed} entries per position (the columns of topk_ids, 1 without)"
        arguments.require("merge_ids", count >= 1, expected, count)
        arguments.require("merge_ids", count <= listed, expected, count)
        arguments.check("merge_probs", FLOAT32, merge_ids.shape)
        arguments.check("merge_residual", FLOAT32, tokens.shape)
    arguments.at_least("mask_token_id", 0)


@fake("accept_gemma")
def _accept_gemma(
    arguments: FakeArguments,
    tokens: Tensor,
    ids: Tensor,
    entropy_bound: float,
    confidence_threshold: float,
) -> None:
    _check_blocks(arguments, tokens, ids)
    arguments.check("argmax_ids", INT64, (ids.shape[0],))
    arguments.require("entropy_bound", not math.isnan(entropy_bound), "a number", entropy_bound)
    arguments.at_least("stability_threshold", 0)
    arguments.require(
        "confidence_threshold",
        not math.isnan(confidence_threshold),
        "a number",
        confidence_threshold,
    )
