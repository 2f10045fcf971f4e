# SPDX-License-Identifier: Apache-2.0
"""A legal call of `advance_decode`: two requests one step behind their prompts, one dummy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffulex.runner.batch import arena_tensors, host_memory
from diffulex_ext import _core

Call = tuple[dict[str, torch.Tensor | None], dict[str, Any]]

B, N, MASK = 4, 2, 39
R, T = 3, 3 * B * N

#: Arrays of strategies that this call is not of.
_ABSENT = (
    "pending_next_token",
    "seed_row",
    "mask_kinds",
    "prev_argmax",
    "canvas_argmax",
    "stable_run",
    "steps_left",
    "renoise_ids",
    "block_slot",
    "row_pass_kind",
    "row_self_cond",
)


def options() -> _core.EngineOptions:
    """Options of an engine with room for the call."""
    return _core.EngineOptions(
        block_size=B,
        buffer_size=N,
        page_size=4,
        num_pages=16,
        max_num_reqs=R,
        max_num_batched_tokens=64,
        max_model_len=32,
        mask_token_id=MASK,
        vocab_size=40,
    )


def decoding() -> tuple[_core.Scheduler, _core.StepPlan, _core.DecodeBatch, torch.Tensor]:
    """A scheduler with a decode plan in flight, and the batch of that plan with its memory."""
    opts = options()
    scheduler = _core.Scheduler(opts, _core.KVCacheManager(opts))
    for prompt, temperature in (([1, 2, 3, 4, 5], 0.0), ([6, 7, 8, 9], 1.0)):
        params = _core.SamplingParams(max_tokens=16, temperature=temperature, seed=7)
        scheduler.add_request(_core.Request(prompt, params, opts))
    plan, output = _core.StepPlan(opts), _core.SamplerOutput(opts)
    assert scheduler.schedule(plan) == _core.PlanKind.PREFILL
    for blk in range(plan.num_blocks):
        output.write_ids[blk, 3] = 11
    scheduler.complete_step(plan, output)
    assert scheduler.schedule(plan) == _core.PlanKind.DECODE
    num_bytes = _core.DecodeBatch.arena_bytes(opts)
    memory = host_memory(num_bytes, is_pinned=False)
    batch = _core.DecodeBatch(opts, memory.data_ptr(), num_bytes)
    scheduler.start_run_ahead(plan, batch)
    assert scheduler.reserve_ahead(batch) != _core.RunAhead.STOP
    return scheduler, plan, batch, memory


def advance_decode() -> Call:
    _, _, batch, memory = decoding()
    arrays = arena_tensors(memory, batch.fields())
    state = {k: v.clone() for k, v in arrays.items() if k not in _ABSENT}
    ints = {"dtype": torch.int32}
    write_ids = torch.full((R * N, B), -1)
    write_ids[0, 1], write_ids[2, 0] = 12, 13
    tensors: dict[str, torch.Tensor | None] = {
        **state,
        "write_ids": write_ids,
        "flags": torch.full((R * N,), 8, **ints),
        "same_token_ratio": torch.ones(R * N),
        "input_ids": torch.zeros(T, dtype=torch.int64),
        "positions": torch.zeros(T, dtype=torch.int64),
        "slot_mapping": torch.zeros(T, **ints),
        "context_lens": torch.zeros(R, **ints),
        "valid_slices": torch.zeros(R, **ints),
        "tokens": torch.zeros(R * N, B, dtype=torch.int64),
        "row_index": torch.zeros(R * N, B, **ints),
        "editable_start": torch.zeros(R * N, **ints),
        "valid_len": torch.zeros(R * N, **ints),
        "gate": torch.zeros(R * N, dtype=torch.uint8),
        "accept_threshold": torch.zeros(R * N),
        "edit_threshold": torch.zeros(R * N),
        "open_steps": torch.zeros(R * N, **ints),
        "total_steps": torch.zeros(R * N, **ints),
        "post_edit_steps": torch.zeros(R * N, **ints),
        "inv_temperature": torch.zeros(T),
        "uniforms": torch.zeros(T, dtype=torch.float64),
        "top_k": torch.zeros(T, **ints),
        "top_p": torch.zeros(T),
        "min_p": torch.zeros(T),
        "merge_valid": torch.ones(R * N, B, dtype=torch.uint8),
        "merge_ids": torch.full((R * N, B, 2), 5),
        "merge_probs": torch.full((R * N, B, 2), 0.25),
        "merge_residual": torch.full((R * N, B), 0.5),
        "row_merge_mask": torch.zeros(T, dtype=torch.uint8),
        "row_merge_ids": torch.zeros(T, 2, dtype=torch.int64),
        "row_merge_probs": torch.zeros(T, 2),
        "row_merge_residual": torch.zeros(T),
        "last_row_index": torch.zeros(R, **ints),
        "logits_source": torch.zeros(T, **ints),
        **dict.fromkeys(_ABSENT),
    }
    flags = {"masked_rows_only": True, "has_block_cache": True, "is_entry": False}
    return tensors, {"page_size": 4, "first_saved_row": T, **flags}


CALLS: dict[str, Callable[[], Call]] = {"advance_decode": advance_decode}

#: First extents at which a call has nothing to do.
EMPTY: dict[str, dict[str, int]] = {
    "advance_decode": {
        name: 0 for name, tensor in advance_decode()[0].items() if tensor is not None
    }
}
