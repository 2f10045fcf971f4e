# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 4 bits in tiles, beside those of bfloat16 and the portable ones by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex import ops
from kernel_bench.agreement import BFLOAT16, Agreement
from kernel_bench.linear import CHECKED_COLUMNS, MODELS, Product
from kernel_bench.report import Case
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER = "bfloat16"
#: The same weights as they are on devices without tiles.
BY_ROW = "portable"
ROWS = (1, 8, 32, 64, 128)
GROUP = 128
#: Microseconds for 32 rows of SDAR-8B.
GOALS = {"qkv": 5.9, "o": 4.9, "gate and up, silu": 15.6, "down": 9.0}


def _case(model: str, product: Product, rows: int, device: str) -> Case:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    columns, depth = product.columns, product.depth
    num_results = columns // 2 if product.is_gated else columns
    act = ops.Activation.SILU if product.is_gated else None
    plain = [
        torch.empty(columns, depth, dtype=dtype, device=device).normal_(0.0, depth**-0.5)
        for _ in range(num_rotations(columns * depth / 2))
    ]
    by_row = [ops.quantize_weight(w, ops.WeightScheme.INT4, group=GROUP) for w in plain]
    has_tiles = device != "cpu" and ops.has_hopper_kernels(torch.device(device))
    weights = by_row
    if has_tiles:
        weights = [(ops.to_nibble_tiles(codes.clone()), scale) for codes, scale in by_row]
    x = torch.randn(rows, depth, dtype=dtype, device=device)
    both = torch.empty(rows, columns, dtype=dtype, device=device)
    out = torch.empty(rows, num_results, dtype=dtype, device=device)
    is_few = has_tiles and ops.is_few_rows(rows, columns, depth)

    def call(weight: tuple[torch.Tensor, torch.Tensor]) -> None:
        if act is not None and weight[0].dim() == 2 and device != "cpu":
            ops.linear_w4a16(x, *weight, group=GROUP, out=both)
            ops.act_and_mul(both, out=out)
        else:
            ops.linear_w4a16(x, *weight, group=GROUP, act=act, out=out)

    def peer(weight: torch.Tensor) -> None:
        if is_few:
            ops.linear_few_rows(x, weight, act=act, out=out)
        elif product.is_gated:
            torch.mm(x, weight.t(), out=both)
            ops.act_and_mul(both, out=out)
        else:
            torch.mm(x, weight.t(), out=out)

    def values(part: slice) -> torch.Tensor:
        codes, scale = by_row[0][0][part], by_row[0][1][:, part]
        nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).float() - ops.INT4_ZERO
        return (nibbles * scale.float().T.repeat_interleave(GROUP, 1)).bfloat16().double()

    def check() -> Agreement:
        out.fill_(torch.nan)
        call(weights[0])
        agreement = Agreement(out.numel(), BFLOAT16)
        exact_x = x.double()
        for start in range(0, num_results, CHECKED_COLUMNS):
            stop = min(num_results, start + CHECKED_COLUMNS)
            exact = exact_x @ values(slice(start, stop)).t()
            if product.is_gated:
                up = exact_x @ values(slice(num_results + start, num_results + stop)).t()
                exact = functional.silu(exact) * up
            agreement.add(out[:, start:stop], exact)
        return agreement

    peers = {PEER: [lambda w=w: peer(w) for w in plain]}
    if has_tiles:
        peers[BY_ROW] = [lambda w=w: call(w) for w in by_row]
    num_bytes = float(weights[0][0].nbytes + weights[0][1].nbytes)
    return Case(
        "quant", "linear_w4a16", f"{model} {product.name}, {rows} rows",
        [lambda w=w: call(w) for w in weights], check, num_bytes + x.nbytes, float(out.nbytes),
        2.0 * rows * columns * depth, float(len(weights) * num_bytes + x.nbytes + out.nbytes),
        peers=peers, judges=(),
        goal_us=GOALS.get(product.name) if (model, rows) == ("SDAR-8B", 32) else None,
    )  # fmt: skip


def nibble_cases(device: str, is_small: bool) -> Iterator[Case]:
    """The products of two models but those of heads, which do not bear 4 bits."""
    if is_small:
        yield _case("tiny", Product("gate and up, silu", 96, 128, is_gated=True), 3, device)
        yield _case("tiny", Product("o", 48, 256), 3, device)
        return
    for model, products in MODELS.items():
        for product in products:
            if product.name in ("head", "gate and up"):
                continue
            for rows in ROWS:
                yield _case(model, product, rows, device)
