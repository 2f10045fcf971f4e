# SPDX-License-Identifier: Apache-2.0
"""The interface of samplers and the mask-filling sampler that families parametrise.

Symbols: n logits rows, Nb blocks of B positions, V columns of the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

import diffulex_ext
from diffulex.ops.workspace import empty_workspace, token_stats_workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from diffulex.config import Config

__all__ = ["MaskFillSampler", "Sampler", "SamplerInputs"]

_RULES = {
    "threshold": 0,
    "threshold_non_strict": 1,
    "static": 2,
    "dynamic": 3,
    "sequential": 4,
    "factor": 5,
    "entropy_bound": 6,
}
_CONFIDENCE_KINDS = {"max_prob": 0, "margin_confidence": 1, "neg_entropy": 2}
_EXCLUSIONS = {"exclude": 0, "renormalize": 1}
_NUM_STATS = 8


@dataclass(slots=True)
class SamplerInputs:
    """What one step gives a sampler: views of device memory, trimmed to the used length.

    `write_ids`, `confidence`, `masks_left` and `flags` are the outputs, written in full.
    """

    logits: Tensor  # [n, V]
    inv_temperature: Tensor | None  # [n] float32, 0 = greedy; None = all greedy
    uniforms: Tensor | None  # [n] float64, present exactly with inv_temperature
    tokens: Tensor  # [Nb, B] int64
    row_index: Tensor  # [Nb, B] int32 into logits, -1 = no row
    editable_start: Tensor  # [Nb] int32
    valid_len: Tensor  # [Nb] int32
    gate: Tensor  # [Nb] uint8, predecessor semi-complete
    accept_threshold: Tensor  # [Nb] float32
    open_steps: Tensor  # [Nb] int32
    total_steps: Tensor  # [Nb] int32, this forward included
    write_ids: Tensor  # [Nb, B] int64, -1 = unchanged
    confidence: Tensor  # [Nb, B] float32
    masks_left: Tensor  # [Nb] int32
    flags: Tensor  # [Nb] int32, AcceptFlag bits


class Sampler(Protocol):
    """Decides the writes of one step. Never synchronises with the device."""

    def __call__(self, inputs: SamplerInputs) -> None:
        """Fills the outputs of `inputs`."""

    def evict(self, request_slots: Sequence[int]) -> None:
        """Drops state kept for requests that left their slots."""


class MaskFillSampler:
    """Row statistics, then an acceptance rule over the open positions of each block.

    Stateless: draws use the uniforms the core supplies, so results depend on no other request.
    """

    def __init__(self, config: Config) -> None:
        sampler, model = config.sampler, config.model
        if sampler.acceptance_rule is None or sampler.confidence_space is None:
            raise ValueError("MaskFillSampler: expected a resolved configuration, got unset keys")
        if not diffulex_ext.has_ops:
            raise RuntimeError(
                "MaskFillSampler: expected the compiled op library beside diffulex_ext, got none"
            )
        self._device = torch.device(model.device)
        forbidden = sorted({model.mask_token_id, *sampler.suppress_token_ids})
        self._forbidden = torch.tensor(forbidden, dtype=torch.int64, device=self._device)
        self._mask_token_id = model.mask_token_id
        self._vocab_limit = model.tokenizer_vocab_size
        self._exclusion = _EXCLUSIONS[sampler.mask_suppression]
        self._rule = _RULES[sampler.acceptance_rule]
        self._confidence_kind = _CONFIDENCE_KINDS[sampler.confidence_type]
        self._is_raw = sampler.confidence_space == "raw"
        self._denoising_steps = sampler.denoising_steps or 0
        self._force_last = sampler.force_accept_last_step
        self._factor = sampler.factor
        self._entropy_bound = sampler.entropy_bound
        self._is_gated = sampler.forced_gate == "prev_semi_complete"
        self._ids = torch.empty(0, dtype=torch.int64, device=self._device)
        self._stats = torch.empty(0, _NUM_STATS, dtype=torch.float32, device=self._device)
        self._workspace: Tensor | None = None
        self._workspace_bytes = 0

    def reserve(self, num_rows: int, vocab_size: int) -> None:
        """Allocates the row buffers for `num_rows` rows, so that no later step does."""
        if num_rows > self._ids.numel():
            self._ids = torch.empty(num_rows, dtype=torch.int64, device=self._device)
            self._stats = torch.empty(
                num_rows, _NUM_STATS, dtype=torch.float32, device=self._device
            )
        needed = token_stats_workspace_bytes(num_rows, vocab_size, 0, self._device.type)
        if needed > self._workspace_bytes:
            self._workspace = empty_workspace(needed, self._device)
            self._workspace_bytes = needed

    def __call__(self, inputs: SamplerInputs) -> None:
        num_rows, vocab_size = inputs.logits.shape
        self.reserve(num_rows, vocab_size)
        ids, stats = self._ids[:num_rows], self._stats[:num_rows]
        if num_rows > 0:
            torch.ops.diffulex.token_stats(
                inputs.logits,
                None,
                None,
                inputs.inv_temperature,
                inputs.uniforms,
                self._forbidden,
                None,
                ids,
                stats,
                None,
                None,
                self._workspace,
                vocab_limit=self._vocab_limit,
                exclusion=self._exclusion,
            )
        gate, open_steps = inputs.gate, inputs.open_steps
        if not self._is_gated:
            gate = torch.ones_like(gate)
            open_steps = inputs.total_steps - 1
        torch.ops.diffulex.accept_mask_fill(
            inputs.tokens,
            inputs.row_index,
            inputs.editable_start,
            inputs.valid_len,
            gate,
            inputs.accept_threshold,
            open_steps,
            ids,
            stats,
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
        )

    def evict(self, request_slots: Sequence[int]) -> None:
        """Nothing is kept per request."""
