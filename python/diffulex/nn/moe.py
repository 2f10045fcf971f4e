# SPDX-License-Identifier: Apache-2.0
"""Feed-forward block with routed experts and, in some families, one expert for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from diffulex import ops
from diffulex.distributed.shard import ALL_EXPERTS, ONE_RANK
from diffulex.nn.dispatch import LocalDispatch, ReplicatedDispatch
from diffulex.nn.experts import ExpertPart, RoutedExperts
from diffulex.nn.feed_forward import FeedForward, GatedMLP, MLPScratch
from diffulex.nn.weights import DenseExperts, new_parameter, weight_device

if TYPE_CHECKING:
    from collections.abc import Collection

    from diffulex.checkpoint.slices import WeightSlice
    from diffulex.distributed.comm import Comm
    from diffulex.distributed.shard import ExpertShard, Shard
    from diffulex.families.spec.moe import MoeSpec
    from diffulex.families.spec.names import TensorNames
    from diffulex.nn.attention_metadata import AttnMetadata
    from diffulex.nn.dispatch import Dispatch
    from diffulex.nn.weights import ExpertFormat

__all__ = ["MoeFeedForward", "MoeScratch", "valid_rows"]


def valid_rows(metadata: AttnMetadata, num_rows: int) -> torch.Tensor:
    """[T] bool: rows that carry a token; padding and rows of dummy requests do not.

    No synchronisation and no host data: may be graph-captured.
    """
    ends = metadata.valid_slices
    rows = torch.arange(num_rows, dtype=torch.int32, device=ends.device)
    # The request of a row is the number of requests that end at or before it.
    requests = torch.searchsorted(metadata.cu_seqlens_q[1:], rows, right=True)
    # A row past the last request is compared with that one's end, which is no later.
    return rows < ends[requests.clamp_(max=max(0, ends.size(0) - 1))]


class MoeScratch:
    """Buffers of one forward of T rows, shared by all blocks, and which of its rows count."""

    __slots__ = ("logits", "out", "routing", "shared", "token_valid", "workspace")

    def __init__(
        self,
        like: torch.Tensor,
        metadata: AttnMetadata,
        moe: MoeSpec,
        experts: ExpertFormat,
        shared_size: int = 0,
    ) -> None:
        num_rows = like.size(0)
        self.token_valid = valid_rows(metadata, num_rows)
        self.logits = like.new_empty(num_rows, moe.num_experts, dtype=torch.float32)
        self.routing = ops.Routing(
            like.new_empty(num_rows, moe.top_k, dtype=torch.float32),
            like.new_empty(num_rows, moe.top_k, dtype=torch.int32),
        )
        self.out = torch.empty_like(like)
        self.workspace = experts.new_workspace(like, moe.top_k)
        #: Scratch and output of the shared expert.
        self.shared: tuple[MLPScratch, torch.Tensor] | None = None
        if shared_size:
            self.shared = (MLPScratch(like, shared_size), torch.empty_like(like))


class MoeFeedForward(RoutedExperts, FeedForward):
    """``sum of w_k expert_k(x)`` over the chosen experts, plus the shared expert of x.

    Experts are held as one [E, 2 I, H] and one [E, H, I] tensor; see `ops.fused_moe`. The router
    computes in float32 whatever the dtype of the model.

    Of several ranks each routes all rows and has some of the experts, or a part of all of them. What
    it computes is a part of a sum, to which its part of the shared expert belongs; ranks that share
    nothing but experts add it up here.
    """

    def __init__(
        self,
        hidden_size: int,
        moe: MoeSpec,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard = ONE_RANK,
        experts: ExpertShard = ALL_EXPERTS,
    ) -> None:
        super().__init__()
        self.moe, self.top_k = moe, moe.top_k
        self._part = ExpertPart(hidden_size, moe, experts)
        self._is_summed_here = experts.size > shard.size
        self._expert_map = self._part.map_on(device)
        num_experts, num_here, width = moe.num_experts, len(self._part.numbers), self._part.width

        def weight(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            # Experts may get another format in place of this memory.
            place = weight_device(device) if len(shape) == 3 else device
            return new_parameter(*shape, dtype=dtype, device=place)

        # The router kernel takes weights that lose nothing in float32 sums; float16 is none of them.
        router_dtype = dtype if dtype == torch.bfloat16 else torch.float32
        self.router = weight(num_experts, hidden_size, dtype=router_dtype)
        self.expert_bias: nn.Parameter | None = None
        if moe.has_expert_bias:
            # Zeros, because a checkpoint without the vector means that.
            zeros = torch.zeros(num_experts, dtype=torch.float32, device=device)
            self.expert_bias = nn.Parameter(zeros, requires_grad=False)
        self.w13 = weight(num_here, 2 * width, hidden_size)
        self.w2 = weight(num_here, hidden_size, width)
        self.matrices: ExpertFormat = DenseExperts(self.w13, self.w2)
        self.dispatch: Dispatch = LocalDispatch()
        self.shared: GatedMLP | None = None
        if moe.shared_size:
            self.shared = GatedMLP(
                hidden_size, moe.shared_size, dtype=dtype, device=device, shard=shard
            )

    def connect(self, comm: Comm) -> None:
        if self._is_summed_here:
            self.dispatch = ReplicatedDispatch(comm)

    def new_scratch(self, like: torch.Tensor, metadata: AttnMetadata) -> MoeScratch:
        shared_size = 0 if self.shared is None else self.shared.down.in_features
        return MoeScratch(like, metadata, self.moe, self.matrices, shared_size)

    def new_rows(self, x: torch.Tensor) -> ops.QuantizedRows | None:
        # Of the shared expert: the router and the experts take the rows themselves.
        rows = None if self.shared is None else self.shared.new_rows(x)
        return None if rows is None else rows._replace(codes_only=False)

    def forward(
        self, x: torch.Tensor, scratch: MoeScratch, rows: ops.QuantizedRows | None = None
    ) -> torch.Tensor:
        moe = self.moe
        self.router_logits(x, self.router, scratch.logits)
        ops.moe_topk(
            scratch.logits,
            moe.top_k,
            scoring=ops.RouterScoring.SIGMOID if moe.is_sigmoid else ops.RouterScoring.SOFTMAX,
            renormalize=moe.renormalize,
            bias=self.expert_bias,
            token_valid=scratch.token_valid,
            n_group=moe.n_group,
            topk_group=moe.topk_group,
            routed_scaling=moe.routed_scaling,
            out=scratch.routing,
        )
        if moe.top_k == 1 and moe.renormalize and not moe.is_sigmoid:
            # A softmax router divides the only score by itself; the op, like the sigmoid router,
            # normalises several scores only.
            scratch.routing.weights.fill_(moe.routed_scaling)
        addend: torch.Tensor | None = None
        if self.shared is not None and scratch.shared is not None:
            shared_scratch, addend = scratch.shared
            self.shared.project(x, shared_scratch, addend, rows)
        out = self.routed(x, scratch.routing, addend, scratch.out, scratch.workspace)
        # The experts read x until the last of them is done; the next block may write it.
        scratch.out = x
        return out

    def weight_table(
        self, prefix: str, names: TensorNames, stored: Collection[str]
    ) -> dict[str, torch.Tensor]:
        table: dict[str, torch.Tensor] = {f"{prefix}{names.router}.weight": self.router}
        if self.expert_bias is not None:
            name = _stored_bias(prefix, names, stored)
            if name is not None:
                table[name] = self.expert_bias
        table.update(self._expert_table(prefix + names.experts, stored))
        if self.shared is not None:
            shared = names.below(names.shared_experts)
            table.update(self.shared.weight_table(prefix, shared, stored))
        return table

    def _expert_table(self, prefix: str, stored: Collection[str]) -> dict[str, torch.Tensor]:
        """The experts in the layout that any stored name tells; one tensor each by default."""
        width = self._part.width
        if f"{prefix}.gate_up_proj" in stored:
            return {f"{prefix}.gate_up_proj": self.w13, f"{prefix}.down_proj": self.w2}
        for suffix in ("", ".weight"):
            stacked = {
                f"{prefix}.gate_proj{suffix}": self.w13[:, :width],
                f"{prefix}.up_proj{suffix}": self.w13[:, width:],
                f"{prefix}.down_proj{suffix}": self.w2,
            }
            if any(name in stored for name in stacked):
                return stacked
        return self._part.table(prefix, self.w13, self.w2)

    def weight_slices(self, prefix: str, names: TensorNames) -> dict[str, WeightSlice]:
        table = self._part.slices(prefix + names.experts)
        if self.shared is not None:
            shared = names.below(names.shared_experts)
            table.update(self.shared.weight_slices(prefix, shared))
        return table


def _stored_bias(prefix: str, names: TensorNames, stored: Collection[str]) -> str | None:
    """Name under which the checkpoint holds the bias; None when no layer of it has one."""
    candidates = [f"{prefix}{name}" for name in names.expert_bias]
    for name in candidates:
        if name in stored:
            return name
    # Beside layers with a bias, a layer without is damaged: the loader will miss its name.
    is_expected = not stored or any(name.endswith(names.expert_bias) for name in stored)
    return candidates[0] if is_expected else None
