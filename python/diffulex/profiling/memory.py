# SPDX-License-Identifier: Apache-2.0
"""Where the memory of an engine is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["MemoryReport", "tensor_bytes"]

#: Experts in low precision are the deepest: module, attributes, format, list, weight, list, part, tensor.
_MAX_DEPTH = 8


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of one rank.

    Attributes:
        weights: of the model, packed copies included.
        kv_pool: of all pages.
        workspace: scratch of attention.
        step_buffers: arrays of plans and of the decode loop.
        graph_pools: what the CUDA graphs took when they were captured.
        sampler_state: buffers of the sampler.
        allocated: by torch on the device, all of the above included; None on the CPU.
        reserved: held by torch's allocator on the device; None on the CPU.
        device_free: on the device; None on the CPU.
        device_total: of the device; None on the CPU.
    """

    weights: int
    kv_pool: int
    workspace: int
    step_buffers: int
    graph_pools: int
    sampler_state: int
    allocated: int | None = None
    reserved: int | None = None
    device_free: int | None = None
    device_total: int | None = None

    def as_dict(self) -> dict[str, int | None]:
        """The fields by name."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Every part that is known, in MiB."""
        known = ((name, size) for name, size in self.as_dict().items() if size is not None)
        return ", ".join(f"{name.replace('_', ' ')} {size / 2**20:.1f}" for name, size in known)


def tensor_bytes(*roots: object, without: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the tensors that these objects hold, each storage once.

    Args:
        roots: tensors, collections, modules, or objects with attributes.
        without: storages that count elsewhere.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in without}
    total = 0
    for tensor in _tensors(roots):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _tensors(roots: tuple[object, ...]) -> Iterator[torch.Tensor]:
    """Those that can be reached in a few steps, the nearest first."""
    import torch  # noqa: PLC0415 (slow to import)

    # What was seen is kept, because the identity of a dropped object is used again.
    seen: dict[int, Any] = {}
    level: list[Any] = list(roots)
    for _ in range(_MAX_DEPTH):
        parts: list[Any] = []
        for value in level:
            if isinstance(value, torch.Tensor):
                if not value.is_meta:  # which tells a shape
                    yield value
            elif id(value) not in seen:
                seen[id(value)] = value
                parts += _parts(value)
        level = parts


def _parts(value: Any) -> Iterable[Any]:
    """What an object holds."""
    import torch  # noqa: PLC0415 (slow to import)

    if isinstance(value, torch.nn.Module):
        return (*value.parameters(), *value.buffers(), *map(vars, value.modules()))
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, type) or not (type(value).__module__ or "").startswith("diffulex."):
        return ()
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    held = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).values(), *held]
