# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of `torch.ops.diffulex`: the checks of the real ones without data.

Every op writes tensors of the caller and returns nothing, so a fake only checks devices, dtypes and
shapes. Conditions go through `torch._check`, which accepts symbolic sizes. Importing this module
registers all fakes; the op library must be loaded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch

from diffulex_ext._fake_arguments import FakeArguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Fake: TypeAlias = Callable[..., None]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_INT32 = (torch.int32,)
_INT64 = (torch.int64,)
_INDEX = (torch.int32, torch.int64)
_FLOAT32 = (torch.float32,)

_PAGE_SIZES = (4, 8, 16, 32, 64, 128, 256)
_STATS_COLUMNS = 8
_PANEL_COLUMNS = 32
_MAX_FORBIDDEN = 8
_MAX_TOP_K = 64


def _register(op: str) -> Callable[[Fake], Fake]:
    def decorate(fake: Fake) -> Fake:
        torch.library.register_fake(f"diffulex::{op}", fake)
        return fake

    return decorate


def _check_page_size(arguments: FakeArguments, page_size: int) -> None:
    expected = f"a page size of {_PAGE_SIZES}"
    arguments.require("k_cache", page_size in _PAGE_SIZES, expected, page_size)


def _check_caches(
    arguments: FakeArguments,
    k_cache: Tensor,
    v_cache: Tensor,
    num_kv_heads: int,
    head_dim: int,
    kv_layout: int,
    dtypes: Sequence[torch.dtype],
) -> None:
    arguments.choice("kv_layout", kv_layout, 1)
    if kv_layout == 0:
        arguments.tensor("k_cache", k_cache, dtypes, (None,) * 4)
        arguments.tensor("v_cache", v_cache, (k_cache.dtype,), (*k_cache.shape[:2], None, None))
        page_size = k_cache.shape[1]
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            arguments.require(
                name,
                cache.shape[2] >= num_kv_heads,
                f"room for {num_kv_heads} heads",
                cache.shape[2],
            )
            arguments.require(
                name, cache.shape[3] >= head_dim, f"room for head_dim {head_dim}", cache.shape[3]
            )
        _check_page_size(arguments, page_size)
        return
    arguments.tensor("k_cache", k_cache, dtypes, (None, num_kv_heads, None, None, None))
    num_pages, _, groups, page_size, width = k_cache.shape
    arguments.require(
        "k_cache", groups * width == head_dim, f"D/x * x = {head_dim}", groups * width
    )
    arguments.tensor(
        "v_cache", v_cache, (k_cache.dtype,), (num_pages, num_kv_heads, head_dim, page_size)
    )
    _check_page_size(arguments, page_size)


@_register("block_attention")
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
    plan: Tensor | None,
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
    arguments.tensor("q", q, _FLOATS, (None, None, None))
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
    _check_caches(arguments, k_cache, v_cache, num_kv_heads, head_dim, kv_layout, (q.dtype,))
    arguments.tensor("page_table", page_table, _INT32, (None, None))
    num_reqs = page_table.shape[0]
    arguments.tensor("cu_seqlens_q", cu_seqlens_q, _INT32, (num_reqs + 1,))
    for name, lens in (
        ("context_lens", context_lens),
        ("valid_slices", valid_slices),
        ("mask_kinds", mask_kinds),
        ("prefix_lens", prefix_lens),
        ("padded_prefix_lens", padded_prefix_lens),
        ("q_starts", q_starts),
    ):
        arguments.optional(name, lens, _INT32, (num_reqs,))
    arguments.optional("plan", plan, _INT32, (None,))
    arguments.tensor("out", out, (q.dtype,), q.shape)
    arguments.optional("lse", lse, _FLOAT32, (num_tokens, num_q_heads))
    arguments.workspace(workspace)
    arguments.require("scale", math.isfinite(scale) and scale > 0, "a finite number above 0", scale)
    arguments.at_least("softcap", softcap, 0)
    arguments.at_least("block_size", block_size, 1)
    arguments.at_least("sliding_window", sliding_window, 0)
    arguments.at_least("max_context_len", max_context_len, 0)
    arguments.at_least("num_splits", num_splits, 0)
    if max_seqlen_q < 1:
        arguments.require("max_seqlen_q", num_tokens == 0, "a value >= 1", max_seqlen_q)


