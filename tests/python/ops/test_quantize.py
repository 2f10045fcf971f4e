# SPDX-License-Identifier: Apache-2.0
"""Quantisers and products of weights in low precision, against their definitions in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffulex import ops
from diffulex.ops import WeightScheme
from reference import quantize as reference

CODES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def raw(codes: torch.Tensor) -> np.ndarray:
    return codes.numpy() if codes.dtype == torch.int8 else codes.view(torch.uint8).numpy()


@CODES
def test_codec_of_random_bit_patterns(dtype: torch.dtype) -> None:
    """An infinite value makes the scale of its group 1, so that the codes are those of the values."""
    count = 1 << 20
    bits = np.random.default_rng(3).integers(0, 1 << 32, count, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32).copy()).view(-1, 64)
    x[:, 0] = torch.inf
    result = ops.quantize_rows(x, dtype, group=64)
    assert (result.scale[0, : x.shape[0]] == 1).all()
    with np.errstate(invalid="ignore"):
        code = reference.int8_codes if dtype == torch.int8 else reference.e4m3_codes
        assert np.array_equal(raw(result.codes), code(x.numpy()))


@pytest.mark.slow
@pytest.mark.timeout(900)  # fifteen seconds of a core, which others may use
@CODES
def test_codec_of_all_bit_patterns(dtype: torch.dtype) -> None:
    """Codes rise with the magnitude: where each begins follows from the values halfway to the next."""
    is_int8 = dtype == torch.int8
    values = np.arange(128.0) if is_int8 else reference.E4M3
    halfway = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    # Halfway is the even code's. The last range is that of NaN.
    begins = halfway.view(np.uint32).astype(np.int64) + (np.arange(halfway.size) % 2 == 0)
    begins = np.append(begins, 0x7F800001)
    codes = np.append(np.arange(len(values)), 0 if is_int8 else 0x7F).astype(np.uint8)
    size = 1 << 12
    x = torch.full((size, size + 1), torch.inf)  # the scale of every row is 1
    for first in range(0, 1 << 31, size * size):
        last = first + size * size
        bounds = np.concatenate(([first], begins.clip(first, last), [last]))
        magnitude = (
            np.repeat(codes, np.diff(bounds))
            .reshape(size, size)
            .view(np.int8 if is_int8 else np.uint8)
        )
        bits = np.arange(first, last, dtype=np.uint32).reshape(size, size)
        for sign in (0, 1 << 31):
            x[:, 1:] = torch.from_numpy((bits | np.uint32(sign)).view(np.float32))
            found = raw(ops.quantize_rows(x, dtype, group=size + 1).codes)[:, 1:]
            want = magnitude
            if sign:
                want = (
                    -magnitude if is_int8 else np.where(magnitude == 0x7F, 0x7F, magnitude | 0x80)
                )
            assert np.array_equal(found, want), f"from {first | sign:#x} on"


@CODES
@pytest.mark.parametrize("depth", [1, 64, 192, 704])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_rows(dtype: torch.dtype, depth: int, source: torch.dtype) -> None:
    x = normal(9, depth).to(source)
    x[1] = 0
    x[2, ::2] = torch.nan
    x[3, 0] = torch.inf
    x[4] *= 1e-6
    if source != torch.float16:
        x[5] = 1e-39
    result = ops.quantize_rows(x, dtype)
    codes, scale = reference.quantize_rows(x.float().numpy(), dtype == torch.int8, 128)
    assert result.scale.shape == (-(-depth // 128), 12)
    assert np.array_equal(raw(result.codes), codes)
    assert np.array_equal(result.scale[:, :9].numpy(), scale)


@pytest.mark.parametrize("scheme", [WeightScheme.FP8, WeightScheme.INT8])
def test_channels_of_a_weight_have_the_codes_of_rows(scheme: WeightScheme) -> None:
    w = normal(70, 300)
    codes, scale = ops.quantize_weight(w, scheme)
    want, scales = reference.quantize_rows(w.numpy(), scheme == WeightScheme.INT8, 300)
    assert np.array_equal(raw(codes), want)
    assert np.array_equal(scale.numpy(), scales[0])


@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (128, 128), (200, 300), (257, 64)])
def test_blocks_of_a_weight(rows: int, depth: int) -> None:
    w = normal(rows, depth)
    codes, scale = ops.quantize_weight(w, WeightScheme.FP8_BLOCK)
    for row, column in np.ndindex(*scale.shape):
        block = np.s_[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
        want, one = reference.quantize_group(w.numpy()[block], False)
        assert np.array_equal(raw(codes)[block], want)
        assert scale[row, column].item() == one


@pytest.mark.parametrize(("depth", "group"), [(64, 32), (256, 128), (48, 0), (33, 0)])
def test_nibbles_of_a_weight(depth: int, group: int) -> None:
    w = normal(11, depth)
    w[3] = 0
    w[4] = 1e-44
    packed, scale = ops.quantize_weight(w, WeightScheme.INT4, group=group)
    nibbles = np.stack([packed.numpy() & 15, packed.numpy() >> 4], -1).reshape(11, -1)
    width = group or depth
    for row, index in np.ndindex(11, depth // width):
        part = slice(index * width, (index + 1) * width)
        q, one = reference.int4_group(w.numpy()[row, part])
        assert np.array_equal(nibbles[row, part], q + 8)
        assert scale[index, row].float().item() == one


def exact_product(rows: ops.QuantizedRows, codes: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    """In float64, with scales of channels [N] or of blocks."""
    num_rows, depth = rows.codes.shape
    x = reference.values_of(rows.codes)
    w = reference.values_of(codes)
    x *= np.repeat(rows.scale[:, :num_rows].numpy().T.astype(np.float64), 128, 1)[:, :depth]
    if scale.dim() == 1:
        w *= scale.numpy().astype(np.float64)[:, None]
    else:
        wide = np.repeat(np.repeat(scale.numpy().astype(np.float64), 128, 0), 128, 1)
        w *= wide[: w.shape[0], :depth]
    result: np.ndarray = x @ w.T
    return result


@pytest.mark.parametrize("shape", [(1, 4, 1), (7, 64, 33), (40, 704, 96), (200, 261, 70)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_int8_product(shape: tuple[int, int, int], has_bias: bool) -> None:
    """Exact sums, one float32 rounding a block: the same bits by panels and by row-major codes."""
    num_rows, depth, columns = shape
    x = ops.quantize_rows(normal(num_rows, depth), torch.int8)
    codes, scale = ops.quantize_weight(normal(columns, depth, seed=5), WeightScheme.INT8)
    codes[0] = -128  # occurs in stored weights
    bias = normal(columns) if has_bias else None
    out = torch.full((num_rows, columns), torch.nan)
    ops.linear_scaled(x, ops.pack_panels(codes), scale, bias, out=out)
    row_major = torch.full_like(out, torch.nan)
    ops.linear_scaled(x, codes, scale, bias, out=row_major)
    assert torch.equal(out, row_major)
    want = exact_product(x, codes, scale) + (0 if bias is None else bias.numpy())
    magnitude = np.abs(want) + np.abs(out.numpy()).max() / 8
    assert (np.abs(out.numpy() - want) <= 2.0**-22 * (2 + depth // 128) * magnitude).all()
    half = torch.empty(num_rows, columns, dtype=torch.bfloat16)
    ops.linear_scaled(x, ops.pack_panels(codes), scale, bias, out=half)
    assert torch.equal(half, out.bfloat16())


@pytest.mark.parametrize("scheme", [WeightScheme.FP8, WeightScheme.FP8_BLOCK])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 64, 33), (33, 704, 300), (200, 193, 70)])
def test_fp8_product(scheme: WeightScheme, shape: tuple[int, int, int]) -> None:
    num_rows, depth, columns = shape
    x = ops.quantize_rows(normal(num_rows, depth), torch.float8_e4m3fn)
    codes, scale = ops.quantize_weight(normal(columns, depth, seed=5), scheme)
    scale *= 2.0 ** torch.randint(-30, 31, scale.shape, generator=torch.Generator().manual_seed(1))
    bias = normal(columns)
    out = torch.full((num_rows, columns), torch.nan)
    ops.linear_scaled(x, codes, scale, bias, out=out)
    panels = torch.full_like(out, torch.nan)
    ops.linear_scaled(x, ops.pack_panels(codes), scale, bias, out=panels)
    assert torch.equal(panels, out)
    want = exact_product(x, codes, scale) + bias.numpy()
    terms = np.abs(reference.values_of(x.codes)).max() * np.abs(reference.values_of(codes)).max()
    row_scale = x.scale[:, :num_rows].max().item()  # what follows is padding, as it was allocated
    slack = 2.0**-24 * depth * terms * row_scale * np.ones(columns)
    slack *= (scale if scale.dim() == 1 else scale.amax(1).repeat_interleave(128)[:columns]).numpy()
    assert (np.abs(out.numpy() - want) <= slack + 2.0**-22 * np.abs(want)).all()


@pytest.mark.parametrize("form", ["rows", "panels"])
def test_codes_of_nan_reach_their_columns_alone(form: str) -> None:
    """So do scales of int4 that are NaN, whatever their bits, and infinite ones."""
    pack = ops.pack_panels if form == "panels" else torch.clone
    x = ops.quantize_rows(normal(3, 300), torch.float8_e4m3fn)
    codes, scale = ops.quantize_weight(normal(40, 300), WeightScheme.FP8)
    want = ops.linear_scaled(x, pack(codes), scale, out=torch.empty(3, 40))
    codes.view(torch.uint8)[[7, 39], [299, 3]] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    found = ops.linear_scaled(x, pack(codes), scale, out=torch.empty(3, 40))
    is_nan = torch.zeros(40, dtype=torch.bool)
    is_nan[[7, 39]] = True
    assert found[:, is_nan].isnan().all()
    assert torch.equal(found[:, ~is_nan], want[:, ~is_nan])

    rows = normal(3, 64)
    nibbles, scales = ops.quantize_weight(normal(40, 64), WeightScheme.INT4, group=32)
    scales = scales.float()
    want = ops.linear_w4a16(rows, pack(nibbles), scales, group=32, out=torch.empty(3, 40))
    scales.view(torch.int32)[1, [7, 39]] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32)
    scales[0, 8] = torch.inf
    found = ops.linear_w4a16(rows, pack(nibbles), scales, group=32, out=torch.empty(3, 40))
    is_nan[8] = True
    assert not found[:, is_nan].isfinite().any()
    assert torch.equal(found[:, ~is_nan], want[:, ~is_nan])


def test_small_products_beside_a_large_one_are_kept() -> None:
    """A product of 2^14 and 127 of 1 in every block: an accumulator of 14 bits loses them."""
    depth = 12_288
    x = torch.ones(3, depth)
    x[:, ::128] = 128
    rows = ops.QuantizedRows(x.to(torch.float8_e4m3fn), torch.ones(depth // 128, 4))
    codes = x[:2].to(torch.float8_e4m3fn)
    out = torch.empty(3, 2)
    ops.linear_scaled(rows, codes, torch.ones(2), out=out)
    want = (16384 + 127) * (depth // 128)
    assert (out - want).abs().max() <= 4e-3 * want / 128


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("depth", "group"), [(64, 32), (512, 128), (48, 48), (33, 33), (1029, 343), (90, 3)]
)
def test_int4_product(depth: int, group: int, has_zeros: bool) -> None:
    w, x = normal(70, depth), normal(20, depth, seed=4)
    packed, scales = ops.quantize_weight(w, WeightScheme.INT4, group=group)
    generator = torch.Generator().manual_seed(2)
    zeros = torch.randint(0, 17, scales.shape, generator=generator).to(torch.uint8)
    bias = normal(70)
    out = torch.full((20, 70), torch.nan)
    ops.linear_w4a16(x, packed, scales, zeros if has_zeros else None, bias, group=group, out=out)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).view(70, -1)[:, :depth].float()
    wide = zeros.float() if has_zeros else torch.full_like(zeros, 8).float()
    shift = wide.T.repeat_interleave(group, 1)
    values = ((nibbles - shift) * scales.float().T.repeat_interleave(group, 1)).bfloat16()
    want = x.double() @ values.double().T + bias.double()
    slack = 1e-7 * depth * float(x.abs().max() * values.float().abs().max())
    assert (out - want).abs().max() <= slack
    panels = ops.pack_panels(packed)
    for weight, stored in ((packed, scales.float()), (panels, scales), (panels, scales.float())):
        other = torch.full_like(out, torch.nan)
        shifts = zeros if has_zeros else None
        ops.linear_w4a16(x, weight, stored, shifts, bias, group=group, out=other)
        assert torch.equal(other, out)


@CODES
def test_a_row_does_not_depend_on_the_batch_nor_on_threads(dtype: torch.dtype) -> None:
    x = normal(230, 300)
    scheme = WeightScheme.INT8 if dtype == torch.int8 else WeightScheme.FP8
    codes, scale = ops.quantize_weight(normal(200, 300, seed=1), scheme)
    weight = ops.pack_panels(codes)

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = torch.empty(rows.shape[0], 200)
        return ops.linear_scaled(ops.quantize_rows(rows, dtype), weight, scale, out=out)

    alone = torch.cat([product(row[None]) for row in x])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for rows in (*range(1, 14), 191, 192, 193, 230):
                assert torch.equal(product(x[:rows]), alone[:rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scheme", [WeightScheme.FP8, WeightScheme.FP8_BLOCK, WeightScheme.INT8])
def test_powers_of_two_of_scales_are_those_of_products(scheme: WeightScheme) -> None:
    """From 2^-60 to 2^60 nothing is rounded otherwise."""
    is_int8 = scheme == WeightScheme.INT8
    x = ops.quantize_rows(normal(9, 300), torch.int8 if is_int8 else torch.float8_e4m3fn)
    codes, scale = ops.quantize_weight(normal(200, 300, seed=5), scheme)
    weight = ops.pack_panels(codes)
    generator = torch.Generator().manual_seed(1)
    of_rows = 2.0 ** torch.randint(-30, 31, (x.scale.size(1),), generator=generator)
    of_weight = 2.0 ** torch.randint(-30, 31, (scale.size(0),), generator=generator)
    wide = of_weight if scale.dim() == 1 else of_weight.repeat_interleave(128)[:200]
    plain, scaled = torch.empty(9, 200), torch.empty(9, 200)
    ops.linear_scaled(x, weight, scale, out=plain)
    moved = of_weight if scale.dim() == 1 else of_weight[:, None]
    ops.linear_scaled(x._replace(scale=x.scale * of_rows), weight, scale * moved, out=scaled)
    assert torch.equal(scaled, plain * of_rows[:9, None] * wide)
    assert plain.count_nonzero() == plain.numel()


@pytest.mark.parametrize("num_rows", [2047, 2048, 2049])
@pytest.mark.parametrize("scheme", list(WeightScheme))
def test_many_rows_are_those_of_few(scheme: WeightScheme, num_rows: int) -> None:
    x = normal(num_rows, 64)
    codes, scale = ops.quantize_weight(normal(33, 64, seed=5), scheme, group=32)
    weight = ops.pack_panels(codes)
    dtype = torch.int8 if scheme == WeightScheme.INT8 else torch.float8_e4m3fn

    def product(rows: torch.Tensor) -> torch.Tensor:
        out = torch.full((rows.size(0), 33), torch.nan)
        if scheme == WeightScheme.INT4:
            return ops.linear_w4a16(rows, weight, scale, group=32, out=out)
        return ops.linear_scaled(ops.quantize_rows(rows, dtype), weight, scale, out=out)

    assert torch.equal(product(x), torch.cat([product(part) for part in x.split(100)]))


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (32, 4), (33, 7), (100, 130)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_panels_hold_the_codes(rows: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 256, (rows, width), generator=generator).to(torch.uint8).view(dtype)
    panels = ops.pack_panels(codes)
    step, padding = (4, 128) if dtype == torch.int8 else (1, 0)
    assert panels.shape == (-(-rows // 32), -(-width // step), 32, step)
    found = ops.unpack_panels(panels, rows, width, dtype)
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8))
    assert int((panels != padding).sum()) == int((codes.view(torch.uint8) != 0).sum())


@pytest.mark.parametrize("scheme", [WeightScheme.FP8, WeightScheme.FP8_BLOCK, WeightScheme.INT8])
@pytest.mark.parametrize("act", list(ops.Activation))
def test_gated_product(scheme: WeightScheme, act: ops.Activation) -> None:
    """The activation of the float32 sums of gate and up, one rounding."""
    is_int8 = scheme == WeightScheme.INT8
    x = ops.quantize_rows(normal(9, 200), torch.int8 if is_int8 else torch.float8_e4m3fn)
    codes, scale = ops.quantize_weight(normal(512, 200, seed=5), scheme)
    weight = ops.pack_panels(codes)
    both = ops.linear_scaled(x, weight, scale, out=torch.empty(9, 512))
    out = torch.full((9, 256), torch.nan)
    ops.linear_scaled(x, weight, scale, act=act, out=out)
    assert torch.equal(out, ops.act_and_mul(both, act))
    half = torch.full((9, 256), torch.nan, dtype=torch.bfloat16)
    ops.linear_scaled(x, weight, scale, act=act, out=half)
    assert torch.equal(half, out.bfloat16())


def test_gate_and_up_are_whole_blocks() -> None:
    x = ops.quantize_rows(normal(2, 64), torch.float8_e4m3fn)
    codes, scale = ops.quantize_weight(normal(320, 64), WeightScheme.FP8_BLOCK)
    with pytest.raises(RuntimeError, match=r"weight: expected rows of gate and of up in whole"):
        ops.linear_scaled(x, codes, scale, act=ops.Activation.SILU, out=torch.empty(2, 160))
