# SPDX-License-Identifier: Apache-2.0
"""Step arrays as tensors: the arenas of the core, their device mirror.

On CPU the tensors are views of the arena the core fills. On CUDA the core fills pinned memory, one
copy per step moves the used part to a mirror with the same offsets, so that every tensor has a
static address; the sampler's output arena comes back in one copy. A device that plans decode steps
itself writes into the mirror, so that the CPU has one as well where it plays the device.

Symbols: T rows, R requests, Nb blocks of B positions, n logits rows, P page-table width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from diffulex_ext import _core

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = [
    "ArenaViews",
    "StagedPlan",
    "StepBuffers",
    "StepShape",
    "arena_tensors",
    "device_memory",
    "host_memory",
    "new_event",
]

_ALIGNMENT = 256
# A plan may be filled while the copy of the one before it still runs.
_NUM_STAGING = 2
_DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
}


class ArenaViews:
    """The arrays of an arena at full capacity, as attributes with the names of the core's list.

    include/diffulex/core/plan_arrays.def and output_arrays.def give shapes, dtypes and meanings. An
    array that the strategy or the model has no use for has no elements.

    Args:
        arena: uint8 memory of the arrays.
        fields: their places.
    """

    def __init__(self, arena: Tensor, fields: Iterable[_core.ArenaField]) -> None:
        self._arrays = arena_tensors(arena, fields)
        self._cuts: dict[str, tuple[int, Tensor]] = {}
        self.__dict__.update(self._arrays)

    def first(self, name: str, count: int) -> Tensor:
        """The first `count` entries of an array: the last call's tensor if it had this count."""
        held = self._cuts.get(name)
        if held is None or held[0] != count:
            held = self._cuts[name] = count, self._arrays[name][:count]
        return held[1]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...


class StepShape(NamedTuple):
    """Sizes of a step, dummy requests included."""

    num_rows: int
    num_reqs: int
    num_blocks: int
    num_logits_rows: int
    any_sampled: bool
    num_filtered_rows: int
    num_saved_source_rows: int
    any_penalised: bool = False

    @classmethod
    def of(cls, plan: _core.StepPlan) -> StepShape:
        """The sizes of a filled plan."""
        return cls(
            plan.num_rows,
            plan.num_reqs,
            plan.num_blocks,
            plan.num_logits_rows,
            plan.any_sampled,
            plan.num_filtered_rows,
            plan.num_saved_source_rows,
            plan.any_penalised,
        )


@dataclass(slots=True)
class StagedPlan:
    """A plan, the host memory it lives in, and the tensors of what the device reads."""

    plan: _core.StepPlan
    host: Tensor
    views: ArenaViews
    copied: torch.cuda.Event | None  # the last copy out of `host`; None without a mirror


def host_memory(num_bytes: int, is_pinned: bool) -> Tensor:
    """Zeroed uint8 host memory at an address the core accepts."""
    storage = torch.zeros(num_bytes + _ALIGNMENT, dtype=torch.uint8, pin_memory=is_pinned)
    skip = -storage.data_ptr() % _ALIGNMENT
    return storage[skip : skip + num_bytes]


