# SPDX-License-Identifier: Apache-2.0
"""Layers of DiffusionGemma: attention, then a dense block and routed experts side by side.

Of several ranks each has its heads, a part of the dense width and of the experts; see
`diffulex.nn.diffusion_gemma`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from diffulex import ops
from diffulex.distributed.comm import LOCAL
from diffulex.distributed.legality import expert_shard
from diffulex.distributed.shard import ONE_RANK
from diffulex.nn.activation import GeluTanhAndMul
from diffulex.nn.attention import PagedAttention
from diffulex.nn.dispatch import LocalDispatch, ReplicatedDispatch
from diffulex.nn.experts import ExpertPart, RoutedExperts
from diffulex.nn.feed_forward import GatedMLP, MLPScratch
from diffulex.nn.moe import MoeScratch
from diffulex.nn.norm import RMSNorm
from diffulex.nn.weights import DenseExperts, new_parameter, weight_device

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.checkpoint.slices import WeightSlice
    from diffulex.distributed.comm import Comm
    from diffulex.distributed.shard import Shard
    from diffulex.families.spec.diffusion_gemma import DiffusionGemmaSpec, GemmaLayer
    from diffulex.nn.attention_metadata import AttnMetadata
    from diffulex.nn.dispatch import Dispatch
    from diffulex.nn.weights import ExpertFormat

__all__ = [
    "GemmaDecoderLayer",
    "GemmaExperts",
    "GemmaScratch",
    "GemmaSelfConditioning",
]

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm_1",
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2",
    "post_feedforward_layernorm",
)
_QKV = ("q_proj", "k_proj", "v_proj")


class GemmaAttention(PagedAttention):
    """Attention of one layer with the heads of one rank: norms on q, k and v heads, scale 1.

    Full-attention layers project no values: V is the unit-norm, unrotated K projection.
    """

    def __init__(
        self,
        spec: DiffusionGemmaSpec,
        layer: GemmaLayer,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard,
    ) -> None:
        super().__init__(
            spec.hidden_size,
            spec.num_q_heads,
            layer.num_kv_heads,
            layer.head_dim,
            eps=spec.rms_norm_eps,
            scale=1.0,
            norm_v=True,
            has_values=layer.is_sliding,
            window=spec.sliding_window if layer.is_sliding else 0,
            has_prefix_mask=False,
            dtype=dtype,
            device=device,
            shard=shard,
        )

    def weight_table(self, prefix: str) -> dict[str, torch.Tensor]:
        names = _QKV[: len(self.qkv.out_features)]
        table = {f"{prefix}{name}.weight": self.qkv.part(i)[0] for i, name in enumerate(names)}
        table[prefix + "o_proj.weight"] = self.o.part(0)[0]
        assert self.q_norm is not None
        assert self.k_norm is not None
        table[prefix + "q_norm.weight"] = self.q_norm
        table[prefix + "k_norm.weight"] = self.k_norm
        return table

    def weight_slices(self, prefix: str) -> dict[str, WeightSlice]:
        table = self.o.slices(prefix + "o_proj")
        for index, name in enumerate(_QKV[: len(self.qkv.out_features)]):
            table.update(self.qkv.slices(prefix + name, index))
        return table


class GemmaExperts(RoutedExperts, nn.Module):
    """Router and the experts of one rank. The router looks at the residual stream itself, not at its
    norm."""

    def __init__(
        self,
        spec: DiffusionGemmaSpec,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard = ONE_RANK,
    ) -> None:
        super().__init__()
        if spec.moe is None:
            raise ValueError("GemmaExperts: spec.moe: expected a description, got None")
        moe, hidden, self._name = spec.moe, spec.hidden_size, spec.names.experts
        experts = expert_shard(spec, shard)
        self._part = ExpertPart(hidden, moe, experts)
        self._is_summed_here = experts.size > shard.size
        self._expert_map = self._part.map_on(device)
        self.top_k, self.act = moe.top_k, ops.Activation.GELU_TANH
        self.eps = spec.rms_norm_eps
        # The router kernel takes weights that lose nothing in float32 sums.
        router_dtype = dtype if dtype == torch.bfloat16 else torch.float32
        self.router = new_parameter(moe.num_experts, hidden, dtype=router_dtype, device=device)
        self.router_scale = new_parameter(hidden, dtype=torch.float32, device=device)
        self.expert_scale = new_parameter(moe.num_experts, dtype=torch.float32, device=device)
        place, num_here, width = weight_device(device), len(self._part.numbers), self._part.width
        self.w13 = new_parameter(num_here, 2 * width, hidden, dtype=dtype, device=place)
        self.w2 = new_parameter(num_here, hidden, width, dtype=dtype, device=place)
        self.matrices: ExpertFormat = DenseExperts(self.w13, self.w2)
        self.dispatch: Dispatch = LocalDispatch()
        self._norm_weight: torch.Tensor | None = None
        self._is_folded = False

    def connect(self, comm: Comm) -> None:
        """Lets ranks that share the experts alone exchange."""
        if self._is_summed_here:
            self.dispatch = ReplicatedDispatch(comm)

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
        self.router_logits(scaled, self.router, scratch.logits)
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
        return self.routed(x, scratch.routing, None, scratch.out, scratch.workspace)

    def weight_table(self, prefix: str, stored: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Checkpoints in low precision have a tensor for each projection of an expert."""
        self._is_folded = False  # whoever fills the table changes the scale
        experts = prefix + self._name
        table: dict[str, torch.Tensor] = {
            f"{experts}.gate_up_proj": self.w13,
            f"{experts}.down_proj": self.w2,
        }
        if f"{experts}.0.gate_proj.weight" in stored:
            table = self._part.table(experts, self.w13, self.w2)
        return {
            **table,
            prefix + "router.proj.weight": self.router,
            prefix + "router.scale": self.router_scale,
            prefix + "router.per_expert_scale": self.expert_scale,
        }

    def weight_slices(self, prefix: str) -> dict[str, WeightSlice]:
        return self._part.slices(prefix + self._name)


