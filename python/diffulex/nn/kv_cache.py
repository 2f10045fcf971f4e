# SPDX-License-Identifier: Apache-2.0
"""The tensors of the paged KV cache.

Symbols: Lk layers, NP pages, PS page size, H KV heads, Dh head size, x split factor;
slot = page * PS + offset. Layers with the same H and Dh share one allocation; page ids hold for all
layers, so that a request owns the same pages everywhere.

    unified   [2, Lk, NP, PS, H, Dh], index 0 = K, 1 = V
    distinct  K [Lk, NP, H, Dh / x, PS, x], V [Lk, NP, H, Dh, PS]
    scales    [2, Lk, NP, H, PS] uint8 beside unified caches of float8_e4m3fn codes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KVCache", "KvLayoutName", "kv_dtype"]

KvLayoutName = Literal["unified", "distinct"]


def kv_dtype(name: str, compute: torch.dtype) -> torch.dtype:
    """Elements of the cache under `kv_cache_dtype`: `auto` or `fp8_e4m3`."""
    return torch.float8_e4m3fn if name == "fp8_e4m3" else compute


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
            dtype: of the values, or torch.float8_e4m3fn for codes with one scale byte per slot and
                head, in the unified layout only.
            x: split factor of the distinct layout, a divisor of every head size.

        Raises:
            ValueError: an unknown layout, one without codes, or a head size that x does not divide.
        """
        if layout not in ("unified", "distinct"):
            raise ValueError(f"KVCache: expected layout unified or distinct, got {layout!r}")
        has_scales = dtype == torch.float8_e4m3fn
        if has_scales and layout != "unified":
            raise ValueError(f"KVCache: expected layout unified for {dtype}, got {layout!r}")
        for _, head_dim in layer_shapes:
            if layout == "distinct" and head_dim % x:
                raise ValueError(f"KVCache: expected x to divide head size {head_dim}, got {x}")
        self.layout: KvLayoutName = layout
        self.num_pages = num_pages
        self.page_size = page_size
        # Views are made once: the model asks for every layer in every step.
        layers: dict[int, tuple[torch.Tensor, ...]] = {}
        self._groups: list[tuple[torch.Tensor, ...]] = []
        for shape in dict.fromkeys(layer_shapes):
            members = [i for i, other in enumerate(layer_shapes) if other == shape]
            group: tuple[torch.Tensor, ...] = self._new_group(len(members), shape, dtype, device, x)
            if has_scales:
                sizes = (2, len(members), num_pages, shape[0], page_size)
                group = (*group, *torch.zeros(sizes, dtype=torch.uint8, device=device))
            self._groups.append(group)
            for position, index in enumerate(members):
                layers[index] = tuple(part[position] for part in group)
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
        return sum(part.nbytes for group in self._groups for part in group)

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """(k_cache, v_cache) of one layer, in the shape of the layout; (k_cache, v_cache, k_scale,
        v_scale) where they hold codes.
        """
        return self._layers[index]

    @staticmethod
    def page_bytes(
        layer_shapes: Sequence[tuple[int, int]], page_size: int, dtype: torch.dtype
    ) -> int:
        """Bytes of one page: K and V of all layers, with the scales of codes."""
        scale_bytes = 1 if dtype == torch.float8_e4m3fn else 0
        slot = sum(heads * (dim * dtype.itemsize + scale_bytes) for heads, dim in layer_shapes)
        return 2 * page_size * slot
