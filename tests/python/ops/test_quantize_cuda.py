# SPDX-License-Identifier: Apache-2.0
"""Low precision on CUDA: the bits of the CPU where products are exact, bounds where they are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from cuda_streams import check_streams
from diffulex import ops
from diffulex.ops import WeightScheme
from reference import quantize as reference

pytestmark = pytest.mark.cuda

CODES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
FP8 = pytest.mark.parametrize("scheme", [WeightScheme.FP8, WeightScheme.FP8_BLOCK])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.uint8)


def moved(rows: ops.QuantizedRows) -> ops.QuantizedRows:
    """On the device, what pads the scales poisoned."""
    scale = rows.scale.cuda()
    scale[:, rows.codes.size(0) :] = torch.nan
    return ops.QuantizedRows(rows.codes.cuda(), scale)


def poisoned(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A result inside a larger tensor of NaN: `untouched` asks for what lies around it."""
    whole = torch.full((rows + 2, columns + 32), torch.nan, dtype=dtype, device="cuda")
    return whole[1:-1, 16:-16]


def untouched(out: torch.Tensor) -> bool:
    whole = out._base
    assert whole is not None
    copy = whole.clone()
    copy[1:-1, 16:-16] = torch.nan
    return bool(copy.isnan().all())


@CODES
def test_random_bit_patterns_have_the_codes_of_the_cpu(dtype: torch.dtype) -> None:
    bits = np.random.default_rng(3).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32).copy()).view(-1, 128)
    x[: x.shape[0] // 2, 0] = torch.inf
    here, there = ops.quantize_rows(x, dtype), ops.quantize_rows(x.cuda(), dtype)
    assert torch.equal(raw(there.codes), raw(here.codes))
    assert torch.equal(there.scale.cpu(), here.scale)


@CODES
@pytest.mark.parametrize("group", [128, 48])
@pytest.mark.parametrize("depth", [1, 64, 192, 704])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_rows(dtype: torch.dtype, group: int, depth: int, source: torch.dtype) -> None:
    x = normal(9, depth).to(source)
    x[1] = 0
    x[2, ::2] = torch.nan
    x[3, 0] = torch.inf
    x[4] *= 1e-6
    if source != torch.float16:
        x[5] = 1e-39
    here = ops.quantize_rows(x, dtype, group=group)
    wide = torch.zeros(9, depth + 3, dtype=source, device="cuda")
    wide[:, :depth] = x.cuda()
    for rows in (x.cuda(), wide[:, :depth]):
        there = ops.quantize_rows(rows, dtype, group=group)
        assert torch.equal(raw(there.codes), raw(here.codes))
        assert torch.equal(there.scale[:, :9].cpu(), here.scale[:, :9])


@pytest.mark.parametrize("scheme", list(WeightScheme))
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "depth", "group"), [(1, 1, 0), (70, 300, 100), (257, 256, 128), (11, 33, 11)]
)
def test_quantize_weight(
    scheme: WeightScheme, source: torch.dtype, rows: int, depth: int, group: int
) -> None:
    w = normal(rows, depth).to(source)
    if rows > 5:
        w[3], w[4], w[5, 0] = 0, 1e-39, torch.inf
    size = group if scheme == WeightScheme.INT4 else 0
    codes, scale = ops.quantize_weight(w, scheme, group=size)
    there, its_scale = ops.quantize_weight(w.cuda(), scheme, group=size)
    assert torch.equal(raw(there), raw(codes))
    assert torch.equal(its_scale.cpu(), scale)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        *[(1, 4, 1), (7, 64, 33), (16, 128, 64), (40, 704, 96), (200, 260, 70), (65, 2048, 192)],
        *[(2047, 192, 48), (2048, 192, 48), (2049, 192, 48)],
        # More steps than lie in shared memory, with tiles of all heights; more CTAs than do that.
        *[(16, 2048, 64), (17, 1280, 80), (32, 2048, 96), (9, 384, 17024), (300, 384, 4096)],
    ],
)
def test_int8_products_have_the_bits_of_the_cpu(
    shape: tuple[int, int, int], out_dtype: torch.dtype
) -> None:
    num_rows, depth, columns = shape
    x = ops.quantize_rows(normal(num_rows, depth), torch.int8)
    codes, scale = ops.quantize_weight(normal(columns, depth, seed=5), WeightScheme.INT8)
    codes[0] = -128
    for bias in (None, normal(columns)):
        want = torch.empty(num_rows, columns, dtype=out_dtype)
        ops.linear_scaled(x, codes, scale, bias, out=want)
        out = poisoned(num_rows, columns, out_dtype)
        device_bias = None if bias is None else bias.cuda()
        ops.linear_scaled(moved(x), codes.cuda(), scale.cuda(), device_bias, out=out)
        assert torch.equal(out.cpu(), want)
        assert untouched(out)


