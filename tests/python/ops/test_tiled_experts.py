# SPDX-License-Identifier: Apache-2.0
"""Experts of 4 bits in tiles, which compute capability 9.0 multiplies: against the definition in float64.

The products of a tile of 64 positions have the width that holds those of an expert: 8, 16, 32 or 64.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from diffulex import ops
from expert_layers import routes
from nibble_layers import (
    BF16,
    EXPONENTS,
    TOKENS,
    NibbleLayer,
    TiledLayer,
    assert_near,
    dequantised,
    random_scales,
    rows_of,
)

#: Hidden size, width and columns of a scale in both.
SIZES = [
    (2048, 512, 128, 128),
    (2048, 768, 128, 64),
    (4096, 1024, 64, 128),
    # Tiles of the second product that end inside 256 rows.
    (1152, 384, 64, 32),
    (384, 128, 32, 128),
    (128, 128, 128, 32),
]


def test_tiles_of_a_stack_are_those_of_its_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    stack = torch.randint(256, (3, 48, 128), generator=generator, dtype=torch.uint8)
    tiles = ops.to_nibble_tiles(stack.clone())
    assert tiles.shape == (3, 6, 4, 32, 8)
    for expert, codes in enumerate(stack):
        assert torch.equal(tiles[expert], ops.to_nibble_tiles(codes.clone()))
    assert torch.equal(ops.from_nibble_tiles(tiles.clone()), stack)


@pytest.mark.cuda
@pytest.mark.parametrize("factor", [1, 16])
@pytest.mark.parametrize("act", list(ops.Activation))
@pytest.mark.parametrize(("hidden", "width", "group", "inner"), SIZES)
def test_experts_equal_the_definition(
    act: ops.Activation, hidden: int, width: int, group: int, inner: int, factor: float
) -> None:
    layer = TiledLayer.random(8, hidden, width, group, inner).scaled(factor)
    for tokens in TOKENS:
        x = rows_of(tokens, hidden, BF16)
        weights, ids = routes(tokens, 8, 2)
        ids[0, 1] = -1
        found = layer.run(x, weights, ids, act=act)
        assert_near(found, layer.exact(x, weights, ids, act))


@pytest.mark.cuda
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("tokens", [8, 16, 32, 256])
@EXPONENTS
def test_weights_are_those_of_the_definition_bit_for_bit(
    low: float, high: float, tokens: int, group: int
) -> None:
    """Rows of one 1 and a gate of 64, of which silu is 64: up and down are read off, one column each.

    Products of each width.
    """
    hidden, width = 256, 128
    rows = NibbleLayer.random(1, hidden, width, group, group)
    for scale in (rows.w13_scale, rows.w2_scale):
        scale.copy_(random_scales(scale, low, high))
    rows.w13[:, :width] = 0xCC  # 4
    rows.w13_scale[:, :, :width] = 16
    # One up row at a time reaches the down product.
    down = dequantised(rows.w2[0], rows.w2_scale[0])
    up = dequantised(rows.w13[0], rows.w13_scale[0])[width:]
    gate = dequantised(rows.w13[0], rows.w13_scale[0])[:width]
    x = torch.eye(hidden, dtype=BF16, device="cuda")[-tokens:]
    ids = torch.zeros(tokens, 1, dtype=torch.int32, device="cuda")
    for row in range(0, width, 9):
        only = torch.full_like(rows.w13, 0x88)  # 0
        only[:, :width] = rows.w13[:, :width]
        only[:, width + row] = rows.w13[:, width + row]
        layer = TiledLayer.of(replace(rows, w13=only, w2=rows.w2.clone()))
        found = layer.run(x, torch.ones(tokens, 1, device="cuda"), ids)
        inner = (gate[row] * up[row])[-tokens:].bfloat16().double()
        assert torch.equal(found, (inner[:, None] * down[:, row]).bfloat16())


@pytest.mark.cuda
def test_rows_and_weights_at_other_places_are_refused() -> None:
    layer = TiledLayer.random(2, 256, 128, 128, 128)
    weights, ids = routes(4, 2, 1)
    x = torch.zeros(4, 260, dtype=BF16, device="cuda")[:, :256]
    with pytest.raises(RuntimeError, match="x: expected rows at multiples of 16 bytes"):
        layer.run(x, weights, ids)
    moved = torch.zeros(2 * 2 * 256 + 1, dtype=BF16, device="cuda")[1:].view(2, 2, 256)
    with pytest.raises(RuntimeError, match="w13_scale and w2_scale: expected groups at multiples"):
        replace(layer, w13_scale=moved).run(rows_of(4, 256, BF16), weights, ids)


WITHOUT_HOPPER = """
import torch
from diffulex import ops
ops.fused_moe(
    torch.zeros(5, 128, dtype=torch.bfloat16, device="cuda"),
    torch.zeros(3, 32, 2, 32, 8, dtype=torch.uint8, device="cuda"),
    torch.zeros(3, 16, 2, 32, 8, dtype=torch.uint8, device="cuda"),
    torch.ones(5, 2, device="cuda"),
    torch.zeros(5, 2, dtype=torch.int32, device="cuda"),
    w13_scale=torch.ones(3, 1, 256, dtype=torch.bfloat16, device="cuda"),
    w2_scale=torch.ones(3, 1, 128, dtype=torch.bfloat16, device="cuda"),
)
"""


@pytest.mark.cuda
def test_tiles_are_refused_without_hopper_kernels() -> None:
    """The library reads the switch once in a process."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HOPPER],
        env={**os.environ, "DIFFULEX_FORCE_SM80": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 1
    assert "w13: expected nibbles by row without kernels of compute capability 9.0" in done.stderr


ERRORS: list[tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ("x", torch.Tensor.half, "x: expected dtype bfloat16, got float16"),
    ("w13", lambda w: w[:, :, :-2], "w13: expected shape"),
    ("w13", lambda w: w[:, :-8], "expected tiles of multiples of 128 rows and columns"),
    ("w13", lambda w: w[..., :-1], r"w13: expected shape"),
    ("w13", lambda w: w.view(torch.int8), "w13: expected"),
    ("w13", lambda w: w[:0], "w13: expected 1 to 4096 local experts"),
    ("w2", lambda w: w[:-1], "w2: expected shape"),
    ("w2", lambda w: w.flatten(1, 2), "w2: expected shape"),
    ("w13_scale", torch.Tensor.float, "w13_scale: expected dtype bfloat16, got float32"),
    ("w13_scale", lambda s: s[:, :1], "w13_scale: expected groups of 32, 64 or 128 columns"),
    ("w13_scale", lambda s: s[:, :0], "w13_scale: expected groups"),
    ("w13_scale", lambda s: s[..., :-1], "w13_scale: expected shape"),
    ("w2_scale", lambda s: s[0], "w2_scale: expected shape"),
    ("w2_scale", lambda s: s.repeat(1, 8, 1), "w2_scale: expected groups of 32, 64 or 128 columns"),
]


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize(("argument", "change", "message"), ERRORS)
def test_argument_errors(
    where: str, argument: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    arguments = {
        "x": torch.zeros(5, 256, dtype=BF16),
        "w13": torch.zeros(3, 32, 4, 32, 8, dtype=torch.uint8),
        "w2": torch.zeros(3, 32, 2, 32, 8, dtype=torch.uint8),
        "w13_scale": torch.ones(3, 2, 256, dtype=BF16),
        "w2_scale": torch.ones(3, 1, 256, dtype=BF16),
    }
    arguments[argument] = change(arguments[argument]).contiguous()
    with pytest.raises(RuntimeError, match=message):
        ops.fused_moe(
            topk_weights=torch.ones(5, 2, device=where),
            topk_ids=torch.zeros(5, 2, dtype=torch.int32, device=where),
            workspace=torch.empty(0, dtype=torch.uint8, device=where),
            **{name: tensor.to(where) for name, tensor in arguments.items()},
        )


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_call_without_a_kernel(where: str) -> None:
    """There is none on the CPU; a traced call has the shape of its rows."""

    def call() -> torch.Tensor:
        return ops.fused_moe(
            torch.zeros(5, 256, dtype=BF16, device=where),
            torch.zeros(3, 32, 4, 32, 8, dtype=torch.uint8, device=where),
            torch.zeros(3, 32, 2, 32, 8, dtype=torch.uint8, device=where),
            torch.ones(5, 2, device=where),
            torch.zeros(5, 2, dtype=torch.int32, device=where),
            w13_scale=torch.ones(3, 2, 256, dtype=BF16, device=where),
            w2_scale=torch.ones(3, 1, 256, dtype=BF16, device=where),
            workspace=torch.empty(0, dtype=torch.uint8, device=where),
        )

    if where == "meta":
        assert call().shape == (5, 256)
        return
    with pytest.raises(RuntimeError, match="w13_scale: expected none on the CPU"):
        call()
