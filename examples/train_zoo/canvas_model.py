# SPDX-License-Identifier: Apache-2.0
"""Pure-torch DiffusionGemma text model: causal encoder rows and canvas decoder rows in one forward.

Rows of the decoder pass come first, then those of the encoder pass; the masks say what each row
sees. Both passes share all weights but the scalar at the end of each layer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model import initialise, rotate
from transformer import mix_experts

if TYPE_CHECKING:
    from pathlib import Path

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class CanvasShape:
    """Sizes of the model; the fields have the names of ``text_config``."""

    vocab_size: int
    eos_token_id: int
    canvas_length: int = 32
    hidden_size: int = 192
    intermediate_size: int = 160
    num_attention_heads: int = 3
    num_key_value_heads: int = 1
    head_dim: int = 64
    sliding_window: int = 64
    layer_types: tuple[str, ...] = (SLIDING, FULL, SLIDING, SLIDING, FULL)
    num_experts: int = 8
    top_k_experts: int = 2
    moe_intermediate_size: int = 32
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float = 30.0
    sliding_theta: float = 10_000.0
    full_theta: float = 1_000_000.0
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 512

    @property
    def embed_scale(self) -> float:
        """Factor of every embedding."""
        return float(self.hidden_size) ** 0.5


class ScaleNorm(nn.Module):
    """Root-mean-square norm, all in fp32 with one rounding; without weight when not ``scaled``."""

    def __init__(self, size: int, eps: float, scaled: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size)) if scaled else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * (h.square().mean(-1, keepdim=True) + self.eps) ** -0.5
        if self.weight is not None:
            h = h * self.weight.float()
        return h.to(x.dtype)


class GeluMLP(nn.Module):
    """Feed-forward layer gated by the tanh approximation of GELU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(
            F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)
        )
        return out


class CanvasAttention(nn.Module):
    """Attention with scale 1; in full layers the value comes from the key projection."""

    def __init__(self, shape: CanvasShape, is_full: bool) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim = shape.head_dim
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=False)
        if not is_full:
            self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.is_full = is_full
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=False)
        self.q_norm = ScaleNorm(self.head_dim, eps)
        self.k_norm = ScaleNorm(self.head_dim, eps)
        self.v_norm = ScaleNorm(self.head_dim, eps, scaled=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        q = self.q_proj(x).view(batch, rows, self.num_heads, self.head_dim)
        raw = self.k_proj(x).view(batch, rows, self.num_kv_heads, self.head_dim)
        v = raw if self.is_full else self.v_proj(x).view(raw.shape)
        v = self.v_norm(v).transpose(1, 2)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(raw).transpose(1, 2), cos, sin)
        group = self.num_heads // self.num_kv_heads
        out = F.scaled_dot_product_attention(
            q.to(v.dtype),
            k.to(v.dtype).repeat_interleave(group, dim=1),
            v.repeat_interleave(group, dim=1),
            attn_mask=mask.to(v.dtype),
            scale=1.0,
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, rows, -1))
        return projected


