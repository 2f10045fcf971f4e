# SPDX-License-Identifier: Apache-2.0
"""A model of two layers of hashes: every logit depends on what each row saw when it was run.

It stands for a language model in C++ and in Python (tests/cpp/edge/hash_model.h); its logits are small
multiples of 1/8, so that both have the same. Symbols: S rows, T cache rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from diffulex.families.spec.model_spec import ModelSpec

__all__ = ["HashModel"]

_Words = "npt.NDArray[np.uint64]"
_CACHE_ONLY = 4


def _mixed(words: _Words) -> _Words:
    """splitmix64 of each word."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))


class HashModel(nn.Module):
    """Its cache is an array of rows by position; requests come one at a time."""

    def __init__(self, spec: ModelSpec, num_positions: int) -> None:
        super().__init__()
        self.spec = spec
        self._first = np.zeros(num_positions, np.uint64)
        self._second = np.zeros(num_positions, np.uint64)

    def forward(self, input_ids: Tensor, positions: Tensor, metadata: Any, kv_cache: Any) -> Tensor:
        """Logits [S, V] of all rows in place of hidden states."""
        del kv_cache
        count = int(metadata.valid_slices[0])
        at = positions[:count].numpy()
        tokens = input_ids[:count].numpy().astype(np.uint64)
        ends = self.visible_ends(at, metadata)
        with np.errstate(over="ignore"):
            own = _mixed(tokens * np.uint64(1 << 32) + at.astype(np.uint64))
            self._first[at] = own
            own = _mixed(own + self._sums(self._first)[ends])
            self._second[at] = own
            own = _mixed(own ^ self._sums(self._second)[ends])
            columns = np.arange(self.spec.vocab_size, dtype=np.uint64)
            words = _mixed(own[:, None] + columns * np.uint64(0x2545F4914F6CDD1D))
        logits = torch.zeros(input_ids.size(0), self.spec.vocab_size)
        # 2.5 for each leading zero of the upper half, and a bit to part equal ones.
        zeros = 32 - np.frexp((words >> np.uint64(32)).astype(np.float64))[1]
        logits[:count] = torch.from_numpy(2.5 * zeros + (words & np.uint64(7)) / 8.0).float()
        return logits

    def compute_logits(self, hidden_rows: Tensor) -> Tensor:
        """The rows themselves."""
        return hidden_rows

    @staticmethod
    def _sums(rows: _Words) -> _Words:
        return np.concatenate([np.zeros(1, np.uint64), np.cumsum(rows, dtype=np.uint64)])

    @staticmethod
    def visible_ends(at: npt.NDArray[np.int64], metadata: Any) -> npt.NDArray[np.int64]:
        """Keys that each row sees: the table of the mask kinds, read literally."""
        kind, cached = int(metadata.mask_kinds[0]), int(metadata.context_lens[0])
        size = metadata.block_size
        prefix, padded = int(metadata.prefix_lens[0]), int(metadata.padded_prefix_lens[0])
        keys = cached if kind == _CACHE_ONLY else cached + len(at)
        block_end = padded + ((at - padded) // size + 1) * size
        if kind == 1:
            ends = block_end
        elif kind == 3:
            ends = np.where(at < prefix, prefix, np.where(at < padded, padded, block_end))
        else:
            assert kind == _CACHE_ONLY
            ends = np.full_like(at, keys)
        return np.minimum(ends, keys)
