# SPDX-License-Identifier: Apache-2.0
"""Two ranks that each run one branch of classifier-free guidance."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from diffulex.omni._diffusers_compat import (
    context_name,
    make_context_state,
    model_hook,
    register_hook,
)
from diffulex.omni.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    from diffulex.omni.groups import RankGroups
    from diffulex.omni.registry import PipelineSpec

__all__ = ["CfgHook", "attach"]

_NAME = "diffulex_cfg"
_ModelHook: Any = model_hook()


def attach(pipeline: Any, spec: PipelineSpec, groups: RankGroups) -> list[CfgHook]:
    """Registers a hook on every transformer, outside of all hooks so far."""
    hooks = []
    for name in spec.transformers:
        transformer = getattr(pipeline, name, None)
        if transformer is None:
            continue
        hook = CfgHook(spec, groups)
        register_hook(transformer, hook, _NAME)
        hooks.append(hook)
    return hooks


class CfgHook(_ModelHook):  # type: ignore[misc]
    """Runs the branch of this rank and gets the other one.

    Pipelines with two calls read neither output before the second call has returned. So the call of the
    other rank's branch returns memory that is filled, in place, when both are known.

    Attributes:
        is_active: whether the running call of the pipeline has guidance.
        batch: images of the running call.
    """

    _is_stateful = True

    def __init__(self, spec: PipelineSpec, groups: RankGroups) -> None:
        super().__init__()
        assert spec.cfg is not None
        self.is_active = False
        self.batch = 0
        self._cfg = spec.cfg
        self._group = groups.group("cfg")
        self._ranks = groups.ranks("cfg")
        self._place = groups.coords["cfg"]
        #: diffusers sets the name of the branch on attributes of this class.
        self._context = make_context_state()
        self._pending: torch.Tensor | None = None

    def reset_state(self, module: Any) -> Any:
        self._pending = None
        return module

    def new_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.fn_ref.original_forward
        if not self.is_active:
            return forward(*args, **kwargs)
        bound = inspect.signature(forward).bind(*args, **kwargs)
        if self._cfg.batched:
            return self._batched(forward, bound)
        if kwargs.get("return_dict") is not False:
            raise UnsupportedFeatureError("cfg_parallel_size: expected calls that return a tuple")
        return (self._sequential(module, forward, bound),)

    def _sequential(self, module: Any, forward: Any, bound: inspect.BoundArguments) -> torch.Tensor:
        name = context_name(self._context)
        if name == "cond":
            if self._pending is not None:
                raise RuntimeError("cfg: expected the call uncond, got a second cond")
            if self._place == 0:
                own: torch.Tensor = forward(*bound.args, **bound.kwargs)[0]
                self._pending = own
            else:
                assert self._cfg.output_like is not None
                shape = self._cfg.output_like(module, bound.arguments)
                self._pending = torch.full(
                    shape,
                    torch.nan,
                    dtype=bound.arguments["hidden_states"].dtype,
                    device=bound.arguments["hidden_states"].device,
                )
            return self._pending
        if name != "uncond" or self._pending is None:
            raise RuntimeError(f"cfg: expected the calls cond and uncond, got {name}")
        cond, self._pending = self._pending, None
        if self._place == 1:
            uncond: torch.Tensor = forward(*bound.args, **bound.kwargs)[0].contiguous()
            if (uncond.shape, uncond.dtype) != (cond.shape, cond.dtype):
                raise RuntimeError(
                    f"cfg: expected an output {list(cond.shape)} {cond.dtype}, got"
                    f" {list(uncond.shape)} {uncond.dtype}"
                )
        else:
            uncond = torch.empty(cond.shape, dtype=cond.dtype, device=cond.device)
        whole = cond if cond.is_contiguous() else cond.contiguous()
        dist.broadcast(whole, self._ranks[0], group=self._group)
        dist.broadcast(uncond, self._ranks[1], group=self._group)
        return uncond

    def _batched(self, forward: Any, bound: inspect.BoundArguments) -> Any:
        values = {name: bound.arguments[name] for name in self._cfg.batched}
        # Some pipelines leave guidance out at some steps: their calls have one branch.
        if any(len(value) != 2 * self.batch for value in values.values()):
            return forward(*bound.args, **bound.kwargs)
        first = self._place * self.batch
        for name, value in values.items():
            bound.arguments[name] = value[first : first + self.batch]
        output = forward(*bound.args, **bound.kwargs)[0]
        is_list = isinstance(output, (list, tuple))
        own = (torch.stack(tuple(output)) if is_list else output).contiguous()
        halves = [torch.empty_like(own) for _ in self._ranks]
        dist.all_gather(halves, own, group=self._group)
        both = torch.cat(halves)
        return (list(both.unbind()) if is_list else both,)
