# SPDX-License-Identifier: Apache-2.0
"""Dense products of decode steps: few rows of x [T, K] times a weight W [N, K]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex import ops
from kernel_bench.agreement import BFLOAT16, Agreement, Tolerance
from kernel_bench.report import Case, Limit
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PEER = "torch.mm"


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a layer; a gated one is followed by the activation."""

    name: str
    columns: int
    depth: int
    is_gated: bool = False


MODELS = {
    "SDAR-8B": (
        Product("qkv", 6144, 4096),
        Product("o", 4096, 4096),
        Product("gate and up", 24576, 4096),
        Product("gate and up, silu", 24576, 4096, is_gated=True),
        Product("down", 4096, 12288),
        Product("head", 151936, 4096),
    ),
    "LLaDA2-mini": (
        Product("qkv", 3072, 2048),
        Product("o", 2048, 2048),
        Product("shared gate and up, silu", 1024, 2048, is_gated=True),
        Product("shared down", 2048, 512),
        Product("head", 157184, 2048),
    ),
}
ROWS = (1, 32, 64, 128, 256)
#: Columns that are compared at once: float64 copies of a whole head would not be small.
CHECKED_COLUMNS = 8192


def _case(model: str, product: Product, rows: int, device: str) -> Case:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    columns, depth = product.columns, product.depth
    num_results = columns // 2 if product.is_gated else columns
    weights = [
        torch.empty(columns, depth, dtype=dtype, device=device).normal_(0.0, depth**-0.5)
        for _ in range(num_rotations(dtype.itemsize * columns * depth))
    ]
    x = torch.randn(rows, depth, dtype=dtype, device=device)
    both = torch.empty(rows, columns, dtype=dtype, device=device)
    out = torch.empty(rows, num_results, dtype=dtype, device=device)

    def torch_call(weight: torch.Tensor) -> None:
        if product.is_gated:
            torch.mm(x, weight.t(), out=both)
            ops.act_and_mul(both, out=out)
        else:
            torch.mm(x, weight.t(), out=out)

    def our_call(weight: torch.Tensor) -> None:
        ops.linear_few_rows(
            x, weight, act=ops.Activation.SILU if product.is_gated else None, out=out
        )

    can_run = device != "cpu" and ops.has_hopper_kernels(torch.device(device))
    is_ours = can_run and ops.is_few_rows(rows, columns, depth)
    call: Callable[[torch.Tensor], None] = our_call if is_ours else torch_call

    def check() -> Agreement:
        out.fill_(torch.nan)
        call(weights[0])
        # The result of a product that is not fused with its activation is rounded in between.
        tolerance = BFLOAT16 if is_ours else Tolerance(2.0**-6, 0.02)
        agreement = Agreement(out.numel(), tolerance)
        for start in range(0, num_results, CHECKED_COLUMNS):
            part = slice(start, min(num_results, start + CHECKED_COLUMNS))
            exact = x.double() @ weights[0][part].double().t()
            if product.is_gated:
                up = x.double() @ weights[0][num_results:][part].double().t()
                exact = functional.silu(exact) * up
            agreement.add(out[:, part], exact)
        return agreement

    name = PEER + " and act_and_mul" if product.is_gated else PEER
    return Case(
        "linear", "linear_few_rows" if is_ours else "torch.mm", f"{model} {product.name}, {rows} rows",
        [lambda w=w: call(w) for w in weights], check, float(weights[0].nbytes + x.nbytes),
        float(out.nbytes), 2.0 * rows * columns * depth,
        float(len(weights) * weights[0].nbytes + x.nbytes + out.nbytes),
        peers={name: [lambda w=w: torch_call(w) for w in weights]} if is_ours else {},
        judges={name: Limit()}, note="" if is_ours else "torch's product is the one in use",
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """The products of two models; what the engine runs at each number of rows."""
    if is_small:
        yield _case("tiny", Product("gate and up, silu", 96, 64, is_gated=True), 3, device)
        yield _case("tiny", Product("o", 48, 64), 3, device)
        return
    for model, products in MODELS.items():
        for product in products:
            for rows in ROWS:
                yield _case(model, product, rows, device)
