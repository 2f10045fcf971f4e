# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of the acceptance ops."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from diffulex_ext._fake.arguments import FakeArguments
from diffulex_ext._fake.registry import FLOAT32, INT32, INT64, UINT8, register
from diffulex_ext._fake.sampling import STATS_COLUMNS

if TYPE_CHECKING:
    from torch import Tensor

_MAX_POSITIONS = 1024


@register("accept_mask_fill")
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
    low_threshold: float = 0.0,
) -> None:
    arguments = FakeArguments("accept_mask_fill", tokens)
    arguments.tensor("tokens", tokens, INT64, (None, None))
    num_blocks = tokens.shape[0]
    arguments.tensor("row_index", row_index, INT32, tokens.shape)
    arguments.tensor("editable_start", editable_start, INT32, (num_blocks,))
    arguments.optional("valid_len", valid_len, INT32, (num_blocks,))
    arguments.tensor("gate", gate, UINT8, (num_blocks,))
    arguments.tensor("accept_threshold", accept_threshold, FLOAT32, (num_blocks,))
    arguments.tensor("open_steps", open_steps, INT32, (num_blocks,))
    arguments.tensor("ids", ids, INT64, (None,))
    arguments.tensor("stats", stats, FLOAT32, (ids.shape[0], STATS_COLUMNS))
    arguments.tensor("write_ids", write_ids, INT64, tokens.shape)
    arguments.tensor("confidence", confidence, FLOAT32, tokens.shape)
    arguments.tensor("masks_left", masks_left, INT32, (num_blocks,))
    arguments.tensor("flags", flags, INT32, (num_blocks,))
    arguments.choice("rule", rule, 8)
    arguments.choice("confidence_kind", confidence_kind, 2)
    arguments.at_least("denoising_steps", denoising_steps, 0)


def _check_blocks(arguments: FakeArguments, tokens: Tensor, valid_len: Tensor | None) -> None:
    arguments.tensor("tokens", tokens, INT64, (None, None))
    block_size = tokens.shape[1]
    expected = f"blocks of 1 to {_MAX_POSITIONS} positions"
    arguments.require("tokens", block_size >= 1, expected, list(tokens.shape))
    arguments.require("tokens", block_size <= _MAX_POSITIONS, expected, list(tokens.shape))
    arguments.optional("valid_len", valid_len, INT32, (tokens.shape[0],))


def _check_rows(
    arguments: FakeArguments, tokens: Tensor, row_index: Tensor, ids: Tensor, stats: Tensor
) -> None:
    arguments.tensor("row_index", row_index, INT32, tokens.shape)
    arguments.tensor("ids", ids, INT64, (None,))
    arguments.tensor("stats", stats, FLOAT32, (ids.shape[0], STATS_COLUMNS))


@register("accept_edit")
def _accept_edit(
    tokens: Tensor,
    row_index: Tensor,
    editable_start: Tensor,
    valid_len: Tensor | None,
    gate: Tensor,
    accept_threshold: Tensor,
    edit_threshold: Tensor,
    open_steps: Tensor,
    post_edit_steps: Tensor,
    ids: Tensor,
    stats: Tensor,
    write_ids: Tensor,
    confidence: Tensor,
    masks_left: Tensor,
    flags: Tensor,
    same_token_ratio: Tensor,
    *,
    mask_token_id: int,
    max_post_edit_steps: int,
    confidence_kind: int = 0,
    raw_confidence: bool = True,
) -> None:
    arguments = FakeArguments("accept_edit", tokens)
    _check_blocks(arguments, tokens, valid_len)
    _check_rows(arguments, tokens, row_index, ids, stats)
    num_blocks = tokens.shape[0]
    arguments.tensor("editable_start", editable_start, INT32, (num_blocks,))
    arguments.tensor("gate", gate, UINT8, (num_blocks,))
    arguments.tensor("accept_threshold", accept_threshold, FLOAT32, (num_blocks,))
    arguments.tensor("edit_threshold", edit_threshold, FLOAT32, (num_blocks,))
    arguments.tensor("open_steps", open_steps, INT32, (num_blocks,))
    arguments.tensor("post_edit_steps", post_edit_steps, INT32, (num_blocks,))
    arguments.tensor("write_ids", write_ids, INT64, tokens.shape)
    arguments.tensor("confidence", confidence, FLOAT32, tokens.shape)
    arguments.tensor("masks_left", masks_left, INT32, (num_blocks,))
    arguments.tensor("flags", flags, INT32, (num_blocks,))
    arguments.tensor("same_token_ratio", same_token_ratio, FLOAT32, (num_blocks,))
    arguments.at_least("mask_token_id", mask_token_id, 0)
    arguments.at_least("max_post_edit_steps", max_post_edit_steps, 0)
    arguments.choice("confidence_kind", confidence_kind, 2)