def exact_product(
    rows: ops.QuantizedRows, codes: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, and the sum of the magnitudes of its terms."""
    num_rows, depth = rows.codes.shape
    x = torch.from_numpy(reference.values_of(rows.codes))
    w = torch.from_numpy(reference.values_of(codes))
    x *= rows.scale[:, :num_rows].double().T.repeat_interleave(128, 1)[:, :depth]
    if scale.dim() == 1:
        w *= scale.double()[:, None]
    else:
        wide = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        w *= wide[: w.shape[0], :depth]
    return x @ w.T, x.abs() @ w.abs().T


@FP8
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        *[(1, 16, 16), (7, 64, 48), (7, 60, 33), (16, 384, 64), (33, 704, 304), (64, 1152, 112)],
        *[(65, 4096, 512), (128, 640, 3072), (129, 896, 208), (300, 1536, 1040)],
        *[(2047, 256, 336), (2048, 256, 336), (2049, 256, 336)],
    ],
)
def test_fp8_products(
    scheme: WeightScheme, out_dtype: torch.dtype, has_bias: bool, shape: tuple[int, int, int]
) -> None:
    num_rows, depth, columns = shape
    x = ops.quantize_rows(normal(num_rows, depth), torch.float8_e4m3fn)
    codes, scale = ops.quantize_weight(normal(columns, depth, seed=5), scheme)
    scale *= 2.0 ** torch.randint(-30, 31, scale.shape, generator=torch.Generator().manual_seed(1))
    bias = normal(columns) if has_bias else None
    out = poisoned(num_rows, columns, out_dtype)
    ops.linear_scaled(
        moved(x), codes.cuda(), scale.cuda(), None if bias is None else bias.cuda(), out=out
    )
    want, terms = exact_product(x, codes, scale)
    if bias is not None:
        want += bias.double()
    # The unit of Hopper keeps about 14 bits of a sum of 128 products.
    slack = 2.0**-12 * terms + (2.0**-8 if out_dtype == torch.bfloat16 else 2.0**-20) * want.abs()
    assert ((out.cpu().double() - want).abs() <= slack).all()
    relative = (out.cpu().double() - want).norm() / want.norm()
    assert relative <= (4e-3 if out_dtype == torch.bfloat16 else 2e-3)
    assert untouched(out)


@FP8
@pytest.mark.parametrize("num_rows", [1, 16, 64, 150])
def test_sums_of_a_long_depth(scheme: WeightScheme, num_rows: int) -> None:
    """The error of the sums alone: a bias takes the exact product away before the result is rounded.

    Of bfloat16, whose rounding is 1.7e-3 of a result, that leaves what the products and their sums lose.
    A bias has one value a column, so the rows of a call are one row.
    """
    depth, columns = 12_288, 512
    rows = ops.quantize_rows(normal(8, depth), torch.float8_e4m3fn)
    codes, scale = ops.quantize_weight(normal(columns, depth, seed=5), scheme)
    want = exact_product(rows, codes, scale)[0].cuda()
    codes, scale = codes.cuda(), scale.cuda()
    lost = torch.empty_like(want)
    for index, exact in enumerate(want):
        line = rows.codes.view(torch.uint8)[index].expand(num_rows, -1).contiguous().cuda()
        factors = rows.scale[:, index : index + 1].expand(-1, -(-num_rows // 4) * 4)
        x = ops.QuantizedRows(line.view(torch.float8_e4m3fn), factors.contiguous().cuda())
        out = poisoned(num_rows, columns, torch.bfloat16)
        ops.linear_scaled(x, codes, scale, -exact.float(), out=out)
        assert (out == out[:1]).all()
        lost[index] = out[0].double()
    assert lost.norm() <= 2e-3 * want.norm()
    assert lost.any()


def test_small_products_beside_a_large_one_are_kept() -> None:
    """A product of 2^14 and 127 of 1 in every block: long sums of 14 bits lose more than those.

    The unit of Hopper lines all products of an instruction up with the largest, and so loses the 127
    within a block, 7.7e-3 of the result. Sums that are not taken out after each block lose the large ones.
    """
    depth = 12_288
    x = torch.ones(3, depth)
    x[:, ::128] = 128
    rows = ops.QuantizedRows(x.to(torch.float8_e4m3fn).cuda(), torch.ones(depth // 128, 4).cuda())
    codes = torch.ones(16, depth)
    codes[:, ::128] = 128
    want = (16384 + 127) * (depth // 128)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(3, 16, dtype=dtype, device="cuda")
        ops.linear_scaled(
            rows, codes.to(torch.float8_e4m3fn).cuda(), torch.ones(16).cuda(), out=out
        )
        is_exact = dtype == torch.float32
        assert (out.float() - want).abs().max() <= (1e-6 if is_exact else 8e-3) * want


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [WeightScheme.FP8, WeightScheme.FP8_BLOCK, WeightScheme.INT8])
@pytest.mark.parametrize("shape", [(256, 512), (2048, 1024)])
def test_a_row_does_not_depend_on_the_others(
    scheme: WeightScheme, out_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Nor on how many there are: all tiles sum in one order. Twenty times the same bits."""
    columns, depth = shape
    dtype = torch.int8 if scheme == WeightScheme.INT8 else torch.float8_e4m3fn
    x = normal(300, depth).cuda()
    codes, scale = ops.quantize_weight(normal(columns, depth, seed=1).cuda(), scheme)

    def product(rows: torch.Tensor, act: ops.Activation | None = None) -> torch.Tensor:
        width = columns if act is None else columns // 2
        out = torch.full((rows.shape[0], width), torch.nan, dtype=out_dtype, device="cuda")
        return ops.linear_scaled(ops.quantize_rows(rows, dtype), codes, scale, act=act, out=out)

    for act in (None, ops.Activation.SILU):
        alone = torch.cat([product(row[None], act) for row in x])
        for rows in (2, 15, 16, 17, 32, 33, 64, 65, 127, 128, 129, 192, 256, 300):
            assert torch.equal(product(x[:rows], act), alone[:rows])
        for _ in range(20):
            assert torch.equal(product(x, act), alone)


@FP8
@pytest.mark.parametrize(
    "num_rows", [65, 98, 127, 128, 129, 150, 256, 257, 322, 520, 1023, 2047, 2048, 2049]
)
@pytest.mark.parametrize(
    ("depth", "columns"),
    # One share of the depth, two, also where it ends in the middle of a pair of lines and of a tile of W, which has
    # 192 rows of 24,576 up to 128 rows of x, and of others above 256.
    [
        *[(256, 3584), (256, 24576), (336, 512), (1664, 768), (1664, 6144)],
        *[(2816, 1728), (2944, 1792), (4096, 4096)],
    ],
)
def test_many_rows_have_the_bits_of_few(
    scheme: WeightScheme, num_rows: int, depth: int, columns: int
) -> None:
    x = ops.quantize_rows(normal(num_rows, depth).cuda(), torch.float8_e4m3fn)
    codes, scale = ops.quantize_weight(normal(columns, depth, seed=1).cuda(), scheme)
    bias = normal(columns).cuda()
    acts = list(ops.Activation) if scheme == WeightScheme.FP8 or columns % 256 == 0 else []
    for act, offset in ((None, None), (None, bias), *((act, None) for act in acts)):
        width = columns if act is None else columns // 2
        out = poisoned(num_rows, width, torch.bfloat16)
        ops.linear_scaled(moved(x), codes, scale, offset, act=act, out=out)
        for first in range(0, num_rows, 64):
            rows = slice(first, min(first + 64, num_rows))
            few = ops.QuantizedRows(x.codes[rows], x.scale[:, first : first + 64])
            want = torch.empty(rows.stop - first, width, dtype=torch.bfloat16, device="cuda")
            ops.linear_scaled(few, codes, scale, offset, act=act, out=want)
            assert torch.equal(out[rows], want)
        assert untouched(out)


def test_many_rows_where_stores_of_eight_bytes_do_not_fit() -> None:
    x = ops.quantize_rows(normal(200, 256).cuda(), torch.float8_e4m3fn)
    codes, scale = ops.quantize_weight(normal(208, 256, seed=1).cuda(), WeightScheme.FP8)
    want = ops.linear_scaled(x, codes, scale, out=torch.empty(200, 208, device="cuda").bfloat16())
    for start, pitch in ((2, 212), (0, 210)):
        whole = torch.full((200, pitch), torch.nan, dtype=torch.bfloat16, device="cuda")
        out = whole[:, start : start + 208]
        ops.linear_scaled(x, codes, scale, out=out)
        assert torch.equal(out, want)
        out.fill_(torch.nan)
        assert whole.isnan().all()


@pytest.mark.parametrize("scheme", [WeightScheme.FP8, WeightScheme.FP8_BLOCK, WeightScheme.INT8])
@pytest.mark.parametrize("act", list(ops.Activation))
@pytest.mark.parametrize("num_rows", [1, 32, 100, 260])
def test_gated_products(scheme: WeightScheme, act: ops.Activation, num_rows: int) -> None:
    dtype = torch.int8 if scheme == WeightScheme.INT8 else torch.float8_e4m3fn
    x = ops.quantize_rows(normal(num_rows, 640).cuda(), dtype)
    codes, scale = ops.quantize_weight(normal(768, 640, seed=5).cuda(), scheme)
    both = ops.linear_scaled(x, codes, scale, out=torch.empty(num_rows, 768, device="cuda"))
    want = ops.act_and_mul(both, act)
    for out_dtype in (torch.float32, torch.bfloat16):
        out = poisoned(num_rows, 384, out_dtype)
        ops.linear_scaled(x, codes, scale, act=act, out=out)
        assert untouched(out)
        relative = (out.double() - want.double()).norm() / want.double().norm()
        assert relative <= (4e-3 if out_dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 20, 100])
