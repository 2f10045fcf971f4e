# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the tokens of an image: inputs are split, attention is exchanged, outputs gathered.

Where to split and to gather is what diffusers says of its transformer (`_cp_plan`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from diffulex.omni._diffusers_compat import model_hook, register_hook, set_handle
from diffulex.omni.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from diffulex.omni.groups import RankGroups
    from diffulex.omni.registry import PipelineSpec

__all__ = ["SEQUENCE_HOOKS", "attach"]

#: How their names begin.
SEQUENCE_HOOKS = "diffulex_sequence"

_ModelHook: Any = model_hook()


def attach(pipeline: Any, spec: PipelineSpec, groups: RankGroups) -> None:
    """Registers the hooks on every transformer; its attention gets `groups` as its handle."""
    for name in spec.transformers:
        transformer = getattr(pipeline, name, None)
        if transformer is None:
            continue
        for path, rule in transformer._cp_plan.items():
            is_split = isinstance(rule, Mapping)
            for module in _modules(transformer, path):
                hook = _SplitHook(rule, groups) if is_split else _GatherHook(rule, groups)
                # A module may be named by several paths.
                register_hook(module, hook, f"{SEQUENCE_HOOKS} {path}")
        set_handle(transformer, groups)


def _modules(transformer: torch.nn.Module, path: str) -> list[torch.nn.Module]:
    """Modules of a path; a star stands for every entry of a list."""
    head, star, rest = path.partition(".*")
    module = transformer.get_submodule(head)
    if not star:
        return [module]
    return [child.get_submodule(rest.lstrip(".")) for child in module.children()]


def _split(tensor: Any, rule: Any, groups: RankGroups) -> Any:
    """The part of this rank; what is no tensor, or of another rank, stays."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if rule.expected_dims is not None and tensor.dim() != rule.expected_dims:
        return tensor
    size, ranks = tensor.shape[rule.split_dim], groups.ranks("sp")
    if size < len(ranks):
        raise UnsupportedFeatureError(
            f"sequence parallelism: expected at least {len(ranks)} tokens, one per rank, got {size}"
        )
    return tensor.tensor_split(len(ranks), rule.split_dim)[ranks.index(groups.rank)]


class _SplitHook(_ModelHook):  # type: ignore[misc]
    """Splits arguments by name, and outputs by number."""

    def __init__(self, rules: Mapping[Any, Any], groups: RankGroups) -> None:
        super().__init__()
        self._rules = rules
        self._groups = groups

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        for name, rule in self._rules.items():
            if isinstance(name, str) and name in bound.arguments:
                bound.arguments[name] = _split(bound.arguments[name], rule, self._groups)
        return bound.args[1:], bound.kwargs

    def post_forward(self, _module: Any, output: Any) -> Any:
        numbers = [name for name in self._rules if isinstance(name, int)]
        if not numbers:
            return output
        items = [output] if isinstance(output, torch.Tensor) else list(output)
        for number in numbers:
            items[number] = _split(items[number], self._rules[number], self._groups)
        return items[0] if isinstance(output, torch.Tensor) else tuple(items)


class _GatherHook(_ModelHook):  # type: ignore[misc]
    """Puts the outputs of all ranks side by side."""

    def __init__(self, rule: Any, groups: RankGroups) -> None:
        super().__init__()
        self._rule = rule
        self._groups = groups

    def post_forward(self, _module: Any, output: Any) -> Any:
        group, axis = self._groups.group("sp"), self._rule.gather_dim
        length = torch.tensor([output.shape[axis]], device=output.device)
        lengths = [torch.empty_like(length) for _ in self._groups.ranks("sp")]
        dist.all_gather(lengths, length, group=group)
        longest = max(int(item) for item in lengths)
        # Token axes first: the padding of the last axes is what F.pad speaks of.
        rows = output.movedim(axis, 0)
        own = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, longest - rows.shape[0]]).contiguous()
        pieces = [torch.empty_like(own) for _ in lengths]
        dist.all_gather(pieces, own, group=group)
        whole = torch.cat([piece[: int(n)] for piece, n in zip(pieces, lengths)])
        return whole.movedim(0, axis)