def device_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Zeroed uint8 memory of the device, aligned as arenas are."""
    if device.type == "cpu":
        return host_memory(num_bytes, is_pinned=False)
    # Device allocations are aligned to 512 bytes.
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def arena_tensors(arena: Tensor, arena_fields: Iterable[_core.ArenaField]) -> dict[str, Tensor]:
    """The arrays of an arena by name."""
    tensors = {}
    for item in arena_fields:
        dtype = _DTYPES[item.dtype]
        num_elements = 1
        for extent in item.shape:
            num_elements *= extent
        part = arena[item.offset : item.offset + num_elements * dtype.itemsize]
        tensors[item.name] = part.view(dtype).view(tuple(item.shape))
    return tensors


def new_event() -> torch.cuda.Event:
    """A CUDA event without timing."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class StepBuffers:
    """Staging of plans and sampler outputs for one engine.

    Copies run on the current stream of `device`, whichever device is current.

    Args:
        options: fix the capacity of every array.
        device: where the model runs.
        has_mirror: the device gets separate arrays even if it is the CPU.
        hosts: memory for the plans, that of `num_plans`; None: it is allocated.
    """

    num_plans = _NUM_STAGING

    def __init__(
        self,
        options: _core.EngineOptions,
        device: torch.device,
        *,
        has_mirror: bool = False,
        hosts: Sequence[Tensor] | None = None,
    ) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        plan_bytes = _core.StepPlan.arena_bytes(options)
        output_bytes = _core.SamplerOutput.arena_bytes(options)
        if hosts is None:
            hosts = [host_memory(plan_bytes, self._is_cuda) for _ in range(_NUM_STAGING)]
        plans = [_core.StepPlan(options, host.data_ptr(), host.numel()) for host in hosts]
        #: Device arena of the plan; None where the device reads the host's.
        self.plan_device: Tensor | None = None
        if self._is_cuda or has_mirror:
            self.plan_device = device_memory(plan_bytes, device)
            views = ArenaViews(self.plan_device, plans[0].fields())
            self._staged = [
                StagedPlan(p, h, views, new_event() if self._is_cuda else None)
                for p, h in zip(plans, hosts, strict=True)
            ]
        else:
            self._staged = [
                StagedPlan(p, h, ArenaViews(h, p.fields()), None)
                for p, h in zip(plans, hosts, strict=True)
            ]
        self._next = 0
        #: Bytes of a plan that another rank has filled.
        self._filled_bytes = 0
        #: Most logits rows of a step; the records of saved rows follow theirs.
        self.max_logits_rows = plans[0].max_logits_rows
        self._output_host = host_memory(output_bytes, self._is_cuda)
        self.output = _core.SamplerOutput(options, self._output_host.data_ptr(), output_bytes)
        #: Arena the sampler writes to.
        self.output_device = self._output_host
        if self.plan_device is not None:
            self.output_device = device_memory(output_bytes, device)
        self.sampler = ArenaViews(self.output_device, self.output.fields())
        # Samplers that never rewrite leave it alone, and the copy brings it back every step.
        self.sampler.same_token_ratio.fill_(1.0)
        self._downloaded = new_event() if self._is_cuda else None

    @property
    def views(self) -> ArenaViews:
        """Device tensors of the plan staged last; static on CUDA."""
        return self._staged[self._next].views

    @property
    def staged(self) -> int:
        """Which plan was staged last."""
        return self._next

    def stage(self, index: int, used_bytes: int) -> None:
        """Another rank has filled that much of the plan `index` in memory that both have."""
        self._next, self._filled_bytes = index, used_bytes

    def next_plan(self) -> _core.StepPlan:
        """The plan to fill for the next step; waits until its memory is no longer read."""
        self._next = (self._next + 1) % _NUM_STAGING
        staged = self._staged[self._next]
        if staged.copied is not None:
            # A step that failed after its upload was never awaited. Returns at once for an event
            # that was not recorded yet.
            staged.copied.synchronize()
        return staged.plan

    def upload(self) -> ArenaViews:
        """Makes the arrays of the current plan visible to the device; one copy, not awaited."""
        staged = self._staged[self._next]
        if self.plan_device is not None:
            used = self._filled_bytes or staged.plan.used_bytes()
            self.plan_device[:used].copy_(staged.host[:used], non_blocking=True)
            if staged.copied is not None:
                staged.copied.record(torch.cuda.current_stream(self.device))
        return staged.views

    def download(self) -> _core.SamplerOutput:
        """The sampler's output on the host: one copy and one wait per step."""
        if self.plan_device is not None:
            self._output_host.copy_(self.output_device, non_blocking=True)
        if self._downloaded is not None:
            self._downloaded.record(torch.cuda.current_stream(self.device))
            self._downloaded.synchronize()
        return self.output
