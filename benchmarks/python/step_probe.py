# SPDX-License-Identifier: Apache-2.0
"""What the forwards of a model read, counted while an engine without graphs runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from step_timing import expert_modules, weight_bytes
from torch import nn

__all__ = ["StepProbe", "StepReads"]


@dataclass(slots=True)
class _Forward:
    """Device tensors of one forward; reading them waits until the steps are over."""

    num_rows: int
    row_counts: torch.Tensor
    context_lens: torch.Tensor
    #: Distinct experts that rows were sent to, by layer.
    experts: list[torch.Tensor]
    #: Whether all logits were finite; None = no logits were computed.
    is_finite: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepReads:
    """Means over the counted steps."""

    #: Rows that carry a token, and rows with those that only fill the fixed shape.
    rows: float
    rows_run: float
    #: Cached positions that a request sees.
    context: float
    #: Distinct experts of a layer with experts; None for dense models.
    experts: float | None
    bytes_by_part: dict[str, float]


class StepProbe:
    """Hooks of one model. `keep` counts the latest forward, `reads` sums up, `remove` ends it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._latest: _Forward | None = None
        self._kept: list[_Forward] = []
        self._expert_modules = expert_modules(model)
        self._compute_logits = model.compute_logits
        model.compute_logits = self._count_logits
        self._hooks = [model.register_forward_pre_hook(self._count_rows)]
        self._hooks += [m.register_forward_hook(self._count_experts) for m in self._expert_modules]

    def keep(self) -> None:
        """Counts the latest forward."""
        assert self._latest is not None
        self._kept.append(self._latest)

    def remove(self) -> None:
        """Leaves the model as it was."""
        for hook in self._hooks:
            hook.remove()
        del self._model.compute_logits

    def _count_rows(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        metadata = args[2]
        counts = metadata.valid_slices - metadata.cu_seqlens_q[:-1]
        self._latest = _Forward(
            args[0].size(0), counts.clamp(min=0), metadata.context_lens.clone(), []
        )

    def _count_experts(self, module: Any, args: tuple[Any, ...], output: object) -> None:
        # Rows without a token have expert -1, as those of other ranks do; it falls into the first place.
        ids = args[1].routing.ids.flatten().long()
        if module._expert_map is not None:
            ids = module._expert_map[ids].long().masked_fill_(ids < 0, -1)
        is_used = torch.zeros(module.w13.size(0) + 1, dtype=torch.int32, device=ids.device)
        is_used.index_fill_(0, ids + 1, 1)
        assert self._latest is not None
        self._latest.experts.append(is_used[1:].sum())

    def _count_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._compute_logits(hidden_rows)
        if self._latest is not None:
            self._latest.is_finite = logits.isfinite().all()
        return logits

    def reads(self) -> StepReads:
        """What a step read on average.

        Raises:
            RuntimeError: a logit was NaN or infinite.
        """
        kept, spec = self._kept, self._model.spec
        finite = [forward.is_finite for forward in kept if forward.is_finite is not None]
        if not all(bool(flag) for flag in finite):
            raise RuntimeError("expected finite logits, got NaN or infinity")
        has_logits = len(finite) / len(kept)
        contexts = [forward.context_lens.tolist() for forward in kept]
        hits = [[int(count) for count in forward.experts] for forward in kept]
        experts = fmean(fmean(counts) for counts in hits) if self._expert_modules else None
        expert_bytes = 0.0
        all_experts = sum(module.matrices.nbytes for module in self._expert_modules)
        for index, module in enumerate(self._expert_modules):
            one = module.matrices.nbytes / module.w13.size(0)
            expert_bytes += one * fmean(counts[index] for counts in hits)
        head = self._model.head.nbytes
        parts = {
            "dense": float(weight_bytes(self._model) - all_experts - head),
            "experts": expert_bytes,
            "head": has_logits * head,
            "kv": fmean(sum(self._kv_bytes(length) for length in step) for step in contexts),
        }
        if spec.canvas_length is not None:
            # The expected embedding of every canvas position reads the whole table once more.
            parts["soft_embedding"] = has_logits * self._model.soft_embedding_weight.nbytes
        return StepReads(
            rows=fmean(float(forward.row_counts.sum()) for forward in kept),
            rows_run=fmean(forward.num_rows for forward in kept),
            context=fmean(fmean(step) for step in contexts),
            experts=experts,
            bytes_by_part=parts,
        )

    def _kv_bytes(self, length: int) -> int:
        """K and V of all layers that rows of one request see in the cache."""
        spec = self._model.spec
        limits = self._windows(length)
        elements: int = sum(
            2 * heads * head_dim * limit
            for (heads, head_dim), limit in zip(spec.kv_layers, limits, strict=True)
        )
        return elements * self._model.embedding.weight.element_size()

    def _windows(self, length: int) -> Sequence[int]:
        """Cached positions that each layer sees."""
        spec = self._model.spec
        window = getattr(spec, "sliding_window", 0)
        if not window:
            return [length] * spec.num_layers
        # A window counts the row itself.
        return [min(length, window - 1) if layer.is_sliding else length for layer in spec.layers]
