# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of the attention kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.ops.workspace import attention_workspace_bytes, empty_workspace

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from diffulex.families.spec import ModelSpec
    from diffulex.runner.decode_graphs import Bucket

__all__ = ["AttentionWorkspace", "decode_workspace_bytes"]


def _needed_bytes(
    spec: ModelSpec, num_reqs: int, rows: int, max_context_len: int, device_type: str
) -> int:
    """Scratch of one forward; layers use it in turn."""
    return max(
        attention_workspace_bytes(num_reqs, *shape, rows, max_context_len, 0, device_type)
        for shape in spec.attention_shapes
    )


def decode_workspace_bytes(spec: ModelSpec, shapes: Iterable[Bucket], device_type: str) -> int:
    """Attention scratch that suffices for each of these decode steps.

    Not that of the largest: small batches split the keys, large ones need not.
    """
    return max(_needed_bytes(spec, *shape[:3], device_type) for shape in shapes)


class AttentionWorkspace:
    """Scratch of eager steps; grows, and the old one is freed. Graphs have their own."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self.memory: torch.Tensor | None = None
        self._num_bytes = 0

    def of(self, num_reqs: int, max_seqlen_q: int, max_context_len: int) -> torch.Tensor | None:
        """Scratch of a step, so that steady state allocates nothing."""
        needed = _needed_bytes(
            self._spec, num_reqs, max_seqlen_q, max_context_len, self._device.type
        )
        if needed > self._num_bytes:
            self.memory = empty_workspace(needed, self._device)
            self._num_bytes = needed
        return self.memory if needed > 0 else None

    def release(self) -> None:
        """Frees the memory; the next step takes new one."""
        self.memory, self._num_bytes = None, 0
