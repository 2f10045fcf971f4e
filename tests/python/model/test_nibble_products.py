# SPDX-License-Identifier: Apache-2.0
"""Products of rows and weights of 4 bits as layers hold them."""

from __future__ import annotations

import pytest
import torch

from diffulex import ops
from diffulex.checkpoint.low_precision import Codes
from diffulex.ops import WeightScheme
from diffulex.quantization import vendor
from diffulex.quantization.weights import QuantizedWeight, Shape
from fixtures.nibbles import Parts, inside, is_untouched


@pytest.mark.cuda
@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("has_exact_scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_many_rows_are_those_of_few(
    dtype: torch.dtype, has_exact_scale: bool, has_zeros: bool, has_order: bool
) -> None:
    """Weights as layers hold them, in both forms: of many rows by the library, whose parts of a sum may be
    bfloat16; one that must not depend on the number of rows stays with our kernel."""
    rows, depth, group = 96, 512, 64
    parts = Parts(rows, depth, group, has_zeros)
    shape = Shape(rows, group, has_exact_scale or has_zeros, has_zeros, has_order)
    weight = QuantizedWeight([shape], depth, WeightScheme.INT4, "cuda", dtype)
    generator = torch.Generator().manual_seed(depth)
    order = torch.randperm(depth, generator=generator) if has_order else None
    weight.write_codes(0, Codes(parts.codes, parts.scales, parts.zeros, order), slice(0, rows))
    x = torch.randn(600, depth, generator=generator).bfloat16().cuda()
    bias = torch.randn(rows, generator=generator).bfloat16().cuda()
    chosen = x if order is None else x[:, order.cuda()]
    want = chosen.double() @ parts.values.cuda().double().T + bias.double()
    terms = chosen.double().abs() @ parts.values.cuda().double().abs().T
    out = inside(600, rows, "cuda")
    weight.product(x, out, bias)
    is_tiled = weight.parts[0].codes.dim() == 4
    assert is_tiled == (dtype == torch.bfloat16 and ops.has_hopper_kernels(x.device))
    assert ((out.double() - want).abs() <= 2.0**-7 * want.abs() + 2.0**-12 * terms).all()
    assert is_untouched(out)
    few = weight.product(x[:4], None, bias)
    assert (
        (few.double() - want[:4]).abs() <= 2.0**-7 * want[:4].abs() + 2.0**-12 * terms[:4]
    ).all()
    gated = torch.empty(600, rows // 2, dtype=torch.bfloat16, device="cuda")
    assert not weight.gated_product(x, ops.Activation.SILU, gated)
    weight.is_batch_invariant = True
    alone = weight.product(x[:4], None, bias)
    assert torch.equal(weight.product(x, None, bias)[:4], alone)


@pytest.mark.parametrize("has_exact_scale", [False, True])
@pytest.mark.parametrize("zero", [ops.INT4_ZERO, 5, None])
def test_scales_beside_tiles_take_no_new_memory(
    monkeypatch: pytest.MonkeyPatch, zero: int | None, has_exact_scale: bool
) -> None:
    """Zero points of 8 stay with scales of float32; those of bfloat16 are alone again."""
    monkeypatch.setattr(ops, "has_hopper_kernels", lambda device: device.type == "cpu")
    parts = Parts(96, 512, 64, has_zeros=False)
    zeros = None if zero is None else torch.full(parts.scales.shape, zero, dtype=torch.uint8)
    shape = Shape(96, 64, has_exact_scale, has_zeros=zero is not None)
    weight = QuantizedWeight([shape], 512, WeightScheme.INT4, "cpu", torch.bfloat16)
    on_meta = QuantizedWeight([shape], 512, WeightScheme.INT4, "cpu", torch.bfloat16, "meta")
    (part,) = weight.parts
    assert on_meta.parts[0].codes.is_meta
    assert on_meta.nbytes == weight.nbytes
    before = {tensor.data_ptr() for tensor in (part.scale, part.zeros) if tensor is not None}
    weight.write_codes(0, Codes(parts.codes, parts.scales, zeros), slice(0, 96))
    weight.packed()
    held = [tensor for tensor in (part.scale, part.zeros) if tensor is not None]
    assert {tensor.data_ptr() for tensor in held} <= before
    assert torch.equal(part.row_major(), parts.codes)
    assert torch.equal(part.scale.float(), parts.scales.float())
    if has_exact_scale or zero == 5:
        assert [tensor.dtype for tensor in held] == [torch.float32, torch.bfloat16]
        assert part.zeros is not None
        assert bool((part.zeros == (ops.INT4_ZERO if zero is None else zero)).all())
        assert weight.nbytes == on_meta.nbytes
    else:
        assert [tensor.dtype for tensor in held] == [torch.bfloat16]


def test_who_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    own_rows = vendor.own_nibble_rows
    assert own_rows(torch.device("cpu"), 1024, 1024, has_tiles=False) is None
    many = own_rows(cuda, 1024, 1024, has_tiles=True)
    larger = own_rows(cuda, 16384, 4096, has_tiles=True)
    assert many is not None
    assert larger is not None
    assert many < larger
    for is_hopper, rows in ((True, (0, 16)), (False, (128, 128))):
        monkeypatch.setattr(ops, "has_hopper_kernels", lambda _, is_hopper=is_hopper: is_hopper)
        found = tuple(own_rows(cuda, columns, 1024, has_tiles=False) for columns in (4096, 24576))
        assert found == rows
    x = torch.empty(many + 1, 8, dtype=torch.bfloat16)
    assert vendor.takes_rows(WeightScheme.INT4, x, many)
    assert not vendor.takes_rows(WeightScheme.INT4, x[:many], many)
    assert not vendor.takes_rows(WeightScheme.INT4, x.half(), many)
