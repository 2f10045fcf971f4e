# SPDX-License-Identifier: Apache-2.0
"""SDAR: the Qwen3 decoder with block-diffusion attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from diffulex.layers.activation import SiluAndMul
from diffulex.layers.attention import AttentionScratch, BlockAttention
from diffulex.layers.embedding import OutputHead, TokenEmbedding
from diffulex.layers.linear import Linear, MatrixProduct
from diffulex.layers.norm import RMSNorm
from diffulex.layers.rotary import build_cos_sin_cache
from diffulex.model.config.sdar import read_sdar_spec

if TYPE_CHECKING:
    from diffulex.engine.batch import AttnMetadata
    from diffulex.engine.kv_cache import KVCache
    from diffulex.model.config import ModelSpec


class SdarMLP(nn.Module):
    """``down(silu(gate x) * up x)``."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.gate_up = Linear(hidden, (inner, inner), dtype=dtype, device=device)
        self.act = SiluAndMul()
        self.down = Linear(inner, (hidden,), dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, gate_up: torch.Tensor, inner: torch.Tensor) -> None:
        """Replaces x [T, H] by the output; `gate_up` [T, 2 I] and `inner` [T, I] are scratch."""
        self.gate_up(x, gate_up)
        self.act(gate_up, inner)
        self.down(inner, x)


class SdarLayer(nn.Module):
    """One decoder layer; the norms between layers belong to the model's residual stream."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.input_norm = RMSNorm(
            spec.hidden_size, eps=spec.rms_norm_eps, dtype=dtype, device=device
        )
        self.attention = BlockAttention(
            spec.hidden_size,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            eps=spec.rms_norm_eps,
            bias=spec.attention_bias,
            dtype=dtype,
            device=device,
        )
        self.post_norm = RMSNorm(
            spec.hidden_size, eps=spec.rms_norm_eps, dtype=dtype, device=device
        )
        self.mlp = SdarMLP(spec, dtype, device)


class SdarForDiffusionLM(nn.Module):
    """Decoder and head. Weights are uninitialised until loaded or `init_random` is called."""

    read_spec = staticmethod(read_sdar_spec)

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.spec = spec
        vocab, hidden = spec.vocab_size, spec.hidden_size
        self.embedding = TokenEmbedding(vocab, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(SdarLayer(spec, dtype, device) for _ in range(spec.num_layers))
        self.norm = RMSNorm(hidden, eps=spec.rms_norm_eps, dtype=dtype, device=device)
        self.head = OutputHead(vocab, hidden, dtype=dtype, device=device)
        self.cos_sin_cache: torch.Tensor
        self.register_buffer(
            "cos_sin_cache",
            build_cos_sin_cache(spec.max_positions, spec.rotary_dim, spec.rope_theta, device),
            persistent=False,
        )

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
        if inputs_embeds is None:
            residual = self.embedding(input_ids)
        else:
            residual = inputs_embeds.clone()
        spec = self.spec
        scratch = AttentionScratch(residual, spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
        gate_up = residual.new_empty(residual.size(0), 2 * spec.intermediate_size)
        inner = residual.new_empty(residual.size(0), spec.intermediate_size)
        x = torch.empty_like(residual)
        cos_sin_cache = self.cos_sin_cache
        for index, layer in enumerate(self.decoder_layers):
            if index == 0:
                layer.input_norm(residual, x)
            else:
                layer.input_norm.add_norm_(x, residual)
            layer.attention(x, positions, cos_sin_cache, metadata, kv_cache.layer(index), scratch)
            layer.post_norm.add_norm_(x, residual)
            layer.mlp(x, gate_up, inner)
        self.norm.add_norm_(x, residual)
        return x

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[n, V] in the model dtype for hidden rows [n, H] of `forward`."""
        logits: torch.Tensor = self.head(hidden_rows)
        return logits

    @property
    def decoder_layers(self) -> list[SdarLayer]:
        """The layers under their own type, which ModuleList hides."""
        return cast("list[SdarLayer]", self.layers)

    def weight_table(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> view of the memory it must fill, with its exact shape.

        Undoes the packing of CPU weights; the next forward packs them again.
        """
        table: dict[str, torch.Tensor] = {
            "model.embed_tokens.weight": self.embedding.weight,
            "model.norm.weight": self.norm.weight,
            "lm_head.weight": self.head.row_major(),
        }
        for index, layer in enumerate(self.decoder_layers):
            prefix = f"model.layers.{index}."
            attention = layer.attention
            table[prefix + "input_layernorm.weight"] = layer.input_norm.weight
            table[prefix + "post_attention_layernorm.weight"] = layer.post_norm.weight
            table[prefix + "self_attn.q_norm.weight"] = attention.q_norm
            table[prefix + "self_attn.k_norm.weight"] = attention.k_norm
            parts = {
                "self_attn.q_proj": attention.qkv.part(0),
                "self_attn.k_proj": attention.qkv.part(1),
                "self_attn.v_proj": attention.qkv.part(2),
                "self_attn.o_proj": attention.o.part(0),
                "mlp.gate_proj": layer.mlp.gate_up.part(0),
                "mlp.up_proj": layer.mlp.gate_up.part(1),
                "mlp.down_proj": layer.mlp.down.part(0),
            }
            for name, (weight, bias) in parts.items():
                table[f"{prefix}{name}.weight"] = weight
                if bias is not None:
                    table[f"{prefix}{name}.bias"] = bias
        return table

    def tie_embeddings(self) -> None:
        """Lets the head use the embedding table."""
        self.head.tie(self.embedding)

    def init_random(self, seed: int, std: float = 0.02) -> SdarForDiffusionLM:
        """Fills every weight from a seeded generator: matrices N(0, std^2), norms 1 + N(0, 0.1^2).

        For tests and benchmarks. Ties the head when the description says so; returns self.
        """
        if self.spec.tie_word_embeddings:
            self.tie_embeddings()
        for module in self.modules():
            if isinstance(module, MatrixProduct):
                module.row_major()
        generator = torch.Generator(device=self.embedding.weight.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            is_norm = name.endswith("norm.weight") or name.endswith(("q_norm", "k_norm"))
            if is_norm:
                parameter.normal_(1.0, 0.1, generator=generator)
            else:
                parameter.normal_(0.0, std, generator=generator)
        return self
