# SPDX-License-Identifier: Apache-2.0
"""How a step calls the model: plain, over mixed embeddings, or with self-conditioning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from diffulex import ops
from diffulex.ops.settled import settled_weights

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.nn.attention_metadata import AttnMetadata
    from diffulex.nn.kv_cache import KVCache
    from diffulex.runner.batch import ArenaViews

__all__ = ["BlankRows", "ModelCall", "head_logits"]


@dataclass(slots=True)
class BlankRows:
    """Rows of token 0 without descriptors or signals."""

    input_ids: Tensor
    positions: Tensor
    merge_mask: Tensor
    merge_topk_ids: Tensor
    merge_topk_probs: Tensor
    merge_residual: Tensor
    row_pass_kind: Tensor
    row_self_cond: Tensor

    @classmethod
    def of(cls, positions: Tensor, top_k: int) -> BlankRows:
        """Rows at `positions` [T]."""
        num_rows, device = positions.size(0), positions.device
        return cls(
            input_ids=torch.zeros_like(positions),
            positions=positions,
            merge_mask=torch.zeros(num_rows, dtype=torch.uint8, device=device),
            merge_topk_ids=torch.zeros(num_rows, top_k, dtype=torch.int64, device=device),
            merge_topk_probs=torch.zeros(num_rows, top_k, dtype=torch.float32, device=device),
            merge_residual=torch.zeros(num_rows, dtype=torch.float32, device=device),
            row_pass_kind=torch.zeros(num_rows, dtype=torch.uint8, device=device),
            row_self_cond=torch.full((num_rows,), -1, dtype=torch.int32, device=device),
        )


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Logits [R, V] of hidden rows [R, H], by the head of a model that a `ModelCall` was made of."""
    if not hidden.is_cuda:
        return cast("Tensor", model.compute_logits(hidden))
    with settled_weights():
        return cast("Tensor", model.compute_logits(hidden))


class ModelCall:
    """Hidden states of the rows of a step, from its device arrays. Graph-capturable.

    Args:
        config: strategy and merge settings.
        model: its weights are complete, and whoever changes one later waits for the device before the
            next step. See docs/extending.md; dmax needs `embed` and its table,
            diffusion_gemma the further arguments of its forward.
    """

    def __init__(self, config: Config, model: Any) -> None:
        self.model = model
        device = torch.device(config.model.device)
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            torch.cuda.synchronize(device)  # for the promise of __call__
        decoding = config.decoding
        traits = decoding.traits
        self._has_merges = traits.merges_embeddings and decoding.token_merge_weight > 0
        self._merge_kind = ops.MergeKind[decoding.token_merge_mode.upper()]
        self._renormalize = decoding.token_merge_renormalize
        self._merge_weight = decoding.token_merge_weight
        self._mask_token_id = config.model.mask_token_id
        #: [max_num_reqs * B + 1, H] signal of every canvas position, and a row for what belongs to no
        #: position; None for other strategies.
        self.signals: Tensor | None = None
        if traits.has_canvas:
            num_rows = config.scheduler.max_num_reqs * decoding.block_size + 1
            hidden_size = config.model.spec.hidden_size
            self.signals = torch.zeros(num_rows, hidden_size, device=device)

    def __call__(
        self,
        views: ArenaViews | BlankRows,
        num_rows: int,
        metadata: AttnMetadata,
        kv_cache: KVCache,
    ) -> Tensor:
        """Final hidden states [num_rows, H]."""
        if not self._is_cuda:
            return self._run(views, num_rows, metadata, kv_cache)
        with settled_weights():
            return self._run(views, num_rows, metadata, kv_cache)

    def _run(
        self,
        views: ArenaViews | BlankRows,
        num_rows: int,
        metadata: AttnMetadata,
        kv_cache: KVCache,
    ) -> Tensor:
        ids, positions = views.input_ids[:num_rows], views.positions[:num_rows]
        if self._has_merges:
            embeds = self._merged_embeddings(views, ids)
            hidden = self.model(ids, positions, metadata, kv_cache, inputs_embeds=embeds)
        elif self.signals is not None:
            hidden = self.model(
                ids,
                positions,
                metadata,
                kv_cache,
                row_pass_kind=views.row_pass_kind[:num_rows],
                row_self_cond=views.row_self_cond[:num_rows],
                self_cond=self.signals,
            )
        else:
            hidden = self.model(ids, positions, metadata, kv_cache)
        return cast("Tensor", hidden)

    def _merged_embeddings(self, views: ArenaViews | BlankRows, ids: Tensor) -> Tensor:
        num_rows = ids.size(0)
        embeds: Tensor = self.model.embed(ids)
        ops.token_merge_embed(
            embeds,
            self.model.embedding.weight,
            views.merge_mask[:num_rows],
            views.merge_topk_ids[:num_rows],
            views.merge_topk_probs[:num_rows],
            views.merge_residual[:num_rows],
            mask_token_id=self._mask_token_id,
            merge_kind=self._merge_kind,
            renormalize=self._renormalize,
            weight=self._merge_weight,
        )
        return embeds