class SoftmaxRouter(nn.Module):
    """Router on the un-normed residual: softmax, best experts, their own scales."""

    def __init__(self, shape: CanvasShape) -> None:
        super().__init__()
        self.top_k = shape.top_k_experts
        self.norm = ScaleNorm(shape.hidden_size, shape.rms_norm_eps, scaled=False)
        self.proj = nn.Linear(shape.hidden_size, shape.num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(shape.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(shape.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weight of every expert (zero when not selected), and all probabilities."""
        scaled = self.norm(x) * self.scale * x.shape[-1] ** -0.5
        probabilities = self.proj(scaled).float().softmax(-1)
        chosen = probabilities.detach().topk(self.top_k, dim=-1).indices
        kept = probabilities * torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
        return kept / kept.sum(-1, keepdim=True) * self.per_expert_scale, probabilities


class Experts(nn.Module):
    """Stacked expert weights; the first half of ``gate_up_proj`` rows is the gate."""

    def __init__(self, shape: CanvasShape) -> None:
        super().__init__()
        experts, size = shape.num_experts, shape.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * size, shape.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, shape.hidden_size, size))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = self.gate_up_proj.chunk(2, dim=1)
        return mix_experts(x, gate, up, self.down_proj, weights, use_gelu=True)


class CanvasLayer(nn.Module):
    """Attention, then a dense and a routed feed-forward branch, with seven norms."""

    def __init__(self, shape: CanvasShape, layer_type: str) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = CanvasAttention(shape, layer_type == FULL)
        self.mlp = GeluMLP(hidden, shape.intermediate_size)
        self.router = SoftmaxRouter(shape)
        self.experts = Experts(shape)
        self.input_layernorm = ScaleNorm(hidden, eps)
        self.post_attention_layernorm = ScaleNorm(hidden, eps)
        self.pre_feedforward_layernorm = ScaleNorm(hidden, eps)
        self.post_feedforward_layernorm = ScaleNorm(hidden, eps)
        self.post_feedforward_layernorm_1 = ScaleNorm(hidden, eps)
        self.pre_feedforward_layernorm_2 = ScaleNorm(hidden, eps)
        self.post_feedforward_layernorm_2 = ScaleNorm(hidden, eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))
        self.encoder_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, is_decoder: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Output rows and the router's probabilities. is_decoder: [rows, 1] bool."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, mask)
        x = x + self.post_attention_layernorm(attended)
        dense = self.post_feedforward_layernorm_1(self.mlp(self.pre_feedforward_layernorm(x)))
        weights, probabilities = self.router(x)
        routed = self.experts(self.pre_feedforward_layernorm_2(x), weights)
        routed = self.post_feedforward_layernorm_2(routed)
        x = x + self.post_feedforward_layernorm(dense + routed)
        scalar = torch.where(is_decoder, self.layer_scalar, self.encoder_scalar)
        return x * scalar.to(x.dtype), probabilities


class SelfConditioning(nn.Module):
    """Adds the signal of the previous step to the canvas embeddings, then norms without scale."""

    def __init__(self, shape: CanvasShape) -> None:
        super().__init__()
        hidden, width = shape.hidden_size, shape.intermediate_size
        self.pre_norm = ScaleNorm(hidden, shape.rms_norm_eps)
        self.post_norm = ScaleNorm(hidden, shape.rms_norm_eps, scaled=False)
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, embeddings: Tensor, signal: Tensor) -> Tensor:
        u = self.pre_norm(signal)
        hidden = F.gelu(self.gate_proj(u), approximate="tanh") * self.up_proj(u)
        out: Tensor = self.post_norm(embeddings + self.down_proj(hidden))
        return out


def canvas_rotary(positions: Tensor, shape: CanvasShape, layer_type: str) -> tuple[Tensor, Tensor]:
    """Tables over the whole head. Full layers rotate only the first slots of the head."""
    half = shape.head_dim // 2
    slot = torch.arange(half, device=positions.device, dtype=torch.float32)
    if layer_type == FULL:
        frequencies = shape.full_theta ** (-slot / half)
        rotated = int(shape.partial_rotary_factor * shape.head_dim / 2)
        frequencies = torch.where(slot < rotated, frequencies, 0.0)
    else:
        frequencies = shape.sliding_theta ** (-slot / half)
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos(), angles.sin()


class CanvasModel(nn.Module):
    """The whole text model with a tied, soft-capped head."""

    def __init__(self, shape: CanvasShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(CanvasLayer(shape, kind) for kind in shape.layer_types)
        self.norm = ScaleNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_conditioning = SelfConditioning(shape)

    def initialise(self, seed: int) -> None:
        """Draw all matrices; sizes that the norms do not take away are set apart."""
        initialise(self, seed, len(self.shape.layer_types))
        with torch.no_grad():
            self.embed_tokens.weight.mul_(2.5)
            for layer in self.layers:
                layer.router.proj.weight.mul_(25.0)  # its input is a unit vector
                # Attention has scale 1: start with scores of unit variance.
                for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                    norm.weight.fill_(self.shape.head_dim**-0.25)

    def forward(
        self,
        canvas: Tensor,
        signal: Tensor,
        context: Tensor,
        positions: Tensor,
        mask_full: Tensor,
        mask_sliding: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Soft-capped fp32 logits of the canvas rows, and the balance loss of the routers.

        canvas: [batch, c] decoder-pass tokens; signal: [batch, c, hidden], zero where there is none;
        context: [batch, e] encoder-pass tokens; positions: [batch, c + e]; masks as in ``model``.
        """
        shape, num_canvas = self.shape, canvas.shape[1]
        embed = self.embed_tokens.weight
        decoder = self.self_conditioning(embed[canvas] * shape.embed_scale, signal)
        x = torch.cat([decoder, embed[context] * shape.embed_scale], dim=1)
        is_decoder = torch.arange(x.shape[1], device=x.device)[:, None] < num_canvas
        tables = {kind: canvas_rotary(positions, shape, kind) for kind in (SLIDING, FULL)}
        masks = {SLIDING: mask_sliding, FULL: mask_full}
        balance = x.new_zeros((), dtype=torch.float32)
        for layer, kind in zip(self.layers, shape.layer_types, strict=True):
            x, probabilities = layer(x, *tables[kind], masks[kind], is_decoder)
            mean = probabilities.flatten(0, -2).mean(0)
            balance = balance + shape.num_experts * mean.square().sum()
        logits = F.linear(self.norm(x[:, :num_canvas]), embed).float()
        cap = shape.final_logit_softcapping
        return cap * torch.tanh(logits / cap), balance / len(self.layers)

    def soft_signal(self, tempered_logits: Tensor) -> Tensor:
        """Self-conditioning signal for the next step from tempered logits [..., vocabulary]."""
        weight = self.embed_tokens.weight
        probabilities = tempered_logits.softmax(-1).to(weight.dtype)
        return probabilities @ weight * self.shape.embed_scale


def canvas_config(shape: CanvasShape) -> dict[str, Any]:
    """config.json of the checkpoint."""
    text = {
        "model_type": "diffusion_gemma_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": shape.eos_token_id,
        "eos_token_id": shape.eos_token_id,
        "pad_token_id": shape.eos_token_id,
        "final_logit_softcapping": shape.final_logit_softcapping,
        "global_head_dim": shape.head_dim,
        "head_dim": shape.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layer_types": list(shape.layer_types),
        "max_position_embeddings": shape.max_position_embeddings,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_experts": shape.num_experts,
        "num_global_key_value_heads": shape.num_key_value_heads,
        "num_hidden_layers": len(shape.layer_types),
        "num_key_value_heads": shape.num_key_value_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": shape.sliding_theta},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": shape.full_theta,
                "partial_rotary_factor": shape.partial_rotary_factor,
            },
        },
        "sliding_window": shape.sliding_window,
        "tie_word_embeddings": True,
        "top_k_experts": shape.top_k_experts,
        "use_bidirectional_attention": None,
        "vocab_size": shape.vocab_size,
    }
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "canvas_length": shape.canvas_length,
        "eos_token_id": shape.eos_token_id,
        "pad_token_id": shape.eos_token_id,
        "text_config": text,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def read_canvas_shape(fields: dict[str, Any]) -> CanvasShape:
    """The shape that a config.json of this format describes."""
    text, ropes = fields["text_config"], fields["text_config"]["rope_parameters"]
    names = (
        "vocab_size", "eos_token_id", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "sliding_window", "num_experts", "top_k_experts",
        "moe_intermediate_size", "rms_norm_eps", "final_logit_softcapping",
        "max_position_embeddings",
    )  # fmt: skip
    return CanvasShape(
        **{name: text[name] for name in names},
        canvas_length=fields["canvas_length"],
        layer_types=tuple(text["layer_types"]),
        sliding_theta=ropes[SLIDING]["rope_theta"],
        full_theta=ropes[FULL]["rope_theta"],
        partial_rotary_factor=ropes[FULL]["partial_rotary_factor"],
    )


def checkpoint_name(name: str) -> str:
    """Published name of a parameter: all under the decoder but the encoder's layer scalars."""
    if name.endswith(".encoder_scalar"):
        return f"model.encoder.language_model.{name.removesuffix('encoder_scalar')}layer_scalar"
    return f"model.decoder.{name}"


def save_canvas_model(model: CanvasModel, directory: Path) -> None:
    """Write config.json and model.safetensors (bf16)."""
    text = json.dumps(canvas_config(model.shape), indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    tensors = {
        checkpoint_name(name): tensor.detach().to(torch.bfloat16).cpu().contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_canvas_model(directory: Path) -> CanvasModel:
    """Read a checkpoint of ``save_canvas_model`` as fp32 weights."""
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    model = CanvasModel(read_canvas_shape(fields))
    tensors = load_file(directory / "model.safetensors")
    state = {name: tensors.pop(checkpoint_name(name)).float() for name in model.state_dict()}
    if tensors:
        raise ValueError(f"load_canvas_model: expected no further tensors, got {sorted(tensors)}")
    model.load_state_dict(state)
    return model


def shrink_canvas(shape: CanvasShape, layers: int) -> CanvasShape:
    """The same model with fewer layers (the last one full), for short runs."""
    return replace(shape, layer_types=(SLIDING,) * (layers - 1) + (FULL,))
