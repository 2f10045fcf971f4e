# SPDX-License-Identifier: Apache-2.0
"""Products with weights of 8 and 4 bits, and experts of e4m3 codes and of 4 bits, beside those of bfloat16; and ops
that write codes of their result, beside the two launches whose place they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex import ops
from diffulex.quantization import vendor
from kernel_bench.agreement import Agreement, Tolerance
from kernel_bench.attention import Buffers, Problem, Shape
from kernel_bench.linear import CHECKED_COLUMNS, MODELS, ROWS, Product
from kernel_bench.moe import MODELS as EXPERT_MODELS
from kernel_bench.moe import TOKENS, Experts, Layer, uniform_routes
from kernel_bench.nibbles import nibble_cases
from kernel_bench.report import Case
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PEER = "bfloat16"
#: What the layers take in place of `linear_scaled` for some products of many rows of codes.
VENDOR = "vendor's library"
OWN = "linear_scaled alone"
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
#: Rows from which on the library is a peer.
MANY_ROWS = 65
#: The products of a layer, and the rows for which either kind of them may be faster.
LAYER = ("qkv", "o", "gate and up, silu", "down", "shared gate and up, silu", "shared down")
LAYER_ROWS = (128, 160, 192, 256, 512)
SCHEMES = {
    "fp8": (ops.WeightScheme.FP8, torch.float8_e4m3fn),
    "int8": (ops.WeightScheme.INT8, torch.int8),
}
#: A bfloat16 result of sums that keep about 14 bits of 128 products.
TOLERANCE = Tolerance(2.0**-6, 0.02)
#: Beside that, codes of activated values that are one apart.
EXPERT_TOLERANCE = Tolerance(2.0**-6, 0.1)
#: Rounding to e4m3, half a unit in the last of 4 places, and to multiples of 2^-9 of the scale.
CODES = Tolerance(2.0**-4, 0.005)


def _compare(
    agreement: Agreement,
    product: Product,
    coded: ops.QuantizedRows,
    weight: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Adds a product of codes with scales a row of W, a part of its columns at a time."""
    rows = _values(coded)

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

    def many(weight: tuple[torch.Tensor, torch.Tensor]) -> None:
        vendor.multiply(whole, *weight, None, both if product.is_gated else out)
        if product.is_gated:
            ops.act_and_mul(both, out=out)

    whole = ops.quantize_rows(x, code, group=depth)
    peers = {PEER: [lambda w=w: peer(w) for w in plain]}
    if vendor.own_rows(kind, weights[0][0]) is not None and vendor.takes_rows(
        kind, x, MANY_ROWS - 1
    ):
        peers[VENDOR] = [lambda w=w: many(w) for w in weights]

    def check() -> Agreement:
        out.fill_(torch.nan)
        call(weights[0])
        agreement = Agreement(out.numel(), TOLERANCE)
        _compare(agreement, product, codes, weights[0], out)
        return agreement

    num_bytes = float(weights[0][0].nbytes)
    return Case(
        "quant", f"linear_scaled {scheme}", f"{model} {product.name}, {rows} rows",
        [lambda w=w: call(w) for w in weights], check, num_bytes + codes.codes.nbytes,
        float(out.nbytes), 2.0 * rows * columns * depth,
        float(len(weights) * num_bytes + x.nbytes + out.nbytes),
        peers=peers, judges=(),
    )  # fmt: skip


