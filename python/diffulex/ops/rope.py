# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding, alone or fused with the per-head norms and the KV store.

The cache is [max_pos, rotary_dim] float32: rotary_dim / 2 cosines, then as many sines. Dims past
rotary_dim pass through. `neox` pairs (d, d + rotary_dim / 2), otherwise (2 d, 2 d + 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.ops.attention import KvLayout
from diffulex.ops.kv_cache import store_kv_cache_reference

if TYPE_CHECKING:
    from torch import Tensor


@torch.no_grad()
def rotary_embedding(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    head_dim: int,
    neox: bool = True,
) -> None:
    """Rotates q and k, [T, heads, D] or [T, heads * D], in place."""
    torch.ops.diffulex.rotary_embedding(
        positions, q, k, cos_sin_cache, head_dim=head_dim, neox=neox
    )


@torch.no_grad()
def qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    neox: bool = True,
    norm_v: bool = False,
    v_from_raw_k: bool = False,
    v_out: Tensor | None = None,
) -> None:
    """Per head RMSNorm of q and k (weight None = no norm), then rotary, in place on qkv.

    Inside `settled_weights` CUDA kernels read the weights while the launches in front of them still
    run: none of those may then write them.

    Args:
        qkv: [T, (Hq + 2 Hkv) D]; [T, (Hq + Hkv) D] with `v_from_raw_k`.
        norm_v: V gets a weightless norm.
        v_from_raw_k: V is the norm of the raw K, written to `v_out` [T, Hkv, D].
    """
    torch.ops.diffulex.qk_norm_rope(
        qkv,
        positions,
        cos_sin_cache,
        q_weight,
        k_weight,
        v_out,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=eps,
        weight_offset=weight_offset,
        neox=neox,
        norm_v=norm_v,
        v_from_raw_k=v_from_raw_k,
    )


@torch.no_grad()
def qk_norm_rope_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    neox: bool = True,
    norm_v: bool = False,
    v_from_raw_k: bool = False,
    v_out: Tensor | None = None,
    kv_layout: int = KvLayout.UNIFIED,
) -> None:
    """`qk_norm_rope`, then the finished K and V of rows with slot >= 0 go into the cache."""
    torch.ops.diffulex.qk_norm_rope_store(
        qkv,
        positions,
        cos_sin_cache,
        q_weight,
        k_weight,
        v_out,
        k_cache,
        v_cache,
        slot_mapping,
        None,
        None,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=eps,
        weight_offset=weight_offset,
        neox=neox,
        norm_v=norm_v,
        v_from_raw_k=v_from_raw_k,
        kv_layout=int(kv_layout),
    )


def _rotate(x: Tensor, positions: Tensor, cos_sin_cache: Tensor, neox: bool) -> Tensor:
    """Rotary of fp32 heads [T, heads, D]."""
    rotary_dim = cos_sin_cache.shape[1]
    half = rotary_dim // 2
    angles = cos_sin_cache[positions.long()][:, None, :]
    cos, sin = angles[..., :half], angles[..., half:]
    if neox:
        first, second = x[..., :half], x[..., half:rotary_dim]
    else:
        first, second = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    if neox:
        turned = torch.cat(rotated, -1)
    else:
        turned = torch.stack(rotated, -1).flatten(-2)
    return torch.cat([turned, x[..., rotary_dim:]], -1)


def _norm_heads(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (weight.float() + weight_offset)


@torch.no_grad()
def rotary_embedding_reference(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    head_dim: int,
    neox: bool = True,
) -> None:
    """Pure torch twin of `rotary_embedding`."""
    for tensor in (q, k):
        heads = tensor.reshape(tensor.shape[0], -1, head_dim).float()
        tensor.copy_(_rotate(heads, positions, cos_sin_cache, neox).reshape(tensor.shape))


@torch.no_grad()
def qk_norm_rope_reference(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    neox: bool = True,
    norm_v: bool = False,
    v_from_raw_k: bool = False,
    v_out: Tensor | None = None,
) -> None:
    """Pure torch twin of `qk_norm_rope`."""
    heads = qkv.reshape(qkv.shape[0], -1, head_dim).float()
    q = heads[:, :num_q_heads]
    k = heads[:, num_q_heads : num_q_heads + num_kv_heads]
    v = k if v_from_raw_k else heads[:, num_q_heads + num_kv_heads :]
    if norm_v or v_from_raw_k:
        v = _norm_heads(v, None, eps, 0.0)
    if q_weight is not None:
        q = _norm_heads(q, q_weight, eps, weight_offset)
    if k_weight is not None:
        k = _norm_heads(k, k_weight, eps, weight_offset)
    finished = [
        _rotate(q, positions, cos_sin_cache, neox),
        _rotate(k, positions, cos_sin_cache, neox),
    ]
    if not v_from_raw_k:
        finished.append(v)
    qkv.copy_(torch.cat(finished, 1).flatten(1))
    if v_out is not None:
        v_out.copy_(v)


@torch.no_grad()
def qk_norm_rope_store_reference(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    neox: bool = True,
    norm_v: bool = False,
    v_from_raw_k: bool = False,
    v_out: Tensor | None = None,
    kv_layout: int = KvLayout.UNIFIED,
) -> None:
    """Pure torch twin of `qk_norm_rope_store`; synchronises."""
    if v_out is None:
        v_out = qkv.new_empty(qkv.shape[0], num_kv_heads, head_dim)
    qk_norm_rope_reference(
        qkv,
        positions,
        cos_sin_cache,
        q_weight,
        k_weight,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=eps,
        weight_offset=weight_offset,
        neox=neox,
        norm_v=norm_v,
        v_from_raw_k=v_from_raw_k,
        v_out=v_out,
    )
    k = qkv.view(qkv.shape[0], -1, head_dim)[:, num_q_heads : num_q_heads + num_kv_heads]
    store_kv_cache_reference(k, v_out, k_cache, v_cache, slot_mapping, kv_layout=kv_layout)
