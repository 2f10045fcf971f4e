# SPDX-License-Identifier: Apache-2.0
"""Routed experts: grouping of slots, the expert products and their weighted sum.

Symbols: T tokens, K chosen experts per token, H hidden size, I expert width, E experts of the model,
L experts held here. Slot s = t K + k is one routed pair; a negative id, or an expert that
`expert_map` maps to a negative local id, contributes nothing and costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.ops.activation import Activation
from diffulex.ops.fakes import FLOAT32, FLOATS, INT32, FakeArguments, fake
from diffulex.ops.quantize import check_expert_tiles, expert_rows
from diffulex.ops.workspace import (
    empty_workspace,
    fused_experts_packed_workspace_bytes,
    fused_moe_workspace_bytes,
    moe_max_tiles,
)

if TYPE_CHECKING:
    from torch import Tensor


_CODES = (torch.float8_e4m3fn, torch.int8)


class MoePermutation(NamedTuple):
    """Result of `moe_permute`."""

    sorted_slots: Tensor
    """[T K] int32: slots by local expert, ascending inside an expert; -1 after the last one."""
    expert_offsets: Tensor
    """[L + 1] int32: where the slots of each expert begin."""
    tile_expert: Tensor
    """[max_tiles] int32: expert of each work tile; -1 after the last one."""
    tile_start: Tensor
    """[max_tiles] int32: first sorted position of each work tile; -1 after the last one."""
    counters: Tensor
    """[2] int32: number of tiles, number of active slots."""


@torch.no_grad()
def moe_permute(
    topk_ids: Tensor,
    num_local_experts: int,
    tile: int,
    *,
    expert_map: Tensor | None = None,
    out: MoePermutation | None = None,
) -> MoePermutation:
    """Groups the slots of `topk_ids` [T, K] int32 by local expert, in tiles of at most `tile`.

    Args:
        expert_map: [E] int32 global id -> local id or -1; None = identity.
        out: tensors to fill; None allocates them.
    """
    if out is None:
        num_slots = topk_ids.numel()
        max_tiles = moe_max_tiles(num_slots, num_local_experts, tile)
        sizes = (num_slots, num_local_experts + 1, max_tiles, max_tiles, 2)
        out = MoePermutation(
            *(torch.empty(size, dtype=torch.int32, device=topk_ids.device) for size in sizes)
        )
    torch.ops.diffulex.moe_permute(
        topk_ids, expert_map, *out, num_local_experts=num_local_experts, tile=tile
    )
    return out


def new_fused_moe_workspace(x: Tensor, top_k: int, w13: Tensor) -> Tensor:
    """Scratch for `fused_moe` of rows x [T, H] and its experts w13."""
    needed = fused_moe_workspace_bytes(
        x.shape[0],
        top_k,
        w13.shape[0],
        x.shape[1],
        expert_rows(w13) // 2,
        str(x.dtype).removeprefix("torch."),
        x.device.type,
        w13.dtype in _CODES,
    )
    return _workspace(needed, x.device)


def _workspace(needed: int, device: torch.device) -> Tensor:
    workspace = empty_workspace(needed, device)
    # The schema wants a tensor, also where nothing is needed.
    return torch.empty(0, dtype=torch.uint8, device=device) if workspace is None else workspace


@torch.no_grad()
def fused_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    expert_map: Tensor | None = None,
    w13_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    addend: Tensor | None = None,
    act: int = Activation.SILU,
    weight_on_input: bool = False,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """addend + sum over k of weight[t, k] w2[e] act_mul(w13[e] x[t]); [T, H] in the dtype of x.

    Args:
        x: [T, H] float.
        w13: [L, 2 I, H], gate rows first; w2: [L, H, I]; both in the dtype of x.
        topk_weights: [T, K] float32; topk_ids: [T, K] int32.
        expert_map: [E] int32 global id -> local id or -1; None = identity.
        w13_scale, w2_scale: float32, for experts of codes (float8_e4m3fn or int8; CUDA only), whose rows
            are quantised as `quantize_rows` does: [L, 2 I] and [L, H], or of float8 [L, 2 ceil(I / 128),
            ceil(H / 128)], blocks of gate first, and [L, ceil(H / 128), ceil(I / 128)]. Of nibbles, uint8
            [L, 2 I, H / 2] and [L, H, I / 2] (CUDA only), whose rows stay as they are: bfloat16 or float32
            [L, groups, 2 I] and [L, groups, H], groups of equal width; the nibbles may be what
            `to_nibble_tiles` makes of them, H and I multiples of 128, where x and the scales are bfloat16
            and rows of both begin at multiples of 16 bytes.
        addend: [T, H] in the dtype of x or float32, added before the one rounding at the end.
        weight_on_input: the weight multiplies x instead of the result; K must be 1.
        out: memory of its own; None allocates it.
        workspace: scratch of `new_fused_moe_workspace`; None allocates it.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if workspace is None:
        workspace = new_fused_moe_workspace(x, topk_ids.shape[1], w13)
    torch.ops.diffulex.fused_moe(
        x,
        w13,
        w2,
        topk_weights,
        topk_ids,
        expert_map,
        w13_scale,
        w2_scale,
        addend,
        out,
        workspace,
        act=int(act),
        weight_on_input=weight_on_input,
    )
    return out


