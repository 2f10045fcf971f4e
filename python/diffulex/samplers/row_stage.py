# SPDX-License-Identifier: Apache-2.0
"""From logits rows to records: chosen id, probability and statistics of every row.

Symbols: n logits rows, V columns, K candidates of a mix.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

import diffulex_ext
from diffulex.distributed.records import Records
from diffulex.families.base import FilterOrder
from diffulex.ops.sampling import ExclusionMode
from diffulex.ops.workspace import empty_workspace, token_stats_workspace_bytes
from diffulex.samplers.inputs import RowFilters
from diffulex.samplers.shift import SavedRows

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.config.types import ConfigTree
    from diffulex.distributed.records import SharedHead
    from diffulex.samplers.inputs import SamplerInputs

__all__ = ["FilterOrder", "RowPenalties", "RowRecords", "RowStage"]

EXCLUSIONS = {
    mode.name.lower(): mode.value for mode in (ExclusionMode.EXCLUDE, ExclusionMode.RENORMALIZE)
}
# Columns of the records; include/diffulex/ops/sampling.h.
_NUM_STATS = 8
_CONFIDENCE, _SECOND_PROB, _ENTROPY, _RAW_CONFIDENCE = 0, 2, 3, 6
# A demoted proposal: below every threshold and last in every ranking.
_DEMOTED_PROBABILITY, _DEMOTED_SECOND, _DEMOTED_ENTROPY = -1.0, 3.0, 1e30


class RowRecords(NamedTuple):
    """Records of the step's rows, then those of saved rows."""

    ids: Tensor  # int64, -1 = no finite candidate
    stats: Tensor  # [.., 8] float32
    topk_ids: Tensor | None  # [n, K] int64
    topk_probs: Tensor | None  # [n, K] float32


class RowPenalties(NamedTuple):
    """What a row takes from the logit of one id."""

    ids: Tensor  # [n] int64, -1 = nothing
    amounts: Tensor  # [n] float32


