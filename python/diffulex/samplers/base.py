# SPDX-License-Identifier: Apache-2.0
"""The interface of samplers and the mask-filling sampler that families parametrise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from diffulex.ops.sampling import AcceptRule, ConfidenceKind
from diffulex.samplers.inputs import SamplerInputs
from diffulex.samplers.row_stage import FilterOrder, RowRecords, RowStage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from diffulex.config.types import ConfigTree

__all__ = ["FilterOrder", "MaskFillSampler", "RowSampler", "Sampler", "SamplerInputs"]

RULES = {rule.name.lower(): rule.value for rule in AcceptRule}
#: Keys of the acceptance rules, of which only `MaskFillSampler` has a choice.
RULE_KEYS = frozenset(
    {
        "acceptance_rule",
        "denoising_steps",
        "entropy_bound",
        "factor",
        "force_accept_last_step",
        "low_threshold",
    }
)
_STEP_METHODS = frozenset({"__call__", "gate", "seed"})
CONFIDENCE_KINDS = {
    "max_prob": ConfidenceKind.MAX_PROB.value,
    "margin_confidence": ConfidenceKind.MARGIN.value,
    "neg_entropy": ConfidenceKind.NEG_ENTROPY.value,
}


class Sampler(Protocol):
    """Decides the writes of one step. Never synchronises with the device."""

    def __call__(self, inputs: SamplerInputs) -> None:
        """Fills the outputs of `inputs`."""

    def evict(self, request_slots: Sequence[int]) -> None:
        """Drops state kept for requests that left their slots."""


class RowSampler:
    """What the samplers share: records of the rows, saved rows, seeds of committed blocks."""

    #: Configuration keys this family sets; explicit values and the checkpoint's go before them.
    family_defaults: ClassVar[Mapping[str, Any]] = {}
    #: Configuration keys this sampler has no use for.
    unused_keys: ClassVar[frozenset[str]] = frozenset()
    #: Order of the family's filters.
    filter_order: ClassVar[FilterOrder] = FilterOrder.TOP_P_FIRST
    #: A call only enqueues, and nothing on the host changes from step to step: it may be recorded
    #: once and replayed. A subclass that overrides the step has to declare it again.
    is_capturable: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "is_capturable" not in own and not _STEP_METHODS.isdisjoint(own):
            cls.is_capturable = False

    def __init__(self, config: ConfigTree, rows: RowStage) -> None:
        self.rows = rows
        self._mask_token_id = config.model.mask_token_id
        self._is_gated = config.sampler.forced_gate == "prev_semi_complete"

    def bind_model(self, model: Any) -> None:
        """Takes what the step needs of the model; most samplers need nothing."""

    def keep_rows(self, first_record: int, max_num_reqs: int) -> None:
        """For models whose logits predict the next position; see `RowStage.keep_rows`."""
        self.rows.keep_rows(first_record, max_num_reqs)

    def reserve(self, num_rows: int, vocab_size: int) -> None:
        """Allocates what `num_rows` rows need, so that no later step does."""
        self.rows.reserve(num_rows, vocab_size)

    def evict(self, request_slots: Sequence[int]) -> None:
        """Nothing to drop: a slot's saved row is replaced before it is read again."""

    def gate(self, inputs: SamplerInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate, earlier steps with an open gate) of every block, as `forced_gate` has them."""
        if self._is_gated:
            return inputs.gate, inputs.open_steps
        return torch.ones_like(inputs.gate), inputs.total_steps - 1

    def seed(self, inputs: SamplerInputs, records: RowRecords) -> None:
        """Writes the token that each committed fast_dllm_v2 block predicts for the next."""
        seeds = inputs.seeds
        if seeds is None:
            return
        if inputs.logits.size(0) == 0:
            seeds.pending_next_token.fill_(-1)
            return
        ids = records.ids.index_select(0, seeds.seed_row.clamp(min=0).long())
        seeds.pending_next_token.copy_(torch.where(seeds.seed_row >= 0, ids, -1))


class MaskFillSampler(RowSampler):
    """Row statistics, then an acceptance rule over the open positions of each block."""

    is_capturable = True

    def __init__(self, config: ConfigTree) -> None:
        sampler = config.sampler
        if sampler.acceptance_rule is None or sampler.confidence_space is None:
            raise ValueError("MaskFillSampler: expected a resolved configuration, got unset keys")
        stage = RowStage(
            config,
            filter_order=self.filter_order,
            is_tempered=sampler.confidence_space == "tempered",
        )
        super().__init__(config, stage)
        self._rule = RULES[sampler.acceptance_rule]
        self._confidence_kind = CONFIDENCE_KINDS[sampler.confidence_type]
        self._is_raw = sampler.confidence_space == "raw"
        self._denoising_steps = sampler.denoising_steps or 0
        self._force_last = sampler.force_accept_last_step
        self._factor = sampler.factor
        self._entropy_bound = sampler.entropy_bound
        # The op library has the argument since it has the rule.
        self._rule_arguments: dict[str, float] = (
            {"low_threshold": sampler.low_threshold}
            if sampler.acceptance_rule == "hierarchy"
            else {}
        )

    def __call__(self, inputs: SamplerInputs) -> None:
        records = self.rows.run(inputs)
        self.seed(inputs, records)
        if inputs.tokens.size(0) == 0:
            return
        gate, open_steps = self.gate(inputs)
        torch.ops.diffulex.accept_mask_fill(
            inputs.tokens,
            inputs.row_index,
            inputs.editable_start,
            inputs.valid_len,
            gate,
            inputs.accept_threshold,
            open_steps,
            records.ids,
            records.stats,
            inputs.write_ids,
            inputs.confidence,
            inputs.masks_left,
            inputs.flags,
            mask_token_id=self._mask_token_id,
            rule=self._rule,
            confidence_kind=self._confidence_kind,
            raw_confidence=self._is_raw,
            denoising_steps=self._denoising_steps,
            force_accept_last_step=self._force_last,
            factor=self._factor,
            entropy_bound=self._entropy_bound,
            **self._rule_arguments,
        )
