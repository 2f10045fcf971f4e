# SPDX-License-Identifier: Apache-2.0
"""fp64 oracles of routing and of the routed experts, written from the kernel specification."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.nn import functional

Array = np.ndarray


def topk(
    logits: Array,
    top_k: int,
    *,
    scoring: int = 0,
    renormalize: bool = True,
    bias: Array | None = None,
    expert_scale: Array | None = None,
    token_valid: Array | None = None,
    n_group: int = 0,
    topk_group: int = 0,
    group_score: int = 0,
    routed_scaling: float = 1.0,
) -> tuple[Array, Array, Array]:
    """Weights, ids and, per row, the distance of the choice to the nearest other one.

    The distance is relative to the largest choice. It covers every comparison that
    decided: neighbours among the chosen, the first one not chosen, and the groups at the border. 0
    means an exact tie.
    """
    num_tokens, num_experts = logits.shape
    weights = np.zeros((num_tokens, top_k))
    ids = np.zeros((num_tokens, top_k), dtype=np.int64)
    margins = np.full(num_tokens, np.inf)
    for row in range(num_tokens):
        if token_valid is not None and not token_valid[row]:
            ids[row] = -1
            continue
        x = np.where(np.isnan(logits[row]), -np.inf, logits[row])
        if (x == -np.inf).all():
            ids[row] = np.arange(top_k)
            continue
        if scoring == 0:
            score = np.exp(x - x.max())
            score /= score.sum()
        else:
            with np.errstate(over="ignore"):
                score = 1 / (1 + np.exp(-x))
        choice = score if bias is None else score + bias
        if n_group > 1 and 0 < topk_group < n_group:
            choice, margins[row] = _best_groups(choice, n_group, topk_group, group_score)
        # A stable sort of the negated values keeps the lower expert first among equals.
        order = np.argsort(-choice, kind="stable")
        with np.errstate(invalid="ignore"):
            gaps = -np.diff(choice[order[: top_k + 1]])
        gaps = gaps[~np.isnan(gaps)]
        if gaps.size:
            margins[row] = min(margins[row], gaps.min())
        margins[row] /= np.abs(choice[np.isfinite(choice)]).max(initial=1e-30)
        ids[row] = order[:top_k]
        chosen = score[ids[row]]
        if renormalize and top_k > 1:
            chosen = chosen / (chosen.sum() + 1e-20)
        chosen = chosen * routed_scaling
        weights[row] = chosen if expert_scale is None else chosen * expert_scale[ids[row]]
    assert ids.max(initial=0) < num_experts
    return weights, ids, margins


def _best_groups(
    choice: Array, n_group: int, topk_group: int, group_score: int
) -> tuple[Array, float]:
    groups = choice.reshape(n_group, -1)
    ordered = -np.sort(-groups, axis=1)
    if group_score == 1 or groups.shape[1] == 1:
        values = ordered[:, 0]
    else:
        values = ordered[:, 0] + ordered[:, 1]
    order = np.argsort(-values, kind="stable")
    keep = np.zeros(n_group, dtype=bool)
    keep[order[:topk_group]] = True
    margin = values[order[topk_group - 1]] - values[order[topk_group]]
    return np.where(keep[:, None], groups, -np.inf).reshape(-1), float(margin)


def permute(
    ids: Array, num_local: int, tile: int, expert_map: Array | None = None
) -> dict[str, Array]:
    """What moe_permute has to write, without the padding of the tile list."""
    flat = ids.reshape(-1)
    local = local_ids(flat, expert_map)
    groups = [np.flatnonzero(local == expert) for expert in range(num_local)]
    counts = [len(group) for group in groups]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    slots = np.concatenate([*groups, np.full(len(flat) - offsets[-1], -1)])
    tiles = [
        (expert, offsets[expert] + start)
        for expert in range(num_local)
        for start in range(0, counts[expert], tile)
    ]
    return {
        "sorted_slots": slots,
        "expert_offsets": offsets,
        "tiles": np.array(tiles).reshape(-1, 2),
        "counters": np.array([len(tiles), offsets[-1]]),
    }


def local_ids(ids: Array, expert_map: Array | None) -> Array:
    """Local expert of every slot, -1 = none."""
    local = np.where(ids < 0, -1, ids)
    if expert_map is not None:
        local = np.where(local < 0, -1, expert_map[np.clip(local, 0, None)])
    return np.where(local < 0, -1, local)


def act(kind: int, x: Array) -> Array:
    if kind == 0:
        with np.errstate(over="ignore"):
            return x / (1 + np.exp(-x))
    if kind == 1:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    erf = np.vectorize(math.erf)
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def expert(x: Array, w13: Array, w2: Array, kind: int) -> Array:
    """One expert on rows x, unrounded."""
    width = w2.shape[1]
    gate_up = x @ w13.T
    return act(kind, gate_up[:, :width]) * gate_up[:, width:] @ w2.T


def moe(
    x: Array,
    w13: Array,
    w2: Array,
    weights: Array,
    ids: Array,
    *,
    expert_map: Array | None = None,
    addend: Array | None = None,
    kind: int = 0,
    weight_on_input: bool = False,
    **_: Any,
) -> Array:
    """The definition of fused_moe, one routed pair at a time."""
    out = np.zeros_like(x) if addend is None else addend.copy()
    local = local_ids(ids, expert_map)
    for token, column in np.argwhere(local >= 0):
        row = x[token : token + 1]
        weight = weights[token, column]
        if weight_on_input:
            row, weight = row * weight, 1.0
        index = local[token, column]
        out[token] += weight * expert(row, w13[index], w2[index], kind)[0]
    return out


def plain_moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    act: int = 0,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """What `moe` computes, by torch in the dtype of x: kernels may not be further from `moe`."""
    local = topk_ids.long()
    if expert_map is not None:
        local = torch.where(local < 0, -1, expert_map.long()[local.clamp(min=0)])
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in range(w13.shape[0]):
        tokens, columns = (local == index).nonzero(as_tuple=True)
        weight = topk_weights[tokens, columns, None]
        gate_up = x[tokens].float() @ w13[index].float().t()
        if weight_on_input:
            gate_up, weight = gate_up * weight, torch.ones_like(weight)
        gate, up = gate_up.chunk(2, -1)
        if act == 0:
            gate = functional.silu(gate)
        else:
            gate = functional.gelu(gate, approximate="tanh" if act == 1 else "none")
        slot_out = ((gate * up).to(x.dtype).float() @ w2[index].float().t()).to(x.dtype)
        total.index_add_(0, tokens, slot_out.float() * weight)
    if addend is not None:
        total += addend.float()
    return total.to(x.dtype)
