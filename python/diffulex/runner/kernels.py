# SPDX-License-Identifier: Apache-2.0
"""Which kernels the configuration of an engine comes to."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from diffulex.nn.linear import MatrixProduct
from diffulex.ops.device import has_hopper_kernels
from diffulex.profiling.kernel_choices import (
    CodedProducts,
    KernelChoice,
    OpShapes,
    kernel_choices,
)
from diffulex.profiling.platform import Platform
from diffulex.quantization.experts import QuantizedExperts
from diffulex.quantization.weights import QuantizedWeight

if TYPE_CHECKING:
    import torch

    from diffulex.config.config import Config

__all__ = ["choices_of"]


def choices_of(config: Config, device: torch.device, model: object) -> list[KernelChoice]:
    """Which kernel each op of a step takes, and why; weights have the form that products want."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    formats = [module.format for module in modules if isinstance(module, MatrixProduct)]
    held = [weight for weight in formats if isinstance(weight, QuantizedWeight)]
    counts = Counter(weight.scheme for weight in held)
    unfit = Counter(weight.scheme for weight in held if not weight.suits_hopper)
    experts = (getattr(module, "matrices", None) for module in modules)
    coded = [each for each in experts if isinstance(each, QuantizedExperts)]
    unfit_experts = sum(not each.suits_hopper for each in coded)
    spec, moe = config.model.spec, config.model.spec.moe
    shapes = OpShapes(
        config.model.dtype,
        tuple(dict.fromkeys(head_dim for *_, head_dim in spec.attention_shapes)),
        config.cache.page_size,
        None if moe is None else (spec.hidden_size, moe.intermediate_size),
        config.kernel.batch_invariant,
        config.cache.kv_cache_dtype != "auto",
        tuple(CodedProducts(s.name.lower(), n, unfit[s]) for s, n in counts.items()),
        CodedProducts(coded[0].scheme.name.lower(), len(coded), unfit_experts) if coded else None,
        len(held) < len(formats) or not modules,
    )
    has_hopper = has_hopper_kernels(device)
    return kernel_choices(Platform.of(device.type, device.index, has_hopper=has_hopper), shapes)