@pytest.mark.parametrize(("depth", "group"), [(64, 32), (512, 128), (48, 48), (33, 33), (96, 96)])
def test_int4_products(
    has_zeros: bool, source: torch.dtype, num_rows: int, depth: int, group: int
) -> None:
    w, x = normal(70, depth), normal(num_rows, depth, seed=4).to(source)
    packed, scales = ops.quantize_weight(w, WeightScheme.INT4, group=group)
    generator = torch.Generator().manual_seed(2)
    zeros = torch.randint(0, 17, scales.shape, generator=generator).to(torch.uint8)
    bias = normal(70)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).view(70, -1)[:, :depth].float()
    shift = zeros.float() if has_zeros else torch.full_like(zeros, 8).float()
    values = nibbles - shift.T.repeat_interleave(group, 1)
    values = (values * scales.float().T.repeat_interleave(group, 1)).bfloat16()
    want = x.double() @ values.double().T + bias.double()
    slack = 1e-6 * depth * float(x.abs().max() * values.float().abs().max())
    for scale in (scales, scales.float()):
        out = poisoned(num_rows, 70, torch.float32)
        its_zeros = zeros.cuda() if has_zeros else None
        ops.linear_w4a16(
            x.cuda(), packed.cuda(), scale.cuda(), its_zeros, bias.cuda(), group=group, out=out
        )
        assert (out.cpu() - want).abs().max() <= slack
        assert untouched(out)


