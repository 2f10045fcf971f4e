# SPDX-License-Identifier: Apache-2.0
"""The decoder as one function of ids and a static cache, for comparisons and for PyTorch callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from diffulex.strategies.listing import STRATEGIES
from diffulex_edge.model import visible_mask

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex_edge.model import EdgeDecoder

__all__ = [
    "ATTENTION_MODES",
    "KVCache",
    "KVCacheConfig",
    "create_kv_caches",
    "run_unified",
    "visible_ends_of_mode",
]

#: A prompt that sees all of itself, by the name of its strategy.
PREFIX_FULL = next(name for name, item in STRATEGIES.items() if item.traits.has_prefix_full)
ATTENTION_MODES = ("full", "block_causal", PREFIX_FULL)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Shape of a static cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence: L * 2 * Hkv * T * D * itemsize."""
        rows = self.num_layers * 2 * self.num_kv_heads * self.max_seq_len
        return rows * self.head_dim * self.dtype.itemsize


class KVCache:
    """K and V of every layer in one tensor [L, 2, B, Hkv, T, D]."""

    def __init__(self, config: KVCacheConfig, batch_size: int = 1) -> None:
        self.config = config
        shape = (config.num_layers, 2, batch_size, config.num_kv_heads)
        self._tensor = torch.zeros(*shape, config.max_seq_len, config.head_dim, dtype=config.dtype)
        #: Rows that count as filled; bookkeeping only.
        self.length = 0

    @classmethod
    def from_tensor(cls, tensor: Tensor, length: int = 0) -> KVCache:
        """A cache over an existing tensor [L, 2, B, Hkv, T, D], which is not copied."""
        if tensor.dim() != 6 or tensor.size(1) != 2:
            raise ValueError(
                f"KVCache: expected a tensor [L, 2, B, Hkv, T, D], got {list(tensor.shape)}"
            )
        layers, _, _, heads, rows, dim = tensor.shape
        cache = cls.__new__(cls)
        cache.config = KVCacheConfig(layers, heads, dim, rows, tensor.dtype)
        cache._tensor, cache.length = tensor, length
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self._tensor.nbytes

    def get_cache_tensor(self) -> Tensor:
        """[L, 2, B, Hkv, T, D]."""
        return self._tensor

    def get_layer_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [B, Hkv, T, D] of a layer, as views."""
        return self._tensor[layer, 0], self._tensor[layer, 1]

    def update_layer_cache(self, layer: int, k: Tensor, v: Tensor, start_pos: int) -> None:
        """Writes rows [B, Hkv, S, D] at `start_pos`; ValueError where they do not fit."""
        end = start_pos + k.size(2)
        if start_pos < 0 or end > self.config.max_seq_len:
            raise ValueError(
                f"start_pos: expected rows within [0, {self.config.max_seq_len}),"
                f" got [{start_pos}, {end})"
            )
        self._tensor[layer, 0, :, :, start_pos:end] = k
        self._tensor[layer, 1, :, :, start_pos:end] = v
        self.length = max(self.length, end)

    def truncate(self, length: int) -> None:
        """Forgets the rows from `length` on; nothing is cleared, later calls do not look there."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length: expected [0, {self.length}], got {length}")
        self.length = length

    def clear(self) -> None:
        """Zeroes all rows."""
        self._tensor.zero_()
        self.length = 0


def create_kv_caches(model: EdgeDecoder, batch_size: int = 1) -> KVCache:
    """An empty cache for a decoder, as long as its tables."""
    spec = model.spec
    config = KVCacheConfig(spec.num_layers, spec.num_kv_heads, spec.head_dim, model.max_seq_len)
    return KVCache(config, batch_size)


