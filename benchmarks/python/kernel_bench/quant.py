# SPDX-License-Identifier: Apache-2.0
"""Products with weights of e4m3 and int8 codes, alone and as the layers run them, beside those of bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex import ops
from diffulex.quantization import vendor
from kernel_bench.agreement import Agreement, Tolerance
from kernel_bench.ceilings import NOMINAL_PRODUCTS, bandwidth_us
from kernel_bench.codes import row_values
from kernel_bench.linear import CHECKED_COLUMNS, MODELS, ROWS, Product
from kernel_bench.quant_experts import PORTABLE_SHARE
from kernel_bench.quant_peers import FP8_PEERS, VENDOR, Operands, fp8_peers
from kernel_bench.report import Case, Limit
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PEER = "bfloat16"
OWN = "linear_scaled alone"
#: The products of a layer, and the rows for which either kind of them may be faster.
LAYER = ("qkv", "o", "gate and up, silu", "down", "shared gate and up, silu", "shared down")
LAYER_ROWS = (32, 128, 160, 192, 256, 512, 1024, 2048, 8192)
SCHEMES = {
    "fp8": (ops.WeightScheme.FP8, torch.float8_e4m3fn, "e4m3"),
    "int8": (ops.WeightScheme.INT8, torch.int8, "int8"),
}
#: Microseconds of products of SDAR-8B in e4m3, by the number of rows.
GOALS = {
    "qkv": {32: 8.8, 128: 11.0},
    "o": {32: 6.8, 128: 8.5},
    "gate and up, silu": {32: 27.3, 128: 33.0},
    "down": {32: 14.6, 128: 19.0},
    "head": {32: 152.0, 128: 165.0},
}
#: By the number of rows: what those products may take of the time of others. For other numbers of rows
#: nothing is asked, nor where the layers take the library.
PEER_LIMITS = {32: Limit(0.9), 256: Limit()}
#: All products of a layer of SDAR-8B: microseconds, and of bfloat16's time without codes behind the
#: activation and with them.
LAYER_GOALS = {256: 96.0, 512: 178.0, 1024: 340.0, 2048: 660.0}
PRODUCTS_OF_PLAIN = {32: Limit(0.58)}
LAYER_OF_PLAIN = {8192: Limit(0.6)}
#: Rows from which on the layer may take a factor on the operations' time at the nominal rate.
PROMPT_ROWS, PROMPT_FACTOR = 8192, 1.45
#: Of the faster of both kinds, what the layers' choice between them may take.
CHOICE = Limit(1.02)
#: A bfloat16 result of sums that keep about 14 bits of 128 products.
TOLERANCE = Tolerance(2.0**-6, 0.02)


def _compare(
    agreement: Agreement,
    product: Product,
    coded: ops.QuantizedRows,
    weight: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Adds a product of codes with scales a row of W, a part of its columns at a time."""
    rows = row_values(coded)

    def exact(start: int, stop: int) -> torch.Tensor:
        part = slice(start, stop)
        return rows @ (weight[0][part].double() * weight[1][part].double()[:, None]).t()

    num_results = out.size(1)
    for start in range(0, num_results, CHECKED_COLUMNS):
        stop = min(num_results, start + CHECKED_COLUMNS)
        want = exact(start, stop)
        if product.is_gated:
            want = functional.silu(want) * exact(num_results + start, num_results + stop)
        agreement.add(out[:, start:stop], want)


def _plain_product(
    x: torch.Tensor, product: Product, weight: torch.Tensor, both: torch.Tensor, out: torch.Tensor
) -> None:
    """What the layers run in bfloat16."""
    is_few = x.is_cuda and ops.has_hopper_kernels(x.device)
    if is_few and ops.is_few_rows(x.size(0), product.columns, product.depth):
        ops.linear_few_rows(x, weight, act=_act(product), out=out)
    elif product.is_gated:
        torch.mm(x, weight.t(), out=both)
        ops.act_and_mul(both, out=out)
    else:
        torch.mm(x, weight.t(), out=out)


def _act(product: Product) -> ops.Activation | None:
    return ops.Activation.SILU if product.is_gated else None


