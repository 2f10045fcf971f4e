# SPDX-License-Identifier: Apache-2.0
"""The one description every supported checkpoint reduces to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes and constants of a decoder; everything the layers and the engine need to know.

    Token ids may be 0: test ``mask_token_id`` and ``block_size`` for ``None``, never for truth.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    #: Storage dtype of the checkpoint: ``float32``, ``bfloat16`` or ``float16``.
    dtype: str = "bfloat16"
    #: Diffusion block length the checkpoint was trained for.
    block_size: int | None = None
    mask_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    #: True when the logits row of position i predicts position i + 1.
    shift: bool = False

    @property
    def num_parameters(self) -> int:
        """Parameters held in memory; a tied head is counted once."""
        heads = self.num_q_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * (heads + self.num_q_heads)
        if self.attention_bias:
            attention += heads * self.head_dim + self.hidden_size
        layer = attention + 2 * self.head_dim
        layer += 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size
