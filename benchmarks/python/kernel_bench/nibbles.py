# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 4 bits as the layers run them, beside those of bfloat16 and of weights by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex import ops
from diffulex.quantization.weights import QuantizedWeight, Shape
from kernel_bench.agreement import BFLOAT16, Agreement, Tolerance
from kernel_bench.ceilings import bandwidth_us
from kernel_bench.codes import nibble_values
from kernel_bench.linear import CHECKED_COLUMNS, MODELS, Product
from kernel_bench.report import Case
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER = "bfloat16"
#: The same weights as they are on devices without tiles.
BY_ROW = "by row"
ROWS = (1, 8, 32, 64, 128, 256, 512, 2048)
#: Rows up to which weights by row are timed.
BY_ROW_ROWS = 128
GROUP = 128
#: Microseconds for 32 rows of SDAR-8B.
GOALS = {"qkv": 5.9, "o": 4.9, "gate and up, silu": 15.6, "down": 9.0}
#: Of the bandwidth, what products of weights by row are to reach for as many rows of the same.
BY_ROW_SHARE = 0.75
#: A result that is rounded before the activation, too.
TOLERANCE = Tolerance(2.0**-6, 0.02)


class _Weights:
    """Matrices in turn, in the form of the layers on their device or by row."""

    def __init__(self, plain: list[torch.Tensor], *, is_by_row: bool) -> None:
        columns, depth = plain[0].shape
        # Without a dtype of its rows a weight has no tiles.
        dtype = None if is_by_row else plain[0].dtype
        self.sets = []
        for values in plain:
            weight = QuantizedWeight(
                [Shape(columns, GROUP)], depth, ops.WeightScheme.INT4, values.device, dtype
            )
            weight.write(0, values)
            weight.packed()
            self.sets.append(weight)

    @property
    def nbytes(self) -> float:
        """Of one."""
        return float(self.sets[0].nbytes)

    def values(self, part: slice) -> torch.Tensor:
        held = self.sets[0].parts[0]
        return nibble_values(held.row_major()[part], held.scale[:, part])


class _Problem:
    """What the calls of one row share."""

    def __init__(self, product: Product, rows: int, device: str) -> None:
        self.product = product
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        columns, depth = product.columns, product.depth
        self.plain = [
            torch.empty(columns, depth, dtype=dtype, device=device).normal_(0.0, depth**-0.5)
            for _ in range(num_rotations(columns * depth / 2))
        ]
        self.x = torch.randn(rows, depth, dtype=dtype, device=device)
        self.both = torch.empty(rows, columns, dtype=dtype, device=device)
        self.out = torch.empty(rows, columns // 2, dtype=dtype, device=device)
        if not product.is_gated:
            self.out = self.both
        self.is_few = device != "cpu" and ops.has_hopper_kernels(torch.device(device))
        self.is_few &= ops.is_few_rows(rows, columns, depth)

    def call(self, weight: QuantizedWeight) -> bool:
        """As the layers do; whether the result was rounded once."""
        act = ops.Activation.SILU
        if self.product.is_gated and weight.gated_product(self.x, act, self.out):
            return True
        weight.product(self.x, self.both, None)
        if self.product.is_gated:
            ops.act_and_mul(self.both, out=self.out)
        return not self.product.is_gated

    def peer(self, weight: torch.Tensor) -> None:
        if self.is_few:
            act = ops.Activation.SILU if self.product.is_gated else None
            ops.linear_few_rows(self.x, weight, act=act, out=self.out)
            return
        torch.mm(self.x, weight.t(), out=self.both)
        if self.product.is_gated:
            ops.act_and_mul(self.both, out=self.out)

    def check(self, weights: _Weights) -> Agreement:
        self.out.fill_(torch.nan)
        is_rounded_once = self.call(weights.sets[0])
        agreement = Agreement(self.out.numel(), BFLOAT16 if is_rounded_once else TOLERANCE)
        exact_x, num_results = self.x.double(), self.out.size(1)
        for start in range(0, num_results, CHECKED_COLUMNS):
            stop = min(num_results, start + CHECKED_COLUMNS)
            exact = exact_x @ weights.values(slice(start, stop)).t()
            if self.product.is_gated:
                part = slice(num_results + start, num_results + stop)
                exact = functional.silu(exact) * (exact_x @ weights.values(part).t())
            agreement.add(self.out[:, start:stop], exact)
        return agreement


def _case(model: str, product: Product, rows: int, device: str, *, is_by_row: bool = False) -> Case:
    problem = _Problem(product, rows, device)
    weights = _Weights(problem.plain, is_by_row=is_by_row)
    peers = {PEER: [lambda w=w: problem.peer(w) for w in problem.plain]}
    if device != "cpu" and not is_by_row and rows <= BY_ROW_ROWS:
        by_row = _Weights(problem.plain, is_by_row=True)
        peers[BY_ROW] = [lambda w=w: problem.call(w) for w in by_row.sets]
    is_judged = (model, rows) == ("SDAR-8B", 32)
    x, out = problem.x, problem.out
    name = "int4 product" if rows > BY_ROW_ROWS else "linear_w4a16"
    return Case(
        "quant", f"{name} by row" if is_by_row else name, f"{model} {product.name}, {rows} rows",
        [lambda w=w: problem.call(w) for w in weights.sets],
        lambda: problem.check(weights), weights.nbytes + x.nbytes, float(out.nbytes),
        2.0 * rows * product.columns * product.depth,
        rotated_bytes=len(weights.sets) * weights.nbytes + x.nbytes + out.nbytes, peers=peers,
        formula_us=bandwidth_us(weights.nbytes, BY_ROW_SHARE) if is_by_row and is_judged else None,
        goal_us=GOALS.get(product.name) if is_judged and not is_by_row else None,
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
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
            if model == "SDAR-8B":
                yield _case(model, product, 32, device, is_by_row=True)
