# SPDX-License-Identifier: Apache-2.0
"""A legal call of `advance_decode`: two requests one step behind their prompts, one dummy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffulex.runner.batch import ArenaViews, host_memory
from diffulex_ext import _core

Call = tuple[dict[str, torch.Tensor], dict[str, Any]]

B, N, MASK = 4, 2, 39
R = 3


def options(**fields: Any) -> _core.EngineOptions:
    """Options of an engine with room for the call."""
    common = {
        "block_size": B,
        "buffer_size": N,
        "page_size": 4,
        "num_pages": 16,
        "max_num_reqs": R,
        "max_num_batched_tokens": 64,
        "max_model_len": 32,
        "mask_token_id": MASK,
        "vocab_size": 40,
    }
    return _core.EngineOptions(**(common | fields))


def arena(
    kind: type[_core.StepPlan | _core.SamplerOutput | _core.DecodeBatch],
    opts: _core.EngineOptions,
) -> tuple[Any, torch.Tensor]:
    """An object of the core and the memory that it fills."""
    memory = host_memory(kind.arena_bytes(opts), is_pinned=False)
    return kind(opts, memory.data_ptr(), memory.numel()), memory


def advance_decode(**fields: Any) -> Call:
    """The call with arenas of these options."""
    opts = options(**fields)
    scheduler = _core.Scheduler(opts, _core.KVCacheManager(opts))
    for prompt, temperature in (([1, 2, 3, 4, 5], 0.0), ([6, 7, 8, 9], 1.0)):
        params = _core.SamplingParams(max_tokens=16, temperature=temperature, seed=7)
        scheduler.add_request(_core.Request(prompt, params, opts))
    plan, plan_memory = arena(_core.StepPlan, opts)
    output, output_memory = arena(_core.SamplerOutput, opts)
    batch, batch_memory = arena(_core.DecodeBatch, opts)
    assert scheduler.schedule(plan) == _core.PlanKind.PREFILL
    for blk in range(plan.num_blocks):
        output.write_ids[blk, 3] = 11
    scheduler.complete_step(plan, output)
    assert scheduler.schedule(plan) == _core.PlanKind.DECODE
    scheduler.start_run_ahead(plan, batch)
    assert scheduler.reserve_ahead(batch) != _core.RunAhead.STOP
    pages = ArenaViews(batch_memory, batch.fields()).page_tables
    ArenaViews(plan_memory, plan.fields()).page_tables.copy_(pages)
    output.clear(R * N)
    output.write_ids[0, 1], output.write_ids[2, 0] = 12, 13
    output.flags[:] = 8
    arenas = {"plan": plan_memory, "output": output_memory, "batch": batch_memory}
    flags = {"masked_rows_only": True, "has_block_cache": True, "is_entry": False}
    layout = _core.plan_layout(opts)
    tensors = {name: memory.clone() for name, memory in arenas.items()}
    return tensors, {"layout": layout, "num_reqs": R, **flags}


CALLS: dict[str, Callable[[], Call]] = {"advance_decode": advance_decode}
