# SPDX-License-Identifier: Apache-2.0
"""Per-request looks at logits rows: log-probabilities, and stop ids that must not be sampled yet.

Both need the plan and the output of the step on the host, so they cost a wait per step; they are
there while a request asks for them and at no other time. Writing T for the positions of a block
that a step decides:

    before_sampling   stop ids of rows that predict a position below min_tokens are pushed down
    sampler           decides T
    after_sampling    rows of T -> log-softmax at temperature 1 -> the record of each position
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from diffulex.distributed.executor import TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.distributed.executor import Watch
    from diffulex.distributed.records import SharedHead
    from diffulex_ext import _core

__all__ = ["FollowedRows", "RowWatch"]

# Far below every logit, and finite: an infinite one makes entropies undefined.
_NEVER = -3e4


@dataclass(slots=True)
class _Watched:
    prompt_len: int
    num_top: int | None  # None: no log-probabilities wanted
    min_end: int  # positions below it take none of the stop ids
    stop_ids: Tensor
    num_steps: int = 0
    records: dict[int, TokenLogprob] = field(default_factory=dict)
    #: What the saved row of the request has really got at the stop ids.
    saved_values: Tensor | None = None


class _Decided(NamedTuple):
    req_id: int
    position: int
    token: int
    row: int  # logits row of the step; past them: the saved row of a slot
    confidence: float


class FollowedRows:
    """In place of `RowWatch` on the ranks that hand their columns to the first and decide as it does."""

    num_requests = 0

    def __init__(self, head: SharedHead) -> None:
        self.head = head
        #: Whether the first rank looks at the rows of this step.
        self.is_active = False

    def before_sampling(self, plan: object, logits: Tensor) -> Tensor:
        del plan
        logits = self.head.whole_rows(logits)
        self.head.send_first(logits)
        return logits

    def after_sampling(self, plan: object, output: object) -> None:
        pass


class RowWatch:
    """Watches the requests that ask for it. Belongs to the thread that steps, `add` to any."""

    def __init__(self, config: Config, sampler: object, head: SharedHead | None = None) -> None:
        self._head = head
        self._mask_token_id = config.model.mask_token_id
        self._softcap = float(getattr(config.model.spec, "final_logit_softcap", None) or 0.0)
        self._device = torch.device(config.model.device)
        self._sampler = sampler
        self._watched: dict[int, _Watched] = {}
        self._logits: Tensor | None = None
        self._pushed: list[tuple[Tensor, Tensor, Tensor]] = []

    @property
    def is_active(self) -> bool:
        """Whether a step must call it. Steps that do need the plan and the logits at hand."""
        return bool(self._watched)

    @property
    def num_requests(self) -> int:
        """Requests it watches."""
        return len(self._watched)

    @property
    def head(self) -> SharedHead | None:
        """The exchange of ranks that have a part of the columns each."""
        return self._head

    def add(self, req_id: int, watch: Watch) -> None:
        """Watches a request until `remove`."""
        ids = torch.tensor(sorted(set(watch.stop_ids)), dtype=torch.int64, device=self._device)
        min_end = watch.prompt_len + watch.min_tokens if ids.numel() else 0
        self._watched[req_id] = _Watched(watch.prompt_len, watch.num_top, min_end, ids)

    def remove(self, req_id: int) -> None:
        """Forgets a request; unknown ones are ignored."""
        self._watched.pop(req_id, None)

    def logprobs(self, req_id: int, begin: int, count: int) -> tuple[TokenLogprob, ...]:
        """Records of `count` generated tokens from index `begin` on; empty for unwatched requests."""
        watched = self._watched.get(req_id)
        if watched is None or watched.num_top is None:
            return ()
        first = watched.prompt_len + begin
        return tuple(watched.records[position] for position in range(first, first + count))

    def before_sampling(self, plan: _core.StepPlan, logits: Tensor) -> Tensor:
        """Keeps the logits of the step for `after_sampling` and pushes stop ids down.

        Returns:
            What the sampler takes: whole rows, of which this rank may have some columns.
        """
        if self._head is not None:
            logits = self._head.whole_rows(logits)
        self._look_at(plan, logits)
        if self._head is not None:
            self._head.send_first(logits)
        return logits

    def _look_at(self, plan: _core.StepPlan, logits: Tensor) -> None:
        self._logits, self._pushed = logits, []
        for index, req_id in enumerate(plan.req_ids):
            watched = self._watched.get(int(req_id))
            if watched is not None and watched.min_end > watched.prompt_len:
                self._push_down(plan, logits, index, watched)

    def _push_down(
        self, plan: _core.StepPlan, logits: Tensor, index: int, watched: _Watched
    ) -> None:
        begin, end = plan.cu_seqlens_q[index : index + 2]
        rows = plan.logits_rows
        is_shifted = plan.logits_source.size > 0
        predicted = plan.positions[rows] + (1 if is_shifted else 0)
        if is_shifted:
            # The row of a position that has no row before it stands for the position itself.
            predicted = predicted - (plan.logits_source >= 0)
        is_early = (rows >= begin) & (rows < end) & (predicted < watched.min_end)
        early = np.flatnonzero(is_early)
        if early.size == 0:
            return
        at = torch.as_tensor(early, device=self._device)[:, None], watched.stop_ids[None]
        self._pushed.append((*at, logits[at]))
        saved = int(plan.last_row_index[index]) if is_shifted else -1
        if saved >= 0:
            watched.saved_values = logits[saved, watched.stop_ids] if is_early[saved] else None
        logits[at] = _NEVER

    def after_sampling(self, plan: _core.StepPlan, output: _core.SamplerOutput) -> None:
        """Records the log-probabilities of what the sampler decided."""
        logits, self._logits = self._logits, None
        for req_id in plan.req_ids:
            watched = self._watched.get(int(req_id))
            if watched is not None:
                watched.num_steps += 1
        if logits is None:
            return
        for rows, ids, values in self._pushed:
            logits[rows, ids] = values
        self._pushed = []
        decided = [*self._block_writes(plan, output), *self._seeds(plan, output)]
        if decided:
            self._record(decided, self._rows_of(plan, logits, decided))

    def _block_writes(self, plan: _core.StepPlan, output: _core.SamplerOutput) -> list[_Decided]:
        decided = []
        is_canvas = output.canvas_argmax.size > 0
        written = output.canvas_argmax if is_canvas else output.write_ids
        for blk in range(plan.num_blocks):
            req_id = int(plan.req_ids[plan.blk_req[blk]])
            watched = self._watched.get(req_id)
            if watched is None or watched.num_top is None:
                continue
            start = int(plan.blk_start[blk])
            for rel in np.flatnonzero(written[blk] >= 0):
                position, token = start + int(rel), int(written[blk, rel])
                if position < watched.prompt_len:
                    continue
                # A token that is written over itself has had its final value before; every step of
                # a canvas decides all of it anew.
                was_open = is_canvas or int(plan.blk_tokens[blk, rel]) == self._mask_token_id
                record = watched.records.get(position)
                if was_open or record is None or record.token_id != token:
                    row = int(plan.blk_row_index[blk, rel])
                    confidence = float(output.confidence[blk, rel])
                    decided.append(_Decided(req_id, position, token, row, confidence))
        return decided

    def _seeds(self, plan: _core.StepPlan, output: _core.SamplerOutput) -> list[_Decided]:
        """First tokens of fast_dllm_v2 blocks, which the last row of the block before decides."""
        decided = []
        for index in range(min(plan.num_reqs, plan.seed_row.size)):
            req_id, row = int(plan.req_ids[index]), int(plan.seed_row[index])
            token = int(output.pending_next_token[index])
            watched = self._watched.get(req_id)
            if token < 0 or row < 0 or watched is None or watched.num_top is None:
                continue
            position = int(plan.positions[plan.logits_rows[row]]) + 1
            if position >= watched.prompt_len:
                decided.append(_Decided(req_id, position, token, row, 0.0))
        return decided

    def _rows_of(self, plan: _core.StepPlan, logits: Tensor, decided: list[_Decided]) -> Tensor:
        """float32 logits [len(decided), V] that the sampler used, as the model produced them."""
        num_rows = logits.size(0)
        slots = np.full(len(decided), -1)
        for i, item in enumerate(decided):
            if item.row >= num_rows:
                slots[i] = item.row - plan.saved_row(0)
            elif plan.logits_source.size > 0:
                slots[i] = plan.logits_source[item.row]
        rows = torch.empty(len(decided), logits.size(1), device=self._device)
        is_own = slots < 0
        own = [item.row for item, is_here in zip(decided, is_own, strict=True) if is_here]
        if own:
            here = torch.as_tensor(own, device=self._device)
            rows[torch.as_tensor(is_own, device=self._device)] = logits[here].float()
        for index in np.flatnonzero(~is_own).tolist():
            rows[index] = self._saved_row(decided[index].req_id, int(slots[index]))
        return self._softcap * torch.tanh(rows / self._softcap) if self._softcap > 0 else rows

    def _saved_row(self, req_id: int, slot: int) -> Tensor:
        saved: Tensor | None = getattr(getattr(self._sampler, "rows", None), "saved_logits", None)
        if saved is None:
            raise RuntimeError("RowWatch: expected saved logits of shifted rows, got none")
        watched = self._watched[req_id]
        row = saved[slot].float()
        if watched.saved_values is not None:
            row[watched.stop_ids] = watched.saved_values.float()
        return row

    def _record(self, decided: list[_Decided], rows: Tensor) -> None:
        logprobs = torch.log_softmax(rows, dim=-1)
        tokens = torch.tensor([item.token for item in decided], device=self._device)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0].cpu().tolist()
        num_top = max(self._watched[item.req_id].num_top or 0 for item in decided)
        values, ids = logprobs.topk(num_top, dim=-1)
        top_values, top_ids = values.cpu().tolist(), ids.cpu().tolist()
        for i, item in enumerate(decided):
            watched = self._watched[item.req_id]
            count = watched.num_top or 0
            top = tuple(zip(top_ids[i][:count], top_values[i][:count], strict=True))
            watched.records[item.position] = TokenLogprob(
                item.token, chosen[i], top, watched.num_steps, item.confidence
            )
