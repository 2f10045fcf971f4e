# SPDX-License-Identifier: Apache-2.0
"""Pure torch twins of the sampling ops, for debugging; they synchronise and materialise rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.ops.sampling import (
    AcceptFlag,
    AcceptResult,
    AcceptRule,
    ConfidenceKind,
    ExclusionMode,
    StatsColumn,
    TokenStats,
)

if TYPE_CHECKING:
    from torch import Tensor


@torch.no_grad()
def token_stats_reference(
    logits: Tensor,
    *,
    row_index: Tensor | None = None,
    inv_temperature: Tensor | None = None,
    uniforms: Tensor | None = None,
    forbidden_ids: Tensor | None = None,
    vocab_limit: int = -1,
    exclusion: int = ExclusionMode.EXCLUDE,
    top_k: int = 0,
) -> TokenStats:
    """Twin of `token_stats` without soft cap, penalty, extra rows and shards; fp64 inside."""
    rows = torch.arange(logits.shape[0]) if row_index is None else row_index.cpu()
    results = [
        _row_stats(
            logits[row],
            0.0 if inv_temperature is None else float(inv_temperature[index]),
            0.5 if uniforms is None else float(uniforms[index]),
            _candidates(logits.shape[1], forbidden_ids, vocab_limit, exclusion),
            renormalize=exclusion == ExclusionMode.RENORMALIZE,
            top_k=top_k,
        )
        if row >= 0
        else (-1, torch.zeros(len(StatsColumn)), [-1] * top_k, [0.0] * top_k)
        for index, row in enumerate(rows.tolist())
    ]
    device = logits.device
    ids = torch.tensor([result[0] for result in results], dtype=torch.int64, device=device)
    stats = torch.zeros(len(results), len(StatsColumn), device=device)
    for index, result in enumerate(results):
        stats[index] = result[1]
    if top_k == 0:
        return TokenStats(ids, stats, None, None)
    topk_ids = torch.tensor([result[2] for result in results], dtype=torch.int64, device=device)
    topk_probs = torch.tensor([result[3] for result in results], device=device)
    return TokenStats(ids, stats, topk_ids.view(-1, top_k), topk_probs.view(-1, top_k))


def _candidates(
    num_columns: int, forbidden_ids: Tensor | None, vocab_limit: int, exclusion: int
) -> Tensor:
    allowed = torch.ones(num_columns, dtype=torch.bool)
    if exclusion != ExclusionMode.OFF:
        if vocab_limit >= 0:
            allowed[vocab_limit:] = False
        for token in [] if forbidden_ids is None else forbidden_ids.tolist():
            if 0 <= token < num_columns:
                allowed[token] = False
    return allowed


def _row_stats(
    raw: Tensor,
    inv_temperature: float,
    uniform: float,
    allowed: Tensor,
    *,
    renormalize: bool,
    top_k: int,
) -> tuple[int, Tensor, list[int], list[float]]:
    stats = torch.zeros(len(StatsColumn))
    values = raw.cpu().to(torch.float32)
    stats[StatsColumn.BAD_COUNT] = float((~torch.isfinite(values)).sum())
    largest = torch.finfo(torch.float32).max
    values = values.nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf).double()
    candidates = allowed & (values > -torch.inf)
    if not candidates.any():
        return -1, stats, [-1] * top_k, [0.0] * top_k
    counted = candidates if renormalize else values > -torch.inf
    at_one = values.masked_fill(~counted, -torch.inf)
    tempered = at_one * inv_temperature if inv_temperature != 0 else at_one
    tempered = torch.where(counted, tempered.clamp(-largest, largest), -torch.inf)
    probs = torch.softmax(tempered, 0)
    ranked = torch.where(candidates, values, -torch.inf)
    # A stable sort keeps the lowest id first among equals.
    order = torch.sort(ranked, descending=True, stable=True).indices
    order = order[candidates[order]]
    chosen = int(order[0])
    if inv_temperature != 0:
        mass = torch.where(candidates, probs, 0.0).cumsum(0)
        above = (candidates & (mass > uniform * mass[-1])).nonzero()
        chosen = int(above[0] if len(above) else candidates.nonzero()[-1])
    stats[StatsColumn.CONFIDENCE] = probs[chosen]
    stats[StatsColumn.MAX_PROB] = probs[order[0]]
    stats[StatsColumn.SECOND_PROB] = probs[order[1]] if len(order) > 1 else 0.0
    stats[StatsColumn.ENTROPY] = -torch.special.xlogy(probs, probs).sum()
    stats[StatsColumn.LOGSUMEXP] = torch.logsumexp(tempered, 0)
    stats[StatsColumn.MAX_LOGIT] = values[order[0]]
    stats[StatsColumn.RAW_CONFIDENCE] = torch.softmax(at_one, 0)[chosen]
    best = order[:top_k].tolist()
    fill = top_k - len(best)
    return chosen, stats, best + [-1] * fill, [float(probs[t]) for t in best] + [0.0] * fill


@torch.no_grad()
def accept_mask_fill_reference(
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
) -> AcceptResult:
    """Twin of `accept_mask_fill`."""
    num_blocks, block_size = tokens.shape
    result = AcceptResult(
        torch.full_like(tokens, -1),
        torch.zeros(tokens.shape, device=tokens.device),
        torch.zeros(num_blocks, dtype=torch.int32, device=tokens.device),
        torch.zeros(num_blocks, dtype=torch.int32, device=tokens.device),
    )
    column = StatsColumn.RAW_CONFIDENCE if raw_confidence else StatsColumn.CONFIDENCE
    steps = denoising_steps or block_size
    for block in range(num_blocks):
        end = block_size if valid_len is None else int(valid_len[block])
        open_set = [
            i
            for i in range(int(editable_start[block]), end)
            if int(tokens[block, i]) == mask_token_id
        ]
        rows = {i: int(row_index[block, i]) for i in open_set}
        skipped = any(row < 0 for row in rows.values())
        usable = [i for i in open_set if rows[i] >= 0 and int(ids[rows[i]]) >= 0]
        bad = any(row >= 0 and int(ids[row]) < 0 for row in rows.values())
        prob = {i: float(stats[rows[i], column]) for i in usable}
        entropy = {i: float(stats[rows[i], StatsColumn.ENTROPY]) for i in usable}
        margin = {
            i: float(stats[rows[i], StatsColumn.MAX_PROB] - stats[rows[i], StatsColumn.SECOND_PROB])
            for i in usable
        }
        rank = {
            ConfidenceKind.MAX_PROB: prob,
            ConfidenceKind.MARGIN: margin,
            ConfidenceKind.NEG_ENTROPY: {i: -value for i, value in entropy.items()},
        }[ConfidenceKind(confidence_kind)]
        threshold = float(accept_threshold[block])
        strict = rule not in (AcceptRule.THRESHOLD_NON_STRICT, AcceptRule.LEFTMOST_PREFIX)
        passing = [
            i for i in usable if prob[i] > threshold or (not strict and prob[i] == threshold)
        ]
        step = int(open_steps[block])
        count = _scheduled_count(block_size, steps, step)
        by_rank = sorted(usable, key=lambda i: (-rank[i], i))
        if rule == AcceptRule.LEFTMOST_PREFIX:
            accepted = _prefix(open_set, usable, passing)
        elif rule == AcceptRule.HIERARCHY:
            confident = [i for i in usable if prob[i] > low_threshold]
            accepted = _hierarchy(open_set, passing, confident, by_rank)
        else:
            accepted = _accepted(
                AcceptRule(rule),
                usable,
                passing,
                by_rank,
                prob,
                entropy,
                count,
                factor,
                entropy_bound,
            )
        if force_accept_last_step and step >= steps - 1:
            accepted = usable
        if not int(gate[block]):
            accepted = [i for i in accepted if i in passing]
        if skipped:
            accepted = []
        # A mask over a mask changes nothing.
        accepted = [i for i in accepted if int(ids[rows[i]]) != mask_token_id]
        for i in usable:
            result.confidence[block, i] = prob[i]
        for i in accepted:
            result.write_ids[block, i] = ids[rows[i]]
        left = len(open_set) - len(accepted)
        result.masks_left[block] = left
        flags = AcceptFlag(0)
        flags |= AcceptFlag.COMMITTABLE if left == 0 and not skipped else AcceptFlag(0)
        flags |= AcceptFlag.PROGRESSED if accepted else AcceptFlag.SAME_AS_PREVIOUS
        if all(i in passing for i in open_set):
            flags |= AcceptFlag.ALL_CONFIDENT
        flags |= AcceptFlag.BAD_LOGITS if bad else AcceptFlag(0)
        flags |= AcceptFlag.SKIPPED if skipped else AcceptFlag(0)
        result.flags[block] = int(flags)
    return result


def _scheduled_count(block_size: int, steps: int, step: int) -> int:
    """k_s: how many positions step s of S accepts."""
    if step >= steps:
        return max(1, _scheduled_count(block_size, steps, steps - 1))
    return block_size // steps + (1 if step < block_size % steps else 0)


def _prefix(open_set: list[int], usable: list[int], passing: list[int]) -> list[int]:
    """The leading open positions that pass, the first one in any case if it can be filled."""
    taken = []
    for i in open_set:
        if i not in passing:
            break
        taken.append(i)
    return taken or [i for i in open_set[:1] if i in usable]


def _hierarchy(
    open_set: list[int], passing: list[int], confident: list[int], by_rank: list[int]
) -> list[int]:
    """All that pass, the best of each run of masks if it is confident, and the best of all."""
    taken = {*passing, *by_rank[:1]}
    run_of = {i: i - place for place, i in enumerate(open_set)}  # constant along a run
    for run in set(run_of.values()):
        best = [i for i in by_rank if run_of[i] == run][:1]
        taken.update(i for i in best if i in confident)
    return sorted(taken)


def _accepted(
    rule: AcceptRule,
    usable: list[int],
    passing: list[int],
    by_rank: list[int],
    prob: dict[int, float],
    entropy: dict[int, float],
    count: int,
    factor: float,
    entropy_bound: float,
) -> list[int]:
    """Positions the rule accepts under an open gate."""
    if rule in (AcceptRule.THRESHOLD, AcceptRule.THRESHOLD_NON_STRICT):
        return passing or by_rank[:1]
    if rule == AcceptRule.STATIC:
        return by_rank[:count]
    if rule == AcceptRule.DYNAMIC:
        return passing if len(passing) >= count else by_rank[:count]
    if rule == AcceptRule.SEQUENTIAL:
        return usable[:count]
    if rule == AcceptRule.FACTOR:
        by_prob = sorted(usable, key=lambda i: (-prob[i], i))
        fitting = [n for n, i in enumerate(by_prob, 1) if (n + 1) * (1 - prob[i]) < factor]
        return by_prob[: max(1, *fitting) if fitting else 1]
    total, accepted = 0.0, list[int]()
    for i in sorted(usable, key=lambda i: (entropy[i], i)):
        if accepted and total > entropy_bound:
            break
        accepted.append(i)
        total += entropy[i]
    return accepted