class _CodedExperts:
    """The experts of a layer as e4m3 codes with a scale a row, or as nibbles in groups of `group` columns."""

    def __init__(self, layer: Layer, group: int = 0) -> None:
        def coded(stack: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scheme = ops.WeightScheme.INT4 if group else ops.WeightScheme.FP8
            codes, scale = ops.quantize_weight(stack.flatten(0, 1), scheme, group=group)
            of_experts = scale.view(-1, *stack.shape[:2]).transpose(0, 1).contiguous()
            return codes.view(*stack.shape[:2], -1), of_experts if group else of_experts[:, 0]

        self.name = "int4" if group else "fp8"
        self.w13, self.w13_scale = coded(layer.w13)
        self.w2, self.w2_scale = coded(layer.w2)

    @property
    def bytes_of_one(self) -> float:
        """Of the codes and scales of an expert."""
        held = (self.w13, self.w13_scale, self.w2, self.w2_scale)
        return float(sum(tensor.nbytes for tensor in held)) / len(self.w13)

    def values(self, expert: int) -> tuple[torch.Tensor, ...]:
        stacks = ((self.w13, self.w13_scale), (self.w2, self.w2_scale))
        return tuple(self._values(codes[expert], scale[expert]) for codes, scale in stacks)

    def _values(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self.name == "fp8":
            return codes.double() * scale.double()[:, None]
        nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).float()
        wide = scale.float().T.repeat_interleave(nibbles.size(1) // len(scale), 1)
        return ((nibbles - 8) * wide).bfloat16().double()

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as products take them, in float64."""
        return _rounded(rows) if self.name == "fp8" else rows.bfloat16().double()


def _values(coded: ops.QuantizedRows) -> torch.Tensor:
    """What rows of codes say, in float64."""
    num_rows, depth = coded.codes.shape
    group = depth if len(coded.scale) == 1 else ops.QUANT_GROUP
    scale = coded.scale[:, :num_rows].double().T.repeat_interleave(group, 1)
    return coded.codes.double() * scale[:, :depth]


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    """Rows as their codes say, in float64."""
    return _values(ops.quantize_rows(rows, torch.float8_e4m3fn))


def _codes_agreement(coded: ops.QuantizedRows, exact: torch.Tensor) -> Agreement:
    agreement = Agreement(coded.codes.numel(), CODES)
    agreement.add(_values(coded), exact)
    return agreement


def _layer_case(model: str, products: Sequence[Product], rows: int, device: str) -> Case:
    """All products of a layer in turn, with what the layers do beside them: codes of their rows are there,
    those behind the activation are made."""
    kind, code = SCHEMES["fp8"]
    sizes = [product.columns * product.depth for product in products]
    sets = [
        [
            ops.quantize_weight(
                torch.empty(p.columns, p.depth, dtype=torch.bfloat16, device=device).normal_(), kind
            )
            for p in products
        ]
        for _ in range(num_rotations(sum(sizes)))
    ]

    def memory(columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16, device=device)

    plain = [torch.randn(rows, p.depth, dtype=torch.bfloat16, device=device) for p in products]
    grouped = [ops.quantize_rows(x, code) for x in plain]
    whole = [ops.quantize_rows(x, code, group=x.size(1)) for x in plain]
    outs = [memory(p.columns // 2 if p.is_gated else p.columns) for p in products]
    both = [memory(p.columns) if p.is_gated else None for p in products]

    def run(weights: list[tuple[torch.Tensor, torch.Tensor]], is_vendor: list[bool]) -> None:
        for index, (product, weight) in enumerate(zip(products, weights, strict=True)):
            out, pair = outs[index], both[index]
            following = (index + 1) % len(products)
            after = (whole if is_vendor[following] else grouped)[following]
            if is_vendor[index]:
                vendor.multiply(whole[index], *weight, None, out if pair is None else pair)
                if pair is not None:
                    ops.act_and_mul(pair, out=out, rows=after)
                continue
            act = ops.Activation.SILU if product.is_gated else None
            ops.linear_scaled(grouped[index], *weight, act=act, out=out)
            if product.is_gated:
                ops.quantize_rows_into(out, after)

    own, library = [False] * len(products), [True] * len(products)
    limits = [vendor.own_rows(kind, weight) for weight, _ in sets[0]]
    chosen = [
        limit is not None and vendor.takes_rows(kind, x, limit)
        for limit, x in zip(limits, plain, strict=True)
    ]

    def check() -> Agreement:
        agreement = Agreement(3 * sum(out.numel() for out in outs), TOLERANCE)
        for is_vendor in (chosen, own, library):
            for out in outs:
                out.fill_(torch.nan)
            run(sets[0], is_vendor)
            for index, (product, weight) in enumerate(zip(products, sets[0], strict=True)):
                coded = (whole if is_vendor[index] else grouped)[index]
                _compare(agreement, product, coded, weight, outs[index])
        return agreement

    read = float(sum(sizes) + sum(rows * product.depth for product in products))
    written = float(sum(out.nbytes for out in outs))
    return Case(
        "quant", "linear_scaled of a layer", f"{model}, {rows} rows",
        [lambda s=s: run(s, chosen) for s in sets], check, read, written,
        2.0 * rows * sum(sizes), len(sets) * float(sum(sizes)) + written,
        peers={
            OWN: [lambda s=s: run(s, own) for s in sets],
            VENDOR: [lambda s=s: run(s, library) for s in sets],
        },
        judges=(OWN, VENDOR), share=1.02, note="target 1.02 of the faster",
    )  # fmt: skip


def _experts_case(layer: Layer, coded: _CodedExperts, tokens: int, device: str) -> Case:
    """Bytes are those of the experts hit; a few routings in turn, as in the rows of bfloat16."""
    model = layer.model
    routes = [uniform_routes(tokens, model, device) for _ in range(4 if tokens <= 128 else 1)]
    weights = torch.rand(tokens, model.top_k, device=device)
    x = torch.randn(tokens, model.hidden, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)
    space = ops.new_fused_moe_workspace(x, model.top_k, coded.w13)

    def call(ids: torch.Tensor) -> None:
        ops.fused_moe(
            x, coded.w13, coded.w2, weights, ids, w13_scale=coded.w13_scale,
            w2_scale=coded.w2_scale, out=out, workspace=space,
        )  # fmt: skip

    def peer(ids: torch.Tensor) -> None:
        ops.fused_moe(x, layer.w13, layer.w2, weights, ids, out=out, workspace=space)

    def check() -> Agreement:
        out.fill_(torch.nan)
        call(routes[0])
        rows = coded.rounded(x)
        exact = torch.zeros(x.shape, dtype=torch.float64, device=device)
        for expert in routes[0].unique().tolist():
            mine, slots = (routes[0] == expert).nonzero(as_tuple=True)
            both, down = coded.values(expert)
            gate, up = (rows[mine] @ both.T).chunk(2, 1)
            part = coded.rounded((functional.silu(gate) * up).float()) @ down.T
            exact.index_add_(0, mine, part * weights[mine, slots].double()[:, None])
        agreement = Agreement(out.numel(), EXPERT_TOLERANCE)
        agreement.add(out, exact)
        return agreement

    hit = sum(int(ids.unique().numel()) for ids in routes) / len(routes)
    one_expert = coded.bytes_of_one
    touched = int(torch.cat(routes).unique().numel()) * one_expert
    return Case(
        "quant", f"fused_moe {coded.name}", f"{model.name}, {tokens} tokens",
        [lambda ids=ids: call(ids) for ids in routes], check, hit * one_expert + x.nbytes,
        float(out.nbytes), 6.0 * tokens * model.top_k * model.hidden * model.inner,
        touched + x.nbytes + out.nbytes,
        peers={PEER: [lambda ids=ids: peer(ids) for ids in routes]}, judges=(),
        note=f"{hit:.1f} experts hit",
    )  # fmt: skip


def _norm_case(rows: int, hidden: int, device: str) -> Case:
    sets = [
        torch.randn(2, rows, hidden, dtype=torch.bfloat16, device=device)
        for _ in range(num_rotations(9.0 * rows * hidden))
    ]
    weight = torch.randn(hidden, dtype=torch.bfloat16, device=device)
    coded = ops.new_quantized_rows(rows, hidden, torch.float8_e4m3fn, sets[0].device)

    def check() -> Agreement:
        x, residual = sets[0].clone()
        total = x.double() + residual.double()
        exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.double()
        ops.add_rms_norm(x, residual, weight, EPS, rows=coded)
        return _codes_agreement(coded, exact)

    def peer(x: torch.Tensor, residual: torch.Tensor) -> None:
        ops.add_rms_norm(x, residual, weight, EPS)
        ops.quantize_rows_into(x, coded)

    num_bytes = float(rows * hidden)
    return Case(
        "quant", "add_rms_norm with codes", f"{rows} x {hidden}",
        [lambda s=s: ops.add_rms_norm(*s, weight, EPS, rows=coded) for s in sets], check,
        4.0 * num_bytes, 5.0 * num_bytes, rotated_bytes=len(sets) * 4.0 * num_bytes,
        peers={TWO_LAUNCHES: [lambda s=s: peer(*s) for s in sets]}, judges=(TWO_LAUNCHES,),
    )  # fmt: skip


def _activation_case(rows: int, inner: int, device: str) -> Case:
    sets = [
        torch.randn(rows, 2 * inner, dtype=torch.bfloat16, device=device)
        for _ in range(num_rotations(7.0 * rows * inner))
    ]
    out = torch.empty(rows, inner, dtype=torch.bfloat16, device=device)
    coded = ops.new_quantized_rows(rows, inner, torch.float8_e4m3fn, out.device)

    def check() -> Agreement:
        gate, up = sets[0].double().chunk(2, -1)
        ops.act_and_mul(sets[0], out=out, rows=coded)
        return _codes_agreement(coded, functional.silu(gate) * up)

    num_bytes = float(rows * inner)
    return Case(
        "quant", "act_and_mul with codes", f"{rows} x {inner}",
        [lambda x=x: ops.act_and_mul(x, out=out, rows=coded) for x in sets], check,
        4.0 * num_bytes, 3.0 * num_bytes, rotated_bytes=len(sets) * 4.0 * num_bytes,
        peers={TWO_LAUNCHES: [
            lambda x=x: ops.quantize_rows_into(ops.act_and_mul(x, out=out), coded) for x in sets
        ]}, judges=(TWO_LAUNCHES,),
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
        judges=(ALONE,), share=1.02, note=f"target 1.02 of that {ALONE}",
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """Products of e4m3 codes and of 4 bits of two models, int8 ones of a layer of the larger, experts of e4m3
    codes and of 4 bits, and rows that become codes."""
    for shape in (Shape(2, 64, 32, 4, 2, page=16),) if is_small else ATTENTION:
        yield _attention_case(shape, device)
    for rows in (3,) if is_small else (32, 256, 8192):
        yield _norm_case(rows, 192 if is_small else 4096, device)
        yield _activation_case(rows, 192 if is_small else 12288, device)
    if device != "cpu":  # where experts of codes have no kernel
        for model in (Experts("tiny", 8, 2, 64, 32),) if is_small else EXPERT_MODELS[:2]:
            layer = Layer(model, device)
            for group in (0, 32 if is_small else 128):
                coded = _CodedExperts(layer, group)
                for tokens in (3,) if is_small else TOKENS:
                    yield _experts_case(layer, coded, tokens, device)
                del coded
            del layer
    yield from _product_cases(device, is_small)
    yield from nibble_cases(device, is_small)


def _product_cases(device: str, is_small: bool) -> Iterator[Case]:
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
    if device != "cpu" and ops.has_hopper_kernels(torch.device(device)):
        for model, products in MODELS.items():
            for rows in LAYER_ROWS:
                yield _layer_case(model, [p for p in products if p.name in LAYER], rows, device)
    for product in MODELS["SDAR-8B"][:-1]:
        for rows in (32, 256):
            yield _case("int8", "SDAR-8B", product, rows, device)
