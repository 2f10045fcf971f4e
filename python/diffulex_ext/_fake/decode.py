# SPDX-License-Identifier: Apache-2.0
"""Fake kernel of the op between two decode steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex_ext._fake.arguments import FakeArguments
from diffulex_ext._fake.registry import FLOAT32, FLOAT64, INT32, INT64, UINT8, register

if TYPE_CHECKING:
    from torch import Tensor


@register("advance_decode")
def _advance_decode(
    requests: Tensor,
    windows: Tensor,
    page_tables: Tensor,
    write_ids: Tensor,
    flags: Tensor,
    same_token_ratio: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    context_lens: Tensor,
    valid_slices: Tensor,
    tokens: Tensor,
    row_index: Tensor,
    editable_start: Tensor,
    valid_len: Tensor,
    gate: Tensor,
    accept_threshold: Tensor,
    edit_threshold: Tensor | None,
    open_steps: Tensor,
    total_steps: Tensor,
    post_edit_steps: Tensor,
    inv_temperature: Tensor,
    uniforms: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    merge_valid: Tensor | None,
    merge_ids: Tensor | None,
    merge_probs: Tensor | None,
    merge_residual: Tensor | None,
    row_merge_mask: Tensor | None,
    row_merge_ids: Tensor | None,
    row_merge_probs: Tensor | None,
    row_merge_residual: Tensor | None,
    last_row_index: Tensor | None,
    logits_source: Tensor | None,
    pending_next_token: Tensor | None,
    seed_row: Tensor | None,
    mask_kinds: Tensor | None,
    prev_argmax: Tensor | None,
    canvas_argmax: Tensor | None,
    stable_run: Tensor | None,
    steps_left: Tensor | None,
    renoise_ids: Tensor | None,
    block_slot: Tensor | None,
    row_pass_kind: Tensor | None,
    row_self_cond: Tensor | None,
    *,
    page_size: int,
    first_saved_row: int = 0,
    masked_rows_only: bool = True,
    has_block_cache: bool = True,
    is_entry: bool = False,
) -> None:
    arguments = FakeArguments("advance_decode", requests)
    arguments.tensor("tokens", tokens, INT64, (None, None))
    arguments.tensor("requests", requests, UINT8, (None, None))
    num_reqs, num_blocks, width = requests.shape[0], tokens.shape[0], tokens.shape[1]
    num_rows = num_blocks * width
    arguments.at_least("page_size", page_size, 1)
    arguments.tensor("windows", windows, INT32, (num_reqs, None))
    arguments.tensor("page_tables", page_tables, INT32, (num_reqs, None))
    reqs, blocks, rows = (num_reqs,), (num_blocks,), (num_rows,)
    wide_blocks = (num_blocks, width)
    for name, tensor, dtype, shape in (
        ("write_ids", write_ids, INT64, wide_blocks),
        ("row_index", row_index, INT32, wide_blocks),
        ("flags", flags, INT32, blocks),
        ("same_token_ratio", same_token_ratio, FLOAT32, blocks),
        ("editable_start", editable_start, INT32, blocks),
        ("valid_len", valid_len, INT32, blocks),
        ("gate", gate, UINT8, blocks),
        ("accept_threshold", accept_threshold, FLOAT32, blocks),
        ("edit_threshold", edit_threshold, FLOAT32, blocks),
        ("open_steps", open_steps, INT32, blocks),
        ("total_steps", total_steps, INT32, blocks),
        ("post_edit_steps", post_edit_steps, INT32, blocks),
        ("input_ids", input_ids, INT64, rows),
        ("positions", positions, INT64, rows),
        ("slot_mapping", slot_mapping, INT32, rows),
        ("inv_temperature", inv_temperature, FLOAT32, rows),
        ("uniforms", uniforms, FLOAT64, rows),
        ("top_k", top_k, INT32, rows),
        ("top_p", top_p, FLOAT32, rows),
        ("min_p", min_p, FLOAT32, rows),
        ("context_lens", context_lens, INT32, reqs),
        ("valid_slices", valid_slices, INT32, reqs),
    ):
        arguments.optional(name, tensor, dtype, shape)
    has_seeds, has_canvas = seed_row is not None, prev_argmax is not None
    for other, has_other in (("seed_row", has_seeds), ("prev_argmax", has_canvas)):
        for name, tensor in (("merge_valid", merge_valid), ("last_row_index", last_row_index)):
            arguments.require(
                name, tensor is None or not has_other, f"none with {other}", "a tensor"
            )
    arguments.require(
        "prev_argmax", not (has_seeds and has_canvas), "none with seed_row", "a tensor"
    )
    arguments.paired("mask_kinds", mask_kinds, "seed_row or prev_argmax", has_seeds or has_canvas)
    arguments.paired("pending_next_token", pending_next_token, "seed_row", seed_row is not None)
    arguments.optional("pending_next_token", pending_next_token, INT64, reqs)
    arguments.optional("seed_row", seed_row, INT32, reqs)
    arguments.optional("mask_kinds", mask_kinds, INT32, reqs)
    arguments.paired("logits_source", logits_source, "last_row_index", last_row_index is not None)
    if last_row_index is not None:
        last = torch.iinfo(torch.int32).max - num_reqs  # records of slots follow
        is_in_range = first_saved_row >= num_rows and first_saved_row <= last
        arguments.require("first_saved_row", is_in_range, f"{num_rows} to {last}", first_saved_row)
    arguments.optional("last_row_index", last_row_index, INT32, reqs)
    arguments.optional("logits_source", logits_source, INT32, rows)
    merged = {
        "merge_ids": merge_ids,
        "merge_probs": merge_probs,
        "merge_residual": merge_residual,
        "row_merge_mask": row_merge_mask,
        "row_merge_ids": row_merge_ids,
        "row_merge_probs": row_merge_probs,
        "row_merge_residual": row_merge_residual,
    }
    for name, merge in merged.items():
        arguments.paired(name, merge, "merge_valid", merge_valid is not None)
    arguments.optional("prev_argmax", prev_argmax, INT64, wide_blocks)
    if has_canvas:
        arguments.require(
            "tokens", num_blocks == num_reqs, "one canvas for each request", list(tokens.shape)
        )
    for name, canvas, dtype, shape in (
        ("canvas_argmax", canvas_argmax, INT64, wide_blocks),
        ("stable_run", stable_run, INT32, blocks),
        ("steps_left", steps_left, INT32, blocks),
        ("renoise_ids", renoise_ids, INT64, wide_blocks),
        ("block_slot", block_slot, INT32, blocks),
        ("row_pass_kind", row_pass_kind, UINT8, rows),
        ("row_self_cond", row_self_cond, INT32, rows),
    ):
        arguments.paired(name, canvas, "prev_argmax", prev_argmax is not None)
        arguments.optional(name, canvas, dtype, shape)
    if merge_valid is not None and merge_ids is not None:
        arguments.tensor("merge_valid", merge_valid, UINT8, (num_blocks, width))
        arguments.tensor("merge_ids", merge_ids, INT64, (num_blocks, width, None))
        top_k_size = merge_ids.shape[2]
        arguments.optional("merge_probs", merge_probs, FLOAT32, (num_blocks, width, top_k_size))
        arguments.optional("merge_residual", merge_residual, FLOAT32, (num_blocks, width))
        arguments.optional("row_merge_mask", row_merge_mask, UINT8, (num_rows,))
        arguments.optional("row_merge_ids", row_merge_ids, INT64, (num_rows, top_k_size))
        arguments.optional("row_merge_probs", row_merge_probs, FLOAT32, (num_rows, top_k_size))
        arguments.optional("row_merge_residual", row_merge_residual, FLOAT32, (num_rows,))
