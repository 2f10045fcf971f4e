# SPDX-License-Identifier: Apache-2.0
"""References of the acceptance ops that rewrite positions, in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.ops.acceptance import DmaxResult, EditResult, GemmaResult
from diffulex.ops.sampling import AcceptFlag, ConfidenceKind, StatsColumn

if TYPE_CHECKING:
    from torch import Tensor

_DMAX_CONFIDENT = float(torch.tensor(0.9))


class _Block(NamedTuple):
    """One block: its tokens, the positions that may change, and the proposals of their rows."""

    tokens: list[int]
    active: list[int]
    rows: dict[int, int]
    """Row of each active position that has one."""
    proposals: dict[int, int]
    """Proposal of each active position that has one."""

    @property
    def skipped(self) -> bool:
        return len(self.rows) < len(self.active)

    @property
    def bad(self) -> bool:
        return len(self.proposals) < len(self.rows)


def _block(
    block: int,
    tokens: Tensor,
    row_index: Tensor,
    editable_start: Tensor | None,
    valid_len: Tensor | None,
    ids: Tensor,
) -> _Block:
    start = 0 if editable_start is None else int(editable_start[block])
    end = tokens.shape[1] if valid_len is None else int(valid_len[block])
    active = list(range(start, end))
    rows = {i: int(row_index[block, i]) for i in active if int(row_index[block, i]) >= 0}
    proposals = {i: int(ids[row]) for i, row in rows.items() if int(ids[row]) >= 0}
    return _Block(tokens[block].tolist(), active, rows, proposals)


def _ratio(content: _Block, decoded: list[int]) -> float:
    same = sum(content.proposals.get(i) == content.tokens[i] for i in decoded)
    return same / len(decoded) if decoded else 1.0


def _flag(condition: bool, flag: AcceptFlag) -> AcceptFlag:
    return flag if condition else AcceptFlag(0)


@torch.no_grad()
def accept_edit_reference(
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
) -> EditResult:
    """Reference of `accept_edit`."""
    num_blocks, block_size = tokens.shape
    result = EditResult(
        torch.full_like(tokens, -1),
        torch.zeros(tokens.shape, device=tokens.device),
        torch.zeros(num_blocks, dtype=torch.int32, device=tokens.device),
        torch.zeros(num_blocks, dtype=torch.int32, device=tokens.device),
        torch.zeros(num_blocks, device=tokens.device),
    )
    column = StatsColumn.RAW_CONFIDENCE if raw_confidence else StatsColumn.CONFIDENCE
    for block in range(num_blocks):
        content = _block(block, tokens, row_index, editable_start, valid_len, ids)
        before, x = content.tokens, content.proposals
        prob = {i: float(stats[content.rows[i], column]) for i in x}
        rank = dict(prob)
        if confidence_kind == ConfidenceKind.MARGIN:
            rank = {i: float(stats[content.rows[i], 1] - stats[content.rows[i], 2]) for i in x}
        elif confidence_kind == ConfidenceKind.NEG_ENTROPY:
            rank = {i: -float(stats[content.rows[i], StatsColumn.ENTROPY]) for i in x}
        opened = [i for i in content.active if before[i] == mask_token_id]
        decoded = [i for i in content.active if before[i] != mask_token_id]
        is_open = bool(gate[block])
        tau, tau_edit = float(accept_threshold[block]), float(edit_threshold[block])
        # Masks to tokens, tokens to tokens.
        above = [i for i in opened if i in x and prob[i] > tau]
        m2t = list(above)
        if not above and is_open:
            m2t = sorted((i for i in opened if i in x), key=lambda i: (-rank[i], i))[:1]
        t2t = [i for i in decoded if i in x and x[i] != before[i] and prob[i] > tau_edit]
        accepted = [] if content.skipped else m2t + t2t
        # Termination.
        steps = int(open_steps[block]) + is_open
        limit = int(max_post_edit_steps[block])
        post = int(post_edit_steps[block]) + (not opened)
        timed_out = not content.skipped and steps >= block_size + limit
        over = not opened and post > limit
        writes = accepted
        if timed_out:
            writes = [i for i in opened if i in x] + t2t
        elif over:
            writes = []
        changed = {i: x[i] for i in writes if x[i] != before[i]}
        after = [changed.get(i, before[i]) for i in range(block_size)]
        left = sum(after[i] == mask_token_id for i in content.active)
        settled = not accepted or timed_out or limit == 0 or (not opened and post >= limit)
        for i, token in changed.items():
            result.write_ids[block, i] = token
        for i in x:
            result.confidence[block, i] = prob[i]
        result.masks_left[block] = left
        result.same_token_ratio[block] = _ratio(content, decoded)
        result.flags[block] = int(
            _flag(left == 0 and settled and not content.skipped, AcceptFlag.COMMITTABLE)
            | _flag(not changed, AcceptFlag.SAME_AS_PREVIOUS)
            | _flag(
                len(above) == len(opened) and not content.skipped and not content.bad,
                AcceptFlag.ALL_CONFIDENT,
            )
            | _flag(any(i in changed for i in opened), AcceptFlag.PROGRESSED)
            | _flag(timed_out, AcceptFlag.TIMED_OUT)
            | _flag(content.bad, AcceptFlag.BAD_LOGITS)
            | _flag(content.skipped, AcceptFlag.SKIPPED)
        )
    return result


def _prefix(opened: list[int], passing: set[int], *, gate: bool) -> set[int]:
    """The leading open positions that pass, the first one in any case if the gate is open."""
    taken = set[int]()
    for i in opened:
        if i not in passing:
            break
        taken.add(i)
    if not taken and gate:
        taken.update(opened[:1])
    return taken


@torch.no_grad()
def accept_dmax_reference(
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
) -> DmaxResult:
    """Reference of `accept_dmax`."""
    num_blocks, block_size = tokens.shape
    device, shape = tokens.device, (*tokens.shape, merge_top_k)
    result = DmaxResult(
        torch.full_like(tokens, -1),
        torch.zeros(tokens.shape, device=device),
        torch.zeros(num_blocks, dtype=torch.int32, device=device),
        torch.zeros(num_blocks, dtype=torch.int32, device=device),
        torch.zeros(num_blocks, device=device),
        torch.zeros(tokens.shape, dtype=torch.uint8, device=device) if merge_top_k else None,
        torch.full(shape, mask_token_id, dtype=torch.int64, device=device) if merge_top_k else None,
        torch.zeros(shape, device=device) if merge_top_k else None,
        torch.zeros(tokens.shape, device=device) if merge_top_k else None,
    )
    for block in range(num_blocks):
        content = _block(block, tokens, row_index, editable_start, valid_len, ids)
        before, x, rows = content.tokens, content.proposals, content.rows
        opened = [i for i in content.active if before[i] == mask_token_id]
        decoded = [i for i in content.active if before[i] != mask_token_id]
        prob = {i: float(stats[rows[i], StatsColumn.RAW_CONFIDENCE]) for i in x}
        top = {i: float(stats[rows[i], StatsColumn.MAX_PROB]) for i in x}
        if topk_probs is not None:
            top = {i: float(topk_probs[rows[i], 0]) for i in x}
        if fast_path:
            certain = {i: 1.0 for i in decoded if i in x}
            prob, top = prob | certain, top | certain
        is_open = bool(gate[block])
        timed_out = not content.skipped and int(open_steps[block]) + is_open >= block_size
        tau = float(accept_threshold[block])
        passing = {i for i in opened if i in x and prob[i] >= tau}
        taken = set(opened) if timed_out else _prefix(opened, passing, gate=is_open)
        writes = [] if content.skipped else [i for i in x if i in taken or i in decoded]
        changed = {i: x[i] for i in writes if x[i] != before[i]}
        after = [changed.get(i, before[i]) for i in range(block_size)]
        left = sum(after[i] == mask_token_id for i in content.active)
        all_confident = (
            not content.skipped
            and not content.bad
            and all(top[i] >= _DMAX_CONFIDENT for i in content.active)
        )
        settled = all_confident or not changed or timed_out
        for i, token in changed.items():
            result.write_ids[block, i] = token
        for i in x:
            result.confidence[block, i] = prob[i]
        result.masks_left[block] = left
        result.same_token_ratio[block] = _ratio(content, decoded)
        result.flags[block] = int(
            _flag(left == 0 and settled and not content.skipped, AcceptFlag.COMMITTABLE)
            | _flag(not changed, AcceptFlag.SAME_AS_PREVIOUS)
            | _flag(all_confident, AcceptFlag.ALL_CONFIDENT)
            | _flag(any(i in changed for i in opened), AcceptFlag.PROGRESSED)
            | _flag(timed_out, AcceptFlag.TIMED_OUT)
            | _flag(content.bad, AcceptFlag.BAD_LOGITS)
            | _flag(content.skipped, AcceptFlag.SKIPPED)
        )
        described = [i for i in x if after[i] != mask_token_id and not content.skipped]
        for i in described if merge_top_k else []:
            entries = [(x[i], top[i])]
            if fast_path and i in decoded:
                entries = [(after[i], 1.0)]
            elif topk_ids is not None and topk_probs is not None:
                entries = list(zip(topk_ids[rows[i]].tolist(), topk_probs[rows[i]].tolist()))
                entries = [entry for entry in entries if entry[0] >= 0][:merge_top_k]
                if argmax_ids is not None:
                    entries[0] = (int(argmax_ids[rows[i]]), entries[0][1])
            _write_descriptor(result, block, i, entries)
    return result


def _write_descriptor(
    result: DmaxResult, block: int, position: int, entries: list[tuple[int, float]]
) -> None:
    assert result.merge_valid is not None
    assert result.merge_ids is not None
    assert result.merge_probs is not None
    assert result.merge_residual is not None
    result.merge_valid[block, position] = 1
    for k, (token, prob) in enumerate(entries):
        result.merge_ids[block, position, k] = token
        result.merge_probs[block, position, k] = prob
    total = sum(prob for _, prob in entries)
    result.merge_residual[block, position] = max(0.0, 1.0 - total)


@torch.no_grad()
def accept_gemma_reference(
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
) -> GemmaResult:
    """Reference of `accept_gemma`."""
    result = GemmaResult(
        torch.full_like(tokens, -1),
        torch.full_like(tokens, -1),
        torch.zeros(tokens.shape, device=tokens.device),
        torch.zeros(tokens.shape[0], dtype=torch.int32, device=tokens.device),
    )
    # The thresholds are fp32 like the statistics.
    bound, kappa = torch.tensor([entropy_bound, confidence_threshold]).tolist()
    for block in range(tokens.shape[0]):
        content = _block(block, tokens, row_index, None, valid_len, ids)
        rows, size = content.rows, len(content.active)
        argmax = {i: int(argmax_ids[row]) for i, row in rows.items()}
        entropy = {i: float(stats[row, StatsColumn.ENTROPY]) for i, row in rows.items()}
        for i, row in rows.items():
            result.argmax[block, i] = argmax[i]
            result.confidence[block, i] = stats[row, StatsColumn.CONFIDENCE]
        bad = content.bad or any(token < 0 for token in argmax.values())
        usable = not bad and not content.skipped
        confident = usable and size > 0 and sum(entropy.values()) / size < kappa
        run = int(stable_run[block])
        equal = all(argmax[i] == int(prev_argmax[block, i]) for i in argmax)
        run = run + 1 if run >= 0 and equal else 0
        last = size > 0 and int(steps_left[block]) == 1
        converged = usable and (last or (confident and run >= stability_threshold))
        kept, total = set[int](), 0.0
        for rank, i in enumerate(sorted(entropy, key=lambda i: (entropy[i], i))):
            if rank == 0 or total <= bound:
                kept.add(i)
            total += entropy[i]
        after = {}
        for i in content.active if usable else []:
            after[i] = content.proposals[i] if i in kept else int(renoise_ids[block, i])
            if converged:
                after[i] = argmax[i]
                result.confidence[block, i] = stats[rows[i], StatsColumn.MAX_PROB]
            result.write_ids[block, i] = after[i]
        same = all(after[i] == content.tokens[i] for i in after)
        result.flags[block] = int(
            _flag(same, AcceptFlag.SAME_AS_PREVIOUS)
            | _flag(confident, AcceptFlag.ALL_CONFIDENT)
            | _flag(bad, AcceptFlag.BAD_LOGITS)
            | _flag(content.skipped, AcceptFlag.SKIPPED)
            | _flag(converged, AcceptFlag.CONVERGED)
        )
    return result
