# SPDX-License-Identifier: Apache-2.0
"""What the attention layers of a forward are told; R requests, T rows, P page-table width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AttnMetadata"]


@dataclass(slots=True)
class AttnMetadata:
    """What attention and the cache store need to know about one forward."""

    page_tables: Tensor  # [R, P] int32, -1 = none
    cu_seqlens_q: Tensor  # [R + 1] int32
    context_lens: Tensor  # [R] int32
    valid_slices: Tensor  # [R] int32, row one past the last real row
    mask_kinds: Tensor  # [R] int32, MaskKind
    prefix_lens: Tensor | None  # [R] int32
    padded_prefix_lens: Tensor | None  # [R] int32
    q_starts: Tensor | None  # [R] int32; None = context_lens
    slot_mapping: Tensor  # [T] int32, -1 = not stored
    block_size: int
    page_size: int
    max_seqlen_q: int
    max_context_len: int
    num_splits: int
    kv_layout: int
    workspace: Tensor | None  # uint8 scratch of block_attention
