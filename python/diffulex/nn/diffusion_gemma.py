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
from diffulex.families.spec.diffusion_gemma import GemmaRotary
from diffulex.nn.activation import GeluTanhAndMul
from diffulex.nn.dispatch import LocalDispatch
from diffulex.nn.embedding import OutputHead, TokenEmbedding
from diffulex.nn.feed_forward import GatedMLP, MLPScratch
from diffulex.nn.linear import Linear, MatrixProduct
from diffulex.nn.moe import MoeScratch, table_by_expert
from diffulex.nn.norm import RMSNorm
from diffulex.nn.rotary import build_cos_sin_cache
from diffulex.nn.weights import DenseExperts, weight_device

if TYPE_CHECKING:
    from collections.abc import Collection

    from typing_extensions import Self

    from diffulex.families.spec.diffusion_gemma import DiffusionGemmaSpec, GemmaLayer
    from diffulex.nn.attention_metadata import AttnMetadata
    from diffulex.nn.dispatch import Dispatch
    from diffulex.nn.kv_cache import KVCache
    from diffulex.nn.weights import ExpertFormat

__all__ = ["DECODER_PASS", "ENCODER_PASS", "DiffusionGemmaForDiffusionLM"]

ENCODER_PASS, DECODER_PASS = 0, 1
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
    "post_feedforward_layernorm",
)
_ENCODER_PREFIX = "model.encoder.language_model."
_DECODER_PREFIX = "model.decoder."
_SCALAR = "layer_scalar"


def _parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class _HeadScratch:
    """Attention buffers of the layers of one kind, with the views the ops take."""

    def __init__(self, like: torch.Tensor, num_q_heads: int, layer: GemmaLayer) -> None:
        num_rows, heads, size = like.size(0), layer.num_kv_heads, layer.head_dim
        # Layers that derive V from K have no V in the projection, but a buffer of its own.
        projected = num_q_heads + heads * (2 if layer.is_sliding else 1)
        self.qkv = like.new_empty(num_rows, projected * size)
        by_head = self.qkv.view(num_rows, projected, size)
        self.q = by_head[:, :num_q_heads]
        self.k = by_head[:, num_q_heads : num_q_heads + heads]
        self.v_out = None if layer.is_sliding else like.new_empty(num_rows, heads, size)
        self.v = by_head[:, num_q_heads + heads :] if self.v_out is None else self.v_out
        self.out_rows = like.new_empty(num_rows, num_q_heads * size)
        self.out = self.out_rows.view(num_rows, num_q_heads, size)


class GemmaAttention(nn.Module):
    """Attention of one layer: norms on q, k and v heads, scale 1.

    Full-attention layers project no values: V is the unit-norm, unrotated K projection.
    """

    def __init__(
        self,
        spec: DiffusionGemmaSpec,
        layer: GemmaLayer,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_q_heads = spec.num_q_heads
        self.eps = spec.rms_norm_eps
        self.window = spec.sliding_window if layer.is_sliding else 0
        kv_size = layer.num_kv_heads * layer.head_dim
        sizes = [spec.num_q_heads * layer.head_dim, kv_size]
        if layer.is_sliding:
            sizes.append(kv_size)
        self.qkv = Linear(spec.hidden_size, sizes, dtype=dtype, device=device)
        self.o = Linear(sizes[0], (spec.hidden_size,), dtype=dtype, device=device)
        self.q_norm = _parameter(layer.head_dim, dtype=dtype, device=device)
        self.k_norm = _parameter(layer.head_dim, dtype=dtype, device=device)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        metadata: AttnMetadata,
        cache: tuple[torch.Tensor, torch.Tensor],
        scratch: _HeadScratch,
    ) -> None:
        """Replaces x [T, H] by the attention output of its rows; stores rows that have a slot."""
        self.qkv(x, scratch.qkv)
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
            num_kv_heads=self.layer.num_kv_heads,
            head_dim=self.layer.head_dim,
            eps=self.eps,
            norm_v=True,
            v_from_raw_k=scratch.v_out is not None,
            v_out=scratch.v_out,
            kv_layout=metadata.kv_layout,
        )
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
            q_starts=metadata.q_starts,
            workspace=metadata.workspace,
            scale=1.0,
            block_size=metadata.block_size,
            sliding_window=self.window,
            max_seqlen_q=metadata.max_seqlen_q,
            max_context_len=metadata.max_context_len,
            num_splits=metadata.num_splits,
            kv_layout=metadata.kv_layout,
        )
        self.o(scratch.out_rows, x)

    def weight_table(self, prefix: str) -> dict[str, torch.Tensor]:
        names = ["q_proj", "k_proj", "v_proj"][: len(self.qkv.out_features)]
        table = {f"{prefix}{name}.weight": self.qkv.part(i)[0] for i, name in enumerate(names)}
        table[prefix + "o_proj.weight"] = self.o.part(0)[0]
        table[prefix + "q_norm.weight"] = self.q_norm
        table[prefix + "k_norm.weight"] = self.k_norm
        return table


