# SPDX-License-Identifier: Apache-2.0
"""Ops that write codes of their result, beside the same without codes, and the two launches whose place they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex import ops
from kernel_bench.attention import Buffers, Problem, Shape
from kernel_bench.codes import codes_agreement
from kernel_bench.report import Case, Limit
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel_bench.agreement import Agreement

TWO_LAUNCHES = "and quantize_rows"
ALONE = "without codes"
#: Attention whose result becomes codes: few rows of short and long contexts, and batches.
ATTENTION = (
    Shape(1, 256, 32),
    Shape(1, 8192, 32),
    Shape(8, 1024, 32),
    Shape(8, 8192, 32),
    Shape(4, 0, 32),
    Shape(1, 0, 4096),
)
EPS = 1e-6
#: By the number of rows: of the op without codes, what one that writes nothing but codes may take.
NORM_LIMITS = {32: Limit(plus_us=0.3), 8192: Limit(0.95)}
ACTIVATION_LIMITS = {8192: Limit(0.9)}


def _judges(limit: Limit | None) -> dict[str, Limit]:
    return {TWO_LAUNCHES: Limit()} if limit is None else {ALONE: limit, TWO_LAUNCHES: Limit()}


def _norm_case(rows: int, hidden: int, device: str) -> Case:
    sets = [
        torch.randn(2, rows, hidden, dtype=torch.bfloat16, device=device)
        for _ in range(num_rotations(9.0 * rows * hidden))
    ]
    weight = torch.randn(hidden, dtype=torch.bfloat16, device=device)
    coded = ops.new_quantized_rows(rows, hidden, torch.float8_e4m3fn, sets[0].device)
    coded = coded._replace(codes_only=True)

    def check() -> Agreement:
        x, residual = sets[0].clone()
        total = x.double() + residual.double()
        exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.double()
        ops.add_rms_norm(x, residual, weight, EPS, rows=coded)
        return codes_agreement(coded, exact)

    def peer(x: torch.Tensor, residual: torch.Tensor) -> None:
        ops.add_rms_norm(x, residual, weight, EPS)
        ops.quantize_rows_into(x, coded)

    num_bytes = float(rows * hidden)
    return Case(
        "quant", "add_rms_norm with codes", f"{rows} x {hidden}",
        [lambda s=s: ops.add_rms_norm(*s, weight, EPS, rows=coded) for s in sets], check,
        4.0 * num_bytes, 3.0 * num_bytes, rotated_bytes=len(sets) * 4.0 * num_bytes,
        peers={
            ALONE: [lambda s=s: ops.add_rms_norm(*s, weight, EPS) for s in sets],
            TWO_LAUNCHES: [lambda s=s: peer(*s) for s in sets],
        },
        judges=_judges(NORM_LIMITS.get(rows)),
    )  # fmt: skip


def _activation_case(rows: int, inner: int, device: str) -> Case:
    sets = [
        torch.randn(rows, 2 * inner, dtype=torch.bfloat16, device=device)
        for _ in range(num_rotations(7.0 * rows * inner))
    ]
    out = torch.empty(rows, inner, dtype=torch.bfloat16, device=device)
    coded = ops.new_quantized_rows(rows, inner, torch.float8_e4m3fn, out.device)
    coded = coded._replace(codes_only=True)

    def check() -> Agreement:
        gate, up = sets[0].double().chunk(2, -1)
        ops.act_and_mul(sets[0], out=out, rows=coded)
        return codes_agreement(coded, functional.silu(gate) * up)

    num_bytes = float(rows * inner)
    return Case(
        "quant", "act_and_mul with codes", f"{rows} x {inner}",
        [lambda x=x: ops.act_and_mul(x, out=out, rows=coded) for x in sets], check,
        4.0 * num_bytes, num_bytes, rotated_bytes=len(sets) * 4.0 * num_bytes,
        peers={
            ALONE: [lambda x=x: ops.act_and_mul(x, out=out) for x in sets],
            TWO_LAUNCHES: [
                lambda x=x: ops.quantize_rows_into(ops.act_and_mul(x, out=out), coded) for x in sets
            ],
        },
        judges=_judges(ACTIVATION_LIMITS.get(rows)),
    )  # fmt: skip


def _attention_case(shape: Shape, device: str) -> Case:
    sets = [Buffers(shape, device) for _ in range(num_rotations(shape.read_bytes, 48))]
    plain, fused = Problem(shape, device), Problem(shape, device)
    num_rows, width = sets[0].q.flatten(1).shape
    coded = ops.new_quantized_rows(num_rows, width, torch.float8_e4m3fn, sets[0].q.device)
    fused.rows = coded._replace(codes_only=True)

    def check() -> Agreement:
        plain.call(sets[0])
        want = ops.quantize_rows(sets[0].out.flatten(1), torch.float8_e4m3fn)
        coded.scale.fill_(torch.nan)
        coded.codes.view(torch.uint8).fill_(127)
        fused.call(sets[0])
        is_same = torch.equal(coded.codes.view(torch.uint8), want.codes.view(torch.uint8))
        if not (is_same and torch.equal(coded.scale[:, :num_rows], want.scale[:, :num_rows])):
            raise ValueError("attention writes other codes than quantize_rows")
        return plain.check(sets[0])

    def both(part: Buffers) -> None:
        plain.call(part)
        ops.quantize_rows_into(part.out.flatten(1), coded)

    return Case(
        "quant", "block_attention with codes", shape.text,
        [lambda part=part: fused.call(part) for part in sets], check,
        shape.read_bytes, shape.written_bytes / 2, shape.flops,
        len(sets) * (shape.read_bytes + shape.written_bytes),
        peers={
            ALONE: [lambda part=part: plain.call(part) for part in sets],
            TWO_LAUNCHES: [lambda part=part: both(part) for part in sets],
        },
        judges={ALONE: Limit(1.02)},
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """Attention, norm and activation, as products of codes follow them."""
    for shape in (Shape(2, 64, 32, 4, 2, page=16),) if is_small else ATTENTION:
        yield _attention_case(shape, device)
    for rows in (3,) if is_small else (32, 256, 8192):
        yield _norm_case(rows, 192 if is_small else 4096, device)
        yield _activation_case(rows, 192 if is_small else 12288, device)
