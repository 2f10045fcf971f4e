# SPDX-License-Identifier: Apache-2.0
"""The program for processors that keep no state: its caller holds the cache.

Symbols: S rows of a call, T rows of the cache, L layers, Hkv heads, D head size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from diffulex.families.spec import ModelSpec
    from diffulex_edge.lowering import ProgramShape
    from diffulex_edge.model import EdgeDecoder
    from diffulex_edge.self_check import Call

__all__ = ["CallerCache", "StaticProgram", "static_inputs", "static_mask"]

#: Hides a key; a number of half precision.
_HIDDEN = -3e4


class StaticProgram(nn.Module):
    """`forward(tokens, positions, mask, k_0 .., v_0 ..) -> (logits, k_0 .., v_0 ..)`.

    All shapes are fixed. Keys are the T rows of the cache followed by the S rows of the call; only the
    latter's K and V are returned, and what becomes of them is the caller's.
    """

    def __init__(self, decoder: EdgeDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, *caches: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits [1, S, V] and new rows [Hkv, S, D].

        Args:
            tokens: [1, S] int32; positions: [S] int32.
            mask: [S, T + S], 0 or a large negative number.
            caches: K of all layers, then V, each [Hkv, T, D].
        """
        decoder = self.decoder
        rotary = (decoder.cos[positions], decoder.sin[positions], decoder.turn)
        x: Tensor = decoder.embedding(tokens[0])
        count = len(decoder.layers)
        new: list[Tensor] = []
        for index in range(count):
            layer: Any = decoder.layers[index]
            q, k, v = layer.project(layer.input_norm(x), *rotary)
            keys = torch.cat((caches[index], k), dim=1)
            values = torch.cat((caches[count + index], v), dim=1)
            x = layer.finish(x, layer.attend(q, keys, values, mask))
            new += [k, v]
        return (decoder.logits(x).float().unsqueeze(0), *new[::2], *new[1::2])


def static_mask(positions: Tensor, visible_end: Tensor, num_cached: int) -> Tensor:
    """Mask [S, T + S] under which row i sees the positions before ``visible_end[i]``.

    A position of the call is seen in the call, not in the cache, whose row for it is an older one.
    """
    cached = torch.arange(num_cached)
    is_cached = cached < visible_end.unsqueeze(1)
    is_cached[:, positions] = False
    is_seen = torch.cat((is_cached, positions < visible_end.unsqueeze(1)), dim=1)
    return torch.where(is_seen, 0.0, _HIDDEN)


def static_inputs(spec: ModelSpec, shape: ProgramShape) -> tuple[Tensor, ...]:
    """Inputs of `StaticProgram.forward` to export with."""
    positions = torch.arange(shape.max_rows)
    mask = static_mask(positions, positions + 1, shape.cache_rows)
    tokens = torch.ones(1, shape.max_rows, dtype=torch.int32)
    return (tokens, positions.int(), mask, *_empty_caches(spec, shape.cache_rows))


def _empty_caches(spec: ModelSpec, rows: int) -> list[Tensor]:
    shape = (spec.num_kv_heads, rows, spec.head_dim)
    return [torch.zeros(shape) for _ in range(2 * spec.num_layers)]


class CallerCache:
    """What the caller of such a program does: holds the cache, makes masks, stores new rows.

    Called with the arguments of `EdgeProgram` it gives the same logits.
    """

    def __init__(self, program: Callable[..., Any], spec: ModelSpec, cache_rows: int) -> None:
        self._program = program
        self._caches = _empty_caches(spec, cache_rows)

    @torch.inference_mode()
    def __call__(self, call: Call) -> Tensor:
        """Logits [n, V] of a call over as many rows as the program has."""
        mask = static_mask(call.positions, call.visible_end, self._caches[0].size(1))
        tokens = call.tokens.int().unsqueeze(0)
        logits, *new = self._program(tokens, call.positions.int(), mask, *self._caches)
        for cache, rows in zip(self._caches, new, strict=True):
            cache[:, call.positions] = rows
        selected: Tensor = logits[0][call.logits_rows]
        return selected
