# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of e4m3 and int8 codes and of 4 bits, beside those of bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex import ops
from kernel_bench import peers
from kernel_bench.agreement import Agreement, Tolerance
from kernel_bench.ceilings import bandwidth_us
from kernel_bench.codes import nibble_values, rounded
from kernel_bench.moe import MODELS, Experts, Layer, uniform_routes
from kernel_bench.report import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PEER = "bfloat16"
GROUPED = "torch scaled grouped_mm"
#: Largest relative difference between our output and that of a peer, whose scales are of whole rows.
PEER_TOLERANCE = 0.08
#: A bfloat16 result of sums that keep about 14 bits of 128 products, and codes of activated values
#: that are one apart.
TOLERANCE = Tolerance(2.0**-6, 0.1)
#: Of the bandwidth, what portable kernels reach with up to so many tokens.
PORTABLE_SHARE, PORTABLE_TOKENS = 0.7, 32


class Scheme(NamedTuple):
    """How the experts are held."""

    weight: ops.WeightScheme
    #: Of the rows; None: bfloat16.
    code: torch.dtype | None
    #: Of the operands of its products, as the ceilings name them.
    operands: str
    group: int = 0


SCHEMES = {
    "fp8": Scheme(ops.WeightScheme.FP8, torch.float8_e4m3fn, "e4m3"),
    "int8": Scheme(ops.WeightScheme.INT8, torch.int8, "int8"),
    "int4": Scheme(ops.WeightScheme.INT4, None, "bfloat16", 128),
}
#: Models and tokens of the schemes that are not timed with all: experts of DiffusionGemma are 704
#: wide, which groups of 128 do not divide, and int8 has portable kernels alone.
SOME = {
    "int8": {"LLaDA2-mini": (4, 32)},
    "int4": {model.name: model.tokens for model in MODELS if model.name != "DiffusionGemma"},
}
#: Scheme -> model -> tokens -> microseconds of uniform routing.
GOALS = {
    "fp8": {
        "LLaDA2-mini": {4: 32, 32: 132, 128: 200, 512: 220, 2048: 290, 8192: 620},
        "SDAR-30B-A3B": {4: 44, 32: 136, 128: 158, 512: 178, 2048: 270, 8192: 760},
        "LLaDA2-flash": {4: 105, 32: 505, 128: 780, 512: 830, 2048: 1000, 8192: 2000},
        "DiffusionGemma": {256: 215},
    },
    "int4": {"LLaDA2-mini": {32: 80}, "LLaDA2-flash": {32: 280}},
}