@_register("attention_plan")
def _attention_plan(
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    valid_slices: Tensor,
    mask_kinds: Tensor,
    plan: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int,
    max_seqlen_q: int,
    num_splits: int,
) -> None:
    arguments = FakeArguments("attention_plan", cu_seqlens_q)
    arguments.tensor("context_lens", context_lens, _INT32, (None,))
    num_reqs = context_lens.shape[0]
    arguments.tensor("cu_seqlens_q", cu_seqlens_q, _INT32, (num_reqs + 1,))
    arguments.tensor("valid_slices", valid_slices, _INT32, (num_reqs,))
    arguments.tensor("mask_kinds", mask_kinds, _INT32, (num_reqs,))
    arguments.tensor("plan", plan, _INT32, (None,))
    arguments.at_least("num_kv_heads", num_kv_heads, 1)
    arguments.require(
        "num_q_heads",
        num_q_heads >= 1 and num_q_heads % num_kv_heads == 0,
        f"a multiple of {num_kv_heads}",
        num_q_heads,
    )
    arguments.at_least("head_dim", head_dim, 1)
    arguments.at_least("sliding_window", sliding_window, 0)
    arguments.at_least("max_seqlen_q", max_seqlen_q, 0)
    arguments.at_least("num_splits", num_splits, 0)


@_register("store_kv_cache")
def _store_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    kv_layout: int = 0,
) -> None:
    arguments = FakeArguments("store_kv_cache", k)
    arguments.tensor("k", k, _FLOATS, (None, None, None))
    arguments.tensor("v", v, (k.dtype,), k.shape)
    arguments.unsupported("k_scale", k_scale)
    arguments.unsupported("v_scale", v_scale)
    _check_caches(arguments, k_cache, v_cache, k.shape[1], k.shape[2], kv_layout, _FLOATS)
    arguments.tensor("slot_mapping", slot_mapping, _INDEX, (k.shape[0],))


@_register("load_kv_cache")
def _load_kv_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    k_out: Tensor,
    v_out: Tensor,
    *,
    kv_layout: int = 0,
) -> None:
    arguments = FakeArguments("load_kv_cache", k_cache)
    arguments.tensor("k_new", k_new, _FLOATS, (None, None, None))
    _, num_kv_heads, head_dim = k_new.shape
    arguments.tensor("v_new", v_new, (k_new.dtype,), k_new.shape)
    arguments.unsupported("k_scale", k_scale)
    arguments.unsupported("v_scale", v_scale)
    _check_caches(arguments, k_cache, v_cache, num_kv_heads, head_dim, kv_layout, _FLOATS)
    arguments.tensor("page_table", page_table, _INT32, (None, None))
    num_reqs = page_table.shape[0]
    arguments.tensor("context_lens", context_lens, _INT32, (num_reqs,))
    arguments.tensor("cu_seqlens_q", cu_seqlens_q, _INT32, (num_reqs + 1,))
    arguments.tensor("cu_seqlens_k", cu_seqlens_k, _INT32, (num_reqs + 1,))
    arguments.tensor("k_out", k_out, (k_new.dtype,), (None, num_kv_heads, head_dim))
    arguments.tensor("v_out", v_out, (k_new.dtype,), k_out.shape)


@_register("copy_kv_pages")
def _copy_kv_pages(k_cache: Tensor, v_cache: Tensor, src_dst: Tensor) -> None:
    arguments = FakeArguments("copy_kv_pages", k_cache)
    arguments.require("k_cache", k_cache.dim() >= 2, "at least 2 dimensions", k_cache.dim())
    arguments.tensor("v_cache", v_cache, (v_cache.dtype,), (k_cache.shape[0], *v_cache.shape[1:]))
    arguments.tensor("src_dst", src_dst, _INT32, (None, 2))


