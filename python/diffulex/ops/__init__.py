# SPDX-License-Identifier: Apache-2.0
"""Functional face of `torch.ops.diffulex`: allocates outputs and scratch, then calls the op.

One module per op family: its wrappers and, below them, its fake kernels. Inference only: everything runs
under `torch.no_grad`.
"""

from __future__ import annotations

import diffulex_ext

if not diffulex_ext.has_ops:
    raise ImportError(
        "diffulex.ops: expected the op library libdiffulex_ops.so beside the package diffulex_ext "
        "and a torch that loads it, got neither or DIFFULEX_NO_TORCH=1"
    )

from diffulex.families.base import FilterOrder as FilterOrder
from diffulex.ops import advance as advance  # a fake without a wrapper
from diffulex.ops.acceptance import AcceptResult as AcceptResult
from diffulex.ops.acceptance import DmaxResult as DmaxResult
from diffulex.ops.acceptance import EditResult as EditResult
from diffulex.ops.acceptance import GemmaResult as GemmaResult
from diffulex.ops.acceptance import accept_dmax as accept_dmax
from diffulex.ops.acceptance import accept_edit as accept_edit
from diffulex.ops.acceptance import accept_gemma as accept_gemma
from diffulex.ops.acceptance import accept_mask_fill as accept_mask_fill
from diffulex.ops.activation import Activation as Activation
from diffulex.ops.activation import act_and_mul as act_and_mul
from diffulex.ops.attention import MASK_ANCHOR_BIT as MASK_ANCHOR_BIT
from diffulex.ops.attention import MASK_HOLE_BIT as MASK_HOLE_BIT
from diffulex.ops.attention import KvLayout as KvLayout
from diffulex.ops.attention import MaskKind as MaskKind
from diffulex.ops.attention import block_attention as block_attention
from diffulex.ops.comm import CollectiveAlgorithm as CollectiveAlgorithm
from diffulex.ops.comm import PeerGroup as PeerGroup
from diffulex.ops.comm import collective_plan as collective_plan
from diffulex.ops.comm import sum_add_rms_norm as sum_add_rms_norm
from diffulex.ops.device import has_hopper_kernels as has_hopper_kernels
from diffulex.ops.device import warmup as warmup
from diffulex.ops.kv_cache import copy_kv_pages as copy_kv_pages
from diffulex.ops.kv_cache import load_kv_cache as load_kv_cache
from diffulex.ops.kv_cache import store_kv_cache as store_kv_cache
from diffulex.ops.linear import FEW_ROWS as FEW_ROWS
from diffulex.ops.linear import FEW_ROWS_COLUMNS as FEW_ROWS_COLUMNS
from diffulex.ops.linear import FEW_ROWS_DEPTH as FEW_ROWS_DEPTH
from diffulex.ops.linear import is_few_rows as is_few_rows
from diffulex.ops.linear import linear_few_rows as linear_few_rows
from diffulex.ops.linear import linear_packed as linear_packed
from diffulex.ops.linear import pack_weight as pack_weight
from diffulex.ops.linear import unpack_weight as unpack_weight
from diffulex.ops.moe import MoePermutation as MoePermutation
from diffulex.ops.moe import fused_experts_packed as fused_experts_packed
from diffulex.ops.moe import fused_moe as fused_moe
from diffulex.ops.moe import moe_combine as moe_combine
from diffulex.ops.moe import moe_permute as moe_permute
from diffulex.ops.moe import new_fused_moe_workspace as new_fused_moe_workspace
from diffulex.ops.norm import add_rms_norm as add_rms_norm
from diffulex.ops.norm import rms_norm as rms_norm
from diffulex.ops.norm import rms_norm_add as rms_norm_add
from diffulex.ops.quantize import INT4_ZERO as INT4_ZERO
from diffulex.ops.quantize import QUANT_GROUP as QUANT_GROUP
from diffulex.ops.quantize import QuantizedRows as QuantizedRows
from diffulex.ops.quantize import WeightScheme as WeightScheme
from diffulex.ops.quantize import as_nibble_tiles as as_nibble_tiles
from diffulex.ops.quantize import dequantize_nibbles as dequantize_nibbles
from diffulex.ops.quantize import from_nibble_tiles as from_nibble_tiles
from diffulex.ops.quantize import is_tileable as is_tileable
from diffulex.ops.quantize import linear_scaled as linear_scaled
from diffulex.ops.quantize import linear_w4a16 as linear_w4a16
from diffulex.ops.quantize import new_quantized_rows as new_quantized_rows
from diffulex.ops.quantize import pack_panels as pack_panels
from diffulex.ops.quantize import quantize_rows as quantize_rows
from diffulex.ops.quantize import quantize_rows_into as quantize_rows_into
from diffulex.ops.quantize import quantize_weight as quantize_weight
from diffulex.ops.quantize import to_nibble_tiles as to_nibble_tiles
from diffulex.ops.quantize import unpack_panels as unpack_panels
from diffulex.ops.quantize import weight_parts as weight_parts
from diffulex.ops.rope import qk_norm_rope as qk_norm_rope
from diffulex.ops.rope import qk_norm_rope_store as qk_norm_rope_store
from diffulex.ops.rope import rotary_embedding as rotary_embedding
from diffulex.ops.routing import GroupScore as GroupScore
from diffulex.ops.routing import RouterScoring as RouterScoring
from diffulex.ops.routing import Routing as Routing
from diffulex.ops.routing import moe_topk as moe_topk
from diffulex.ops.routing import router_gemm as router_gemm
from diffulex.ops.sampling import AcceptFlag as AcceptFlag
from diffulex.ops.sampling import AcceptRule as AcceptRule
from diffulex.ops.sampling import ConfidenceKind as ConfidenceKind
from diffulex.ops.sampling import ConfidenceSpace as ConfidenceSpace
from diffulex.ops.sampling import ExclusionMode as ExclusionMode
from diffulex.ops.sampling import StatsColumn as StatsColumn
from diffulex.ops.sampling import TokenStats as TokenStats
from diffulex.ops.sampling import entropy_bound_mask as entropy_bound_mask
from diffulex.ops.sampling import merge_token_stats as merge_token_stats
from diffulex.ops.sampling import sample_filtered as sample_filtered
from diffulex.ops.sampling import token_stats as token_stats
from diffulex.ops.settled import batch_invariant as batch_invariant
from diffulex.ops.settled import settled_weights as settled_weights
from diffulex.ops.soft_embedding import soft_embedding as soft_embedding
from diffulex.ops.soft_embedding import soft_probabilities as soft_probabilities
from diffulex.ops.token_merge import MergeKind as MergeKind
from diffulex.ops.token_merge import token_merge_embed as token_merge_embed
from diffulex.ops.token_merge import token_merge_finalize as token_merge_finalize
from diffulex.ops.token_merge import token_merge_partial as token_merge_partial
from diffulex.ops.workspace import attention_workspace_bytes as attention_workspace_bytes
from diffulex.ops.workspace import empty_workspace as empty_workspace
from diffulex.ops.workspace import (
    fused_experts_packed_workspace_bytes as fused_experts_packed_workspace_bytes,
)
from diffulex.ops.workspace import fused_moe_workspace_bytes as fused_moe_workspace_bytes
from diffulex.ops.workspace import moe_max_tiles as moe_max_tiles
from diffulex.ops.workspace import soft_embedding_workspace_bytes as soft_embedding_workspace_bytes
from diffulex.ops.workspace import token_stats_workspace_bytes as token_stats_workspace_bytes