class CodedExperts:
    """The experts of a layer in codes: a scale a row, or one for each group of columns of a row."""

    def __init__(self, layer: Layer, name: str) -> None:
        self.name, self.scheme = name, SCHEMES[name]
        self.w13, self.w13_scale = self._coded(layer.w13)
        self.w2, self.w2_scale = self._coded(layer.w2)
        #: As an engine holds them.
        self.operands = self.w13, self.w2
        group = self.scheme.group
        is_tileable = all(
            ops.is_tileable(*stack.shape[1:], group) for stack in (layer.w13, layer.w2)
        )
        if group and is_tileable and ops.has_hopper_kernels(layer.w13.device):
            w13, w2 = (ops.to_nibble_tiles(stack.clone()) for stack in self.operands)
            self.operands = w13, w2

    def _coded(self, stack: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scheme = self.scheme
        coded = [ops.quantize_weight(w, scheme.weight, group=scheme.group) for w in stack]
        return tuple(torch.stack(parts) for parts in zip(*coded, strict=True))

    @property
    def bytes_of_one(self) -> float:
        """Of the codes and scales of an expert."""
        held = (self.w13, self.w13_scale, self.w2, self.w2_scale)
        return float(sum(tensor.nbytes for tensor in held)) / len(self.w13)

    def values(self, expert: int) -> tuple[torch.Tensor, ...]:
        stacks = ((self.w13, self.w13_scale), (self.w2, self.w2_scale))
        return tuple(self._values(codes[expert], scale[expert]) for codes, scale in stacks)

    def _values(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self.scheme.group:
            return nibble_values(codes, scale)
        return codes.double() * scale.double()[:, None]

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as products take them, in float64."""
        code = self.scheme.code
        return rows.bfloat16().double() if code is None else rounded(rows, code)

    def grouped(
        self,
        model: Experts,
        x: torch.Tensor,
        weights: torch.Tensor,
        routes: list[torch.Tensor],
        ours: torch.Tensor,
    ) -> list[Callable[[], object]] | str:
        """Calls of torch's grouped products of codes, or why there are none; `ours`: of the first routing."""
        experts, reason = peers.torch_scaled_grouped_experts(model.activated)
        if experts is None:
            return reason
        held = (self.w13, self.w13_scale, self.w2, self.w2_scale)
        try:
            theirs = experts(x, *held, weights, routes[0]).double()
        except Exception as error:  # a device or a shape that they do not take
            return f"{type(error).__name__}: {error}"[:120]
        difference = float((theirs - ours.double()).norm() / theirs.norm())
        if not difference <= PEER_TOLERANCE:
            return f"not timed: its output differs from ours by {difference:.1e}"
        return [lambda ids=ids: experts(x, *held, weights, ids) for ids in routes]

    def exact(
        self, model: Experts, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """What the op should give, expert by expert."""
        rows = self.rounded(x)
        exact = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in ids.unique().tolist():
            mine, slots = (ids == expert).nonzero(as_tuple=True)
            both, down = self.values(expert)
            part = self.rounded(model.activated(rows[mine] @ both.T).float()) @ down.T
            exact.index_add_(0, mine, part * weights[mine, slots].double()[:, None])
        return exact


def _case(layer: Layer, coded: CodedExperts, tokens: int, device: str) -> Case:
    """Bytes are those of the experts hit; a few routings in turn, as in the rows of bfloat16."""
    model = layer.model
    routes = [uniform_routes(tokens, model, device) for _ in range(4 if tokens <= 128 else 1)]
    weights = torch.rand(tokens, model.top_k, device=device)
    x = torch.randn(tokens, model.hidden, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)
    space = ops.new_fused_moe_workspace(x, model.top_k, coded.w13)
    plain_space = ops.new_fused_moe_workspace(x, model.top_k, layer.w13)

    def call(ids: torch.Tensor) -> None:
        ops.fused_moe(
            x, *coded.operands, weights, ids, w13_scale=coded.w13_scale,
            w2_scale=coded.w2_scale, act=model.act, out=out, workspace=space,
        )  # fmt: skip

    def peer(ids: torch.Tensor) -> None:
        ops.fused_moe(
            x, layer.w13, layer.w2, weights, ids, act=model.act, out=out, workspace=plain_space
        )

    def check() -> Agreement:
        out.fill_(torch.nan)
        call(routes[0])
        agreement = Agreement(out.numel(), TOLERANCE)
        agreement.add(out, coded.exact(model, x, weights, routes[0]))
        return agreement

    found: dict[str, list[Callable[[], object]]] = {
        PEER: [lambda ids=ids: peer(ids) for ids in routes]
    }
    absent: dict[str, str] = {}
    if coded.name == "fp8":
        call(routes[0])
        grouped = coded.grouped(model, x, weights, routes, out)
        if isinstance(grouped, str):
            absent[GROUPED] = grouped
        else:
            found[GROUPED] = grouped
    hit = sum(int(ids.unique().numel()) for ids in routes) / len(routes)
    one_expert = coded.bytes_of_one
    touched = int(torch.cat(routes).unique().numel()) * one_expert
    read = hit * one_expert + x.nbytes
    is_portable = coded.name == "int8" and tokens <= PORTABLE_TOKENS
    return Case(
        "quant", f"fused_moe {coded.name}", f"{model.name}, {tokens} tokens",
        [lambda ids=ids: call(ids) for ids in routes], check, read, float(out.nbytes),
        6.0 * tokens * model.top_k * model.hidden * model.inner,
        touched + x.nbytes + out.nbytes, coded.scheme.operands,
        peers=found, absent=absent,
        formula_us=bandwidth_us(read, PORTABLE_SHARE) if is_portable else None,
        goal_us=GOALS.get(coded.name, {}).get(model.name, {}).get(tokens),
        note=f"{hit:.1f} experts hit",
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """Every model in e4m3, and some in the other schemes. On the CPU experts of codes are no stacks."""
    if is_small:
        return
    for model in MODELS:
        layer = Layer(model, device)
        for name in SCHEMES:
            counts = SOME[name].get(model.name, ()) if name in SOME else model.tokens
            coded = CodedExperts(layer, name) if counts else None
            for tokens in counts:
                yield _case(layer, coded, tokens, device)
            del coded
        del layer
