# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding and the fused norm + rotary (+ store) ops against fp64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from diffulex import ops
from fixtures.quick import quick
from reference import dense as oracles
from tolerance import assert_accurate, to_numpy

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
EPS = 1e-6
MAX_POSITION = 50000


@functools.cache
def angles(rotary_dim: int, device: str, theta: float = 1e6) -> torch.Tensor:
    """[MAX_POSITION, rotary_dim] fp32, computed in fp64."""
    frequencies = theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(MAX_POSITION, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angle.cos(), angle.sin()], 1).float().to(device)


def positions_of(num_tokens: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Out of order, repeated, with both ends of the table."""
    generator = torch.Generator().manual_seed(num_tokens)
    positions = torch.randint(0, MAX_POSITION, (num_tokens,), generator=generator)
    positions[:3] = torch.tensor([0, MAX_POSITION - 1, 0])
    return positions.to(dtype).to(device)


def plain_rotate(x: torch.Tensor, table: torch.Tensor, neox: bool) -> torch.Tensor:
    """Rotary in the dtype of x (heads [T, heads, D], table [T, rotary_dim])."""
    half = table.shape[1] // 2
    cos, sin = (part[:, None].to(x.dtype) for part in (table[:, :half], table[:, half:]))
    out = x.clone()
    pairs = (
        (slice(0, half), slice(half, 2 * half))
        if neox
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    first, second = x[..., pairs[0]], x[..., pairs[1]]
    out[..., pairs[0]] = first * cos - second * sin
    out[..., pairs[1]] = second * cos + first * sin
    return out


@pytest.mark.every(7)
@DTYPES
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    ("dim", "rotary_dim"), [(64, 64), (128, 64), (80, 32), (128, 128), (64, 0)]
)
@pytest.mark.parametrize(
    ("index", "flat"),
    quick(
        [(index, flat) for index in (torch.int32, torch.int64) for flat in (True, False)],
        [(torch.int32, False), (torch.int64, True)],
    ),
)
def test_rotary_embedding(
    device: str,
    dtype: torch.dtype,
    neox: bool,
    dim: int,
    rotary_dim: int,
    index: torch.dtype,
    flat: bool,
) -> None:
    num_tokens, q_heads, kv_heads = 7, 4, 2
    table = angles(rotary_dim, device)
    positions = positions_of(num_tokens, index, device)
    packed = torch.randn(num_tokens, (q_heads + 2 * kv_heads) * dim).to(dtype).to(device)
    before = packed.clone()
    q, k = packed[:, : q_heads * dim], packed[:, q_heads * dim : (q_heads + kv_heads) * dim]
    if not flat:
        q, k = (t.unflatten(1, (-1, dim)) for t in (q, k))
    ops.rotary_embedding(positions, q, k, table, head_dim=dim, neox=neox)
    rows = table[positions.long()]
    heads = before.view(num_tokens, -1, dim)
    turned = q_heads + kv_heads
    expected = oracles.rotate(to_numpy(heads[:, :turned]), to_numpy(rows), neox)
    base = plain_rotate(heads[:, :turned], rows, neox)
    actual = packed.view(num_tokens, -1, dim)
    assert_accurate(actual[:, :turned], expected, base)
    assert torch.equal(actual[:, turned:], heads[:, turned:])
    assert torch.equal(actual[..., rotary_dim:], heads[..., rotary_dim:])


def fused_expected(
    qkv: torch.Tensor,
    rows: torch.Tensor,
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    *,
    heads: tuple[int, int],
    dim: int,
    offset: float,
    neox: bool,
    norm_v: bool,
    v_from_raw_k: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """fp64 (q, k, v) of the fused op."""
    q_heads, kv_heads = heads
    x = to_numpy(qkv).reshape(qkv.shape[0], -1, dim)
    q, k = x[:, :q_heads], x[:, q_heads : q_heads + kv_heads]
    v = k if v_from_raw_k else x[:, q_heads + kv_heads :]
    if norm_v or v_from_raw_k:
        v = oracles.rms_norm(v, None, EPS, 0.0)
    q, k = (
        t if w is None else oracles.rms_norm(t, to_numpy(w), EPS, offset)
        for t, w in zip((q, k), weights)
    )
    table = to_numpy(rows)
    return oracles.rotate(q, table, neox), oracles.rotate(k, table, neox), v


def plain_norm(x: torch.Tensor, weight: torch.Tensor | None, offset: float) -> torch.Tensor:
    out = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)
    return out if weight is None else out * (weight.to(x.dtype) + offset)


VARIANTS = [
    {},
    {"neox": False},
    {"weights": "q"},
    {"weights": "none"},
    {"weights": "float32", "offset": 1.0},
    {"norm_v": True},
    {"v_from_raw_k": True},
    {"rotary_dim": 64, "dim": 128},
    {"dim": 256, "heads": (7, 1)},
    {"dim": 96, "heads": (3, 3)},
]


@pytest.mark.every(7)
@DTYPES
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("layout", [None, 0, 1])
def test_qk_norm_rope(
    device: str, dtype: torch.dtype, variant: dict[str, Any], layout: int | None
) -> None:
    dim = variant.get("dim", 64)
    q_heads, kv_heads = variant.get("heads", (4, 2))
    neox, norm_v = variant.get("neox", True), variant.get("norm_v", False)
    raw = variant.get("v_from_raw_k", False)
    offset = variant.get("offset", 0.0)
    num_tokens = 7
    table = angles(variant.get("rotary_dim", dim), device)
    positions = positions_of(num_tokens, torch.int64, device)
    rows = table[positions]
    kind = variant.get("weights", "both")
    weight_dtype = torch.float32 if kind == "float32" else dtype
    q_weight, k_weight = (torch.randn(dim).to(weight_dtype).to(device) for _ in range(2))
    weights = (None if kind == "none" else q_weight, None if kind in ("q", "none") else k_weight)
    width = (q_heads + (1 if raw else 2) * kv_heads) * dim
    qkv = torch.randn(num_tokens, width + 8).to(dtype).to(device)[:, :width]
    before = qkv.clone()
    v_out = None
    if raw:
        v_out = torch.full((num_tokens, kv_heads, dim), torch.nan, dtype=dtype, device=device)
    numbers: dict[str, Any] = {
        "num_q_heads": q_heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "eps": EPS,
        "weight_offset": offset,
        "neox": neox,
        "norm_v": norm_v,
        "v_from_raw_k": raw,
        "v_out": v_out,
    }
    slots = torch.tensor([3, -1, 0, 9, 6, 11, -1], device=device)
    caches: list[torch.Tensor] = []
    if layout is None:
        ops.qk_norm_rope(qkv, positions, table, *weights, **numbers)
    else:
        shapes = [(3, 4, kv_heads, dim)] * 2
        if layout == 1:
            shapes = [(3, kv_heads, dim // 8, 4, 8), (3, kv_heads, dim, 4)]
        caches = [torch.full(s, 9.0, dtype=dtype, device=device) for s in shapes]
        ops.qk_norm_rope_store(
            qkv, positions, table, *weights, *caches, slots, kv_layout=layout, **numbers
        )

    expected = fused_expected(
        before,
        rows,
        weights,
        heads=(q_heads, kv_heads),
        dim=dim,
        offset=offset,
        neox=neox,
        norm_v=norm_v,
        v_from_raw_k=raw,
    )
    actual = qkv.reshape(num_tokens, -1, dim)
    heads = before.view(num_tokens, -1, dim)
    k_end = q_heads + kv_heads
    q, k = actual[:, :q_heads], actual[:, q_heads:k_end]
    v = v_out if v_out is not None else actual[:, k_end:]
    base_q, base_k = (
        plain_rotate(t if w is None else plain_norm(t, w, offset), rows, neox)
        for t, w in zip((heads[:, :q_heads], heads[:, q_heads:k_end]), weights)
    )
    source_v = heads[:, q_heads:k_end] if raw else heads[:, k_end:]
    base_v = plain_norm(source_v, None, 0.0) if raw or norm_v else source_v
    for tensor, reference, base in zip((q, k, v), expected, (base_q, base_k, base_v)):
        assert_accurate(tensor, reference, base)
    if not (raw or norm_v):
        assert torch.equal(v, source_v)

    for which, cache, stored in zip("kv", caches, (k, v)):
        assert layout is not None
        array = to_numpy(cache)
        for slot in range(12):
            row = oracles.cached_row(array, which, layout, slot // 4, slot % 4)
            wanted = np.full_like(row, 9.0)
            if slot in slots.tolist():
                wanted = to_numpy(stored[slots.tolist().index(slot)])
            np.testing.assert_array_equal(row, wanted)


def test_position_out_of_range(device: str) -> None:
    table = angles(64, device)[:16]
    q, k = (torch.randn(2, 2, 64, device=device) for _ in range(2))
    positions = torch.tensor([3, 16], device=device)
    if device == "cpu":
        before = q.clone()
        for bad in (16, -1):
            positions[1] = bad
            with pytest.raises(
                RuntimeError, match=r"^diffulex::rotary_embedding: positions.*expected"
            ):
                ops.rotary_embedding(positions, q, k, table, head_dim=64)
        assert torch.equal(q, before)
        return
    clamped_q, clamped_k = q.clone(), k.clone()
    ops.rotary_embedding(positions, q, k, table, head_dim=64)
    ops.rotary_embedding(positions.clamp(max=15), clamped_q, clamped_k, table, head_dim=64)
    assert torch.equal(q, clamped_q)


def test_results_repeat_bit_for_bit(device: str) -> None:
    table = angles(128, device)
    qkv = torch.randn(9, 8 * 128, device=device)
    weight = torch.randn(128, device=device)
    numbers: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 128, "eps": EPS}
    runs = []
    for _ in range(20):
        copy = qkv.clone()
        ops.qk_norm_rope(copy, torch.arange(9, device=device), table, weight, weight, **numbers)
        runs.append(copy)
    assert all(torch.equal(run, runs[0]) for run in runs)


@DTYPES
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_many_tokens_have_the_bits_of_few(
    device: str, dtype: torch.dtype, neox: bool, dim: int
) -> None:
    table = angles(dim, device)
    qkv = torch.randn(600, 8 * dim).to(dtype).to(device)
    weight = torch.randn(dim).to(dtype).to(device)
    positions = positions_of(600, torch.int64, device)
    numbers: dict[str, Any] = {
        "num_q_heads": 4, "num_kv_heads": 2, "head_dim": dim, "eps": EPS, "neox": neox
    }  # fmt: skip
    parts = [part.clone() for part in qkv.split(100)]
    for part, place in zip(parts, positions.split(100), strict=True):
        ops.qk_norm_rope(part, place, table, weight, weight, **numbers)
    for count in (256, 600):
        rows = qkv[:count].clone()
        ops.qk_norm_rope(rows, positions[:count], table, weight, weight, **numbers)
        assert torch.equal(rows, torch.cat(parts)[:count])
