# SPDX-License-Identifier: Apache-2.0
"""Self-attention over the paged cache and the rows of the running step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from diffulex import ops
from diffulex.checkpoint.projection import Projection
from diffulex.distributed.shard import ONE_RANK
from diffulex.nn.linear import Linear, named_projections
from diffulex.nn.partition import Cut, Partition
from diffulex.nn.weights import new_parameter

if TYPE_CHECKING:
    from diffulex.checkpoint.slices import WeightSlice
    from diffulex.distributed.shard import Shard
    from diffulex.families.spec.names import TensorNames
    from diffulex.nn.attention_metadata import AttnMetadata


class PagedAttention(nn.Module):
    """Grouped-query attention with rotary embedding over a paged cache, with the heads of one rank.

    One call is four launches: projection; norm of the heads where the family has it, rotation and
    cache store; attention; output projection.

    Args:
        scale: of the scores; None: head_dim^-0.5.
        has_values: the values are projected; else V is the unit-norm, unrotated K projection.
        window: positions that a row sees before itself, 0 for all.
        norm_v: the values get a norm without weights.
        has_prefix_mask: some strategy of the family masks a prefix apart.
    """

    def __init__(
        self,
        hidden_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        eps: float,
        scale: float | None = None,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = True,
        norm_v: bool = False,
        has_values: bool = True,
        window: int = 0,
        has_prefix_mask: bool = True,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard = ONE_RANK,
    ) -> None:
        super().__init__()
        self.head_dim, self.eps = head_dim, eps
        self.scale = head_dim**-0.5 if scale is None else scale
        self.norm_v, self.has_values = norm_v, has_values
        self.window, self.has_prefix_mask = window, has_prefix_mask
        q_size, kv_size = num_q_heads * head_dim, num_kv_heads * head_dim
        heads = (q_size, kv_size, kv_size) if has_values else (q_size, kv_size)
        cut = Partition(Cut.HEADS, shard, head_dim)
        self.qkv = Linear(
            hidden_size, heads, bias=qkv_bias, dtype=dtype, device=device, partition=cut
        )
        cut = Partition(Cut.HEAD_COLUMNS, shard, head_dim)
        self.o = Linear(
            q_size, (hidden_size,), bias=o_bias, dtype=dtype, device=device, partition=cut
        )
        #: Heads of this rank.
        self.num_q_heads = self.qkv.out_features[0] // head_dim
        self.num_kv_heads = self.qkv.out_features[1] // head_dim
        self.q_norm: nn.Parameter | None = None
        self.k_norm: nn.Parameter | None = None
        if qk_norm:
            self.q_norm = new_parameter(head_dim, dtype=dtype, device=device)
            self.k_norm = new_parameter(head_dim, dtype=dtype, device=device)

    def scratch(self, like: torch.Tensor) -> AttentionScratch:
        """Buffers of a forward of as many rows as `like` [T, ...] has."""
        heads = (self.num_q_heads, self.num_kv_heads, self.head_dim)
        return AttentionScratch(like, *heads, has_values=self.has_values)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        metadata: AttnMetadata,
        cache: tuple[torch.Tensor, ...],
        scratch: AttentionScratch,
        rows: ops.QuantizedRows | None = None,
    ) -> None:
        """Replaces x [T, H] by the attention output of its rows; for `rows` see `MatrixProduct.multiply`.

        Rows with a slot also write their keys and values to `cache`, see `KVCache.layer`; attention
        reads those rows from the step itself. Where the cache holds codes, the store leaves their
        values in these rows.
        """
        self.qkv(x, scratch.qkv, rows)
        k_scale, v_scale = cache[2:] or (None, None)
        ops.qk_norm_rope_store(
            scratch.qkv,
            positions,
            cos_sin_cache,
            self.q_norm,
            self.k_norm,
            cache[0],
            cache[1],
            metadata.slot_mapping,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eps=self.eps,
            norm_v=self.norm_v,
            v_from_raw_k=scratch.v_out is not None,
            v_out=scratch.v_out,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_layout=metadata.kv_layout,
        )
        inner = self._new_inner_rows(scratch.out_rows)
        ops.block_attention(
            scratch.q,
            scratch.k,
            scratch.v,
            cache[0],
            cache[1],
            metadata.page_tables,
            metadata.cu_seqlens_q,
            metadata.context_lens,
            metadata.valid_slices,
            metadata.mask_kinds,
            out=scratch.out,
            prefix_lens=metadata.prefix_lens if self.has_prefix_mask else None,
            padded_prefix_lens=metadata.padded_prefix_lens if self.has_prefix_mask else None,
            q_starts=metadata.q_starts,
            workspace=metadata.workspace,
            scale=self.scale,
            block_size=metadata.block_size,
            sliding_window=self.window,
            max_seqlen_q=metadata.max_seqlen_q,
            max_context_len=metadata.max_context_len,
            num_splits=metadata.num_splits,
            k_scale=k_scale,
            v_scale=v_scale,
            kv_layout=metadata.kv_layout,
            rows=inner,
        )
        self.o(scratch.out_rows, x, inner)

    def _new_inner_rows(self, heads: torch.Tensor) -> ops.QuantizedRows | None:
        """Memory for the codes of the output projection's rows [T, Hq D]; None: it makes them itself,
        where scales are of other columns than whole groups of one head, or takes none."""
        group = ops.QUANT_GROUP
        rows = None if self.head_dim % group else self.o.new_rows(heads)
        return rows if rows is None or rows.scale.size(0) * group == heads.size(1) else None


class BlockAttention(PagedAttention):
    """Attention of the families that name their tensors in `TensorNames`."""

    def weight_table(self, prefix: str, names: TensorNames) -> dict[str, torch.Tensor]:
        """Checkpoint name -> memory to fill, for the tensors of this layer below `prefix`."""
        table: dict[str, torch.Tensor] = {}
        if self.q_norm is not None and self.k_norm is not None:
            table[prefix + names.q_norm] = self.q_norm
            table[prefix + names.k_norm] = self.k_norm
        parts = {names.o: self.o.part(0)}
        if names.qkv is not None:
            parts[names.qkv] = self.qkv.whole()
        else:
            for index, name in enumerate((names.q, names.k, names.v)):
                parts[name] = self.qkv.part(index)
        for name, (weight, bias) in parts.items():
            table[f"{prefix}{name}.weight"] = weight
            if bias is not None:
                table[f"{prefix}{name}.bias"] = bias
        return table

    def weight_slices(self, prefix: str, names: TensorNames) -> dict[str, WeightSlice]:
        """Checkpoint name -> what this rank has of the tensor, for those that are cut."""
        table = self.o.slices(prefix + names.o)
        if names.qkv is not None:
            return {**table, **self.qkv.slices(prefix + names.qkv)}
        for index, name in enumerate((names.q, names.k, names.v)):
            table.update(self.qkv.slices(prefix + name, index))
        return table

    def projections(self, prefix: str, names: TensorNames) -> dict[str, Projection]:
        """Module name -> projection, for adapters; q, k and v also where one tensor holds them."""
        table = named_projections(self.o, [prefix + names.o])
        parts = [prefix + name for name in (names.q, names.k, names.v)]
        if names.qkv is None:
            return {**named_projections(self.qkv, parts), **table}
        fused = prefix + names.qkv
        part, tensor, start = self.qkv.stored_part(), f"{fused}.weight", 0
        every = slice(0, self.qkv.num_rows)
        table[fused] = Projection(self.qkv, every, tensor, slice(0, part.shape[0]), part)
        for index, name in enumerate(parts):
            part = self.qkv.stored_part(index)
            stored = slice(start, start + part.shape[0])
            table[name] = Projection(self.qkv, self.qkv.rows_of(index), tensor, stored, part)
            start = stored.stop
        return table


class AttentionScratch:
    """Buffers of one forward of T rows, shared by the layers of one kind, with the views the ops take."""

    __slots__ = ("k", "out", "out_rows", "q", "qkv", "v", "v_out")

    def __init__(
        self,
        like: torch.Tensor,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        has_values: bool = True,
    ) -> None:
        num_rows = like.size(0)
        heads = num_q_heads + num_kv_heads * (2 if has_values else 1)
        self.qkv = like.new_empty(num_rows, heads * head_dim)
        by_head = self.qkv.view(num_rows, heads, head_dim)
        self.q = by_head[:, :num_q_heads]
        self.k = by_head[:, num_q_heads : num_q_heads + num_kv_heads]
        #: Values that the projection does not have.
        self.v_out = None if has_values else like.new_empty(num_rows, num_kv_heads, head_dim)
        self.v = by_head[:, num_q_heads + num_kv_heads :] if self.v_out is None else self.v_out
        self.out_rows = like.new_empty(num_rows, num_q_heads * head_dim)
        self.out = self.out_rows.view(num_rows, num_q_heads, head_dim)
