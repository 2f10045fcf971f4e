# SPDX-License-Identifier: Apache-2.0
"""Layers of experts of 4 bits, by row and in tiles, and what they should give."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from typing_extensions import Self

from diffulex import ops
from diffulex.ops import WeightScheme
from expert_layers import ExpertLayer, normal, surrounded

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: With eight experts and two slots a token, experts of each height of a tile and each width of a product.
TOKENS = (1, 16, 20, 64, 100, 130, 300, 1000)
#: Of a row and of all rows: what rounding activated values, slots and sums may move.
BOUNDS = {BF16: (0.015, 0.005), F16: (0.002, 0.0008), F32: (2e-5, 5e-6)}


def dequantised(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16((q - 8) s) of one expert, in float64."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    wide = scale.float().T.repeat_interleave(nibbles.shape[1] // len(scale), 1)
    return ((nibbles.float() - 8) * wide).bfloat16().double()


@dataclass(frozen=True, slots=True)
class NibbleLayer(ExpertLayer):
    @staticmethod
    def random(
        num_experts: int, hidden: int, width: int, group: int = 0, inner: int = 0
    ) -> NibbleLayer:
        def stack(
            rows: int, depth: int, group: int, seed: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            made = [
                ops.quantize_weight(
                    normal(rows, depth, seed=seed + expert) * depth**-0.5,
                    WeightScheme.INT4,
                    group=group,
                )
                for expert in range(num_experts)
            ]
            codes, scales = zip(*made, strict=True)
            return surrounded(torch.stack(codes), 0xFF), surrounded(torch.stack(scales), 0xFF)

        return NibbleLayer(*stack(2 * width, hidden, group, 0), *stack(hidden, width, inner, 100))

    def scaled(self, factor: float) -> Self:
        """With other scales: those from 2^-5 on are read in another way."""
        scales = [surrounded(scale * factor, 0xFF) for scale in (self.w13_scale, self.w2_scale)]
        return replace(self, w13_scale=scales[0], w2_scale=scales[1])

    def gate_up(self, expert: int) -> torch.Tensor:
        return dequantised(self.w13[expert], self.w13_scale[expert])

    def down(self, expert: int) -> torch.Tensor:
        return dequantised(self.w2[expert], self.w2_scale[expert])

    def read(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rows.to(dtype).double()


#: Of scales of any fraction: above 2^-5, below, and both beside each other. With float16 rows every
#: weight of the first is a value of theirs.
EXPONENTS = pytest.mark.parametrize(("low", "high"), [(-4, 1), (-12, -5), (-7, -3)])


def random_scales(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Powers of two between these exponents."""
    return torch.exp2((high - low) * torch.rand(like.shape, device="cuda") + low)


def rows_of(tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows between others of NaN, at multiples of 16 bytes."""
    whole = torch.full((tokens + 2, hidden + 24), torch.nan, dtype=dtype, device="cuda")
    whole[1:-1, 16 : 16 + hidden] = normal(tokens, hidden)
    return whole[1:-1, 16 : 16 + hidden]


def assert_near(found: torch.Tensor, want: torch.Tensor) -> None:
    of_row, of_all = BOUNDS[found.dtype]
    assert found.isfinite().all()
    distance = (found.double() - want).norm(dim=1)
    assert (distance <= of_row * want.norm(dim=1)).all()
    if len(found) > 10:
        assert distance.norm() <= of_all * want.norm()


@dataclass(frozen=True, slots=True)
class TiledLayer(NibbleLayer):
    @staticmethod
    def of(layer: NibbleLayer) -> TiledLayer:
        """Another layer in tiles, in the memory of its rows."""
        w13, w2 = (ops.to_nibble_tiles(stack) for stack in (layer.w13, layer.w2))
        return TiledLayer(w13, layer.w13_scale, w2, layer.w2_scale)

    @staticmethod
    def random(
        num_experts: int, hidden: int, width: int, group: int = 0, inner: int = 0
    ) -> TiledLayer:
        return TiledLayer.of(NibbleLayer.random(num_experts, hidden, width, group, inner))

    @property
    def hidden(self) -> int:
        return self.w2_scale.shape[2]

    def gate_up(self, expert: int) -> torch.Tensor:
        return dequantised(ops.from_nibble_tiles(self.w13[expert].clone()), self.w13_scale[expert])

    def down(self, expert: int) -> torch.Tensor:
        return dequantised(ops.from_nibble_tiles(self.w2[expert].clone()), self.w2_scale[expert])
