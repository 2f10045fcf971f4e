# SPDX-License-Identifier: Apache-2.0
"""The tensors of the paged KV cache.

Symbols: Lk layers, NP pages, PS page size, H KV heads, Dh head size, x split factor;
slot = page * PS + offset.

    unified   [2, Lk, NP, PS, H, Dh], index 0 = K, 1 = V
    distinct  K [Lk, NP, H, Dh / x, PS, x], V [Lk, NP, H, Dh, PS]
"""

from __future__ import annotations

from typing import Literal

import torch

__all__ = ["KVCache", "KvLayoutName"]

KvLayoutName = Literal["unified", "distinct"]


class KVCache:
    """K and V of every layer, addressed by page id.

    Results do not depend on what a page held before its owner stored to it, NaN included: kernels
    read stored slots only, or give what they read beyond them no weight and no part in a sum. The
    memory is zeroed at the start only to make it the same in every run.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layout: KvLayoutName = "unified",
        x: int = 8,
    ) -> None:
        if layout not in ("unified", "distinct"):
            raise ValueError(f"KVCache: expected layout unified or distinct, got {layout!r}")
        if layout == "distinct" and head_dim % x:
            raise ValueError(f"KVCache: expected x to divide head size {head_dim}, got {x}")
        self.layout: KvLayoutName = layout
        self.num_pages = num_pages
        self.page_size = page_size
        if layout == "unified":
            shape = (2, num_layers, num_pages, page_size, num_kv_heads, head_dim)
            both = torch.zeros(shape, dtype=dtype, device=device)
            self._k, self._v = both[0], both[1]
        else:
            k_shape = (num_layers, num_pages, num_kv_heads, head_dim // x, page_size, x)
            v_shape = (num_layers, num_pages, num_kv_heads, head_dim, page_size)
            self._k = torch.zeros(k_shape, dtype=dtype, device=device)
            self._v = torch.zeros(v_shape, dtype=dtype, device=device)
        # Views are made once: the model asks for every layer in every step.
        self._layers = [(self._k[i], self._v[i]) for i in range(num_layers)]

    @property
    def kv_layout(self) -> int:
        """Layout id of the ops: 0 unified, 1 distinct."""
        return 0 if self.layout == "unified" else 1

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return self._k.nbytes + self._v.nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k_cache, v_cache) of one layer, in the shape of the layout."""
        return self._layers[index]

    @staticmethod
    def page_bytes(
        num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one page: K and V of all layers."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize
