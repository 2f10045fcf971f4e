# SPDX-License-Identifier: Apache-2.0
"""Weights of 4 bits in tiles: their form, and on CUDA the product of compute capability 9.0."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from diffulex import ops
from diffulex.ops import WeightScheme
from diffulex.quantization.weights import QuantizedWeight, Shape

GROUPS = pytest.mark.parametrize("group", [32, 64, 128])
#: Rows of x: all sizes of a tile and its edges, several tiles.
ROWS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 300)
#: N and K: odd multiples of what they are multiples of; one tile and one stage; both shares of the depth;
#: a last tile that is not whole; the products of models, made smaller; stages filled more than once for a
#: tile, by four warpgroups in turn and by two.
SHAPES = [(16, 128), (48, 384), (80, 640), (208, 896), (3088, 1152), (6160, 384), (4096, 1536)]
SHAPES += [(64, 6272), (8192, 2304)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def random_codes(rows: int, depth: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + depth)
    return torch.randint(0, 256, (rows, depth // 2), generator=generator).to(torch.uint8)


def nibbles_of(codes: torch.Tensor) -> torch.Tensor:
    return torch.stack([codes & 15, codes >> 4], -1).flatten(1)


def values_of(codes: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """What nibbles and scales of any device say, in bfloat16 on the CPU."""
    shifted = nibbles_of(codes.cpu()).float() - ops.INT4_ZERO
    return (shifted * scales.cpu().float().T.repeat_interleave(group, 1)).bfloat16()


@pytest.mark.parametrize(("rows", "depth"), [(16, 128), (48, 384), (208, 640)])
def test_tiles_hold_the_nibbles(rows: int, depth: int) -> None:
    """By their definition: of each 16 columns a lane has those at 2 (l % 4) and eight behind, then those
    one after."""
    codes = random_codes(rows, depth)
    nibbles = nibbles_of(codes)
    kept = codes.clone()
    tiles = ops.to_nibble_tiles(kept)
    assert tiles.shape == (rows // 8, depth // 64, 32, 8)
    assert tiles.data_ptr() == kept.data_ptr()
    found = nibbles_of(tiles.reshape(-1, 8)).view(rows // 8, depth // 64, 32, 16)
    lane = torch.arange(32)
    place = 0
    for half in (0, 32):
        for after in (0, 1):
            for sixteen in (0, 16):
                for behind in (0, 8):
                    column = half + sixteen + behind + after + 2 * (lane % 4)
                    want = nibbles.view(rows // 8, 8, depth // 64, 64)[:, lane // 4, :, column]
                    assert torch.equal(found[..., place], want.permute(1, 2, 0))
                    place += 1
    assert torch.equal(ops.from_nibble_tiles(tiles), codes)


def test_tiles_of_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = random_codes(208, 384)
    whole = ops.to_nibble_tiles(codes.clone())
    monkeypatch.setattr("diffulex.ops.quantize._PIECE_BYTES", 5 * 8 * 192)
    pieces = ops.to_nibble_tiles(codes.clone())
    assert torch.equal(pieces, whole)
    assert torch.equal(ops.from_nibble_tiles(pieces), codes)


@pytest.mark.parametrize(
    ("rows", "depth", "group", "can"),
    [
        (16, 128, 32, True),
        (48, 384, 128, True),
        (24, 128, 64, False),
        (16, 192, 64, False),
        (16, 128, 16, False),
        (16, 384, 384, False),
    ],
)
def test_which_weights_may_be_in_tiles(rows: int, depth: int, group: int, can: bool) -> None:
    assert ops.is_tileable(rows, depth, group) == can


@pytest.mark.parametrize("act", list(ops.Activation))
@pytest.mark.parametrize("form", ["rows", "panels"])
def test_gated_product_on_the_cpu(act: ops.Activation, form: str) -> None:
    """The activation of the float32 sums of gate and up, one rounding."""
    x = normal(9, 256)
    codes, scales = ops.quantize_weight(normal(512, 256, seed=5), WeightScheme.INT4, group=64)
    weight = ops.pack_panels(codes) if form == "panels" else codes
    both = ops.linear_w4a16(x, weight, scales, group=64, out=torch.empty(9, 512))
    want = ops.act_and_mul(both, act)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((9, 256), torch.nan, dtype=dtype)
        ops.linear_w4a16(x, weight, scales, group=64, act=act, out=out)
        assert torch.equal(out, want.to(dtype))


class Bad(NamedTuple):
    """A call with tiles of [32, 256] that no device takes."""

    message: str
    x: torch.Tensor = torch.zeros(2, 256, dtype=torch.bfloat16)
    rows: int = 32
    scale_dtype: torch.dtype = torch.bfloat16
    group: int = 64
    has_zeros: bool = False
    out_dtype: torch.dtype = torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "bad",
    [
        Bad("x: expected dtype bfloat16, got float16", x=torch.zeros(2, 256).half()),
        Bad("weight: expected tiles of a multiple of 16 rows and 128 columns, got 24", rows=24),
        Bad("group: expected 32, 64 or 128 with tiles, got 16", group=16),
        Bad("scales: expected dtype bfloat16 or float32, got", scale_dtype=torch.float16),
        Bad("zeros: expected zero points of tiles beside .*, got none", scale_dtype=torch.float32),
        Bad("zeros: expected zero points of tiles beside .*, got a tensor", has_zeros=True),
        Bad(
            "zeros: expected dtype bfloat16, got uint8",
            has_zeros=True,
            scale_dtype=torch.float32,
        ),
        Bad("out: expected dtype bfloat16, got float32", out_dtype=torch.float32),
    ],
    ids=lambda bad: bad.message.partition(",")[0],
)
def test_errors_of_tiles(bad: Bad, device: str) -> None:
    tiles = torch.zeros(bad.rows // 8, 4, 32, 8, dtype=torch.uint8, device=device)
    shape = 256 // bad.group, bad.rows
    zeros = torch.zeros(shape, dtype=torch.uint8, device=device) if bad.has_zeros else None
    scales = torch.ones(shape, dtype=bad.scale_dtype, device=device)
    out = torch.empty(2, bad.rows, dtype=bad.out_dtype, device=device)
    with pytest.raises(RuntimeError, match=bad.message):
        ops.linear_w4a16(bad.x.to(device), tiles, scales, zeros, group=bad.group, out=out)


def test_the_cpu_takes_no_tiles() -> None:
    x, out = torch.zeros(2, 128).bfloat16(), torch.empty(2, 16).bfloat16()
    codes, scales = ops.quantize_weight(normal(16, 128), WeightScheme.INT4, group=64)
    with pytest.raises(RuntimeError, match="weight: expected row-major codes or panels on the CPU"):
        ops.linear_w4a16(x, ops.to_nibble_tiles(codes), scales, group=64, out=out)


@pytest.fixture
def hopper() -> torch.device:
    device = torch.device("cuda")
    if not ops.has_hopper_kernels(device):
        pytest.skip("needs compute capability 9.0 and a build for it")
    return device


def inside(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor inside a larger one of NaN."""
    whole = torch.full((rows + 2, columns + 32), torch.nan, dtype=dtype, device="cuda")
    return whole[1:-1, 16:-16]


def is_untouched(part: torch.Tensor) -> bool:
    """Around it there is nothing but NaN."""
    whole = part._base
    assert whole is not None
    copy = whole.clone()
    copy[1:-1, 16:-16] = torch.nan
    return bool(copy.isnan().all())


def placed(values: torch.Tensor) -> torch.Tensor:
    """On the device, with NaN around."""
    part = inside(values.size(0), values.size(1), values.dtype)
    part.copy_(values)
    return part


@pytest.mark.cuda
@GROUPS
@pytest.mark.parametrize("shape", SHAPES)
def test_product(hopper: torch.device, shape: tuple[int, int], group: int) -> None:
    """Against float64, with NaN around x, the scales and the result, with and without a bias."""
    columns, depth = shape
    codes, scales = ops.quantize_weight(normal(columns, depth), WeightScheme.INT4, group=group)
    tiles = ops.to_nibble_tiles(codes.to(hopper))
    bias = normal(columns).to(hopper)
    # Most scales are above 1/32; a sixty-fourth of all of them is below.
    for factor, biases in ((1, (None, bias)), (2**-6, (None,))):
        its_scales = placed(scales * factor)
        values = values_of(codes, scales * factor, group).to(hopper).double()
        for num_rows in ROWS:
            x = normal(num_rows, depth, seed=4).to(hopper).bfloat16()
            exact = x.double() @ values.T
            terms = x.double().abs() @ values.abs().T
            for added in biases:
                want = exact if added is None else exact + added.double()
                out = inside(num_rows, columns)
                ops.linear_w4a16(placed(x), tiles, its_scales, bias=added, group=group, out=out)
                slack = 2.0**-8 * want.abs() + 2.0**-20 * terms
                assert ((out.double() - want).abs() <= slack).all(), (num_rows, added is None)
                assert is_untouched(out)


@pytest.mark.cuda
@GROUPS
@pytest.mark.parametrize("shape", [(32, 128), (160, 384), (12_320, 640)])
@pytest.mark.parametrize("act", list(ops.Activation))
@pytest.mark.parametrize("factor", [0.1, 0.01])  # scales around 1/32 and below
def test_gated_product(
    hopper: torch.device, act: ops.Activation, shape: tuple[int, int], group: int, factor: float
) -> None:
    columns, depth = shape
    codes, scales = ops.quantize_weight(normal(columns, depth), WeightScheme.INT4, group=group)
    scales *= factor
    values = values_of(codes, scales, group).to(hopper).double()
    tiles, its_scales = ops.to_nibble_tiles(codes.to(hopper)), placed(scales)
    for num_rows in (1, 16, 33, 64, 100, 130):
        x = normal(num_rows, depth, seed=4).to(hopper).bfloat16()
        both = (x.double() @ values.T).float()
        want = ops.act_and_mul(both, act).double()
        out = inside(num_rows, columns // 2)
        ops.linear_w4a16(placed(x), tiles, its_scales, group=group, act=act, out=out)
        slack = 2.0**-7 * want.abs() + 2.0**-14 * (1 + both.abs().max() ** 2)
        assert ((out.double() - want).abs() <= slack).all(), num_rows
        assert is_untouched(out)


def exact_parts(columns: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales that bfloat16 does not hold, of both signs, and all zero points that checkpoints have."""
    generator = torch.Generator().manual_seed(columns + groups)
    scales = torch.randn(groups, columns, generator=generator).half().float() * 0.02
    return scales, torch.randint(0, 17, (groups, columns), generator=generator)


def exact_values(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int
) -> torch.Tensor:
    """What nibbles, scales and zero points say, in bfloat16 on the CPU."""
    zeros, scales = (part.T.repeat_interleave(group, 1) for part in (zeros.float(), scales))
    return ((nibbles_of(codes).float() - zeros) * scales).bfloat16()


@pytest.mark.cuda
@GROUPS
@pytest.mark.parametrize("shape", SHAPES)
def test_product_with_zero_points(hopper: torch.device, shape: tuple[int, int], group: int) -> None:
    columns, depth = shape
    codes = random_codes(columns, depth)
    scales, zeros = exact_parts(columns, depth // group)
    values = exact_values(codes, scales, zeros, group).to(hopper).double()
    tiles = ops.to_nibble_tiles(codes.to(hopper))
    parts = placed(scales), placed(zeros.bfloat16())
    for num_rows in ROWS:
        x = normal(num_rows, depth, seed=4).to(hopper).bfloat16()
        want = x.double() @ values.T
        out = inside(num_rows, columns)
        ops.linear_w4a16(placed(x), tiles, *parts, group=group, out=out)
        slack = 2.0**-8 * want.abs() + 2.0**-20 * (x.double().abs() @ values.abs().T)
        assert ((out.double() - want).abs() <= slack).all(), num_rows
        assert is_untouched(out)
        if columns % 32:
            continue
        both, act = want.float(), ops.Activation.SILU
        gated = inside(num_rows, columns // 2)
        ops.linear_w4a16(placed(x), tiles, *parts, group=group, act=act, out=gated)
        want = ops.act_and_mul(both, act).double()
        slack = 2.0**-7 * want.abs() + 2.0**-14 * (1 + both.abs().max() ** 2)
        assert ((gated.double() - want).abs() <= slack).all(), num_rows
        assert is_untouched(gated)


@pytest.mark.cuda
@GROUPS
def test_weights_with_zero_points_are_rounded_as_they_say(hopper: torch.device, group: int) -> None:
    """Rows of an identity give (nibble - zero) * scale, rounded to float32 and to bfloat16, bit for bit."""
    columns, depth = 208, 128
    codes = random_codes(columns, depth)
    scales, zeros = exact_parts(columns, depth // group)
    tiles = ops.to_nibble_tiles(codes.to(hopper))
    x = torch.eye(depth, dtype=torch.bfloat16, device=hopper)
    out = inside(depth, columns)
    parts = placed(scales), placed(zeros.bfloat16())
    ops.linear_w4a16(x, tiles, *parts, group=group, out=out)
    want = exact_values(codes, scales, zeros, group).T + 0.0
    assert torch.equal((out.cpu() + 0.0).view(torch.int16), want.view(torch.int16))


@pytest.mark.cuda
@GROUPS
@pytest.mark.parametrize(
    ("least", "end"),
    [(0x0800, 0x7C00), (0x0800, 0x3D00), (0x3CF8, 0x3D01), (0x3D00, 0x7C00)],
    ids=["any", "below 1/32", "around 1/32", "from 1/32"],
)
@pytest.mark.parametrize("columns", [208, 4096])
def test_weights_are_rounded_once(
    hopper: torch.device, columns: int, group: int, least: int, end: int
) -> None:
    """Rows of an identity give the weights back: all nibbles with scales of all magnitudes, bit for bit.
    Those below 1/32 become values another way. Tiles of x of every height, low and high ones of W."""
    depth = 128
    codes = random_codes(columns, depth)
    generator = torch.Generator().manual_seed(group)
    bits = torch.randint(least, end, (depth // group, columns), generator=generator)
    sign = 1 - 2 * torch.randint(0, 2, bits.shape, generator=generator)
    scales = ((bits.int() << 16).view(torch.float32) * sign).bfloat16()
    tiles = ops.to_nibble_tiles(codes.to(hopper))
    # Zeros of other columns added to -0 make 0.
    want = values_of(codes, scales, group).T + 0.0
    for rows in (16, 32, 64, 128):
        x = torch.eye(depth, dtype=torch.bfloat16, device=hopper)[-rows:]
        out = inside(rows, columns)
        ops.linear_w4a16(x, tiles, placed(scales), group=group, out=out)
        assert torch.equal((out.cpu() + 0.0).view(torch.int16), want[-rows:].view(torch.int16))


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(256, 512), (4096, 1536), (24_576, 256)])
@pytest.mark.parametrize("factor", [1, 2**-6])
def test_a_row_does_not_depend_on_the_others(
    hopper: torch.device, shape: tuple[int, int], factor: float
) -> None:
    """Nor, up to 128 or where it is asked for, on how many there are. Twenty times the same bits."""
    columns, depth = shape
    x = normal(300, depth).to(hopper).bfloat16()
    weight = normal(columns, depth, seed=1).to(hopper)
    codes, scales = ops.quantize_weight(weight, WeightScheme.INT4, group=128)
    scales *= factor
    tiles = ops.to_nibble_tiles(codes)

    def product(rows: torch.Tensor, act: ops.Activation | None = None) -> torch.Tensor:
        width = columns if act is None else columns // 2
        out = torch.full((rows.shape[0], width), torch.nan, dtype=x.dtype, device=hopper)
        return ops.linear_w4a16(rows, tiles, scales, group=128, act=act, out=out)

    for act in (None, ops.Activation.SILU):
        with ops.batch_invariant():
            whole = product(x, act)
            for rows in ROWS:
                assert torch.equal(product(x[:rows], act), whole[:rows]), rows
        for rows in filter(lambda rows: rows <= 128, ROWS):
            assert torch.equal(product(x[:rows], act), whole[:rows]), rows
            assert torch.equal(product(x[-rows:], act), whole[-rows:]), rows
        whole = product(x, act)
        for _ in range(20):
            assert torch.equal(product(x, act), whole)
        turned = product(x.flip(0), act)
        assert torch.equal(turned.flip(0), whole)


@pytest.mark.cuda
def test_a_weight_may_be_told_to_be_batch_invariant(hopper: torch.device) -> None:
    """Without one around the call, in whose order of sums 300 rows would have larger tiles of it."""
    columns, depth = 4096, 1536
    held = QuantizedWeight([Shape(columns, 128)], depth, WeightScheme.INT4, hopper, torch.bfloat16)
    held.write(0, normal(columns, depth).to(hopper))
    held.is_batch_invariant = True
    x = normal(300, depth, seed=1).to(hopper).bfloat16()
    whole = held.product(x, None, None)
    gated = torch.empty(300, columns // 2, dtype=x.dtype, device=hopper)
    assert held.gated_product(x, ops.Activation.SILU, gated)
    for rows in (1, 32, 100, 129, 256):
        assert torch.equal(held.product(x[:rows], None, None), whole[:rows])
        part = torch.empty_like(gated[:rows])
        assert held.gated_product(x[:rows], ops.Activation.SILU, part)
        assert torch.equal(part, gated[:rows])


@pytest.mark.cuda
def test_products_of_two_streams_and_of_a_captured_graph(hopper: torch.device) -> None:
    """With overlapping launches and weights read ahead, as an engine has them."""
    codes, scales = ops.quantize_weight(normal(1024, 1024).to(hopper), WeightScheme.INT4, group=128)
    tiles = ops.to_nibble_tiles(codes)
    x = normal(32, 1024).to(hopper).bfloat16()

    def chain(rows: torch.Tensor) -> torch.Tensor:
        with ops.settled_weights():
            for _ in range(6):
                out = torch.empty_like(rows)
                ops.linear_w4a16(rows, tiles, scales, group=128, out=out)
                rows = out * 0.03125
        return rows

    want = chain(x)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(10):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(chain(x))
        torch.cuda.synchronize()
        assert all(torch.equal(one, want) for one in found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = chain(x)
    for _ in range(20):
        again.fill_(torch.nan)
        graph.replay()
        assert torch.equal(again, want)


@pytest.mark.cuda
def test_what_a_device_does_not_take(hopper: torch.device) -> None:
    codes, scales = ops.quantize_weight(normal(32, 128).to(hopper), WeightScheme.INT4, group=64)
    x, out = normal(2, 132).to(hopper).bfloat16(), torch.empty(2, 32, device=hopper).bfloat16()
    with pytest.raises(RuntimeError, match="act: expected none beside row-major codes on cuda"):
        ops.linear_w4a16(
            x[:, :128], codes, scales, group=64, act=ops.Activation.SILU, out=out[:, :16]
        )
    tiles = ops.to_nibble_tiles(codes)
    with pytest.raises(RuntimeError, match="x: expected rows that begin at multiples of 16 bytes"):
        ops.linear_w4a16(x[:, 4:], tiles, scales, group=64, out=out)


@pytest.mark.cuda
def test_weights_of_layers_stay_by_row_without_hopper_kernels(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def codes() -> torch.Tensor:
        weight = QuantizedWeight([Shape(96, 64)], 256, WeightScheme.INT4, hopper, torch.bfloat16)
        weight.write(0, normal(96, 256).bfloat16())
        weight.packed()
        return weight.parts[0].codes

    assert codes().dim() == 4
    monkeypatch.setenv("DIFFULEX_FORCE_SM80", "1")
    ops.has_hopper_kernels.cache_clear()
    try:
        assert codes().dim() == 2
    finally:
        monkeypatch.delenv("DIFFULEX_FORCE_SM80")
        ops.has_hopper_kernels.cache_clear()


@pytest.mark.cuda
def test_weights_of_layers_are_in_tiles_where_there_is_a_kernel(hopper: torch.device) -> None:
    """New values take the memory of those that a captured graph reads."""
    values, x = normal(96, 256).bfloat16(), normal(5, 256, seed=1).to(hopper).bfloat16()
    shapes = [Shape(48, 64), Shape(48, 64)]

    def product(weight: QuantizedWeight) -> torch.Tensor:
        return weight.product(x, None, None)

    tiled = QuantizedWeight(shapes, 256, WeightScheme.INT4, hopper, torch.bfloat16)
    plain = QuantizedWeight(shapes, 256, WeightScheme.INT4, hopper, torch.float16)
    for weight in (tiled, plain):
        weight.write(0, values)
        weight.packed()
    (part,), (by_row,) = tiled.parts, plain.parts
    assert part.codes.dim() == 4
    assert by_row.codes.dim() == 2
    place = part.codes.data_ptr()
    product(tiled)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product(tiled)
    assert torch.equal(part.row_major(), by_row.codes)
    assert tiled.nbytes == plain.nbytes
    torch.testing.assert_close(product(tiled), product(plain), rtol=2.0**-7, atol=1e-3)
    out = torch.full((5, 48), torch.nan, dtype=x.dtype, device=hopper)
    assert tiled.gated_product(x, ops.Activation.SILU, out)
    assert not plain.gated_product(x, ops.Activation.SILU, out)
    want = ops.act_and_mul(product(plain).float(), ops.Activation.SILU)
    torch.testing.assert_close(out.float(), want, rtol=2.0**-5, atol=2e-2)
    tiled.write(16, -values[16:40])
    plain.write(16, -values[16:40])
    torch.testing.assert_close(product(tiled), product(plain), rtol=2.0**-7, atol=1e-3)
    assert part.codes.data_ptr() == place
    graph.replay()
    assert torch.equal(captured, product(tiled))
