# SPDX-License-Identifier: Apache-2.0
"""Experts of e4m3 codes on CUDA, of the sizes that Hopper's own products take.

Tile heights are 16, 32, 64, 96 and 128 positions, chosen by the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn import functional

from diffulex import ops
from diffulex.ops import WeightScheme
from expert_layers import ExpertLayer, normal, routes, surrounded

pytestmark = pytest.mark.cuda

E4M3 = torch.float8_e4m3fn
FP8 = pytest.mark.parametrize("scheme", [WeightScheme.FP8, WeightScheme.FP8_BLOCK])
SIZES = [(2048, 512), (2048, 768), (2816, 704), (4096, 1024), (144, 48)]
#: With eight experts and two slots a token, of each tile height at least one.
TOKENS = (1, 16, 20, 64, 130, 300, 1000)


def dequantised(codes: torch.Tensor, scale: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Of one expert in float64; blocks are counted in each of `parts` of the rows."""
    values = codes.float().double()
    if scale.dim() == 1:
        return values * scale.double()[:, None]
    blocks = scale.double().repeat_interleave(128, 1)[:, : codes.shape[1]]
    rows = codes.shape[0] // parts
    factors = [part.repeat_interleave(128, 0)[:rows] for part in blocks.chunk(parts)]
    return values * torch.cat(factors)


def quantised_rows(rows: torch.Tensor) -> torch.Tensor:
    """What a product reads of rows, in float64."""
    coded = ops.quantize_rows(rows, E4M3)
    scale = coded.scale[:, : rows.shape[0]].double().T.repeat_interleave(128, 1)
    return coded.codes.float().double() * scale[:, : rows.shape[1]]