class GemmaScratch:
    """Buffers of one forward of T rows, shared by all layers."""

    def __init__(
        self,
        x: torch.Tensor,
        spec: DiffusionGemmaSpec,
        metadata: AttnMetadata,
        layers: list[GemmaDecoderLayer],
    ) -> None:
        if spec.moe is None:
            raise ValueError("DiffusionGemma: spec.moe: expected a description, got None")
        by_kind = {layer.is_sliding: layer.attention for layer in layers}
        self.heads = {kind: attention.scratch(x) for kind, attention in by_kind.items()}
        self.mlp = MLPScratch(x, layers[0].mlp.down.in_features)
        self.moe = MoeScratch(x, metadata, spec.moe, layers[0].experts.matrices)
        #: [2, T, H]: outputs of the dense block and of the experts, which ranks add up together.
        self.branches = x.new_empty(2, *x.shape)
        self.dense, self.moe.out = self.branches.unbind(0)
        self.normed = torch.empty_like(x)


class GemmaDecoderLayer(nn.Module):
    """One layer: attention, then the dense block and the experts side by side."""

    def __init__(
        self,
        spec: DiffusionGemmaSpec,
        layer: GemmaLayer,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard,
    ) -> None:
        super().__init__()
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.is_sliding = layer.is_sliding
        self.norms = nn.ModuleDict(
            {name: RMSNorm(hidden, eps=eps, dtype=dtype, device=device) for name in _NORMS}
        )
        self.attention = GemmaAttention(spec, layer, dtype, device, shard)
        self.mlp = _dense_block(spec, dtype, device, shard)
        self.experts = GemmaExperts(spec, dtype, device, shard)

    def forward(
        self,
        x: torch.Tensor,
        scalars: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        metadata: AttnMetadata,
        cache: tuple[torch.Tensor, ...],
        scratch: GemmaScratch,
        comm: Comm,
    ) -> None:
        """Updates the residual stream x [T, H]; `scalars` [T, 1] multiply the result."""
        normed, dense = scratch.normed, scratch.dense
        heads = scratch.heads[self.is_sliding]
        rows = self.attention.qkv.new_rows(normed)
        self._norm("input_layernorm", x, normed, rows)
        self.attention(normed, positions, cos_sin_cache, metadata, cache, heads, rows)
        comm.all_reduce_(normed)
        self._norm_add("post_attention_layernorm", normed, x, x)
        rows = self.mlp.new_rows(normed)
        self._norm("pre_feedforward_layernorm", x, normed, rows)
        self.mlp.project(normed, scratch.mlp, dense, rows)
        self.experts.route(x, normed, scratch.moe)
        self._norm("pre_feedforward_layernorm_2", x, normed)
        routed = self.experts(normed, scratch.moe)
        comm.all_reduce_(scratch.branches)
        self._norm("post_feedforward_layernorm_1", dense, dense)
        self._norm_add("post_feedforward_layernorm_2", routed, dense, dense)
        self._norm_add("post_feedforward_layernorm", dense, x, x)
        x.mul_(scalars)

    def _norm(
        self, name: str, x: torch.Tensor, out: torch.Tensor, rows: ops.QuantizedRows | None = None
    ) -> None:
        self.norms[name](x, out, rows)

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

    def weight_slices(self, prefix: str) -> dict[str, WeightSlice]:
        return {
            **self.attention.weight_slices(prefix + "self_attn."),
            **_mlp_slices(self.mlp, prefix + "mlp."),
            **self.experts.weight_slices(prefix),
        }


