# SPDX-License-Identifier: Apache-2.0
"""The one description every supported checkpoint reduces to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diffulex.families.spec.moe import MoeSpec
from diffulex.families.spec.names import LLAMA_NAMES, TensorNames

if TYPE_CHECKING:
    from typing_extensions import Self

#: Tokens of the longest block that a strategy decodes.
LONGEST_BLOCK = 32
#: Most tokens of a canvas.
MAX_CANVAS = 1024


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
    #: Leading entries of a head that are rotated.
    rotary_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    #: RMSNorm of every query and key head before the rotation.
    qk_norm: bool = True
    tie_word_embeddings: bool = False
    #: Storage dtype of the checkpoint: ``float32``, ``bfloat16`` or ``float16``.
    dtype: str = "bfloat16"
    #: Diffusion block length the checkpoint was trained for.
    block_size: int | None = None
    mask_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    #: True when the logits row of position i predicts position i + 1.
    shift: bool = False
    #: Rows of embedding and head where they exceed the vocabulary; logits end at `vocab_size`.
    embedding_size: int | None = None
    names: TensorNames = LLAMA_NAMES
    #: Routed experts; None = every layer has the dense block.
    moe: MoeSpec | None = None
    #: Length of the canvas of families that denoise one; None = blocks of a sequence.
    canvas_length: int | None = None
    #: Logits count as ``c * tanh(logits / c)``; 0 = as they are. `compute_logits` does not apply it.
    final_logit_softcap: float = 0.0

    def per_rank(self, num_ranks: int) -> Self:
        """The description with the heads that each of several ranks has."""
        if num_ranks == 1:
            return self
        return replace(
            self,
            num_q_heads=self.num_q_heads // num_ranks,
            num_kv_heads=max(1, self.num_kv_heads // num_ranks),
        )

    @property
    def rotary_rows(self) -> int:
        """Positions of the rotary table: the last block or canvas may reach past max_positions."""
        return self.max_positions + (self.canvas_length or LONGEST_BLOCK) - 1

    @property
    def embedding_rows(self) -> int:
        """Rows of the embedding table and of the head."""
        return self.vocab_size if self.embedding_size is None else self.embedding_size

    @property
    def kv_layers(self) -> tuple[tuple[int, int], ...]:
        """Number of KV heads and head size of every layer's cache."""
        return ((self.num_kv_heads, self.head_dim),) * self.num_layers

    @property
    def attention_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Distinct (query heads, KV heads, head size) of the layers; scratch must suit them all."""
        shapes = dict.fromkeys(self.kv_layers)
        return tuple((self.num_q_heads, heads, head_dim) for heads, head_dim in shapes)

    @property
    def has_dense_blocks(self) -> bool:
        """Whether a layer has a feed-forward block of `intermediate_size`."""
        return self.moe is None or len(self.moe.layers) < self.num_layers

    @property
    def rotary_columns(self) -> int:
        """Float32 entries per position of the rotary tables."""
        return self.rotary_dim

    @property
    def num_parameters(self) -> int:
        """Parameters held in memory; a tied head is counted once."""
        heads = self.num_q_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * (heads + self.num_q_heads)
        attention += heads * self.head_dim if self.qkv_bias else 0
        attention += self.hidden_size if self.o_bias else 0
        attention += 2 * self.head_dim if self.qk_norm else 0
        layers = self.num_layers * (attention + 2 * self.hidden_size)
        layers += sum(self.feed_forward_parameters(layer) for layer in range(self.num_layers))
        embeddings = self.embedding_rows * self.hidden_size
        if not self.tie_word_embeddings:
            embeddings *= 2
        return layers + embeddings + self.hidden_size

    @property
    def products_per_row(self) -> int:
        """Weights that one row is multiplied by: no embedding that is looked up, no idle expert."""
        embedding = 0 if self.tie_word_embeddings else self.embedding_rows * self.hidden_size
        return self.num_parameters - embedding - self._num_idle_weights

    @property
    def _num_idle_weights(self) -> int:
        if self.moe is None:
            return 0
        idle = max(0, self.moe.num_experts - self.moe.top_k)
        return 3 * self.hidden_size * idle * self.moe.intermediate_size * len(self.moe.layers)

    def feed_forward_parameters(self, layer: int) -> int:
        """Parameters of the feed-forward block of one layer."""
        if self.moe is not None and layer in self.moe.layers:
            return self.moe.num_parameters(self.hidden_size)
        return 3 * self.hidden_size * self.intermediate_size