@CODES
def test_products_of_a_captured_graph(dtype: torch.dtype) -> None:
    """Behind their quantiser, with overlapping launches and weights read ahead, as an engine has them."""
    scheme = WeightScheme.INT8 if dtype == torch.int8 else WeightScheme.FP8
    codes, scale = ops.quantize_weight(normal(1024, 1024).cuda(), scheme)
    x = normal(32, 1024).cuda().bfloat16()

    def chain(rows: torch.Tensor) -> torch.Tensor:
        with ops.settled_weights():
            for _ in range(6):
                out = torch.empty_like(rows)
                ops.linear_scaled(ops.quantize_rows(rows, dtype), codes, scale, out=out)
                rows = out * 0.03125
        return rows

    want = chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x)
    for _ in range(20):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, want)


@CODES
@pytest.mark.parametrize("num_rows", [32, 200, 520])
def test_products_of_two_streams(dtype: torch.dtype, num_rows: int) -> None:
    """Few rows and many, of other values in the two."""
    scheme = WeightScheme.INT8 if dtype == torch.int8 else WeightScheme.FP8
    codes, scale = ops.quantize_weight(normal(1024, 1024).cuda(), scheme)

    def chain(rows: torch.Tensor) -> torch.Tensor:
        with ops.settled_weights():
            for _ in range(16):
                out = torch.empty_like(rows)
                ops.linear_scaled(ops.quantize_rows(rows, dtype), codes, scale, out=out)
                rows = out * 0.03125
        return rows

    rows = [normal(num_rows, 1024, seed=seed).cuda().bfloat16() for seed in (0, 7)]
    check_streams([partial(chain, each) for each in rows])


