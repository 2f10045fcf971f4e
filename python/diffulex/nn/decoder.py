# SPDX-License-Identifier: Apache-2.0
"""The generic decoder: one transformer for every family that a ModelSpec describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from diffulex.checkpoint.random_weights import draw_weights
from diffulex.distributed.comm import LOCAL
from diffulex.distributed.legality import expert_shard
from diffulex.distributed.shard import ONE_RANK
from diffulex.nn.attention import BlockAttention
from diffulex.nn.embedding import OutputHead, TokenEmbedding
from diffulex.nn.feed_forward import FeedForward, GatedMLP
from diffulex.nn.moe import MoeFeedForward
from diffulex.nn.norm import RMSNorm
from diffulex.nn.partition import Cut, Partition
from diffulex.nn.rotary import build_cos_sin_cache

if TYPE_CHECKING:
    from collections.abc import Collection

    from typing_extensions import Self

    from diffulex.checkpoint.projection import Projection
    from diffulex.checkpoint.slices import WeightSlice
    from diffulex.distributed.comm import Comm
    from diffulex.distributed.shard import Shard
    from diffulex.families.spec import ModelSpec
    from diffulex.nn.attention_metadata import AttnMetadata
    from diffulex.nn.kv_cache import KVCache

__all__ = ["DecoderForDiffusionLM", "DecoderLayer", "build_feed_forward"]


def build_feed_forward(
    spec: ModelSpec,
    layer: int,
    dtype: torch.dtype,
    device: torch.device | str,
    shard: Shard = ONE_RANK,
) -> FeedForward:
    """The feed-forward block of layer number `layer`, or a rank's part of it."""
    if spec.moe is not None and layer in spec.moe.layers:
        return MoeFeedForward(
            spec.hidden_size,
            spec.moe,
            dtype=dtype,
            device=device,
            shard=shard,
            experts=expert_shard(spec, shard),
        )
    size = spec.intermediate_size
    return GatedMLP(spec.hidden_size, size, dtype=dtype, device=device, shard=shard)


