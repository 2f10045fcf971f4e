# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the attention ops."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from diffulex_ext._fake.arguments import FakeArguments
from diffulex_ext._fake.kv_cache import check_caches
from diffulex_ext._fake.registry import FLOAT32, FLOATS, INT32, register

if TYPE_CHECKING:
    from torch import Tensor


@register("block_attention")
def _block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    valid_slices: Tensor,
    mask_kinds: Tensor,
    prefix_lens: Tensor | None,
    padded_prefix_lens: Tensor | None,
    q_starts: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    workspace: Tensor | None,
    *,
    scale: float,
    softcap: float = 0.0,
    block_size: int,
    sliding_window: int = 0,
    max_seqlen_q: int,
    max_context_len: int,
    num_splits: int = 0,
    kv_layout: int = 0,
) -> None:
    arguments = FakeArguments("block_attention", q)
    arguments.tensor("q", q, FLOATS, (None, None, None))
    num_tokens, num_q_heads, head_dim = q.shape
    arguments.tensor("k", k, (q.dtype,), (num_tokens, None, head_dim))
    num_kv_heads = k.shape[1]
    arguments.require("k", num_kv_heads >= 1, "at least one KV head", num_kv_heads)
    arguments.require(
        "k",
        num_q_heads % num_kv_heads == 0,
        f"a number of KV heads that divides {num_q_heads}",
        num_kv_heads,
    )
    arguments.tensor("v", v, (q.dtype,), k.shape)
    arguments.unsupported("k_scale", k_scale)
    arguments.unsupported("v_scale", v_scale)
    check_caches(arguments, k_cache, v_cache, num_kv_heads, head_dim, kv_layout, (q.dtype,))
    arguments.tensor("page_table", page_table, INT32, (None, None))
    num_reqs = page_table.shape[0]
    arguments.tensor("cu_seqlens_q", cu_seqlens_q, INT32, (num_reqs + 1,))
    for name, lens in (
        ("context_lens", context_lens),
        ("valid_slices", valid_slices),
        ("mask_kinds", mask_kinds),
        ("prefix_lens", prefix_lens),
        ("padded_prefix_lens", padded_prefix_lens),
        ("q_starts", q_starts),
    ):
        arguments.optional(name, lens, INT32, (num_reqs,))
    arguments.tensor("out", out, (q.dtype,), q.shape)
    arguments.optional("lse", lse, FLOAT32, (num_tokens, num_q_heads))
    arguments.workspace(workspace)
    arguments.require("scale", math.isfinite(scale) and scale > 0, "a finite number above 0", scale)
    arguments.at_least("softcap", softcap, 0)
    arguments.at_least("block_size", block_size, 1)
    arguments.at_least("sliding_window", sliding_window, 0)
    arguments.at_least("max_context_len", max_context_len, 0)
    arguments.at_least("num_splits", num_splits, 0)
    if max_seqlen_q < 1:
        arguments.require("max_seqlen_q", num_tokens == 0, "a value >= 1", max_seqlen_q)
