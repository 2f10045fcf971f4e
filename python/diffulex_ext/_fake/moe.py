# SPDX-License-Identifier: Apache-2.0
"""Fake kernels of routing and of the routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from diffulex_ext._fake.arguments import FakeArguments
from diffulex_ext._fake.registry import FLOAT32, FLOATS, INT32, register

if TYPE_CHECKING:
    from torch import Tensor

_MAX_EXPERTS = 1024
_MAX_TOP_K = 32
_MAX_LOCAL_EXPERTS = 4096
_QUANTISED = "none (quantised experts are not supported)"


def _check_choice(
    arguments: FakeArguments, num_experts: int, top_k: int, n_group: int, topk_group: int
) -> None:
    limit = min(num_experts, _MAX_TOP_K)
    arguments.require("top_k", 1 <= top_k <= limit, f"a value in [1, {limit}]", top_k)
    arguments.at_least("n_group", n_group, 0)
    arguments.at_least("topk_group", topk_group, 0)
    if n_group > 1 and 0 < topk_group < n_group:
        arguments.require(
            "n_group",
            num_experts % n_group == 0,
            f"a divisor of {num_experts} experts",
            n_group,
        )
        available = topk_group * (num_experts // n_group)
        arguments.require(
            "top_k",
            top_k <= available,
            f"at most the {available} experts of topk_group groups",
            top_k,
        )


@register("moe_topk")
def _moe_topk(
    logits: Tensor,
    bias: Tensor | None,
    expert_scale: Tensor | None,
    token_valid: Tensor | None,
    weights: Tensor,
    ids: Tensor,
    *,
    top_k: int,
    scoring: int,
    renormalize: bool,
    n_group: int = 0,
    topk_group: int = 0,
    group_score: int = 0,
    routed_scaling: float = 1.0,
) -> None:
    arguments = FakeArguments("moe_topk", logits)
    arguments.tensor("logits", logits, FLOATS, (None, None))
    num_tokens, num_experts = logits.shape
    arguments.require(
        "logits",
        1 <= num_experts <= _MAX_EXPERTS,
        f"1 to {_MAX_EXPERTS} experts",
        list(logits.shape),
    )
    _check_choice(arguments, num_experts, top_k, n_group, topk_group)
    arguments.choice("scoring", scoring, 1)
    arguments.choice("group_score", group_score, 1)
    arguments.optional("bias", bias, FLOAT32, (num_experts,))
    arguments.optional("expert_scale", expert_scale, FLOAT32, (num_experts,))
    arguments.optional("token_valid", token_valid, (torch.uint8, torch.bool), (num_tokens,))
    arguments.tensor("weights", weights, FLOAT32, (num_tokens, top_k))
    arguments.tensor("ids", ids, INT32, (num_tokens, top_k))


@register("router_gemm")
def _router_gemm(x: Tensor, w: Tensor, logits: Tensor) -> None:
    arguments = FakeArguments("router_gemm", x)
    arguments.tensor("x", x, FLOATS, (None, None))
    num_tokens, hidden = x.shape
    arguments.require("x", hidden >= 1, "a last dimension >= 1", hidden)
    arguments.tensor("w", w, (torch.float32, torch.bfloat16), (None, hidden))
    arguments.require("w", w.shape[0] >= 1, "at least one expert", w.shape[0])
    arguments.tensor("logits", logits, FLOAT32, (num_tokens, w.shape[0]))


def _check_local_experts(arguments: FakeArguments, name: str, count: int) -> None:
    arguments.require(
        name,
        1 <= count <= _MAX_LOCAL_EXPERTS,
        f"1 to {_MAX_LOCAL_EXPERTS} local experts",
        count,
    )


@register("moe_permute")
def _moe_permute(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    sorted_slots: Tensor,
    expert_offsets: Tensor,
    tile_expert: Tensor,
    tile_start: Tensor,
    counters: Tensor,
    *,
    num_local_experts: int,
    tile: int,
) -> None:
    arguments = FakeArguments("moe_permute", topk_ids)
    arguments.tensor("topk_ids", topk_ids, INT32, (None, None))
    arguments.require("topk_ids", topk_ids.shape[1] >= 1, "at least one column", 0)
    arguments.optional("expert_map", expert_map, INT32, (None,))
    _check_local_experts(arguments, "num_local_experts", num_local_experts)
    arguments.at_least("tile", tile, 1)
    num_slots = topk_ids.shape[0] * topk_ids.shape[1]
    arguments.tensor("sorted_slots", sorted_slots, INT32, (num_slots,))
    arguments.tensor("expert_offsets", expert_offsets, INT32, (num_local_experts + 1,))
    arguments.tensor("tile_expert", tile_expert, INT32, (None,))
    # min(L, slots) of a number of slots that may be symbolic.
    num_groups = torch.sym_min(num_local_experts, num_slots)  # type: ignore[no-untyped-call]
    max_tiles = -(-num_slots // tile) + num_groups
    arguments.require(
        "tile_expert",
        tile_expert.shape[0] >= max_tiles,
        f"at least {max_tiles} entries",
        tile_expert.shape[0],
    )
    arguments.tensor("tile_start", tile_start, INT32, (tile_expert.shape[0],))
    arguments.tensor("counters", counters, INT32, (None,))
    arguments.require("counters", counters.shape[0] >= 2, "at least 2 entries", counters.shape[0])


def _check_experts(
    arguments: FakeArguments,
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    act: int,
) -> None:
    hidden = x.shape[-1]
    arguments.require("x", hidden >= 2, "an even last dimension >= 2", hidden)
    arguments.require("x", hidden % 2 == 0, "an even last dimension >= 2", hidden)
    arguments.require("w13_scale", w13_scale is None, _QUANTISED, "a tensor")
    arguments.require("w2_scale", w2_scale is None, _QUANTISED, "a tensor")
    arguments.tensor("w13", w13, (x.dtype,), (None, None, hidden))
    _check_local_experts(arguments, "w13", w13.shape[0])
    rows = w13.shape[1]
    expected = "gate and up rows of an even expert width"
    arguments.require("w13", rows >= 2, expected, list(w13.shape))
    arguments.require("w13", rows % 4 == 0, expected, list(w13.shape))
    arguments.tensor("w2", w2, (x.dtype,), (w13.shape[0], hidden, rows // 2))
    arguments.choice("act", act, 2)


@register("fused_moe")
def _fused_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    addend: Tensor | None,
    out: Tensor,
    workspace: Tensor,
    *,
    act: int = 0,
    weight_on_input: bool = False,
) -> None:
    arguments = FakeArguments("fused_moe", x)
    arguments.tensor("x", x, FLOATS, (None, None))
    _check_experts(arguments, x, w13, w2, w13_scale, w2_scale, act)
    arguments.tensor("topk_ids", topk_ids, INT32, (x.shape[0], None))
    top_k = topk_ids.shape[1]
    arguments.require("topk_ids", top_k >= 1, "at least one column", top_k)
    arguments.tensor("topk_weights", topk_weights, FLOAT32, (x.shape[0], top_k))
    if weight_on_input:
        arguments.require("weight_on_input", top_k == 1, "false unless K is 1", f"K = {top_k}")
    arguments.optional("expert_map", expert_map, INT32, (None,))
    arguments.optional("addend", addend, (x.dtype, torch.float32), x.shape)
    arguments.tensor("out", out, (x.dtype,), x.shape)
    arguments.workspace(workspace)


@register("fused_experts_packed")
def _fused_experts_packed(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_offsets: Tensor,
    row_weights: Tensor | None,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    out: Tensor,
    workspace: Tensor,
    *,
    act: int = 0,
    rows_per_expert: int = 0,
) -> None:
    arguments = FakeArguments("fused_experts_packed", x)
    arguments.at_least("rows_per_expert", rows_per_expert, 0)
    is_batched = rows_per_expert > 0
    arguments.tensor("x", x, FLOATS, (None, rows_per_expert, None) if is_batched else (None, None))
    _check_experts(arguments, x, w13, w2, w13_scale, w2_scale, act)
    num_local = w13.shape[0]
    if is_batched:
        arguments.require(
            "x", x.shape[0] == num_local, f"one slice for each of {num_local} experts", x.shape[0]
        )
    num_offsets = num_local if is_batched else num_local + 1
    arguments.tensor("expert_offsets", expert_offsets, INT32, (num_offsets,))
    arguments.optional("row_weights", row_weights, FLOAT32, x.shape[:-1])
    arguments.tensor("out", out, (x.dtype,), x.shape)
    arguments.workspace(workspace)


@register("moe_combine")
def _moe_combine(
    slot_out: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    addend: Tensor | None,
    out: Tensor,
) -> None:
    arguments = FakeArguments("moe_combine", slot_out)
    arguments.tensor("topk_ids", topk_ids, INT32, (None, None))
    num_tokens, top_k = topk_ids.shape
    arguments.require("topk_ids", top_k >= 1, "at least one column", top_k)
    arguments.tensor("topk_weights", topk_weights, FLOAT32, (num_tokens, top_k))
    arguments.tensor("slot_out", slot_out, FLOATS, (num_tokens * top_k, None))
    hidden = slot_out.shape[1]
    arguments.optional("addend", addend, (slot_out.dtype, torch.float32), (num_tokens, hidden))
    arguments.tensor("out", out, (slot_out.dtype,), (num_tokens, hidden))