@register("accept_dmax")
def _accept_dmax(
    tokens: Tensor,
    row_index: Tensor,
    editable_start: Tensor,
    valid_len: Tensor | None,
    gate: Tensor,
    accept_threshold: Tensor,
    open_steps: Tensor,
    ids: Tensor,
    stats: Tensor,
    argmax_ids: Tensor | None,
    topk_ids: Tensor | None,
    topk_probs: Tensor | None,
    write_ids: Tensor,
    confidence: Tensor,
    masks_left: Tensor,
    flags: Tensor,
    same_token_ratio: Tensor,
    merge_valid: Tensor | None,
    merge_ids: Tensor | None,
    merge_probs: Tensor | None,
    merge_residual: Tensor | None,
    *,
    mask_token_id: int,
    fast_path: bool = False,
) -> None:
    arguments = FakeArguments("accept_dmax", tokens)
    _check_blocks(arguments, tokens, valid_len)
    _check_rows(arguments, tokens, row_index, ids, stats)
    num_blocks = tokens.shape[0]
    arguments.tensor("editable_start", editable_start, INT32, (num_blocks,))
    arguments.tensor("gate", gate, UINT8, (num_blocks,))
    arguments.tensor("accept_threshold", accept_threshold, FLOAT32, (num_blocks,))
    arguments.tensor("open_steps", open_steps, INT32, (num_blocks,))
    arguments.paired("topk_probs", topk_probs, "topk_ids", topk_ids is not None)
    arguments.optional("argmax_ids", argmax_ids, INT64, (ids.shape[0],))
    if argmax_ids is not None:
        arguments.require("topk_ids", topk_ids is not None, "a tensor with argmax_ids", "none")
    listed = 1
    if topk_ids is not None:
        arguments.tensor("topk_ids", topk_ids, INT64, (ids.shape[0], None))
        listed = topk_ids.shape[1]
        arguments.require("topk_ids", listed >= 1, "at least one column", list(topk_ids.shape))
        arguments.optional("topk_probs", topk_probs, FLOAT32, topk_ids.shape)
    arguments.tensor("write_ids", write_ids, INT64, tokens.shape)
    arguments.tensor("confidence", confidence, FLOAT32, tokens.shape)
    arguments.tensor("masks_left", masks_left, INT32, (num_blocks,))
    arguments.tensor("flags", flags, INT32, (num_blocks,))
    arguments.tensor("same_token_ratio", same_token_ratio, FLOAT32, (num_blocks,))
    has_merge = merge_valid is not None
    arguments.optional("merge_valid", merge_valid, UINT8, tokens.shape)
    arguments.paired("merge_ids", merge_ids, "merge_valid", has_merge)
    arguments.paired("merge_probs", merge_probs, "merge_valid", has_merge)
    arguments.paired("merge_residual", merge_residual, "merge_valid", has_merge)
    if merge_ids is not None:
        arguments.tensor("merge_ids", merge_ids, INT64, (*tokens.shape, None))
        count = merge_ids.shape[2]
        expected = f"1 to {listed} entries per position (the columns of topk_ids, 1 without)"
        arguments.require("merge_ids", count >= 1, expected, count)
        arguments.require("merge_ids", count <= listed, expected, count)
        arguments.optional("merge_probs", merge_probs, FLOAT32, merge_ids.shape)
        arguments.optional("merge_residual", merge_residual, FLOAT32, tokens.shape)
    arguments.at_least("mask_token_id", mask_token_id, 0)


@register("accept_gemma")
def _accept_gemma(
    tokens: Tensor,
    row_index: Tensor,
    valid_len: Tensor | None,
    prev_argmax: Tensor,
    stable_run: Tensor,
    steps_left: Tensor,
    renoise_ids: Tensor,
    ids: Tensor,
    stats: Tensor,
    argmax_ids: Tensor,
    write_ids: Tensor,
    argmax: Tensor,
    confidence: Tensor,
    flags: Tensor,
    *,
    entropy_bound: float,
    stability_threshold: int,
    confidence_threshold: float,
) -> None:
    arguments = FakeArguments("accept_gemma", tokens)
    _check_blocks(arguments, tokens, valid_len)
    _check_rows(arguments, tokens, row_index, ids, stats)
    num_blocks = tokens.shape[0]
    arguments.tensor("prev_argmax", prev_argmax, INT64, tokens.shape)
    arguments.tensor("stable_run", stable_run, INT32, (num_blocks,))
    arguments.tensor("steps_left", steps_left, INT32, (num_blocks,))
    arguments.tensor("renoise_ids", renoise_ids, INT64, tokens.shape)
    arguments.tensor("argmax_ids", argmax_ids, INT64, (ids.shape[0],))
    arguments.tensor("write_ids", write_ids, INT64, tokens.shape)
    arguments.tensor("argmax", argmax, INT64, tokens.shape)
    arguments.tensor("confidence", confidence, FLOAT32, tokens.shape)
    arguments.tensor("flags", flags, INT32, (num_blocks,))
    arguments.require("entropy_bound", not math.isnan(entropy_bound), "a number", entropy_bound)
    arguments.at_least("stability_threshold", stability_threshold, 0)
    arguments.require(
        "confidence_threshold",
        not math.isnan(confidence_threshold),
        "a number",
        confidence_threshold,
    )