@dataclass(frozen=True, slots=True)
class ScaledLayer(ExpertLayer):
    @staticmethod
    def random(scheme: WeightScheme, num_experts: int, hidden: int, width: int) -> ScaledLayer:
        def matrix(rows: int, depth: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
            return ops.quantize_weight(normal(rows, depth, seed=seed) * depth**-0.5, scheme)

        def stack(experts: list[torch.Tensor]) -> torch.Tensor:
            dtype = torch.int8 if scheme == WeightScheme.INT8 else E4M3
            return surrounded(torch.stack(experts), 0x7F).view(dtype)  # between NaN

        both = [
            [matrix(width, hidden, 2 * expert + half) for half in (0, 1)]
            for expert in range(num_experts)
        ]
        down = [matrix(hidden, width, 100 + expert) for expert in range(num_experts)]
        return ScaledLayer(
            stack([torch.cat([codes.view(torch.uint8) for codes, _ in pair]) for pair in both]),
            torch.stack([torch.cat([scale for _, scale in pair]) for pair in both]),
            stack([codes.view(torch.uint8) for codes, _ in down]),
            torch.stack([scale for _, scale in down]),
        )

    def gate_up(self, expert: int) -> torch.Tensor:
        return dequantised(self.w13[expert], self.w13_scale[expert], parts=2)

    def down(self, expert: int) -> torch.Tensor:
        return dequantised(self.w2[expert], self.w2_scale[expert])

    def read(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return quantised_rows(rows if rows.dtype == dtype else rows.float())


def assert_near(found: torch.Tensor, want: torch.Tensor) -> None:
    """Codes of activated values that a sum of 14 bits rounds otherwise are one apart.

    That is an eighth of a value at most, which may be most of a row; all rows together are close.
    """
    assert found.isfinite().all()
    distance = (found.double() - want).norm(dim=1)
    assert (distance <= 0.15 * want.norm(dim=1)).all()
    if len(found) > 10:
        assert distance.norm() <= 0.015 * want.norm()


@FP8
@pytest.mark.parametrize("act", list(ops.Activation))
@pytest.mark.parametrize(("hidden", "width"), SIZES)
def test_experts_equal_the_definition(
    scheme: WeightScheme, act: ops.Activation, hidden: int, width: int
) -> None:
    layer = ScaledLayer.random(scheme, 8, hidden, width)
    for tokens in TOKENS:
        x = normal(tokens, hidden).bfloat16()
        weights, ids = routes(tokens, 8, 2)
        ids[0, 1] = -1
        found = layer.run(x, weights, ids, act=act)
        assert_near(found, layer.exact(x, weights, ids, act))


@FP8
def test_experts_elsewhere_and_none(scheme: WeightScheme) -> None:
    """Four of ten experts are here, and one of them has no slot."""
    layer = ScaledLayer.random(scheme, 4, 1024, 256)
    expert_map = torch.tensor([-1, 2, -1, 0, -1, -1, 3, -1, -1, 1], dtype=torch.int32).cuda()
    for tokens in (*TOKENS, 5000):
        x = normal(tokens, 1024).bfloat16()
        weights, ids = routes(tokens, 10, 4)
        ids[ids == 6] = 0
        local = expert_map[ids.long()]
        assert_near(layer.run(x, weights, ids, expert_map), layer.exact(x, weights, local))
    none = torch.full((70, 4), 4, dtype=torch.int32, device="cuda")
    weights = torch.ones(70, 4, device="cuda")
    assert not layer.run(normal(70, 1024).bfloat16(), weights, none, expert_map).any()


@FP8
@pytest.mark.parametrize("tokens", [1, 31, 300, 2500])
def test_one_expert_has_all_slots(scheme: WeightScheme, tokens: int) -> None:
    layer = ScaledLayer.random(scheme, 5, 512, 704)
    x = normal(tokens, 512).bfloat16()
    ids = torch.full((tokens, 1), 3, dtype=torch.int32, device="cuda")
    weights = torch.ones(tokens, 1, device="cuda")
    assert_near(layer.run(x, weights, ids), layer.exact(x, weights, ids))


@FP8
def test_many_tokens(scheme: WeightScheme) -> None:
    layer = ScaledLayer.random(scheme, 64, 2048, 512)
    x = normal(8192, 2048).bfloat16()
    weights, ids = routes(8192, 64, 8)
    found = layer.run(x, weights, ids)
    assert_near(found, layer.exact(x, weights, ids))
    for _ in range(5):
        assert torch.equal(layer.run(x, weights, ids), found)


@FP8
@pytest.mark.parametrize(("hidden", "width"), [(2048, 512), (4096, 704)])
def test_a_token_does_not_depend_on_the_others(
    scheme: WeightScheme, hidden: int, width: int
) -> None:
    """Nor on how many there are: all tile heights sum in one order. Ten times the same bits."""
    layer = ScaledLayer.random(scheme, 8, hidden, width)
    x = normal(1000, hidden).bfloat16()
    weights, ids = routes(1000, 8, 2)
    whole = layer.run(x, weights, ids)
    for tokens in TOKENS:
        assert torch.equal(layer.run(x[:tokens], weights[:tokens], ids[:tokens]), whole[:tokens])
    alone = [layer.run(x[t : t + 1], weights[t : t + 1], ids[t : t + 1]) for t in range(20)]
    assert torch.equal(torch.cat(alone), whole[:20])
    for _ in range(10):
        assert torch.equal(layer.run(x, weights, ids), whole)


@FP8
@pytest.mark.parametrize("width", [128, 192, 256])
def test_the_down_product_has_the_bits_of_the_dense_one(scheme: WeightScheme, width: int) -> None:
    """Rows of one 1 and a gate of 448 make activated values whose bits are known.

    Of the depths that the dense product does not share among two processors, whose order is another.
    """
    hidden = 2048
    layer = ScaledLayer.random(scheme, 4, hidden, width)
    layer.w13[:, :width] = torch.full((), 448.0, device="cuda").to(E4M3)
    layer.w13_scale[:, : layer.w13_scale.shape[1] // 2] = 1.0
    for tokens in (1, 20, 100, 128):
        # Positions of a single 1, whose code is 448.
        places = torch.randint(0, hidden, (tokens,), device="cuda")
        x = functional.one_hot(places, hidden).bfloat16()
        ids = torch.arange(tokens, device="cuda").remainder(4).int()[:, None]
        found = layer.run(x, torch.ones(tokens, 1, device="cuda"), ids)
        one = torch.full((tokens, 1), 448.0, device="cuda")
        one_scale = torch.ones(tokens, 1, device="cuda") / 448.0
        codes = layer.w13[:, width:].float()[ids[:, 0].long(), :, places]
        blocks = layer.w13_scale.shape[1] // 2
        up_scale = layer.w13_scale[:, blocks:][ids[:, 0].long()]
        if scheme == WeightScheme.FP8:
            gate, up = one * 448.0 * one_scale, one * codes * one_scale * up_scale
        else:
            lines = up_scale.gather(2, (places // 128)[:, None, None].expand(-1, blocks, 1))[..., 0]
            factors = lines.repeat_interleave(128, 1)[:, :width]
            gate, up = one * 448.0 * one_scale, one * codes * (one_scale * factors)
        inner = ops.quantize_rows(gate * up, E4M3)
        for expert in range(min(4, tokens)):
            mine = (ids[:, 0] == expert).nonzero()[:, 0]
            scale = torch.zeros(inner.scale.shape[0], -(-len(mine) // 4) * 4, device="cuda")
            scale[:, : len(mine)] = inner.scale[:, mine]
            rows = ops.QuantizedRows(inner.codes.view(torch.uint8)[mine].view(E4M3), scale)
            want = torch.empty(len(mine), hidden, dtype=torch.bfloat16, device="cuda")
            ops.linear_scaled(rows, layer.w2[expert], layer.w2_scale[expert], out=want)
            assert torch.equal(found[mine], want)


def test_long_sums_go_to_float32_after_each_block() -> None:
    """12,288 equal products: the unit's sum of about 14 bits takes in no more of them at the end."""
    hidden, width = 12_288, 128
    down = torch.zeros(1, hidden, width, device="cuda")
    down[0, :width] = torch.eye(width, device="cuda")
    layer = ScaledLayer(
        torch.full((1, 2 * width, hidden), 15.0, device="cuda").to(E4M3),
        torch.full((1, 2 * width), 1.0 / (15 * hidden), device="cuda"),
        down.to(E4M3),
        torch.ones(1, hidden, device="cuda"),
    )
    want = float(torch.tensor(1.0).sigmoid())
    for tokens in (1, 50, 200):
        x = torch.ones(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.zeros(tokens, 1, dtype=torch.int32, device="cuda")
        found = layer.run(x, torch.ones(tokens, 1, device="cuda"), ids)
        assert (found[:, :width].float() - want).abs().max() <= 2**-8 * want
        assert not found[:, width:].any()


@FP8
def test_layers_of_a_captured_graph(scheme: WeightScheme) -> None:
    layer = ScaledLayer.random(scheme, 16, 1024, 512)
    for tokens in (8, 40, 400):
        found = layer.check_captured_chain(normal(tokens, 1024).bfloat16(), 4)
        assert not found.isnan().any()


@pytest.mark.parametrize("scheme", [WeightScheme.FP8, WeightScheme.FP8_BLOCK, WeightScheme.INT8])
@pytest.mark.parametrize("tokens", [8, 400])
def test_layers_of_two_streams(scheme: WeightScheme, tokens: int) -> None:
    ScaledLayer.random(scheme, 16, 1024, 512).check_two_streams(tokens, 4)
