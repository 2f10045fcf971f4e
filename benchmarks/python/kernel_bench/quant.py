# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 8 bits, behind the quantiser of their rows, beside those of bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex import ops
from kernel_bench.agreement import Agreement, Tolerance
from kernel_bench.linear import CHECKED_COLUMNS, MODELS, ROWS, Product
from kernel_bench.report import Case
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER = "bfloat16"
SCHEMES = {
    "fp8": (ops.WeightScheme.FP8, torch.float8_e4m3fn),
    "int8": (ops.WeightScheme.INT8, torch.int8),
}
#: A bfloat16 result of sums that keep about 14 bits of 128 products.
TOLERANCE = Tolerance(2.0**-6, 0.02)


def _case(scheme: str, model: str, product: Product, rows: int, device: str) -> Case:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    columns, depth = product.columns, product.depth
    num_results = columns // 2 if product.is_gated else columns
    act = ops.Activation.SILU if product.is_gated else None
    kind, code = SCHEMES[scheme]
    plain = [
        torch.empty(columns, depth, dtype=dtype, device=device).normal_(0.0, depth**-0.5)
        for _ in range(num_rotations(columns * depth))
    ]
    weights = [ops.quantize_weight(weight, kind) for weight in plain]
    x = torch.randn(rows, depth, dtype=dtype, device=device)
    codes = ops.quantize_rows(x, code)
    both = torch.empty(rows, columns, dtype=dtype, device=device)
    out = torch.empty(rows, num_results, dtype=dtype, device=device)
    is_few = device != "cpu" and ops.has_hopper_kernels(torch.device(device))
    is_few = is_few and ops.is_few_rows(rows, columns, depth)

    def peer(weight: torch.Tensor) -> None:
        if is_few:
            ops.linear_few_rows(x, weight, act=act, out=out)
        elif product.is_gated:
            torch.mm(x, weight.t(), out=both)
            ops.act_and_mul(both, out=out)
        else:
            torch.mm(x, weight.t(), out=out)

    def call(weight: tuple[torch.Tensor, torch.Tensor]) -> None:
        ops.linear_scaled(codes, *weight, act=act, out=out)

    def values(part: slice) -> torch.Tensor:
        return weights[0][0][part].double() * weights[0][1][part].double()[:, None]

    def check() -> Agreement:
        out.fill_(torch.nan)
        call(weights[0])
        agreement = Agreement(out.numel(), TOLERANCE)
        scales = codes.scale[:, :rows].double().T.repeat_interleave(128, 1)[:, :depth]
        exact_x = codes.codes.double() * scales
        for start in range(0, num_results, CHECKED_COLUMNS):
            stop = min(num_results, start + CHECKED_COLUMNS)
            exact = exact_x @ values(slice(start, stop)).t()
            if product.is_gated:
                up = exact_x @ values(slice(num_results + start, num_results + stop)).t()
                exact = functional.silu(exact) * up
            agreement.add(out[:, start:stop], exact)
        return agreement

    num_bytes = float(weights[0][0].nbytes)
    return Case(
        "quant", f"linear_scaled {scheme}", f"{model} {product.name}, {rows} rows",
        [lambda w=w: call(w) for w in weights], check, num_bytes + codes.codes.nbytes,
        float(out.nbytes), 2.0 * rows * columns * depth,
        float(len(weights) * num_bytes + x.nbytes + out.nbytes),
        peers={PEER: [lambda w=w: peer(w) for w in plain]}, judges=(),
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """e4m3 products of two models, and int8 ones of a layer of the larger."""
    if is_small:
        for scheme in SCHEMES:
            yield _case(
                scheme, "tiny", Product("gate and up, silu", 96, 64, is_gated=True), 3, device
            )
            yield _case(scheme, "tiny", Product("o", 48, 64), 3, device)
        return
    for model, products in MODELS.items():
        for product in products:
            for rows in ROWS:
                yield _case("fp8", model, product, rows, device)
    for product in MODELS["SDAR-8B"][:-1]:
        for rows in (32, 256):
            yield _case("int8", "SDAR-8B", product, rows, device)
