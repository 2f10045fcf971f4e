# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the whole op, without the router. T tokens, E experts, K per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex import ops
from kernel_bench import peers
from kernel_bench.agreement import Agreement, Tolerance
from kernel_bench.ceilings import NOMINAL_BANDWIDTH, NOMINAL_PRODUCTS
from kernel_bench.report import Case

if TYPE_CHECKING:
    from collections.abc import Iterator


#: Numbers of tokens that a layer is timed with.
TOKENS = (4, 32, 128, 512, 2048, 8192)
ACTIVATIONS: dict[ops.Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    ops.Activation.SILU: functional.silu,
    ops.Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Experts:
    """The expert layer of one model."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    inner: int
    act: ops.Activation = ops.Activation.SILU
    tokens: tuple[int, ...] = TOKENS

    def activated(self, both: torch.Tensor) -> torch.Tensor:
        """What `act` makes of gate and up [n, 2 I]."""
        gate, up = both.chunk(2, -1)
        return ACTIVATIONS[self.act](gate) * up


MODELS = (
    Experts("LLaDA2-mini", 256, 8, 2048, 512),
    Experts("SDAR-30B-A3B", 128, 8, 2048, 768),
    Experts("LLaDA2-flash", 256, 8, 4096, 1024),
    # One canvas and eight.
    Experts("DiffusionGemma", 128, 8, 2816, 704, ops.Activation.GELU_TANH, (256, 2048)),
)
#: Activations between the products and the parts of each expert are rounded, too.
TOLERANCE = Tolerance(2.0**-8, 0.03)
#: Times the larger of bytes at a copy's speed and operations at 790 TFLOP/s, up to so many tokens.
ALLOWED = {128: 1.08, 512: 1.12, 2048: 1.25, 8192: 1.5}
#: Microseconds that were set for some models and tokens of uniform routing, and stand for the above.
GOALS = {("LLaDA2-mini", 8192): 830.0}
LAUNCHES_US = 8.0
#: Largest relative difference between our output and that of a peer.
PEER_TOLERANCE = 1e-2


def uniform_routes(tokens: int, model: Experts, device: str) -> torch.Tensor:
    """[T, K] distinct experts, all alike."""
    return torch.rand(tokens, model.num_experts, device=device).topk(model.top_k).indices.int()


def block_routes(tokens: int, model: Experts, device: str) -> torch.Tensor:
    """Each block of 32 tokens draws 60 % of its slots from 8 experts of its own."""
    blocks = -(-tokens // 32)
    favoured = torch.rand(blocks, model.num_experts, device=device).topk(8).indices
    scores = torch.rand(blocks, 32, model.num_experts, device=device)
    chosen = torch.rand(blocks, 32, 8, device=device) < 0.6 * model.top_k / 8
    bonus = torch.zeros_like(scores)
    bonus.scatter_(2, favoured[:, None, :].expand(-1, 32, -1), chosen.float())
    routes = (scores + bonus).flatten(0, 1).topk(model.top_k).indices.int()
    return routes[:tokens].contiguous()


def zipf_routes(tokens: int, model: Experts, device: str) -> torch.Tensor:
    """Expert of rank r is drawn with weight 1 / r, without repetition within a token."""
    ranks = torch.randperm(model.num_experts, device=device) + 1
    exponentials = torch.empty(tokens, model.num_experts, device=device).exponential_()
    return (exponentials * ranks).topk(model.top_k, largest=False).indices.int()


ROUTINGS = {"uniform": uniform_routes, "block": block_routes, "zipf": zipf_routes}


class Layer:
    """Weights of one layer; large models are one set, since they exceed the cache by far."""

    def __init__(self, model: Experts, device: str) -> None:
        def weight(*sizes: int) -> torch.Tensor:
            return torch.empty(*sizes, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)

        self.model = model
        self.w13 = weight(model.num_experts, 2 * model.inner, model.hidden)
        self.w2 = weight(model.num_experts, model.hidden, model.inner)


def _check(layer: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Agreement:
    """Every element of every token, expert by expert in float64."""
    out = ops.fused_moe(x, layer.w13, layer.w2, weights, ids, act=layer.model.act)
    exact = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        both = x[rows].double() @ layer.w13[expert].double().T
        part = layer.model.activated(both) @ layer.w2[expert].double().T
        exact.index_add_(0, rows, part * weights[rows, slots].double()[:, None])
    agreement = Agreement(out.numel(), TOLERANCE)
    agreement.add(out, exact)
    return agreement


def _peers(
    layer: Layer, x: torch.Tensor, weights: torch.Tensor, routes: list[torch.Tensor]
) -> tuple[dict[str, list[Callable[[], object]]], dict[str, str]]:
    """Other implementations of the whole op, and those that cannot be run."""
    found: dict[str, list[Callable[[], object]]] = {}
    absent = {"FlashInfer fused MoE": peers.flashinfer_fused_moe()}
    ours = ops.fused_moe(x, layer.w13, layer.w2, weights, routes[0], act=layer.model.act).double()
    candidates = {"torch grouped_mm": peers.torch_grouped_experts(layer.model.activated)}
    if layer.model.act == ops.Activation.SILU:
        candidates["vLLM Triton"] = peers.vllm_fused_experts()
    for name, (experts, reason) in candidates.items():
        if experts is None:
            absent[name] = reason
            continue
        try:
            theirs = experts(x, layer.w13, layer.w2, weights, routes[0]).double()
            difference = float((theirs - ours).norm() / ours.norm())
        except Exception as error:  # a peer may not support a shape
            absent[name] = f"{type(error).__name__}: {error}"[:120]
            continue
        if not difference <= PEER_TOLERANCE:
            absent[name] = f"not timed: its output differs from ours by {difference:.1e}"
            continue
        found[name] = [
            lambda ids=ids, experts=experts: experts(x, layer.w13, layer.w2, weights, ids)
            for ids in routes
        ]
    return found, absent


def formula_us(num_bytes: float, flops: float) -> float:
    """The launches, and 80 % of the bandwidth or 550 TFLOP/s."""
    return LAUNCHES_US + 1e6 * max(num_bytes / (0.8 * NOMINAL_BANDWIDTH), flops / 550e12)


def goal_us(num_bytes: float, flops: float, tokens: int) -> float:
    """The launches, and a factor on what the device needs at least."""
    least = 1e6 * max(num_bytes / NOMINAL_BANDWIDTH, flops / NOMINAL_PRODUCTS["bfloat16"])
    allowed = next(factor for most, factor in ALLOWED.items() if tokens <= most)
    return LAUNCHES_US + allowed * least


def _case(layer: Layer, tokens: int, routing: str, device: str) -> Case:
    model = layer.model
    # A few routings in turn, so that no call finds the experts of the last one in the cache.
    count = 4 if tokens <= 128 else 1
    routes = [ROUTINGS[routing](tokens, model, device) for _ in range(count)]
    weights = torch.rand(tokens, model.top_k, device=device)
    weights /= weights.sum(-1, keepdim=True)
    x = torch.randn(tokens, model.hidden, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)
    space = ops.new_fused_moe_workspace(x, model.top_k, layer.w13)
    calls: list[Callable[[], object]] = [
        lambda ids=ids: ops.fused_moe(
            x, layer.w13, layer.w2, weights, ids, out=out, workspace=space, act=model.act
        )
        for ids in routes
    ]
    hit = sum(int(ids.unique().numel()) for ids in routes) / count
    one_expert = 3 * model.inner * model.hidden * 2.0
    read, written = hit * one_expert + x.nbytes, float(x.nbytes)
    flops = 6.0 * tokens * model.top_k * model.hidden * model.inner
    found, absent = _peers(layer, x, weights, routes)
    goal = GOALS.get((model.name, tokens)) if routing == "uniform" else None
    busiest = max(int(torch.bincount(ids.flatten()).max()) for ids in routes)
    return Case(
        "moe", f"fused_moe {routing}", f"{model.name}, {tokens} tokens", calls,
        lambda: _check(layer, x, weights, routes[0]), read, written, flops,
        int(torch.cat(routes).unique().numel()) * one_expert + 2 * x.nbytes,
        peers=found, absent=absent, formula_us=formula_us(read + written, flops),
        goal_us=goal or goal_us(read + written, flops, tokens),
        note=f"{hit:.1f} experts hit, at most {busiest} rows",
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """Every model and token count; uniform, block-correlated and skewed routing."""
    models = (Experts("tiny", 8, 2, 64, 32),) if is_small else MODELS
    for model in models:
        layer = Layer(model, device)
        for tokens in (3,) if is_small else model.tokens:
            yield _case(layer, tokens, "uniform", device)
            if 4 < tokens <= 512:
                yield _case(layer, tokens, "block", device)
            if is_small or tokens in {32, 512, 8192}:
                yield _case(layer, tokens, "zipf", device)
        del layer
