# SPDX-License-Identifier: Apache-2.0
"""Experts of 4 bits: on CUDA against the definition in float64, and what the op refuses everywhere.

Tile heights are 16, 32, 64 and 128 positions, chosen by the number of tokens; sizes or groups that tensor
cores do not take, float32 rows and float32 scales have a kernel without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from diffulex import ops
from expert_layers import normal, routes, surrounded
from nibble_layers import (
    BF16,
    EXPONENTS,
    F16,
    F32,
    TOKENS,
    NibbleLayer,
    TiledLayer,
    assert_near,
    dequantised,
    random_scales,
    rows_of,
)

#: Hidden size, width and columns of a scale in both, 0: a row.
SIZES = [
    (2048, 512, 128, 128),
    (2048, 768, 128, 64),
    (2816, 704, 64, 32),
    (4096, 1024, 0, 0),
    (160, 96, 32, 16),
    # Without tensor cores: rows that end inside 16 bytes, and groups inside 16 columns.
    (144, 48, 48, 0),
    (36, 10, 0, 10),
    (256, 64, 8, 16),
]
#: Layers by row, and in tiles, whose rows are bfloat16.
KINDS = pytest.mark.parametrize(
    ("kind", "dtype"), [(NibbleLayer, BF16), (NibbleLayer, F16), (TiledLayer, BF16)]
)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("act", list(ops.Activation))
@pytest.mark.parametrize(("hidden", "width", "group", "inner"), SIZES)
def test_experts_equal_the_definition(
    dtype: torch.dtype, act: ops.Activation, hidden: int, width: int, group: int, inner: int
) -> None:
    layer = NibbleLayer.random(8, hidden, width, group, inner)
    for tokens in TOKENS:
        x = rows_of(tokens, hidden, dtype)
        weights, ids = routes(tokens, 8, 2)
        ids[0, 1] = -1
        found = layer.run(x, weights, ids, act=act)
        assert_near(found, layer.exact(x, weights, ids, act))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_scales_that_bfloat16_does_not_hold(dtype: torch.dtype) -> None:
    """Stored float16 scales are float32 here; of one matrix or of both."""
    layer = NibbleLayer.random(8, 512, 192, 64, 64)
    exact = [(s.float() * 1.001).half().float() for s in (layer.w13_scale, layer.w2_scale)]
    assert not torch.equal(exact[0].bfloat16().float(), exact[0])
    for changed in (
        replace(layer, w13_scale=surrounded(exact[0], 0xFF)),
        replace(layer, w13_scale=surrounded(exact[0], 0xFF), w2_scale=surrounded(exact[1], 0xFF)),
    ):
        for tokens in (1, 40, 300):
            x = rows_of(tokens, 512, dtype)
            weights, ids = routes(tokens, 8, 2)
            assert_near(changed.run(x, weights, ids), changed.exact(x, weights, ids))


@pytest.mark.cuda
@KINDS
def test_experts_elsewhere_and_none(kind: type[NibbleLayer], dtype: torch.dtype) -> None:
    """Four of ten experts are here, and one of them has no slot; an addend joins the sum."""
    layer = kind.random(4, 1024, 256, 128, 64)
    expert_map = torch.tensor([-1, 2, -1, 0, -1, -1, 3, -1, -1, 1], dtype=torch.int32).cuda()
    for tokens in (*TOKENS, 5000):
        x = rows_of(tokens, 1024, dtype)
        weights, ids = routes(tokens, 10, 4)
        ids[ids == 6] = 0
        local = expert_map[ids.long()]
        addend = normal(tokens, 1024, seed=7)
        found = layer.run(x, weights, ids, expert_map, addend=addend)
        assert_near(found, layer.exact(x, weights, local) + addend.double())
    none = torch.full((70, 4), 4, dtype=torch.int32, device="cuda")
    weights = torch.ones(70, 4, device="cuda")
    assert not layer.run(rows_of(70, 1024, dtype), weights, none, expert_map).any()


@pytest.mark.cuda
@pytest.mark.parametrize(("kind", "width"), [(NibbleLayer, 704), (TiledLayer, 640)])
@pytest.mark.parametrize("tokens", [1, 31, 300, 2500])
def test_one_expert_has_all_slots(tokens: int, kind: type[NibbleLayer], width: int) -> None:
    layer = kind.random(5, 512, width, 128, 64)
    x = rows_of(tokens, 512, BF16)
    ids = torch.full((tokens, 1), 3, dtype=torch.int32, device="cuda")
    weights = torch.ones(tokens, 1, device="cuda")
    assert_near(layer.run(x, weights, ids), layer.exact(x, weights, ids))


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [NibbleLayer, TiledLayer])
@pytest.mark.parametrize("tokens", [24, 160, 8192])
def test_many_experts(tokens: int, kind: type[NibbleLayer]) -> None:
    layer = kind.random(64, 2048, 512, 128, 128)
    x = rows_of(tokens, 2048, BF16)
    weights, ids = routes(tokens, 64, 8)
    found = layer.run(x, weights, ids)
    assert_near(found, layer.exact(x, weights, ids))
    for _ in range(5):
        assert torch.equal(layer.run(x, weights, ids), found)


@pytest.mark.cuda
@pytest.mark.parametrize("factor", [1, 4])
@pytest.mark.parametrize(
    ("kind", "dtype", "sizes"),
    [
        *((NibbleLayer, dtype, (*size, 16)) for dtype in (BF16, F16)
          for size in ((2048, 512), (4096, 704), (144, 48))),
        *((TiledLayer, BF16, (2048, 512, group)) for group in (32, 64, 128)),
    ],
)  # fmt: skip
def test_a_token_does_not_depend_on_the_others(
    kind: type[NibbleLayer], dtype: torch.dtype, sizes: tuple[int, int, int], factor: float
) -> None:
    """Nor on how many there are: all tile heights and widths sum in one order. Ten times the same bits."""
    hidden, width, group = sizes
    layer = kind.random(8, hidden, width, group, group).scaled(factor)
    x = rows_of(1000, hidden, dtype)
    weights, ids = routes(1000, 8, 2)
    whole = layer.run(x, weights, ids)
    for tokens in TOKENS:
        assert torch.equal(layer.run(x[:tokens], weights[:tokens], ids[:tokens]), whole[:tokens])
    alone = [layer.run(x[t : t + 1], weights[t : t + 1], ids[t : t + 1]) for t in range(20)]
    assert torch.equal(torch.cat(alone), whole[:20])
    for _ in range(10):
        assert torch.equal(layer.run(x, weights, ids), whole)


@pytest.mark.cuda
@EXPONENTS
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_weights_are_those_of_the_definition_bit_for_bit(
    dtype: torch.dtype, low: float, high: float
) -> None:
    """Rows of one 1 and a gate of 64, of which silu is 64: up and down are read off, one column each."""
    hidden, width = 256, 96
    layer = NibbleLayer.random(1, hidden, width, 32, 32)
    for scale in (layer.w13_scale, layer.w2_scale):
        scale.copy_(random_scales(scale, low, high))
    layer.w13[:, :width] = 0xCC  # 4
    layer.w13_scale[:, :, :width] = 16
    # One up row at a time reaches the down product.
    down = dequantised(layer.w2[0], layer.w2_scale[0])
    up = dequantised(layer.w13[0], layer.w13_scale[0])[width:]
    gate = dequantised(layer.w13[0], layer.w13_scale[0])[:width]
    x = torch.eye(hidden, dtype=dtype, device="cuda")
    ids = torch.zeros(hidden, 1, dtype=torch.int32, device="cuda")
    for row in range(0, width, 5):
        only = torch.full_like(layer.w13, 0x88)  # 0
        only[:, :width] = layer.w13[:, :width]
        only[:, width + row] = layer.w13[:, width + row]
        found = replace(layer, w13=only).run(x, torch.ones(hidden, 1, device="cuda"), ids)
        inner = (gate[row] * up[row]).float().to(dtype).double()
        assert torch.equal(found, (inner[:, None] * down[:, row]).float().to(dtype))


@pytest.mark.cuda
@KINDS
def test_layers_of_a_captured_graph(kind: type[NibbleLayer], dtype: torch.dtype) -> None:
    layer = kind.random(16, 1024, 512, 128, 64)
    for tokens in (8, 40, 400):
        layer.check_captured_chain(rows_of(tokens, 1024, dtype), 4)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", [NibbleLayer, TiledLayer])
@pytest.mark.parametrize("tokens", [8, 400])
def test_layers_of_two_streams(tokens: int, kind: type[NibbleLayer]) -> None:
    kind.random(16, 1024, 512, 128, 64).check_two_streams(tokens, 4)


ERRORS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("w13", lambda w: w[..., :-1], "w13: expected shape"),
    ("w13", lambda w: w[:, :-2], "w13: expected gate and up rows of an even expert width"),
    ("w2", lambda w: w[..., :-1], "w2: expected shape"),
    ("w2", lambda w: w.view(torch.int8), "w2: expected dtype uint8, got int8"),
    ("w13_scale", torch.Tensor.half, "w13_scale: expected dtype bfloat16 or float32, got float16"),
    ("w13_scale", lambda s: s[:, :3], "w13_scale: expected groups that divide 64 columns"),
    ("w13_scale", lambda s: s[:, :0], "w13_scale: expected groups that divide 64 columns"),
    ("w13_scale", lambda s: s[..., :-1], "w13_scale: expected shape"),
    ("w13_scale", lambda s: s[0], "w13_scale: expected shape"),
    ("w2_scale", lambda s: s[:, :3], "w2_scale: expected groups that divide 32 columns"),
    ("w2_scale", lambda s: s[:-1], "w2_scale: expected shape"),
]


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize(("argument", "change", "message"), ERRORS)
def test_argument_errors(
    where: str, argument: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    arguments = {
        "w13": torch.zeros(3, 64, 32, dtype=torch.uint8),
        "w2": torch.zeros(3, 64, 16, dtype=torch.uint8),
        "w13_scale": torch.ones(3, 4, 64).bfloat16(),
        "w2_scale": torch.ones(3, 4, 64),
    }
    arguments[argument] = change(arguments[argument])
    x, weights = torch.zeros(5, 64, device=where), torch.ones(5, 2, device=where)
    ids = torch.zeros(5, 2, dtype=torch.int32, device=where)
    with pytest.raises(RuntimeError, match=message):
        ops.fused_moe(
            x,
            topk_weights=weights,
            topk_ids=ids,
            workspace=torch.empty(0, dtype=torch.uint8, device=where),
            **{name: tensor.to(where) for name, tensor in arguments.items()},
        )


def test_a_traced_call_has_the_shape_of_its_rows() -> None:
    out = ops.fused_moe(
        torch.zeros(5, 64, device="meta"),
        torch.zeros(3, 64, 32, dtype=torch.uint8, device="meta"),
        torch.zeros(3, 64, 16, dtype=torch.uint8, device="meta"),
        torch.ones(5, 2, device="meta"),
        torch.zeros(5, 2, dtype=torch.int32, device="meta"),
        w13_scale=torch.ones(3, 4, 64, device="meta").bfloat16(),
        w2_scale=torch.ones(3, 1, 64, device="meta"),
        workspace=torch.empty(0, dtype=torch.uint8, device="meta"),
    )
    assert out.shape == (5, 64)


def test_there_is_no_cpu_kernel() -> None:
    with pytest.raises(RuntimeError, match="w13_scale: expected none on the CPU"):
        ops.fused_moe(
            torch.zeros(1, 4),
            torch.zeros(2, 8, 2, dtype=torch.uint8),
            torch.zeros(2, 4, 2, dtype=torch.uint8),
            torch.ones(1, 1),
            torch.zeros(1, 1, dtype=torch.int32),
            w13_scale=torch.ones(2, 1, 8).bfloat16(),
            w2_scale=torch.ones(2, 1, 4).bfloat16(),
        )
