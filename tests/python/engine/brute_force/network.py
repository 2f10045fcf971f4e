# SPDX-License-Identifier: Apache-2.0
"""The network of the oracle: transformers' Qwen3 under any mask, with K and V kept by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from brute_force.settings import LOGIT_ERROR

_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "attention_bias",
    "tie_word_embeddings",
)

#: K and V of one layer, [1, heads, positions, head size] each.
LayerKV = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Pass:
    """Result of one forward."""

    logits: np.ndarray  # [n, V] float32
    kv: list[LayerKV]  # of the rows of the forward


class Network:
    """Forwards over explicit rows, keys and masks."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        # Seconds of imports, which files that are only collected do not pay.
        from transformers import Qwen3Config, Qwen3ForCausalLM

        self.model = Qwen3ForCausalLM(
            Qwen3Config(**{k: config[k] for k in _KEYS}, attn_implementation="sdpa")
        ).eval()
        self.model.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=True)
        self.embedding = self.model.get_input_embeddings().weight.detach().double()
        self._noise: np.random.Generator | None = None

    def perturbed(self, seed: int) -> Network:
        """The same network with an error of the size of float32's on every logit."""
        other = copy.copy(self)
        other._noise = np.random.default_rng(seed)
        return other

    def run(
        self,
        tokens: Sequence[int],
        mask: torch.Tensor,
        *,
        first: int = 0,
        past: Sequence[LayerKV] | None = None,
        embeddings: Mapping[int, torch.Tensor] | None = None,
    ) -> Pass:
        """Rows at positions first, first + 1, ...

        Args:
            mask: [n, past + n] bool, which key each row sees; past keys come first.
            past: K and V of earlier positions, rotated already, in any order.
            embeddings: row -> embedding in the place of that of its token.
        """
        from transformers import DynamicCache

        cache = DynamicCache()
        num_past = 0
        if past is not None:
            for layer, (key, value) in enumerate(past):
                cache.update(key, value, layer)
            num_past = past[0][0].size(2)
        ids = torch.tensor([list(tokens)])
        with torch.inference_mode():
            rows = self.model.get_input_embeddings()(ids).clone()
            for row, embedding in (embeddings or {}).items():
                rows[0, row] = embedding.to(rows.dtype)
            out = self.model(
                inputs_embeds=rows,
                position_ids=torch.arange(first, first + len(tokens))[None],
                attention_mask=mask[None, None],
                past_key_values=cache,
                use_cache=True,
            )
        kv = [
            (layer.keys[:, :, num_past:].clone(), layer.values[:, :, num_past:].clone())
            for layer in out.past_key_values.layers
        ]
        logits = out.logits[0].float().numpy()
        if self._noise is not None:
            error = self._noise.normal(scale=LOGIT_ERROR / 3, size=logits.shape)
            logits = (logits + error).astype(np.float32)
        return Pass(logits, kv)

    def block_causal(
        self,
        tokens: Sequence[int],
        block_size: int,
        embeddings: Mapping[int, torch.Tensor] | None = None,
    ) -> Pass:
        """The whole sequence: a token sees those of its block and of the blocks before."""
        block = torch.arange(len(tokens)) // block_size
        return self.run(tokens, block[None, :] <= block[:, None], embeddings=embeddings)


def join(parts: Sequence[Sequence[LayerKV]]) -> list[LayerKV]:
    """K and V of several runs of positions, one after the other."""
    return [
        (torch.cat([p[0] for p in layers], 2), torch.cat([p[1] for p in layers], 2))
        for layers in zip(*parts, strict=True)
    ]


def cut(kv: Sequence[LayerKV], begin: int, end: int) -> list[LayerKV]:
    """K and V of the positions [begin, end) of a run."""
    return [(key[:, :, begin:end], value[:, :, begin:end]) for key, value in kv]
