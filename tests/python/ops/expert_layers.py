# SPDX-License-Identifier: Apache-2.0
"""Routed experts of codes on CUDA: how tests run them, and their definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from cuda_streams import check_streams
from diffulex import ops

ACTIVATIONS: dict[ops.Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    ops.Activation.SILU: functional.silu,
    ops.Activation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
    ops.Activation.GELU_ERF: functional.gelu,
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device="cuda")


def surrounded(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    """The same experts between two of these bytes: what is read beside them is seen."""
    bits = tensor.view(torch.uint8)
    whole = torch.full((bits.shape[0] + 2, *bits.shape[1:]), byte, dtype=torch.uint8).cuda()
    whole[1:-1] = bits
    return whole.view(tensor.dtype)[1:-1]


def routes(tokens: int, num_experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of different experts for every token."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    drawn = torch.rand(tokens, num_experts, generator=generator, device="cuda")
    weights = torch.rand(tokens, top_k, generator=generator, device="cuda") + 0.1
    return weights, drawn.topk(top_k).indices.int()


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """Codes and scales of a layer as `fused_moe` takes them; a scheme says what they stand for."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor

    @property
    def hidden(self) -> int:
        return self.w2.shape[1]

    def gate_up(self, expert: int) -> torch.Tensor:
        """Its weights in float64."""
        raise NotImplementedError

    def down(self, expert: int) -> torch.Tensor:
        """Its weights in float64."""
        raise NotImplementedError

    def read(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What a product reads of rows, in float64; `dtype` is that of the rows of the op."""
        raise NotImplementedError

    def run(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        expert_map: torch.Tensor | None = None,
        act: ops.Activation = ops.Activation.SILU,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Scratch and result poisoned; what lies around the result is asked for."""
        workspace = ops.new_fused_moe_workspace(x, ids.shape[1], self.w13).fill_(0xFF)
        whole = torch.full(
            (x.shape[0] + 2, x.shape[1] + 32), torch.nan, dtype=x.dtype, device="cuda"
        )
        out = whole[1:-1, 16:-16]
        ops.fused_moe(
            x,
            self.w13,
            self.w2,
            weights,
            ids,
            expert_map=expert_map,
            w13_scale=self.w13_scale,
            w2_scale=self.w2_scale,
            addend=addend,
            act=act,
            out=out,
            workspace=workspace,
        )
        found = out.clone()
        out.fill_(torch.nan)
        assert whole.isnan().all()
        return found

    def exact(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        local_ids: torch.Tensor,
        act: ops.Activation = ops.Activation.SILU,
    ) -> torch.Tensor:
        """Products in float64; activated rows and those of slots are rounded as the op does."""
        total = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
        rows = self.read(x, x.dtype)
        for expert in local_ids[local_ids >= 0].unique().tolist():
            tokens, slots = (local_ids == expert).nonzero(as_tuple=True)
            gate, up = (rows[tokens] @ self.gate_up(expert).T).chunk(2, 1)
            inner = self.read(ACTIVATIONS[act](gate) * up, x.dtype)
            part = (inner @ self.down(expert).T).to(x.dtype)
            total.index_add_(0, tokens, part.double() * weights[tokens, slots].double()[:, None])
        return total

    def check_captured_chain(self, x: torch.Tensor, top_k: int) -> torch.Tensor:
        """Layer upon layer with overlapping launches, in one scratch, as an engine has them.

        Rows of float16 may overflow after so many: bits are compared. Returns the last rows.
        """
        weights, ids = routes(x.shape[0], self.w13.shape[0], top_k)
        space = ops.new_fused_moe_workspace(x, top_k, self.w13)

        def chain(rows: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                rows = ops.fused_moe(
                    rows,
                    self.w13,
                    self.w2,
                    weights,
                    ids,
                    w13_scale=self.w13_scale,
                    w2_scale=self.w2_scale,
                    workspace=space,
                )
            return rows

        want = x
        for _ in range(8):
            want = self.run(want, weights, ids)
        chain(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain(x)
        for _ in range(20):
            space.fill_(0xFF)
            found.fill_(torch.nan)
            graph.replay()
            assert torch.equal(found.view(torch.int16), want.view(torch.int16))
        return found

    def check_two_streams(self, tokens: int, top_k: int) -> None:
        """Layer upon layer on two streams at once, each with rows, routes and scratch of its own.

        The first rows are added to those of every layer, or else eight of them would make almost zeros.
        """

        def chain(count: int) -> Callable[[], torch.Tensor]:
            first = normal(count, self.hidden).bfloat16()
            weights, ids = routes(count, self.w13.shape[0], top_k)
            weights /= weights.sum(1, keepdim=True)
            space = ops.new_fused_moe_workspace(first, top_k, self.w13)

            def work() -> torch.Tensor:
                rows = first
                for _ in range(8):
                    rows = ops.fused_moe(
                        rows,
                        self.w13,
                        self.w2,
                        weights,
                        ids,
                        w13_scale=self.w13_scale,
                        w2_scale=self.w2_scale,
                        addend=first,
                        workspace=space,
                    )
                return rows

            return work

        check_streams([chain(tokens), chain(tokens + 1)])