def _check_norm(
    arguments: FakeArguments, x: Tensor, weight: Tensor | None, residual: Tensor | None, eps: float
) -> None:
    arguments.require("x", x.dim() >= 1, "at least 1 dimension", x.dim())
    arguments.tensor("x", x, _FLOATS, x.shape)
    width = x.shape[-1]
    arguments.require("x", width >= 1, "a last dimension >= 1", width)
    arguments.optional("weight", weight, (x.dtype, torch.float32), (width,))
    arguments.optional("residual", residual, (x.dtype,), x.shape)
    arguments.at_least("eps", eps, 0)


@_register("rms_norm")
def _rms_norm(
    x: Tensor, weight: Tensor | None, out: Tensor, *, eps: float, weight_offset: float = 0.0
) -> None:
    arguments = FakeArguments("rms_norm", x)
    _check_norm(arguments, x, weight, None, eps)
    arguments.tensor("out", out, (x.dtype,), x.shape)


@_register("add_rms_norm")
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, *, eps: float, weight_offset: float = 0.0
) -> None:
    _check_norm(FakeArguments("add_rms_norm", x), x, weight, residual, eps)


@_register("rms_norm_add")
def _rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    out_scale: Tensor | None,
    out: Tensor,
    *,
    eps: float,
    weight_offset: float = 0.0,
) -> None:
    arguments = FakeArguments("rms_norm_add", x)
    _check_norm(arguments, x, weight, residual, eps)
    arguments.optional("out_scale", out_scale, (x.dtype, torch.float32), (1,))
    arguments.tensor("out", out, (x.dtype,), x.shape)


def _check_rotary_cache(arguments: FakeArguments, cos_sin_cache: Tensor, head_dim: int) -> None:
    arguments.at_least("head_dim", head_dim, 1)
    arguments.tensor("cos_sin_cache", cos_sin_cache, _FLOAT32, (None, None))
    rotary_dim = cos_sin_cache.shape[1]
    arguments.require("cos_sin_cache", rotary_dim % 2 == 0, "an even rotary_dim", rotary_dim)
    arguments.require(
        "cos_sin_cache", rotary_dim <= head_dim, f"a rotary_dim of at most {head_dim}", rotary_dim
    )


@_register("rotary_embedding")
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
    arguments.tensor("positions", positions, _INDEX, (None,))
    _check_rotary_cache(arguments, cos_sin_cache, head_dim)
    for name, tensor in (("q", q), ("k", k)):
        dtypes = _FLOATS if name == "q" else (q.dtype,)
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
    arguments.tensor("qkv", qkv, _FLOATS, (None, num_heads * head_dim))
    num_tokens = qkv.shape[0]
    arguments.tensor("positions", positions, _INDEX, (num_tokens,))
    _check_rotary_cache(arguments, cos_sin_cache, head_dim)
    arguments.optional("q_weight", q_weight, (qkv.dtype, torch.float32), (head_dim,))
    arguments.optional("k_weight", k_weight, (qkv.dtype, torch.float32), (head_dim,))
    arguments.optional("v_out", v_out, (qkv.dtype,), (num_tokens, num_kv_heads, head_dim))
    arguments.paired("v_out", v_out, "v_from_raw_k", v_from_raw_k)


@_register("qk_norm_rope")
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


@_register("qk_norm_rope_store")
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
    _check_caches(arguments, k_cache, v_cache, num_kv_heads, head_dim, kv_layout, _FLOATS)
    arguments.tensor("slot_mapping", slot_mapping, _INDEX, (qkv.shape[0],))