def visible_ends_of_mode(
    mode: str, positions: Tensor, num_keys: int, block_size: int | None, prompt_len: int | None
) -> Tensor:
    """Visible end [S] of rows at positions [S] under a documented attention mode.

    Raises:
        ValueError: unknown mode, or an argument that the mode needs is missing.
    """
    if mode not in ATTENTION_MODES:
        expected = ", ".join(ATTENTION_MODES)
        raise ValueError(f"attention_mode: expected one of {expected}, got {mode!r}")
    if mode == "full":
        return torch.full_like(positions, num_keys)
    if block_size is None:
        raise ValueError(f"attention_mode: expected a model with a block size for {mode!r}")
    if mode == PREFIX_FULL and prompt_len is None:
        raise ValueError(f"prompt_len: expected it with attention_mode {mode!r}, got None")
    start = prompt_len if mode == PREFIX_FULL and prompt_len is not None else 0
    ends = start + ((positions - start) // block_size + 1) * block_size
    if mode == PREFIX_FULL:
        ends = torch.where(positions < start, torch.full_like(positions, start), ends)
    return ends.clamp(max=num_keys)


def run_unified(
    model: EdgeDecoder,
    input_ids: Tensor,
    positions: Tensor | None,
    kv_cache: Tensor | None,
    start_pos: int,
    *,
    attention_mode: str | None,
    prompt_len: int | None,
    logits_rows: Tensor | slice | Literal["last"] | None,
) -> tuple[Tensor, Tensor | None]:
    """`EdgeDecoder.forward`, whose docstring describes it."""
    spec = model.spec
    if input_ids.dim() != 2 or input_ids.size(1) == 0:
        raise ValueError(f"input_ids: expected [B, S] with S >= 1, got {list(input_ids.shape)}")
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= spec.vocab_size:
        raise ValueError(f"input_ids: expected ids in [0, {spec.vocab_size})")
    batch, num_rows = input_ids.shape
    cache = kv_cache
    if cache is None:
        if start_pos != 0:
            raise ValueError(f"start_pos: expected 0 without a cache, got {start_pos}")
        shape = (spec.num_layers, 2, batch, spec.num_kv_heads, num_rows, spec.head_dim)
        cache = torch.zeros(shape)
    _check_cache(model, cache, batch, start_pos, num_rows)
    mode = "block_causal" if attention_mode is None else attention_mode
    where = _positions(positions, kv_cache is not None, start_pos, batch, num_rows)
    if mode != "full" and not torch.equal(where, _counted(start_pos, batch, num_rows)):
        raise ValueError(
            f"positions: expected those from {start_pos} on with attention_mode {mode!r},"
            f" got {where.tolist()!r:.60}"
        )
    num_keys = start_pos + num_rows
    outputs = []
    for item in range(batch):
        slots = torch.arange(start_pos, num_keys)
        ends = visible_ends_of_mode(mode, where[item], num_keys, spec.block_size, prompt_len)
        mask = visible_mask(ends, cache.size(4), cache.dtype)
        caches = [(cache[i, 0, item], cache[i, 1, item]) for i in range(spec.num_layers)]
        hidden = model.hidden(input_ids[item], where[item], mask, caches, slots)
        outputs.append(model.logits(hidden[_selected(logits_rows)]))
    return torch.stack(outputs), kv_cache


def _check_cache(
    model: EdgeDecoder, cache: Tensor, batch: int, start_pos: int, num_rows: int
) -> None:
    spec = model.spec
    expected = (spec.num_layers, 2, batch, spec.num_kv_heads, spec.head_dim)
    if cache.dim() != 6 or (*cache.shape[:4], cache.size(5)) != expected:
        shape = f"[{spec.num_layers}, 2, {batch}, {spec.num_kv_heads}, T, {spec.head_dim}]"
        raise ValueError(f"kv_cache: expected {shape}, got {list(cache.shape)}")
    longest = min(cache.size(4), model.max_seq_len)
    if start_pos < 0 or start_pos + num_rows > longest:
        raise ValueError(
            f"start_pos: expected rows within [0, {longest}),"
            f" got [{start_pos}, {start_pos + num_rows})"
        )


def _counted(start_pos: int, batch: int, num_rows: int) -> Tensor:
    return torch.arange(start_pos, start_pos + num_rows).expand(batch, num_rows)


def _positions(
    positions: Tensor | None, has_cache: bool, start_pos: int, batch: int, num_rows: int
) -> Tensor:
    counted = _counted(start_pos, batch, num_rows)
    if positions is None:
        return counted
    if positions.shape != counted.shape:
        raise ValueError(f"positions: expected {list(counted.shape)}, got {list(positions.shape)}")
    steps = positions[:, 1:] - positions[:, :-1]
    if has_cache and bool((steps != 1).any()):
        raise ValueError("positions: expected contiguous positions with a cache")
    return positions


def _selected(rows: Tensor | slice | Literal["last"] | None) -> Tensor | slice:
    if rows is None:
        return slice(None)
    if isinstance(rows, str):
        if rows != "last":
            raise ValueError(f"logits_rows: expected 'last', a slice or indices, got {rows!r}")
        return slice(-1, None)
    return rows
