# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the rotary embedding ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex_ext._fake.arguments import FakeArguments
from diffulex_ext._fake.kv_cache import check_caches
from diffulex_ext._fake.registry import FLOAT32, FLOATS, INDEX, register

if TYPE_CHECKING:
    from torch import Tensor


def _check_rotary_cache(arguments: FakeArguments, cos_sin_cache: Tensor, head_dim: int) -> None:
    arguments.at_least("head_dim", head_dim, 1)
    arguments.tensor("cos_sin_cache", cos_sin_cache, FLOAT32, (None, None))
    rotary_dim = cos_sin_cache.shape[1]
    arguments.require("cos_sin_cache", rotary_dim % 2 == 0, "an even rotary_dim", rotary_dim)
    arguments.require(
        "cos_sin_cache", rotary_dim <= head_dim, f"a rotary_dim of at most {head_dim}", rotary_dim
    )


@register("rotary_embedding")
def _rotary_embedding(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    cos_sin_cache: Tensor,
    *,
    head_dim: int,
    neox: bool = True,
) -> None:
    arguments = FakeArguments("rotary_embedding", positions)
    arguments.tensor("positions", positions, INDEX, (None,))
    _check_rotary_cache(arguments, cos_sin_cache, head_dim)
    for name, tensor in (("q", q), ("k", k)):
        dtypes = FLOATS if name == "q" else (q.dtype,)
        if tensor.dim() == 3:
            arguments.tensor(name, tensor, dtypes, (positions.shape[0], None, head_dim))
        else:
            arguments.tensor(name, tensor, dtypes, (positions.shape[0], None))
            width = tensor.shape[1]
            arguments.require(name, width % head_dim == 0, f"a multiple of {head_dim}", width)


def _check_qk_norm_rope(
    arguments: FakeArguments,
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    v_out: Tensor | None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    v_from_raw_k: bool,
) -> None:
    arguments.at_least("num_q_heads", num_q_heads, 1)
    arguments.at_least("num_kv_heads", num_kv_heads, 1)
    arguments.at_least("eps", eps, 0)
    num_heads = num_q_heads + (1 if v_from_raw_k else 2) * num_kv_heads
    arguments.tensor("qkv", qkv, FLOATS, (None, num_heads * head_dim))
    num_tokens = qkv.shape[0]
    arguments.tensor("positions", positions, INDEX, (num_tokens,))
    _check_rotary_cache(arguments, cos_sin_cache, head_dim)
    arguments.optional("q_weight", q_weight, (qkv.dtype, torch.float32), (head_dim,))
    arguments.optional("k_weight", k_weight, (qkv.dtype, torch.float32), (head_dim,))
    arguments.optional("v_out", v_out, (qkv.dtype,), (num_tokens, num_kv_heads, head_dim))
    arguments.paired("v_out", v_out, "v_from_raw_k", v_from_raw_k)


@register("qk_norm_rope")
def _qk_norm_rope(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    v_out: Tensor | None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    neox: bool = True,
    norm_v: bool = False,
    v_from_raw_k: bool = False,
) -> None:
    _check_qk_norm_rope(
        FakeArguments("qk_norm_rope", qkv),
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
        v_from_raw_k=v_from_raw_k,
    )


@register("qk_norm_rope_store")
def _qk_norm_rope_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    v_out: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    weight_offset: float = 0.0,
    neox: bool = True,
    norm_v: bool = False,
    v_from_raw_k: bool = False,
    kv_layout: int = 0,
) -> None:
    arguments = FakeArguments("qk_norm_rope_store", qkv)
    _check_qk_norm_rope(
        arguments,
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
        v_from_raw_k=v_from_raw_k,
    )
    arguments.unsupported("k_scale", k_scale)
    arguments.unsupported("v_scale", v_scale)
    check_caches(arguments, k_cache, v_cache, num_kv_heads, head_dim, kv_layout, FLOATS)
    arguments.tensor("slot_mapping", slot_mapping, INDEX, (qkv.shape[0],))
