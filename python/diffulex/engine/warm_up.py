# SPDX-License-Identifier: Apache-2.0
"""How much device memory the steps leave for the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex.engine.batch import AttnMetadata
from diffulex.engine.model_call import BlankRows
from diffulex.ops.attention import MaskKind

if TYPE_CHECKING:
    from diffulex.config import Config
    from diffulex.engine.attention_workspace import AttentionWorkspace
    from diffulex.engine.kv_cache import KVCache
    from diffulex.engine.model_call import ModelCall
    from diffulex.sampler.base import Sampler

__all__ = ["free_device_bytes", "max_logits_rows"]


def max_logits_rows(config: Config) -> int:
    """Most logits rows of a step, prefill or decode, of models without shifted logits."""
    scheduler = config.scheduler
    return min(scheduler.max_num_batched_tokens, scheduler.max_num_reqs * config.decode_rows)


def free_device_bytes(
    config: Config,
    call: ModelCall,
    kv_cache: KVCache,
    workspace: AttentionWorkspace,
    sampler: Sampler,
) -> int:
    """total * utilisation - used - peak of a forward at maximum rows + held by torch now.

    The current device must be that of the model.
    """
    device = torch.device(config.model.device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    if not config.scheduler.skip_warmup:
        _run_largest_prefill(config, call, kv_cache, workspace, sampler)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    current = torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    return int(total * config.cache.gpu_memory_utilization) - used - peak + current


@torch.inference_mode()
def _run_largest_prefill(
    config: Config,
    call: ModelCall,
    kv_cache: KVCache,
    workspace: AttentionWorkspace,
    sampler: Sampler,
) -> None:
    """A prefill of the row budget with logits and statistics of the most rows a step has."""
    scheduler = config.scheduler
    num_rows = scheduler.max_num_batched_tokens
    length = min(scheduler.max_model_len, num_rows)
    num_reqs = -(-num_rows // length)
    device, int32 = torch.device(config.model.device), torch.int32
    ends = torch.arange(num_reqs + 1, dtype=int32, device=device) * length
    ends = ends.clamp(max=num_rows)
    zeros = torch.zeros(num_reqs, dtype=int32, device=device)
    is_canvas = call.signals is not None
    kind = MaskKind.CAUSAL if is_canvas else MaskKind.BLOCK_CAUSAL
    metadata = AttnMetadata(
        page_tables=torch.full((num_reqs, 1), -1, dtype=int32, device=device),
        cu_seqlens_q=ends,
        context_lens=zeros,
        valid_slices=ends[1:].contiguous(),
        mask_kinds=torch.full_like(zeros, int(kind)),
        prefix_lens=None,
        padded_prefix_lens=None,
        q_starts=None,
        slot_mapping=torch.full((num_rows,), -1, dtype=int32, device=device),
        block_size=config.att_block_size,
        page_size=config.cache.page_size,
        max_seqlen_q=length,
        max_context_len=0,
        num_splits=0,
        kv_layout=kv_cache.kv_layout,
        workspace=workspace.of(num_reqs, length, 0),
    )
    positions = torch.arange(num_rows, dtype=torch.int64, device=device) % length
    rows = BlankRows.of(positions, config.decoding.token_merge_top_k)
    hidden = call(rows, num_rows, metadata, kv_cache)
    num_logits = max_logits_rows(config)
    logits = call.model.compute_logits(hidden[:num_logits])
    reserve = getattr(sampler, "reserve", None)
    if reserve is not None:
        reserve(num_logits, logits.size(1))