class RowStage:
    """Runs `token_stats`, and `sample_filtered` where a request filters. Buffers are reused.

    Draws use the uniforms that the core supplies, so results depend on no other request.

    Args:
        top_k: K most likely candidates to report, at temperature 1.
        is_tempered: filtered rows keep their probability before the filters as confidence.
        is_masked: the model has a mask token, which is never chosen.
        softcap: cap of the logits, 0 = none.
        is_topk_tempered: the K candidates are those of the row's own temperature.
    """

    def __init__(
        self,
        config: ConfigTree,
        *,
        filter_order: FilterOrder = FilterOrder.TOP_P_FIRST,
        is_tempered: bool = False,
        top_k: int = 0,
        is_masked: bool = True,
        softcap: float = 0.0,
        is_topk_tempered: bool = False,
    ) -> None:
        sampler, model = config.sampler, config.model
        if not diffulex_ext.has_ops:
            raise RuntimeError(
                "RowStage: expected the compiled op library beside diffulex_ext, got none"
            )
        self._device = torch.device(model.device)
        forbidden = config.forbidden_ids if is_masked else sampler.suppress_token_ids
        self._forbidden = self._ids_tensor(forbidden)
        self._demoted = self._ids_tensor(sampler.demote_token_ids)
        self._vocab_limit = model.tokenizer_vocab_size if is_masked else -1
        self._exclusion = EXCLUSIONS[sampler.mask_suppression]
        if not is_masked and self._forbidden is None:
            self._exclusion = ExclusionMode.OFF.value
        self._filter_order = filter_order
        self._is_tempered = is_tempered
        self._top_k = top_k
        self._is_topk_tempered = is_topk_tempered
        self._softcap = softcap
        self._saved: SavedRows | None = None
        self._head: SharedHead | None = None
        self._workspace: Tensor | None = None
        self._workspace_bytes = 0
        self._allocate(0)

    def _ids_tensor(self, ids: tuple[int, ...]) -> Tensor | None:
        if not ids:
            return None
        return torch.tensor(sorted(set(ids)), dtype=torch.int64, device=self._device)

    def keep_rows(self, first_record: int, max_num_reqs: int) -> None:
        """Keeps one row per request slot between steps, with records from `first_record` on."""
        self._saved = SavedRows(first_record, max_num_reqs, self._device)
        self._allocate(self._saved.num_records)

    def share(self, head: SharedHead) -> None:
        """Takes logits of which this rank has some columns; every rank runs the same steps."""
        self._head = head

    def head_of(self, logits: Tensor) -> SharedHead | None:
        """The exchange with the ranks that have the other columns of logits; None: there are none."""
        head = self._head
        return None if head is None or head.is_whole(logits) else head

    @property
    def saved_logits(self) -> Tensor | None:
        """Logits kept per request slot; None while no request has drawn its tokens."""
        return None if self._saved is None else self._saved.logits

    def reserve(self, num_rows: int, vocab_size: int) -> None:
        """Allocates the row buffers for `num_rows` rows, so that no later step does."""
        if num_rows > self._ids.numel():
            self._allocate(num_rows)
        needed = token_stats_workspace_bytes(num_rows, vocab_size, self._top_k, self._device.type)
        if needed > self._workspace_bytes:
            self._workspace = empty_workspace(needed, self._device)
            self._workspace_bytes = needed

    def _allocate(self, num_rows: int) -> None:
        device = self._device
        self._ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._stats = torch.zeros(num_rows, _NUM_STATS, dtype=torch.float32, device=device)
        self._topk_ids = torch.zeros(num_rows, self._top_k, dtype=torch.int64, device=device)
        self._topk_probs = torch.zeros(num_rows, self._top_k, dtype=torch.float32, device=device)

    def run(self, inputs: SamplerInputs, penalties: RowPenalties | None = None) -> RowRecords:
        """Records of the step's rows, valid until the next call."""
        head = self.head_of(inputs.logits)
        if head is not None and self._wants_logits(inputs):
            inputs, head = replace(inputs, logits=head.whole_rows(inputs.logits)), None
        num_rows, vocab_size = inputs.logits.shape
        self.reserve(num_rows, vocab_size)
        if num_rows > 0:
            self._record(inputs, penalties, head)
        topk_ids = self._topk_ids[:num_rows] if self._top_k else None
        topk_probs = self._topk_probs[:num_rows] if self._top_k else None
        if self._saved is None:
            return RowRecords(self._ids[:num_rows], self._stats[:num_rows], topk_ids, topk_probs)
        if inputs.carry is not None:
            # A saved row is replaced when a block is stored, and read when none is.
            self._saved.save(inputs.carry, inputs.logits, self._ids, self._stats)
        return RowRecords(self._ids, self._stats, topk_ids, topk_probs)

    def _wants_logits(self, inputs: SamplerInputs) -> bool:
        """Whether a row draws, or is saved to draw: partial records tell the likeliest ids alone."""
        carry = inputs.carry
        is_saved = self.saved_logits is not None or (
            carry is not None and carry.has_sampled_requests
        )
        return inputs.inv_temperature is not None or (self._saved is not None and is_saved)

    def _record(
        self, inputs: SamplerInputs, penalties: RowPenalties | None, head: SharedHead | None
    ) -> None:
        logits, has_draws = inputs.logits, inputs.inv_temperature is not None
        rows = _Rows(logits, *self._sources(inputs), penalties, head)
        if has_draws and self._top_k and not self._is_topk_tempered:
            # Candidates of a mix are those at temperature 1, whatever the draw.
            self._token_stats(rows, None, None, has_topk=True)
            self._token_stats(rows, inputs.inv_temperature, inputs.uniforms, has_topk=False)
        else:
            self._token_stats(
                rows, inputs.inv_temperature, inputs.uniforms, has_topk=self._top_k > 0
            )
        if inputs.filters is not None:
            assert inputs.inv_temperature is not None
            assert inputs.uniforms is not None
            for part, filters in _filtered_parts(rows, inputs.filters):
                self._filter(part, inputs.inv_temperature, inputs.uniforms, filters)
        if self._demoted is not None:
            self._demote(logits.size(0), self._demoted)

    def _sources(self, inputs: SamplerInputs) -> tuple[Tensor | None, Tensor | None]:
        if self._saved is None or inputs.carry is None:
            return None, inputs.rows
        return self._saved.sources(inputs.carry, inputs.logits, inputs.rows)

    def _token_stats(
        self,
        rows: _Rows,
        inv_temperature: Tensor | None,
        uniforms: Tensor | None,
        *,
        has_topk: bool,
    ) -> None:
        num_rows, head = rows.logits.size(0), rows.head
        whole = Records(
            self._ids[:num_rows],
            self._stats[:num_rows],
            self._topk_ids[:num_rows] if has_topk else None,
            self._topk_probs[:num_rows] if has_topk else None,
        )
        records = whole if head is None else whole.like()
        torch.ops.diffulex.token_stats(
            rows.logits,
            rows.extra,
            rows.source,
            inv_temperature,
            uniforms,
            self._forbidden,
            *(rows.penalties or (None, None)),
            *records,
            self._workspace,
            vocab_limit=self._vocab_limit,
            softcap=self._softcap,
            exclusion=self._exclusion,
            vocab_start=0 if head is None else head.vocab_start,
            partial=head is not None,
        )
        if head is not None:
            head.merge(records, whole)

    def _filter(
        self, rows: _Rows, inv_temperature: Tensor, uniforms: Tensor, filters: RowFilters
    ) -> None:
        """Draws the filtered rows again; the others keep their records."""
        num_rows = rows.logits.size(0)
        torch.ops.diffulex.sample_filtered(
            rows.logits,
            rows.extra,
            rows.source,
            inv_temperature,
            uniforms,
            filters.top_k,
            filters.top_p,
            filters.min_p,
            self._forbidden,
            self._ids[:num_rows],
            self._stats[:num_rows],
            self._workspace,
            vocab_limit=self._vocab_limit,
            softcap=self._softcap,
            exclusion=self._exclusion,
            filter_order=int(self._filter_order),
            confidence_space=int(self._is_tempered),
        )

    def _demote(self, num_rows: int, demoted: Tensor) -> None:
        """Takes all confidence from proposals of the demoted ids."""
        stats = self._stats[:num_rows]
        is_demoted = (self._ids[:num_rows, None] == demoted).any(1)
        for column, value in (
            (_CONFIDENCE, _DEMOTED_PROBABILITY),
            (_RAW_CONFIDENCE, _DEMOTED_PROBABILITY),
            (_SECOND_PROB, _DEMOTED_SECOND),
            (_ENTROPY, _DEMOTED_ENTROPY),
        ):
            stats[:, column].masked_fill_(is_demoted, value)


