# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of the ops: sizes from the compiled core, tensors aligned as the ops want them."""

from __future__ import annotations

import torch

from diffulex_ext import (
    attention_splits,
    attention_workspace_bytes,
    fused_experts_packed_workspace_bytes,
    fused_moe_workspace_bytes,
    moe_max_tiles,
    soft_embedding_workspace_bytes,
    token_stats_workspace_bytes,
)

__all__ = [
    "WORKSPACE_ALIGNMENT",
    "attention_splits",
    "attention_workspace_bytes",
    "empty_workspace",
    "fused_experts_packed_workspace_bytes",
    "fused_moe_workspace_bytes",
    "moe_max_tiles",
    "soft_embedding_workspace_bytes",
    "token_stats_workspace_bytes",
]

WORKSPACE_ALIGNMENT = 256


def empty_workspace(num_bytes: int, device: torch.device) -> torch.Tensor | None:
    """Uninitialised uint8 scratch at an aligned address; None when nothing is needed."""
    if num_bytes == 0:
        return None
    if device.type != "cpu":
        # The caching allocators of torch align to 512 bytes.
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    storage = torch.empty(num_bytes + WORKSPACE_ALIGNMENT, dtype=torch.uint8)
    skip = -storage.data_ptr() % WORKSPACE_ALIGNMENT
    return storage[skip : skip + num_bytes]
