# SPDX-License-Identifier: Apache-2.0
"""Which kernels the configuration of an engine comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diffulex.ops.device import has_hopper_kernels
from diffulex.profiling.kernel_choices import KernelChoice, OpShapes, kernel_choices
from diffulex.profiling.platform import Platform
from diffulex.quantization.scheme import SCHEMES

if TYPE_CHECKING:
    import torch

    from diffulex.config.config import Config

__all__ = ["choices_of"]


def choices_of(config: Config, device: torch.device) -> list[KernelChoice]:
    """Which kernel each op of a step takes, and why."""
    spec, moe = config.model.spec, config.model.spec.moe
    shapes = OpShapes(
        config.model.dtype,
        tuple(dict.fromkeys(head_dim for *_, head_dim in spec.attention_shapes)),
        config.cache.page_size,
        None if moe is None else (spec.hidden_size, moe.intermediate_size),
        config.kernel.batch_invariant,
        config.model.quantization if config.model.quantization in SCHEMES else None,
        config.cache.kv_cache_dtype != "auto",
    )
    has_hopper = has_hopper_kernels(device)
    return kernel_choices(Platform.of(device.type, device.index, has_hopper=has_hopper), shapes)
