# SPDX-License-Identifier: Apache-2.0
"""How a family's checkpoints name the tensors of the generic decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["LLAMA_NAMES", "TensorNames"]


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Checkpoint names by role; the defaults are those of the Llama and Qwen templates.

    Projections are named without ``.weight`` and ``.bias``, everything else in full. The names of a
    layer follow `layer`, which has one place for the layer's number. Tensors are matched by their
    full name: LLaDA calls both a layer's down projection and the output head ``ff_out``.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    input_norm: str = "input_layernorm.weight"
    post_norm: str = "post_attention_layernorm.weight"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    #: One tensor with the rows of q, k and v, stored in place of the three.
    qkv: str | None = None
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    #: Layers with routed experts; the vector has two names in use.
    router: str = "mlp.gate"
    expert_bias: tuple[str, ...] = ("mlp.gate.expert_bias", "mlp.gate.e_score_correction_bias")
    experts: str = "mlp.experts"
    shared_experts: str = "mlp.shared_experts"
    #: Patterns of stored tensors that the model does not use.
    ignored: tuple[str, ...] = ()

    def below(self, prefix: str) -> TensorNames:
        """The same names with a dense block that is stored below `prefix`."""
        parts = {part: f"{prefix}.{part}_proj" for part in ("gate", "up", "down")}
        return replace(self, **parts)  # type: ignore[arg-type]  # the three are strings

    def ignoring(self, *patterns: str) -> TensorNames:
        """The same names for a model that does not use the tensors `patterns` match."""
        return replace(self, ignored=(*self.ignored, *patterns))


LLAMA_NAMES = TensorNames()