class _Rows(NamedTuple):
    """Where the logits of a row are: `source` int32 addresses `logits`, then `extra`."""

    logits: Tensor
    extra: Tensor | None
    source: Tensor | None
    penalties: RowPenalties | None
    head: SharedHead | None  # the logits are a rank's columns


def _filtered_parts(rows: _Rows, filters: RowFilters) -> list[tuple[_Rows, RowFilters]]:
    """The calls of `sample_filtered`, which takes no penalty: rows with one, in float32, where the
    logits can carry it themselves, apart from those without, whose results must not change by it."""
    if rows.penalties is None:
        return [(rows, filters)]
    ids, amounts = rows.penalties
    is_penalised = ids >= 0
    taken = torch.where(is_penalised, amounts, 0.0)
    logits = rows.logits.to(torch.float32, copy=True)
    logits.scatter_add_(1, ids.clamp(min=0)[:, None], -taken[:, None])
    return [
        (rows, _without(filters, is_penalised)),
        (rows._replace(logits=logits), _without(filters, ~is_penalised)),
    ]


def _without(filters: RowFilters, is_off: Tensor) -> RowFilters:
    """The filters with those of some rows turned off."""
    return RowFilters(
        filters.top_k.masked_fill(is_off, 0),
        filters.top_p.masked_fill(is_off, 1.0),
        filters.min_p.masked_fill(is_off, 0.0),
    )
