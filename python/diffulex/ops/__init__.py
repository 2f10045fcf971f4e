# SPDX-License-Identifier: Apache-2.0
"""Functional face of `torch.ops.diffulex`: allocates outputs and scratch, then calls the op.

One module per op family, each with pure torch twins (`*_reference`) for debugging. Inference only:
everything runs under `torch.no_grad`.
"""

from __future__ import annotations

import diffulex_ext

if not diffulex_ext.has_ops:
    raise ImportError(
        "diffulex.ops: expected the op library libdiffulex_ops.so beside the package diffulex_ext "
        "and a torch that loads it, got neither or DIFFULEX_NO_TORCH=1"
    )

from diffulex.ops.activation import Activation as Activation
from diffulex.ops.activation import act_and_mul as act_and_mul
from diffulex.ops.attention import MASK_HOLE_BIT as MASK_HOLE_BIT
from diffulex.ops.attention import KvLayout as KvLayout
from diffulex.ops.attention import MaskKind as MaskKind
from diffulex.ops.attention import attention_plan as attention_plan
from diffulex.ops.attention import block_attention as block_attention
from diffulex.ops.kv_cache import copy_kv_pages as copy_kv_pages
from diffulex.ops.kv_cache import load_kv_cache as load_kv_cache
from diffulex.ops.kv_cache import store_kv_cache as store_kv_cache
from diffulex.ops.linear import linear_packed as linear_packed
from diffulex.ops.linear import pack_weight as pack_weight
from diffulex.ops.linear import unpack_weight as unpack_weight
from diffulex.ops.norm import add_rms_norm as add_rms_norm
from diffulex.ops.norm import rms_norm as rms_norm
from diffulex.ops.norm import rms_norm_add as rms_norm_add
from diffulex.ops.rope import qk_norm_rope as qk_norm_rope
from diffulex.ops.rope import qk_norm_rope_store as qk_norm_rope_store
from diffulex.ops.rope import rotary_embedding as rotary_embedding
from diffulex.ops.sampling import AcceptFlag as AcceptFlag
from diffulex.ops.sampling import AcceptResult as AcceptResult
from diffulex.ops.sampling import AcceptRule as AcceptRule
from diffulex.ops.sampling import ConfidenceKind as ConfidenceKind
from diffulex.ops.sampling import ExclusionMode as ExclusionMode
from diffulex.ops.sampling import StatsColumn as StatsColumn
from diffulex.ops.sampling import TokenStats as TokenStats
from diffulex.ops.sampling import accept_mask_fill as accept_mask_fill
from diffulex.ops.sampling import merge_token_stats as merge_token_stats
from diffulex.ops.sampling import token_stats as token_stats
from diffulex.ops.warmup import warmup as warmup
from diffulex.ops.workspace import attention_plan_elems as attention_plan_elems
from diffulex.ops.workspace import attention_workspace_bytes as attention_workspace_bytes
from diffulex.ops.workspace import empty_workspace as empty_workspace
from diffulex.ops.workspace import token_stats_workspace_bytes as token_stats_workspace_bytes
