# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding, alone or fused with the per-head norms and the KV store.

The cache is [max_pos, rotary_dim] float32: rotary_dim / 2 cosines, then as many sines. Dims past
rotary_dim pass through. `neox` pairs (d, d + rotary_dim / 2), otherwise (2 d, 2 d + 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.ops.attention import KvLayout
from diffulex.ops.fakes import FLOAT32, FLOATS, INDEX, FakeArguments, check_caches, fake

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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_layout: int = KvLayout.UNIFIED,
) -> None:
    """`qk_norm_rope`, then the finished K and V of rows with slot >= 0 go into the cache.

    With scales, as in `store_kv_cache`, these rows then hold the stored values in `qkv` and `v_out`
    too: attention sees the same numbers whether a key is in flight or cached.
    """
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
        k_scale,
        v_scale,
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


def _check_rotary_cache(arguments: FakeArguments, head_dim: int) -> None:
    arguments.at_least("head_dim", 1)
    arguments.check("cos_sin_cache", FLOAT32, (None, None))
    rotary_dim = arguments["cos_sin_cache"].shape[1]
    arguments.require("cos_sin_cache", rotary_dim % 2 == 0, "an even rotary_dim", rotary_dim)
    arguments.require(
        "cos_sin_cache", rotary_dim <= head_dim, f"a rotary_dim of at most {head_dim}", rotary_dim
    )


@fake("rotary_embedding")
def _rotary_embedding(
    arguments: FakeArguments, positions: Tensor, q: Tensor, k: Tensor, head_dim: int
) -> None:
    arguments.check("positions", INDEX, (None,))
    _check_rotary_cache(arguments, head_dim)
    for name, tensor in (("q", q), ("k", k)):
        dtypes = FLOATS if name == "q" else (q.dtype,)
        if tensor.dim() == 3:
            arguments.check(name, dtypes, (positions.shape[0], None, head_dim))
        else:
            arguments.check(name, dtypes, (positions.shape[0], None))
            width = tensor.shape[1]
            arguments.require(name, width % head_dim == 0, f"a multiple of {head_dim}", width)


def _check_qk_norm_rope(
    arguments: FakeArguments,
    qkv: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_from_raw_k: bool,
) -> None:
    arguments.at_least("num_q_heads", 1)
    arguments.at_least("num_kv_heads", 1)
    arguments.at_least("eps", 0)
    num_heads = num_q_heads + (1 if v_from_raw_k else 2) * num_kv_heads
    arguments.check("qkv", FLOATS, (None, num_heads * head_dim))
    num_tokens = qkv.shape[0]
    arguments.check("positions", INDEX, (num_tokens,))
    _check_rotary_cache(arguments, head_dim)
    arguments.check("q_weight", (qkv.dtype, torch.float32), (head_dim,))
    arguments.check("k_weight", (qkv.dtype, torch.float32), (head_dim,))
    arguments.check("v_out", (qkv.dtype,), (num_tokens, num_kv_heads, head_dim))
    arguments.paired("v_out", "v_from_raw_k", v_from_raw_k)


@fake("qk_norm_rope")
def _qk_norm_rope(
    arguments: FakeArguments,
    qkv: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_from_raw_k: bool,
) -> None:
    _check_qk_norm_rope(arguments, qkv, num_q_heads, num_kv_heads, head_dim, v_from_raw_k)


@fake("qk_norm_rope_store")
def _qk_norm_rope_store(
    arguments: FakeArguments,
    qkv: Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_from_raw_k: bool,
) -> None:
    _check_qk_norm_rope(arguments, qkv, num_q_heads, num_kv_heads, head_dim, v_from_raw_k)
    check_caches(arguments, num_kv_heads, head_dim, FLOATS)
    arguments.check("slot_mapping", INDEX, (qkv.shape[0],))