@_register("act_and_mul")
def _act_and_mul(x: Tensor, out: Tensor, *, act: int) -> None:
    arguments = FakeArguments("act_and_mul", x)
    arguments.require("x", x.dim() >= 1, "at least 1 dimension", x.dim())
    arguments.tensor("x", x, _FLOATS, x.shape)
    width = x.shape[-1]
    arguments.require("x", width % 2 == 0, "an even last dimension", width)
    arguments.tensor("out", out, (x.dtype,), (*x.shape[:-1], width // 2))
    arguments.choice("act", act, 2)


@_register("linear_packed")
def _linear_packed(x: Tensor, packed_weight: Tensor, out: Tensor, *, out_features: int) -> None:
    arguments = FakeArguments("linear_packed", x)
    arguments.tensor("x", x, _FLOAT32, (None, None))
    num_rows, in_features = x.shape
    arguments.require("x", in_features >= 1, "a last dimension >= 1", in_features)
    arguments.at_least("out_features", out_features, 1)
    num_panels = (out_features + _PANEL_COLUMNS - 1) // _PANEL_COLUMNS
    shape = (num_panels, in_features, _PANEL_COLUMNS)
    arguments.tensor("packed_weight", packed_weight, (torch.float32, torch.bfloat16), shape)
    arguments.tensor("out", out, _FLOAT32, (num_rows, out_features))


@_register("token_stats")
def _token_stats(
    logits: Tensor,
    extra_logits: Tensor | None,
    row_index: Tensor | None,
    inv_temperature: Tensor | None,
    uniforms: Tensor | None,
    forbidden_ids: Tensor | None,
    penalty_ids: Tensor | None,
    ids: Tensor,
    stats: Tensor,
    topk_ids: Tensor | None,
    topk_probs: Tensor | None,
    workspace: Tensor | None,
    *,
    vocab_limit: int = -1,
    softcap: float = 0.0,
    penalty: float = 0.0,
    exclusion: int = 0,
    vocab_start: int = 0,
    partial: bool = False,
) -> None:
    arguments = FakeArguments("token_stats", logits)
    arguments.tensor("logits", logits, _FLOATS, (None, None))
    arguments.optional("extra_logits", extra_logits, (logits.dtype,), (None, logits.shape[1]))
    arguments.optional("row_index", row_index, _INDEX, (None,))
    num_rows = logits.shape[0] if row_index is None else row_index.shape[0]
    arguments.optional("inv_temperature", inv_temperature, _FLOAT32, (num_rows,))
    arguments.optional("uniforms", uniforms, (torch.float64,), (num_rows,))
    if inv_temperature is not None:
        arguments.require("inv_temperature", not partial, "none with partial", "a tensor")
    arguments.paired("uniforms", uniforms, "inv_temperature", inv_temperature is not None)
    arguments.optional("forbidden_ids", forbidden_ids, _INT64, (None,))
    if forbidden_ids is not None:
        count = forbidden_ids.shape[0]
        expected = f"at most {_MAX_FORBIDDEN} ids"
        arguments.require("forbidden_ids", count <= _MAX_FORBIDDEN, expected, count)
    arguments.optional("penalty_ids", penalty_ids, _INT64, (num_rows,))
    arguments.tensor("ids", ids, _INT64, (num_rows,))
    arguments.tensor("stats", stats, _FLOAT32, (num_rows, _STATS_COLUMNS))
    _check_top_k(arguments, topk_ids, topk_probs, num_rows)
    arguments.workspace(workspace)
    arguments.at_least("vocab_limit", vocab_limit, -1)
    arguments.at_least("softcap", softcap, 0)
    arguments.at_least("vocab_start", vocab_start, 0)
    arguments.choice("exclusion", exclusion, 2)


def _check_top_k(
    arguments: FakeArguments, topk_ids: Tensor | None, topk_probs: Tensor | None, num_rows: int
) -> None:
    arguments.paired("topk_probs", topk_probs, "topk_ids", topk_ids is not None)
    arguments.optional("topk_ids", topk_ids, _INT64, (num_rows, None))
    if topk_ids is not None:
        top_k = topk_ids.shape[1]
        arguments.require("topk_ids", top_k >= 1, f"1 to {_MAX_TOP_K} columns", top_k)
        arguments.require("topk_ids", top_k <= _MAX_TOP_K, f"1 to {_MAX_TOP_K} columns", top_k)
        arguments.optional("topk_probs", topk_probs, _FLOAT32, topk_ids.shape)


@_register("merge_token_stats")
def _merge_token_stats(
    part_ids: Tensor,
    part_stats: Tensor,
    part_topk_ids: Tensor | None,
    part_topk_vals: Tensor | None,
    ids: Tensor,
    stats: Tensor,
    topk_ids: Tensor | None,
    topk_probs: Tensor | None,
) -> None:
    arguments = FakeArguments("merge_token_stats", part_ids)
    arguments.tensor("part_ids", part_ids, _INT64, (None, None))
    num_parts, num_rows = part_ids.shape
    arguments.tensor("part_stats", part_stats, _FLOAT32, (num_parts, num_rows, _STATS_COLUMNS))
    arguments.tensor("ids", ids, _INT64, (num_rows,))
    arguments.tensor("stats", stats, _FLOAT32, (num_rows, _STATS_COLUMNS))
    _check_top_k(arguments, topk_ids, topk_probs, num_rows)
    arguments.paired("part_topk_ids", part_topk_ids, "topk_ids", topk_ids is not None)
    arguments.paired("part_topk_vals", part_topk_vals, "topk_ids", topk_ids is not None)
    if topk_ids is not None:
        shape = (num_parts, num_rows, topk_ids.shape[1])
        arguments.optional("part_topk_ids", part_topk_ids, _INT64, shape)
        arguments.optional("part_topk_vals", part_topk_vals, _FLOAT32, shape)


@_register("accept_mask_fill")
def _accept_mask_fill(
    tokens: Tensor,
    row_index: Tensor,
    editable_start: Tensor,
    valid_len: Tensor | None,
    gate: Tensor,
    accept_threshold: Tensor,
    open_steps: Tensor,
    ids: Tensor,
    stats: Tensor,
    write_ids: Tensor,
    confidence: Tensor,
    masks_left: Tensor,
    flags: Tensor,
    *,
    mask_token_id: int,
    rule: int = 0,
    confidence_kind: int = 0,
    raw_confidence: bool = False,
    denoising_steps: int = 0,
    force_accept_last_step: bool = False,
    factor: float = 1.0,
    entropy_bound: float = 0.0,
) -> None:
    arguments = FakeArguments("accept_mask_fill", tokens)
    arguments.tensor("tokens", tokens, _INT64, (None, None))
    num_blocks = tokens.shape[0]
    arguments.tensor("row_index", row_index, _INT32, tokens.shape)
    arguments.tensor("editable_start", editable_start, _INT32, (num_blocks,))
    arguments.optional("valid_len", valid_len, _INT32, (num_blocks,))
    arguments.tensor("gate", gate, (torch.uint8,), (num_blocks,))
    arguments.tensor("accept_threshold", accept_threshold, _FLOAT32, (num_blocks,))
    arguments.tensor("open_steps", open_steps, _INT32, (num_blocks,))
    arguments.tensor("ids", ids, _INT64, (None,))
    arguments.tensor("stats", stats, _FLOAT32, (ids.shape[0], _STATS_COLUMNS))
    arguments.tensor("write_ids", write_ids, _INT64, tokens.shape)
    arguments.tensor("confidence", confidence, _FLOAT32, tokens.shape)
    arguments.tensor("masks_left", masks_left, _INT32, (num_blocks,))
    arguments.tensor("flags", flags, _INT32, (num_blocks,))
    arguments.choice("rule", rule, 6)
    arguments.choice("confidence_kind", confidence_kind, 2)
    arguments.at_least("denoising_steps", denoising_steps, 0)
