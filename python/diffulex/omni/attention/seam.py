# SPDX-License-Identifier: Apache-2.0
"""Between the transformers of diffusers and what computes their attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from diffulex.omni._diffusers_compat import set_handle
from diffulex.omni.attention.kernels import TorchSdpa
from diffulex.omni.config_table import KernelConfig
from diffulex.omni.ring_attention import SequenceAttention

if TYPE_CHECKING:
    import torch

    from diffulex.omni.groups import RankGroups
    from diffulex.omni.loader import LoadedPipeline

__all__ = ["AttentionSeam", "make_seam"]


class AttentionSeam:
    """Sends a call to the kernel, or to the ranks that share its tokens.

    Args:
        kernel: of this process.
        shared: attention over the tokens of several ranks; None where this one has all.
    """

    def __init__(self, kernel: Any, shared: SequenceAttention | None) -> None:
        self._kernel = kernel
        self._shared = shared
        self._plain = TorchSdpa(KernelConfig()) if kernel.is_for_tokens else kernel

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
        handle: Any,
    ) -> torch.Tensor:
        """[B, S, H, D]; without a handle the call is not over the tokens of the transformer."""
        if handle is not None and self._shared is not None:
            if mask is not None:
                # [B, 1, 1, S] of the processors.
                mask = mask.reshape(mask.shape[0], mask.shape[-1])
            return self._shared(query, key, value, mask, scale)
        kernel = self._plain if handle is None else self._kernel
        out: torch.Tensor = kernel(
            query, key, value, mask, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa
        )
        return out


def make_seam(loaded: LoadedPipeline, groups: RankGroups | None) -> AttentionSeam | None:
    """What replaces the attention of a pipeline; None where it stays that of diffusers."""
    kernel, pipeline, spec = loaded.attention, loaded.pipeline, loaded.spec
    is_shared = groups is not None and groups.group("sp") is not None
    if kernel is None and not is_shared:
        return None
    if kernel is not None:
        kernel.attach(pipeline, spec)
        for name in spec.transformers:
            transformer = getattr(pipeline, name, None)
            # Where tokens are shared, their handle is set with the hooks of that.
            if transformer is not None and not is_shared:
                set_handle(transformer, kernel)
    used = kernel or TorchSdpa(KernelConfig())
    if groups is None or not is_shared:
        return AttentionSeam(used, None)
    shared = SequenceAttention(groups, used)
    for name in spec.transformers:
        transformer = getattr(pipeline, name, None)
        if transformer is not None:
            transformer.register_forward_pre_hook(lambda *_: shared.begin())
    return AttentionSeam(used, shared)
