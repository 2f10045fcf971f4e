# SPDX-License-Identifier: Apache-2.0
"""Norms and activations that write codes of their result: those of `quantize_rows`, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diffulex import ops

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
CODES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "int8"])
SOURCES = pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
#: Those of a warp, of a CTA, and past what registers hold; groups cut short, and rows without alignment.
WIDTHS = pytest.mark.parametrize("width", [1, 30, 136, 1024, 1160, 5120, 18944])
IS_WHOLE = pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "whole"])
EPS = 1e-6

Op = Callable[[torch.Tensor, "ops.QuantizedRows | None"], torch.Tensor]


def rows_of(width: int, source: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Ordinary rows, zeros, and rows far apart in size."""
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(seed + width))
    x[1] = 0
    x[2] *= 1e-3
    x[3, width // 2] = 300
    return x.to(device, source)


def inside(x: torch.Tensor, left: int) -> torch.Tensor:
    """The same rows in the middle of wider ones."""
    wide = x.new_full((x.size(0), x.size(1) + 2 * left), torch.nan)
    wide[:, left : left + x.size(1)] = x
    return wide[:, left : left + x.size(1)]


def expect_codes(op: Op, x: torch.Tensor, dtype: torch.dtype, is_whole: bool) -> None:
    for left in (0, 8, 3):
        plain = op(inside(x, left), None)
        group = plain.size(1) if is_whole else ops.QUANT_GROUP
        want = ops.quantize_rows(plain, dtype, group=group)
        # What the op does not write stays: a code and a scale behind the last of its own.
        codes = torch.zeros(10, plain.size(1), dtype=torch.uint8, device=x.device).view(dtype)
        found = ops.QuantizedRows(codes[:9], torch.full_like(want.scale, 7.0))
        assert torch.equal(op(inside(x, left), found), plain)
        assert torch.equal(found.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(found.scale[:, :9], want.scale[:, :9])
        assert (found.scale[:, 9:] == 7).all()
        assert not codes[9:].view(torch.uint8).any()
        # The same without the rows themselves.
        alone = ops.new_quantized_rows(9, plain.size(1), dtype, x.device, group=group)
        op(inside(x, left), alone._replace(codes_only=True))
        assert torch.equal(alone.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(alone.scale[:, :9], want.scale[:, :9])


@DEVICES
@CODES
@SOURCES
@WIDTHS
@IS_WHOLE
def test_rms_norm(
    device: str, dtype: torch.dtype, source: torch.dtype, width: int, is_whole: bool
) -> None:
    weight = rows_of(width, source, device, 1)[0]

    def op(x: torch.Tensor, rows: ops.QuantizedRows | None) -> torch.Tensor:
        return ops.rms_norm(x, weight, EPS, weight_offset=1.0, rows=rows)

    expect_codes(op, rows_of(width, source, device), dtype, is_whole)


@DEVICES
@CODES
@SOURCES
@WIDTHS
@IS_WHOLE
def test_add_rms_norm(
    device: str, dtype: torch.dtype, source: torch.dtype, width: int, is_whole: bool
) -> None:
    residual = rows_of(width, source, device, 2)
    sums: list[torch.Tensor] = []

    def op(x: torch.Tensor, rows: ops.QuantizedRows | None) -> torch.Tensor:
        total = residual.clone()
        ops.add_rms_norm(x, total, None, EPS, rows=rows)
        sums.append(total)
        return x

    expect_codes(op, rows_of(width, source, device), dtype, is_whole)
    assert all(torch.equal(total, sums[0]) for total in sums)


@DEVICES
@CODES
@SOURCES
@WIDTHS
@IS_WHOLE
def test_act_and_mul(
    device: str, dtype: torch.dtype, source: torch.dtype, width: int, is_whole: bool
) -> None:
    act = list(ops.Activation)[width % 3]

    def op(x: torch.Tensor, rows: ops.QuantizedRows | None) -> torch.Tensor:
        return ops.act_and_mul(x, act, rows=rows)

    expect_codes(op, rows_of(2 * width, source, device), dtype, is_whole)


@CODES
@SOURCES
@pytest.mark.parametrize("width", [30, 192, 704])
def test_values_at_the_ends_of_their_range(
    dtype: torch.dtype, source: torch.dtype, width: int
) -> None:
    """Infinite values, NaN, and magnitudes whose factor would overflow: of the result, group by group."""
    x = rows_of(2 * width, source, "cpu")
    x[4, 0] = torch.inf
    x[5, [1, width]] = torch.nan
    x[6] = torch.finfo(source).smallest_normal / 2
    x[7, ::2] = 0
    gate, up = x.chunk(2, 1)
    up[6] = 1

    def codes(op: Op, x: torch.Tensor) -> list[torch.Tensor]:
        width = op(x, None).size(1)
        rows = ops.new_quantized_rows(9, width, dtype, x.device)
        plain = op(x, rows)
        want = ops.quantize_rows(plain, dtype)
        assert torch.equal(rows.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(rows.scale[:, :9], want.scale[:, :9])
        return [plain, rows.codes]

    plain, found = codes(lambda x, rows: ops.act_and_mul(x, ops.Activation.SILU, rows=rows), x)
    assert plain[4, 0].isinf()
    assert plain[5, :2].isnan().all()
    assert plain[6].count_nonzero()
    code = 0 if dtype == torch.int8 else 0x7F
    assert (found.view(torch.uint8)[5, :2] == code).all()
    # Of float16 every magnitude has a factor.
    assert found.view(torch.uint8)[6].any() == (source == torch.float16)
    plain, _ = codes(lambda x, rows: ops.rms_norm(x, None, EPS, rows=rows), gate.contiguous())
    assert plain[5].isnan().all()
    assert plain[6].count_nonzero()


@pytest.mark.cuda
@CODES
@SOURCES
@WIDTHS
@IS_WHOLE
def test_cuda_quantises_as_the_cpu(
    dtype: torch.dtype, source: torch.dtype, width: int, is_whole: bool
) -> None:
    x = rows_of(width, source, "cpu")
    group = width if is_whole else ops.QUANT_GROUP
    want = ops.quantize_rows(x, dtype, group=group)
    for left in (0, 8, 3):
        found = ops.quantize_rows(inside(x.cuda(), left), dtype, group=group)
        assert torch.equal(found.codes.cpu().view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(found.scale[:, :9].cpu(), want.scale[:, :9])


@pytest.mark.cuda
@CODES
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits(dtype: torch.dtype, source: torch.dtype) -> None:
    """In pairs as one by one, NaN and infinities among them."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = torch.cat([bits, bits.roll(1)]).view(source).view(-1, 512)
    for group in (128, 512):
        want = ops.quantize_rows(x, dtype, group=group)
        found = ops.quantize_rows(x.cuda(), dtype, group=group)
        assert torch.equal(found.codes.cpu().view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(found.scale.cpu(), want.scale)


@pytest.mark.cuda
@CODES
def test_a_captured_graph(dtype: torch.dtype) -> None:
    """With overlapping launches and weights read ahead, as an engine has them."""
    x = rows_of(1024, torch.bfloat16, "cuda")
    weight = x[0].clone()

    def chain() -> list[torch.Tensor]:
        residual, plain = torch.zeros_like(x), x.clone()
        found = [residual, plain]
        with ops.settled_weights():
            for _ in range(6):
                for group, width in ((128, 1024), (512, 512)):
                    rows = ops.new_quantized_rows(9, width, dtype, x.device, group=group)
                    if width == 1024:
                        ops.add_rms_norm(plain, residual, weight, EPS, rows=rows)
                    else:
                        found.append(ops.act_and_mul(plain, rows=rows))
                    found += rows.codes, rows.scale[:, :9]
        return found

    want = [tensor.clone() for tensor in chain()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        graph.replay()
        for tensor, expected in zip(found, want, strict=True):
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


@DEVICES
@CODES
@SOURCES
@IS_WHOLE
@pytest.mark.parametrize(("num_rows", "width"), [(64, 2056), (65, 2056), (200, 12296), (513, 5120)])
def test_act_and_mul_of_many_rows(
    device: str,
    dtype: torch.dtype,
    source: torch.dtype,
    is_whole: bool,
    num_rows: int,
    width: int,
) -> None:
    """Where pieces of a row follow each other in a loop, and next to it."""
    x = rows_of(2 * width, source, device).repeat(num_rows // 9 + 1, 1)[:num_rows]
    plain = ops.act_and_mul(x, ops.Activation.SILU)
    want = ops.quantize_rows(plain, dtype, group=width if is_whole else ops.QUANT_GROUP)
    for codes_only in (False, True):
        found = ops.QuantizedRows(
            torch.zeros_like(want.codes), torch.full_like(want.scale, 7.0), codes_only
        )
        out = ops.act_and_mul(x, ops.Activation.SILU, rows=found)
        assert codes_only or torch.equal(out, plain)
        assert torch.equal(found.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(found.scale[:, :num_rows], want.scale[:, :num_rows])
