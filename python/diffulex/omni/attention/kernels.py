# SPDX-License-Identifier: Apache-2.0
"""Attention of one call: tensors [B, S, H, D]; a mask is bool [B, S] or broadcasts to the scores.

Torch is imported when a kernel is made: what is asked before that needs none of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from diffulex.omni.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    import torch

    from diffulex.omni.config_table import KernelConfig
    from diffulex.omni.registry import PipelineSpec

__all__ = ["AttentionKernel", "FlashAttention", "Math", "SageAttention", "TorchSdpa"]


class AttentionKernel:
    """Base of all kernels.

    Args:
        config: its settings.

    Attributes:
        modules: any of these must be importable.
        needs_cuda: it has no other kernels, and none for float32.
        head_sizes: what it can do; empty: all.
        media: of the pipelines that it is for.
        is_for_tokens: whether it is told the tokens of the transformer alone, and not a text's.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    needs_cuda: ClassVar[bool] = False
    head_sizes: ClassVar[tuple[int, ...]] = ()
    media: ClassVar[tuple[str, ...]] = ("image", "video")
    is_for_tokens: ClassVar[bool] = False

    def __init__(self, config: KernelConfig) -> None:
        self.config = config

    @classmethod
    def missing_package(cls) -> str | None:
        """The package that would have to be installed; None where nothing is missing."""
        if not cls.modules or any(importlib.util.find_spec(name) for name in cls.modules):
            return None
        return cls.modules[-1]

    @classmethod
    def check(cls, name: str, device: str, dtype: str, head_size: int | None) -> None:
        """Compares device, dtype and width of a head with what the kernel can do.

        Raises:
            UnsupportedFeatureError: it cannot do one of them.
        """
        if cls.needs_cuda and (device == "cpu" or dtype == "float32"):
            got = device if device == "cpu" else dtype
            raise UnsupportedFeatureError(
                f"attention_backend: expected CUDA and 16-bit numbers for {name}, got {got}"
            )
        if cls.head_sizes and head_size is not None and head_size not in cls.head_sizes:
            sizes = ", ".join(map(str, cls.head_sizes))
            raise UnsupportedFeatureError(
                f"attention_backend: expected heads of {sizes} for {name}, got {head_size}"
            )

    def attach(self, pipeline: Any, spec: PipelineSpec) -> None:
        """Tells the kernel of its pipeline, once."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """[B, S, H, D]."""
        raise NotImplementedError


def _wide(mask: torch.Tensor | None) -> torch.Tensor | None:
    """[B, 1, 1, S] of a mask [B, S]."""
    return mask[:, None, None, :] if mask is not None and mask.dim() == 2 else mask


class TorchSdpa(AttentionKernel):
    """`scaled_dot_product_attention` of PyTorch, which chooses among its kernels."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        import torch  # noqa: PLC0415

        q, k, v = (item.permute(0, 2, 1, 3) for item in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, _wide(mask), 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out.permute(0, 2, 1, 3)


class Math(AttentionKernel):
    """Products and a softmax in float32: what the others are compared with."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        import torch  # noqa: PLC0415

        q, k, v = (item.permute(0, 2, 1, 3).float() for item in (query, key, value))
        if enable_gqa:
            k, v = (item.repeat_interleave(q.shape[1] // k.shape[1], 1) for item in (k, v))
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        visible = _wide(mask)
        if visible is not None and visible.dtype == torch.bool:
            scores = scores.masked_fill(~visible, -torch.inf)
        elif visible is not None:
            scores = scores + visible
        if is_causal:
            rows, columns = scores.shape[-2:]
            later = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        # A row that sees nothing gives 0, as the kernels of PyTorch do.
        weights = scores.softmax(-1).nan_to_num(0.0)
        return (weights @ v).permute(0, 2, 1, 3).to(query.dtype)


class _WithoutMasks(TorchSdpa):
    """A kernel of another package that knows no masks; calls that need one go to PyTorch."""

    needs_cuda = True

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        name = next(name for name in self.modules if importlib.util.find_spec(name))
        self._module = importlib.import_module(name)
        #: The last mask and whether it hides something: the blocks of a step share one.
        self._last: tuple[Any, bool] = (lambda: None, False)

    def _hides(self, mask: torch.Tensor) -> bool:
        import torch  # noqa: PLC0415

        known, hides = self._last
        if known() is not mask:
            hides = not bool((mask if mask.dtype == torch.bool else mask == 0).all())
            self._last = (weakref.ref(mask), hides)
        return hides

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if mask is not None and self._hides(mask):
            return super().__call__(
                query, key, value, mask, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa
            )
        out = self._attend(query, key, value, scale, is_causal)
        # Some versions give the logarithm of the sums as well.
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first

    def _attend(self, query: Any, key: Any, value: Any, scale: Any, is_causal: bool) -> Any:
        raise NotImplementedError


class FlashAttention(_WithoutMasks):
    """FlashAttention 3 where it can be imported, else 2."""

    modules = ("flash_attn_interface", "flash_attn")
    head_sizes = (64, 96, 128, 192, 256)

    def _attend(self, query: Any, key: Any, value: Any, scale: Any, is_causal: bool) -> Any:
        attend = self._module.flash_attn_func
        return attend(query, key, value, softmax_scale=scale, causal=is_causal)


class SageAttention(_WithoutMasks):
    """Products in 8-bit integers: faster, and not the same picture."""

    modules = ("sageattention",)
    head_sizes = (32, 64, 96, 128, 160, 192, 224, 256)

    def _attend(self, query: Any, key: Any, value: Any, scale: Any, is_causal: bool) -> Any:
        attend = self._module.sageattn
        return attend(query, key, value, tensor_layout="NHD", is_causal=is_causal, sm_scale=scale)