def _dense_block(
    spec: DiffusionGemmaSpec, dtype: torch.dtype, device: torch.device | str, shard: Shard
) -> GatedMLP:
    size = spec.intermediate_size
    return GatedMLP(
        spec.hidden_size, size, dtype=dtype, device=device, act=GeluTanhAndMul(), shard=shard
    )


def _mlp_slices(mlp: GatedMLP, prefix: str) -> dict[str, WeightSlice]:
    return {
        **mlp.gate_up.slices(prefix + "gate_proj", 0),
        **mlp.gate_up.slices(prefix + "up_proj", 1),
        **mlp.down.slices(prefix + "down_proj"),
    }


def _mlp_table(mlp: GatedMLP, prefix: str) -> dict[str, torch.Tensor]:
    return {
        prefix + "gate_proj.weight": mlp.gate_up.part(0)[0],
        prefix + "up_proj.weight": mlp.gate_up.part(1)[0],
        prefix + "down_proj.weight": mlp.down.part(0)[0],
    }


class GemmaSelfConditioning(nn.Module):
    """What decoder rows start from: the unit norm of the embedding plus a block of the signal."""

    def __init__(
        self,
        spec: DiffusionGemmaSpec,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard = ONE_RANK,
    ) -> None:
        super().__init__()
        hidden, self.eps = spec.hidden_size, spec.rms_norm_eps
        self.pre_norm = RMSNorm(hidden, eps=self.eps, dtype=dtype, device=device)
        self.mlp = _dense_block(spec, dtype, device, shard)

    def forward(
        self, embedded: torch.Tensor, signal: torch.Tensor, comm: Comm = LOCAL
    ) -> torch.Tensor:
        """A new tensor [T, H] for embeddings and signals [T, H]; overwrites the signal."""
        self.pre_norm(signal, signal)
        signal = self.mlp(signal, MLPScratch(signal, self.mlp.down.in_features))
        comm.all_reduce_(signal)
        total = embedded.clone()
        ops.add_rms_norm(signal, total, None, self.eps)
        return signal

    def weight_table(self, prefix: str) -> dict[str, torch.Tensor]:
        return {prefix + "pre_norm.weight": self.pre_norm.weight, **_mlp_table(self.mlp, prefix)}

    def weight_slices(self, prefix: str) -> dict[str, WeightSlice]:
        return _mlp_slices(self.mlp, prefix)
