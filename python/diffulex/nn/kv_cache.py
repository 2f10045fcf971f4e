# SPDX-License-Identifier: Apache-2.0
"""The tensors of the paged KV cache.

Symbols: Lk layers, NP pages, PS page size, H KV heads, Dh head size, x split factor;
slot = page * PS + offset. Layers with the same H and Dh share one allocation; page ids hold for all
layers, so that a request owns the same pages everywhere.

    unified   [2, Lk, NP, PS, H, Dh], index 0 = K, 1 = V
    distinct  K [Lk, NP, H, Dh / x, PS, x], V [Lk, NP, H, Dh, PS]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        layer_shapes: Sequence[tuple[int, int]],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layout: KvLayoutName = "unified",
        x: int = 8,
    ) -> None:
        """Layer i has `layer_shapes[i]` = (number of KV heads, head size).

        Args:
            layer_shapes: one entry per layer; see `ModelSpec.kv_layers`.
            x: split factor of the distinct layout, a divisor of every head size.
        """
        if layout not in ("unified", "distinct"):
            raise ValueError(f"KVCache: expected layout unified or distinct, got {layout!r}")
        for _, head_dim in layer_shapes:
            if layout == "distinct" and head_dim % x:
                raise ValueError(f"KVCache: expected x to divide head size {head_dim}, got {x}")
        self.layout: KvLayoutName = layout
        self.num_pages = num_pages
        self.page_size = page_size
        # Views are made once: the model asks for every layer in every step.
        layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._groups: list[tuple[torch.Tensor, torch.Tensor]] = []
        for shape in dict.fromkeys(layer_shapes):
            members = [i for i, other in enumerate(layer_shapes) if other == shape]
            k, v = self._new_group(len(members), shape, dtype, device, x)
            self._groups.append((k, v))
            for position, index in enumerate(members):
                layers[index] = (k[position], v[position])
        self._layers = [layers[index] for index in range(len(layer_shapes))]

    def _new_group(
        self,
        num_layers: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device | str,
        x: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of layers of one shape, layer first."""
        (num_kv_heads, head_dim), pages, page_size = shape, self.num_pages, self.page_size
        if self.layout == "unified":
            sizes = (2, num_layers, pages, page_size, num_kv_heads, head_dim)
            both = torch.zeros(sizes, dtype=dtype, device=device)
            return both[0], both[1]
        k_sizes = (num_layers, pages, num_kv_heads, head_dim // x, page_size, x)
        v_sizes = (num_layers, pages, num_kv_heads, head_dim, page_size)
        return (
            torch.zeros(k_sizes, dtype=dtype, device=device),
            torch.zeros(v_sizes, dtype=dtype, device=device),
        )

    @property
    def kv_layout(self) -> int:
        """Layout id of the ops: 0 unified, 1 distinct."""
        return 0 if self.layout == "unified" else 1

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(k.nbytes + v.nbytes for k, v in self._groups)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k_cache, v_cache) of one layer, in the shape of the layout."""
        return self._layers[index]

    @staticmethod
    def page_bytes(
        layer_shapes: Sequence[tuple[int, int]], page_size: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one page: K and V of all layers."""
        elements = sum(num_kv_heads * head_dim for num_kv_heads, head_dim in layer_shapes)
        return 2 * page_size * elements * dtype.itemsize
