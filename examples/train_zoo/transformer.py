# SPDX-License-Identifier: Apache-2.0
"""One small pre-norm transformer with the options that the zoo's families need.

Options: bias of the query, key and value projections, per-head norms, partial rotary, and routed
experts with a sigmoid router. Parameter names follow the Qwen template; ``families`` translates them
into the names of each published format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import MLP, Attention, DecoderLayer, RMSNorm, initialise, rotary_tables


@dataclass(frozen=True)
class MoEShape:
    """Routed experts of every layer from ``first_k_dense`` on, and the shared expert."""

    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 48
    shared_size: int = 96
    num_groups: int = 4
    top_groups: int = 2
    scaling: float = 2.5
    first_k_dense: int = 1


@dataclass(frozen=True)
class Shape:
    """Sizes and options of one model. Every head has ``head_dim`` dimensions."""

    vocab_size: int
    mask_token_id: int
    eos_token_id: int
    block_size: int
    hidden_size: int = 192
    intermediate_size: int = 320
    num_hidden_layers: int = 6
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    head_dim: int = 64
    rotary_dim: int = 64
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 512
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: MoEShape | None = None


def mix_experts(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, weights: Tensor, *, use_gelu: bool = False
) -> Tensor:
    """Sum over experts ``weights * down(act(gate x) * up x)``; unselected experts have weight 0.

    gate, up: [experts, size, hidden]; down: [experts, hidden, size]; weights: [..., experts]. The
    experts are few and small, so all of them run as one wide layer.
    """
    num_experts, size, hidden = gate.shape
    gated = F.linear(x, gate.reshape(-1, hidden))
    gated = F.gelu(gated, approximate="tanh") if use_gelu else F.silu(gated)
    inner = gated * F.linear(x, up.reshape(-1, hidden))
    inner = inner.unflatten(-1, (num_experts, size)) * weights[..., None].to(inner.dtype)
    return F.linear(inner.flatten(-2), down.transpose(0, 1).reshape(hidden, -1))


class GroupedRouter(nn.Module):
    """Sigmoid router in fp32: bias and groups decide the selection, plain scores the weights."""

    expert_bias: Tensor
    load: Tensor

    def __init__(self, shape: MoEShape, hidden: int) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.num_experts, hidden))
        self.register_buffer("expert_bias", torch.zeros(shape.num_experts))
        #: Share of rows that chose each expert in the last training forward.
        self.register_buffer("load", torch.zeros(shape.num_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Weight of every expert, [..., experts]; zero for those not selected."""
        shape = self.shape
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        with torch.no_grad():
            choice = scores + self.expert_bias
            grouped = choice.unflatten(-1, (shape.num_groups, -1))
            per_group = min(2, grouped.shape[-1])
            group_score = grouped.topk(per_group, dim=-1).values.sum(-1)
            kept = torch.zeros_like(group_score, dtype=torch.bool)
            kept = kept.scatter(-1, group_score.topk(shape.top_groups, dim=-1).indices, True)
            choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
            chosen = choice.topk(shape.top_k, dim=-1).indices
            selected = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
            if self.training and torch.is_grad_enabled():
                self.load.copy_(selected.flatten(0, -2).mean(0))
        weights = scores * selected
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * shape.scaling

    def balance(self, rate: float = 1e-3) -> None:
        """Move the bias of every expert one step towards equal load; no gradient is involved."""
        self.expert_bias += rate * (self.load.mean() - self.load).sign()


class MoE(nn.Module):
    """Routed experts and a shared expert; the scaling factor applies to the routed weights only."""

    def __init__(self, shape: MoEShape, hidden: int) -> None:
        super().__init__()
        experts = shape.num_experts
        self.router = GroupedRouter(shape, hidden)
        self.gate_proj = nn.Parameter(torch.empty(experts, shape.expert_size, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, shape.expert_size, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, shape.expert_size))
        self.shared_experts = MLP(hidden, shape.shared_size)

    def forward(self, x: Tensor) -> Tensor:
        routed = mix_experts(x, self.gate_proj, self.up_proj, self.down_proj, self.router(x))
        out: Tensor = routed + self.shared_experts(x)
        return out


class Transformer(nn.Module):
    """Embedding, layers, final norm and a head tied to the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        layers = []
        for index in range(shape.num_hidden_layers):
            attention = Attention(shape, qkv_bias=shape.qkv_bias, qk_norm=shape.qk_norm)
            is_moe = shape.moe is not None and index >= shape.moe.first_k_dense
            mlp = MoE(shape.moe, shape.hidden_size) if shape.moe is not None and is_moe else None
            layers.append(DecoderLayer(shape, attention, mlp))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def initialise(self, seed: int) -> None:
        """Draw all matrices."""
        initialise(self, seed, self.shape.num_hidden_layers)

    def balance_experts(self) -> None:
        """One step of the routers' selection bias."""
        for layer in self.layers:
            if isinstance(layer.mlp, MoE):
                layer.mlp.router.balance()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor,
        num_logit_rows: int | None = None,
        embeddings: Tensor | None = None,
    ) -> Tensor:
        """Logits of the first ``num_logit_rows`` rows (all when None).

        tokens, positions: [batch, rows] int64. mask: additive, [batch or 1, 1, rows, rows].
        ``embeddings`` [batch, rows, hidden] replaces the embeddings of the tokens.
        """
        x = self.embed_tokens(tokens) if embeddings is None else embeddings
        cos, sin = rotary_tables(positions, self.shape.rotary_dim, self.shape.rope_theta)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        if num_logit_rows is not None:
            x = x[:, :num_logit_rows]
        return F.linear(self.norm(x), self.embed_tokens.weight)


def shrink(shape: Shape, layers: int) -> Shape:
    """The same model with fewer layers, for short runs."""
    return replace(shape, num_hidden_layers=layers)
