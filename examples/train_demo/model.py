# SPDX-License-Identifier: Apache-2.0
"""Pure-torch SDAR (Qwen3 template) for training and for the reference decoder.

The module and parameter names give the tensor names of a published SDAR checkpoint. Attention takes
an explicit mask, because training and decoding need different visibility.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class ModelConfig:
    """Shape and token ids of the model; the fields have the names of config.json."""

    vocab_size: int
    mask_token_id: int
    eos_token_id: int
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    block_size: int = 8
    max_position_embeddings: int = 512
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    def to_json(self) -> str:
        """config.json of the checkpoint."""
        fields = {
            "architectures": ["SDARForCausalLM"],
            "model_type": "sdar",
            **self.__dict__,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.eos_token_id,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "rope_scaling": None,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
        }
        return json.dumps(fields, indent=2) + "\n"

    @classmethod
    def load(cls, directory: Path) -> ModelConfig:
        """Read the fields of this class from config.json."""
        fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32, result in the dtype of the input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return h.to(x.dtype) * self.weight.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding of ``x`` [batch, heads, rows, head_dim], computed in fp32.

    The tables have half as many columns as dimensions are rotated; later dimensions stay.
    """
    half = cos.shape[-1]
    rotated = x[..., : 2 * half].float()
    first, second = rotated[..., :half], rotated[..., half:]
    parts = [first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :].float()]
    return torch.cat(parts, dim=-1).to(x.dtype)


def rotary_tables(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [batch, 1, rows, rotary_dim / 2] of ``positions`` [batch, rows]."""
    half = rotary_dim // 2
    exponent = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = positions[:, None, :, None].float() * theta**-exponent
    return angles.cos(), angles.sin()


class AttentionShape(Protocol):
    """What ``Attention`` and ``DecoderLayer`` read from a configuration."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


class Attention(nn.Module):
    """Grouped-query attention; per-head RMSNorm of queries and keys before rotary when ``qk_norm``."""

    def __init__(
        self, config: AttentionShape, *, qkv_bias: bool = False, qk_norm: bool = True
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden, query_size = config.hidden_size, self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, query_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=qkv_bias)
        self.o_proj = nn.Linear(query_size, hidden, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(self.head_dim, config.rms_norm_eps) if qk_norm else nn.Identity()
            for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, rows, self.num_heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(batch, rows, self.num_kv_heads, self.head_dim))
        v = self.v_proj(x).view(batch, rows, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q = rotate(q.transpose(1, 2), cos, sin)
        k = rotate(k.transpose(1, 2), cos, sin)
        group = self.num_heads // self.num_kv_heads
        out = F.scaled_dot_product_attention(
            q.to(v.dtype),
            k.to(v.dtype).repeat_interleave(group, dim=1),
            v.repeat_interleave(group, dim=1),
            attn_mask=mask.to(v.dtype),
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, rows, -1))
        return projected


class MLP(nn.Module):
    """SiLU-gated feed-forward layer."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward with residual connections."""

    def __init__(
        self,
        config: AttentionShape,
        self_attn: Attention | None = None,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.self_attn = Attention(config) if self_attn is None else self_attn
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if mlp is None else mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class SDARModel(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class SDARForCausalLM(nn.Module):
    """The whole model; row ``p`` of the logits predicts the token at position ``p`` (no shift)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = SDARModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def initialise(self, seed: int) -> None:
        """Normal weights; output projections are scaled down with depth."""
        initialise(self, seed, self.config.num_hidden_layers)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, num_logit_rows: int | None = None
    ) -> Tensor:
        """Logits of the first ``num_logit_rows`` rows (all when None).

        tokens, positions: [batch, rows] int64. mask: additive, [batch or 1, 1, rows, rows], 0 where
        the row may see the column and -inf elsewhere.
        """
        cos, sin = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        if num_logit_rows is not None:
            x = x[:, :num_logit_rows]
        logits: Tensor = self.lm_head(self.model.norm(x))
        return logits

    def save(self, directory: Path) -> None:
        """Write config.json and model.safetensors (bf16; a tied head is stored once)."""
        (directory / "config.json").write_text(self.config.to_json(), encoding="utf-8")
        tensors = {
            name: tensor.detach().to(torch.bfloat16).cpu().contiguous()
            for name, tensor in self.state_dict().items()
            if not (self.config.tie_word_embeddings and name == "lm_head.weight")
        }
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    def load(cls, directory: Path) -> SDARForCausalLM:
        """Read a checkpoint written by ``save`` as fp32 weights."""
        model = cls(ModelConfig.load(directory))
        tensors = load_file(directory / "model.safetensors")
        if model.config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
        return model


def initialise(model: nn.Module, seed: int, num_layers: int) -> None:
    """Normal matrices, output projections scaled down with depth; vectors stay as constructed."""
    generator = torch.Generator().manual_seed(seed)
    residual_std = 0.02 / (2 * num_layers) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            is_output = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
            parameter.normal_(0.0, residual_std if is_output else 0.02, generator=generator)


def additive_mask(visible: Tensor) -> Tensor:
    """0 where ``visible`` is true, -inf elsewhere, with a head axis: [batch, 1, rows, columns]."""
    mask = torch.zeros(visible.shape, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))[:, None]


def block_causal_visible(length: int, block_size: int, device: torch.device) -> Tensor:
    """``visible[0, i, j]`` iff the block of position j is not after the block of position i."""
    block = torch.arange(length, device=device) // block_size
    return (block[None, :] <= block[:, None])[None]
