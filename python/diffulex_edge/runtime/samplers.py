# SPDX-License-Identifier: Apache-2.0
"""The documented sampling functions and classes, over the engine's ops for row statistics and acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from diffulex.families.base import FilterOrder
from diffulex.ops.acceptance import accept_mask_fill
from diffulex.ops.sampling import (
    AcceptRule,
    ConfidenceKind,
    StatsColumn,
    token_stats,
)
from diffulex_edge.runtime.filters import kept_ids

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex_edge.runtime.blocks import DiffusionBlock

__all__ = [
    "SAMPLER_REGISTRY",
    "DreamSampler",
    "FastDLLMV2Sampler",
    "FastdLLMV2Sampler",
    "LLaDASampler",
    "NoShiftLogitsSampler",
    "SDARSampler",
    "SampleOutput",
    "ShiftLogitsSampler",
    "get_sampler_class",
    "sample_tokens",
    "top_k_logits",
    "top_p_logits",
]


def _filtered(logits: Tensor, top_k: int, top_p: float, order: FilterOrder) -> Tensor:
    """Logits [n, V] with the lowest number of the dtype where the filters keep nothing."""
    removed = torch.finfo(logits.dtype).min
    rows = logits.reshape(-1, logits.size(-1))
    result = torch.full_like(rows, removed)
    for row, values in enumerate(rows):
        kept = kept_ids(values.double().tolist(), top_k, top_p, 0.0, order=order, beta=1.0)
        result[row, kept] = values[kept]
    return result.view_as(logits)


def top_p_logits(logits: Tensor, top_p: float | None) -> Tensor:
    """Logits outside the smallest set of mass `top_p` removed; None or >= 1: unchanged."""
    if top_p is None or top_p >= 1:
        return logits.clone()
    return _filtered(logits, 0, top_p, FilterOrder.TOP_P_FIRST)


def top_k_logits(logits: Tensor, top_k: int | None) -> Tensor:
    """Logits below the k-th best removed, ties kept; None or <= 0: unchanged."""
    if top_k is None or top_k <= 0:
        return logits.clone()
    return _filtered(logits, top_k, 1.0, FilterOrder.TOP_P_FIRST)


def sample_tokens(
    logits: Tensor,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    *,
    margin_confidence: bool = False,
    neg_entropy: bool = False,
    order: FilterOrder = FilterOrder.TOP_P_FIRST,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token per row of logits [n, V].

    Returns:
        Confidence that ranks positions [n], tokens [n], probability of the tokens [n].
    """
    if temperature < 0:
        raise ValueError(f"temperature: expected >= 0, got {temperature}")
    rows = logits.float()
    beta = 0.0 if temperature == 0 else 1.0 / temperature
    if top_p is not None or top_k is not None:
        scaled = rows * (beta or 1.0)
        rows = _filtered(scaled, top_k or 0, 1.0 if top_p is None else top_p, order) / (beta or 1.0)
        rows = rows.masked_fill(rows <= torch.finfo(rows.dtype).min, -torch.inf)
    uniforms = torch.rand(rows.size(0), dtype=torch.float64, generator=generator)
    result = token_stats(rows, inv_temperature=torch.full((rows.size(0),), beta), uniforms=uniforms)
    stats = result.stats
    probability = stats[:, StatsColumn.CONFIDENCE]
    confidence = probability
    if margin_confidence:
        confidence = stats[:, StatsColumn.MAX_PROB] - stats[:, StatsColumn.SECOND_PROB]
    if neg_entropy:
        confidence = -stats[:, StatsColumn.ENTROPY]
    return confidence, result.ids, probability


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What a step writes to a block."""

    #: Token of every position of the block that had a row.
    tokens: tuple[int, ...]
    confidences: tuple[float, ...]
    #: Positions in the block that are accepted.
    accepted: tuple[int, ...]


class NoShiftLogitsSampler:
    """Logits of a position predict that position."""

    model_type: ClassVar[str] = ""
    rule: ClassVar[AcceptRule] = AcceptRule.THRESHOLD
    order: ClassVar[FilterOrder] = FilterOrder.TOP_P_FIRST
    threshold: ClassVar[float] = 0.9

    def shift(self, logits: Tensor, last_logits: Tensor | None = None) -> Tensor:
        """Row i for position i of the block, from logits [S, V]."""
        del last_logits
        return logits

    def fetch_last_logits(self, logits: Tensor) -> Tensor:
        """The row [V] that the next block's first position may need."""
        return logits[-1]

    def __call__(
        self,
        block: DiffusionBlock,
        logits: Tensor,
        last_logits: Tensor | None = None,
        **sampling: Any,
    ) -> SampleOutput:
        """Proposals for a block from its logits [length, V], and which of them are accepted."""
        rows = self.shift(logits, last_logits)
        _, tokens, probability = sample_tokens(rows, order=self.order, **sampling)
        stats = token_stats(rows.float()).stats
        stats[:, StatsColumn.CONFIDENCE] = probability
        kind = ConfidenceKind.MAX_PROB
        if sampling.get("margin_confidence"):
            kind = ConfidenceKind.MARGIN
        if sampling.get("neg_entropy"):
            kind = ConfidenceKind.NEG_ENTROPY
        result = accept_mask_fill(
            torch.tensor([block.tokens]),
            torch.arange(block.length, dtype=torch.int32).view(1, -1),
            torch.tensor([block.editable_start], dtype=torch.int32),
            torch.ones(1, dtype=torch.uint8),
            torch.tensor([block.accept_threshold], dtype=torch.float32),
            torch.zeros(1, dtype=torch.int32),
            tokens,
            stats,
            mask_token_id=block.mask_token_id,
            rule=self.rule,
            confidence_kind=kind,
        )
        written = result.write_ids[0]
        return SampleOutput(
            tuple(tokens.tolist()),
            tuple(probability.tolist()),
            tuple(i for i in range(block.length) if int(written[i]) >= 0),
        )


class ShiftLogitsSampler(NoShiftLogitsSampler):
    """Logits of a position predict the next one."""

    def shift(self, logits: Tensor, last_logits: Tensor | None = None) -> Tensor:
        """Row 0 is the last row of what came before the block; without it, the block's first."""
        first = logits[:1] if last_logits is None else last_logits.view(1, -1).to(logits)
        return torch.cat((first, logits[:-1]))


class FastdLLMV2Sampler(ShiftLogitsSampler):
    """Fast-dLLM v2."""

    model_type = "fast_dllm_v2"


class DreamSampler(ShiftLogitsSampler):
    """Dream."""

    model_type = "dream"


class LLaDASampler(NoShiftLogitsSampler):
    """LLaDA."""

    model_type = "llada"


class SDARSampler(NoShiftLogitsSampler):
    """SDAR: at least one position a step, the best where none passes."""

    model_type = "sdar"
    rule = AcceptRule.DYNAMIC
    order = FilterOrder.TOP_K_FIRST


FastDLLMV2Sampler = FastdLLMV2Sampler
SAMPLER_REGISTRY: dict[str, type[NoShiftLogitsSampler]] = {
    item.model_type: item for item in (FastdLLMV2Sampler, DreamSampler, LLaDASampler, SDARSampler)
}


def get_sampler_class(model_type: str) -> type[NoShiftLogitsSampler]:
    """Sampler of a family; ValueError for others."""
    if model_type not in SAMPLER_REGISTRY:
        expected = ", ".join(sorted(SAMPLER_REGISTRY))
        raise ValueError(f"model_type: expected one of {expected}, got {model_type!r}")
    return SAMPLER_REGISTRY[model_type]
