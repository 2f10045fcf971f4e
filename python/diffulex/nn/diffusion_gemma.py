# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma: the Gemma-4 text decoder with routed experts, run as encoder or as decoder.

One set of weights serves two kinds of rows, which may share a forward. *Encoder* rows (prompts and
finished canvases) are causal and stored in the cache. *Decoder* rows (the canvas) see the cache and
each other, are never stored, and start from the self-conditioning signal of the step before. The
kinds differ in one scalar per layer; which kind a row is comes with the forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from diffulex import ops
from diffulex.checkpoint.random_weights import draw_weights
from diffulex.distributed.comm import LOCAL
from diffulex.distributed.shard import ONE_RANK
from diffulex.families.spec.diffusion_gemma import GemmaRotary
from diffulex.nn.embedding import OutputHead, TokenEmbedding
from diffulex.nn.gemma_layers import (
    GemmaDecoderLayer,
    GemmaExperts,
    GemmaScratch,
    GemmaSelfConditioning,
)
from diffulex.nn.norm import RMSNorm
from diffulex.nn.partition import Cut, Partition
from diffulex.nn.rotary import build_cos_sin_cache
from diffulex.nn.weights import new_parameter

if TYPE_CHECKING:
    from collections.abc import Collection

    from typing_extensions import Self

    from diffulex.checkpoint.slices import WeightSlice
    from diffulex.distributed.comm import Comm
    from diffulex.distributed.shard import Shard
    from diffulex.families.spec.diffusion_gemma import DiffusionGemmaSpec
    from diffulex.nn.attention_metadata import AttnMetadata
    from diffulex.nn.kv_cache import KVCache

__all__ = ["DECODER_PASS", "ENCODER_PASS", "DiffusionGemmaForDiffusionLM"]

ENCODER_PASS, DECODER_PASS = 0, 1
_ENCODER_PREFIX = "model.encoder.language_model."
_DECODER_PREFIX = "model.decoder."
_SCALAR = "layer_scalar"