class DecoderLayer(nn.Module):
    """One decoder layer; the norms between layers belong to the model's residual stream."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard = ONE_RANK,
    ) -> None:
        super().__init__()
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.input_norm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.attention = BlockAttention(
            hidden,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            eps=eps,
            qkv_bias=spec.qkv_bias,
            o_bias=spec.o_bias,
            qk_norm=spec.qk_norm,
            dtype=dtype,
            device=device,
            shard=shard,
        )
        self.post_norm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.mlp = build_feed_forward(spec, layer, dtype, device, shard)


class DecoderForDiffusionLM(nn.Module):
    """Decoder and head. Weights are uninitialised until loaded or `init_random` is called.

    A family registered from outside is a subclass that adds `read_spec`, the reader of its
    ``config.json``; a built-in one names its reader in its record.

    Of several ranks each has its heads, a part of the widths, of the experts and of the head, and the
    whole embedding and norms; hidden states are the same on all of them. Ranks that share the experts
    alone have all of the rest.

    Attributes:
        spec: of the whole model.
        local_spec: `spec` with the heads of this rank.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard = ONE_RANK,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.local_spec = spec.per_rank(shard.size)
        self._is_cut = shard.size > 1
        self._comm: Comm = LOCAL
        rows, hidden = spec.embedding_rows, spec.hidden_size
        self.embedding = TokenEmbedding(rows, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer, dtype, device, shard) for layer in range(spec.num_layers)
        )
        self.norm = RMSNorm(hidden, eps=spec.rms_norm_eps, dtype=dtype, device=device)
        cut = Partition(Cut.VOCABULARY, shard)
        self.head = OutputHead(rows, hidden, dtype=dtype, device=device, partition=cut)
        self.cos_sin_cache: torch.Tensor
        self.register_buffer(
            "cos_sin_cache",
            build_cos_sin_cache(spec.rotary_rows, spec.rotary_dim, spec.rope_theta, device),
            persistent=False,
        )

    @property
    def comm(self) -> Comm:
        """What exchanges with the other ranks; set before the first forward of more than one."""
        return self._comm

    @comm.setter
    def comm(self, comm: Comm) -> None:
        self._comm = comm
        for layer in self.decoder_layers:
            layer.mlp.connect(comm)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A new tensor [T, H]: what the first layer sees for ids [T] (int64)."""
        rows: torch.Tensor = self.embedding(input_ids)
        return rows

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttnMetadata,
        kv_cache: KVCache,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Final normalised hidden states [T, H] of ids and positions [T] (int64).

        `inputs_embeds` [T, H] replaces the embedding of the ids and is not modified. Rows with a
        slot are stored in `kv_cache`. No synchronisation and no host data: may be graph-captured.
        """
        residual = self.embed(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        comm = self._comm if self._is_cut else LOCAL
        scratch = self.decoder_layers[0].attention.scratch(residual)
        # Blocks of one class have one size, so that one set of buffers serves all layers.
        block_scratch: dict[type[FeedForward], Any] = {}
        x = torch.empty_like(residual)
        cos_sin_cache = self.cos_sin_cache
        for index, layer in enumerate(self.decoder_layers):
            attention, block = layer.attention, layer.mlp
            rows = attention.qkv.new_rows(x)
            if index == 0:
                layer.input_norm(residual, x, rows)
            else:
                comm.add_norm_(layer.input_norm, x, residual, rows)
            cache = kv_cache.layer(index)
            attention(x, positions, cos_sin_cache, metadata, cache, scratch, rows)
            rows = block.new_rows(x)
            comm.add_norm_(layer.post_norm, x, residual, rows)
            kind = type(block)
            if kind not in block_scratch:
                block_scratch[kind] = block.new_scratch(x, metadata)
            x = block(x, block_scratch[kind], rows)
        comm.add_norm_(self.norm, x, residual)
        return x

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] in the model dtype for hidden rows [n, H] of `forward`.

        Of several ranks each has the columns of its `vocabulary`.
        """
        logits: torch.Tensor = self.head(hidden_rows)
        num_columns = len(self.vocabulary)
        if logits.size(1) != num_columns:
            # The sampler takes packed rows.
            logits = logits[:, :num_columns].contiguous()
        return logits

    @property
    def vocabulary(self) -> range:
        """Token ids of the logits of this rank."""
        ids = self.head.stored_rows
        return range(ids.start, min(ids.stop, self.spec.vocab_size))

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers under their own type, which ModuleList hides."""
        return cast("list[DecoderLayer]", self.layers)

    def weight_table(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> view of the memory it must fill, with its exact shape.

        Undoes the packing of CPU weights; the next forward packs them again.
        """
        return self.weight_table_for(())

    def weight_table_for(self, stored: Collection[str]) -> dict[str, torch.Tensor]:
        """`weight_table` for a checkpoint that holds the names `stored`.

        The names differ from those of `weight_table` where a family's checkpoints come in several
        layouts.
        """
        names = self.spec.names
        table: dict[str, torch.Tensor] = {
            names.embedding: self.embedding.weight,
            names.final_norm: self.norm.weight,
            names.head: self.head.row_major(),
        }
        for index, layer in enumerate(self.decoder_layers):
            prefix = names.layer.format(index)
            table[prefix + names.input_norm] = layer.input_norm.weight
            table[prefix + names.post_norm] = layer.post_norm.weight
            table.update(layer.attention.weight_table(prefix, names))
            table.update(layer.mlp.weight_table(prefix, names, stored))
        return table

    def weight_slices(self) -> dict[str, WeightSlice]:
        """Checkpoint name -> what this rank has of the tensor; tensors it does not name are whole."""
        names = self.spec.names
        table = {**self.embedding.slices(names.embedding), **self.head.slices(names.head)}
        for index, layer in enumerate(self.decoder_layers):
            prefix = names.layer.format(index)
            table.update(layer.attention.weight_slices(prefix, names))
            table.update(layer.mlp.weight_slices(prefix, names))
        return table

    def projections(self) -> dict[str, Projection]:
        """Module name in the checkpoint -> projection that an adapter may change."""
        names = self.spec.names
        table: dict[str, Projection] = {}
        for index, layer in enumerate(self.decoder_layers):
            prefix = names.layer.format(index)
            table.update(layer.attention.projections(prefix, names))
            table.update(layer.mlp.projections(prefix, names))
        return table

    def tie_embeddings(self) -> None:
        """Lets the head use the embedding table."""
        self.head.tie(self.embedding)

    def init_random(self, seed: int, std: float = 0.02) -> Self:
        """Draws every weight, for tests and benchmarks; see `draw_weights`. Returns self."""
        draw_weights(self, seed, std)
        return self
