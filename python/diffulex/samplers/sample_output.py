# SPDX-License-Identifier: Apache-2.0
"""What the sampler decided in one step, by request and block: a view for tests and tools.

Built from the arrays of a completed step, outside the decode loop.

Symbols: Nb blocks of B positions, K merged candidates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from diffulex_ext import _core

__all__ = ["SampleOutput"]

_COMMITTABLE, _SAME_AS_PREVIOUS, _ALL_CONFIDENT, _CONVERGED = 1, 2, 4, 128

_Lists = dict[str, dict[str, list[Any]]]


@dataclass(slots=True)
class SampleOutput:
    """Decisions of one step. Keys are ``str(req_id)``, then ``str(block_id)`` where there is one.

    Every scheduled request is in every map, with an empty dict if nothing happened. Lists without
    another order follow the block's open positions, `mask_token_rel_ids_map`.

    Attributes:
        true_local_ids_map: accepted positions, relative to the block.
        accepted_ids_map: the same as indices into the open positions.
        sampled_tokens_map: proposal of every open position; -1 = not among the arrays of the step.
        mask_token_rel_ids_map: positions that were open before the step, relative to the block.
        confidence_map: what the positions are ranked by.
        initial_confidence_map: probability of the proposals, which thresholds compare.
        block_writes_map: position in the block -> token, of changed positions.
        block_state_map: `committable`, `same_as_previous`, `same_token_ratio`, `all_confident`;
            `valid_commit_len` of canvases that converged.
        token_merge_map: absolute position -> `topk_ids`, `topk_probs` and `residual_prob` of its
            descriptor, or None, for all positions of the blocks of a merging strategy.
    """

    true_local_ids_map: _Lists = field(default_factory=dict)
    accepted_ids_map: _Lists = field(default_factory=dict)
    sampled_tokens_map: _Lists = field(default_factory=dict)
    mask_token_rel_ids_map: _Lists = field(default_factory=dict)
    confidence_map: _Lists = field(default_factory=dict)
    initial_confidence_map: _Lists = field(default_factory=dict)
    block_writes_map: dict[str, dict[str, dict[int, int]]] = field(default_factory=dict)
    block_state_map: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    token_merge_map: dict[str, dict[int, dict[str, Any] | None]] = field(default_factory=dict)

    @classmethod
    def of_step(
        cls,
        plan: _core.StepPlan,
        output: _core.SamplerOutput,
        mask_token_id: int,
        *,
        proposals: npt.NDArray[np.int64] | None = None,
        ranking: npt.NDArray[np.float32] | None = None,
    ) -> SampleOutput:
        """The view of a step that `output` completes; copies what it keeps.

        Args:
            plan: as it was scheduled.
            output: as the sampler filled it.
            mask_token_id: -1 for models without masks.
            proposals: [Nb, B] tokens that were proposed; without them, accepted ones are known.
            ranking: [Nb, B] ranking confidence; without it that of `max_prob`, which is the
                probability.
        """
        view = cls()
        for req_id in plan.req_ids.tolist():
            if req_id >= 0:  # dummies of a graph have none
                for item in fields(cls):
                    getattr(view, item.name)[str(req_id)] = {}
        shape = (plan.num_blocks, plan.block_size)
        for name, given in (("proposals", proposals), ("ranking", ranking)):
            if given is not None and given.shape != shape:
                raise ValueError(
                    f"SampleOutput.of_step: expected {name} of shape {shape}, got {given.shape}"
                )
        for blk in range(plan.num_blocks):
            view._add_block(plan, output, mask_token_id, blk, proposals, ranking)
        return view

    @classmethod
    def merge(cls, parts: Iterable[SampleOutput]) -> SampleOutput:
        """The union of outputs over different requests.

        Raises:
            ValueError: two parts have the same request.
        """
        merged = cls()
        for part in parts:
            for item in fields(cls):
                union, more = getattr(merged, item.name), getattr(part, item.name)
                if twice := union.keys() & more.keys():
                    raise ValueError(
                        f"SampleOutput.merge: expected each request in one part, got"
                        f" {', '.join(sorted(twice))} in two ({item.name})"
                    )
                union.update(more)
        return merged

    def _add_block(
        self,
        plan: _core.StepPlan,
        output: _core.SamplerOutput,
        mask_token_id: int,
        blk: int,
        proposals: npt.NDArray[np.int64] | None,
        ranking: npt.NDArray[np.float32] | None,
    ) -> None:
        req_id = int(plan.req_ids[plan.blk_req[blk]])
        if req_id < 0:
            return
        req, block = str(req_id), str(int(plan.blk_id[blk]))
        tokens, writes = plan.blk_tokens[blk].tolist(), output.write_ids[blk].tolist()
        confidence = output.confidence[blk].tolist()
        ranked = confidence if ranking is None else ranking[blk].tolist()
        proposed = writes if proposals is None else proposals[blk].tolist()
        editable = range(int(plan.blk_editable_start[blk]), int(plan.blk_valid_len[blk]))
        is_open = [rel for rel in editable if tokens[rel] == mask_token_id]
        accepted = [i for i, rel in enumerate(is_open) if writes[rel] not in (-1, mask_token_id)]
        self.mask_token_rel_ids_map[req][block] = is_open
        self.accepted_ids_map[req][block] = accepted
        self.true_local_ids_map[req][block] = [is_open[i] for i in accepted]
        self.sampled_tokens_map[req][block] = [proposed[rel] for rel in is_open]
        self.confidence_map[req][block] = [ranked[rel] for rel in is_open]
        self.initial_confidence_map[req][block] = [confidence[rel] for rel in is_open]
        self.block_writes_map[req][block] = {
            rel: token for rel, token in enumerate(writes) if token >= 0 and token != tokens[rel]
        }
        flags = int(output.flags[blk])
        state: dict[str, Any] = {
            "committable": bool(flags & _COMMITTABLE),
            "same_as_previous": bool(flags & _SAME_AS_PREVIOUS),
            "same_token_ratio": float(output.same_token_ratio[blk]),
            "all_confident": bool(flags & _ALL_CONFIDENT),
        }
        if flags & _CONVERGED:
            state["valid_commit_len"] = int(plan.blk_valid_len[blk])
        self.block_state_map[req][block] = state
        if output.merge_top_k > 0:
            start = int(plan.blk_start[blk])
            for rel in range(int(plan.blk_valid_len[blk])):
                self.token_merge_map[req][start + rel] = _descriptor(output, blk, rel)


def _descriptor(output: _core.SamplerOutput, blk: int, rel: int) -> dict[str, Any] | None:
    if not output.merge_valid[blk, rel]:
        return None
    return {
        "topk_ids": output.merge_topk_ids[blk, rel].tolist(),
        "topk_probs": output.merge_topk_probs[blk, rel].tolist(),
        "residual_prob": float(output.merge_residual[blk, rel]),
    }
