# SPDX-License-Identifier: Apache-2.0
"""Kernels of attention by the name of the setting `attention_backend`.

An installed package adds its own as an entry point `AutoAttentionBackend.<NAME>` of the group
`diffulex.plugins`, a program with `AutoAttentionBackend.register`; such names have capitals and no
hyphens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from diffulex.log import get_logger
from diffulex.omni.errors import UnsupportedFeatureError
from diffulex.registry import Registry

if TYPE_CHECKING:
    from diffulex.omni.attention.kernels import AttentionKernel
    from diffulex.omni.config_table import KernelConfig

__all__ = [
    "DEFAULT_ATTENTION",
    "AutoAttentionBackend",
    "attention_name",
    "make_kernel",
    "usable_kernel",
]

logger = get_logger(__name__)

#: What diffusers does by itself.
DEFAULT_ATTENTION = "TORCH_SDPA"


def _backend_name(config: Any) -> str:
    name: str = config.attention_backend
    return name


#: Name -> subclass of `AttentionKernel`, called as `(KernelConfig)`.
AutoAttentionBackend: Registry[type[Any]] = Registry(
    "AutoAttentionBackend",
    {
        DEFAULT_ATTENTION: "diffulex.omni.attention.kernels:TorchSdpa",
        "MATH": "diffulex.omni.attention.kernels:Math",
        "FLASH_ATTN": "diffulex.omni.attention.kernels:FlashAttention",
        "SAGE_ATTN": "diffulex.omni.attention.kernels:SageAttention",
        "SLIDING_TILE_ATTN": "diffulex.omni.attention.sliding_tile:SlidingTile",
    },
    _backend_name,
)


def attention_name(name: object) -> object:
    """The name of a kernel as the registry has it; what is no text comes back unchanged."""
    return name.strip().upper().replace("-", "_") if isinstance(name, str) else name


def usable_kernel(config: KernelConfig) -> KernelConfig:
    """The settings, with the default kernel where the chosen one's package is missing.

    Raises:
        UnsupportedFeatureError: it is missing and `attention_fallback` is false.
    """
    cls = AutoAttentionBackend.get(config.attention_backend)
    missing = cls.missing_package()
    if missing is None:
        return config
    text = f"attention_backend: expected the package {missing} for {config.attention_backend}, got none"
    if not config.attention_fallback:
        raise UnsupportedFeatureError(text)
    logger.warning("%s; computing with %s", text, DEFAULT_ATTENTION)
    return dataclasses.replace(config, attention_backend=DEFAULT_ATTENTION)


def make_kernel(config: KernelConfig) -> AttentionKernel:
    """The kernel of the settings.

    Raises:
        UnsupportedFeatureError: as `usable_kernel`.
    """
    usable = usable_kernel(config)
    kernel: AttentionKernel = AutoAttentionBackend.get(usable.attention_backend)(usable)
    return kernel
