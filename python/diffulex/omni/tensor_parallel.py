# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the heads and the inner width of every block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from diffulex.omni.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diffulex.omni.groups import RankGroups
    from diffulex.omni.registry import PipelineSpec

__all__ = ["attach"]


def attach(pipeline: Any, spec: PipelineSpec, groups: RankGroups) -> None:
    """Replaces the layers of the plan by the parts of this rank.

    Raises:
        UnsupportedFeatureError: a width cannot be shared; nothing is changed then.
    """
    assert spec.tensor_plan is not None
    size = len(groups.ranks("tp"))
    for name in spec.transformers:
        transformer = getattr(pipeline, name, None)
        if transformer is None:
            continue
        found = list(_layers(transformer, spec.tensor_plan(transformer)))
        for path, layer, style in found:
            widths = _widths(layer, style)
            if any(width % size for width in widths):
                raise UnsupportedFeatureError(
                    f"tensor_parallel_size: expected a divisor of {widths} ({path}), got {size}"
                )
        for path, layer, style in found:
            parent = transformer.get_submodule(path.rpartition(".")[0])
            part = _column(layer, groups) if style == "colwise" else _RowPart(layer, groups, style)
            parent.register_module(path.rpartition(".")[2], part)
        if spec.has_own_heads:
            for module in transformer.modules():
                if hasattr(module, "to_q") and hasattr(module, "heads"):
                    module.heads //= size


def _layers(
    transformer: torch.nn.Module, plan: dict[str, Any]
) -> Iterator[tuple[str, torch.nn.Linear, str]]:
    """(path, layer, style); entries that a block does not have are left out."""
    modules = dict(transformer.named_modules())
    for pattern, style in plan.items():
        head, _, rest = pattern.partition(".*.")
        blocks: Any = modules[head]
        for number in range(len(blocks)):
            path = f"{head}.{number}.{rest}"
            layer = modules.get(path)
            if isinstance(layer, torch.nn.Linear):
                # The style of a layer over several inputs side by side is an object of diffusers.
                yield path, layer, style if isinstance(style, str) else "packed"


def _widths(layer: torch.nn.Linear, style: str) -> list[int]:
    """What every rank gets a part of."""
    if style == "colwise":
        return [layer.out_features]
    if style == "rowwise":
        return [layer.in_features]
    return [int(width) for width in getattr(layer, "_tp_packed_row_blocks")]  # noqa: B009 (Any)


def _column(layer: torch.nn.Linear, groups: RankGroups) -> torch.nn.Linear:
    """A part of the outputs."""
    ranks = groups.ranks("tp")
    place = ranks.index(groups.rank)
    part = torch.nn.Linear(1, 1, bias=layer.bias is not None, device="meta")
    part.in_features, part.out_features = layer.in_features, layer.out_features // len(ranks)
    part.weight = _frozen(layer.weight.chunk(len(ranks), 0)[place])
    if layer.bias is not None:
        part.bias = _frozen(layer.bias.chunk(len(ranks), 0)[place])
    return part


class _RowPart(torch.nn.Module):
    """A part of the inputs; the sums of all ranks make the output, and the bias comes last."""

    def __init__(self, layer: torch.nn.Linear, groups: RankGroups, style: str) -> None:
        super().__init__()
        ranks = groups.ranks("tp")
        place, count = ranks.index(groups.rank), len(ranks)
        pieces = torch.split(layer.weight, _widths(layer, style), 1)
        self.weight = _frozen(torch.cat([piece.chunk(count, 1)[place] for piece in pieces], 1))
        self.bias = None if layer.bias is None else _frozen(layer.bias)
        self._group = groups.group("tp")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out = F.linear(hidden_states, self.weight).contiguous()
        dist.all_reduce(out, group=self._group)
        return out if self.bias is None else out + self.bias


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach().clone(), requires_grad=False)
