# SPDX-License-Identifier: Apache-2.0
"""Norm, rotary, activation, routing and cache ops at 32 rows, and at sizes that fill the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex import ops
from diffulex.nn.experts import RoutedExperts
from kernel_bench.agreement import FLOAT32, Agreement, Tolerance
from kernel_bench.ceilings import NOMINAL_BANDWIDTH
from kernel_bench.report import Case, Limit
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EPS = 1e-6
#: Microseconds of the layers' router logits, by the number of rows.
ROUTER_GOALS = {8192: 25.0}


def _normal(*sizes: int, device: str) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device=device)


def _agreement(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Agreement:
    """Of bfloat16 outputs and their references."""
    agreement = Agreement(sum(out.numel() for out, _ in pairs))
    for out, exact in pairs:
        agreement.add(out, exact)
    return agreement


def _formula(num_bytes: float, small_us: float, rows: int) -> float:
    """Launch bound at few rows; 85 % of the bandwidth at many."""
    return small_us if rows <= 64 else small_us + num_bytes / (0.85 * NOMINAL_BANDWIDTH) * 1e6


def _norm_case(rows: int, hidden: int, device: str) -> Case:
    num_bytes = 8.0 * rows * hidden
    weight = _normal(hidden, device=device)
    sets = [
        (_normal(rows, hidden, device=device), _normal(rows, hidden, device=device))
        for _ in range(num_rotations(num_bytes))
    ]

    def check() -> Agreement:
        x, residual = (tensor.clone() for tensor in sets[0])
        total = x.double() + residual.double()
        exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.double()
        ops.add_rms_norm(x, residual, weight, EPS)
        return _agreement((x, exact), (residual, total))

    calls = [lambda x=x, r=r: ops.add_rms_norm(x, r, weight, EPS) for x, r in sets]
    return Case(
        "small", "add_rms_norm", f"{rows} x {hidden}", calls, check, num_bytes / 2, num_bytes / 2,
        rotated_bytes=len(sets) * num_bytes / 2, formula_us=_formula(num_bytes, 3.0, rows),
    )  # fmt: skip


def _rope_case(
    rows: int, device: str, q_heads: int = 32, kv_heads: int = 8, dim: int = 128
) -> Case:
    heads = q_heads + 2 * kv_heads
    read = 2.0 * rows * heads * dim
    written = 2.0 * rows * (q_heads + 3 * kv_heads) * dim
    num_bytes = read + written
    sets = [_normal(rows, heads * dim, device=device) for _ in range(num_rotations(num_bytes))]
    positions = torch.randint(0, 4096, (rows,), device=device, dtype=torch.int32)
    angles = torch.rand(4096, dim // 2, device=device) * 6.28
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    weights = [_normal(dim, device=device) for _ in range(2)]
    pages = -(-rows // 32) + 1
    caches = [_normal(pages, 32, kv_heads, dim, device=device) for _ in range(2)]
    slots = torch.randperm(pages * 32, device=device)[:rows].int()

    def call(qkv: torch.Tensor) -> None:
        ops.qk_norm_rope_store(
            qkv, positions, cos_sin, *weights, *caches, slots, num_q_heads=q_heads,
            num_kv_heads=kv_heads, head_dim=dim, eps=EPS,
        )  # fmt: skip

    def check() -> Agreement:
        qkv = sets[0].clone()
        call(qkv)
        old = sets[0].double().view(rows, heads, dim)
        parts = []
        for part, weight in zip((old[:, :q_heads], old[:, q_heads : q_heads + kv_heads]), weights):
            normed = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + EPS)
            normed = normed * weight.double()
            cosine, sine = cos_sin[positions.long()].double()[:, None].chunk(2, -1)
            low, high = normed.chunk(2, -1)
            parts.append(torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1))
        exact = torch.cat((*parts, old[:, q_heads + kv_heads :]), 1)
        stored = caches[0].view(-1, kv_heads, dim)[slots.long()]
        values = caches[1].view(-1, kv_heads, dim)[slots.long()]
        return _agreement(
            (qkv.view(rows, heads, dim), exact),
            (stored, exact[:, q_heads : q_heads + kv_heads]),
            (values, exact[:, q_heads + kv_heads :]),
        )

    calls = [lambda qkv=qkv: call(qkv) for qkv in sets]
    return Case(
        "small", "qk_norm_rope_store", f"{rows} x {q_heads}/{kv_heads} x {dim}", calls, check,
        read, written, rotated_bytes=len(sets) * read + 4.0 * rows * kv_heads * dim,
        formula_us=_formula(num_bytes, 3.0, rows),
    )  # fmt: skip


def _activation_case(rows: int, inner: int, device: str) -> Case:
    num_bytes = 6.0 * rows * inner
    sets = [_normal(rows, 2 * inner, device=device) for _ in range(num_rotations(num_bytes))]
    out = torch.empty(rows, inner, dtype=torch.bfloat16, device=device)

    def check() -> Agreement:
        ops.act_and_mul(sets[0], out=out.fill_(float("nan")))
        gate, up = sets[0].double().chunk(2, -1)
        return _agreement((out, functional.silu(gate) * up))

    calls = [lambda x=x: ops.act_and_mul(x, out=out) for x in sets]
    return Case(
        "small", "act_and_mul", f"{rows} x {inner}", calls, check, 4.0 * rows * inner,
        2.0 * rows * inner, rotated_bytes=4.0 * len(sets) * rows * inner + out.nbytes,
        formula_us=_formula(num_bytes, 2.5, rows),
    )  # fmt: skip


def _routing_cases(rows: int, experts: int, top_k: int, device: str) -> Iterator[Case]:
    sets = [torch.randn(rows, experts, device=device) for _ in range(8)]
    out = ops.moe_topk(sets[0], top_k)

    def check() -> Agreement:
        ops.moe_topk(sets[0], top_k, out=out)
        values, ids = torch.softmax(sets[0].double(), -1).topk(top_k)
        agreement = Agreement(2 * out.ids.numel(), Tolerance(1e-5))
        agreement.claim(out.ids.long() == ids)
        agreement.add(out.weights, values / values.sum(-1, keepdim=True))
        return agreement

    calls: list[Callable[[], object]] = [lambda x=x: ops.moe_topk(x, top_k, out=out) for x in sets]
    yield Case(
        "small", "moe_topk", f"{rows} x {experts}, top {top_k}", calls, check, 4.0 * rows * experts,
        8.0 * rows * top_k, rotated_bytes=4.0 * len(sets) * rows * experts, formula_us=4.0,
    )  # fmt: skip
    permutation = ops.moe_permute(out.ids, experts, 16)

    def check_permute() -> Agreement:
        done = ops.moe_permute(out.ids, experts, 16, out=permutation)
        order = torch.sort(out.ids.flatten().long(), stable=True).indices
        agreement = Agreement(order.numel())
        agreement.claim(done.sorted_slots.long() == order)
        return agreement

    yield Case(
        "small", "moe_permute", f"{rows} x {top_k} of {experts}",
        [lambda: ops.moe_permute(out.ids, experts, 16, out=permutation)], check_permute,
        4.0 * rows * top_k, 4.0 * rows * top_k, rotated_bytes=8.0 * rows * top_k, formula_us=5.0,
    )  # fmt: skip


def _router_case(
    rows: int, experts: int, hidden: int, device: str, *, is_layer: bool = False
) -> Case:
    """The op alone, or what the layers run in its place."""
    read, written = 2.0 * (rows + experts) * hidden, 4.0 * rows * experts
    sets = [
        (_normal(rows, hidden, device=device), _normal(experts, hidden, device=device))
        for _ in range(num_rotations(read + written))
    ]
    out = torch.empty(rows, experts, device=device)
    layer = RoutedExperts()

    def call(x: torch.Tensor, w: torch.Tensor) -> None:
        if is_layer:
            layer.router_logits(x, w, out)
        else:
            ops.router_gemm(x, w, out=out)

    def check() -> Agreement:
        x, w = sets[0]
        out.fill_(float("nan"))
        call(x, w)
        agreement = Agreement(out.numel(), FLOAT32)
        agreement.add(out, x.double() @ w.double().T)
        return agreement

    peers: dict[str, list[Callable[[], object]]] = {}
    if device == "cuda":
        peers["torch.mm"] = [
            lambda x=x, w=w: torch.mm(x, w.T, out_dtype=torch.float32) for x, w in sets
        ]
    return Case(
        "small", "router logits of a layer" if is_layer else "router_gemm",
        f"{rows} x {experts} x {hidden}", [lambda x=x, w=w: call(x, w) for x, w in sets], check,
        read, written, 2.0 * rows * experts * hidden, rotated_bytes=len(sets) * read + written,
        peers=peers, judges={} if is_layer else {"torch.mm": Limit()},
        goal_us=ROUTER_GOALS.get(rows) if is_layer else None,
    )  # fmt: skip


def _store_case(rows: int, device: str, heads: int = 8, dim: int = 128) -> Case:
    num_bytes = 8.0 * rows * heads * dim
    pages = -(-rows // 32) + 1
    sets = [
        tuple(_normal(rows, heads, dim, device=device) for _ in range(2))
        for _ in range(num_rotations(num_bytes))
    ]
    caches = [_normal(pages, 32, heads, dim, device=device) for _ in range(2)]
    slots = torch.randperm(pages * 32, device=device)[:rows].int()

    def check() -> Agreement:
        ops.store_kv_cache(*sets[0], *caches, slots)
        agreement = Agreement(2 * rows * heads * dim)
        for cache, stored in zip(caches, sets[0]):
            agreement.claim(cache.view(-1, heads, dim)[slots.long()] == stored)
        return agreement

    calls = [lambda part=part: ops.store_kv_cache(*part, *caches, slots) for part in sets]
    return Case(
        "small", "store_kv_cache", f"{rows} x {heads} x {dim}", calls, check, num_bytes / 2,
        num_bytes / 2, rotated_bytes=(len(sets) + 1) * num_bytes / 2,
        formula_us=3.0 if rows <= 64 else 22.0,
    )  # fmt: skip


def cases(device: str, is_small: bool) -> Iterator[Case]:
    """32 rows and 8,192 rows of the SDAR-8B shape; routing of LLaDA2-mini."""
    row_counts = (3,) if is_small else (32, 8192)
    hidden, inner = (64, 96) if is_small else (4096, 12288)
    for rows in row_counts:
        yield _norm_case(rows, hidden, device)
        yield _rope_case(rows, device, *((4, 2, 64) if is_small else ()))
        yield _activation_case(rows, inner, device)
        yield _store_case(rows, device, *((2, 64) if is_small else ()))
    for rows in row_counts if is_small else (32, 256, 8192):
        sizes = (8, 64) if is_small else (256, 2048)
        yield _router_case(rows, *sizes, device)
        yield _router_case(rows, *sizes, device, is_layer=True)
    yield from _routing_cases(
        3 if is_small else 32, 8 if is_small else 256, 2 if is_small else 8, device
    )
