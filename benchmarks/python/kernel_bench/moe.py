# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the whole op, without the router. T tokens, E experts, K per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex import ops
from kernel_bench import peers
from kernel_bench.report import Case, floor_us, relative_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class Experts:
    """The expert layer of one model."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    inner: int


MODELS = (
    Experts("LLaDA2-mini", 256, 8, 2048, 512),
    Experts("SDAR-30B-A3B", 128, 8, 2048, 768),
    Experts("LLaDA2-flash", 256, 8, 4096, 1024),
)
TOKENS = (4, 32, 128, 512, 2048, 8192)
#: Fraction over the floor that the issue allows, by number of tokens.
ALLOWED = {4: 1.08, 32: 1.08, 128: 1.08, 512: 1.12, 2048: 1.25, 8192: 1.5}
LAUNCHES_US = 8.0


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


class Layer:
    """Weights of one layer; large models are one set, since they exceed the cache by far."""

    def __init__(self, model: Experts, device: str) -> None:
        def weight(*sizes: int) -> torch.Tensor:
            return torch.empty(*sizes, dtype=torch.bfloat16, device=device).normal_(0.0, 0.02)

        self.model = model
        self.w13 = weight(model.num_experts, 2 * model.inner, model.hidden)
        self.w2 = weight(model.num_experts, model.hidden, model.inner)


def _check(layer: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> float:
    out = ops.fused_moe(x, layer.w13, layer.w2, weights, ids)
    if not bool(torch.isfinite(out).all()):
        return float("nan")
    rows = sorted({0, x.size(0) // 2, x.size(0) - 1})
    inner = layer.model.inner
    exact = torch.zeros(len(rows), layer.model.hidden, dtype=torch.float64, device=x.device)
    for index, row in enumerate(rows):
        for slot, expert in enumerate(ids[row].tolist()):
            both = layer.w13[expert].double() @ x[row].double()
            product = functional.silu(both[:inner]) * both[inner:]
            part = layer.w2[expert].double() @ product
            exact[index] += weights[row, slot].double() * part
    return relative_error(out[rows], exact)


def _case(layer: Layer, tokens: int, routing: str, device: str) -> Case:
    model = layer.model
    make = uniform_routes if routing == "uniform" else block_routes
    # A few routings in turn, so that no call finds the experts of the last one in the cache.
    count = 4 if tokens <= 128 else 1
    routes = [make(tokens, model, device) for _ in range(count)]
    weights = torch.rand(tokens, model.top_k, device=device)
    weights /= weights.sum(-1, keepdim=True)
    x = torch.randn(tokens, model.hidden, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(x)
    space = ops.new_fused_moe_workspace(x, model.top_k, layer.w13)
    calls: list[Callable[[], object]] = [
        lambda ids=ids: ops.fused_moe(
            x, layer.w13, layer.w2, weights, ids, out=out, workspace=space
        )
        for ids in routes
    ]
    hit = sum(int(ids.unique().numel()) for ids in routes) / count
    num_bytes = hit * 3 * model.inner * model.hidden * 2.0 + 4.0 * tokens * model.hidden
    flops = 6.0 * tokens * model.top_k * model.hidden * model.inner
    found: dict[str, list[Callable[[], object]]] = {}
    absent: dict[str, str] = {}
    experts, reason = peers.vllm_fused_experts()
    if experts is None:
        absent["vLLM Triton"] = reason
    else:
        found["vLLM Triton"] = [
            lambda ids=ids: experts(x, layer.w13, layer.w2, weights, ids) for ids in routes
        ]
    bound = ALLOWED.get(tokens, 1.5) * floor_us(num_bytes, flops) + LAUNCHES_US
    return Case(
        "moe", f"fused_moe {routing}", f"{model.name}, {tokens} tokens", calls,
        lambda: _check(layer, x, weights, routes[0]), 1e-2, num_bytes, flops,
        peers=found, absent=absent, target=lambda _: bound, note=f"{hit:.1f} experts hit",
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """Every model and token count, uniform and block-correlated routing."""
    models = (Experts("tiny", 8, 2, 64, 32),) if is_small else MODELS
    for model in models:
        layer = Layer(model, device)
        for tokens in (3,) if is_small else TOKENS:
            yield _case(layer, tokens, "uniform", device)
            if 4 < tokens <= 512:
                yield _case(layer, tokens, "block", device)
        del layer