@torch.no_grad()
def fused_experts_packed(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    expert_offsets: Tensor,
    *,
    row_weights: Tensor | None = None,
    act: int = Activation.SILU,
    rows_per_expert: int = 0,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Expert outputs of rows that already lie grouped by expert, times `row_weights` if given.

    Args:
        x: [N, H] with `expert_offsets` [L + 1] int32, or, with `rows_per_expert`,
            [L, rows_per_expert, H] with counts [L] in `expert_offsets`.
        row_weights: float32 of the leading shape of x.
        out: shape of x. Rows outside every expert become 0, in the batched form they stay as they
            are. None allocates it.
        workspace: scratch; None allocates it.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if workspace is None:
        needed = fused_experts_packed_workspace_bytes(
            x.shape[0] * (x.shape[1] if rows_per_expert else 1),
            w13.shape[0],
            w13.shape[1] // 2,
            str(x.dtype).removeprefix("torch."),
            x.device.type,
        )
        workspace = _workspace(needed, x.device)
    torch.ops.diffulex.fused_experts_packed(
        x,
        w13,
        w2,
        expert_offsets,
        row_weights,
        None,
        None,
        out,
        workspace,
        act=int(act),
        rows_per_expert=rows_per_expert,
    )
    return out


@torch.no_grad()
def moe_combine(
    slot_out: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    addend: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Weighted sum [T, H] of the slot outputs [T K, H], in float32 and ascending k, plus `addend`.

    Slots with a negative id are not read.
    """
    if out is None:
        out = slot_out.new_empty(topk_ids.shape[0], slot_out.shape[1])
    torch.ops.diffulex.moe_combine(slot_out, topk_weights, topk_ids, addend, out)
    return out


_MAX_LOCAL_EXPERTS = 4096


def _check_local_experts(arguments: FakeArguments, name: str, count: int) -> None:
    arguments.require(
        name,
        1 <= count <= _MAX_LOCAL_EXPERTS,
        f"1 to {_MAX_LOCAL_EXPERTS} local experts",
        count,
    )


@fake("moe_permute")
def _moe_permute(
    arguments: FakeArguments,
    topk_ids: Tensor,
    tile_expert: Tensor,
    counters: Tensor,
    num_local_experts: int,
    tile: int,
) -> None:
    arguments.check("topk_ids", INT32, (None, None))
    arguments.require("topk_ids", topk_ids.shape[1] >= 1, "at least one column", 0)
    arguments.check("expert_map", INT32, (None,))
    _check_local_experts(arguments, "num_local_experts", num_local_experts)
    arguments.at_least("tile", 1)
    num_slots = topk_ids.shape[0] * topk_ids.shape[1]
    arguments.check("sorted_slots", INT32, (num_slots,))
    arguments.check("expert_offsets", INT32, (num_local_experts + 1,))
    arguments.check("tile_expert", INT32, (None,))
    # min(L, slots) of a number of slots that may be symbolic.
    num_groups = torch.sym_min(num_local_experts, num_slots)  # type: ignore[no-untyped-call]
    max_tiles = -(-num_slots // tile) + num_groups
    arguments.require(
        "tile_expert",
        tile_expert.shape[0] >= max_tiles,
        f"at least {max_tiles} entries",
        tile_expert.shape[0],
    )
    arguments.check("tile_start", INT32, (tile_expert.shape[0],))
    arguments.check("counters", INT32, (None,))
    arguments.require("counters", counters.shape[0] >= 2, "at least 2 entries", counters.shape[0])


def _check_experts(arguments: FakeArguments, x: Tensor, w13: Tensor) -> None:
    hidden = x.shape[-1]
    arguments.require("x", hidden >= 2, "an even last dimension >= 2", hidden)
    arguments.require("x", hidden % 2 == 0, "an even last dimension >= 2", hidden)
    arguments.unsupported("w13_scale", "experts")
    arguments.unsupported("w2_scale", "experts")
    arguments.check("w13", (x.dtype,), (None, None, hidden))
    _check_local_experts(arguments, "w13", w13.shape[0])
    rows = w13.shape[1]
    expected = "gate and up rows of an even expert width"
    arguments.require("w13", rows >= 2, expected, list(w13.shape))
    arguments.require("w13", rows % 4 == 0, expected, list(w13.shape))
    arguments.check("w2", (x.dtype,), (w13.shape[0], hidden, rows // 2))
    arguments.choice("act", 2)


def _check_nibble_scales(
    arguments: FakeArguments, name: str, scale: Tensor, shape: tuple[int, int], depth: int
) -> None:
    arguments.check(name, (torch.bfloat16, torch.float32), (shape[0], None, shape[1]))
    groups = scale.shape[1]
    is_whole = groups > 0 and depth % groups == 0
    arguments.require(name, is_whole, f"groups that divide {depth} columns", list(scale.shape))


def _check_scaled_experts(
    arguments: FakeArguments, x: Tensor, w13: Tensor, w13_scale: Tensor, w2_scale: Tensor
) -> None:
    hidden = x.shape[-1]
    arguments.choice("act", 2)
    _check_local_experts(arguments, "w13", w13.shape[0])
    if w13.dim() == 5:
        check_expert_tiles(arguments, x, w13, w13_scale, w2_scale)
        return
    has_nibbles = w13.dtype == torch.uint8
    per_element = 2 if has_nibbles else 1
    arguments.check("w13", (*_CODES, torch.uint8), (None, None, hidden // per_element))
    num_experts, rows = w13.shape[:2]
    expected = "gate and up rows of an even expert width"
    arguments.require("w13", rows >= 2 and rows % 4 == 0, expected, list(w13.shape))
    arguments.check("w2", (w13.dtype,), (num_experts, hidden, rows // 2 // per_element))
    if has_nibbles:
        _check_nibble_scales(arguments, "w13_scale", w13_scale, (num_experts, rows), hidden)
        _check_nibble_scales(arguments, "w2_scale", w2_scale, (num_experts, hidden), rows // 2)
        return
    blocks, inner = -(-hidden // 128), -(-rows // 2 // 128)
    has_blocks = w13.dtype != torch.int8
    of_rows = (2 * inner, blocks) if has_blocks and w13_scale.dim() == 3 else (rows,)
    arguments.check("w13_scale", FLOAT32, (num_experts, *of_rows))
    of_rows = (blocks, inner) if has_blocks and w2_scale.dim() == 3 else (hidden,)
    arguments.check("w2_scale", FLOAT32, (num_experts, *of_rows))


@fake("fused_moe")
def _fused_moe(
    arguments: FakeArguments,
    x: Tensor,
    w13: Tensor,
    topk_ids: Tensor,
    w13_scale: Tensor | None,
    w2_scale: Tensor | None,
    weight_on_input: bool,
) -> None:
    arguments.check("x", FLOATS, (None, None))
    if w13_scale is not None and w2_scale is not None:
        _check_scaled_experts(arguments, x, w13, w13_scale, w2_scale)
        arguments.require(
            "weight_on_input", not weight_on_input, "false with scales of experts", "true"
        )
    else:
        _check_experts(arguments, x, w13)
    arguments.check("topk_ids", INT32, (x.shape[0], None))
    top_k = topk_ids.shape[1]
    arguments.require("topk_ids", top_k >= 1, "at least one column", top_k)
    arguments.check("topk_weights", FLOAT32, (x.shape[0], top_k))
    if weight_on_input:
        arguments.require("weight_on_input", top_k == 1, "false unless K is 1", f"K = {top_k}")
    arguments.check("expert_map", INT32, (None,))
    arguments.check("addend", (x.dtype, torch.float32), x.shape)
    arguments.check("out", (x.dtype,), x.shape)


@fake("fused_experts_packed")
def _fused_experts_packed(
    arguments: FakeArguments, x: Tensor, w13: Tensor, rows_per_expert: int
) -> None:
    arguments.at_least("rows_per_expert", 0)
    is_batched = rows_per_expert > 0
    arguments.check("x", FLOATS, (None, rows_per_expert, None) if is_batched else (None, None))
    _check_experts(arguments, x, w13)
    num_local = w13.shape[0]
    if is_batched:
        arguments.require(
            "x", x.shape[0] == num_local, f"one slice for each of {num_local} experts", x.shape[0]
        )
    num_offsets = num_local if is_batched else num_local + 1
    arguments.check("expert_offsets", INT32, (num_offsets,))
    arguments.check("row_weights", FLOAT32, x.shape[:-1])
    arguments.check("out", (x.dtype,), x.shape)


@fake("moe_combine")
def _moe_combine(arguments: FakeArguments, slot_out: Tensor, topk_ids: Tensor) -> None:
    arguments.check("topk_ids", INT32, (None, None))
    num_tokens, top_k = topk_ids.shape
    arguments.require("topk_ids", top_k >= 1, "at least one column", top_k)
    arguments.check("topk_weights", FLOAT32, (num_tokens, top_k))
    arguments.check("slot_out", FLOATS, (num_tokens * top_k, None))
    hidden = slot_out.shape[1]
    arguments.check("addend", (slot_out.dtype, torch.float32), (num_tokens, hidden))
    arguments.check("out", (slot_out.dtype,), (num_tokens, hidden))
