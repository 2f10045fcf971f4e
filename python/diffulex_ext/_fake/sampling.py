# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the row statistics, filtered draws and the entropy bound."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from diffulex_ext._fake.arguments import FakeArguments
from diffulex_ext._fake.registry import (
    FLOAT32,
    FLOAT64,
    FLOATS,
    INDEX,
    INT32,
    INT64,
    UINT8,
    register,
)

if TYPE_CHECKING:
    from torch import Tensor

STATS_COLUMNS = 8
_MAX_FORBIDDEN = 8
_MAX_TOP_K = 64


def _check_forbidden(arguments: FakeArguments, forbidden_ids: Tensor | None) -> None:
    arguments.optional("forbidden_ids", forbidden_ids, INT64, (None,))
    if forbidden_ids is not None:
        count = forbidden_ids.shape[0]
        expected = f"at most {_MAX_FORBIDDEN} ids"
        arguments.require("forbidden_ids", count <= _MAX_FORBIDDEN, expected, count)


@register("token_stats")
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
    arguments.tensor("logits", logits, FLOATS, (None, None))
    arguments.optional("extra_logits", extra_logits, (logits.dtype,), (None, logits.shape[1]))
    arguments.optional("row_index", row_index, INDEX, (None,))
    num_rows = logits.shape[0] if row_index is None else row_index.shape[0]
    arguments.optional("inv_temperature", inv_temperature, FLOAT32, (num_rows,))
    arguments.optional("uniforms", uniforms, FLOAT64, (num_rows,))
    if inv_temperature is not None:
        arguments.require("inv_temperature", not partial, "none with partial", "a tensor")
    arguments.paired("uniforms", uniforms, "inv_temperature", inv_temperature is not None)
    _check_forbidden(arguments, forbidden_ids)
    arguments.optional("penalty_ids", penalty_ids, INT64, (num_rows,))
    arguments.tensor("ids", ids, INT64, (num_rows,))
    arguments.tensor("stats", stats, FLOAT32, (num_rows, STATS_COLUMNS))
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
    arguments.optional("topk_ids", topk_ids, INT64, (num_rows, None))
    if topk_ids is not None:
        top_k = topk_ids.shape[1]
        arguments.require("topk_ids", top_k >= 1, f"1 to {_MAX_TOP_K} columns", top_k)
        arguments.require("topk_ids", top_k <= _MAX_TOP_K, f"1 to {_MAX_TOP_K} columns", top_k)
        arguments.optional("topk_probs", topk_probs, FLOAT32, topk_ids.shape)


@register("merge_token_stats")
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
    arguments.tensor("part_ids", part_ids, INT64, (None, None))
    num_parts, num_rows = part_ids.shape
    arguments.tensor("part_stats", part_stats, FLOAT32, (num_parts, num_rows, STATS_COLUMNS))
    arguments.tensor("ids", ids, INT64, (num_rows,))
    arguments.tensor("stats", stats, FLOAT32, (num_rows, STATS_COLUMNS))
    _check_top_k(arguments, topk_ids, topk_probs, num_rows)
    arguments.paired("part_topk_ids", part_topk_ids, "topk_ids", topk_ids is not None)
    arguments.paired("part_topk_vals", part_topk_vals, "topk_ids", topk_ids is not None)
    if topk_ids is not None:
        shape = (num_parts, num_rows, topk_ids.shape[1])
        arguments.optional("part_topk_ids", part_topk_ids, INT64, shape)
        arguments.optional("part_topk_vals", part_topk_vals, FLOAT32, shape)


@register("sample_filtered")
def _sample_filtered(
    logits: Tensor,
    extra_logits: Tensor | None,
    row_index: Tensor | None,
    inv_temperature: Tensor,
    uniforms: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    forbidden_ids: Tensor | None,
    ids: Tensor,
    stats: Tensor,
    workspace: Tensor | None,
    *,
    vocab_limit: int = -1,
    softcap: float = 0.0,
    exclusion: int = 0,
    filter_order: int = 0,
    confidence_space: int = 0,
) -> None:
    arguments = FakeArguments("sample_filtered", logits)
    arguments.tensor("logits", logits, FLOATS, (None, None))
    arguments.optional("extra_logits", extra_logits, (logits.dtype,), (None, logits.shape[1]))
    arguments.optional("row_index", row_index, INDEX, (None,))
    num_rows = logits.shape[0] if row_index is None else row_index.shape[0]
    arguments.tensor("inv_temperature", inv_temperature, FLOAT32, (num_rows,))
    arguments.tensor("uniforms", uniforms, FLOAT64, (num_rows,))
    arguments.optional("top_k", top_k, INT32, (num_rows,))
    arguments.optional("top_p", top_p, FLOAT32, (num_rows,))
    arguments.optional("min_p", min_p, FLOAT32, (num_rows,))
    _check_forbidden(arguments, forbidden_ids)
    arguments.tensor("ids", ids, INT64, (num_rows,))
    arguments.tensor("stats", stats, FLOAT32, (num_rows, STATS_COLUMNS))
    arguments.workspace(workspace)
    arguments.at_least("vocab_limit", vocab_limit, -1)
    arguments.at_least("softcap", softcap, 0)
    arguments.choice("exclusion", exclusion, 2)
    arguments.choice("filter_order", filter_order, 1)
    arguments.choice("confidence_space", confidence_space, 1)


@register("entropy_bound_mask")
def _entropy_bound_mask(entropy: Tensor, segments: Tensor, mask: Tensor, *, bound: float) -> None:
    arguments = FakeArguments("entropy_bound_mask", entropy)
    arguments.tensor("entropy", entropy, FLOAT32, (None,))
    arguments.tensor("segments", segments, INT32, (None,))
    arguments.require("segments", segments.shape[0] >= 1, "at least one offset", 0)
    arguments.tensor("mask", mask, UINT8, entropy.shape)
    arguments.require("bound", not math.isnan(bound), "a number", bound)
