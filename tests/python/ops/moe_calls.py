# SPDX-License-Identifier: Apache-2.0
"""A valid call of every op of routing and of the routed experts; see op_calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

T, H, WIDTH, E, K, LOCAL, TILE = 6, 64, 32, 8, 2, 5, 16

Call = tuple[dict[str, Any], dict[str, Any]]


def _normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _expert_map() -> torch.Tensor:
    """Five of the eight experts are here."""
    return _ints(3, -1, 0, 1, -1, 4, -1, 2)


def _ids() -> torch.Tensor:
    """Some slots without an expert, some with one that is elsewhere."""
    return _ints([0, 3], [7, 1], [-1, -1], [5, 0], [2, -1], [7, 7])


def workspace(op: str, device: str) -> torch.Tensor:
    """Scratch for the sizes of this module; a tensor even where none is needed."""
    from diffulex import ops

    kind = torch.device(device).type
    needed = 0
    if kind != "meta" and op == "fused_moe":
        needed = ops.fused_moe_workspace_bytes(T, K, LOCAL, H, WIDTH, "float32", kind)
    elif kind != "meta":
        needed = ops.fused_experts_packed_workspace_bytes(T, LOCAL, WIDTH, "float32", kind)
    return torch.zeros(needed, dtype=torch.uint8, device=device)


def moe_topk() -> Call:
    tensors = {
        "logits": _normal(T, E),
        "bias": _normal(E, scale=0.3) - 0.9,
        "expert_scale": _normal(E).abs(),
        "token_valid": torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.uint8),
        "weights": torch.zeros(T, K),
        "ids": torch.zeros(T, K, dtype=torch.int32),
    }
    numbers = {
        "top_k": K,
        "scoring": 1,
        "renormalize": True,
        "n_group": 4,
        "topk_group": 2,
        "group_score": 0,
        "routed_scaling": 2.5,
    }
    return tensors, numbers


def router_gemm() -> Call:
    return {"x": _normal(T, H), "w": _normal(E, H), "logits": torch.zeros(T, E)}, {}


def moe_permute() -> Call:
    from diffulex.ops import moe_max_tiles

    max_tiles = moe_max_tiles(T * K, LOCAL, TILE)
    tensors = {
        "topk_ids": _ids(),
        "expert_map": _expert_map(),
        "sorted_slots": torch.zeros(T * K, dtype=torch.int32),
        "expert_offsets": torch.zeros(LOCAL + 1, dtype=torch.int32),
        "tile_expert": torch.zeros(max_tiles, dtype=torch.int32),
        "tile_start": torch.zeros(max_tiles, dtype=torch.int32),
        "counters": torch.zeros(2, dtype=torch.int32),
    }
    return tensors, {"num_local_experts": LOCAL, "tile": TILE}


def fused_moe() -> Call:
    tensors = {
        "x": _normal(T, H),
        "w13": _normal(LOCAL, 2 * WIDTH, H, scale=0.1),
        "w2": _normal(LOCAL, H, WIDTH, scale=0.1),
        "topk_weights": _normal(T, K).abs(),
        "topk_ids": _ids(),
        "expert_map": _expert_map(),
        "w13_scale": None,
        "w2_scale": None,
        "addend": _normal(T, H),
        "out": torch.zeros(T, H),
        "workspace": None,
    }
    return tensors, {"act": 0, "weight_on_input": False}


def fused_experts_packed() -> Call:
    tensors = {
        "x": _normal(T, H),
        "w13": _normal(LOCAL, 2 * WIDTH, H, scale=0.1),
        "w2": _normal(LOCAL, H, WIDTH, scale=0.1),
        "expert_offsets": _ints(0, 2, 2, 3, 3, 5),
        "row_weights": _normal(T),
        "w13_scale": None,
        "w2_scale": None,
        "out": torch.zeros(T, H),
        "workspace": None,
    }
    return tensors, {"act": 1, "rows_per_expert": 0}


def moe_combine() -> Call:
    tensors = {
        "slot_out": _normal(T * K, H),
        "topk_weights": _normal(T, K),
        "topk_ids": _ids(),
        "addend": _normal(T, H),
        "out": torch.zeros(T, H),
    }
    return tensors, {}


CALLS: dict[str, Callable[[], Call]] = {
    call.__name__: call
    for call in (
        moe_topk,
        router_gemm,
        moe_permute,
        fused_moe,
        fused_experts_packed,
        moe_combine,
    )
}