class GemmaExperts(nn.Module):
    """Router and experts. The router looks at the residual stream itself, not at its norm."""

    def __init__(
        self, spec: DiffusionGemmaSpec, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        if spec.moe is None:
            raise ValueError("GemmaExperts: spec.moe: expected a description, got None")
        moe, hidden = spec.moe, spec.hidden_size
        self.top_k = moe.top_k
        self.eps = spec.rms_norm_eps
        # The router kernel takes weights that lose nothing in float32 sums.
        router_dtype = dtype if dtype == torch.bfloat16 else torch.float32
        self.router = _parameter(moe.num_experts, hidden, dtype=router_dtype, device=device)
        self.router_scale = _parameter(hidden, dtype=torch.float32, device=device)
        self.expert_scale = _parameter(moe.num_experts, dtype=torch.float32, device=device)
        place = weight_device(device)
        self.w13 = _parameter(
            moe.num_experts, 2 * moe.intermediate_size, hidden, dtype=dtype, device=place
        )
        self.w2 = _parameter(
            moe.num_experts, hidden, moe.intermediate_size, dtype=dtype, device=place
        )
        self.matrices: ExpertFormat = DenseExperts(self.w13, self.w2)
        self.dispatch: Dispatch = LocalDispatch()
        self._norm_weight: torch.Tensor | None = None
        self._is_folded = False

    def fold(self) -> None:
        """Prepares the router's norm weight, ``router_scale * H^-0.5``, from the loaded scale.

        Again into the same memory, whose address CUDA graphs keep. Waits for the device: kernels read
        weights ahead of the launches in front of them.
        """
        weight = self.router_scale * self.router_scale.numel() ** -0.5
        if self._norm_weight is None:
            self._norm_weight = weight
        else:
            self._norm_weight.copy_(weight)
        self._is_folded = True
        if self._norm_weight.is_cuda:
            torch.cuda.current_stream(self._norm_weight.device).synchronize()

    def route(self, residual: torch.Tensor, scaled: torch.Tensor, scratch: MoeScratch) -> None:
        """Experts and weights of rows [T, H]; `scaled` is a buffer of the same shape."""
        if not self._is_folded:  # filled by hand; the loader folds
            self.fold()
        assert self._norm_weight is not None
        ops.rms_norm(residual, self._norm_weight, self.eps, out=scaled)
        ops.router_gemm(scaled, self.router, out=scratch.logits)
        ops.moe_topk(
            scratch.logits,
            self.top_k,
            renormalize=True,
            expert_scale=self.expert_scale,
            token_valid=scratch.token_valid,
            out=scratch.routing,
        )
        if self.top_k == 1:
            # The op normalises several scores only; the single one divided by itself is 1.
            best = scratch.routing.ids[:, 0].clamp(min=0)
            torch.index_select(self.expert_scale, 0, best, out=scratch.routing.weights[:, 0])

    def forward(self, x: torch.Tensor, scratch: MoeScratch) -> torch.Tensor:
        """Weighted sum of the routed experts of rows x [T, H], in the scratch."""
        rows, routing, _ = self.dispatch.send(x, scratch.routing, None)
        product = self.matrices.product(
            rows,
            routing,
            act=ops.Activation.GELU_TANH,
            out=scratch.out,
            workspace=scratch.workspace,
        )
        return self.dispatch.receive(product)

    def weight_table(self, prefix: str, stored: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Checkpoints in low precision have a tensor for each projection of an expert."""
        self._is_folded = False  # whoever fills the table changes the scale
        experts = prefix + "experts"
        table: dict[str, torch.Tensor] = {
            f"{experts}.gate_up_proj": self.w13,
            f"{experts}.down_proj": self.w2,
        }
        if f"{experts}.0.gate_proj.weight" in stored:
            table = table_by_expert(experts, self.w13, self.w2)
        return {
            **table,
            prefix + "router.proj.weight": self.router,
            prefix + "router.scale": self.router_scale,
            prefix + "router.per_expert_scale": self.expert_scale,
        }


class _Scratch:
    """Buffers of one forward of T rows, shared by all layers."""

    def __init__(
        self,
        x: torch.Tensor,
        spec: DiffusionGemmaSpec,
        metadata: AttnMetadata,
        experts: ExpertFormat,
    ) -> None:
        if spec.moe is None:
            raise ValueError("DiffusionGemma: spec.moe: expected a description, got None")
        self.heads = {
            layer.is_sliding: _HeadScratch(x, spec.num_q_heads, layer)
            for layer in dict.fromkeys(spec.layers)
        }
        self.mlp = MLPScratch(x, spec.intermediate_size)
        self.moe = MoeScratch(x, metadata, spec.moe, experts)
        self.dense = torch.empty_like(x)
        self.normed = torch.empty_like(x)


class GemmaDecoderLayer(nn.Module):
    """One layer: attention, then the dense block and the experts side by side."""

    def __init__(
        self,
        spec: DiffusionGemmaSpec,
        layer: GemmaLayer,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.is_sliding = layer.is_sliding
        self.norms = nn.ModuleDict(
            {name: RMSNorm(hidden, eps=eps, dtype=dtype, device=device) for name in _NORMS}
        )
        self.attention = GemmaAttention(spec, layer, dtype, device)
        self.mlp = GatedMLP(
            hidden, spec.intermediate_size, dtype=dtype, device=device, act=GeluTanhAndMul()
        )
        self.experts = GemmaExperts(spec, dtype, device)

    def forward(
        self,
        x: torch.Tensor,
        scalars: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        metadata: AttnMetadata,
        cache: tuple[torch.Tensor, torch.Tensor],
        scratch: _Scratch,
    ) -> None:
        """Updates the residual stream x [T, H]; `scalars` [T, 1] multiply the result."""
        normed, dense = scratch.normed, scratch.dense
        self._norm("input_layernorm", x, normed)
        self.attention(
            normed, positions, cos_sin_cache, metadata, cache, scratch.heads[self.is_sliding]
        )
        self._norm_add("post_attention_layernorm", normed, x, x)
        self._norm("pre_feedforward_layernorm", x, normed)
        self.mlp.project(normed, scratch.mlp, dense)
        self._norm("post_feedforward_layernorm_1", dense, dense)
        self.experts.route(x, normed, scratch.moe)
        self._norm("pre_feedforward_layernorm_2", x, normed)
        routed = self.experts(normed, scratch.moe)
        self._norm_add("post_feedforward_layernorm_2", routed, dense, dense)
        self._norm_add("post_feedforward_layernorm", dense, x, x)
        x.mul_(scalars)

    def _norm(self, name: str, x: torch.Tensor, out: torch.Tensor) -> None:
        self.norms[name](x, out)

    def _norm_add(
        self, name: str, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor
    ) -> None:
        """out = norm(x) + residual, rounded once."""
        norm = cast("RMSNorm", self.norms[name])
        ops.rms_norm_add(x, residual, norm.weight, norm.eps, out=out)

    def weight_table(self, prefix: str, stored: Collection[str]) -> dict[str, torch.Tensor]:
        table: dict[str, torch.Tensor] = {
            f"{prefix}{name}.weight": cast("RMSNorm", norm).weight
            for name, norm in self.norms.items()
        }
        table.update(self.attention.weight_table(prefix + "self_attn."))
        table.update(_mlp_table(self.mlp, prefix + "mlp."))
        table.update(self.experts.weight_table(prefix, stored))
        return table


def _mlp_table(mlp: GatedMLP, prefix: str) -> dict[str, torch.Tensor]:
    return {
        prefix + "gate_proj.weight": mlp.gate_up.part(0)[0],
        prefix + "up_proj.weight": mlp.gate_up.part(1)[0],
        prefix + "down_proj.weight": mlp.down.part(0)[0],
    }


class GemmaSelfConditioning(nn.Module):
    """What decoder rows start from: the unit norm of the embedding plus a block of the signal."""

    def __init__(
        self, spec: DiffusionGemmaSpec, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        hidden, self.eps = spec.hidden_size, spec.rms_norm_eps
        self.pre_norm = RMSNorm(hidden, eps=self.eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(
            hidden, spec.intermediate_size, dtype=dtype, device=device, act=GeluTanhAndMul()
        )

    def forward(self, embedded: torch.Tensor, signal: torch.Tensor) -> torch.Tensor:
        """A new tensor [T, H] for embeddings and signals [T, H]; overwrites the signal."""
        self.pre_norm(signal, signal)
        signal = self.mlp(signal, MLPScratch(signal, self.mlp.down.in_features))
        total = embedded.clone()
        ops.add_rms_norm(signal, total, None, self.eps)
        return signal

    def weight_table(self, prefix: str) -> dict[str, torch.Tensor]:
        return {prefix + "pre_norm.weight": self.pre_norm.weight, **_mlp_table(self.mlp, prefix)}


class DiffusionGemmaForDiffusionLM(nn.Module):
    """Text model and tied head. Weights are uninitialised until loaded or `init_random` is called.

    Attributes:
        embed_scale: factor of the embeddings, ``sqrt(H)`` rounded to the dtype of the model; also
            the normaliser of the self-conditioning signal.
    """

    def __init__(
        self, spec: DiffusionGemmaSpec, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.spec = spec
        vocab, hidden = spec.vocab_size, spec.hidden_size
        self.embed_scale = float(torch.tensor(hidden**0.5, dtype=dtype))
        self.embedding = TokenEmbedding(vocab, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            GemmaDecoderLayer(spec, layer, dtype, device) for layer in spec.layers
        )
        #: [2, L]: the scalars of encoder rows, then those of decoder rows.
        self.layer_scalars = _parameter(2, spec.num_layers, dtype=dtype, device=device)
        self.self_conditioning = GemmaSelfConditioning(spec, dtype, device)
        self.norm = RMSNorm(hidden, eps=spec.rms_norm_eps, dtype=dtype, device=device)
        self.head = OutputHead(vocab, hidden, dtype=dtype, device=device)
        for is_sliding, rotary in ((True, spec.sliding_rotary), (False, spec.full_rotary)):
            has_layers = any(layer.is_sliding == is_sliding for layer in spec.layers)
            table = _rotary_table(spec, rotary, device) if has_layers else None
            self.register_buffer(_table_name(is_sliding), table, persistent=False)

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
        scratch = _Scratch(x, self.spec, metadata, layers[0].experts.matrices)
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
        conditioned = self.self_conditioning(embedded, signal)
        is_decoder = (row_pass_kind == DECODER_PASS).unsqueeze(1)
        return torch.where(is_decoder, conditioned, embedded)

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, V] in the model dtype for hidden rows [n, H] of `forward`, before the soft-cap.

        `spec.final_logit_softcap` belongs to the sampler's ops, which apply it in float32.
        """
        logits: torch.Tensor = self.head(hidden_rows)
        return logits

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

    def finish_loading(self) -> None:
        """Folds what steps need beside the loaded weights."""
        for module in self.modules():
            if isinstance(module, GemmaExperts):
                module.fold()

    def tie_embeddings(self) -> None:
        """Lets the head use the embedding table."""
        self.head.tie(self.embedding)

    def init_random(self, seed: int, std: float = 0.02) -> Self:
        """Fills every weight from a seeded generator, for tests and benchmarks; returns self.

        Matrices N(0, std^2); norms, scales and layer scalars 1 + N(0, 0.1^2).
        """
        self.tie_embeddings()
        for module in self.modules():
            if isinstance(module, MatrixProduct):
                module.row_major()
            if isinstance(module, GemmaExperts):
                module.weight_table("")
        generator = torch.Generator(device=self.embedding.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            is_matrix = name.endswith((".router", ".w13", ".w2")) or (
                parameter.dim() > 1 and name != "layer_scalars"
            )
            mean, deviation = (0.0, std) if is_matrix else (1.0, 0.1)
            parameter.normal_(mean, deviation, generator=generator)
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
