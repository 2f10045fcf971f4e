# SPDX-License-Identifier: Apache-2.0
"""Hidden states of a step from its device arrays.

Graphs and the decode loop hold on to the forward of padded steps, and the runner holds on to them. The
forward therefore knows the arrays and the model, not the runner, so that no cycle of references keeps
device memory alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.nn.attention_metadata import AttnMetadata
from diffulex.ops.attention import MaskKind
from diffulex.ops.workspace import empty_workspace
from diffulex.runner.attention_workspace import decode_workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.nn.kv_cache import KVCache
    from diffulex.runner.batch import ArenaViews, StepBuffers
    from diffulex.runner.decode_graphs import Bucket
    from diffulex.runner.model_call import ModelCall

__all__ = ["StepForward"]


class StepForward:
    """The forward of a step over the arrays of one engine.

    Args:
        config: block and page sizes.
        call: how the model is called.
        kv_cache: what it reads and stores to.
        buffers: arrays of the steps.
        shapes: padded decode steps, for which scratch is allocated once: graphs keep its address.
    """

    def __init__(
        self,
        config: Config,
        call: ModelCall,
        kv_cache: KVCache,
        buffers: StepBuffers,
        shapes: Iterable[Bucket],
    ) -> None:
        self._config, self._call, self._cache, self._buffers = config, call, kv_cache, buffers
        device = buffers.device
        num_bytes = decode_workspace_bytes(config.local_spec, shapes, device.type)
        #: Scratch of padded steps; None where none needs any.
        self.decode_workspace: Tensor | None = empty_workspace(num_bytes, device)

    def run(
        self,
        views: ArenaViews,
        num_rows: int,
        num_reqs: int,
        max_seqlen_q: int,
        max_context_len: int,
        workspace: Tensor | None,
    ) -> Tensor:
        """Hidden states [num_rows, H] of a step of any shape."""
        metadata = AttnMetadata(
            page_tables=views.first("page_tables", num_reqs),
            cu_seqlens_q=views.first("cu_seqlens_q", num_reqs + 1),
            context_lens=views.first("context_lens", num_reqs),
            valid_slices=views.first("valid_slices", num_reqs),
            mask_kinds=views.first("mask_kinds", num_reqs),
            prefix_lens=views.first("prefix_lens", num_reqs),
            padded_prefix_lens=views.first("padded_prefix_lens", num_reqs),
            q_starts=None,
            slot_mapping=views.first("slot_mapping", num_rows),
            block_size=self._config.att_block_size,
            page_size=self._config.cache.page_size,
            max_seqlen_q=max_seqlen_q,
            max_context_len=max_context_len,
            num_splits=0,
            kv_layout=self._cache.kv_layout,
            workspace=workspace,
        )
        return self._call(views, num_rows, metadata, self._cache)

    def run_bucket(self, bucket: Bucket) -> Tensor:
        """Hidden states of a padded decode step from the static arrays."""
        num_reqs, rows, max_context_len, _ = bucket
        views = self._buffers.views
        return self.run(
            views, bucket.num_rows, num_reqs, rows, max_context_len, self.decode_workspace
        )

    def fill_bucket(self, bucket: Bucket) -> None:
        """Real rows over one cached page, nothing stored: kernels must not see empty contexts."""
        num_reqs, rows, max_context_len, _ = bucket
        views = self._buffers.views
        device = self._buffers.device
        offsets = torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * bucket.num_rows
        offsets //= num_reqs
        views.input_ids.zero_()
        views.positions.zero_()
        views.slot_mapping.fill_(-1)
        views.page_tables.fill_(-1)
        views.page_tables[:num_reqs, 0] = 0
        views.cu_seqlens_q[: num_reqs + 1] = offsets
        views.valid_slices[:num_reqs] = offsets[1:]
        views.context_lens[:num_reqs] = min(self._config.cache.page_size, max_context_len)
        is_canvas = self._call.signals is not None
        kind = MaskKind.FULL if is_canvas else MaskKind.BLOCK_CAUSAL
        if rows < self._config.decode_rows:
            kind = MaskKind.CACHE_ONLY
        views.mask_kinds[:num_reqs] = int(kind)
        views.merge_mask.zero_()
        views.last_row_index.fill_(-1)
        views.logits_source.fill_(-1)
        views.row_pass_kind.fill_(1)
        views.row_self_cond.fill_(-1)
