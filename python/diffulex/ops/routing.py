# SPDX-License-Identifier: Apache-2.0
"""Router logits and the choice of experts.

Symbols: T tokens, E experts, K chosen experts per token, H hidden size.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


class RouterScoring(IntEnum):
    """How logits become scores."""

    SOFTMAX = 0
    SIGMOID = 1


class GroupScore(IntEnum):
    """What a group of experts is ranked by."""

    TOP_TWO = 0
    MAX = 1


class Routing(NamedTuple):
    """Result of `moe_topk`."""

    weights: Tensor
    """[T, K] float32."""
    ids: Tensor
    """[T, K] int32, best choice first; -1 in rows that are not valid."""


@torch.no_grad()
def router_gemm(x: Tensor, w: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Router logits [T, E] float32: x [T, H] times w [E, H] (float32 or bfloat16), float32 sums.

    A row does not depend on the other rows. Inside `settled_weights` CUDA kernels read `w` while the
    launches in front of them still run: none of those may then write it.
    """
    if out is None:
        out = torch.empty(x.shape[0], w.shape[0], dtype=torch.float32, device=x.device)
    torch.ops.diffulex.router_gemm(x, w, out)
    return out


@torch.no_grad()
def moe_topk(
    logits: Tensor,
    top_k: int,
    *,
    scoring: int = RouterScoring.SOFTMAX,
    renormalize: bool = True,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    token_valid: Tensor | None = None,
    n_group: int = 0,
    topk_group: int = 0,
    group_score: int = GroupScore.TOP_TWO,
    routed_scaling: float = 1.0,
    out: Routing | None = None,
) -> Routing:
    """The K experts of every token and their weights; lower ids first among equal choices.

    Args:
        logits: [T, E] float; NaN counts as -inf.
        renormalize: divide the chosen scores by their sum.
        bias: [E] float32, added to the scores for the choice only.
        expert_scale: [E] float32, multiplies the weight of an expert.
        token_valid: [T] bool or uint8; a false row gets the ids -1 and weights 0.
        n_group: with `topk_group` below it, only experts of the `topk_group` best of so many groups
            of consecutive experts can be chosen.
        group_score: what a group is worth.
        routed_scaling: factor of all weights.
        out: tensors to fill; None allocates them.
    """
    if out is None:
        out = Routing(
            torch.empty(logits.shape[0], top_k, dtype=torch.float32, device=logits.device),
            torch.empty(logits.shape[0], top_k, dtype=torch.int32, device=logits.device),
        )
    torch.ops.diffulex.moe_topk(
        logits,
        bias,
        expert_scale,
        token_valid,
        *out,
        top_k=top_k,
        scoring=int(scoring),
        renormalize=renormalize,
        n_group=n_group,
        topk_group=topk_group,
        group_score=int(group_score),
        routed_scaling=routed_scaling,
    )
    return out


def _masked_choices(choices: Tensor, n_group: int, topk_group: int, group_score: int) -> Tensor:
    """-inf outside the best groups."""
    grouped = choices.view(choices.shape[0], n_group, -1)
    count = min(2, grouped.shape[2]) if group_score == GroupScore.TOP_TWO else 1
    values = grouped.topk(count, dim=2).values.sum(2)
    # A stable sort puts the lower group first among equals, which topk does not promise.
    best = values.sort(dim=1, descending=True, stable=True).indices[:, :topk_group]
    keep = torch.zeros_like(values, dtype=torch.bool).scatter_(1, best, True)
    return grouped.masked_fill(~keep[..., None], -torch.inf).flatten(1)


@torch.no_grad()
def moe_topk_reference(
    logits: Tensor,
    top_k: int,
    *,
    scoring: int = RouterScoring.SOFTMAX,
    renormalize: bool = True,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    token_valid: Tensor | None = None,
    n_group: int = 0,
    topk_group: int = 0,
    group_score: int = GroupScore.TOP_TWO,
    routed_scaling: float = 1.0,
) -> Routing:
    """Pure torch twin of `moe_topk`."""
    values = torch.nan_to_num(logits.float(), nan=-torch.inf, neginf=-torch.inf)
    is_empty = (values == -torch.inf).all(1)
    values = values.masked_fill(is_empty[:, None], 0.0)
    scores = values.softmax(1) if scoring == RouterScoring.SOFTMAX else values.sigmoid()
    choices = scores if bias is None else scores + bias
    if n_group > 1 and 0 < topk_group < n_group:
        choices = _masked_choices(choices, n_group, topk_group, group_score)
    ids = choices.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    weights = weights * routed_scaling
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    first = torch.arange(top_k, device=logits.device).expand_as(ids)
    ids = torch.where(is_empty[:, None], first, ids)
    weights = weights.masked_fill(is_empty[:, None], 0.0)
    if token_valid is not None:
        is_unused = ~token_valid.bool()[:, None]
        ids = ids.masked_fill(is_unused, -1)
        weights = weights.masked_fill(is_unused, 0.0)
    return Routing(weights, ids.int())


@torch.no_grad()
def router_gemm_reference(x: Tensor, w: Tensor) -> Tensor:
    """Pure torch twin of `router_gemm`; the order of its sums is torch's."""
    return x.float() @ w.float().t()
