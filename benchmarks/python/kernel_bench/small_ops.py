# SPDX-License-Identifier: Apache-2.0
"""Norm, rotary, activation, routing and cache ops at 32 rows, and at sizes that fill the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from diffulex import ops
from kernel_bench.report import Case, relative_error
from kernel_bench.timing import num_rotations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EPS = 1e-6


def _normal(*sizes: int, device: str) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device=device)


def _target(num_bytes: float, small_us: float, rows: int) -> float:
    """Launch bound at few rows; 85 % of the bandwidth at many."""
    return small_us if rows <= 64 else small_us + num_bytes / (0.85 * 4.3e12) * 1e6


def _norm_case(rows: int, hidden: int, device: str) -> Case:
    num_bytes = 8.0 * rows * hidden
    weight = _normal(hidden, device=device)
    sets = [
        (_normal(rows, hidden, device=device), _normal(rows, hidden, device=device))
        for _ in range(num_rotations(num_bytes))
    ]

    def check() -> float:
        x, residual = (tensor.clone() for tensor in sets[0])
        total = x.double() + residual.double()
        exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight.double()
        ops.add_rms_norm(x, residual, weight, EPS)
        return max(relative_error(x, exact), relative_error(residual, total))

    calls = [lambda x=x, r=r: ops.add_rms_norm(x, r, weight, EPS) for x, r in sets]
    return Case(
        "small", "add_rms_norm", f"{rows} x {hidden}", calls, check, 1e-2, num_bytes,
        target=lambda _: _target(num_bytes, 3.0, rows),
    )  # fmt: skip


def _rope_case(
    rows: int, device: str, q_heads: int = 32, kv_heads: int = 8, dim: int = 128
) -> Case:
    heads = q_heads + 2 * kv_heads
    num_bytes = 4.0 * rows * (q_heads + kv_heads) * dim + 6.0 * rows * kv_heads * dim
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

    def check() -> float:
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
        return max(
            relative_error(qkv.view(rows, heads, dim), exact),
            relative_error(stored, exact[:, q_heads : q_heads + kv_heads]),
            relative_error(values, exact[:, q_heads + kv_heads :]),
        )

    calls = [lambda qkv=qkv: call(qkv) for qkv in sets]
    return Case(
        "small", "qk_norm_rope_store", f"{rows} x {q_heads}/{kv_heads} x {dim}", calls, check,
        1e-2, num_bytes, target=lambda _: _target(num_bytes, 3.0, rows),
    )  # fmt: skip


def _activation_case(rows: int, inner: int, device: str) -> Case:
    num_bytes = 6.0 * rows * inner
    sets = [_normal(rows, 2 * inner, device=device) for _ in range(num_rotations(num_bytes))]
    out = torch.empty(rows, inner, dtype=torch.bfloat16, device=device)

    def check() -> float:
        ops.act_and_mul(sets[0], out=out)
        gate, up = sets[0].double().chunk(2, -1)
        return relative_error(out, functional.silu(gate) * up)

    calls = [lambda x=x: ops.act_and_mul(x, out=out) for x in sets]
    return Case(
        "small", "act_and_mul", f"{rows} x {inner}", calls, check, 1e-2, num_bytes,
        target=lambda _: _target(num_bytes, 2.5, rows),
    )  # fmt: skip


def _routing_cases(rows: int, experts: int, top_k: int, device: str) -> Iterator[Case]:
    sets = [torch.randn(rows, experts, device=device) for _ in range(8)]
    out = ops.moe_topk(sets[0], top_k)

    def check() -> float:
        ops.moe_topk(sets[0], top_k, out=out)
        values, ids = torch.softmax(sets[0].double(), -1).topk(top_k)
        if not torch.equal(out.ids.long(), ids):
            return float("nan")
        return relative_error(out.weights, values / values.sum(-1, keepdim=True))

    calls: list[Callable[[], object]] = [lambda x=x: ops.moe_topk(x, top_k, out=out) for x in sets]
    yield Case(
        "small", "moe_topk", f"{rows} x {experts}, top {top_k}", calls, check, 1e-5,
        4.0 * rows * experts, target=lambda _: 4.0,
    )  # fmt: skip
    permutation = ops.moe_permute(out.ids, experts, 16)

    def check_permute() -> float:
        done = ops.moe_permute(out.ids, experts, 16, out=permutation)
        order = torch.sort(out.ids.flatten().long(), stable=True).indices
        return 0.0 if torch.equal(done.sorted_slots.long(), order) else float("nan")

    yield Case(
        "small", "moe_permute", f"{rows} x {top_k} of {experts}",
        [lambda: ops.moe_permute(out.ids, experts, 16, out=permutation)], check_permute, 0.0,
        8.0 * rows * top_k, target=lambda _: 5.0,
    )  # fmt: skip


def _router_case(rows: int, experts: int, hidden: int, device: str) -> Case:
    num_bytes = 2.0 * (rows + experts) * hidden + 4.0 * rows * experts
    sets = [
        (_normal(rows, hidden, device=device), _normal(experts, hidden, device=device))
        for _ in range(num_rotations(num_bytes))
    ]
    out = torch.empty(rows, experts, device=device)

    def check() -> float:
        x, w = sets[0]
        ops.router_gemm(x, w, out=out.fill_(float("nan")))
        return relative_error(out, x.double() @ w.double().T)

    peers: dict[str, list[Callable[[], object]]] = {}
    if device == "cuda":
        peers["torch.mm"] = [
            lambda x=x, w=w: torch.mm(x, w.T, out_dtype=torch.float32) for x, w in sets
        ]
    return Case(
        "small", "router_gemm", f"{rows} x {experts} x {hidden}",
        [lambda x=x, w=w: ops.router_gemm(x, w, out=out) for x, w in sets], check, 1e-5,
        num_bytes, 2.0 * rows * experts * hidden, peers=peers,
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

    def check() -> float:
        ops.store_kv_cache(*sets[0], *caches, slots)
        got = [cache.view(-1, heads, dim)[slots.long()] for cache in caches]
        return 0.0 if all(map(torch.equal, got, sets[0])) else float("nan")

    calls = [lambda part=part: ops.store_kv_cache(*part, *caches, slots) for part in sets]
    return Case(
        "small", "store_kv_cache", f"{rows} x {heads} x {dim}", calls, check, 0.0, num_bytes,
        target=lambda _: 3.0 if rows <= 64 else 22.0,
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
        yield _router_case(rows, *((8, 64) if is_small else (256, 2048)), device)
    yield from _routing_cases(
        3 if is_small else 32, 8 if is_small else 256, 2 if is_small else 8, device
    )