class DiffusionGemmaForDiffusionLM(nn.Module):
    """Text model and tied head. Weights are uninitialised until loaded or `init_random` is called.

    Of several ranks each has its heads, a part of the widths, of the experts and of the head, and the
    whole embedding and norms; see `diffulex.nn.decoder.DecoderForDiffusionLM`.

    Attributes:
        embed_scale: factor of the embeddings, ``sqrt(H)`` rounded to the dtype of the model; also
            the normaliser of the self-conditioning signal.
    """

    def __init__(
        self,
        spec: DiffusionGemmaSpec,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard = ONE_RANK,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._is_cut = shard.size > 1
        self._comm: Comm = LOCAL
        vocab, hidden = spec.vocab_size, spec.hidden_size
        self.embed_scale = float(torch.tensor(hidden**0.5, dtype=dtype))
        self.embedding = TokenEmbedding(vocab, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            GemmaDecoderLayer(spec, layer, dtype, device, shard) for layer in spec.layers
        )
        #: [2, L]: the scalars of encoder rows, then those of decoder rows.
        self.layer_scalars = new_parameter(2, spec.num_layers, dtype=dtype, device=device)
        self.self_conditioning = GemmaSelfConditioning(spec, dtype, device, shard)
        self.norm = RMSNorm(hidden, eps=spec.rms_norm_eps, dtype=dtype, device=device)
        cut = Partition(Cut.VOCABULARY, shard)
        self.head = OutputHead(vocab, hidden, dtype=dtype, device=device, partition=cut)
        for is_sliding, rotary in ((True, spec.sliding_rotary), (False, spec.full_rotary)):
            has_layers = any(layer.is_sliding == is_sliding for layer in spec.layers)
            table = _rotary_table(spec, rotary, device) if has_layers else None
            self.register_buffer(_table_name(is_sliding), table, persistent=False)

    @property
    def comm(self) -> Comm:
        """What exchanges with the other ranks; set before the first forward of more than one."""
        return self._comm

    @comm.setter
    def comm(self, comm: Comm) -> None:
        self._comm = comm
        for layer in self.decoder_layers:
            layer.experts.connect(comm)

    @property
    def _cut_comm(self) -> Comm:
        """What adds up the parts of layers that are cut."""
        return self._comm if self._is_cut else LOCAL

    @property
    def soft_embedding_weight(self) -> torch.Tensor:
        """Table [V, H] of the self-conditioning signal: the embedding before `embed_scale`."""
        return self.embedding.weight

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A new tensor [T, H]: the scaled embeddings of ids [T] (int64)."""
        rows: torch.Tensor = self.embedding(input_ids)
        return rows.mul_(self.embed_scale)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttnMetadata,
        kv_cache: KVCache,
        inputs_embeds: torch.Tensor | None = None,
        *,
        row_pass_kind: torch.Tensor | None = None,
        row_self_cond: torch.Tensor | None = None,
        self_cond: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Final normalised hidden states [T, H] of ids and positions [T] (int64).

        Requests of mask kind FULL are canvases: on sliding layers all their rows see the same last
        W - 1 cached keys. No synchronisation and no host data: may be graph-captured.

        Args:
            inputs_embeds: [T, H] in place of the embeddings of the ids, scale included; not
                modified.
            row_pass_kind: [T] uint8, 0 encoder and 1 decoder row; None = encoder rows only, which
                skips the self-conditioning on the host.
            row_self_cond: [T] int32, row of `self_cond` with the signal of a decoder row, -1 = no
                signal (first step of a canvas: the module runs on zeros); None = no row has one.
            self_cond: [S, H] float32 signals.
        """
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds.clone()
        if row_pass_kind is None:
            scalars = self.layer_scalars[ENCODER_PASS].expand(x.size(0), -1)
        else:
            x = self._condition(x, row_pass_kind, row_self_cond, self_cond)
            scalars = self.layer_scalars.index_select(0, row_pass_kind.to(torch.int32))
        metadata = _anchored(metadata)
        layers = self.decoder_layers
        scratch = GemmaScratch(x, self.spec, metadata, layers)
        tables = {kind: getattr(self, _table_name(kind)) for kind in (True, False)}
        for index, layer in enumerate(layers):
            layer(
                x,
                scalars[:, index : index + 1],
                positions,
                tables[layer.is_sliding],
                metadata,
                kv_cache.layer(index),
                scratch,
                self._cut_comm,
            )
        hidden: torch.Tensor = self.norm(x, scratch.normed)
        return hidden

    def _condition(
        self,
        embedded: torch.Tensor,
        row_pass_kind: torch.Tensor,
        row_self_cond: torch.Tensor | None,
        self_cond: torch.Tensor | None,
    ) -> torch.Tensor:
        """The first layer's input: encoder rows as they are, decoder rows conditioned."""
        if row_self_cond is None or self_cond is None:
            signal = torch.zeros_like(embedded)
        else:
            found = self_cond.index_select(0, row_self_cond.clamp(min=0))
            # Rows without a signal may have picked up anything, NaN included.
            has_signal = (row_self_cond >= 0).unsqueeze(1)
            signal = torch.where(has_signal, found, 0.0).to(embedded.dtype)
        conditioned = self.self_conditioning(embedded, signal, self._cut_comm)
        is_decoder = (row_pass_kind == DECODER_PASS).unsqueeze(1)
        return torch.where(is_decoder, conditioned, embedded)

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, V] in the model dtype for hidden rows [n, H] of `forward`, before the soft-cap.

        `spec.final_logit_softcap` belongs to the sampler's ops, which apply it in float32. Of several
        ranks each has the columns of its `vocabulary`.
        """
        logits: torch.Tensor = self.head(hidden_rows)
        return logits

    @property
    def vocabulary(self) -> range:
        """Token ids of the logits of this rank."""
        ids = self.head.stored_rows
        return range(ids.start, ids.stop)

    @property
    def decoder_layers(self) -> list[GemmaDecoderLayer]:
        """The layers under their own type, which ModuleList hides."""
        return cast("list[GemmaDecoderLayer]", self.layers)

    def canonical_name(self, stored_name: str) -> str:
        """Name in `weight_table` of a stored tensor.

        Some checkpoints keep shared tensors below the encoder. Only the layer scalars exist on
        both sides.
        """
        is_shared = stored_name.startswith(_ENCODER_PREFIX) and not stored_name.endswith(_SCALAR)
        if not is_shared:
            return stored_name
        return _DECODER_PREFIX + stored_name.removeprefix(_ENCODER_PREFIX)

    def weight_table(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> view of the memory it must fill, with its exact shape.

        Undoes the packing of CPU weights; the next forward packs them again.
        """
        return self.weight_table_for(())

    def weight_table_for(self, stored: Collection[str]) -> dict[str, torch.Tensor]:
        """`weight_table` for a checkpoint that holds the names `stored`."""
        names = self.spec.names
        table: dict[str, torch.Tensor] = {
            names.embedding: self.embedding.weight,
            names.final_norm: self.norm.weight,
            names.head: self.head.row_major(),
            **self.self_conditioning.weight_table(_DECODER_PREFIX + "self_conditioning."),
        }
        for index, layer in enumerate(self.decoder_layers):
            prefix = names.layer.format(index)
            table.update(layer.weight_table(prefix, stored))
            encoder = f"{_ENCODER_PREFIX}layers.{index}.{_SCALAR}"
            table[encoder] = self.layer_scalars[ENCODER_PASS, index : index + 1]
            table[prefix + _SCALAR] = self.layer_scalars[DECODER_PASS, index : index + 1]
        return table

    def weight_slices(self) -> dict[str, WeightSlice]:
        """Checkpoint name -> what this rank has of the tensor; tensors it does not name are whole."""
        names = self.spec.names
        table = {
            **self.embedding.slices(names.embedding),
            **self.head.slices(names.head),
            **self.self_conditioning.weight_slices(_DECODER_PREFIX + "self_conditioning."),
        }
        for index, layer in enumerate(self.decoder_layers):
            table.update(layer.weight_slices(names.layer.format(index)))
        return table

    def finish_loading(self) -> None:
        """Folds what steps need beside the loaded weights."""
        for module in self.modules():
            if isinstance(module, GemmaExperts):
                module.fold()

    def tie_embeddings(self) -> None:
        """Lets the head use the embedding table."""
        self.head.tie(self.embedding)

    def init_random(self, seed: int, std: float = 0.02) -> Self:
        """Draws every weight, for tests and benchmarks; see `draw_weights`. Returns self."""
        draw_weights(self, seed, std)
        return self


def _table_name(is_sliding: bool) -> str:
    return "sliding_cos_sin_cache" if is_sliding else "full_cos_sin_cache"


def _rotary_table(
    spec: DiffusionGemmaSpec, rotary: GemmaRotary, device: torch.device | str
) -> torch.Tensor:
    return build_cos_sin_cache(
        spec.rotary_rows,
        rotary.rotary_dim,
        rotary.theta,
        device,
        num_turning=rotary.num_turning,
        base_dim=rotary.base_dim,
    )


def _anchored(metadata: AttnMetadata) -> AttnMetadata:
    """The metadata with the window of every canvas fixed to its first row."""
    kinds = metadata.mask_kinds
    is_canvas = (kinds & 0xFF) == int(ops.MaskKind.FULL)
    anchored = kinds | is_canvas.to(kinds.dtype) * ops.MASK_ANCHOR_BIT
    fields: dict[str, Any] = {"mask_kinds": anchored}
    return replace(metadata, **fields)