def _with_activation(
    call: Callable[[], object], product: Product, both: torch.Tensor, out: torch.Tensor
) -> Callable[[], object]:
    """A product that writes `both`, and the activation where there is one."""
    if not product.is_gated:
        return call

    def run() -> None:
        call()
        ops.act_and_mul(both, out=out)

    return run


def _takes_vendor(kind: ops.WeightScheme, codes: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether the layers leave the product to the library."""
    limit = vendor.own_rows(kind, codes)
    return limit is not None and vendor.takes_rows(kind, x, limit)


def _case(scheme: str, model: str, product: Product, rows: int, device: str) -> Case:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    columns, depth = product.columns, product.depth
    num_results = columns // 2 if product.is_gated else columns
    kind, code, operands = SCHEMES[scheme]
    plain = [
        torch.empty(columns, depth, dtype=dtype, device=device).normal_(0.0, depth**-0.5)
        for _ in range(num_rotations(columns * depth))
    ]
    weights = [ops.quantize_weight(weight, kind) for weight in plain]
    x = torch.randn(rows, depth, dtype=dtype, device=device)
    codes = ops.quantize_rows(x, code)
    both = torch.empty(rows, columns, dtype=dtype, device=device)
    out = torch.empty(rows, num_results, dtype=dtype, device=device) if product.is_gated else both

    def call(weight: tuple[torch.Tensor, torch.Tensor]) -> None:
        ops.linear_scaled(codes, *weight, act=_act(product), out=out)

    def check() -> Agreement:
        out.fill_(torch.nan)
        call(weights[0])
        agreement = Agreement(out.numel(), TOLERANCE)
        _compare(agreement, product, codes, weights[0], out)
        return agreement

    found, absent = {}, {}
    if scheme == "fp8":
        found, absent = fp8_peers(Operands(x, plain, weights, both))
    peers: dict[str, list[Callable[[], object]]] = {
        PEER: [lambda w=w: _plain_product(x, product, w, both, out) for w in plain]
    }
    for name, calls in found.items():
        peers[name] = [_with_activation(each, product, both, out) for each in calls]
    goals = GOALS.get(product.name, {}) if (scheme, model) == ("fp8", "SDAR-8B") else {}
    is_left = _takes_vendor(kind, weights[0][0], x)
    limit = PEER_LIMITS.get(rows) if goals and not is_left else None
    read = float(weights[0][0].nbytes + codes.codes.nbytes)
    is_portable = scheme == "int8" and rows <= 32
    return Case(
        "quant", f"linear_scaled {scheme}", f"{model} {product.name}, {rows} rows",
        [lambda w=w: call(w) for w in weights], check, read, float(out.nbytes),
        2.0 * rows * columns * depth,
        float(len(weights) * weights[0][0].nbytes + x.nbytes + out.nbytes), operands,
        peers=peers, absent=absent,
        judges={} if limit is None else dict.fromkeys(FP8_PEERS, limit),
        formula_us=bandwidth_us(read, PORTABLE_SHARE) if is_portable else None,
        goal_us=goals.get(rows), note=f"the layers take the {VENDOR}" if is_left else "",
    )  # fmt: skip


class _Layer:
    """All products of a layer in turn, with what the layers do beside them: codes of their rows are there,
    those behind the activation are made where `has_codes`."""

    def __init__(
        self, products: Sequence[Product], rows: int, device: str, *, has_codes: bool
    ) -> None:
        self.products, self.has_codes = products, has_codes
        self.kind, code, _ = SCHEMES["fp8"]
        self.plain_sets = [
            [
                torch.empty(p.columns, p.depth, dtype=torch.bfloat16, device=device).normal_()
                for p in products
            ]
            for _ in range(num_rotations(self.num_codes))
        ]
        self.sets = [
            [ops.quantize_weight(w, self.kind) for w in weights] for weights in self.plain_sets
        ]

        def memory(columns: int) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=torch.bfloat16, device=device)

        self.plain = [memory(p.depth).normal_() for p in products]
        self.grouped = [ops.quantize_rows(x, code) for x in self.plain]
        self.whole = [ops.quantize_rows(x, code, group=x.size(1)) for x in self.plain]
        self.both = [memory(p.columns) for p in products]
        self.outs = [
            memory(p.columns // 2) if p.is_gated else both
            for p, both in zip(products, self.both, strict=True)
        ]

    @property
    def num_codes(self) -> int:
        return sum(product.columns * product.depth for product in self.products)

    def chosen(self) -> list[bool]:
        """Of each product, whether the layers leave it to the library."""
        return [
            _takes_vendor(self.kind, codes, x)
            for (codes, _), x in zip(self.sets[0], self.plain, strict=True)
        ]

    def run(self, weights: list[tuple[torch.Tensor, torch.Tensor]], is_vendor: list[bool]) -> None:
        for index, (product, weight) in enumerate(zip(self.products, weights, strict=True)):
            out = self.outs[index]
            following = (index + 1) % len(self.products)
            after = (self.whole if is_vendor[following] else self.grouped)[following]
            if is_vendor[index]:
                vendor.multiply(self.whole[index], *weight, None, self.both[index])
                if product.is_gated:
                    coded = after if self.has_codes else None
                    ops.act_and_mul(self.both[index], out=out, rows=coded)
                continue
            ops.linear_scaled(self.grouped[index], *weight, act=_act(product), out=out)
            if product.is_gated and self.has_codes:
                ops.quantize_rows_into(out, after)

    def run_plain(self, weights: list[torch.Tensor]) -> None:
        """The same in bfloat16."""
        for index, (product, weight) in enumerate(zip(self.products, weights, strict=True)):
            _plain_product(self.plain[index], product, weight, self.both[index], self.outs[index])

    def check(self, choices: Sequence[list[bool]]) -> Agreement:
        num_elements = len(choices) * sum(out.numel() for out in self.outs)
        agreement = Agreement(num_elements, TOLERANCE)
        for is_vendor in choices:
            for out in self.outs:
                out.fill_(torch.nan)
            self.run(self.sets[0], is_vendor)
            for index, (product, weight) in enumerate(
                zip(self.products, self.sets[0], strict=True)
            ):
                coded = (self.whole if is_vendor[index] else self.grouped)[index]
                _compare(agreement, product, coded, weight, self.outs[index])
        return agreement


def _layer_case(
    model: str, products: Sequence[Product], rows: int, device: str, *, has_codes: bool = True
) -> Case:
    layer = _Layer(products, rows, device, has_codes=has_codes)
    chosen = layer.chosen()
    own, library = [False] * len(products), [True] * len(products)
    read = float(layer.num_codes + sum(x.numel() for x in layer.plain))
    written = float(sum(out.nbytes for out in layer.outs))
    flops = 2.0 * rows * layer.num_codes
    judges: dict[str, Limit | None] = {}
    if has_codes:
        judges = {OWN: CHOICE, VENDOR: CHOICE}
    goal = formula = None
    if model == "SDAR-8B":
        judges[PEER] = (LAYER_OF_PLAIN if has_codes else PRODUCTS_OF_PLAIN).get(rows)
        goal = LAYER_GOALS.get(rows) if has_codes else None
        if has_codes and rows >= PROMPT_ROWS:
            formula = PROMPT_FACTOR * 1e6 * flops / NOMINAL_PRODUCTS["e4m3"]
    return Case(
        "quant", "linear_scaled of a layer" if has_codes else "linear_scaled, products of a layer",
        f"{model}, {rows} rows", [lambda s=s: layer.run(s, chosen) for s in layer.sets],
        lambda: layer.check([chosen, own, library]), read, written, flops,
        len(layer.sets) * float(layer.num_codes) + written, "e4m3",
        peers={
            PEER: [lambda s=s: layer.run_plain(s) for s in layer.plain_sets],
            OWN: [lambda s=s: layer.run(s, own) for s in layer.sets],
            VENDOR: [lambda s=s: layer.run(s, library) for s in layer.sets],
        },
        judges={name: limit for name, limit in judges.items() if limit is not None},
        formula_us=formula, goal_us=goal,
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """Products of e4m3 codes of two models, and int8 ones of a layer of the larger."""
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


def layer_cases(device: str, is_small: bool) -> Iterator[Case]:
    """All products of a layer, where the layers choose between two kinds."""
    if is_small or not ops.has_hopper_kernels(torch.device(device)):
        return
    for model, products in MODELS.items():
        of_layer = [product for product in products if product.name in LAYER]
        yield _layer_case(model, of_layer, 32, device, has_codes=False)
        for rows in LAYER_ROWS:
            yield _layer_case(model, of_layer, rows, device)
