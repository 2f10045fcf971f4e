# SPDX-License-Identifier: Apache-2.0
"""How much device memory the steps leave for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from diffulex.nn.attention_metadata import AttnMetadata
from diffulex.ops.attention import MaskKind
from diffulex.runner.attention_workspace import decode_workspace_bytes
from diffulex.runner.model_call import BlankRows
from diffulex.samplers.base import RowSampler, Sampler

if TYPE_CHECKING:
    from torch import Tensor

    from diffulex.config.config import Config
    from diffulex.nn.kv_cache import KVCache
    from diffulex.runner.attention_workspace import AttentionWorkspace
    from diffulex.runner.decode_graphs import Bucket
    from diffulex.runner.model_call import ModelCall

__all__ = ["GraphMemory", "free_device_bytes", "max_logits_rows"]

# The driver's share of a graph of a few hundred kernels.
_BYTES_PER_GRAPH = 4 << 20
# The same of a few tens, of a head and its sampler; their logits lie in the pool of larger steps.
_BYTES_PER_HEAD = 1 << 20
# The segments of two pools, which are larger than what lies in them, and the scratch of cuBLAS.
_POOL_ROUNDING_BYTES = 128 << 20


def max_logits_rows(config: Config) -> int:
    """Most logits rows of a step, prefill or decode."""
    scheduler = config.scheduler
    num_rows = scheduler.max_num_reqs * config.decode_logits_rows
    most = min(scheduler.max_num_batched_tokens, num_rows)
    # With shifted logits every request may save a row that no position of its blocks needs.
    return most + (scheduler.max_num_reqs if config.model.spec.shift else 0)


def free_device_bytes(
    config: Config,
    call: ModelCall,
    kv_cache: KVCache,
    workspace: AttentionWorkspace,
    sampler: Sampler,
    graphs: GraphMemory | None,
) -> int:
    """total * utilisation - used - peak of a forward at maximum rows + held by torch now - graphs.

    The current device must be that of the model.
    """
    device = torch.device(config.model.device)
    torch.cuda.empty_cache()
    is_warming = not config.scheduler.skip_warmup
    graph_bytes = 0
    if graphs is not None and is_warming:
        graph_bytes = graphs.measure(config, call, kv_cache, workspace)
    torch.cuda.reset_peak_memory_stats(device)
    if is_warming:
        _run_largest_prefill(config, call, kv_cache, workspace, sampler)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    current = torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free
    share = int(total * config.cache.gpu_memory_utilization)
    return share - used - peak + current - graph_bytes


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """What the graphs of decode steps will hold: their pools stay beside the memory of eager steps.

    Args:
        shapes: every padded step that gets a graph, the largest first.
        logits_rows: most rows whose logits a graph keeps; 0 where graphs are forwards alone.
        num_heads: graphs of what follows the forward of packed steps.
    """

    shapes: tuple[Bucket, ...]
    logits_rows: int
    num_heads: int

    @torch.inference_mode()
    def measure(
        self, config: Config, call: ModelCall, kv_cache: KVCache, workspace: AttentionWorkspace
    ) -> int:
        """Bytes, from a step of the largest shape without a graph."""
        device = torch.device(config.model.device)
        largest = max(self.shapes, key=lambda bucket: bucket.num_rows)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        hidden = _blank_forward(
            config, call, kv_cache, workspace, largest.num_rows, largest.rows_per_request
        )
        forward_peak = torch.cuda.max_memory_allocated(device)
        num_hidden = hidden.nbytes
        if self.logits_rows > 0:
            call.model.compute_logits(hidden[: self.logits_rows])
        step_peak = torch.cuda.max_memory_allocated(device)
        scratch = decode_workspace_bytes(config.local_spec, self.shapes, device.type)
        # Steps of the loop and forwards of the host have a pool each; the latter's results are static.
        num_bytes = step_peak + forward_peak - 2 * before + num_hidden + scratch
        num_bytes += len(self.shapes) * _BYTES_PER_GRAPH + self.num_heads * _BYTES_PER_HEAD
        return num_bytes + _POOL_ROUNDING_BYTES


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
    hidden = _blank_forward(config, call, kv_cache, workspace, num_rows, length)
    num_logits = max_logits_rows(config)
    logits = call.model.compute_logits(hidden[:num_logits])
    if isinstance(sampler, RowSampler):
        sampler.reserve(num_logits, logits.size(1))


def _blank_forward(
    config: Config,
    call: ModelCall,
    kv_cache: KVCache,
    workspace: AttentionWorkspace,
    num_rows: int,
    length: int,
) -> Tensor:
    """Hidden states of rows of token 0 in requests of `length` rows, nothing cached or stored."""
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
    return call(rows, num_rows, metadata, kv_cache)
