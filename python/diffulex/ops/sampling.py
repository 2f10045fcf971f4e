# SPDX-License-Identifier: Apache-2.0
"""Row statistics over the vocabulary and the acceptance rules of mask-filling samplers.

Symbols: N logits rows, R result rows, V columns, Nb blocks of B positions.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.ops.workspace import empty_workspace, token_stats_workspace_bytes

if TYPE_CHECKING:
    from torch import Tensor


class ExclusionMode(IntEnum):
    """What a forbidden id (mask token, ids at or past the vocabulary limit) still counts for."""

    EXCLUDE = 0
    RENORMALIZE = 1
    OFF = 2


class StatsColumn(IntEnum):
    """Columns of `TokenStats.stats`, all at the temperature of the row but RAW_CONFIDENCE."""

    CONFIDENCE = 0
    MAX_PROB = 1
    SECOND_PROB = 2
    ENTROPY = 3
    LOGSUMEXP = 4
    MAX_LOGIT = 5
    RAW_CONFIDENCE = 6
    BAD_COUNT = 7


class FilterOrder(IntEnum):
    """Order of the filters of `sample_filtered`; each renormalises before the next."""

    TOP_P_FIRST = 0
    """top_p, min_p, top_k."""
    TOP_K_FIRST = 1
    """top_k, min_p, top_p."""


class ConfidenceSpace(IntEnum):
    """Which distribution the columns of `sample_filtered` describe."""

    PROCESSED = 0
    """After temperature and filters."""
    TEMPERED = 1
    """After the temperature, before the filters."""


class AcceptRule(IntEnum):
    """Which open positions a step accepts."""

    THRESHOLD = 0
    THRESHOLD_NON_STRICT = 1
    STATIC = 2
    DYNAMIC = 3
    SEQUENTIAL = 4
    FACTOR = 5
    ENTROPY_BOUND = 6
    LEFTMOST_PREFIX = 7
    HIERARCHY = 8


class ConfidenceKind(IntEnum):
    """What ranks positions; thresholds always compare the probability of the proposal."""

    MAX_PROB = 0
    MARGIN = 1
    NEG_ENTROPY = 2


class AcceptFlag(IntFlag):
    """Bits of the flags of the acceptance ops."""

    COMMITTABLE = 1
    SAME_AS_PREVIOUS = 2
    ALL_CONFIDENT = 4
    PROGRESSED = 8
    TIMED_OUT = 16
    BAD_LOGITS = 32
    SKIPPED = 64
    CONVERGED = 128


class TokenStats(NamedTuple):
    """Result of `token_stats` and `merge_token_stats`."""

    ids: Tensor
    """[R] int64, -1 where no candidate is finite."""
    stats: Tensor
    """[R, 8] float32, see StatsColumn."""
    topk_ids: Tensor | None
    """[R, Kt] int64, descending; None without top-k."""
    topk_probs: Tensor | None
    """[R, Kt] float32; None without top-k."""


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


def _empty_stats(num_rows: int, top_k: int, device: torch.device) -> TokenStats:
    return TokenStats(
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, len(StatsColumn), dtype=torch.float32, device=device),
        torch.empty(num_rows, top_k, dtype=torch.int64, device=device) if top_k else None,
        torch.empty(num_rows, top_k, dtype=torch.float32, device=device) if top_k else None,
    )


@torch.no_grad()
def token_stats(
    logits: Tensor,
    *,
    extra_logits: Tensor | None = None,
    row_index: Tensor | None = None,
    inv_temperature: Tensor | None = None,
    uniforms: Tensor | None = None,
    forbidden_ids: Tensor | None = None,
    penalty_ids: Tensor | None = None,
    vocab_limit: int = -1,
    softcap: float = 0.0,
    penalty: float = 0.0,
    exclusion: int = ExclusionMode.EXCLUDE,
    vocab_start: int = 0,
    partial: bool = False,
    top_k: int = 0,
    out: TokenStats | None = None,
    workspace: Tensor | None = None,
) -> TokenStats:
    """Chosen id and statistics of each row in one pass over the vocabulary.

    Args:
        extra_logits: [M, V] further rows, addressed by `row_index` >= N.
        row_index: [R] source rows, -1 = empty row; None = every row in order.
        inv_temperature: [R] float32, 0 = greedy; None = all greedy.
        uniforms: [R] float64 in (0, 1), the random numbers of the draws.
        forbidden_ids: [at most 8] int64 ids that cannot be chosen, negative ones ignored.
        penalty_ids: [R] int64 id whose logit loses `penalty`, -1 = none.
        partial: write records for `merge_token_stats`; `vocab_start` is the id of column 0.
        out: tensors to fill; None allocates them, with `top_k` columns if that is not 0.
    """
    num_rows = logits.shape[0] if row_index is None else row_index.shape[0]
    if out is None:
        out = _empty_stats(num_rows, top_k, logits.device)
    if workspace is None:
        columns = 0 if out.topk_ids is None else out.topk_ids.shape[1]
        needed = token_stats_workspace_bytes(num_rows, logits.shape[1], columns, logits.device.type)
        workspace = empty_workspace(needed, logits.device)
    torch.ops.diffulex.token_stats(
        logits,
        extra_logits,
        row_index,
        inv_temperature,
        uniforms,
        forbidden_ids,
        penalty_ids,
        *out,
        workspace,
        vocab_limit=vocab_limit,
        softcap=softcap,
        penalty=penalty,
        exclusion=int(exclusion),
        vocab_start=vocab_start,
        partial=partial,
    )
    return out


@torch.no_grad()
def sample_filtered(
    logits: Tensor,
    inv_temperature: Tensor,
    uniforms: Tensor,
    out: TokenStats,
    *,
    extra_logits: Tensor | None = None,
    row_index: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    forbidden_ids: Tensor | None = None,
    vocab_limit: int = -1,
    softcap: float = 0.0,
    exclusion: int = ExclusionMode.EXCLUDE,
    filter_order: int = FilterOrder.TOP_P_FIRST,
    confidence_space: int = ConfidenceSpace.PROCESSED,
) -> TokenStats:
    """Draws the rows that have a temperature and a filter; leaves the other rows of `out` alone.

    The filters see the whole distribution, forbidden ids included unless `exclusion` removes them;
    the draw is by inverse CDF in id order over the candidates they keep, or the most likely
    candidate where they keep none. Probabilities are those before the restriction to candidates.

    Args:
        inv_temperature: [R] float32, 0 = greedy.
        uniforms: [R] float64 in (0, 1), the random numbers of the draws.
        out: ids and stats of `token_stats` for the same rows; their active rows are replaced.
        extra_logits: [M, V] further rows, addressed by `row_index` >= N.
        row_index: [R] source rows, -1 = empty row; None = every row in order.
        top_k: [R] int32, <= 0 = off; ties with the k-th value stay.
        top_p: [R] float32, >= 1 = off, <= 0 keeps one id.
        min_p: [R] float32 share of the largest probability, <= 0 = off.
        forbidden_ids: [at most 8] int64 ids that cannot be chosen, negative ones ignored.
    """
    torch.ops.diffulex.sample_filtered(
        logits,
        extra_logits,
        row_index,
        inv_temperature,
        uniforms,
        top_k,
        top_p,
        min_p,
        forbidden_ids,
        out.ids,
        out.stats,
        None,
        vocab_limit=vocab_limit,
        softcap=softcap,
        exclusion=int(exclusion),
        filter_order=int(filter_order),
        confidence_space=int(confidence_space),
    )
    return out


@torch.no_grad()
def entropy_bound_mask(
    entropy: Tensor, segments: Tensor, *, bound: float, out: Tensor | None = None
) -> Tensor:
    """Which rows of each segment the entropy bound accepts, as uint8 [R].

    Args:
        entropy: [R] float32.
        segments: [S + 1] int32, first row of each segment of at most 1024 rows, starting at 0.
        bound: rows are accepted in ascending order of entropy while the sum of the entropies before
            is at most this, the first one always; negative accepts all.
        out: tensor to fill; None allocates it with zeros.
    """
    if out is None:
        out = torch.zeros(entropy.shape, dtype=torch.uint8, device=entropy.device)
    torch.ops.diffulex.entropy_bound_mask(entropy, segments, out, bound=bound)
    return out


@torch.no_grad()
def merge_token_stats(
    part_ids: Tensor,
    part_stats: Tensor,
    part_topk_ids: Tensor | None = None,
    part_topk_vals: Tensor | None = None,
    *,
    out: TokenStats | None = None,
) -> TokenStats:
    """Merges the partial records [P, R, ...] of P vocabulary shards, in shard order."""
    if out is None:
        top_k = 0 if part_topk_ids is None else part_topk_ids.shape[2]
        out = _empty_stats(part_ids.shape[1], top_k, part_ids.device)
    torch.ops.diffulex.merge_token_stats(part_ids, part_stats, part_topk_ids, part_topk_vals, *out)
    return out


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
