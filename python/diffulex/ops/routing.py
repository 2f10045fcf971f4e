# SPDX-License-Identifier: Apache-2.0
"""Router logits and the choice of experts.

Symbols: T tokens, E experts, K chosen experts per token, H hidden size.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex.ops.fakes import FLAGS, FLOAT32, FLOATS, INT32, FakeArguments, fake

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


_MAX_EXPERTS = 1024
_MAX_TOP_K = 32


def _check_choice(
    arguments: FakeArguments, num_experts: int, top_k: int, n_group: int, topk_group: int
) -> None:
    limit = min(num_experts, _MAX_TOP_K)
    arguments.require("top_k", 1 <= top_k <= limit, f"a value in [1, {limit}]", top_k)
    arguments.at_least("n_group", 0)
    arguments.at_least("topk_group", 0)
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


@fake("moe_topk")
def _moe_topk(
    arguments: FakeArguments, logits: Tensor, top_k: int, n_group: int, topk_group: int
) -> None:
    arguments.check("logits", FLOATS, (None, None))
    num_tokens, num_experts = logits.shape
    arguments.require(
        "logits",
        1 <= num_experts <= _MAX_EXPERTS,
        f"1 to {_MAX_EXPERTS} experts",
        list(logits.shape),
    )
    _check_choice(arguments, num_experts, top_k, n_group, topk_group)
    arguments.choice("scoring", 1)
    arguments.choice("group_score", 1)
    arguments.check("bias", FLOAT32, (num_experts,))
    arguments.check("expert_scale", FLOAT32, (num_experts,))
    arguments.check("token_valid", FLAGS, (num_tokens,))
    arguments.check("weights", FLOAT32, (num_tokens, top_k))
    arguments.check("ids", INT32, (num_tokens, top_k))


@fake("router_gemm")
def _router_gemm(arguments: FakeArguments, x: Tensor, w: Tensor) -> None:
    arguments.check("x", FLOATS, (None, None))
    num_tokens, hidden = x.shape
    arguments.require("x", hidden >= 1, "a last dimension >= 1", hidden)
    arguments.check("w", (torch.float32, torch.bfloat16), (None, hidden))
    arguments.require("w", w.shape[0] >= 1, "at least one expert", w.shape[0])
    arguments.check("logits", FLOAT32, (num_tokens, w.shape[0]))