@pytest.mark.parametrize("scheme", list(WeightScheme))
def test_panels_of_the_cpu_are_an_error(scheme: WeightScheme) -> None:
    x, out = normal(2, 64).cuda(), torch.empty(2, 32, device="cuda")
    codes, scale = ops.quantize_weight(normal(32, 64), scheme)
    panels, scale = ops.pack_panels(codes).cuda(), scale.cuda()
    product: Any = partial(ops.linear_w4a16, x, group=64)
    if scheme != WeightScheme.INT4:
        product = partial(ops.linear_scaled, ops.quantize_rows(x, codes.dtype))
    with pytest.raises(RuntimeError, match="weight: expected row-major codes on cuda, got panels"):
        product(panels, scale, out=out)


@pytest.mark.parametrize("scheme", [WeightScheme.FP8, WeightScheme.FP8_BLOCK, WeightScheme.INT8])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 128), (5, 48), (70, 192), (300, 128)])
def test_experts(scheme: WeightScheme, num_rows: int, width: int) -> None:
    """Rows quantised once, the activation of a slot from float32; slots without expert add nothing."""
    num_experts, hidden, top_k = 7, 192, 3
    dtype = torch.int8 if scheme == WeightScheme.INT8 else torch.float8_e4m3fn
    generator = torch.Generator().manual_seed(num_rows)
    x = normal(num_rows, hidden).bfloat16()
    ids = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(num_rows)])
    ids = ids[:, :top_k].int()
    ids[0, 1] = -1
    weights = torch.rand(num_rows, top_k, generator=generator)
    halves = [
        [ops.quantize_weight(normal(width, hidden, seed=2 * e + half), scheme) for half in (0, 1)]
        for e in range(num_experts)
    ]
    down = [ops.quantize_weight(normal(hidden, width, seed=50 + e), scheme) for e in range(7)]
    w13 = torch.stack([torch.cat([raw(codes) for codes, _ in pair]) for pair in halves])
    w13_scale = torch.stack([torch.cat([scale for _, scale in pair]) for pair in halves])
    w2 = torch.stack([raw(codes) for codes, _ in down])
    w2_scale = torch.stack([scale for _, scale in down])

    rows = ops.quantize_rows(x, dtype)
    want = torch.zeros(num_rows, hidden)
    for row in range(num_rows):
        one = ops.QuantizedRows(rows.codes[row : row + 1], rows.scale[:, row : row + 1])
        for k in range(top_k):
            expert = int(ids[row, k])
            if expert < 0:
                continue
            both = [
                ops.linear_scaled(one, *part, out=torch.empty(1, width)) for part in halves[expert]
            ]
            inner = torch.nn.functional.silu(both[0]) * both[1]
            out = torch.empty(1, hidden, dtype=torch.bfloat16)
            ops.linear_scaled(ops.quantize_rows(inner, dtype), *down[expert], out=out)
            want[row] += weights[row, k] * out[0].float()
    found = ops.fused_moe(
        x.cuda(),
        w13.view(dtype).cuda(),
        w2.view(dtype).cuda(),
        weights.cuda(),
        ids.cuda(),
        w13_scale=w13_scale.cuda(),
        w2_scale=w2_scale.cuda(),
    )
    assert found.isfinite().all()
    assert (found.cpu().float() - want).norm() <= 0.01 * want.norm()


def test_experts_in_low_precision_have_no_cpu_kernel() -> None:
    codes = torch.zeros(2, 8, 4, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="w13_scale: expected none on the CPU"):
        ops.fused_moe(
            torch.zeros(1, 4),
            codes,
            torch.zeros(2, 4, 4, dtype=torch.int8),
            torch.ones(1, 1),
            torch.zeros(1, 1, dtype=torch.int32),
            w13_scale=torch.ones(2, 8),
            w2_scale=torch.ones(2, 4),
        )
