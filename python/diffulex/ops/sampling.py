# SPDX-License-Identifier: Apache-2.0
"""Row statistics over the vocabulary, draws, and the enumerations of the acceptance rules.

Symbols: N logits rows, R result rows, V columns.
"""

from __future__ import annotations

import math
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from diffulex.families.base import FilterOrder
from diffulex.ops.fakes import (
    FLOAT32,
    FLOAT64,
    FLOATS,
    INDEX,
    INT32,
    INT64,
    UINT8,
    FakeArguments,
    fake,
)
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
    penalties: Tensor | None = None,
    vocab_limit: int = -1,
    softcap: float = 0.0,
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
        penalty_ids: [R] int64 id whose logit loses the penalty of the row, -1 = none.
        penalties: [R] float32, exactly with `penalty_ids`.
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
        penalties,
        *out,
        workspace,
        vocab_limit=vocab_limit,
        softcap=softcap,
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


_MAX_FORBIDDEN = 8
_MAX_LISTED = 64


def _check_rows(
    arguments: FakeArguments,
    logits: Tensor,
    row_index: Tensor | None,
    forbidden_ids: Tensor | None,
) -> int:
    """Rows of logits, and what is drawn or taken from each; returns their number."""
    arguments.check("logits", FLOATS, (None, None))
    arguments.check("extra_logits", (logits.dtype,), (None, logits.shape[1]))
    arguments.check("row_index", INDEX, (None,))
    num_rows = logits.shape[0] if row_index is None else row_index.shape[0]
    arguments.check("inv_temperature", FLOAT32, (num_rows,))
    arguments.check("uniforms", FLOAT64, (num_rows,))
    arguments.check("ids", INT64, (num_rows,))
    arguments.check("stats", FLOAT32, (num_rows, len(StatsColumn)))
    arguments.at_least("vocab_limit", -1)
    arguments.at_least("softcap", 0)
    arguments.choice("exclusion", 2)
    arguments.check("forbidden_ids", INT64, (None,))
    if forbidden_ids is not None:
        count = forbidden_ids.shape[0]
        expected = f"at most {_MAX_FORBIDDEN} ids"
        arguments.require("forbidden_ids", count <= _MAX_FORBIDDEN, expected, count)
    return num_rows


@fake("token_stats")
def _token_stats(
    arguments: FakeArguments,
    logits: Tensor,
    row_index: Tensor | None,
    inv_temperature: Tensor | None,
    forbidden_ids: Tensor | None,
    penalty_ids: Tensor | None,
    topk_ids: Tensor | None,
    partial: bool,
) -> None:
    num_rows = _check_rows(arguments, logits, row_index, forbidden_ids)
    if inv_temperature is not None:
        arguments.require("inv_temperature", not partial, "none with partial", "a tensor")
    arguments.paired("uniforms", "inv_temperature", inv_temperature is not None)
    arguments.paired("penalties", "penalty_ids", penalty_ids is not None)
    arguments.check("penalty_ids", INT64, (num_rows,))
    arguments.check("penalties", FLOAT32, (num_rows,))
    _check_top_k(arguments, topk_ids, num_rows)
    arguments.at_least("vocab_start", 0)


def _check_top_k(arguments: FakeArguments, topk_ids: Tensor | None, num_rows: int) -> None:
    arguments.paired("topk_probs", "topk_ids", topk_ids is not None)
    arguments.check("topk_ids", INT64, (num_rows, None))
    if topk_ids is not None:
        top_k = topk_ids.shape[1]
        arguments.require("topk_ids", top_k >= 1, f"1 to {_MAX_LISTED} columns", top_k)
        arguments.require("topk_ids", top_k <= _MAX_LISTED, f"1 to {_MAX_LISTED} columns", top_k)
        arguments.check("topk_probs", FLOAT32, topk_ids.shape)


@fake("merge_token_stats")
def _merge_token_stats(arguments: FakeArguments, part_ids: Tensor, topk_ids: Tensor | None) -> None:
    arguments.check("part_ids", INT64, (None, None))
    num_parts, num_rows = part_ids.shape
    arguments.check("part_stats", FLOAT32, (num_parts, num_rows, len(StatsColumn)))
    arguments.check("ids", INT64, (num_rows,))
    arguments.check("stats", FLOAT32, (num_rows, len(StatsColumn)))
    _check_top_k(arguments, topk_ids, num_rows)
    arguments.paired("part_topk_ids", "topk_ids", topk_ids is not None)
    arguments.paired("part_topk_vals", "topk_ids", topk_ids is not None)
    if topk_ids is not None:
        shape = (num_parts, num_rows, topk_ids.shape[1])
        arguments.check("part_topk_ids", INT64, shape)
        arguments.check("part_topk_vals", FLOAT32, shape)


@fake("sample_filtered")
def _sample_filtered(
    arguments: FakeArguments, logits: Tensor, row_index: Tensor | None, forbidden_ids: Tensor | None
) -> None:
    num_rows = _check_rows(arguments, logits, row_index, forbidden_ids)
    arguments.check("top_k", INT32, (num_rows,))
    arguments.check("top_p", FLOAT32, (num_rows,))
    arguments.check("min_p", FLOAT32, (num_rows,))
    arguments.choice("filter_order", 1)
    arguments.choice("confidence_space", 1)


@fake("entropy_bound_mask")
def _entropy_bound_mask(
    arguments: FakeArguments, entropy: Tensor, segments: Tensor, bound: float
) -> None:
    arguments.check("entropy", FLOAT32, (None,))
    arguments.check("segments", INT32, (None,))
    arguments.require("segments", segments.shape[0] >= 1, "at least one offset", 0)
    arguments.check("mask", UINT8, entropy.shape)
    arguments.require("bound", not math.isnan(bound), "a number", bound)


def __getattr__(name: str) -> Any:
    """Former import path of `accept_mask_fill`; its module imports this one."""
    if name not in ("AcceptResult", "accept_mask_fill"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diffulex.ops import acceptance  # noqa: PLC0415

    return getattr(acceptance, name)
